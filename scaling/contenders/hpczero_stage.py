"""hpczero itself: at one stage, over one transport, on a disk too; or over tensor ranks or pipeline stages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

import hpczero
from hpczero import Offload
from hpczero.accelerator import HostAccelerator
from hpczero.adapters.gpt import GPTAdapter
from hpczero.job.topology import Topology
from hpczero.options.config import LayoutOptions
from hpczero.plan.degrees import mesh_of
from hpczero.plan.rules import default_rule
from hpczero.run.evaluation import passes_of
from hpczero.run.results.metrics import Stopwatch
from scaling.contenders import base
from scaling.contenders.training import build
from scaling.contenders.workload import BUFFERS, SEED, Workload, scratch
from scaling.evidence.record import mpi_library, versions

WINDOW_NBYTES = 16 * 2**20


class Contender(base.Contender):
    """Units by the default rule: every block, and the root; with ``compiled``, torch.compile compiles blocks."""

    _offload: Offload | None = None

    def __init__(
        self,
        stage: int,
        transport: str,
        *,
        overlap: bool = True,
        offload: Offload | None = None,
        disk: int = 0,
        compiled: int = 0,
        **others: Any,
    ) -> None:
        """``others`` are of ``zeroify``."""
        self._others = others
        self.stage, self.transport, self.overlap = stage, transport, overlap
        self._offload, self._compiled = offload, bool(compiled)
        if disk:
            self._offload = Offload("disk", "disk", "disk", scratch(), WINDOW_NBYTES, BUFFERS)

    def connect(self) -> None:
        self.join(Topology.of_world())

    def join(self, topology: Topology) -> None:
        """Train over ranks that are connected already."""
        self.topology = topology
        self.rank, self.size = topology.rank, topology.size

    def build(self, workload: Workload) -> None:
        model = base.gpt(workload)
        if self._compiled:
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
            offload=self._offload,
            **self._others,
        )

    def barrier(self) -> None:
        self.topology.barrier()

    def close(self) -> None:
        hpczero.release(self.model)
        self.topology.free()

    def settings(self) -> dict[str, str]:
        offload = f"everything on disk, {BUFFERS} blocks of {WINDOW_NBYTES >> 20} MiB"
        return {
            "transport": hpczero.sharding(self.model).collectives.describe(),
            "mpi": mpi_library(),
            **versions("torch", "mpi4py"),
            **({"offload": offload} if self._offload else {}),
        }


class RecommenderContender(Contender):
    """The example's DLRM, every table a unit."""

    def build(self, workload: Any) -> None:
        from examples.recommender import DLRM  # beside the packages, where a checkout is

        torch.manual_seed(SEED)
        tables = [workload.rows] * workload.tables
        model = DLRM(dense=workload.dense, tables=tables, width=workload.width)
        self.optimizer = base.adamw(model.parameters())
        units = [(f"tables.{number}",) for number in range(workload.tables)]
        self.model = hpczero.zeroify(
            model,
            self.optimizer,
            stage=self.stage,
            topology=self.topology,
            rule=lambda _: [*units, ("bottom",), ("top",)],
            transport=self.transport,
            **self._others,
        )

    def step(self, *batch: Tensor) -> float:
        """As of every contender; ``batch``: numbers, categories and clicks."""
        numbers, categories, clicks = batch
        self.optimizer.zero_grad()
        loss = binary_cross_entropy_with_logits(self.model(numbers, categories), clicks)
        loss.backward()
        self.optimizer.step()
        return float(loss.item())


class Layout(Contender):
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
        self.join(Topology.create(comm, mesh=mesh_of(self.options, comm.size, comm.size)))

    @property
    def data_rank(self) -> int:
        return self.topology.data.rank

    def build(self, workload: Workload) -> None:
        # torch's pipelining has nothing for a weight that two stages hold.
        tied = self.options.pipeline == 1
        adapter = GPTAdapter(replace(workload.model, tie_embeddings=tied))
        self.model, self.optimizer = build(
            adapter, self.topology, self.options, stage=self.stage, precision=self.precision
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

        losses = self._passes.take(0, samples, Stopwatch(), lambda: None)
        hpczero.clip_grad_norm_(self.model, base.CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        (loss,) = losses()
        return loss

    def settings(self) -> dict[str, str]:
        return {
            "layout": ", ".join(self.options.changed) or "one copy on each rank",
            "stage": str(self.stage),
            "precision": self.precision,
            **super().settings(),
        }
