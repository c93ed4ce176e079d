"""DeepSpeed on its CPU accelerator over gloo, at one stage; at stage 3 also with all on a disk (ZeRO-Infinity).

The settings are the fastest that do the same work. Measured on two cores with the 8 x 512 model, in CPU time of a step,
which other programs disturb less than the clock: buckets of 4 M elements instead of 500 M save 13 to 17 % at stages 1
and 2 and 10 % at stage 3; its own CPU Adam takes as long as torch's fused AdamW, which the other contenders use;
``overlap_comm`` (there are no streams on a CPU) and ``contiguous_gradients`` change nothing.

From a disk it steps its own CPU Adam alone. Blocks, queue and threads are those that its documentation proposes to tune
(1 MiB, 8, 4); reading and writing overlap the step. Buffers hold the largest parameter of the model.
"""

from __future__ import annotations

from math import prod
from typing import Any

import deepspeed  # type: ignore[import-not-found, unused-ignore]  # in the environment of install/peers.sh
from torch import Tensor, nn

from hpczero.models.config import parameter_shapes
from scaling.contenders import base
from scaling.contenders.workload import BUFFERS, LEARNING_RATE, Workload, scratch
from scaling.evidence.record import versions

ZERO = {"reduce_bucket_size": 4_000_000, "overlap_comm": False}
# By default it keeps up to a billion parameters whole after forward, which is all of this model: one gather in a step
# and the memory of stage 2. Zero gives each back after use, as FSDP2 and hpczero do.
GIVE_BACK = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
WEIGHT_DECAY = 0.01  # torch's default of AdamW, which the other contenders have
AIO = {
    "block_size": 2**20,
    "queue_depth": 8,
    "intra_op_parallelism": 4,
    "single_submit": False,
    "overlap_events": True,
}


class Contender(base.GlooContender):
    """fp32, no clipping; the first rank to come compiles nothing, install/peers.sh has done it."""

    def __init__(self, stage: int, disk: int = 0) -> None:
        self.zero: dict[str, Any] = {"stage": stage, **ZERO, **(GIVE_BACK if stage == 3 else {})}
        self._disk = bool(disk)

    def connect(self) -> None:
        super().connect()
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)

    def build(self, workload: Workload) -> None:
        model = base.gpt(workload)
        optimizer: Any = self._offloaded(model, workload) if self._disk else None
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": workload.sequences,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,  # 1.0 by default
            "zero_optimization": self.zero,
            **({"aio": AIO} if self._disk else {"zero_allow_untested_optimizer": True}),  # torch's
        }
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=model, optimizer=optimizer or base.adamw(model.parameters()), config=config
        )
        self.model = self.engine

    def _offloaded(self, model: nn.Module, workload: Workload) -> Any:
        """The optimizer that DeepSpeed steps from a disk; its parameters and state are to lie there."""
        from deepspeed.accelerator import get_accelerator  # type: ignore[import-not-found, unused-ignore]
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found, unused-ignore]

        # DeepSpeed 0.19.8 takes bf16 for parameters that it swaps wherever the accelerator has no fp16, whatever dtype
        # they have (zero/partition_parameters.py, _set_dtype: ``or`` binds before ``if``). Its CPU has none by default.
        get_accelerator().is_fp16_supported = lambda: True
        place = {"device": "nvme", "nvme_path": str(scratch()), "pin_memory": False}
        place["buffer_count"] = BUFFERS
        largest = max(prod(shape) for _, shape in parameter_shapes(workload.model))
        ahead = {"pipeline_read": True, "pipeline_write": True}
        self.zero |= {
            "offload_optimizer": {**place, **ahead},
            "offload_param": {**place, "buffer_size": largest, "max_in_cpu": 0},
        }
        return DeepSpeedCPUAdam(
            model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, adamw_mode=True
        )

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        loss = self.engine(tokens, targets)
        self.engine.backward(loss)
        self.engine.step()
        return float(loss.item())

    def settings(self) -> dict[str, str]:
        # A reader's folder is another one.
        own = {
            name: str(value).replace(str(scratch()), "FOLDER") if self._disk else str(value)
            for name, value in self.zero.items()
            if name != "stage"
        }
        return {**super().settings(), **versions("deepspeed"), **own}
