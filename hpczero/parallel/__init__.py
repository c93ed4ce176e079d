"""Parallel: one copy of a model over several ranks, beside data parallelism."""

from hpczero.parallel.tensor import close, gpt_rule, split

__all__ = ["close", "gpt_rule", "split"]
