"""Text to batches: corpus (which text), tokenize, tokens (the file), sampler and batches (the order).

The files of the token file are tokens (opening one), appendix (its slabs and their digests) and token_writer.

Nothing here needs torch or MPI. Every function runs on one rank alone and gives equal results on all.
"""

from __future__ import annotations

from hpczero.data.batches import Batches, EvaluationBatch, HeldOut, Sampler
from hpczero.data.corpus import Corpus
from hpczero.data.prepare import default_token_file, prepare
from hpczero.data.tokenize import (
    BPETokenizer,
    ByteTokenizer,
    Tokenizer,
    same_tokenizer,
    tokenizer_name,
)
from hpczero.data.tokens import TokenFile, TokenSplit

__all__ = [
    "BPETokenizer",
    "Batches",
    "ByteTokenizer",
    "Corpus",
    "EvaluationBatch",
    "HeldOut",
    "Sampler",
    "TokenFile",
    "TokenSplit",
    "Tokenizer",
    "default_token_file",
    "prepare",
    "same_tokenizer",
    "tokenizer_name",
]
