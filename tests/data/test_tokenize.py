"""Tokenizers: nothing is lost on the way there and back."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpczero.data import BPETokenizer, ByteTokenizer, tokenize
from hpczero.data import tokenize as dividing
from hpczero.data.tokenize import from_json
from hpczero.errors import ConfigError, DataError

TEXT = "def main():\n    return 'naïve – ☃'\n" * 20


@pytest.fixture(scope="module")
def bpe() -> BPETokenizer:
    return BPETokenizer.train([TEXT.encode(), b"class Main:\n    pass\n" * 9], vocab_size=300)


@given(text=st.binary(max_size=200))
def test_bytes_round_trip_any_input(text: bytes) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.tolist() == list(text)
    assert tokenizer.decode([*ids.tolist(), tokenizer.separator]) == text
    assert tokenizer.vocab_size == tokenizer.separator + 1 == 257


@given(text=st.text(max_size=100))
def test_bpe_round_trips_any_text(bpe: BPETokenizer, text: str) -> None:
    ids = bpe.encode(text.encode()).tolist()
    assert bpe.decode([*ids, bpe.separator]) == text.encode()
    assert all(0 <= index < bpe.separator for index in ids)


# Whitespace of all kinds, a sign that is whitespace for Python alone, what contractions are made of, several scripts.
PIECES = st.sampled_from(
    [
        *" \n\t\r\x0b\x1c\x85\xa0\u2003\u3000'",
        "  ",
        "\n\n",
        "'s",
        "'ll",
        "a",
        "def",
        "7",
        "é",
        "中",
        "☃",
        "_",
        ".",
        "，",
        "(",
        "ア",
        "ж",
    ]
)


@given(pieces=st.lists(PIECES, max_size=60), length=st.integers(1, 9))
def test_ids_of_parts_are_those_of_the_whole(
    bpe: BPETokenizer, pieces: list[str], length: int
) -> None:
    text = "".join(pieces)
    parts = list(dividing.divided(text, length))
    assert "".join(parts) == text
    assert all(len(part) >= length for part in parts[:-1])
    found = [index for part in parts for index in bpe.model.encode(part).ids]
    assert found == bpe.model.encode(text).ids == bpe.encode(text.encode()).tolist()


def test_vocabulary_learnt_from_parts_is_that_of_the_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = "".join(f"def f{n}(x):\n\n    return  x * {n}  # naïve – ☃\n" for n in range(300))
    whole = BPETokenizer.train([text.encode()], vocab_size=400)
    monkeypatch.setattr(tokenize, "TEXT_LEN", 5)
    assert BPETokenizer.train([text.encode()], vocab_size=400).to_json() == whole.to_json()


def test_long_texts_are_handed_out_in_parts_that_lose_nothing(
    bpe: BPETokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenize, "PART_LEN", 100)
    parts = list(bpe.parts(TEXT.encode()))
    assert len(parts) > 5
    assert b"".join(parts) == TEXT.encode()
    together = [index for ids in bpe.encode_all(parts) for index in ids.tolist()]
    assert together == bpe.encode(TEXT.encode()).tolist()
    assert [ids.tolist() for ids in bpe.encode_all([b"", b"x"])] == [[], bpe.encode(b"x").tolist()]


def test_bpe_merges_what_is_frequent(bpe: BPETokenizer) -> None:
    ids = bpe.encode(TEXT.encode())
    assert len(ids) < len(TEXT.encode()) / 2
    assert ids.max() >= 256
    assert bpe.vocab_size <= 300


def test_bpe_learns_the_same_vocabulary_again(bpe: BPETokenizer) -> None:
    again = BPETokenizer.train([TEXT.encode(), b"class Main:\n    pass\n" * 9], vocab_size=300)
    assert again.to_json() == bpe.to_json()


def test_vocabulary_of_a_tiny_corpus_is_what_it_yields() -> None:
    tokenizer = BPETokenizer.train([b"ab"], vocab_size=1000)
    assert tokenizer.vocab_size == 258  # bytes, one merge, the separator
    assert tokenizer.encode(b"ab").tolist() == [256]


def test_tokenizers_survive_json(bpe: BPETokenizer) -> None:
    for tokenizer in (bpe, ByteTokenizer()):
        again = from_json(tokenizer.to_json())
        assert type(again) is type(tokenizer)
        assert (again.vocab_size, again.separator) == (tokenizer.vocab_size, tokenizer.separator)
        assert again.encode(TEXT.encode()).tolist() == tokenizer.encode(TEXT.encode()).tolist()


def test_text_that_is_not_utf8_is_refused_by_bpe_alone(bpe: BPETokenizer) -> None:
    with pytest.raises(DataError, match="byte 0xff at offset 3 is not UTF-8"):
        bpe.encode(b"abc\xff")
    assert ByteTokenizer().encode(b"abc\xff").tolist()[-1] == 255


def test_vocabulary_too_small_for_bytes_is_refused() -> None:
    with pytest.raises(ConfigError, match="BPE vocabulary of 257, expected more than 257"):
        BPETokenizer.train([b"text"], vocab_size=257)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"kind": "words"}', '{"kind": "bpe"}', '{"kind": "bpe", "model": {}}']
)
def test_malformed_descriptions_are_refused(text: str) -> None:
    with pytest.raises(DataError, match="prepare the tokens again"):
        from_json(text)
    assert json.loads(ByteTokenizer().to_json())["kind"] == "bytes"
