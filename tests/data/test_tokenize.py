"""Tokenizers: nothing is lost on the way there and back."""

from __future__ import annotations

import json
import random
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from hpczero.data import BPETokenizer, ByteTokenizer, tokenize
from hpczero.data.tokenize import LETTERS, LONG_WORD, SIGNS, divided, from_json, learnable
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


def test_vocabulary_learnt_from_parts_is_that_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
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


# --- where text is divided, compared with the words that the library itself makes of it


PRE = pre_tokenizers.ByteLevel(add_prefix_space=False)
SCRIPTS = st.text(st.sampled_from([*"ab7'，。、.,(-_“sdltmrve é中ア한жα☃\u0301\n"]), max_size=80)


def words(text: str) -> list[str]:
    return [word for word, _ in PRE.pre_tokenize_str(text)]


def pieces(text: str) -> list[str]:
    """The words as they are in the text, where a character is one."""
    return [text[begin:end] for _, (begin, end) in PRE.pre_tokenize_str(text)]


def characters(of: str) -> list[str]:
    every = map(chr, [*range(0xD800), *range(0xE000, 0x110000)])
    return [one for one in every if re.match(f"[{of}]", one)]


@pytest.mark.parametrize(
    ("of", "pattern"), [(LETTERS, "{},"), (LETTERS, "{}'s"), (SIGNS, "a{}"), (SIGNS, "7{}")]
)
def test_no_word_goes_on_from_any_letter_to_any_sign(of: str, pattern: str) -> None:
    one_by_one = [word for one in characters(of) for word in words(pattern.format(one))]
    assert len(characters(of)) > 100
    places = [pattern.format(one) for one in characters(of)]
    assert all(len(list(divided(text, 1))) >= 2 for text in places)
    assert one_by_one == [
        word for text in places for part in divided(text, 1) for word in words(part)
    ]


# Whitespace of all kinds, a sign that is whitespace for Python alone, what contractions are made of, several scripts.
ONES = " \n\t\r\x0b\x1c\x85\xa0\u2003\u3000'a7é中☃_.，(アж"
SPACED = st.lists(st.sampled_from([*ONES, "  ", "\n\n", "'s", "'ll", "def"]), max_size=60)


@given(text=SPACED.map("".join) | SCRIPTS, length=st.integers(1, 9))
def test_words_and_ids_of_parts_are_those_of_the_whole(
    bpe: BPETokenizer, text: str, length: int
) -> None:
    parts = list(divided(text, length))
    assert "".join(parts) == text
    assert all(len(part) >= length for part in parts[:-1])
    assert [word for part in parts for word in words(part)] == words(text)
    found = [index for part in parts for index in bpe.model.encode(part).ids]
    assert found == bpe.model.encode(text).ids == bpe.encode(text.encode()).tolist()


def test_text_without_spaces_is_divided_at_its_punctuation() -> None:
    text = "中文没有空格，" * 10_000
    assert max(map(len, divided(text, 100))) < 110


@given(text=SCRIPTS, text_len=st.integers(2, 7), long_word=st.integers(8, 12))
def test_what_is_learned_from_has_the_words_of_the_text_but_for_long_ones(
    text: str, text_len: int, long_word: int
) -> None:
    told: list[None] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenize, "LONG_WORD", long_word)
        parts = list(learnable(text, text_len, PRE.pre_tokenize_str, lambda: told.append(None)))
    assert "".join(parts) == text
    whole = pieces(text)
    assert bool(told) == any(len(word) > long_word for word in whole)
    learned = [word for part in parts for word in pieces(part)]
    assert all(len(word) <= long_word for word in learned)
    kept = [word for word in whole if len(word) <= long_word]
    assert not Counter(kept) - Counter(learned)
    if not told:
        assert learned == whole


@pytest.mark.parametrize("one", [" ", "a", "7", "\n", "😀", "中", ","])
def test_run_of_one_character_is_learned_from_in_pieces_and_encoded_whole(one: str) -> None:
    text = one * 60_000
    told: list[None] = []
    parts = list(learnable(text, 4096, PRE.pre_tokenize_str, lambda: told.append(None)))
    assert "".join(parts) == text
    assert told
    assert max(map(len, parts)) <= LONG_WORD
    bpe = BPETokenizer.train([text.encode()], vocab_size=300)
    assert bpe.encode(text.encode()).tolist() == bpe.model.encode(text).ids
    assert bpe.decode(bpe.encode(text.encode()).tolist()).decode() == text


@pytest.mark.parametrize("length", [300_000, 3000])
def test_learning_from_long_words_takes_no_longer_than_from_so_many_short_ones(length: int) -> None:
    """By the letters that all merges read: 300,000 of them in words of this length had 300 million and 3 million."""
    drawn = random.Random(5).choices("abcdefghijklmnopqrstuvwxyz", k=300_000)
    text = "\n".join("".join(drawn[at : at + length]) for at in range(0, len(drawn), length))
    parts = list(learnable(text, 4096, PRE.pre_tokenize_str, lambda: None))
    read = sum(len(word) ** 2 for part in parts for word in words(part))
    assert read <= 300_000 * LONG_WORD


def test_text_of_ordinary_words_is_not_looked_at_word_by_word() -> None:
    text = (
        "def divided(text: str, length: int) -> Iterator[str]:\n    start = 0\n中文没有空格，"
        * 1000
    )
    looks: list[str] = []

    def looked(part: str) -> list[tuple[str, tuple[int, int]]]:
        looks.append(part)
        found: list[tuple[str, tuple[int, int]]] = PRE.pre_tokenize_str(part)
        return found

    assert "".join(learnable(text, 4096, looked, lambda: None)) == text
    assert not looks
