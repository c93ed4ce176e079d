"""Stages that a test makes and that are released at its end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.parallel.pipeline.models import Make, Staged

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero.models import GPT


@pytest.fixture
def staged(comm: MPI.Intracomm) -> Iterator[Make]:
    """Makes this rank's stage of a GPT over all ranks; options are those of ``Staged``."""
    made: list[Staged] = []

    def make(model: GPT, **options: Any) -> Staged:
        made.append(Staged(comm, model, **options))
        return made[-1]

    yield make
    for each in made:
        each.release()
