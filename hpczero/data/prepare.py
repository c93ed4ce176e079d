"""From text to a token file: joins corpus, tokenizer and file, on one process or on all ranks.

[Note: Who tokenizes what]
The text is cut into units of whole blocks, which are the same for any number of ranks. Rank r of N tokenizes units r,
r + N, r + 2N and so on. The ids of a block do not depend on its neighbours, so the file has the same bytes for any N.
A rank holds a few units in memory, never its whole part.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np

from hpczero.data.appendix import FORMAT, LINE_NBYTES
from hpczero.data.corpus import Corpus, TextSource
from hpczero.data.token_writer import TRAIN, VALIDATION, Ids, TokenWriter, create
from hpczero.data.tokenize import (
    LONG_WORD,
    BPETokenizer,
    ByteTokenizer,
    NotUTF8,
    Tokenizer,
    from_json,
)
from hpczero.data.tokens import SIGNATURE, VERSION
from hpczero.errors import ConfigError, DataError
from hpczero.files.regular import kind_of, opened, reason
from hpczero.job.long_work import Progress, in_order
from hpczero.job.team import Alone, Team
from hpczero.options.config import DataOptions

# The text of a corpus in pieces: which of it is held out, and which pieces a rank tokenizes at a time.
#
# [Note: The held-out split]
# Documents are shuffled by the hash of their contents and laid end to end. The last ``validation_fraction`` of the
# bytes is held out. The document at the cut, if any, is divided after a line, so a corpus of one file holds out its
# end. A row of a data set is not divided: it is held out. Training never sees a held-out byte, nor does the training of
# a tokenizer.

T = TypeVar("T")

UTF8_NBYTES = 4  # of one character, at most
UNIT_NBYTES = 8 * 2**20


@dataclass(frozen=True)
class TextPiece:
    """Text of one split, which begins at byte ``offset`` of ``source``, a file or a place in one."""

    source: str
    offset: int
    text: bytes
    held_out: bool
    ends_document: bool

    def named(self, error: NotUTF8) -> NotUTF8:
        """The same error with file and place."""
        return NotUTF8(error.byte, self.offset + error.offset, f"{self.source}: ")


@dataclass(frozen=True)
class BlockPlace:
    """One block of a corpus, not read yet, which begins at byte ``position`` of all text."""

    document: TextSource
    index: int
    position: int

    @property
    def nbytes(self) -> int:
        """Length of the block."""
        return self.document.table[self.index].nbytes

    def pieces(self, cut: int) -> Iterator[TextPiece]:
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
                yield TextPiece(
                    source, text.offset, training, False, text.ends_document and not held_out
                )
            if held_out:
                yield TextPiece(source, text.offset + head, held_out, True, text.ends_document)


def places(corpus: Corpus) -> Iterator[BlockPlace]:
    """All blocks in order."""
    position = 0
    for document in corpus.documents:
        for index in range(len(document.table)):
            place = BlockPlace(document, index, position)
            yield place
            position += place.nbytes


def units(corpus: Corpus) -> Iterator[list[BlockPlace]]:
    """Neighbouring blocks, of ``UNIT_NBYTES`` or a little more together: what a rank tokenizes at a time."""
    return together(places(corpus), lambda place: place.nbytes, UNIT_NBYTES)


def together(items: Iterable[T], nbytes_of: Callable[[T], int], least: int) -> Iterator[list[T]]:
    """Neighbours, as many as have ``least`` bytes together; the last ones may have fewer."""
    found: list[T] = []
    nbytes = 0
    for item in items:
        found.append(item)
        nbytes += nbytes_of(item)
        if nbytes >= least:
            yield found
            found, nbytes = [], 0
    if found:
        yield found


def spread(blocks: Iterable[BlockPlace], cut: int, nbytes: int) -> Iterator[BlockPlace]:
    """About ``nbytes`` of the training split, in whole blocks at even distances; all of it if it has no more.

    ``cut`` is the number of bytes of the training split. Up to one block more than ``nbytes`` is taken.
    """
    taken = 0
    for place in blocks:
        if place.position >= cut:
            return
        if taken * cut <= place.position * nbytes:
            taken += min(place.nbytes, cut - place.position)
            yield place


def pieces(blocks: Iterable[BlockPlace], cut: int) -> Iterator[TextPiece]:
    """The text of ``blocks`` in order, with no piece across the cut."""
    for place in blocks:
        yield from place.pieces(cut)


def small_pieces(
    blocks: Iterable[BlockPlace], cut: int, tokenizer: Tokenizer
) -> Iterator[TextPiece]:
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
            yield TextPiece(piece.source, offset, part, piece.held_out, ends_document)
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


HEAD_NBYTES = 2**16  # of a file; its format is said there

_WAY_OUT = "nothing was changed; give another name, or take it away yourself"


def check_target(path: Path) -> None:
    """Refuse to write a token file to ``path`` if that would lose something else than a token file.

    A FIFO or device is not opened. What a token file is made of is none.

    Raises:
        DataError: the message says what is there.
    """
    try:
        kind = kind_of(path)
        if kind == "a directory":
            raise DataError(
                f"{path}: is a directory, expected the name of a token file; give one in it, such as "
                f"{path / 'tokens.h5'}, or give another name"
            )
        if kind not in ("", "a file"):
            raise DataError(f"{path}: is {kind}, expected a token file or nothing; {_WAY_OUT}")
        if kind and not _is_token_file(path):
            raise DataError(f"{path}: is no token file, and would be replaced by one; {_WAY_OUT}")
    except FileNotFoundError:  # gone meanwhile
        return
    except OSError as error:
        raise DataError(
            f"{path}: cannot be looked at ({reason(error)}), so nobody knows what would be replaced; {_WAY_OUT}"
        ) from error


def _is_token_file(path: Path) -> bool:
    """Whether a file was written as a token file. A damaged one is replaced by preparing it again."""
    with opened(path) as descriptor:
        head = os.pread(descriptor, HEAD_NBYTES, 0)
        line = os.pread(descriptor, LINE_NBYTES, max(os.fstat(descriptor).st_size - LINE_NBYTES, 0))
    name = FORMAT.encode()
    return head.startswith(SIGNATURE) and (name in head or line.startswith(name + b" "))


VALIDATION_FRACTION = 0.05
BPE_VOCAB = 8192
BPE_TEXT_MIB = 256  # learned from: one rank reads it, and more changes a vocabulary of some ten thousand ids little
BATCH_NBYTES = 2**19  # tokenized at once; documents may be short
ENCODERS = 2  # one makes arrays of what the library has found for it, while the library works for the other

logger = logging.getLogger("hpczero.data")

TokenizerName = Literal["bytes", "bpe"]


def prepare(
    corpus: Corpus,
    out: Path,
    *,
    tokenizer: TokenizerName | Tokenizer = "bytes",
    vocab_size: int | None = None,
    vocab_text_mib: int | None = None,
    validation_fraction: float = VALIDATION_FRACTION,
    progress: Progress | None = None,
    team: Team | None = None,
) -> None:
    """Tokenize a corpus into the file ``out``, which appears whole or not at all. Collective over the team.

    Args:
        corpus: The text, equal on all ranks.
        out: Replaced if it is a token file. Anything else there is refused.
        tokenizer: "bytes", "bpe" trained on the training split by rank 0, or one that exists, equal on all ranks.
        vocab_size: Size of BPE's vocabulary, the separator included; None means 8192.
        vocab_text_mib: MiB of the training split that BPE's vocabulary is learned from, in blocks of 4 MiB at even
            distances; None means 256. A split that has no more is learned from whole.
        validation_fraction: Share of the bytes to hold out, between 0 and 1.
        progress: Told how far it is; None: that of the team.
        team: Ranks that share the work; None: this process alone. The file has the same bytes on any number of them.

    Raises:
        ConfigError: The fraction, the vocabulary size or its text is out of range, or a tokenizer that learns nothing
            is given one of the latter.
        DataError: The corpus cannot be read or is too small to split, or ``out`` is not a token file or cannot be
            written; on every rank.
    """
    team = team or Alone(progress)
    progress = team.progress

    with team.agreed("look at what is to be replaced"):
        if team.rank == 0:
            check_target(out)  # now: the training of a tokenizer may take hours
    with team.agreed("look at what is asked for"):  # all ranks find the same; one of them says so
        if not 0 < validation_fraction < 1:
            raise ConfigError(
                f"got a validation fraction of {validation_fraction}, expected 0 < fraction < 1"
            )
        if vocab_text_mib is not None:
            _check_vocab_text(vocab_text_mib, tokenizer)
        if not isinstance(tokenizer, str) and vocab_size is not None:
            raise ConfigError(
                f"got a vocabulary of {vocab_size} for a tokenizer that exists, which has its own; leave the size out"
            )
        if tokenizer == "bytes" and vocab_size not in (None, ByteTokenizer.vocab_size):
            raise ConfigError(
                f"got a vocabulary of {vocab_size} for the bytes tokenizer, which has {ByteTokenizer.vocab_size}; "
                "leave the size out, or use the bpe tokenizer"
            )
        cut = round(corpus.nbytes * (1 - validation_fraction))
        if not 0 < cut < corpus.nbytes:
            raise DataError(
                f"the corpus has {corpus.nbytes} bytes, too few to hold out {validation_fraction}; use more text"
            )
    chosen = ByteTokenizer() if isinstance(tokenizer, str) else tokenizer
    if tokenizer == "bpe":
        size = BPE_VOCAB if vocab_size is None else vocab_size
        most = (BPE_TEXT_MIB if vocab_text_mib is None else vocab_text_mib) * 2**20
        learnt = team.by_root(
            "learn a vocabulary", lambda told: _learnt(corpus, cut, size, most, told).to_json()
        )
        chosen = from_json(learnt)
    share = -(-corpus.nbytes // team.size)
    progress.phase("tokenize", share if team.size > 1 else corpus.nbytes)
    # A job that is asked to end takes its file away first: it may have one second, and encoders take longer.
    with (
        ThreadPoolExecutor(ENCODERS, "hpczero-encoder") as encoders,
        create(out, chosen, corpus.digest, partial(check_target, out), team) as writer,
    ):

        def encoded(unit: list[BlockPlace]) -> list[_Encoded]:
            return [*_encoded(unit, cut, chosen, writer, progress)]

        mine = islice(units(corpus), team.rank, None, team.size)
        work = _waited_for(in_order(encoders, encoded, mine, ENCODERS), progress)
        for _ in range(-(-sum(1 for _ in units(corpus)) // team.size)):
            error = None
            try:
                for part in next(work, ((), []))[1]:
                    writer.append(part.split, part.ids, part.documents, part.text_nbytes)
            except Exception as caught:  # raised by exchange, on every rank
                error = caught
            writer.exchange(error)


@dataclass(frozen=True)
class _Encoded:
    """Tokens of some pieces of one split."""

    split: int
    ids: Ids
    documents: int
    text_nbytes: int


def _encoded(
    unit: list[BlockPlace], cut: int, tokenizer: Tokenizer, writer: TokenWriter, progress: Progress
) -> Iterator[_Encoded]:
    """The tokens of ``unit``, piece by piece, with a separator where a document ends."""
    separator = writer.checked(np.array([tokenizer.separator]), TRAIN)
    small = small_pieces(unit, cut, tokenizer)
    for batch in together(small, lambda piece: len(piece.text), BATCH_NBYTES):
        found = tokenizer.encode_all([piece.text for piece in batch])
        for piece, whole in zip(batch, found, strict=True):
            split = VALIDATION if piece.held_out else TRAIN
            ids = writer.checked(whole, split)
            if piece.ends_document:
                ids = np.append(ids, separator)
            yield _Encoded(split, ids, int(piece.ends_document), len(piece.text))
            progress.advance(len(piece.text))


def _check_vocab_text(mib: int, tokenizer: TokenizerName | Tokenizer) -> None:
    """Refuse an amount of text that is none, or that nothing would learn from."""
    if mib < 1:
        raise ConfigError(
            f"got {mib} MiB of text to learn the vocabulary from, expected at least 1"
        )
    if tokenizer != "bpe":
        raise ConfigError(
            f"got {mib} MiB of text to learn a vocabulary from, and only the bpe tokenizer learns one; leave it out"
        )


def _learnt(
    corpus: Corpus, cut: int, vocab_size: int, most_nbytes: int, progress: Progress
) -> BPETokenizer:
    """A tokenizer of the training split, or of as much of it as ``most_nbytes``."""
    told = False
    current = TextPiece("", 0, b"", False, False)  # that is learned from

    def tell() -> None:
        nonlocal told
        if not told:
            logger.warning(
                "%s: has a word of more than %s characters (a run of letters, of digits, of whitespace or of other "
                "signs). The vocabulary is learned from pieces of it, as of all such words in whatever file; it is "
                "tokenized whole",
                current.source,
                f"{LONG_WORD:,}",
            )
        told = True

    with ExitStack() as merging:

        def training_text() -> Iterator[bytes]:
            nonlocal current
            progress.phase("count words", min(cut, most_nbytes))
            chosen = spread(places(corpus), cut, most_nbytes)
            for current in takewhile(lambda piece: not piece.held_out, pieces(chosen, cut)):
                progress.advance(len(current.text))
                yield current.text
            progress.phase("learn byte pairs")
            merging.enter_context(progress.silent())

        merging.enter_context(progress.computing())  # a block may take longer than one likes
        try:
            return BPETokenizer.train(training_text(), vocab_size, on_long_word=tell)
        except NotUTF8 as error:
            raise current.named(error) from error


def _waited_for(items: Iterator[T], progress: Progress) -> Iterator[T]:
    """Items that others compute. Meanwhile processor time is a sign of life."""
    while True:
        with progress.computing():
            try:
                item = next(items)
            except StopIteration:
                return
        yield item


def default_token_file(cache_dir: Path, progress: Progress | None = None) -> Path:
    """Token file of the standard library's text, in bytes. The first call makes it, in about a second.

    The name holds the Python version and the hash of the text, so another Python gets another file. Not collective.
    Processes that call it at once on one folder each write a whole file of equal contents.

    Raises:
        DataError: This Python ships no sources, or the folder cannot be written.
    """
    corpus = Corpus.standard_library(progress)
    path = cache_dir / f"stdlib-{platform.python_version()}-v{VERSION}-{corpus.digest[:12]}.h5"
    if not path.exists():
        prepare(corpus, path, progress=progress)
    return path


def names_token_file(options: DataOptions) -> bool:
    """Whether ``options`` name a token file, not text."""
    return options.path is not None and options.path.endswith((".h5", ".hdf5"))


def token_file(options: DataOptions, progress: Progress) -> Path:
    """Path of the token file that ``options`` mean. Text is tokenized on first use. Not collective: rank 0 calls it."""
    cache = Path(options.cache)
    if options.path is None and options.tokenizer == "bytes":
        return default_token_file(cache, progress)
    if names_token_file(options):
        return Path(str(options.path))
    paths = [Path(options.path)] if options.path else None
    corpus = Corpus.of_paths(paths, progress) if paths else Corpus.standard_library(progress)
    path = cache / f"{options.tokenizer}-v{VERSION}-{corpus.digest[:12]}.h5"
    if not path.exists():
        prepare(corpus, path, tokenizer=options.tokenizer, progress=progress)
    return path
