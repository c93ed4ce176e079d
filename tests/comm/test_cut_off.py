"""An exception that leaves a collective on one rank, where others wait for the rest of it, ends the job."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import pytest

from hpczero.errors import CommError
from hpczero.job.watchdog import Watchdog
from tests.helpers.mpirun import Finished, run_alone, run_ranks

# What a signal handler of the program's raises on rank 1 between two messages of a collective.
LOOP = """
from mpi4py import MPI
import torch
import hpczero
from hpczero.comm import algorithms, devices
from tests.helpers.small_models import MLP, adamw, update

class TimeUp(Exception):
    pass

waits = [0]
armed = []
plain = algorithms.wait_all

def wait_all(requests):
    waits[0] += 1
    if armed and waits[0] >= armed[0]:
        armed.clear()
        raise TimeUp("10 minutes left")
    plain(requests)

for module in (algorithms, devices):
    module.wait_all = wait_all

topology = hpczero.Topology.create(MPI.COMM_WORLD, {nodes})
model = MLP((300,) * 7)
optimizer = adamw(model)
hpczero.zeroify(model, optimizer, stage={stage}, topology=topology, transport="hierarchical", overlap={overlap})

def step():
    model(torch.ones(2, 300)).mean().backward()
    update(optimizer)

def evaluate():
    with torch.no_grad():
        return model(torch.ones(2, 300))

step()
waits[0] = 0
step()
per_step = waits[0]
evaluate()
assert per_step > 8, per_step
if topology.rank == 1:
    armed.append(waits[0] + int(per_step * {when}))
try:
    step()
except TimeUp:
    pass

print("went on", flush=True)
if topology.rank == 1:
    evaluate()
topology.barrier()
"""


def cut_off(
    nodes: tuple[int, ...], stage: int, when: float, *, overlap: bool = False, algorithms: str = ""
) -> Finished:
    """The loop, cut off on rank 1 at the part ``when`` of the messages of a step."""
    program = LOOP.format(nodes=nodes, stage=stage, when=when, overlap=overlap)
    algorithms = algorithms or "all_gather=pairwise,reduce_scatter=pairwise"
    env = {"HPCZERO_ALGORITHMS": algorithms}
    return run_ranks(len(nodes), ["-c", program], timeout=60, env=env)


@pytest.mark.parametrize("nodes", [(0, 1), (0, 0, 1)], ids=["pairs", "uneven"])
@pytest.mark.parametrize(("stage", "when"), [(3, 0.2), (3, 0.9), (1, 0.3), (2, 0.8)])
def test_a_collective_that_an_exception_leaves_ends_the_job(
    nodes: tuple[int, ...], stage: int, when: float
) -> None:
    ends(cut_off(nodes, stage, when))


@pytest.mark.parametrize(
    ("nodes", "when", "options"),
    [((0, 1, 2), 0.4, {"algorithms": "all_gather=ring"}), ((0, 1), 0.2, {"overlap": True})],
    ids=["ring", "thread"],
)
def test_so_does_one_of_a_ring_and_one_on_the_thread_between_nodes(
    nodes: tuple[int, ...], when: float, options: dict[str, Any]
) -> None:
    ends(cut_off(nodes, 3, when, **options))


def ends(job: Finished) -> None:
    """The rank says what left which call, and nothing comes after it."""
    assert job.returncode == 1, job
    assert "[rank 1] TimeUp: 10 minutes left" in job.stderr, job
    assert re.search(r"\[rank 1\] \w+ cut off .*: the job ends", job.stderr), job
    assert "went on" not in job.stdout, job


def run_program(program: str) -> Finished:
    """On 2 ranks."""
    return run_ranks(2, ["-c", textwrap.dedent(program)], timeout=60)


def test_a_program_alone_goes_on_after_what_it_caught() -> None:
    program = """
    import torch, hpczero
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    hpczero.zeroify(model, optimizer, stage=1)
    topology = hpczero.sharding(model).topology
    try:
        with topology.watchdog.collective("a sum"):
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    print("went on")
    """
    job = run_alone(["-c", textwrap.dedent(program)], timeout=60)
    assert "went on" in job.stdout, job


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Exit codes with which the job would have ended."""
    codes: list[int] = []
    monkeypatch.setattr("hpczero.job.watchdog.abort_job", codes.append)
    return codes


def test_an_error_that_all_ranks_raise_leaves_nobody_waiting(ended: list[int]) -> None:
    error = CommError("ranks disagree")
    error.agreed = True
    with pytest.raises(CommError, match="disagree"), Watchdog(0, 0.0).collective("a gather"):
        raise error
    assert not ended


@pytest.mark.parametrize(("ranks", "codes"), [(2, []), (3, [1])])
def test_an_error_of_all_ranks_of_a_topology_leaves_others_of_the_job_waiting(
    ended: list[int], ranks: int, codes: list[int]
) -> None:
    error = CommError("no memory to share")
    error.raised_by = 2
    watchdog = Watchdog(0, 0.0, ranks=ranks)
    with pytest.raises(CommError, match="no memory"), watchdog.collective("a gather"):
        raise error
    assert ended == codes


def test_an_operation_may_be_left_before_its_first_call_and_not_after(
    ended: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    watchdog = Watchdog(3, 0.0)
    with pytest.raises(ValueError, match="arguments"), watchdog.operation("a save"):
        raise ValueError("arguments")
    assert not ended

    def save() -> None:
        with watchdog.operation("a save"):
            with watchdog.collective("a gather"):
                pass
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save()
    assert ended == [1]
    assert "[rank 3] KeyboardInterrupt cut off a save, for the rest" in capsys.readouterr().err


@pytest.mark.parametrize("look", [1, 2], ids=["begins", "ends"])
def test_a_signal_as_a_call_begins_or_ends_leaves_no_call_that_looks_open(
    look: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    watchdog = Watchdog(0, 0.0)
    looks = 0

    def monotonic() -> float:
        nonlocal looks
        looks += 1
        if looks == look:
            raise KeyboardInterrupt
        return 0.0

    monkeypatch.setattr("hpczero.job.watchdog.time.monotonic", monotonic)
    with pytest.raises(KeyboardInterrupt), watchdog.collective("a gather"):
        pass
    assert watchdog._latest() is None


# Rank 1 waits in a call when the signal comes. The handler raises when the call is complete: nobody has its result.
SIGNAL = """
import os, signal, time
from mpi4py import MPI
import numpy as np
import hpczero
from hpczero.job.messages import ChunkedExchange
from tests.helpers.pace import pace

class TimeUp(Exception):
    pass

def handler(number, frame):
    raise TimeUp("10 minutes left")

signal.signal(signal.SIGALRM, handler)
topology = hpczero.Topology.create(MPI.COMM_WORLD)
exchange, rank = ChunkedExchange(topology), topology.rank
calls = {
    "gather": lambda i: topology.gather(100.0 * rank + i) == [i, 100.0 + i],
    "largest": lambda i: topology.world.largest(i) == i,
    "total": lambda i: topology.world.total(float(i)) == 2.0 * i,
    "text": lambda i: topology.world.gather_text(str(i)) == [str(i)] * 2,
    "objects": lambda i: exchange.objects(i, "metrics") == [i, i],
}
pids = MPI.COMM_WORLD.allgather(os.getpid())
step, has_told = 0, False
while step < 4:
    if step == 1 and rank == 0:
        MPI.COMM_WORLD.recv(source=1)
        time.sleep(0.25 * pace())  # a line of its program from there to the call
        os.kill(pids[1], signal.SIGALRM)
    if step == 1 and rank == 1 and not has_told:
        has_told = True
        MPI.COMM_WORLD.send("about to call", dest=0)
    try:
        assert calls["NAME"](step), ("of another step", step)
    except TimeUp:
        print("went on", flush=True)
        continue
    step += 1
"""


@pytest.mark.parametrize("name", ["gather", "largest", "total", "text", "objects"])
def test_a_call_whose_result_a_signal_has_kept_back_ends_the_job(name: str) -> None:
    ends(run_program(SIGNAL.replace("NAME", name)))


def test_a_signal_handler_that_exits_within_a_call_ends_the_job() -> None:
    """The others would wait for the rest of the call until the time limit, half an hour."""
    program = SIGNAL.replace("NAME", "gather")
    job = run_program(program.replace('raise TimeUp("10 minutes left")', "raise SystemExit(75)"))
    assert job.returncode == 75, job
    assert "[rank 1] sys.exit(75) cut off Topology.gather" in job.stderr, job


AGREED_WORK = """
from mpi4py import MPI
import hpczero
topology = hpczero.Topology.create(MPI.COMM_WORLD)
for number in range(2):
    try:
        with topology.agreed("read the data"):
            if topology.rank == 1 and number == 0:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        print("caught", flush=True)
"""
SAVE = """
import tempfile, torch
from mpi4py import MPI
import hpczero
from hpczero.checkpoint import Checkpoints
model = torch.nn.Linear(3, 3)
hpczero.zeroify(model, torch.optim.SGD(model.parameters(), lr=0.5), stage=1)
topology = hpczero.sharding(model).topology
folder = topology.broadcast_text(tempfile.mkdtemp())
def at(name):
    if topology.rank == 1 and name.startswith("wrote"):
        raise TimeoutError("10 minutes left")
try:
    with Checkpoints(folder, model, at=at) as checkpoints:
        checkpoints.save(0)
except TimeoutError:
    print("caught", flush=True)
hpczero.checkpoint.save(folder, model, step=0)
"""


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (AGREED_WORK, "KeyboardInterrupt cut off the agreement of all ranks after 'read the"),
        (SAVE, "TimeoutError cut off a save of a checkpoint"),
    ],
    ids=["agreed work", "save"],
)
def test_who_leaves_work_of_all_ranks_ends_the_job(program: str, said: str) -> None:
    job = run_program(program)
    assert "caught" not in job.stdout, job
    assert job.returncode == 1, job
    assert said in job.stderr, job
