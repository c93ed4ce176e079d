"""hpczero itself, at one stage, over one transport."""

from __future__ import annotations

from mpi4py import MPI

import hpczero
from hpczero.job.topology import Topology
from hpczero.plan.rules import default_rule
from scaling.contenders import base
from scaling.contenders.workload import Workload
from scaling.evidence.record import versions


class Contender(base.Contender):
    """Units by the default rule: every block, and the root.

    With ``compiled``, torch.compile makes one graph of each block.
    """

    def __init__(
        self, stage: int, transport: str, *, overlap: bool = True, compiled: bool = False
    ) -> None:
        self.stage = stage
        self.transport = transport
        self.overlap = overlap
        self.compiled = compiled

    def connect(self) -> None:
        self.join(Topology.of_world())

    def join(self, topology: Topology) -> None:
        """Train over ranks that are connected already."""
        self.topology = topology
        self.rank, self.size = topology.rank, topology.size

    def build(self, workload: Workload) -> None:
        model = base.gpt(workload)
        if self.compiled:
            for block in model.blocks:
                block.compile()
        self.optimizer = base.adamw(model.parameters())
        self.model = hpczero.zeroify(
            model,
            self.optimizer,
            stage=self.stage,
            topology=self.topology,
            rule=default_rule,
            transport=self.transport,
            overlap=self.overlap,
        )

    def barrier(self) -> None:
        self.topology.barrier()

    def close(self) -> None:
        hpczero.release(self.model)
        self.topology.free()

    def settings(self) -> dict[str, str]:
        return {
            "transport": hpczero.sharding(self.model).collectives.describe(),
            "mpi": MPI.Get_library_version().split(",")[0].strip("\0 \n"),
            **versions("torch", "mpi4py"),
        }
