"""The table of a whole model, of which every rank may have another part.

Owns: what is gathered over stages for it, and the refusal of parts that do not make one model. Must not know: units,
where elements rest, files.

Tensor ranks hold parts of a parameter, or all the same whole one. Pipeline stages hold different parameters, and some
one tied weight twice. A checkpoint knows nothing of that: names, shapes and order are those of the whole model.

Source: issue 19.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from mpi4py import MPI

from hpczero.checkpoint.disk.format import NAMED, Table, plain_name
from hpczero.errors import CheckpointError
from hpczero.job.group import unlike
from hpczero.job.topology import Topology
from hpczero.plan.placement import ModelPart, Placement, part_of
from hpczero.zero.sharding import Sharding

Rows = Sequence[tuple[str, tuple[int, ...], int]]  # name, shape, optimizer group


@dataclass(frozen=True)
class Share:
    """What this rank has of a whole model.

    Attributes:
        table: of the whole model, equal on every rank.
        placements: of each parameter of this rank's model, by its name there.
    """

    table: Table
    placements: Mapping[str, Placement]

    def name(self, local: str) -> str:
        """The name in the whole model of a parameter of this rank's model."""
        return self.placements[local].name


def share_of(sharding: Sharding) -> Share:
    """The whole model's table, and this rank's share. Collective over world where ranks have parts of a model.

    Raises:
        CheckpointError: on every rank: the parts do not make one model; the message names a parameter.
    """
    part, topology = part_of(sharding.model), sharding.topology
    if part is None and not has_parts(topology):
        placements = _placements(sharding, None)
        return Share(_merged([_rows(sharding, placements)], _whole(sharding)), placements)
    with topology.agreed("look at this rank's part of the model"):
        placements = _placements(sharding, part)
        own = _rows(sharding, placements)
    with topology.watchdog.collective(
        "checkpoint: parts of tensor ranks, parameters of all stages"
    ):
        beside = topology.tensor.comm.allgather(list(placements.values()))
        stages = topology.pipeline.comm.allgather(own)
    with topology.agreed("compare the parts of tensor ranks"):
        _check_cuts(beside)
    with topology.agreed("put the tables of all stages together"):
        table = _merged(stages, part or _whole(sharding))
    _check_equal(sharding, table)
    return Share(table, placements)


def has_parts(topology: Topology) -> bool:
    """Whether ranks hold parts of a model, or more than one copy of it."""
    return topology.model_parallel.size > 1 or topology.replicate.size > 1


def check_cover(topology: Topology, table: Table, held: Mapping[str, int]) -> None:
    """Refuse parts that miss elements of the whole model, or have them twice. Collective over world.

    Args:
        topology: the ranks.
        table: of the whole model.
        held: elements of each parameter that this rank saves.

    Raises:
        CheckpointError: on every rank; the message names a parameter.
    """
    if not has_parts(topology):
        return
    rows = table.owners
    counts = np.array([held.get(row.name, 0) for row in rows], dtype=np.int64)
    with topology.watchdog.collective("checkpoint: elements that ranks hold"):
        topology.world.comm.Allreduce(MPI.IN_PLACE, counts, op=MPI.SUM)
    for row, count in zip(rows, counts.tolist(), strict=True):
        if count != row.numel:
            error = CheckpointError(
                f"ranks hold {count:,} elements of {row.name!r} together, expected the {row.numel:,} of its shape "
                f"{row.shape}: its parts do not make it whole; see that each part has another number, and that of "
                "equal copies one is counted (plan.placement.Placement)"
            )
            error.agreed = True
            raise error


def _placements(sharding: Sharding, part: ModelPart | None) -> dict[str, Placement]:
    """Of each parameter of this rank's model, by its name there.

    Raises:
        CheckpointError: one has another shape than its placement says, or the name of another.
    """
    found: dict[str, Placement] = {}
    names: dict[str, str] = {}
    for unit in sharding.units:
        for slot in unit.spec.layout.slots:
            placement = part.placement(slot.name, slot.shape) if part else None
            placement = placement or Placement(slot.name, slot.shape)
            found[slot.name] = placement = replace(placement, name=plain_name(placement.name))
            if names.setdefault(placement.name, slot.name) != slot.name:
                raise CheckpointError(
                    f"rank {sharding.topology.rank}: parameters {names[placement.name]!r} and {slot.name!r} both have "
                    f"the name {placement.name!r} in a checkpoint; give one another name"
                )
            if placement.local_shape != slot.shape:
                raise CheckpointError(
                    f"rank {sharding.topology.rank}: parameter {slot.name!r} is {slot.shape}, expected "
                    f"{placement.local_shape}: part {placement.part} of {placement.parts} of {placement.name!r}, which "
                    f"is {placement.shape}; build the parameter by its placement"
                )
    return found


def _rows(sharding: Sharding, placements: Mapping[str, Placement]) -> Rows:
    return [
        (placements[slot.name].name, placements[slot.name].shape, group)
        for unit in sharding.units
        for slot, group in zip(unit.spec.layout.slots, unit.spec.groups, strict=True)
    ]


def _whole(sharding: Sharding) -> ModelPart:
    """A model that is not a part of one."""
    by_object = {id(parameter): name for name, parameter in sharding.model.named_parameters()}
    aliases = {
        name: by_object[id(parameter)]
        for name, parameter in sharding.model.named_parameters(remove_duplicate=False)
        if by_object[id(parameter)] != name
    }
    return ModelPart(tuple(by_object.values()), aliases)


def _merged(stages: Sequence[Rows], part: ModelPart) -> Table:
    """One table of what all stages have, in the order of the whole model.

    Raises:
        CheckpointError: stages have one parameter differently, or the whole model has others.
    """
    aliases = {plain_name(name): plain_name(owner) for name, owner in part.aliases.items()}
    part = ModelPart(tuple(map(plain_name, part.names)), aliases)
    found: dict[str, tuple[tuple[int, ...], int]] = {}
    for stage, rows in enumerate(stages):
        for name, shape, group in rows:
            before = found.setdefault(name, (tuple(shape), group))
            if before != (tuple(shape), group):
                raise CheckpointError(
                    f"{name!r} is {_told(tuple(shape), group)} on stage {stage}, and {_told(*before)} on a stage "
                    "before; give a tied weight the same shape and the same group of the optimizer on both stages"
                )
    for what, names in (
        ("no stage has", [name for name in part.names if name not in found]),
        ("the whole model does not name", [name for name in found if name not in set(part.names)]),
    ):
        if names:
            more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
            raise CheckpointError(
                f"{what} {', '.join(names[:NAMED])}{more}; every parameter in ModelPart.names is on one stage at "
                "least, and no other is on any"
            )
    return Table.build([(name, *found[name]) for name in part.names], part.aliases)


def _check_cuts(ranks: Sequence[Sequence[Placement]]) -> None:
    """Refuse tensor ranks that cut a parameter differently, or save the same part of it.

    Raises:
        CheckpointError: the message names the parameter.
    """
    found: dict[str, list[Placement]] = {}
    for placement in (placement for rank in ranks for placement in rank if placement.counted):
        others = found.setdefault(placement.name, [])
        for other in others:
            if replace(other, part=0) != replace(placement, part=0) or other.part == placement.part:
                raise CheckpointError(
                    f"two tensor ranks hold part {other.part} of {other.parts} and part {placement.part} of "
                    f"{placement.parts} of {placement.name!r}, expected other parts of one cut: got {other} and "
                    f"{placement}; give each rank its own part, and count one of equal copies"
                )
        others.append(placement)


def _told(shape: tuple[int, ...], group: int) -> str:
    return f"{shape} and {'frozen' if group < 0 else f'in group {group} of the optimizer'}"


def _check_equal(sharding: Sharding, table: Table) -> None:
    """Refuse tables that differ between ranks. Collective over world.

    Raises:
        CheckpointError: on every rank; the message names parameters.
    """
    topology = sharding.topology
    differs = unlike(topology.world, list(_lines(sharding, table)))
    with topology.agreed("compare the tables of all ranks"):
        if differs:
            raise CheckpointError(
                f"rank {topology.rank}: the whole model has {_first(differs[0])}, where rank 0 has "
                f"{_first(differs[1])}; give every rank a part of the same model, and the same groups of the optimizer"
            )


def _lines(sharding: Sharding, table: Table) -> Iterator[str]:
    groups, classes = len(sharding.optimizers.groups), sharding.optimizers.classes
    yield f"{groups} group(s) of {', '.join(classes) or 'no optimizer'}"
    for place, row in enumerate(table.rows):
        tied = "" if row.tied_to is None else f", tied to {table.rows[row.tied_to].name!r}"
        yield f"{row.name!r} at place {place} of {_told(row.shape, row.group)}{tied}"


def _first(text: str) -> str:
    parts = text.split("; ")
    more = f" and {len(parts) - NAMED} more" if len(parts) > NAMED else ""
    return "; ".join(parts[:NAMED]) + more
