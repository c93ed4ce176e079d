"""Fixtures that all tests share; what runs them on several ranks is ``tests/helpers/plugin.py``."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

from tests.helpers.forkserver import Forked

if TYPE_CHECKING:  # MPI starts on import, and torch is slow to load: only tests that use them pay
    from mpi4py import MPI

    from hpczero import Topology
    from tests.helpers.world import World

pytest_plugins = ["tests.helpers.plugin", "tests.helpers.lanes"]

# The same examples on every rank and every machine, or ranks would make different collective calls.
hypothesis.settings.register_profile(
    "hpczero", derandomize=True, deadline=None, database=None, print_blob=True
)
hypothesis.settings.load_profile("hpczero")


@pytest.fixture(scope="session")
def session_comm() -> Iterator[MPI.Intracomm]:
    """A duplicate of the world communicator for all tests of the session."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    comm.Set_name("test session")
    yield comm
    comm.Free()


@pytest.fixture
def comm(request: pytest.FixtureRequest) -> MPI.Intracomm:
    """All ranks of the run, which enter the test together. For tests marked ``mpi``."""
    if request.node.get_closest_marker("mpi") is None:
        pytest.fail("this test uses ranks: mark it @pytest.mark.mpi")
    comm: MPI.Intracomm = request.getfixturevalue("session_comm")
    comm.Barrier()
    return comm


@pytest.fixture
def topology(comm: MPI.Intracomm) -> Iterator[Topology]:
    """A topology over all ranks of the run, on the nodes that MPI sees."""
    from hpczero import Topology

    topology = Topology.create(comm)
    yield topology
    topology.free()


@pytest.fixture
def world(comm: MPI.Intracomm, topology: Topology, folder: Path) -> World:
    """All ranks of the run, a topology over them and a folder of theirs."""
    from tests.helpers.world import World

    return World(comm, topology, folder)


@pytest.fixture
def folder(comm: MPI.Intracomm) -> Iterator[Path]:
    """Empty, and the same on all ranks; pytest's own would be made by several ranks at once."""
    path = tempfile.mkdtemp(prefix="hpczero-checkpoints-") if comm.rank == 0 else ""
    path = comm.bcast(path)
    yield Path(path)
    comm.Barrier()
    if comm.rank == 0:
        shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that the code under test starts by itself come from the fork server too."""
    monkeypatch.setattr(subprocess, "Popen", Forked)
