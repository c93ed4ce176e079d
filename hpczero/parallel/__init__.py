"""Parallel: one copy of a model over several ranks, beside the shards of ZeRO: its layers, its tokens or its blocks."""

from typing import TYPE_CHECKING

from hpczero.lazy import lazy

if TYPE_CHECKING:
    from hpczero.parallel.pipeline.stages import Stages as Stages
    from hpczero.parallel.pipeline.stages import cut as cut
    from hpczero.parallel.pipeline.stages import gpt_stages as gpt_stages
    from hpczero.parallel.pipeline.stages import hugging_face_stages as hugging_face_stages
    from hpczero.parallel.tensor import Kept as Kept
    from hpczero.parallel.tensor import Rule as Rule
    from hpczero.parallel.tensor import Split as Split
    from hpczero.parallel.tensor import close as close
    from hpczero.parallel.tensor import gpt_rule as gpt_rule
    from hpczero.parallel.tensor import llama_rule as llama_rule
    from hpczero.parallel.tensor import own_tokens as own_tokens
    from hpczero.parallel.tensor import share_sequence as share_sequence
    from hpczero.parallel.tensor import split as split
    from hpczero.parallel.tensor import split_cross_entropy as split_cross_entropy

# Loaded on first use: schedules are looked at where there is no torch.
__getattr__, __dir__, __all__ = lazy(__name__, __file__)
