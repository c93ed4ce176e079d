"""Code of others trains as in one process of plain torch, on every transport alike, or is refused by name on all."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import pytest

from tests.compat import table
from tests.compat.construct import Construct

pytestmark = [
    pytest.mark.mpi,
    # Others' code warns of itself; a warning of hpczero's is an error as everywhere.
    pytest.mark.filterwarnings("ignore", "error:::hpczero"),
]


def on_some_ranks(construct: Construct) -> pytest.MarkDecorator:
    """2 ranks always; of four constructs one on 1 rank too and one on 3. By name, so that it stays."""
    if construct.ranks is not None:
        return pytest.mark.ranks(*construct.ranks)
    also = (1, 3, 2, 2)[zlib.crc32(construct.name.encode()) % 4]
    return pytest.mark.ranks(2, also)


@pytest.mark.parametrize(
    "construct",
    [pytest.param(each, marks=on_some_ranks(each), id=each.name) for each in table.SMALL],
)
def test_equals_plain_torch_or_is_refused_by_name(
    construct: Construct, holds: Callable[[Construct], None]
) -> None:
    holds(construct)
