"""From text to a token file: joins corpus, tokenizer and file.

Owns: the held-out split. Must not know: batches, ranks.

[Note: The held-out split]
Documents are shuffled by the hash of their contents and laid end to end. The last ``validation_fraction`` of the bytes
is held out. The document at the cut, if any, is divided after a line, so a corpus of one file holds out its end.
Training never sees a held-out byte, nor does the training of a tokenizer.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt

from hpczero.data.corpus import Corpus
from hpczero.data.dividing import LONG_WORD
from hpczero.data.targets import check_target
from hpczero.data.token_writer import create
from hpczero.data.tokenize import TEXT_LEN, BPETokenizer, ByteTokenizer, NotUTF8, Tokenizer
from hpczero.data.tokens import VERSION, TokenFile
from hpczero.errors import ConfigError, DataError
from hpczero.job.long_work import Progress, in_order
from hpczero.options.config import DataOptions

VALIDATION_FRACTION = 0.05
BPE_VOCAB = 8192
UTF8_NBYTES = 4  # of one character, at most
SEAL_NUMEL = 2**22  # read at a time
BATCH_NBYTES = 2**19  # tokenized at once
ENCODERS = 2  # one makes arrays of what the library has found for it, while the library works for the other

logger = logging.getLogger("hpczero.data")

T = TypeVar("T")
TokenizerName = Literal["bytes", "bpe"]


def prepare(
    corpus: Corpus,
    out: Path,
    *,
    tokenizer: TokenizerName = "bytes",
    vocab_size: int | None = None,
    validation_fraction: float = VALIDATION_FRACTION,
    progress: Progress | None = None,
) -> None:
    """Tokenize a corpus into the file ``out``, which appears whole or not at all.

    Args:
        corpus: The text.
        out: Replaced if it is a token file and none of the texts. Anything else there is refused.
        tokenizer: "bytes", or "bpe" trained on the training split.
        vocab_size: Size of BPE's vocabulary, the separator included; None means 8192.
        validation_fraction: Share of the bytes to hold out, between 0 and 1.
        progress: Told how far it is.

    Raises:
        ConfigError: The fraction or the vocabulary size is out of range, or bytes are given another vocabulary.
        DataError: The corpus cannot be read or is too small to split, or ``out`` is not a token file or cannot be
            written.
    """
    progress = progress or Progress()

    def sources() -> Iterator[Path]:
        for document in corpus.documents:
            progress.advance()
            yield document.path

    def check() -> None:
        check_target(out, sources())

    check()  # now: the training of a tokenizer may take hours
    if not 0 < validation_fraction < 1:
        raise ConfigError(
            f"got a validation fraction of {validation_fraction}, expected 0 < fraction < 1"
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
    chosen: Tokenizer = ByteTokenizer()
    if tokenizer == "bpe":
        chosen = _learnt(corpus, cut, BPE_VOCAB if vocab_size is None else vocab_size, progress)
    progress.phase("tokenize", corpus.nbytes)
    with (
        create(out, chosen, corpus.digest, check) as writers,
        ThreadPoolExecutor(ENCODERS, "hpczero-encoder") as encoders,
    ):

        def encoded(batch: list[_Piece]) -> list[npt.NDArray[np.int64]]:
            return chosen.encode_all([piece.text for piece in batch])

        batches = _batches(_parts(corpus, cut, chosen))
        for batch, found in _waited_for(in_order(encoders, encoded, batches, ENCODERS), progress):
            for piece, ids in zip(batch, found, strict=True):
                writer = writers[piece.held_out]
                writer.append_ids(ids)
                writer.count(0, len(piece.text))
                if piece.ends_document:
                    writer.end_document()
                progress.advance(len(piece.text))


def _learnt(corpus: Corpus, cut: int, vocab_size: int, progress: Progress) -> BPETokenizer:
    """A tokenizer of the training split."""
    told = False
    current = _Piece(corpus.documents[0].path, 0, b"", False, False)  # that is learned from

    def tell() -> None:
        nonlocal told
        if not told:
            logger.warning(
                "%s: has a word of more than %s characters (a run of letters, of digits, of whitespace or of other "
                "signs). The vocabulary is learned from pieces of it, as of all such words in whatever file; it is "
                "tokenized whole",
                current.path,
                f"{TEXT_LEN + LONG_WORD:,}",
            )
        told = True

    with ExitStack() as merging:

        def training_text() -> Iterator[bytes]:
            nonlocal current
            progress.phase("count words", cut)
            for current in takewhile(lambda piece: not piece.held_out, _pieces(corpus, cut)):
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


def seal(path: Path, out: Path | None = None) -> None:
    """Write the token file ``path``, of a version without digests, again with digests. Nothing else changes.

    Args:
        path: Taken as it is: it cannot be known whether its tokens are those that were written.
        out: Replaced if it is a token file, refused if it is something else. None replaces ``path`` itself, once the
            new file is whole.

    Raises:
        ConfigError: The file has digests.
        DataError: It cannot be read or holds ids that are not of its vocabulary, or ``out`` cannot be written.
    """
    with TokenFile.open(path) as old:
        if old.version == VERSION:
            raise ConfigError(
                f"{path}: has digests already; `python -m hpczero.data verify` checks them"
            )
        check = partial(check_target, out) if out is not None else lambda: None
        with create(out or path, old.tokenizer, old.source_sha256, check) as writers:
            for split, writer in zip((old.train, old.validation), writers, strict=True):
                for start in range(0, len(split), SEAL_NUMEL):
                    writer.append_ids(split[start : start + SEAL_NUMEL])
                writer.count(split.documents, split.text_nbytes)


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
    """Path of the token file that ``options`` mean. Text is tokenized on first use. Not collective: rank 0 calls it.

    Args:
        options: options about data.
        progress: told how far it is.
    """
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


@dataclass(frozen=True)
class _Piece:
    path: Path
    offset: int  # in the file
    text: bytes
    held_out: bool
    ends_document: bool

    def named(self, error: NotUTF8) -> NotUTF8:
        """The same error with file and place."""
        return NotUTF8(error.byte, self.offset + error.offset, f"{self.path}: ")


def _batches(pieces: Iterator[_Piece]) -> Iterator[list[_Piece]]:
    """Several pieces together if they are short, as documents may be."""
    batch: list[_Piece] = []
    nbytes = 0
    for piece in pieces:
        batch.append(piece)
        nbytes += len(piece.text)
        if nbytes >= BATCH_NBYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def _parts(corpus: Corpus, cut: int, tokenizer: Tokenizer) -> Iterator[_Piece]:
    """``_pieces``, as small as the tokenizer likes them."""
    for piece in _pieces(corpus, cut):
        try:
            parts = list(tokenizer.parts(piece.text))
        except NotUTF8 as error:
            raise piece.named(error) from error
        offset = piece.offset
        for index, part in enumerate(parts, start=1):
            ends_document = piece.ends_document and index == len(parts)
            yield _Piece(piece.path, offset, part, piece.held_out, ends_document)
            offset += len(part)


def _pieces(corpus: Corpus, cut: int) -> Iterator[_Piece]:
    """The corpus in order, with no piece across the cut ([Note: The held-out split])."""
    position = 0
    for document in corpus.documents:
        path, begin, end = document.path, position, position + document.nbytes
        for block in document.blocks():
            head = _training_length(block, cut - position)
            offset = position - begin
            position += len(block)
            training, held_out = block[:head], block[head:]
            if training:
                ends_document = position == end and not held_out
                yield _Piece(path, offset, training, False, ends_document)
            if held_out:
                yield _Piece(path, offset + head, held_out, True, position == end)


def _training_length(block: bytes, at: int) -> int:
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
