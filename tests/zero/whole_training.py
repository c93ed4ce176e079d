"""A whole training in the small: accumulation, clipping, a scheduler, evaluation, checkpoints, checkpointed blocks.

Owns: the program that tests of bad tiers train with, and how a twin takes the place of the disk. Must not know: what
any test looks for.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

import hpczero
from hpczero import Offload
from hpczero.activations import Checkpointing
from hpczero.checkpoint import Checkpoints
from hpczero.tier import Tier
from hpczero.zero import zeroify
from tests.helpers.small_models import adamw, tiny_gpt
from tests.tier.twins import PageTier

if TYPE_CHECKING:
    from hpczero import Topology

SIZES: dict[str, Any] = {"layers": 3, "hidden": 18, "heads": 2, "context": 16, "vocab_size": 61}
WINDOW, BUFFERS = 2**15, 4
MICRO_STEPS, ROWS = 2, 4
INPUTS: dict[str, Any] = {"window": 8192, "buffers": 3}
Numbers = tuple[float, ...]


class Training:
    """Some steps of one model; nothing is kept elsewhere unless a tier is given."""

    def __init__(
        self,
        topology: Topology,
        folder: Path,
        *,
        tier: Callable[..., Tier] | None = None,
        inputs: Tier | None = None,
        stage: int = 3,
        precision: str = "fp32",
    ) -> None:
        """Collective.

        Args:
            topology: of all ranks.
            folder: for checkpoints.
            tier: makes what stands in the place of the disk, from ``blocks`` and ``block_nbytes``.
            inputs: where inputs of blocks rest.
            stage: of ``zeroify``.
            precision: of ``zeroify``.
        """
        self.topology, self.folder, self.done = topology, folder, 0
        self.model = tiny_gpt(**SIZES)
        self.optimizer = adamw(self.model)
        self.checkpointing: Checkpointing | None = None
        offload = None
        with pytest.MonkeyPatch.context() as patch:
            if tier is not None:

                def open_tier(_: Path, *, blocks: int, block_nbytes: int, **ignored: Any) -> Tier:
                    return tier(blocks=blocks, block_nbytes=block_nbytes)

                patch.setattr(zeroify, "DiskTier", open_tier)
                parameters: Any = "disk" if stage == 3 else "device"
                offload = Offload("disk", "disk", parameters, folder, WINDOW, BUFFERS)
            hpczero.zeroify(
                self.model,
                self.optimizer,
                topology=topology,
                stage=stage,
                precision=precision,
                offload=offload,
            )
        if inputs is not None:
            self.checkpointing = Checkpointing.create("disk", folder=folder, tier=inputs, **INPUTS)
            self.checkpointing.join(self.model)
            self.model.call_block = self.checkpointing
        self.scheduler = LambdaLR(self.optimizer, lambda step: 1.0 / (1 + step))

    def tokens(self, micro: int) -> Tensor:
        """(ROWS, context) of this step, micro-batch and rank; evaluation has micro-batches of its own."""
        seed = 1000 * self.done + 10 * micro + self.topology.rank
        shape = (ROWS, int(SIZES["context"]))
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(int(SIZES["vocab_size"]), shape, generator=generator)

    def step(self, *, save: bool = False) -> Numbers:
        """Losses of the micro-batches, norm, rate, and loss of an evaluation after the update. Collective."""
        found: list[float] = []
        for micro in range(MICRO_STEPS):
            with hpczero.accumulate(self.model, micro, MICRO_STEPS):
                tokens = self.tokens(micro)
                loss = self.model(tokens, tokens)
                loss.backward()
            found.append(loss.item())
        found.append(float(hpczero.clip_grad_norm_(self.model, 0.3)))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        found.append(float(self.optimizer.param_groups[0]["lr"]))
        self.done += 1
        found.append(self.evaluation())
        if save:
            self.save()
        return tuple(found)

    @torch.no_grad()
    def evaluation(self) -> float:
        """Loss of this rank on a batch of its own. Collective."""
        tokens = self.tokens(9)
        return float(self.model(tokens, tokens).item())

    def save(self, name: str = "checkpoints") -> None:
        """Collective."""
        with Checkpoints(self.folder / name, self.model, keep=2) as checkpoints:
            checkpoints.save(self.done, {"scheduler": self.scheduler.state_dict()})

    def load(self, name: str = "checkpoints") -> None:
        """Collective."""
        loaded = hpczero.checkpoint.load(self.folder / name, self.model)
        self.scheduler.load_state_dict(loaded.extra["scheduler"])
        self.done = loaded.step

    def weights(self) -> list[Tensor]:
        """On rank 0. Collective."""
        return list((hpczero.full_state_dict(self.model) or {}).values())

    def close(self) -> None:
        """Collective."""
        hpczero.release(self.model)
        if self.checkpointing is not None:
            self.checkpointing.close()


def calm(*, blocks: int, block_nbytes: int) -> PageTier:
    """A tier that keeps its promises, for ranks beside the one whose tier does not."""
    return PageTier(blocks=blocks, block_nbytes=block_nbytes)
