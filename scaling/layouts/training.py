"""One layout in training, over ranks that are connected already."""

from __future__ import annotations

import numpy as np
import torch

from hpczero.adapters.gpt import GPTAdapter
from hpczero.job.topology import Topology
from scaling.contenders.training import GPTTraining, random_samples
from scaling.contenders.workload import SEED
from scaling.layouts.cases import Case


class Training(GPTTraining):
    """One layout, in memory until it is closed. Collective over the world of the ranks it is made of."""

    def __init__(self, world: Topology, case: Case, *, algorithms: str = "auto") -> None:
        """Collective over ``world``.

        Args:
            world: all ranks, node after node.
            case: the layout.
            algorithms: as of ``zeroify``.
        """
        torch.manual_seed(SEED)
        self._case = case
        nodes = [node for node, ranks in enumerate(world.world.nodes) for _ in ranks]
        super().__init__(
            GPTAdapter(case.work.model),
            Topology.create(world.world.comm, nodes, mesh=case.spread.mesh),
            self._samples,
            case.options,
            accumulation=case.accumulation,
            stage=case.stage,
            algorithms=algorithms,
        )

    def _samples(self, number: int, micro: int) -> list[np.ndarray]:
        """Each layout cuts the same global batch, so that all losses are equal."""
        work, case = self._case.work, self._case
        size = work.global_batch // case.data // case.accumulation
        start = (self.topology.data.rank * case.accumulation + micro) * size
        whole = random_samples((SEED, number), work.global_batch, work.model)
        return [each[start : start + size] for each in whole]

    def close(self) -> None:
        """Give everything back. Collective."""
        super().close()
        self.topology.free()
