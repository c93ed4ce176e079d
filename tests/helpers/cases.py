"""The core: which cases of a test ``make test`` runs, and on which number of ranks. ``make test-all`` runs all on all.

Every value of every parameter occurs once. Which values meet in a case depends on the test's name, so that tests differ
and all ranks choose alike. Each case runs on one number of ranks.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from itertools import product
from typing import TypeVar

EVERYTHING = os.environ.get("HPCZERO_TEST_ALL") == "1"
LEFT_OUT = (
    "slow",
    "machine",
    "tool",
)  # marks of tests that are not in the core: see CONTRIBUTING.md
SHARES = {2: 3, 3: 2, 4: 2, 1: 1, 5: 1}  # of a test's cases that may run on any of them
HOMES = (2, 3, 4)  # a test's first case runs on one of these
MOST_IN_CORE = 3  # ranks, unless a test asks for more by its mark ``ranks``

Case = Mapping[Hashable, Hashable]
"""The value of each parameter."""

A = TypeVar("A")
B = TypeVar("B")


def each_value(cases: Sequence[Case], turn: int) -> list[int]:
    """Positions of few cases in which every value of every parameter occurs; ``turn`` says which values meet."""
    axes = _axes(cases)
    values = [set(enumerate(axis[position] for axis in axes)) for position in range(len(cases))]
    missing = set[object]().union(*values)
    start = turn % max(len(cases), 1)
    order = [*range(start, len(cases)), *range(start)]
    chosen = []
    while missing:
        best = max(order, key=lambda position: len(values[position] & missing))
        missing -= values[best]
        chosen.append(best)
    return sorted(chosen) if axes else [*range(len(cases))]


def spread(sizes: Sequence[Sequence[int]], turn: int) -> list[set[int]]:
    """For each case the number of ranks that it runs on, or none where it may run on none.

    Args:
        sizes: numbers of ranks on which each case of a test may run.
        turn: which of several equal choices.
    """
    used: Counter[int] = Counter()
    chosen: list[set[int]] = []
    for possible in sizes:
        homes = [size for size in possible if size in HOMES] if not used else []
        if homes:
            size = homes[turn % len(homes)]
        elif possible:
            size = min(possible, key=lambda size: ((used[size] + 1) / SHARES[size], -SHARES[size]))
        else:
            chosen.append(set())
            continue
        used[size] += 1
        chosen.append({size})
    return chosen


def chequered(first: Sequence[A], second: Sequence[B], turn: int) -> list[tuple[A, B]]:
    """Of all pairs every second one, as black and white fields; the next ``turn`` has the others.

    In ``make test-all`` all pairs, and where there is no choice: beside one value every other occurs.
    """
    every = list(product(first, second))
    if min(len(first), len(second)) < 2 or EVERYTHING:
        return every
    wide = len(second)
    return [p for at, p in enumerate(every) if (at // wide + at % wide + turn) % 2 == 0]


def _axes(cases: Sequence[Case]) -> list[tuple[int, ...]]:
    """For each parameter the number of its value in every case; parameters that change together are one."""
    names = dict.fromkeys(name for case in cases for name in case)
    columns = []
    for name in names:
        numbers: dict[Hashable, int] = {}
        columns.append(tuple(numbers.setdefault(c.get(name), len(numbers)) for c in cases))
    return list(dict.fromkeys(columns))
