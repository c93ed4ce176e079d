"""Where text may be divided for the ``tokenizers`` library, so that the ids of the parts are those of the whole.

Owns: the places that GPT-2's pattern guarantees, and words too long to learn from. Must not know: vocabularies, files.

[Note: Where text may be divided]
The ``tokenizers`` library works on the texts of a batch with as many threads as it finds cores, and on each text with
one thread. Short texts stay in a core's cache and take half the time. Texts are therefore divided where that changes no
id. GPT-2's pattern cuts text into words before pairs are merged. No word goes on over whitespace that follows something
else, nor from a letter or digit to what is neither. What is to the right of such a place does not look to the left of
it. The ids of the parts, one after another, are thus those of the whole, for any number of cores.

[Note: Long words]
Training works on a table of distinct words, and each merge reads all words that it is in. All merges together thus read
at most as many characters as the text has, times the length of its longest word. Words of more than ``LONG_WORD``
characters are therefore learned from in pieces. They are encoded whole, which takes no longer than for short ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import pairwise

LONG_WORD = 256  # characters that a word is learned from in at once
CONTRACTION = 3  # characters of the longest one, such as 're

# Letters, digits and signs that are such by every version of Unicode; where the library knows more, nothing is lost.
LETTERS = "0-9A-Za-zÀ-ÖØ-öø-ɏΑ-Ρα-ωА-яぁ-ゖァ-ヺ一-龥가-힣"
SIGNS = r"!-/:-@\[-`{-~¡-§«¬¶·»¿‐-‧‰-⁞、-〃〈-】〔-〟！-／：-＠［-｀｛-･"
# \S is no whitespace for the library either, whose set is smaller. See [Note: Where text may be divided].
_PLACE = re.compile(rf"\S(?=[ \n])|[{LETTERS}](?=[{SIGNS}])")

Words = Callable[[str], list[tuple[str, tuple[int, int]]]]


def divided(text: str, length: int) -> Iterator[str]:
    """Parts of ``length`` characters or a few more ([Note: Where text may be divided])."""
    start = 0
    while start < len(text):
        found = _PLACE.search(text, start + length - 1)
        end = found.end() if found is not None else len(text)
        yield text[start:end]
        start = end


def learnable(
    text: str, text_len: int, words: Words, on_long_word: Callable[[], None]
) -> Iterator[str]:
    """Parts with the words of ``text``, but long words in pieces ([Note: Long words]).

    Args:
        text: to learn from.
        text_len: least characters of a part, unless words are long.
        words: gives the words of a text, with their begin and end in it.
        on_long_word: called for each word that is cut, at least once.
    """
    for part in divided(text, text_len):
        if _may_have_long_word(part):
            yield from _with_words_cut(part, text_len, words, on_long_word)
        else:
            yield part


def _may_have_long_word(text: str) -> bool:
    """Whether half of a long word's length is anywhere without a place to divide at; a quick look."""
    half = LONG_WORD // 2
    ends = range(half, len(text) + 1, half)
    return any(_PLACE.search(text, end - half, end) is None for end in ends)


def _with_words_cut(
    text: str, text_len: int, words: Words, on_long_word: Callable[[], None]
) -> Iterator[str]:
    """``text`` in parts. Where a word is long, each word is a part, or several."""
    window, start = max(text_len, 2 * LONG_WORD) + LONG_WORD, 0
    while start < len(text):
        shown = text[start : start + window]
        ends = [end for _, (_, end) in words(shown)]
        if start + window < len(text):
            ends = _certain(ends) or [window - LONG_WORD]  # within the one word that is shown
        spans = list(pairwise([0, *ends]))
        if all(end - begin <= LONG_WORD for begin, end in spans):
            yield shown[: ends[-1]]
        else:
            on_long_word()
            for begin, end in spans:
                for at in range(begin, end, LONG_WORD):
                    yield shown[at : min(at + LONG_WORD, end)]
        start += ends[-1]


def _certain(ends: list[int]) -> list[int]:
    """Ends of words, without those that text behind the last one may change: "'" and "r", where "'re" is one word."""
    last = ends[-1] - (ends[-2] if len(ends) > 1 else 0)
    return ends[:-1] if last > CONTRACTION else ends[:-2]
