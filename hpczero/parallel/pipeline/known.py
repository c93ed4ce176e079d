"""How models that many use fall into stages.

Owns: their names of modules and the parts of their forward. Must not know: ranks, stages' sizes, how a model is cut.
"""

from __future__ import annotations

from typing import Any

from hpczero.parallel.pipeline.stages import Stages


def gpt_stages(model: Any) -> Stages:
    """Of ``hpczero.models.GPT``: inputs are (tokens,), targets (targets,); its loss is the mean cross entropy."""

    def enter(model: Any, *inputs: Any) -> Any:
        return model.embed(*inputs)

    def call(model: Any, block: Any, x: Any) -> Any:
        return model.run(block, x)

    def leave(model: Any, x: Any, *targets: Any) -> Any:
        return model.head(x, *targets)

    positions = () if model.wpe is None else ("wpe",)
    return Stages("blocks", ("wte", *positions), ("final_norm", "lm_head"), enter, call, leave)
