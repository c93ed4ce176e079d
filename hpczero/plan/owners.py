"""Owners: which rank takes the update of which whole parameter, and in how many rounds.

Owns: the assignment, arithmetic and nothing else, the same on every rank. Must not know: MPI, torch, optimizers.

Longest job first, each to the rank with least work among those that hold a part of the parameter: what a rank holds
itself need not travel, and it knows what belongs to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

ROUND_NUMEL = (
    2**24
)  # elements of whole parameters that one owner has at a time, unless one alone has more


def work_of(shape: tuple[int, ...]) -> int:
    """How long the update of one parameter takes, up to a factor: products of its smaller Gram matrix.

    A stack of matrices, (..., rows, columns), takes as long as all of them; a vector as long as it is.
    """
    if len(shape) < 2:
        return prod(shape)
    rows, columns = shape[-2:]
    return prod(shape[:-2]) * min(rows, columns) ** 2 * max(rows, columns)


def owners_of(shapes: Sequence[tuple[int, ...]], holders: Sequence[Sequence[int]]) -> list[int]:
    """The owner of each parameter.

    Args:
        shapes: of the parameters.
        holders: of each the ranks that hold a part of it, at least one.
    """
    work = list(map(work_of, shapes))
    load: dict[int, int] = {}
    owners = [0] * len(shapes)
    for job in sorted(range(len(shapes)), key=lambda job: (-work[job], job)):
        rank = min(holders[job], key=lambda rank: (load.get(rank, 0), rank))
        load[rank] = load.get(rank, 0) + work[job]
        owners[job] = rank
    return owners


def rounds_of(
    shapes: Sequence[tuple[int, ...]], owners: Sequence[int], limit: int = ROUND_NUMEL
) -> list[list[int]]:
    """Which parameters are updated together, so that no owner has more than ``limit`` elements whole at a time.

    Longest first. A parameter with more elements has a round of its owner alone.
    """
    rounds: list[list[int]] = []
    at: dict[
        int, tuple[int, int]
    ] = {}  # of each owner its round, and the elements that it has there
    for job in sorted(range(len(shapes)), key=lambda job: (-work_of(shapes[job]), job)):
        number, held = at.get(owners[job], (0, 0))
        if held and held + prod(shapes[job]) > limit:
            number, held = number + 1, 0
        at[owners[job]] = number, held + prod(shapes[job])
        while len(rounds) <= number:
            rounds.append([])
        rounds[number].append(job)
    return rounds
