"""Options of what rests elsewhere than where it is computed with: ``[offload]`` and ``[activations]``.

Owns: these two sections. Must not know: tiers, how anything is moved, what goes together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hpczero.options.requirements import require_amount, require_path, require_positive
from hpczero.options.values import require

Medium = Literal["device", "host", "disk"]


@dataclass(frozen=True)
class OffloadOptions:
    """Where what training keeps rests between uses.

    Attributes:
        optimizer: its state, and the fp32 masters of bf16 and fp16: device, where it computes; host, memory of the
            host; or disk. Not at stage 0.
        gradients: mean gradients, from their reduction to the step; device, or where the optimizer is.
        parameters: this rank's shard of them, stage 3 only; device, or where the optimizer is.
        folder: for disk: one on a disk of every node, such as $TMPDIR there; what lies in it is gone when the run ends.
        window: MiB of one block of memory through which everything passes.
        buffers: blocks of each rank.
        ahead: units whose parameters are read before they are used.
        fraction: of all elements, at least so many rest there, in whole units, the last ones first; 0 to 1.
        step: who updates what rests on the host: device, to which it is copied; or host, where it rests.
        delayed: take the host's step while the next batch is computed, one step late: it changes the result.
    """

    optimizer: Medium = "device"
    gradients: Medium = "device"
    parameters: Medium = "device"
    folder: str | None = None
    window: int = 32
    buffers: int = 6
    ahead: int = 2
    fraction: float = 1.0
    step: Literal["device", "host"] = "device"
    delayed: bool = False

    def __post_init__(self) -> None:
        require_path("offload.folder", self.folder)
        require_positive("offload", self, "window", most=2**20)
        require(3 <= self.buffers <= 2**16, "offload.buffers", self.buffers, "3 to 65,536")
        require_amount("offload", self, "ahead")
        require(0 <= self.fraction <= 1, "offload.fraction", self.fraction, "0 to 1")


@dataclass(frozen=True)
class ActivationOptions:
    """What of a forward backward computes again, and where the inputs of blocks rest until then.

    Attributes:
        checkpointing: none; block: keep only the input of each block; selective: also what its products and attention
            give, so that little is computed twice.
        rest: of these inputs: device, where blocks compute; host, memory of the host beside a device; or disk.
        folder: for disk: one on a disk of every node; None: that of offload.
        buffers: blocks of memory of each rank through which inputs pass; all but two read ahead.
    """

    checkpointing: Literal["none", "block", "selective"] = "none"
    rest: Medium = "device"
    folder: str | None = None
    buffers: int = 4

    def __post_init__(self) -> None:
        require_path("activations.folder", self.folder)
        require_positive("activations", self, "buffers", most=2**16)
        require(self.buffers >= 2, "activations.buffers", self.buffers, "at least 2")
