"""A call that cannot be right, or that a peer never makes, ends in an error that says so. Nothing hangs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

import hpczero.bridge
from hpczero.errors import CommError, ConfigError, HpcZeroError
from tests.helpers.bridged import bridge, two_nodes
from tests.helpers.mpirun import run_ranks
from tests.helpers.parallel import parallel_assert, told
from tests.helpers.small_models import raises_on_all

if TYPE_CHECKING:
    from mpi4py import MPI

# Two ranks; what happens on rank 1 stands in for the second call.
PROGRAM = """
import sys, time, torch
import torch.distributed as dist
from mpi4py import MPI
import hpczero.bridge

hpczero.bridge.init(MPI.COMM_WORLD)
rank, tensor = dist.get_rank(), torch.ones(5)
dist.all_reduce(tensor)
if rank == 1:
    {trouble}
{call}
"""


def run_program(trouble: str, call: str = "dist.all_reduce(tensor)") -> Any:
    code = PROGRAM.format(trouble=trouble, call=call)
    return run_ranks(2, ["-c", code], timeout=60, env={"HPCZERO_TIMEOUT": "2"})


def test_zeroify_makes_the_group_unless_it_is_told_not_to() -> None:
    program = """
import sys, torch, torch.distributed as dist
import hpczero
model = torch.nn.Linear(3, 3)
hpczero.zeroify(model, torch.optim.SGD(model.parameters()))
sys.stdout.write(f"initialised: {dist.is_initialized()}\\n")
"""
    for switch, expected in (("0", False), ("1", True)):
        job = run_ranks(2, ["-c", program], timeout=60, env={"HPCZERO_DISTRIBUTED": switch})
        assert job.returncode == 0, job
        assert job.stdout.count(f"initialised: {expected}") == 2, job


@pytest.mark.worth("nothing hangs")
@pytest.mark.parametrize("destroys", [False, True])
def test_rank_that_raises_ends_the_job_with_its_own_error(destroys: bool) -> None:
    """Groups that are destroyed on the way of an error do not hold it up."""
    raises = "raise ValueError('no such sample')"
    trouble = f"""
    try:
        {raises}
    finally:
        dist.destroy_process_group()
"""
    job = run_program(trouble.strip() if destroys else raises)
    assert job.returncode not in (0, 86), job
    assert "ValueError: no such sample" in job.stderr, job


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("dist.all_reduce(tensor)", "hang: allreduce over process group"),
        ("dist.recv(tensor, 1)", r"hang: receive of \(5,\) float32 from rank 1, tag 0"),
    ],
    ids=["collective", "message"],
)
def test_rank_that_leaves_is_a_hang_that_names_the_call(call: str, said: str) -> None:
    job = run_program("sys.exit(0)", call)
    assert job.returncode == 86, job
    assert re.search(said, job.stderr), job


def test_program_that_forgets_to_wait_ends_as_it_should() -> None:
    job = run_program("pass", "dist.all_reduce(tensor, async_op=True)")
    assert job.returncode == 0, job


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("one_node", [True, False])
@pytest.mark.parametrize("difference", ["verb", "shape", "dtype", "operation", "splits"])
def test_ranks_in_different_calls_all_raise_the_same_error(
    comm: MPI.Intracomm, difference: str, one_node: bool
) -> None:
    odd = comm.rank == comm.size - 1
    tensor = torch.ones(6 if odd and difference == "shape" else 5)
    if odd and difference == "dtype":
        tensor = tensor.double()

    def call() -> None:
        if difference == "splits":
            rows = [2] * comm.size
            sent = [3, *rows[1:]] if odd else rows
            dist.all_to_all_single(torch.ones(sum(rows)), torch.ones(sum(sent)), rows, sent)
        elif odd and difference == "verb":
            dist.broadcast(tensor, 0)
        elif odd and difference == "operation":
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
        else:
            dist.all_reduce(tensor)

    with bridge(comm, None if one_node else two_nodes(comm)):
        pattern = "another number of bytes" if difference == "splits" else "different calls"
        raises_on_all(comm, CommError, pattern, call)
        ones = torch.ones(3)
        dist.all_reduce(ones)  # an error that all ranks know of leaves the group usable
        parallel_assert(comm, torch.equal(ones, torch.full((3,), float(comm.size))))


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_callback_may_make_a_call_and_wait_for_it(comm: MPI.Intracomm) -> None:
    """As PowerSGD's hook does. On rank 0 it surely runs on the thread of the group, and another call waits already."""

    def again(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        doubled = future.value()[0] * 2
        found: torch.Tensor = dist.all_reduce(doubled, async_op=True).get_future().wait()[0]
        return found

    with bridge(comm):
        if comm.rank:
            comm.recv(source=0)
        found = dist.all_reduce(torch.ones(3), async_op=True).get_future().then(again)
        behind = torch.ones(5)
        work = dist.all_reduce(behind, async_op=True)
        if comm.rank == 0:
            for rank in range(1, comm.size):
                comm.send(None, dest=rank)
        right = found.wait().tolist() == [2.0 * comm.size**2] * 3
        work.wait()
        parallel_assert(comm, right and behind.tolist() == [comm.size] * 5)


def one_after_another(
    comm: MPI.Intracomm, program: Callable[[list[Any]], list[torch.Tensor]]
) -> list[torch.Tensor]:
    """What ``program`` gives for two sums under way: under way still on rank 0, over already elsewhere."""
    with bridge(comm):
        if comm.rank:
            comm.recv(source=0)
        given = [torch.full((3,), 1.0 + comm.rank), torch.full((3,), 10.0 + comm.rank)]
        works: list[Any] = [dist.all_reduce(each, async_op=True) for each in given]
        if comm.rank:
            for work in works:
                work.wait()
        found = program(works)
        return found


def let_go(comm: MPI.Intracomm) -> None:
    """The other ranks begin."""
    for rank in range(1, comm.size) if comm.rank == 0 else ():
        comm.send(None, dest=rank)


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("way", ["work", "future", "late callback"])
def test_callback_may_wait_for_a_call_that_is_queued_behind_its_own(
    comm: MPI.Intracomm, way: str
) -> None:
    def program(works: list[Any]) -> list[torch.Tensor]:
        def other(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            if way == "future":
                second: torch.Tensor = works[1].get_future().wait()[0]
            else:
                works[1].wait()
                second = works[1].result()[0]
            return future.value()[0] + second

        if way == "late callback":
            future = works[0].get_future()
            works.append(dist.all_reduce(torch.ones(3), async_op=True))
            works[1] = works[2]
            found = future.then(other)
        else:
            found = works[0].get_future().then(other)
        let_go(comm)
        return [found.wait()]

    (found,) = one_after_another(comm, program)
    ranks = sum(range(comm.size))
    second = comm.size if way == "late callback" else 10 * comm.size + ranks
    parallel_assert(comm, found.tolist() == [comm.size + ranks + second] * 3, f"{found}")


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_calls_that_callbacks_start_are_in_one_order_on_ranks_where_they_run_at_other_times(
    comm: MPI.Intracomm, order: tuple[int, int]
) -> None:
    """Of one shape: in another order sums of different things would be added, without an error."""

    def program(works: list[Any]) -> list[torch.Tensor]:
        def again(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            tensor = future.value()[0] * (1 + comm.rank)
            found: torch.Tensor = dist.all_reduce(tensor, async_op=True).get_future().wait()[0]
            dist.all_reduce(found)
            return found

        futures = {number: works[number].get_future().then(again) for number in order}
        last = torch.full((3,), 100.0)
        work = dist.all_reduce(last, async_op=True)
        let_go(comm)
        work.wait()
        return [futures[0].wait(), futures[1].wait(), last]

    found = one_after_another(comm, program)
    ranks, factor = sum(range(comm.size)), sum(range(1, comm.size + 1)) * comm.size
    expected = [(comm.size + ranks) * factor, (10 * comm.size + ranks) * factor, 100 * comm.size]
    parallel_assert(
        comm, [each.tolist() for each in found] == [[e] * 3 for e in expected], f"{found}"
    )


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_calls_that_cannot_be_are_refused_where_they_are_made(comm: MPI.Intracomm) -> None:
    ones, folded = torch.ones, torch.ones(1).expand(4)  # whose elements lie in one place
    wrong: dict[str, tuple[Callable[..., object], Any]] = {
        "meta, expected one on cpu or cuda": (dist.all_reduce, [ones(2, device="meta")]),
        "layout torch.sparse_coo": (dist.all_reduce, [torch.eye(2).to_sparse()]),
        "BAND of torch.float32": (dist.all_reduce, [ones(2), dist.ReduceOp.BAND]),
        "AVG of torch.int64": (dist.all_reduce, [torch.tensor([1]), dist.ReduceOp.AVG]),
        "cut into": (dist.all_to_all_single, [ones(3), ones(3)]),
        "to rank -2, tag 0, over process group of 2 rank(s): expected a": (
            dist.isend,
            [ones(2), -2],
        ),
        "from rank -1, tag 0": (dist.irecv, [ones(2), -1]),
        "from rank 9, tag 0": (dist.irecv, [ones(2), 9]),
        "tag -3": (dist.isend, [ones(2), 1 - comm.rank, None, -3]),
        "got a tensor of shape (4,) and strides (0,)": (dist.all_reduce, [folded]),
        "several elements lie in one place": (dist.all_gather, [[folded, folded], ones(4)]),
        "receive of (3,) float32": (dist.irecv, [ones(1).expand(3), 1 - comm.rank]),
        "got rank 7 of the group as its root, expected 0 to 1": (dist.broadcast, [ones(1), 7]),
        "reduce over process group 0: got rank 7": (dist.reduce, [ones(1), 7]),
        "got 1 output tensors, expected 2": (dist.all_to_all, [[ones(1)], [ones(1)]]),
    }
    with bridge(comm):
        for pattern, (call, given) in wrong.items():
            with pytest.raises(CommError, match=re.escape(pattern)):
                call(*given)
        found = [torch.zeros(4) for _ in range(2)]
        dist.all_gather(found, torch.ones(1).expand(4))  # to be read it may; the group is as before
        assert found[1].tolist() == [1] * 4
        with pytest.raises(ConfigError, match="initialised already"):
            hpczero.bridge.init(comm)


def barrier(limit: timedelta) -> None:
    """``dist.barrier(timeout=limit)``, which torch 2.11 and older have not; there what it does."""
    if "timeout" in inspect.signature(dist.barrier).parameters:
        dist.barrier(timeout=limit)
        return
    options = dist.BarrierOptions()
    options.timeout, options.asyncOp = limit, False
    group = dist.group.WORLD
    assert group is not None
    group.barrier(options).wait()


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_barrier_and_wait_that_are_given_a_time_raise_when_it_is_over(comm: MPI.Intracomm) -> None:
    with bridge(comm):
        error = ""
        if comm.rank == 0:
            with pytest.raises(CommError, match=r"has not ended within 0\.2 s") as late:
                barrier(timedelta(seconds=0.2))
            work = dist.irecv(torch.ones(2), 1)
            assert work is not None
            with pytest.raises(CommError, match=r"receive of .* has not ended within 0\.2 s"):
                work.wait(timedelta(seconds=0.2))
            error = str(late.value)
        comm.Barrier()
        if comm.rank == 1:  # late, and welcome
            dist.barrier()
            dist.send(torch.ones(2), 0)
        parallel_assert(comm, comm.rank or "barrier over process group" in error, error)


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_message_of_another_size_is_an_error(comm: MPI.Intracomm) -> None:
    with bridge(comm):
        for numel in (4, 6):
            call = dist.recv if comm.rank else dist.send
            said = told(HpcZeroError, call, torch.ones(numel if comm.rank else 5), 1 - comm.rank)
            parallel_assert(comm, comm.rank == 0 or re.search("20 bytes|larger", said), said)


@pytest.mark.mpi
@pytest.mark.ranks(1, 3)
def test_groups_end_and_begin_again(comm: MPI.Intracomm) -> None:
    for _ in range(2):
        with bridge(comm):
            pair = dist.new_group(sorted({0, comm.size - 1}))
            tensor = torch.ones(1)
            dist.all_reduce(tensor)
            if comm.rank in (0, comm.size - 1):
                dist.all_reduce(tensor, group=pair)
                dist.destroy_process_group(pair)
        parallel_assert(comm, not dist.is_initialized())
