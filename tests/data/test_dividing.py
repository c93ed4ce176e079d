"""Where text is divided, held against the words that the library itself makes of it."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from hpczero.data import BPETokenizer, dividing
from hpczero.data.dividing import LETTERS, LONG_WORD, SIGNS, divided, learnable

PRE = pre_tokenizers.ByteLevel(add_prefix_space=False)
SCRIPTS = st.text(st.sampled_from([*"ab7'，。、.,(-_“sdltmrve é中ア한жα☃\u0301\n"]), max_size=80)


def words(text: str) -> list[str]:
    return [word for word, _ in PRE.pre_tokenize_str(text)]


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


@given(text=SCRIPTS, length=st.integers(1, 9))
def test_words_of_parts_are_those_of_the_whole(text: str, length: int) -> None:
    parts = list(divided(text, length))
    assert "".join(parts) == text
    assert [word for part in parts for word in words(part)] == words(text)


def test_text_without_spaces_is_divided_at_its_punctuation() -> None:
    text = "中文没有空格，" * 10_000
    assert max(map(len, divided(text, 100))) < 110


@given(text=SCRIPTS, text_len=st.integers(2, 7), long_word=st.integers(2, 5))
def test_what_is_learned_from_has_the_words_of_the_text_but_for_long_ones(
    text: str, text_len: int, long_word: int
) -> None:
    told: list[None] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dividing, "LONG_WORD", long_word)
        parts = list(learnable(text, text_len, PRE.pre_tokenize_str, lambda: told.append(None)))
    assert "".join(parts) == text
    whole = words(text)
    if max(map(len, whole), default=0) <= max(text_len - 3, 0):  # a contraction has three
        assert not told
    if not told:
        assert [word for part in parts for word in words(part)] == whole


@pytest.mark.parametrize("one", [" ", "a", "7", "\n", "😀", "中", ","])
def test_run_of_one_character_is_learned_from_in_pieces_and_encoded_whole(one: str) -> None:
    text = one * 60_000
    told: list[None] = []
    parts = list(learnable(text, 4096, PRE.pre_tokenize_str, lambda: told.append(None)))
    assert "".join(parts) == text
    assert told
    assert max(map(len, parts)) <= 4096 + LONG_WORD
    bpe = BPETokenizer.train([text.encode()], vocab_size=300)
    assert bpe.encode(text.encode()).tolist() == bpe.model.encode(text).ids
    assert bpe.decode(bpe.encode(text.encode()).tolist()).decode() == text
