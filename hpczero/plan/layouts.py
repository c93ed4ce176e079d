"""The plan command for a layout: ``python -m hpczero.plan ... --parallel.tensor 8 --parallel.pipeline 4``.

Owns: how its options become a ``Spread`` at each ZeRO stage. Must not know: any formula, how an answer is printed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from hpczero.models.config import GPTConfig
from hpczero.options.config import LayoutOptions
from hpczero.plan.degrees import check_micro_batches, check_model, mesh_of
from hpczero.plan.footprint import Named
from hpczero.plan.precision import DType
from hpczero.plan.sizing import Machine
from hpczero.plan.spread import Spread
from hpczero.predict.layout import predict_layout
from hpczero.predict.layout_answer import LayoutReport, Row
from hpczero.predict.machine import Machine as Described


class Sizes(Protocol):
    """What this needs of the command's options."""

    @property
    def parallel(self) -> LayoutOptions:
        """Degrees."""

    @property
    def model(self) -> str | None:
        """Name of a preset."""

    @property
    def ranks(self) -> int:
        """Of the job."""

    @property
    def precision(self) -> str:
        """Of parameters."""

    @property
    def reduce(self) -> DType:
        """Of gradients' partial sums between nodes and replicas."""

    @property
    def optimizer(self) -> str:
        """Name of ``hpczero.plan.memory.STATE_BYTES``."""

    @property
    def micro_batch(self) -> int:
        """Samples of one forward."""

    @property
    def accumulation(self) -> int:
        """Forwards of a step."""

    @property
    def stage(self) -> int | None:
        """ZeRO stage that must fit."""


@dataclass(frozen=True)
class Place:
    """Where a layout is to run.

    Attributes:
        machine: bytes of a rank.
        ranks_per_node: of each node.
        transport: picks one for the group that shares parameters, from its ranks on a node and its nodes.
        described: what the time of a step is predicted on.
    """

    machine: Machine
    ranks_per_node: int
    transport: Callable[[int, int], Named]
    described: Described | None = None


def layout_report(options: Sizes, config: GPTConfig, sequence: int, place: Place) -> LayoutReport:
    """The layout of the options at every ZeRO stage.

    Raises:
        ConfigError: the degrees do not suit each other, the ranks, the nodes or the model.
    """
    parallel = options.parallel
    parallel.check(stage=3 if options.stage is None else options.stage)
    config = replace(config, context=sequence)
    check_model(parallel, config)
    check_micro_batches(parallel, options.accumulation)
    mesh = mesh_of(parallel, options.ranks, place.ranks_per_node)
    spread = Spread(
        config,
        mesh,
        place.ranks_per_node,
        precision=options.precision,
        reduce=options.reduce,
        micro_batch=options.micro_batch,
        accumulation=options.accumulation,
        sequence_parallel=parallel.sequence,
        secondary=parallel.secondary,
        schedule=parallel.order,
        interleave=parallel.interleave,
        optimizer=options.optimizer,
    )
    transport = place.transport(spread.shards.local, spread.shards.nodes)
    rows = []
    for stage in range(4):
        second = parallel.secondary and stage == 3
        row = replace(
            spread,
            stage=stage,
            secondary=second,
            transport=transport,
            on_device=place.machine.on_device,
        )
        rows.append(_row(row, place))
    title = options.model or "custom model"
    described = place.described.title if place.described else ""
    return LayoutReport(title, place.machine.memory_nbytes, tuple(rows), described)


def _row(spread: Spread, place: Place) -> Row:
    room = place.machine.memory_nbytes
    if spread.shares(spread.worst).total > room:
        spread = replace(spread, checkpointing=True)
    fits = spread.shares(spread.worst).total <= room
    found = predict_layout(spread, place.described) if place.described else None
    return Row(spread, fits, found)
