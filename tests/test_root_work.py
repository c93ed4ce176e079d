"""What rank 0 does alone may take longer than a collective may, as long as it gets on."""

from __future__ import annotations

import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.helpers.mpirun import run_ranks
from tests.helpers.parallel import parallel_assert
from tests.small_models import raises_on_all

if TYPE_CHECKING:
    from mpi4py import MPI

LIMIT_S = 2.0


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_work_longer_than_the_limit_of_a_collective_is_no_hang_while_it_gets_on(
    comm: MPI.Intracomm,
) -> None:
    from hpczero import Topology
    from hpczero.rootwork import done_by_root

    topology = Topology.create(comm, timeout_s=1.0)
    main = threading.get_ident()
    on_main: list[bool] = []

    def work(tick: Callable[[], None]) -> str:
        on_main.append(threading.get_ident() == main)
        for _ in range(12):
            time.sleep(0.25)
            tick()
        return "what it found"

    found = done_by_root(topology, "find it", work)
    parallel_assert(comm, found == "what it found")
    parallel_assert(comm, on_main == ([False] if comm.rank == 0 else []), "by rank 0 alone")
    topology.free()


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_error_of_the_work_is_that_of_all_ranks(comm: MPI.Intracomm) -> None:
    from hpczero import Topology
    from hpczero.errors import DataError
    from hpczero.rootwork import done_by_root

    topology = Topology.create(comm)

    def work(tick: Callable[[], None]) -> str:
        raise DataError("there is no text")

    raises_on_all(comm, DataError, "there is no text", lambda: done_by_root(topology, "go", work))
    topology.free()


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_text_that_takes_longer_to_tokenize_than_the_limit_is_trained_on(
    comm: MPI.Intracomm, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hpczero import Topology
    from hpczero.config import DataOptions
    from hpczero.loop import open_tokens

    # As many pieces as 8 GiB have; the tokenizer's library tells nothing while it is at 256 of them.
    monkeypatch.setattr("hpczero.data.corpus.BLOCK_NBYTES", 4096)
    if comm.rank == 0:
        line = "".join(f"word{n} of the book, " for n in range(200)) + "\n"
        (folder / "text").write_text(line * (8 * 2**20 // len(line)))
    comm.Barrier()
    topology = Topology.create(comm, timeout_s=LIMIT_S)
    options = DataOptions(path=str(folder / "text"), tokenizer="bpe", cache=str(folder))
    begin = time.monotonic()
    with open_tokens(options, topology) as tokens:
        parallel_assert(comm, len(tokens.train) > 0)
    took_s = time.monotonic() - begin
    parallel_assert(comm, took_s > LIMIT_S, f"{took_s:.1f} s are too few to show anything")
    topology.free()


def test_work_that_does_not_get_on_any_more_ends_the_job_as_a_hang() -> None:
    program = textwrap.dedent(
        """
        import time
        import hpczero
        from hpczero.rootwork import done_by_root
        def work(tick):
            tick()
            time.sleep(600)
        done_by_root(hpczero.Topology.of_world(), "find it", work)
        """
    )
    job = run_ranks(2, ["-c", program], timeout=60, env={"HPCZERO_TIMEOUT": "2"})
    assert job.returncode == 86, job
    assert "waiting for rank 0 to find it" in job.stderr, job
