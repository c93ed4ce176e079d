"""Tensor and sequence parallelism: layers that are cut over ranks, and the rule by which they replace plain ones."""

from hpczero.parallel.tensor.functions import Kept, Rule, Split
from hpczero.parallel.tensor.loss import split_cross_entropy
from hpczero.parallel.tensor.models import gpt_rule, llama_rule
from hpczero.parallel.tensor.split import close, own_tokens, share_sequence, split

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
