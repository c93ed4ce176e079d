"""Where text may be divided for the ``tokenizers`` library, so that the ids of the parts are those of the whole.

Owns: the places that GPT-2's pattern guarantees, and words too long to learn from. Must not know: vocabularies, files.

[Note: Where text may be divided]
The ``tokenizers`` library works on the texts of a batch with as many threads as it finds cores, on each text with one;
short texts stay in a core's cache and take half the time. So texts are divided for it, where that changes nothing:
GPT-2's pattern cuts text into words before pairs are merged, no word goes on over whitespace that follows something
else, nor from a letter or digit to what is neither, and what is to the right of such a place does not look to the left
of it. So the ids of the parts, one after another, are those of the whole, whatever the number of cores.

[Note: Long words]
What is learned from is a table of distinct words, and each merge takes time in proportion to the words it is in: one
word of a megabyte takes hours. So words of more than ``text_len`` characters and some are learned from in pieces. They
are encoded whole: that takes no longer than for short ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

LONG_WORD = 1000  # characters of each piece that a word is learned from in

# Letters, digits and signs that are such by every version of Unicode; where the library knows more, nothing is lost.
LETTERS = "0-9A-Za-zÀ-ÖØ-öø-ɏΑ-Ρα-ωА-яぁ-ゖァ-ヺ一-龥가-힣"
SIGNS = r"!-/:-@\[-`{-~¡-§«¬¶·»¿‐-‧‰-⁞、-〃〈-】〔-〟！-／：-＠［-｀｛-･"
# \S is no whitespace for the library either, whose set is smaller. See [Note: Where text may be divided].
_PLACE = re.compile(rf"\S(?=[ \n])|[{LETTERS}](?=[{SIGNS}])")

Words = Callable[[str], list[tuple[str, tuple[int, int]]]]


def divided(text: str, length: int) -> Iterator[str]:
    """Parts of ``length`` characters or a few more. See [Note: Where text may be divided]."""
    start = 0
    while start < len(text):
        found = _PLACE.search(text, start + length - 1)
        end = found.end() if found is not None else len(text)
        yield text[start:end]
        start = end


def learnable(
    text: str, text_len: int, words: Words, on_long_word: Callable[[], None]
) -> Iterator[str]:
    """Parts whose words are those of ``text``, but for long ones, which come in pieces. See [Note: Long words].

    Args:
        text: to learn from.
        text_len: characters of a part, at least, where there are no long words.
        words: of a text, with their begin and end in it.
        on_long_word: called for each that is cut.
    """
    window = text_len + LONG_WORD
    for part in divided(text, text_len):
        start = 0
        while len(part) - start > window:
            shown = part[start : start + window]
            # The end of the window may change what its last two are: "'" and "r", where "'re" is one word.
            last = words(shown)[-2:][0][1][0]
            if last == 0:
                on_long_word()
                last = LONG_WORD
            yield shown[:last]
            start += last
        yield part[start:]
