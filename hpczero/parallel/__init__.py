"""Parallel: one copy of a model over several ranks, beside data parallelism."""

from hpczero.parallel.tensor import (
    Kept,
    Rule,
    Split,
    close,
    gpt_rule,
    llama_rule,
    own_tokens,
    share_sequence,
    split,
    split_cross_entropy,
)

__all__ = [
    "Kept",
    "Rule",
    "Split",
    "close",
    "gpt_rule",
    "llama_rule",
    "own_tokens",
    "share_sequence",
    "split",
    "split_cross_entropy",
]
