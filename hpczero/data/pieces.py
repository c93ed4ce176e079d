"""The text of a corpus in pieces: which of it is held out, and which pieces a rank tokenizes at a time.

Owns: the held-out split, and units of work. Must not know: tokens, who works.

[Note: The held-out split]
Documents are shuffled by the hash of their contents and laid end to end. The last ``validation_fraction`` of the bytes
is held out. The document at the cut, if any, is divided after a line, so a corpus of one file holds out its end. A row
of a data set is not divided: it is held out.
Training never sees a held-out byte, nor does the training of a tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hpczero.data.corpus import Corpus, Source
from hpczero.data.tokenize import NotUTF8, Tokenizer

UTF8_NBYTES = 4  # of one character, at most
UNIT_NBYTES = 8 * 2**20


@dataclass(frozen=True)
class Piece:
    """Text of one split.

    Attributes:
        source: its file, and its place there; for messages.
        offset: where it begins there.
        text: the bytes.
        held_out: whether it is of the validation split.
        ends_document: whether a document ends with it.
    """

    source: str
    offset: int
    text: bytes
    held_out: bool
    ends_document: bool

    def named(self, error: NotUTF8) -> NotUTF8:
        """The same error with file and place."""
        return NotUTF8(error.byte, self.offset + error.offset, f"{self.source}: ")


@dataclass(frozen=True)
class Place:
    """One block of a corpus, not read yet.

    Attributes:
        document: that it is of.
        index: its number in the document.
        position: where it begins in all text of the corpus.
    """

    document: Source
    index: int
    position: int

    @property
    def nbytes(self) -> int:
        """Length of the block."""
        return self.document.table[self.index].nbytes

    def pieces(self, cut: int) -> Iterator[Piece]:
        """The block, read; two pieces where byte ``cut`` of the corpus lies in it ([Note: The held-out split])."""
        position = self.position
        for text in self.document.texts(self.index):
            source = f"{self.document.path}{text.where and ': '}{text.where}"
            head = training_length(text.text, cut - position)
            if text.is_whole and head < len(text.text):
                head = 0
            training, held_out = text.text[:head], text.text[head:]
            position += len(text.text)
            if training:
                yield Piece(
                    source, text.offset, training, False, text.ends_document and not held_out
                )
            if held_out:
                yield Piece(source, text.offset + head, held_out, True, text.ends_document)


def places(corpus: Corpus) -> Iterator[Place]:
    """All blocks in order."""
    position = 0
    for document in corpus.documents:
        for index, block in enumerate(document.table):
            yield Place(document, index, position)
            position += block.nbytes


def units(corpus: Corpus) -> Iterator[list[Place]]:
    """Neighbouring blocks, of ``UNIT_NBYTES`` or a little more together: what a rank tokenizes at a time."""
    unit: list[Place] = []
    nbytes = 0
    for place in places(corpus):
        unit.append(place)
        nbytes += place.nbytes
        if nbytes >= UNIT_NBYTES:
            yield unit
            unit, nbytes = [], 0
    if unit:
        yield unit


def spread(blocks: Iterable[Place], cut: int, nbytes: int) -> Iterator[Place]:
    """About ``nbytes`` of the training split, in whole blocks at even distances; all of it if it has no more.

    Args:
        blocks: of the corpus, in order.
        cut: bytes of the training split.
        nbytes: at least 1. Up to one block more is taken.
    """
    taken = 0
    for place in blocks:
        if place.position >= cut:
            return
        if taken * cut <= place.position * nbytes:
            taken += min(place.nbytes, cut - place.position)
            yield place


def pieces(blocks: Iterable[Place], cut: int) -> Iterator[Piece]:
    """The text of ``blocks`` in order, with no piece across the cut."""
    for place in blocks:
        yield from place.pieces(cut)


def small_pieces(blocks: Iterable[Place], cut: int, tokenizer: Tokenizer) -> Iterator[Piece]:
    """``pieces``, as small as the tokenizer likes them.

    Raises:
        NotUTF8: what the tokenizer cannot read, with its file and place.
    """
    for piece in pieces(blocks, cut):
        try:
            parts = list(tokenizer.parts(piece.text))
        except NotUTF8 as error:
            raise piece.named(error) from error
        offset = piece.offset
        for index, part in enumerate(parts, start=1):
            ends_document = piece.ends_document and index == len(parts)
            yield Piece(piece.source, offset, part, piece.held_out, ends_document)
            offset += len(part)


def training_length(block: bytes, at: int) -> int:
    """Bytes of a block that are training text.

    The cut is ``at`` bytes after the block's start, outside of it included.
    """
    if not 0 < at < len(block):
        return 0 if at <= 0 else len(block)
    newline = block.find(b"\n", at, -1)
    if newline >= 0:
        return newline + 1
    # Not inside a UTF-8 character, which BPE could not read in two halves; what is none may be cut anywhere.
    for start in range(at, max(at - UTF8_NBYTES, -1), -1):
        if block[start] & 0xC0 != 0x80:
            return start
    return at
