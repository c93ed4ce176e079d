"""Architectures of transformers train as in one process of plain torch, on every transport."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.compat import architectures, libraries
from tests.compat.construct import Construct

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.ranks(2),
    # Others' code warns of itself; a warning of hpczero's is an error as everywhere.
    pytest.mark.filterwarnings("ignore", "error:::hpczero"),
]


@pytest.mark.worth("the Trainer trains as plain torch does")
@pytest.mark.parametrize(
    "construct", [*architectures.CONSTRUCTS, *libraries.CONSTRUCTS], ids=lambda each: each.name
)
def test_equals_plain_torch(construct: Construct, holds: Callable[[Construct], None]) -> None:
    holds(construct)
