"""Modifiers: whose changes inside ``gathered`` become everybody's.

Owns: which rank that is for each part of a model, and what is refused where ranks that share layers have changed them
otherwise. Must not know: how values travel, shards, the optimizer.

One rank has changed a whole model. Where ranks hold parts, that rank's copy of the model lies on several, which are
``topology.model_parallel`` of it. Each of these gives its part to the ranks that hold the same part.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpczero.errors import StepError
from hpczero.job.mesh import DATA_SEQUENCE, DEGREES, MODEL
from hpczero.job.topology import Topology
from hpczero.kernels.bits import digest_of_bits
from hpczero.zero.units.unit import Unit

EXACT = 2**52 - 1  # what fp64 holds of a digest
NAMED = 3  # parameters of a unit


def root_of(topology: Topology, modifier_rank: int) -> int:
    """Rank in ``topology.data_sequence`` of the one that gives its values to this rank. Not collective."""
    wanted = topology.mesh.coordinates(modifier_rank)
    places = [DEGREES.index(name) for name in DATA_SEQUENCE]
    ranks = topology.mesh.members(topology.rank, *DATA_SEQUENCE)
    coordinates = [topology.mesh.coordinates(rank) for rank in ranks]
    return next(
        index
        for index, found in enumerate(coordinates)
        if all(found[place] == wanted[place] for place in places)
    )


def check_copies(units: Sequence[Unit], topology: Topology, modifier_rank: int) -> None:
    """Refuse changes that only some of the modifier's tensor ranks have made. Collective over world.

    What all of them hold must be equal, and of a unit of parts all must have changed theirs or none: whoever changes a
    parameter on one rank alone means all of it.

    Raises:
        StepError: on every rank; the message names a unit or parameter, and the ranks that must do the same.
    """
    if topology.tensor.size == 1:
        return
    named, mine = [], []
    for unit in units:
        held = ", ".join(repr(slot.name) for slot in unit.spec.layout.slots[:NAMED])
        named.append(
            f"one of {held} and so on" if len(unit.parameters) > NAMED else f"one of {held}"
        )
        mine.append(float(unit.whole.was_modified()))
        for place in unit.spec.kept:
            named.append(f"parameter {unit.spec.layout.slots[place].name!r}")
            value = unit.parameters[place].detach().contiguous().clone()
            mine.append(float(int(digest_of_bits(value.view(-1))) & EXACT))
    found = topology.tensor.share(np.array(mine))
    odd = np.flatnonzero((found != found[0]).any(axis=0)).tolist()
    ranks = topology.mesh.members(modifier_rank, *MODEL)
    with topology.agreed("keep what was changed inside gathered"):
        if odd and topology.rank in ranks:
            raise StepError(
                f"rank {topology.rank}: {named[odd[-1]]} was changed inside gathered(modifier_rank={modifier_rank}) by "
                "some of the ranks that share its layers (mesh: tensor) and not by the others, or otherwise; expected "
                f"the same change on each of ranks {list(ranks)}, which hold this copy of the model: of what a rank "
                "holds whole the same values, of what is split its own part"
            )
