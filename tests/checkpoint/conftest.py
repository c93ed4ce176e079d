"""A folder that all ranks of a test see."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from mpi4py import MPI


@pytest.fixture
def folder(comm: MPI.Intracomm) -> Iterator[Path]:
    """Empty, and the same on all ranks; pytest's own would be made by several ranks at once."""
    path = tempfile.mkdtemp(prefix="hpczero-checkpoints-") if comm.rank == 0 else ""
    path = comm.bcast(path)
    yield Path(path)
    comm.Barrier()
    if comm.rank == 0:
        shutil.rmtree(path, ignore_errors=True)
