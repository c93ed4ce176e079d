"""Where text may be divided for the ``tokenizers`` library, so that the ids of the parts are those of the whole.

Owns: the places that GPT-2's pattern guarantees, and words too long to learn from. Must not know: vocabularies, files.

[Note: Where text may be divided]
The ``tokenizers`` library works on the texts of a batch with as many threads as it finds cores, and on each text with
one thread. Short texts stay in a core's cache and take half the time. Texts are therefore divided where that changes no
id. GPT-2's pattern cuts text into words before pairs are merged. No word goes on over whitespace that follows something
else, nor from a letter or digit to what is neither. What is to the right of such a place does not look to the left of
it. The ids of the parts, one after another, are thus those of the whole, for any number of cores.

[Note: Long words]
Training works on a table of distinct words, and each merge takes time in proportion to the words it is in. One word of
a megabyte takes hours. Words of a little more than ``text_len`` characters are therefore learned from in pieces. They
are encoded whole, which takes no longer than for short ones.
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
        on_long_word: called for each word that is cut.
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
