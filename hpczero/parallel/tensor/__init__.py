"""Tensor and sequence parallelism: layers that are cut over ranks, and the rule by which they replace plain ones."""

from hpczero.parallel.tensor.gpt import gpt_rule
from hpczero.parallel.tensor.loss import split_cross_entropy
from hpczero.parallel.tensor.rule import Kept, Rule, Split
from hpczero.parallel.tensor.split import close, split

__all__ = ["Kept", "Rule", "Split", "close", "gpt_rule", "split", "split_cross_entropy"]
