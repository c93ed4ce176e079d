"""One layout in training: model, optimizer and steps, over ranks that are connected already.

Owns: the order in which they are made, and which samples a rank has. Must not know: the other layouts, the report.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import hpczero
from hpczero.accelerator import HostAccelerator
from hpczero.adapters.gpt import GPTAdapter
from hpczero.job.topology import Topology
from hpczero.run.evaluation import PipelinePasses, passes_of
from hpczero.run.starting.building import divide
from hpczero.run.step import TrainingStep
from scaling.contenders.workload import LEARNING_RATE, SEED
from scaling.layouts.cases import Case


class Training:
    """One layout, in memory until it is closed. Collective over the world of the ranks it is made of."""

    def __init__(
        self, world: Topology, nodes: Sequence[int], case: Case, *, algorithms: str = "auto"
    ) -> None:
        """Collective over ``world``.

        Args:
            world: all ranks.
            nodes: node of each.
            case: the layout.
            algorithms: as of ``zeroify``.
        """
        torch.manual_seed(SEED)
        self._case, spread = case, case.spread
        self.topology = Topology.create(world.world.comm, nodes, mesh=spread.mesh)
        adapter = GPTAdapter(case.work.model)
        with torch.device("meta"):
            model = adapter.build()
        initialize = adapter.initializer(model, SEED)
        divide(case.options, adapter, model, self.topology)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
        device = HostAccelerator()
        hpczero.zeroify(
            model,
            optimizer,
            stage=case.stage,
            topology=self.topology,
            initialize=initialize,
            algorithms=algorithms,
            secondary=case.options.secondary,
            device=device,
        )
        self.model = model
        self._passes = passes_of(
            case.options, adapter, model, accumulation=case.accumulation, accelerator=device
        )
        self._step = TrainingStep(
            model,
            optimizer,
            passes=self._passes,
            samples=self._samples,
            accelerator=device,
            clip=1.0,
        )
        self._taken = 0

    def steps(self, count: int) -> list[float]:
        """Train; the loss of each step, the mean over the global batch."""
        losses = [self._step.take(self._taken + number).loss for number in range(count)]
        self._taken += count
        return losses

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has waited for other stages so far; 0 without a pipeline."""
        return self._passes.waited_s

    @property
    def transport(self) -> str:
        """How shards are exchanged."""
        return hpczero.sharding(self.model).collectives.describe()

    @property
    def is_pipeline(self) -> bool:
        """Whether stages wait for each other."""
        return isinstance(self._passes, PipelinePasses)

    def _samples(self, number: int, micro: int) -> tuple[Any, Any]:  # Any: numpy arrays
        """Each layout cuts the same global batch, so that all losses are equal."""
        work, case = self._case.work, self._case
        draw = np.random.default_rng((SEED, number))
        shape = (work.global_batch, work.model.context + 1)
        tokens = draw.integers(0, work.model.vocab_size, shape)
        size = work.global_batch // case.data // case.accumulation
        start = (self.topology.data.rank * case.accumulation + micro) * size
        mine = tokens[start : start + size]
        return mine[:, :-1].copy(), mine[:, 1:].copy()

    def close(self) -> None:
        """Give everything back. Collective."""
        hpczero.release(self.model)
        self.topology.free()
