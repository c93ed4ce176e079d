"""The programs that most tests of this folder train, save and load."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # torch is slow to load: only tests that use it pay
    from hpczero import Topology
    from tests.checkpoint.programs import Program
    from tests.helpers.small_models import MLP


@pytest.fixture
def program(topology: Topology) -> Iterator[Program]:
    """A ``Program`` on all ranks."""
    from tests.checkpoint.programs import Program

    found = Program(topology)
    yield found
    found.close()


@pytest.fixture
def model(topology: Topology) -> Iterator[MLP]:
    """An ``MLP`` with AdamW, sharded over all ranks."""
    from tests.helpers.small_models import MLP, adamw, zeroified

    found = MLP()
    with zeroified(found, adamw(found), topology=topology):
        yield found
