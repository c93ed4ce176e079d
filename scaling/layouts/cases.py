"""Which layouts are trained, and what the plan and the prediction say of each.

Owns: the layouts for nodes of equal size, their names, and which ranks and numbers are refused. Must not know: how a
layout is trained, torch, MPI, the report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from hpczero.errors import ConfigError
from hpczero.models.config import GPTConfig, parameter_count
from hpczero.options.config import LayoutOptions
from hpczero.plan.degrees import check_micro_batches, check_model, mesh_of
from hpczero.plan.footprint import fastest_transport
from hpczero.plan.sent import sent_by
from hpczero.plan.spread import Spread
from hpczero.predict.job import Job
from hpczero.predict.machine import Machine, MeasuredKernels
from hpczero.predict.model import Prediction, predict


@dataclass(frozen=True)
class Work:
    """What every layout trains.

    Attributes:
        model: sizes.
        global_batch: samples of a step.
        micro_batches: of a pipeline's step; other layouts take all samples of a rank at once.
    """

    model: GPTConfig
    global_batch: int
    micro_batches: int

    def describe(self) -> str:
        """One line for headings."""
        return (
            f"GPT {self.model.layers} x {self.model.hidden} ({parameter_count(self.model) / 1e6:.1f} M parameters), "
            f"{self.global_batch} x {self.model.context} tokens a step"
        )


@dataclass(frozen=True)
class Case:
    """One layout.

    Attributes:
        name: in tables.
        options: degrees.
        stage: of ZeRO.
        work: what is trained.
        ranks: of the job.
        local: ranks of a node.
    """

    name: str
    options: LayoutOptions
    stage: int
    work: Work
    ranks: int
    local: int

    @property
    def data(self) -> int:
        """Ranks with samples of their own."""
        return self.ranks // (self.options.tensor * self.options.pipeline)

    @property
    def accumulation(self) -> int:
        """Forwards of a step, which are the micro-batches of a pipeline."""
        return self.work.micro_batches if self.options.pipeline > 1 else 1

    @property
    def spread(self) -> Spread:
        """The layout as the plan knows it.

        Raises:
            ConfigError: the model or the batch cannot be cut so.
        """
        check_model(self.options, self.work.model)
        check_micro_batches(self.options, self.accumulation)
        pieces = self.data * self.accumulation
        if self.work.global_batch % pieces:
            raise ConfigError(
                f"--global_batch: got {self.work.global_batch}, which the {self.data} rank(s) with samples of their "
                f"own and {self.accumulation} micro-batch(es) of {self.name!r} do not divide; expected a multiple of "
                f"{pieces}"
            )
        spread = Spread(
            self.work.model,
            mesh_of(self.options, self.ranks, self.local),
            self.local,
            stage=self.stage,
            precision="fp32",
            micro_batch=self.work.global_batch // pieces,
            accumulation=self.accumulation,
            sequence_parallel=self.options.sequence,
            secondary=self.options.secondary,
            schedule=self.options.order,
            interleave=self.options.interleave,
        )
        shards = spread.shards
        return replace(spread, transport=fastest_transport(shards.local, shards.nodes))

    def sent_between(self, place: int) -> int:
        """Bytes that one rank of pipeline stage ``place`` sends to other nodes in a step, by the plan."""
        return sent_by(self.spread, place).total.between

    def foretold(
        self, machine: Machine, kernels: MeasuredKernels, *, overlap: bool = True
    ) -> Prediction:
        """A step on nodes like ``machine``, whose ranks compute as ``kernels`` were measured.

        Args:
            machine: each node.
            kernels: of one rank.
            overlap: whether computation hides messages between nodes.
        """
        return predict(Job.of(self.spread, machine, kernels=kernels, overlap=overlap))


def cases_of(work: Work, nodes: int, local: int) -> list[Case]:
    """Layouts that one may choose among, for ``nodes`` of ``local`` ranks.

    Those that need several nodes, or several ranks on one, are left out where there are none.
    """
    case = partial(Case, work=work, ranks=nodes * local, local=local)
    found = [case("shards over all, stage 3", LayoutOptions(), 3)]
    if nodes > 1 and local > 1:
        node = LayoutOptions(shard="node")
        second = LayoutOptions(secondary=True)
        found.append(case("shards in the node, stage 3", node, 3))
        found.append(case("shards over all, second shard, stage 3", second, 3))
    if local > 1:
        tensor = LayoutOptions(tensor=local)
        found.append(case(f"tensor {local}, stage 1", tensor, 1))
        found.append(case(f"tensor {local}, stage 3", tensor, 3))
    if nodes > 1:
        found.append(case(f"pipeline {nodes}, stage 1", LayoutOptions(pipeline=nodes), 1))
    if nodes > 1 and local > 1:
        both = LayoutOptions(pipeline=nodes, tensor=local)
        found.append(case(f"pipeline {nodes} x tensor {local}, stage 1", both, 1))
    return found


def cases_on(
    nodes: Sequence[Sequence[int]], work: Work, only: Sequence[int] | None = None
) -> list[Case]:
    """Layouts for ranks that lie so, each known to be one that the model and the batch can be cut by.

    Args:
        nodes: ranks of each node.
        work: what is trained.
        only: numbers of those that are wanted, in that order; None: all.

    Raises:
        ConfigError: nodes of different sizes, or ranks that do not lie node after node; a layout that there is not, or
            that cannot be cut so.
    """
    placed = [rank for ranks in nodes for rank in ranks]
    if len({len(ranks) for ranks in nodes}) > 1 or placed != [*range(len(placed))]:
        raise ConfigError(
            f"ranks lie as {nodes}; expected as many on every node, one node after the other (mpirun --map-by core)"
        )
    found = cases_of(work, len(nodes), len(nodes[0]))
    if only is not None:
        if any(not 0 <= number < len(found) for number in only):
            raise ConfigError(
                f"--only: got {[*only]}, expected numbers from 0 to {len(found) - 1}: "
                f"{', '.join(case.name for case in found)}"
            )
        found = [found[number] for number in only]
    for case in found:
        _ = case.spread  # refuses what cannot be cut, before anything is built
    return found


def on_links(machine: Machine, rate_mbit: float) -> Machine:
    """The machine with one link for each node, of that rate; as it is where ``rate_mbit`` is 0."""
    if not rate_mbit:
        return machine
    sources: Mapping[str, Any] = {**machine.sources, "nic_rate": "--rate_mbit"}
    return replace(machine, nics=1, nic_rate=rate_mbit * 1e6 / 8, sources=dict(sources))
