"""One layout in training, over ranks that are connected already; and pipelines whose blocks sleep.

Ranks that outnumber the cores compute in turns, and a stage that stands still gives its core to another one. To see how
long stages stand still, blocks sleep: forward for some milliseconds, backward for twice as many. Everything else is
what trains: the cut, the schedule, the messages, ``zeroify``. Messages are small, so that a link takes next to no time,
or as large as asked for: MPI libraries move large ones only while both sides are in a call, and a stage that computes
is not.

    idle    waits for messages (``StageMessages.stats``), and for the last stage to be through with its last backward
    busy    all other time of the stage: its sleeps, and what Python adds to them
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

import hpczero
from hpczero.adapters.gpt import GPTAdapter
from hpczero.job.mesh import Mesh
from hpczero.job.topology import Topology
from hpczero.parallel.pipeline.runner import Pipeline
from hpczero.parallel.pipeline.simulate import Costs, schedule_of, simulate
from hpczero.parallel.pipeline.stages import Stages, cut
from hpczero.run.evaluation import PipelinePasses
from scaling.contenders.training import GPTTraining
from scaling.contenders.workload import SEED
from scaling.layouts.cases import Case

WIDTH = 16
BACKWARD = 2.0  # of a forward


class Training(GPTTraining):
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
        self._case = case
        super().__init__(
            GPTAdapter(case.work.model),
            Topology.create(world.world.comm, nodes, mesh=case.spread.mesh),
            self._samples,
            case.options,
            accumulation=case.accumulation,
            stage=case.stage,
            algorithms=algorithms,
        )

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has waited for other stages so far; 0 without a pipeline."""
        return self.passes.waited_s

    @property
    def is_pipeline(self) -> bool:
        """Whether stages wait for each other."""
        return isinstance(self.passes, PipelinePasses)

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
        super().close()
        self.topology.free()


class _Nap(torch.autograd.Function):
    """x + weight, after a while in each direction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, nap_s: float) -> Tensor:
        ctx.nap_s = nap_s
        time.sleep(nap_s)
        return x + weight

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, Tensor, None]:
        time.sleep(BACKWARD * ctx.nap_s)
        return d, d.sum(0), None


class Sleeper(nn.Module):
    """A block that takes ``nap_s`` seconds forward."""

    def __init__(self, nap_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH))
        self._nap_s = nap_s

    @override
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Nap.apply(x, self.weight, self._nap_s)
        return out


class Sleepers(nn.Module):
    """Blocks one after the other, and the mean of what they return."""

    def __init__(self, blocks: int, nap_s: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Sleeper(nap_s) for _ in range(blocks))

    def stages(self) -> Stages:
        """How the forward falls into parts."""
        return Stages(
            "blocks",
            (),
            (),
            enter=lambda model, x: x,
            call=lambda model, block, x: block(x),
            leave=lambda model, x, *targets: x.mean(),
        )


@dataclass(frozen=True)
class Order:
    """A pipeline to measure."""

    schedule: str  # its order
    micro_batches: int  # of a step
    interleave: int = 1  # groups of blocks on each stage
    message_nbytes: int = 0  # of what goes from stage to stage, at least

    @property
    def rows(self) -> int:
        """Of a micro-batch."""
        return max(self.message_nbytes // (4 * WIDTH), 1)

    @property
    def name(self) -> str:
        """For tables."""
        groups = f" {self.interleave}" if self.interleave > 1 else ""
        sent = f", {self.message_nbytes // 1024} KiB" if self.message_nbytes else ""
        return f"{self.schedule}{groups}, {self.micro_batches} micro-batches{sent}"

    def formula(self, stages: int) -> float:
        """(p - 1) / (v m): idle over busy time."""
        return (stages - 1) / (self.interleave * self.micro_batches)


def orders_of(stages: int, micro_batches: int, message_nbytes: int) -> list[Order]:
    """All schedules with as many micro-batches as given, 1F1B with half as many too, and with large messages."""
    found = [Order("gpipe", micro_batches), Order("1f1b", micro_batches)]
    if micro_batches > 1:
        found.append(Order("1f1b", micro_batches // 2))
    if micro_batches % stages == 0:
        found.append(Order("interleaved", micro_batches, 2))
    if message_nbytes:
        found.append(Order("1f1b", micro_batches, message_nbytes=message_nbytes))
    return found


class SleepingPipeline:
    """A pipeline over nodes, whose ranks sleep. Collective over the world of the ranks it is made of."""

    def __init__(
        self, world: Topology, nodes: Sequence[int], order: Order, *, stages: int, nap_s: float
    ) -> None:
        """Collective over ``world``.

        Args:
            world: all ranks.
            nodes: node of each.
            order: the schedule.
            stages: of the pipeline.
            nap_s: forward of one micro-batch on one stage, all its groups together.
        """
        mesh = Mesh.of(world.size, pipeline=stages)
        self.topology = Topology.create(world.world.comm, nodes, mesh=mesh)
        model = Sleepers(stages * order.interleave, nap_s / order.interleave)
        cut(model, self.topology, model.stages(), interleave=order.interleave)
        self._optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        hpczero.zeroify(
            model, self._optimizer, stage=1, topology=self.topology, algorithms="default"
        )
        self._model, self.order = model, order
        self._pipeline = Pipeline(model, micro_batches=order.micro_batches, schedule=order.schedule)
        self._inputs = [torch.ones(order.rows, WIDTH) for _ in range(order.micro_batches)]
        self._stages, self._nap_s = stages, nap_s

    def simulated(self, rank_rate: float) -> float:
        """Idle over busy time, by the simulation of the lists with equal costs.

        Args:
            rank_rate: bytes per second between stages of one rank; 0: messages take no time.
        """
        order, nap_s = self.order, self._nap_s / self.order.interleave
        message_s = 4 * order.rows * WIDTH / rank_rate if rank_rate else 0.0
        lists = schedule_of(
            order.schedule, self._stages, order.micro_batches, chunks=order.interleave
        )
        costs = Costs(nap_s, BACKWARD * nap_s, message_s)
        return simulate(lists, chunks=order.interleave, costs=costs).bubble

    def step(self) -> list[dict[str, float]]:
        """One step: of each rank its stage, and seconds ``busy``, ``waited`` for messages, ``idle``. Collective."""
        world, stats = self.topology.world, self._pipeline.messages.stats
        before = stats.waited_s
        self.topology.barrier()
        begin = time.perf_counter()
        self._pipeline.step(self._inputs, self._inputs)
        took = time.perf_counter() - begin
        self.topology.barrier()  # the last to be through ends the step
        whole = time.perf_counter() - begin
        waited = stats.waited_s - before
        self._optimizer.step()
        self._optimizer.zero_grad()
        mine = {
            "stage": float(self.topology.pipeline.rank),
            "busy": took - waited,
            "waited": waited,
            "idle": whole - (took - waited),
        }
        return [json.loads(text) for text in world.gather_text(json.dumps(mine))]

    def close(self) -> None:
        """Give everything back. Collective."""
        hpczero.release(self._model)
        self.topology.free()
