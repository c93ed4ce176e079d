"""DeepSpeed on its CPU accelerator over gloo, at one stage.

The settings are the fastest that do the same work. Measured on two cores with the 8 x 512 model, in CPU time of a step,
which other programs disturb less than the clock: buckets of 4 M elements instead of 500 M save 13 to 17 % at stages 1
and 2 and 10 % at stage 3; its own CPU Adam takes as long as torch's fused AdamW, which the other contenders use;
``overlap_comm`` (there are no streams on a CPU) and ``contiguous_gradients`` change nothing.
"""

from __future__ import annotations

from typing import Any

import deepspeed  # type: ignore[import-not-found, unused-ignore]  # in the environment of install/peers.sh
from torch import Tensor

from scaling.contenders import base
from scaling.contenders.workload import Workload
from scaling.evidence.record import versions

ZERO = {"reduce_bucket_size": 4_000_000, "overlap_comm": False}
# By default it keeps up to a billion parameters whole after forward, which is all of this model: one gather in a step
# and the memory of stage 2. Zero gives each back after use, as FSDP2 and hpczero do.
GIVE_BACK = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}


class Contender(base.GlooContender):
    """fp32, no clipping; the first rank to come compiles nothing, install/peers.sh has done it."""

    def __init__(self, stage: int) -> None:
        self.zero: dict[str, Any] = {"stage": stage, **ZERO, **(GIVE_BACK if stage == 3 else {})}

    def connect(self) -> None:
        super().connect()
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)

    def build(self, workload: Workload) -> None:
        model = base.gpt(workload)
        config = {
            "train_micro_batch_size_per_gpu": workload.sequences,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,  # 1.0 by default
            "zero_allow_untested_optimizer": True,  # torch's
            "zero_optimization": self.zero,
        }
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=model, optimizer=base.adamw(model.parameters()), config=config
        )
        self.model = self.engine

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        loss = self.engine(tokens, targets)
        self.engine.backward(loss)
        self.engine.step()
        return float(loss.item())

    def settings(self) -> dict[str, str]:
        own = {name: str(value) for name, value in self.zero.items() if name != "stage"}
        return {**super().settings(), **versions("deepspeed"), **own}
