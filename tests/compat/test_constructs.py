"""Code of others trains as in one process of plain torch, on every transport alike, or is refused by name on all."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace

import pytest
from _pytest.mark import ParameterSet

from tests.compat import table
from tests.compat.construct import Construct
from tests.helpers.cases import EVERYTHING

pytestmark = [
    pytest.mark.mpi,
    # Others' code warns of itself; a warning of hpczero's is an error as everywhere.
    pytest.mark.filterwarnings("ignore", "error:::hpczero"),
]


def on_other_ranks() -> list[ParameterSet]:
    """One of eight constructs for 1 rank and one for 3, HPCZERO_TEST_ALL=1: of four. By name, so that it stays."""
    share = 4 if EVERYTHING else 8
    found = []
    for each in table.SMALL:
        turn = zlib.crc32(each.name.encode()) % share
        if each.ranks is None and turn < 2:
            marks = pytest.mark.ranks((1, 3)[turn])
            found.append(pytest.param(each, marks=marks, id=each.name))
    return found


@pytest.mark.worth("plain torch's habits; the slowest compile")
@pytest.mark.parametrize(
    "construct",
    [
        pytest.param(each, marks=pytest.mark.ranks(*(each.ranks or [2])), id=each.name)
        for each in table.SMALL
    ],
)
def test_equals_plain_torch_or_is_refused_by_name(
    construct: Construct, holds: Callable[[Construct], None]
) -> None:
    holds(construct)


@pytest.mark.worth("plain torch's habits on other ranks")
@pytest.mark.parametrize("construct", on_other_ranks())
def test_on_one_and_three_ranks(construct: Construct, holds: Callable[[Construct], None]) -> None:
    holds(construct)


WAYS = {"writes-dict", "in-place-add-no-return", "dataclass-output", "posts-all", "parameter-views"}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", sorted(WAYS))
def test_one_node_that_is_as_strict_as_two(
    name: str, holds: Callable[[Construct], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCZERO_STRICT", "1")
    (construct,) = [each for each in table.SMALL if each.name == name]
    holds(replace(construct, stages=(3,)))
