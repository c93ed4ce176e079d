"""Which cases of a test run, and on which numbers of ranks, unless ``HPCZERO_TEST_ALL=1`` asks for all.

Owns: the choice. Every value of every parameter and every two values of two parameters that some case has together
occur; every test runs on two numbers of ranks at least, one of them 2 or 3. The choice depends on the test's name and
its cases alone, so that all ranks and all lanes come to the same. Must not know: pytest, MPI.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations, product
from typing import TypeVar

Case = Mapping[Hashable, Hashable]
"""Of each parameter its value."""

A = TypeVar("A")
B = TypeVar("B")
SHARES = {1: 1, 2: 3, 3: 2, 4: 1, 5: 1}  # of the cases of a test that may run on any of them
HOMES = (2, 3)


def pairwise(cases: Sequence[Case]) -> list[int]:
    """Positions of cases that have, together, every two values of two parameters that some case has; in their order."""
    axes = _axes(cases)
    if len(axes) < 3:
        return list(range(len(cases)))
    pairs = [
        set(combinations(enumerate(axis[position] for axis in axes), 2))
        for position in range(len(cases))
    ]
    missing = set[object]().union(*pairs)
    chosen = []
    while missing:
        best = max(range(len(cases)), key=lambda position: len(pairs[position] & missing))
        missing -= pairs[best]
        chosen.append(best)
    return sorted(chosen)


def spread(cases: Sequence[Case], sizes: Sequence[Sequence[int]], turn: int) -> list[set[int]]:
    """Numbers of ranks for each case: one for each case, two for a case that is alone.

    Args:
        cases: of one test.
        sizes: numbers of ranks on which each may run.
        turn: which of several equal choices; tests have different ones.
    """
    axes = _axes(cases)
    first = _two(sorted(set().union(*map(set, sizes))), turn)
    if len(cases) == 1:
        return [set(first)]
    used: Counter[int] = Counter()
    met: set[tuple[int, int, int]] = set()  # parameter, value, number of ranks
    chosen: list[set[int]] = []
    for position, possible in enumerate(sizes):
        values = list(enumerate(axis[position] for axis in axes))
        worth = {
            size: (
                size in first and not used[size],
                sum((*value, size) not in met for value in values),
                SHARES.get(size, 1) / (used[size] + 1),
            )
            for size in possible
        }
        best = {max(possible, key=worth.__getitem__)} if possible else set()
        used.update(best)
        met |= {(*value, size) for value in values for size in best}
        chosen.append(best)
    return chosen


def chequered(first: Sequence[A], second: Sequence[B], turn: int) -> list[tuple[A, B]]:
    """Of all pairs every second one, as black and white fields; the next ``turn`` has the others.

    With HPCZERO_TEST_ALL=1 all pairs, and where there is no choice: beside one value every other occurs.
    """
    every = list(product(first, second))
    if min(len(first), len(second)) < 2 or os.environ.get("HPCZERO_TEST_ALL") == "1":
        return every
    wide = len(second)
    return [p for at, p in enumerate(every) if (at // wide + at % wide + turn) % 2 == 0]


def dealt(cases: Sequence[A], hands: int, hand: int) -> list[A]:
    """Of ``cases``, dealt in turn to ``hands``, those of one; with HPCZERO_TEST_ALL=1 all."""
    every = os.environ.get("HPCZERO_TEST_ALL") == "1"
    return [*cases] if every else [*cases[hand % hands :: hands]]


def _axes(cases: Sequence[Case]) -> list[tuple[int, ...]]:
    """Of each parameter its value in every case; those that change together are one, by numbers."""
    names = dict.fromkeys(name for case in cases for name in case)
    columns = []
    for name in names:
        numbers: dict[Hashable, int] = {}
        columns.append(tuple(numbers.setdefault(c.get(name), len(numbers)) for c in cases))
    return list(dict.fromkeys(columns))


def _two(sizes: Sequence[int], turn: int) -> list[int]:
    """Of these numbers of ranks 2 or 3 and another one, with an odd one wherever there is one above 1."""
    homes = [size for size in HOMES if size in sizes] or list(sizes)
    home = homes[turn % len(homes)] if homes else 0
    others = [size for size in sizes if size != home]
    if home == 1 or home % 2 == 0:
        others = [size for size in others if size % 2 and size > 1] or others
    return [home, others[turn // 2 % len(others)]] if others else [home] if homes else []
