"""DeepSpeed at stage 3 on its CPU accelerator with parameters and state of the optimizer on a disk (ZeRO-Infinity).

Its own CPU Adam is the only optimizer that it steps from a disk. Blocks, queue and threads are those that its
documentation proposes to tune (1 MiB, 8, 4); reading and writing overlap the step (``pipeline_read``,
``pipeline_write``). Buffers hold the largest parameter of the model.
"""

from __future__ import annotations

from math import prod

import deepspeed  # type: ignore[import-not-found, unused-ignore]  # in the environment of install/peers.sh
from deepspeed.accelerator import (  # type: ignore[import-not-found, unused-ignore]
    get_accelerator,
)
from deepspeed.ops.adam import (  # type: ignore[import-not-found, unused-ignore]
    DeepSpeedCPUAdam,
)

from hpczero.models.config import parameter_shapes
from scaling.contenders import base, deepspeed_stage
from scaling.contenders.scratch import BUFFERS, scratch
from scaling.contenders.workload import LEARNING_RATE, Workload

WEIGHT_DECAY = 0.01  # torch's default of AdamW, which the other contenders have
AIO = {
    "block_size": 2**20,
    "queue_depth": 8,
    "intra_op_parallelism": 4,
    "single_submit": False,
    "overlap_events": True,
}


class Contender(deepspeed_stage.Contender):
    """As ``deepspeed_stage``."""

    def build(self, workload: Workload) -> None:
        model = base.gpt(workload)
        place = {"device": "nvme", "nvme_path": str(scratch()), "pin_memory": False}
        largest = max(prod(shape) for _, shape in parameter_shapes(workload.model))
        self.zero = {
            **self.zero,
            "offload_optimizer": {
                **place,
                "buffer_count": BUFFERS,
                "pipeline_read": True,
                "pipeline_write": True,
            },
            "offload_param": {
                **place,
                "buffer_count": BUFFERS,
                "buffer_size": largest,
                "max_in_cpu": 0,
            },
        }
        config = {
            "train_micro_batch_size_per_gpu": workload.sequences,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,  # 1.0 by default
            "zero_optimization": self.zero,
            "aio": AIO,
        }
        optimizer = DeepSpeedCPUAdam(
            model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, adamw_mode=True
        )
        # DeepSpeed 0.19.8 takes bf16 for parameters that it swaps wherever the accelerator has no fp16, whatever dtype
        # they have (zero/partition_parameters.py, _set_dtype: ``or`` binds before ``if``). Its CPU has none by default.
        get_accelerator().is_fp16_supported = lambda: True
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config
        )
        self.model = self.engine

    def settings(self) -> dict[str, str]:
        # A reader's folder is another one.
        return {
            name: said.replace(str(scratch()), "FOLDER")
            for name, said in super().settings().items()
        }
