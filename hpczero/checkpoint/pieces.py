"""From a rank's shard of a parameter's part to its place in the file.

Owns: the arithmetic. Must not know: files, ranks, where anything rests.

    whole parameter       | . a a a . . . . | . b b b . . . . |      a cut along an inner dimension: one run a row
    this rank's part      | a a a x | b b b x |                      x: padding
    its shard of it           [ a a x | b ]                          a piece
"""

from __future__ import annotations

from math import prod

from hpczero.checkpoint.even_runs import Entry
from hpczero.checkpoint.held import Piece
from hpczero.plan.placement import Placement
from hpczero.zero.units.unit import Unit


def piece_of(
    unit: Unit,
    position: int,
    part: range,
    shift: int,
    placement: Placement,
    place: int,
    counted: bool,
) -> Piece:
    """The piece of one slot.

    Args:
        unit: that has it.
        position: of the slot in the unit.
        part: elements of the slot that this rank's shard has, counted in the slot; not empty.
        shift: from places in the slot to those in the ``owned_values`` of the unit.
        placement: of the slot in the whole parameter.
        place: of the whole parameter in the file.
        counted: whether this rank saves it.
    """
    if placement.dim is None:
        begin = part.start + shift
        return Piece(place + part.start, unit, position, begin, len(part), counted=counted)
    after = prod(placement.shape[placement.dim + 1 :])
    # As Placement.runs: run after run, at one distance in the part and at another one in the whole.
    length = len(placement.owned) * after
    local = Entry(0, part.stop, 0, placement.room * after, length)
    first, last = local.before(part.start), local.before(part.stop)
    base = place + placement.owned.start * after
    whole = Entry(base, base, base, placement.strip * after, length)
    start, stop = (whole.at(first), whole.at(last - 1) + 1) if last > first else (base, base)
    return Piece(
        start,
        unit,
        position,
        part.start + shift,
        last - first,
        whole=whole._replace(start=start, stop=stop) if stop - start > last - first else None,
        local=Entry(part.start + shift, part.stop + shift, shift, local.stride, length)
        if placement.is_padded
        else None,
        counted=counted,
    )
