"""What a rank learns of its place before anything else happens."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from hpczero.accelerator import HostAccelerator
from hpczero.job.launch import warn_of_shared_devices
from tests.helpers.mpirun import run_ranks
from tests.helpers.parallel import parallel_assert

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology


class Numbered(HostAccelerator):
    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    @property
    def identity(self) -> str:
        return f"GPU-{self._number}"


@pytest.mark.mpi
@pytest.mark.ranks(3)
def test_ranks_that_share_a_device_are_told_of_once(
    comm: MPI.Intracomm, topology: Topology, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        warn_of_shared_devices(topology, Numbered(comm.rank))
        warn_of_shared_devices(topology, HostAccelerator())
        parallel_assert(comm, not caplog.records)
        warn_of_shared_devices(topology, Numbered(comm.rank // 2))
    said = [record.getMessage() for record in caplog.records]
    expected = ["up to 2 ranks share a device"] if comm.rank == 0 else []
    parallel_assert(comm, [line.split(";")[0] for line in said] == expected, str(said))


SINGLE = """
from mpi4py import MPI
import hpczero
from hpczero.comm import choose
from hpczero.errors import ConfigError
from tests.helpers.late import LateAccelerator
assert MPI.Query_thread() < MPI.THREAD_SERIALIZED
topology = hpczero.Topology.of_world()
choose(topology, "flat").close()
try:
    choose(topology, "flat", accelerator=LateAccelerator())
except ConfigError as error:
    print(error)
"""


def test_mpi_that_knows_one_thread_is_refused_on_a_device_and_not_on_the_host() -> None:
    done = run_ranks(1, ["-c", SINGLE], timeout=60, env={"MPI4PY_RC_THREAD_LEVEL": "single"})
    assert "only be called by the thread that started it" in done.stdout, done
