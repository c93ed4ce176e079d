"""Text to token ids and back.

Owns: the two tokenizers and their JSON form, which travels inside the token file. Must not know: files, splits, models.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from hpczero.errors import ConfigError, DataError

if TYPE_CHECKING:
    import tokenizers

NUM_BYTES = 256
MOST_VOCAB = 2**24


class Tokenizer(Protocol):
    """Maps text, as bytes, to token ids and back."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, the separator included."""
        ...

    @property
    def separator(self) -> int:
        """The id that ends a document and stands for no text."""
        ...

    def encode(self, text: bytes) -> npt.NDArray[np.int64]:
        """Ids, int64 (n,)."""
        ...

    def decode(self, ids: Sequence[int]) -> bytes:
        """The text, separators left out."""
        ...

    def to_json(self) -> str:
        """The form that ``from_json`` reads."""
        ...


class ByteTokenizer:
    """One token per byte: exact for any input, nothing to train."""

    vocab_size = NUM_BYTES + 1
    separator = NUM_BYTES

    def encode(self, text: bytes) -> npt.NDArray[np.int64]:
        """Ids of the bytes, int64 (len(text),)."""
        return np.frombuffer(text, dtype=np.uint8).astype(np.int64)

    def decode(self, ids: Sequence[int]) -> bytes:
        """The bytes, separators left out."""
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
    def train(cls, texts: Iterable[bytes], vocab_size: int) -> BPETokenizer:
        """Learn merges from UTF-8 texts; a small corpus may yield fewer ids than asked for.

        Raises:
            ConfigError: ``vocab_size`` does not even hold the bytes and the separator, or more than texts have.
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
        model.train_from_iterator((_utf8(text) for text in texts), trainer)
        return cls(model)

    def encode(self, text: bytes) -> npt.NDArray[np.int64]:
        """Ids, int64 (n,).

        Raises:
            DataError: The text is not UTF-8.
        """
        return np.array(self.model.encode(_utf8(text)).ids, dtype=np.int64)

    def decode(self, ids: Sequence[int]) -> bytes:
        """The text in UTF-8, separators left out; half a character becomes a replacement character."""
        return self.model.decode([index for index in ids if index != self.separator]).encode()

    def to_json(self) -> str:
        """The form that ``from_json`` reads; ``model`` inside it is the library's own format."""
        return json.dumps({"kind": "bpe", "model": json.loads(self.model.to_str())})


def from_json(text: str) -> Tokenizer:
    """The tokenizer that ``to_json`` described.

    Raises:
        DataError: The text describes none that this version knows.
    """
    try:
        description = json.loads(text)
        kind = description["kind"]
        if kind == "bytes":
            return ByteTokenizer()
        if kind == "bpe":
            from tokenizers import Tokenizer as Library

            return BPETokenizer(Library.from_str(json.dumps(description["model"])))
    except Exception as error:  # the library raises bare Exception for a malformed model
        raise DataError(
            f"malformed tokenizer description ({error}); prepare the tokens again"
        ) from error
    raise DataError(
        f"got a tokenizer of kind {kind!r}, expected 'bytes' or 'bpe'; prepare the tokens again"
    )


def _utf8(text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"byte {text[error.start]:#04x} is not UTF-8, which BPE needs; convert the text, or use the bytes tokenizer"
        ) from error
