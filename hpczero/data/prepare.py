"""From text to a token file: joins corpus, tokenizer and file.

Owns: the held-out split. Must not know: batches, ranks.

[Note: The held-out split] Documents are shuffled by the hash of their contents and laid end to end; the last
``validation_fraction`` of the bytes is held out. The document at the cut, if any, is divided after a line, so a corpus
of one file holds out its end. Training never sees a held-out byte, nor does the training of a tokenizer.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from hpczero.config import DataOptions
from hpczero.data.corpus import Corpus
from hpczero.data.targets import check_target
from hpczero.data.tokenize import BPETokenizer, ByteTokenizer, Tokenizer
from hpczero.data.tokens import VERSION, TokenFile
from hpczero.data.tokenwriter import create
from hpczero.errors import ConfigError, DataError

VALIDATION_FRACTION = 0.05
BPE_VOCAB = 8192
SEAL_NUMEL = 2**22  # read at a time

TokenizerName = Literal["bytes", "bpe"]


def prepare(
    corpus: Corpus,
    out: Path,
    *,
    tokenizer: TokenizerName = "bytes",
    vocab_size: int | None = None,
    validation_fraction: float = VALIDATION_FRACTION,
    tick: Callable[[], None] = lambda: None,
) -> None:
    """Tokenize a corpus into the file ``out``, which appears whole or not at all.

    Args:
        corpus: The text.
        out: Replaced if it is a token file, and none of the texts; whatever else is there is refused.
        tokenizer: "bytes", or "bpe" trained on the training split.
        vocab_size: Of BPE, the separator included; None means 8192.
        validation_fraction: Share of the bytes to hold out, between 0 and 1.
        tick: Called as it gets on.

    Raises:
        ConfigError: The fraction or the vocabulary size is out of range, or bytes are given another vocabulary.
        DataError: The corpus cannot be read, is too small to split, ``out`` is something else than a token file, or
            cannot be written.
    """

    def check() -> None:
        check_target(out, (document.path for document in corpus.documents))

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
        training_text = (piece.text for piece in _pieces(corpus, cut, tick) if not piece.held_out)
        chosen = BPETokenizer.train(training_text, BPE_VOCAB if vocab_size is None else vocab_size)
    with create(out, chosen, corpus.digest, check) as writers:
        for piece in _pieces(corpus, cut, tick):
            writer = writers[piece.held_out]
            writer.append_text(piece.text)
            if piece.ends_document:
                writer.end_document()


def seal(path: Path, out: Path | None = None) -> None:
    """Write the token file ``path``, of a version without digests, anew with them; nothing else changes.

    Args:
        path: Believed as it is: nobody can tell whether its tokens are those that were written.
        out: Replaced if it is a token file, refused if it is something else; None replaces ``path`` itself, once the
            new file is whole.

    Raises:
        ConfigError: It has digests.
        DataError: It cannot be read, holds ids that are not of its vocabulary, or ``out`` cannot be written.
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


def default_token_file(cache_dir: Path, tick: Callable[[], None] = lambda: None) -> Path:
    """Token file of the standard library's text, in bytes; made on first use, in about a second.

    The name holds the Python version and the hash of the text, so another Python gets another file. Not collective;
    processes that call it at once on one folder each write a whole file of equal contents.

    Raises:
        DataError: This Python ships no sources, or the folder cannot be written.
    """
    corpus = Corpus.standard_library(tick)
    path = cache_dir / f"stdlib-{platform.python_version()}-v{VERSION}-{corpus.digest[:12]}.h5"
    if not path.exists():
        prepare(corpus, path, tick=tick)
    return path


def token_file(options: DataOptions, tick: Callable[[], None]) -> Path:
    """Path of the token file that ``options`` mean; text is tokenized on first use. On one rank only.

    Args:
        options: of the data.
        tick: called as it gets on.
    """
    cache = Path(options.cache)
    if options.path is None and options.tokenizer == "bytes":
        return default_token_file(cache, tick)
    if options.path is not None and options.path.endswith((".h5", ".hdf5")):
        return Path(options.path)
    paths = [Path(options.path)] if options.path else None
    corpus = Corpus.of_paths(paths, tick) if paths else Corpus.standard_library(tick)
    path = cache / f"{options.tokenizer}-v{VERSION}-{corpus.digest[:12]}.h5"
    if not path.exists():
        prepare(corpus, path, tokenizer=options.tokenizer, tick=tick)
    return path


@dataclass(frozen=True)
class _Piece:
    text: bytes
    held_out: bool
    ends_document: bool


def _pieces(corpus: Corpus, cut: int, tick: Callable[[], None]) -> Iterator[_Piece]:
    """The corpus in order, no piece across the cut. See [Note: The held-out split]."""
    position = 0
    for document in corpus.documents:
        end = position + document.nbytes
        for block in document.blocks():
            tick()
            head = _training_length(block, cut - position)
            position += len(block)
            training, held_out = block[:head], block[head:]
            if training:
                yield _Piece(training, False, ends_document=position == end and not held_out)
            if held_out:
                yield _Piece(held_out, True, ends_document=position == end)


def _training_length(block: bytes, at: int) -> int:
    """How much of a block is training text if the cut lies ``at`` bytes after its start, outside of it included."""
    if not 0 < at < len(block):
        return 0 if at <= 0 else len(block)
    newline = block.find(b"\n", at, -1)
    if newline >= 0:
        return newline + 1
    while (
        at and block[at] & 0xC0 == 0x80
    ):  # inside a UTF-8 character, which BPE could not read in two halves
        at -= 1
    return at
