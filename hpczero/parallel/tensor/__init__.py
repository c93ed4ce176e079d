"""Tensor and sequence parallelism: layers that are cut over ranks, and the rule by which they replace plain ones."""

from hpczero.parallel.tensor.gpt import gpt_rule
from hpczero.parallel.tensor.llama import llama_rule
from hpczero.parallel.tensor.loss import split_cross_entropy
from hpczero.parallel.tensor.rule import Kept, Rule, Split
from hpczero.parallel.tensor.split import close, split
from hpczero.parallel.tensor.ulysses import own_tokens, share_sequence

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
