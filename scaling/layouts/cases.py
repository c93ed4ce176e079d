"""Which layouts are trained, with which sizes, and what the plan and the prediction say of each; without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from scaling.contenders.workload import gpt_sizes
from scaling.evidence.harness import OnLinks, at_least


@dataclass(frozen=True)
class Sizes:
    """What every layout trains.

    Attributes:
        layers, hidden, heads, vocabulary, context: of the model. It should be large beside its samples, so that the
            links show and not the cores.
        global_batch: samples of a step, the same in every layout.
        micro_batches: of a pipeline's step; other layouts take all samples of a rank at once.
    """

    layers: int = 8
    hidden: int = 256
    heads: int = 4
    vocabulary: int = 1024
    context: int = 16
    global_batch: int = 32
    micro_batches: int = 8

    def __post_init__(self) -> None:
        names = "layers hidden heads vocabulary context global_batch micro_batches"
        at_least(self, **dict.fromkeys(names.split(), 1))

    @property
    def model(self) -> GPTConfig:
        return gpt_sizes(self.layers, self.hidden, self.heads, self.vocabulary, self.context)

    def describe(self) -> str:
        """One line for headings."""
        return (
            f"GPT {self.layers} x {self.hidden} ({parameter_count(self.model) / 1e6:.1f} M parameters), "
            f"{self.global_batch} x {self.context} tokens a step"
        )


@dataclass(frozen=True)
class TurnsOfLayouts(Sizes, OnLinks):
    """Options of measurements whose layouts take turns.

    Attributes:
        only: numbers of the layouts, from 0; left out, all.
        rounds: measured turns of each layout; from 6 on there is a 95 % interval of the median.
        steps: of a turn.
        warm_up: steps of each layout before the first round.
    """

    only: tuple[int, ...] = ()
    rounds: int = 7
    steps: int = 2
    warm_up: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        OnLinks.__post_init__(self)
        at_least(self, rounds=1, steps=1, warm_up=1)


@dataclass(frozen=True)
class Case:
    """One layout."""

    name: str  # in tables
    options: LayoutOptions  # degrees
    stage: int  # of ZeRO
    work: Sizes  # what is trained
    ranks: int  # of the job
    local: int  # ranks of a node

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
        """The layout as the plan knows it. Raises ConfigError: the model or the batch cannot be cut so."""
        check_model(self.options, self.work.model)
        check_micro_batches(self.options, self.accumulation)
        pieces = self.data * self.accumulation
        if self.work.global_batch % pieces:
            raise ConfigError(
                f"--global_batch: got {self.work.global_batch}, which the {self.data} rank(s) with samples of their "
                f"own and {self.accumulation} micro-batch(es) of {self.name!r} do not divide; expected a multiple of "
                f"{pieces}"
            )
        return spread_of(
            self.work.model,
            self.options,
            self.ranks,
            self.local,
            stage=self.stage,
            precision="fp32",
            micro_batch=self.work.global_batch // pieces,
            accumulation=self.accumulation,
        )

    def sent_between(self, place: int) -> int:
        """Bytes that one rank of pipeline stage ``place`` sends to other nodes in a step, by the plan."""
        return sent_by(self.spread, place).total.between

    def predicted(
        self, machine: Machine, kernels: MeasuredKernels, *, overlap: bool = True
    ) -> Prediction:
        """A step on nodes like ``machine``, whose ranks compute as ``kernels`` were measured.

        Args:
            machine: each node.
            kernels: of one rank.
            overlap: whether computation hides messages between nodes.
        """
        return predict(Job.of(self.spread, machine, kernels=kernels, overlap=overlap))


def spread_of(
    model: GPTConfig,
    layout: LayoutOptions,
    ranks: int,
    local: int,
    *,
    on_host: bool = True,
    **others: Any,
) -> Spread:
    """The layout of ``ranks`` ranks, ``local`` on a node, with the fastest transport; ``others`` are of ``Spread``."""
    spread = Spread(
        model,
        mesh_of(layout, ranks, local),
        local,
        sequence_parallel=layout.sequence,
        secondary=layout.secondary,
        schedule=layout.order,
        interleave=layout.interleave,
        **others,
    )
    shards = spread.shards
    transport = fastest_transport(shards.local, shards.nodes, on_host=on_host)
    return replace(spread, transport=transport)


def cases_of(work: Sizes, nodes: int, local: int) -> list[Case]:
    """Layouts that one may choose among, for ``nodes`` of ``local`` ranks.

    Those that need several nodes, or several ranks on one, are left out where there are none.
    """
    several, many = nodes > 1, local > 1
    second, pipeline = LayoutOptions(secondary=True), LayoutOptions(pipeline=nodes)
    tensor, both = LayoutOptions(tensor=local), LayoutOptions(pipeline=nodes, tensor=local)
    found = [
        (True, "shards over all", LayoutOptions(), 3),
        (several and many, "shards in the node", LayoutOptions(shard="node"), 3),
        (several and many, "shards over all, second shard", second, 3),
        (many, f"tensor {local}", tensor, 1),
        (many, f"tensor {local}", tensor, 3),
        (several, f"pipeline {nodes}", pipeline, 1),
        (several and many, f"pipeline {nodes} x tensor {local}", both, 1),
    ]
    return [
        Case(f"{name}, stage {stage}", layout, stage, work, nodes * local, local)
        for there, name, layout, stage in found
        if there
    ]


def cases_on(nodes: Sequence[Sequence[int]], work: Sizes, only: Sequence[int] = ()) -> list[Case]:
    """Layouts for ranks that lie so, each known to be one that the model and the batch can be cut by.

    Args:
        nodes: ranks of each node.
        work: what is trained.
        only: numbers of those that are wanted, in that order; none: all.

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
    if only:
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
    sources = {**machine.sources, "nic_rate": "--rate_mbit"}
    return replace(machine, nics=1, nic_rate=rate_mbit * 1e6 / 8, sources=sources)
