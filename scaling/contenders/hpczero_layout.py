"""hpczero over tensor ranks or pipeline stages, with ZeRO over the ranks that are left."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

import hpczero
from hpczero.accelerator import HostAccelerator
from hpczero.adapters.gpt import GPTAdapter
from hpczero.job.topology import Topology
from hpczero.options.config import LayoutOptions
from hpczero.plan.degrees import mesh_of
from hpczero.run.evaluation import passes_of
from hpczero.run.results.metrics import Stopwatch
from hpczero.run.starting.building import divide
from scaling.contenders import base
from scaling.contenders.workload import SEED, Workload
from scaling.evidence.record import versions


class Contender(base.Contender):
    """Cut and driven by what the training command calls."""

    def __init__(
        self,
        tensor: int = 1,
        pipeline: int = 1,
        sequence: int = 0,
        micro_batches: int = 1,
        stage: int = 1,
        precision: str = "fp32",
    ) -> None:
        self.options = LayoutOptions(tensor=tensor, pipeline=pipeline, sequence=bool(sequence))
        self.micro_batches = micro_batches
        self.stage, self.precision = stage, precision

    def connect(self) -> None:
        comm = MPI.COMM_WORLD
        self.topology = Topology.create(comm, mesh=mesh_of(self.options, comm.size, comm.size))
        self.rank, self.size = self.topology.rank, self.topology.size

    @property
    def data_rank(self) -> int:
        return self.topology.data.rank

    def build(self, workload: Workload) -> None:
        # torch's pipelining has nothing for a weight that two stages hold.
        tied = self.options.pipeline == 1
        adapter = GPTAdapter(replace(workload.model, tie_embeddings=tied))
        with torch.device("meta"):
            model = adapter.build()
        initialize = adapter.initializer(model, SEED)
        divide(self.options, adapter, model, self.topology)
        self.optimizer = base.adamw(model.parameters())
        self.model = hpczero.zeroify(
            model,
            self.optimizer,
            stage=self.stage,
            topology=self.topology,
            precision=self.precision,
            initialize=initialize,
        )
        self._passes = passes_of(
            self.options,
            adapter,
            self.model,
            accumulation=self.micro_batches,
            accelerator=HostAccelerator(),
        )

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        """As of every contender; a pipeline cuts the samples into its micro-batches."""
        pairs = list(
            zip(tokens.chunk(self.micro_batches), targets.chunk(self.micro_batches), strict=True)
        )

        def samples(_: int, micro: int) -> tuple[Any, Any]:
            return pairs[micro][0].numpy(), pairs[micro][1].numpy()

        loss = self._passes.take(0, samples, Stopwatch(), lambda: None)
        hpczero.clip_grad_norm_(self.model, base.CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss()

    def barrier(self) -> None:
        self.topology.barrier()

    def close(self) -> None:
        hpczero.release(self.model)
        self.topology.free()

    def settings(self) -> dict[str, str]:
        return {
            "layout": ", ".join(self.options.changed) or "one copy on each rank",
            "stage": str(self.stage),
            "precision": self.precision,
            "transport": hpczero.sharding(self.model).collectives.describe(),
            "mpi": MPI.Get_library_version().split(",")[0].strip("\0 \n"),
            **versions("torch", "mpi4py"),
        }
