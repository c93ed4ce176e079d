"""Text to token ids and back: the tokenizers, and their JSON form, which travels inside the token file."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from hpczero.errors import ConfigError, DataError

if TYPE_CHECKING:
    import tokenizers


# Where text may be divided for the ``tokenizers`` library, so that the ids of the parts are those of the whole.
#
# [Note: Where text may be divided]
# The ``tokenizers`` library works on the texts of a batch with as many threads as it finds cores, and on each text with
# one thread. Short texts stay in a core's cache and take half the time. Texts are therefore divided where that changes
# no id. GPT-2's pattern cuts text into words before pairs are merged. No word goes on over whitespace that follows
# something else, nor from a letter or digit to what is neither. What is to the right of such a place does not look to
# the left of it. The ids of the parts, one after another, are thus those of the whole, for any number of cores.
#
# [Note: Long words]
# Training works on a table of distinct words, and each merge reads all words that it is in. All merges together thus
# read at most as many characters as the text has, times the length of its longest word. Words of more than
# ``LONG_WORD`` characters are therefore learned from in pieces. They are encoded whole, which takes no longer than for
# short ones.

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

    Parts have ``text_len`` characters or more, unless words are long. ``words`` gives the words of a text, with their
    begin and end. ``on_long_word`` is called for each word that is cut, at least once.
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


NUM_BYTES = 256
END_OF_TEXT = "<|endoftext|>"
MOST_VOCAB = 2**24
TEXT_LEN = 4096  # characters of one text of a batch, at least
PART_LEN = 2**19  # of one batch: its encodings take some hundred times as much memory


class NotUTF8(DataError):
    """A text is not UTF-8. ``byte`` is the first byte that is not, ``offset`` its place in the text."""

    def __init__(self, byte: int, offset: int, where: str = "") -> None:
        self.byte, self.offset = byte, offset
        super().__init__(
            f"{where}byte {byte:#04x} at offset {offset:,} is not UTF-8, which BPE needs; convert the text, or use the "
            "bytes tokenizer"
        )


class Tokenizer(Protocol):
    """Maps text, as bytes, to token ids and back."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, the separator included."""

    @property
    def separator(self) -> int:
        """The id that ends a document and stands for no text."""

    def encode(self, text: bytes) -> npt.NDArray[np.int64]:
        """Ids of ``text``, int64 (n,)."""

    def encode_all(self, texts: Sequence[bytes]) -> list[npt.NDArray[np.int64]]:
        """``encode`` of each text, on all cores that this thread may use."""

    def parts(self, text: bytes) -> Iterator[bytes]:
        """``text`` in pieces of a convenient size. Their ids, one after another, are those of the text."""

    def decode(self, ids: Sequence[int]) -> bytes:
        """The text of ids, without separators."""

    def to_json(self) -> str:
        """The form that ``from_json`` reads."""


class ByteTokenizer:
    """One token per byte: exact for any input, nothing to train."""

    vocab_size = NUM_BYTES + 1
    separator = NUM_BYTES

    def encode(self, text: bytes) -> npt.NDArray[np.int64]:
        """Ids of the bytes, int64 (len(text),)."""
        return np.frombuffer(text, dtype=np.uint8).astype(np.int64)

    def encode_all(self, texts: Sequence[bytes]) -> list[npt.NDArray[np.int64]]:
        """``encode`` of each text."""
        return [self.encode(text) for text in texts]

    def parts(self, text: bytes) -> Iterator[bytes]:
        """The text itself."""
        yield text

    def decode(self, ids: Sequence[int]) -> bytes:
        """The bytes of ids, without separators."""
        return bytes(index for index in ids if index != self.separator)

    def to_json(self) -> str:
        """The form that ``from_json`` reads."""
        return json.dumps({"kind": "bytes"})


class BPETokenizer:
    """Byte-level byte-pair encoding, as GPT-2's, by the ``tokenizers`` library.

    The separator is the id after the trained vocabulary, so no text can be mistaken for it.

    Source: Radford et al., GPT-2 (2019), sec. 2.2.
    """

    def __init__(self, model: tokenizers.Tokenizer) -> None:
        self.model = model
        self.separator = model.get_vocab_size()
        self.vocab_size = self.separator + 1

    @classmethod
    def train(
        cls,
        texts: Iterable[bytes],
        vocab_size: int,
        *,
        on_long_word: Callable[[], None] = lambda: None,
    ) -> BPETokenizer:
        """Learn merges from UTF-8 texts; a small corpus may yield fewer ids than asked for.

        Words of more than 256 characters are learned from in pieces ([Note: Long words]). ``on_long_word`` is called at
        each, before the next text is asked for. Threads of the library ask for the texts. After the last text the
        library is silent until it is done.

        Raises:
            ConfigError: ``vocab_size`` is less than the bytes and the separator, or more than the texts have.
            DataError: A text is not UTF-8.
        """
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        if vocab_size <= NUM_BYTES + 1:
            raise ConfigError(
                f"got a BPE vocabulary of {vocab_size}, expected more than {NUM_BYTES + 1} "
                "(all bytes and the separator); use a larger one, or the bytes tokenizer"
            )
        if vocab_size > MOST_VOCAB:  # the library sets memory aside for all of it, and aborts
            raise ConfigError(
                f"got a BPE vocabulary of {vocab_size}, expected at most {MOST_VOCAB}; use a smaller one"
            )
        model = Tokenizer(models.BPE())
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size - 1,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            special_tokens=[],
            show_progress=False,
        )

        words = model.pre_tokenizer.pre_tokenize_str
        short_texts = (
            short
            for text in texts
            for short in learnable(_utf8(text), TEXT_LEN, words, on_long_word)
        )
        model.train_from_iterator(short_texts, trainer)
        return cls(model)

    def encode(self, text: bytes) -> npt.NDArray[np.int64]:
        """Ids of ``text``, int64 (n,).

        Raises:
            DataError: The text is not UTF-8.
        """
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[bytes]) -> list[npt.NDArray[np.int64]]:
        """``encode`` of each text, on the cores of the first thread that used the library.

        Raises:
            DataError: A text is not UTF-8.
        """
        parts = [list(divided(_utf8(text), TEXT_LEN)) for text in texts]
        found = iter(self.model.encode_batch_fast([short for shorts in parts for short in shorts]))
        none = np.empty(0, dtype=np.int64)
        return [
            np.concatenate([none, *(np.array(next(found).ids, dtype=np.int64) for _ in shorts)])
            for shorts in parts
        ]

    def parts(self, text: bytes) -> Iterator[bytes]:
        """Pieces of a little more than half a MiB. A longer word is one piece.

        Raises:
            DataError: The text is not UTF-8.
        """
        for part in divided(_utf8(text), PART_LEN):
            yield part.encode()

    def decode(self, ids: Sequence[int]) -> bytes:
        """The text of ids in UTF-8, without separators. Half a character becomes a replacement character."""
        return self.model.decode([index for index in ids if index != self.separator]).encode()

    def to_json(self) -> str:
        """The form that ``from_json`` reads; ``model`` inside it is the library's own format."""
        return json.dumps({"kind": "bpe", "model": json.loads(self.model.to_str())})


class LibraryTokenizer:
    """A tokenizer of the ``tokenizers`` library as it came. Each text is tokenized whole, with nothing added to it.

    Args:
        model: of the library. Truncation and padding are switched off.
        separator: the id that ends a document; None: that is not known.
    """

    def __init__(self, model: tokenizers.Tokenizer, separator: int | None) -> None:
        model.no_truncation()
        model.no_padding()
        self.model, self._separator = model, separator
        self.vocab_size = 1 + max(model.get_vocab(with_added_tokens=True).values())

    @classmethod
    def of_file(cls, path: str, separator: str | None) -> LibraryTokenizer:
        """The tokenizer of a ``tokenizer.json``, with the token that ends a document, such as ``"<|endoftext|>"``.

        None leaves it unknown.

        Raises:
            DataError: it is no such file, or does not know the separator.
        """
        from tokenizers import Tokenizer as Library

        try:
            model = Library.from_file(path)
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"{path}: is no tokenizer.json ({error})") from error
        found = None if separator is None else model.token_to_id(separator)
        if found is None and separator is not None:
            added = model.get_added_tokens_decoder().values()
            special = [token.content for token in added if token.special]
            raise DataError(
                f"{path}: has no token {separator!r} to end documents with; its special tokens are "
                f"{', '.join(map(repr, special[:8])) or 'none'}"
            )
        return cls(model, found)

    @property
    def separator(self) -> int:
        """The id that ends a document. Raises DataError if it is not known."""
        return _known(self._separator)

    def encode(self, text: bytes) -> npt.NDArray[np.int64]:
        """Ids of ``text``, int64 (n,). Raises DataError if it is not UTF-8."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[bytes]) -> list[npt.NDArray[np.int64]]:
        """``encode`` of each text, on the cores of the first thread that used the library."""
        found = self.model.encode_batch_fast([*map(_utf8, texts)], add_special_tokens=False)
        return [np.array(each.ids, dtype=np.int64) for each in found]

    def parts(self, text: bytes) -> Iterator[bytes]:
        """The text itself. Raises DataError if it is not UTF-8."""
        _utf8(text)
        yield text

    def decode(self, ids: Sequence[int]) -> bytes:
        """The text of ids in UTF-8, without separators."""
        kept = [index for index in ids if index != self._separator]
        return self.model.decode(kept, skip_special_tokens=False).encode()

    def to_json(self) -> str:
        """The form that ``from_json`` reads; ``model`` inside it is the library's own format."""
        model = json.loads(self.model.to_str())
        return json.dumps({"kind": "library", "model": model, "separator": self._separator})


class IdsTokenizer:
    """Of tokens that came without their tokenizer: how many ids there are, and which one ends a document.

    Args:
        vocab_size: number of ids.
        separator: the id that ends a document; None: that is not known.
    """

    def __init__(self, vocab_size: int, separator: int | None = None) -> None:
        self.vocab_size = vocab_size
        self._separator = separator

    @property
    def separator(self) -> int:
        """The id that ends a document. Raises DataError if it is not known."""
        return _known(self._separator)

    def encode(self, *given: Any) -> Any:
        """Raises DataError, as ``encode_all``, ``parts`` and ``decode`` do."""
        raise DataError(
            "these tokens came without a tokenizer, so they cannot become text, nor text become tokens"
        )

    encode_all = parts = decode = encode

    def to_json(self) -> str:
        """The form that ``from_json`` reads."""
        return json.dumps(
            {"kind": "ids", "vocab_size": self.vocab_size, "separator": self._separator}
        )


def _known(separator: int | None) -> int:
    if separator is None:
        raise DataError(
            "these tokens came without a separator of documents; state it as tokenizer.separator"
        )
    return separator


def from_json(text: str) -> Tokenizer:
    """The tokenizer that ``to_json`` described.

    Raises:
        DataError: The text describes no tokenizer that this version knows.
    """
    try:
        description = json.loads(text)
        kind = description["kind"]
        if kind == "bytes":
            return ByteTokenizer()
        if kind == "ids":
            return IdsTokenizer(int(description["vocab_size"]), description["separator"])
        if kind in ("bpe", "library"):
            from tokenizers import Tokenizer as Library

            model = Library.from_str(json.dumps(description["model"]))
            if kind == "bpe":
                return BPETokenizer(model)
            return LibraryTokenizer(model, description["separator"])
    except Exception as error:  # the library raises bare Exception for a malformed model
        raise DataError(
            f"malformed tokenizer description ({error}); prepare the tokens again"
        ) from error
    raise DataError(
        f"got a tokenizer of kind {kind!r}, expected 'bytes', 'bpe', 'library' or 'ids'; prepare the tokens again"
    )


def as_library(tokenizer: Tokenizer) -> tuple[tokenizers.Tokenizer, int | None] | None:
    """The same tokenizer for the ``tokenizers`` library, and the id that ends a document, if that is known.

    None for ``IdsTokenizer``, which knows no text. The separator gets a token, ``<|endoftext|>``, where it has none. A
    text that holds this token literally becomes the separator there, as with GPT-2's tokenizer. Nothing is added to a
    text: the model was trained on none of what a post-processor would add.
    """
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Library

    if isinstance(tokenizer, LibraryTokenizer):
        plain = json.loads(tokenizer.model.to_str()) | {"post_processor": None}
        return Library.from_str(json.dumps(plain)), json.loads(tokenizer.to_json())["separator"]
    if isinstance(tokenizer, BPETokenizer):
        library = Library.from_str(tokenizer.model.to_str())
    elif isinstance(tokenizer, ByteTokenizer):
        library = Library(models.BPE(vocab=_byte_letters(), merges=[]))
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = decoders.ByteLevel()
    else:
        return None
    library.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return library, tokenizer.separator


def _byte_letters() -> dict[str, int]:
    """The letter by which the library's ``ByteLevel`` stands for each byte: its own if that is printable.

    Source: Radford et al., GPT-2 (2019), ``bytes_to_unicode`` of the published code.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(NUM_BYTES) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    letters |= {byte: chr(NUM_BYTES + place) for place, byte in enumerate(others)}
    return {letters[byte]: byte for byte in range(NUM_BYTES)}


def same_tokenizer(one: object, other: object) -> bool:
    """Whether two descriptions are of one tokenizer, even if other versions of a library wrote them.

    A description that this version cannot read is equal to no other.
    """
    if one == other:
        return True
    try:
        return _parsed(one).to_json() == _parsed(other).to_json()
    except DataError:
        return False


def tokenizer_name(description: object) -> str:
    """Name for messages: kind, number of ids and a fingerprint."""
    try:
        found = _parsed(description)
    except DataError:
        return "one that this version does not know"
    text = found.to_json()
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{json.loads(text)['kind']} of {found.vocab_size:,} ids, {digest}"


def _parsed(description: object) -> Tokenizer:
    if not isinstance(description, str):
        raise DataError("malformed tokenizer description (it is no text)")
    return from_json(description)


def _utf8(text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise NotUTF8(text[error.start], error.start) from error
