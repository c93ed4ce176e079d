"""What rank 0 does alone may take longer than a collective may, as long as it gets on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpczero import Topology
from hpczero.errors import DataError, StoppedEarly
from hpczero.job.long_work import Ended, Progress
from hpczero.job.root_work import done_by_root
from hpczero.options.config import DataOptions
from hpczero.run.starting.reading import open_tokens
from tests.helpers.forkserver import BASE
from tests.helpers.forkserver import server as forkserver
from tests.helpers.mpirun import ROOT, run_ranks
from tests.helpers.pace import pace
from tests.helpers.parallel import parallel_assert
from tests.helpers.processes import come_to_rest, end_family, launch_environment
from tests.helpers.small_models import raises_on_all

if TYPE_CHECKING:
    from mpi4py import MPI

LIMIT_S = 2.0


def second(comm: MPI.Intracomm) -> float:
    """A limit of a second, stretched as slow as the slowest rank is now: a late rank is no hang."""
    return max(comm.allgather(pace()))


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_work_longer_than_the_limit_of_a_collective_is_no_hang_while_it_gets_on(
    comm: MPI.Intracomm,
) -> None:
    limit_s = second(comm)
    topology = Topology.create(comm, timeout_s=limit_s)
    main = threading.get_ident()
    on_main: list[bool] = []

    def work(progress: Progress) -> str:
        on_main.append(threading.get_ident() == main)
        for _ in range(8):
            time.sleep(limit_s / 4)
            progress.advance()
        return "what it found"

    found = done_by_root(topology, "find it", work)
    parallel_assert(comm, found == "what it found")
    parallel_assert(comm, on_main == ([False] if comm.rank == 0 else []), "by rank 0 alone")
    topology.free()


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_error_of_the_work_is_that_of_all_ranks(comm: MPI.Intracomm) -> None:
    topology = Topology.create(comm)

    def work(progress: Progress) -> str:
        raise DataError("there is no text")

    raises_on_all(comm, DataError, "there is no text", lambda: done_by_root(topology, "go", work))
    topology.free()


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_text_that_takes_longer_to_tokenize_than_the_limit_is_trained_on(
    comm: MPI.Intracomm, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As many pieces as 8 GiB have; the tokenizer's library tells nothing while it is at 256 of them.
    monkeypatch.setattr("hpczero.data.corpus.BLOCK_NBYTES", 4096)
    line = "".join(f"word{n} of the book, " for n in range(200)) + "\n"
    topology = Topology.create(comm, timeout_s=LIMIT_S)
    longest_s, mib = 0.0, 2
    while longest_s <= LIMIT_S:  # a faster machine needs a longer text
        mib *= 4
        path = folder / f"text-{mib}"
        if comm.rank == 0:
            path.write_text(line * (mib * 2**20 // len(line)))
        comm.Barrier()
        options = DataOptions(path=str(path), tokenizer="bpe", cache=str(folder))
        begin = time.monotonic()
        with open_tokens(options, topology) as tokens:
            parallel_assert(comm, len(tokens.train) > 0)
        longest_s = comm.bcast(time.monotonic() - begin)
    topology.free()


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_ranks_that_wait_leave_their_cores_to_the_work(comm: MPI.Intracomm) -> None:
    topology, pids = Topology.create(comm), comm.allgather(os.getpid())
    before = os.sched_getaffinity(0)
    cores = sorted(before)
    mine = {cores[comm.rank % len(cores)]}
    os.sched_setaffinity(0, mine)
    try:

        def work(progress: Progress) -> str:
            rest = come_to_rest(pids, share=0.3)
            return json.dumps([rest, sorted(os.sched_getaffinity(0))])

        rest, found = json.loads(done_by_root(topology, "find it", work))
        parallel_assert(comm, found == cores[: comm.size], f"{found}")
        parallel_assert(comm, os.sched_getaffinity(0) == mine, "as before")
        parallel_assert(comm, rest, "they were busy all the time")
    finally:
        os.sched_setaffinity(0, before)
    topology.free()


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_rank_that_is_asked_to_stop_ends_the_work_on_all(comm: MPI.Intracomm) -> None:
    topology = Topology.create(comm)
    last = comm.size - 1
    for asked in (0, last):
        cleaned_up: list[bool] = []

        def work(progress: Progress, cleaned_up: list[bool] = cleaned_up) -> str:
            try:
                while True:
                    progress.advance()
                    time.sleep(0.01)
            except Ended:
                cleaned_up.append(True)
                raise

        def go(asked: int = asked, work: Callable[[Progress], str] = work) -> None:
            done_by_root(topology, "find it", work, is_stopped=lambda: comm.rank == asked)

        raises_on_all(comm, StoppedEarly, "asked to stop", go)
        parallel_assert(comm, cleaned_up == ([True] if comm.rank == 0 else []))
    topology.free()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_while_text_is_tokenized_ends_the_job_and_leaves_no_half_file(
    tmp_path: Path, number: int
) -> None:
    text = tmp_path / "text"
    # Rare words: there are pairs to learn for a while, and the file is written for long enough to be seen.
    text.write_text("".join(f"word{n * 7919 % 10**6} of {n}\n" for n in range(60_000)))
    cache = tmp_path / "cache"
    command = [os.fspath(ROOT / "install/launch.sh"), "2", sys.executable, "-m", "hpczero.train"]
    command += ["--data.path", os.fspath(text), "--data.cache", os.fspath(cache)]
    command += ["--data.tokenizer", "bpe", "--run.folder", os.fspath(tmp_path / "runs")]
    environment = launch_environment(**BASE, HPCZERO_SERIES="s")
    with (tmp_path / "out").open("w") as out:
        job = subprocess.Popen(
            forkserver.forked(tuple(command), environment),
            stdout=out,
            stderr=out,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
        try:
            writer = _writer(cache, job)
            os.kill(writer, number)
            assert job.wait(60) == 75, (tmp_path / "out").read_text()
        finally:
            end_family(job.pid)
    assert not list(cache.iterdir())
    assert "StoppedEarly" in (tmp_path / "out").read_text()
    record = (tmp_path / "runs" / "default" / "attempts.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in record] == ["start", "end"]


def _writer(cache: Path, job: subprocess.Popen[bytes]) -> int:
    """The process that has a half written file open in the folder; waits for one."""
    while True:
        assert job.poll() is None, "it ended before it wrote"
        begun = any(cache.glob(".*.tmp"))
        for found in Path("/proc").glob("[0-9]*/fd/*") if begun else ():
            try:
                target = os.readlink(found)
            except OSError:
                continue
            if target.startswith(f"{cache}/.") and target.endswith(".tmp"):
                return int(found.parts[2])
        time.sleep(0.01)


def test_work_that_does_not_get_on_any_more_ends_the_job_as_a_hang() -> None:
    program = """
    import time
    import hpczero
    from hpczero.job.root_work import done_by_root
    def work(progress):
        progress.advance()
        time.sleep(600)
    done_by_root(hpczero.Topology.of_world(), "find it", work)
    """
    job = run_ranks(2, ["-c", textwrap.dedent(program)], timeout=60, env={"HPCZERO_TIMEOUT": "2"})
    assert job.returncode == 86, job
    assert "waiting for rank 0 to find it" in job.stderr, job
