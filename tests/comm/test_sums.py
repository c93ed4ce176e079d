"""Sums of activations: on every path the bits of NumPy's fp32 sums in rank order, and gathers of whatever shape."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hpczero.accelerator import HostAccelerator
from hpczero.comm.sums import WHOLE_NBYTES, MessagePath, SharedPath, Sums, give_values, sums_over
from hpczero.errors import CommError
from hpczero.job.topology import Topology
from tests.helpers.late import LateAccelerator
from tests.helpers.parallel import parallel_assert
from tests.helpers.processes import come_to_rest
from tests.helpers.small_models import raises_on_all

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero.job.group import Group

HALVES = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *HALVES)
LARGE = WHOLE_NBYTES // 2 + 1237  # each rank sums a part, in any dtype
SHAPES = ((), (1,), (7,), (3, 5, 2), (0,), (2, 0, 3), (LARGE,), (3, 17, 1201))
PATHS: dict[str, Callable[[Group, torch.device], Any]] = {
    "shared": lambda group, _: SharedPath(group, HostAccelerator()),
    "shared, small": lambda group, _: SharedPath(group, HostAccelerator(), room_nbytes=1000),
    "late": lambda group, _: SharedPath(group, LateAccelerator()),
    "messages": lambda group, _: MessagePath(group),
    "messages, small": lambda group, _: MessagePath(group, room_nbytes=1000),
}

pytestmark = pytest.mark.mpi


@pytest.fixture(params=PATHS)
def sums(request: pytest.FixtureRequest, topology: Topology) -> Iterator[Sums]:
    sums = Sums(topology.world, PATHS[request.param])
    yield sums
    sums.close()


def brought(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What ``rank`` brings: magnitudes that differ by rank, so that the order of a sum shows in its bits."""
    generator = torch.Generator().manual_seed(1000 * rank + len(shape))
    return (torch.randn(shape, generator=generator) * 10.0 ** (rank - 1)).to(dtype)


def in_numpy(tensors: list[Tensor]) -> Tensor:
    """Their sum in fp32 by NumPy, one behind the other, rounded once."""
    total = tensors[0].float().numpy().astype(np.float32)
    for tensor in tensors[1:]:
        total = np.add(total, tensor.float().numpy(), dtype=np.float32)
    return torch.from_numpy(np.asarray(total)).to(tensors[0].dtype)


def bits(tensor: Tensor) -> tuple[Any, ...]:
    flat = tensor.contiguous().view(-1)
    content = flat.view(torch.uint8).numpy().tobytes() if len(flat) else b""
    return tensor.dtype, tensor.shape, content


def expected(size: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return in_numpy([brought(rank, shape, dtype) for rank in range(size)])


def check_sums(comm: MPI.Intracomm, sums: Sums) -> None:
    """Of all types and shapes: the bits of NumPy's sum in rank order; the argument stays as it was."""
    for dtype, shape in product(DTYPES, SHAPES):
        own = brought(comm.rank, shape, dtype)
        found = sums.all_reduce(own)
        same = bits(found) == bits(expected(comm.size, shape, dtype))
        parallel_assert(comm, same, f"{dtype} {shape}")
        unchanged = bits(own) == bits(brought(comm.rank, shape, dtype))
        parallel_assert(comm, unchanged and (comm.size == 1 or found is not own), "argument")


def test_all_reduce_is_numpys_sum_in_rank_order(comm: MPI.Intracomm, sums: Sums) -> None:
    check_sums(comm, sums)


def test_non_contiguous_tensors_are_summed_as_what_they_show(
    comm: MPI.Intracomm, sums: Sums
) -> None:
    for dtype, shape in product(DTYPES, ((3, 5, 2), (3, 17, 1201))):
        found = sums.all_reduce(brought(comm.rank, shape, dtype).transpose(0, 2)[1:])
        whole = expected(comm.size, shape, dtype).transpose(0, 2)[1:]
        parallel_assert(comm, bits(found) == bits(whole), f"{dtype} {shape}")


def test_reduce_scatter_gives_parts_of_the_same_sum_also_where_they_differ_in_size(
    comm: MPI.Intracomm, sums: Sums
) -> None:
    for dtype, shape in product(DTYPES, ((7,), (2, 9, 5), (2, 1, 3), (0, 4, 2), (3, 17, 1201))):
        for dim in range(len(shape)):
            found = sums.reduce_scatter(brought(comm.rank, shape, dtype), dim)
            whole = expected(comm.size, shape, dtype)
            mine = np.array_split(np.arange(shape[dim]), comm.size)[comm.rank]
            part = whole.index_select(dim, torch.from_numpy(mine))
            parallel_assert(comm, bits(found) == bits(part), f"{dtype} {shape} {dim}")


def test_all_gather_joins_tensors_of_different_lengths(comm: MPI.Intracomm, sums: Sums) -> None:
    for dtype, dim in product((*DTYPES, torch.int64, torch.bool), range(3)):

        def of(rank: int, dim: int = dim, dtype: torch.dtype = dtype) -> Tensor:
            shape = [2, 3, 5]
            shape[dim] = (rank * 2) % 5  # none on rank 0
            return (brought(rank, tuple(shape), torch.float32) * 10).to(dtype)

        found = sums.all_gather(of(comm.rank), dim)
        joined = torch.cat([of(rank) for rank in range(comm.size)], dim)
        parallel_assert(comm, torch.equal(found, joined), f"{dtype} {dim}")


def test_all_to_all_moves_parts_and_its_inverse_brings_them_back(
    comm: MPI.Intracomm, sums: Sums
) -> None:
    for dtype, rows in product(DTYPES, (3, 501)):
        shape = (2, 2 * comm.size, rows, 3)
        own = brought(comm.rank, shape, dtype)
        found = sums.all_to_all(own, 1, 2)
        heads = slice(2 * comm.rank, 2 * comm.rank + 2)
        joined = torch.cat([brought(r, shape, dtype)[:, heads] for r in range(comm.size)], 2)
        parallel_assert(comm, torch.equal(found, joined), f"{dtype} {rows}")
        parallel_assert(comm, torch.equal(sums.all_to_all(found, 2, 1), own), "back")


def test_maximum_is_numpys_and_shows_a_nan_of_any_rank(comm: MPI.Intracomm, sums: Sums) -> None:
    def of(rank: int) -> Tensor:
        tensor = brought(rank, (3, 301), torch.float32)
        tensor[0, rank] = torch.nan
        return tensor

    found = sums.maximum(of(comm.rank))
    most = np.maximum.reduce([of(rank).numpy() for rank in range(comm.size)])
    parallel_assert(comm, np.array_equal(found.numpy(), most, equal_nan=True))


def test_infinities_and_zeros_of_both_signs_are_summed_as_in_numpy(
    comm: MPI.Intracomm, sums: Sums
) -> None:
    values = torch.tensor([-0.0, 0.0, torch.inf, 3e38, 1e-45, 6e4])
    for dtype in DTYPES:
        with np.errstate(over="ignore"):
            whole = in_numpy([values.to(dtype)] * comm.size)
        found = sums.all_reduce(values.to(dtype))
        parallel_assert(comm, bits(found) == bits(whole), f"{dtype} {found}")


def test_results_stay_as_they_are_in_later_calls(comm: MPI.Intracomm, sums: Sums) -> None:
    found = [
        (sums.all_reduce(own), sums.reduce_scatter(own, 0), sums.all_gather(own, 0))
        for own in (brought(comm.rank, (9, 3), torch.float32) + k for k in range(5))
    ]
    before = [[tensor.clone() for tensor in three] for three in found]
    for _ in range(3):
        sums.all_reduce(torch.full((500,), torch.nan))
        sums.all_gather(torch.full((100,), torch.nan), 0)
    for three, as_before in zip(found, before, strict=True):
        parallel_assert(comm, all(map(torch.equal, three, as_before)))


@pytest.mark.ranks(2, 3)
def test_a_rank_that_has_begun_its_forward_anew_is_in_another_call(
    comm: MPI.Intracomm, sums: Sums, topology: Topology
) -> None:
    # What an exception on this rank alone leads to, where the program catches it and calls the model again.
    for _ in range(3):
        sums.all_reduce(torch.ones(3))
    if comm.rank == 1:
        topology.world.forwards.begin()
    message = raises_on_all(comm, CommError, "different calls", sums.all_reduce, torch.ones(3))
    parallel_assert(comm, "call 1 since a forward began" in message, message)


@pytest.mark.ranks(2, 3)
def test_ranks_in_different_calls_are_told_which_and_go_on(comm: MPI.Intracomm, sums: Sums) -> None:
    own = torch.ones(2 + comm.rank % 2, 3)
    message = raises_on_all(comm, CommError, "different calls", sums.all_reduce, own)
    parallel_assert(comm, "rank 1 of the group in all_reduce of (3, 3)" in message, message)
    found = sums.all_reduce(torch.ones(2))
    parallel_assert(comm, bits(found) == bits(torch.full((2,), float(comm.size))))


@pytest.mark.ranks(2)
def test_what_cannot_be_summed_or_cut_is_refused_by_name(comm: MPI.Intracomm, sums: Sums) -> None:
    with pytest.raises(CommError, match="int64"):
        sums.all_reduce(torch.ones(3, dtype=torch.int64))
    with pytest.raises(CommError, match="multiple of 2 ranks"):
        sums.all_to_all(torch.ones(3, 2), 0, 1)
    with pytest.raises(CommError, match="state_dict"):
        pickle.dumps(sums)


@pytest.mark.ranks(2, 3)
def test_accounts_have_calls_and_the_bytes_that_others_read(
    comm: MPI.Intracomm, topology: Topology
) -> None:
    sums = sums_over(topology.world)
    sums.all_reduce(torch.ones(5, dtype=torch.bfloat16))
    sums.reduce_scatter(torch.ones(comm.size * 4, 2), 0)
    sums.all_gather(torch.ones(6), 0)
    others = comm.size - 1
    found = {verb: (sums.stats.calls[verb], n) for verb, n in sums.stats.sent_nbytes.items()}
    nbytes = {"all_reduce": 10, "reduce_scatter": 32, "all_gather": 24}
    wanted = {verb: (1, others * n) for verb, n in nbytes.items()}
    parallel_assert(comm, found == wanted and sums.stats.seconds > 0, str(found))
    sums.close()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("nodes", [[0, 0, 0, 0], [0, 1, 0, 1], [0, 0, 0, 1]])
def test_nodes_decide_the_path_and_not_the_bits(comm: MPI.Intracomm, nodes: list[int]) -> None:
    topology = Topology.create(comm, nodes)
    sums = sums_over(topology.world)
    check_sums(comm, sums)
    kinds = {type(path) for path in sums._paths.values()}
    expected_kind = SharedPath if len(set(nodes)) == 1 else MessagePath
    parallel_assert(comm, kinds == {expected_kind}, str(kinds))
    sums.close()
    topology.free()


def test_values_of_rank_0_are_given_to_all_in_any_layout(
    comm: MPI.Intracomm, topology: Topology
) -> None:
    for dtype in (*DTYPES, torch.int64, torch.bool):
        own = (brought(comm.rank, (5, 7, 2), torch.float32) * 3).to(dtype)
        given = own.clone().transpose(0, 2)
        give_values(topology.world, given)
        first = (brought(0, (5, 7, 2), torch.float32) * 3).to(dtype).transpose(0, 2)
        parallel_assert(comm, torch.equal(given, first), str(dtype))
        parallel_assert(comm, given.stride() == first.stride(), "laid out anew")
    number = torch.tensor(3 + comm.rank)
    give_values(topology.world, number)
    parallel_assert(comm, number == 3)
    give_values(topology.world, torch.ones(0))


@pytest.mark.ranks(2, 3)
def test_a_rank_that_waits_leaves_its_core_to_others(
    comm: MPI.Intracomm, topology: Topology
) -> None:
    sums = sums_over(topology.world)
    sums.all_reduce(torch.ones(3))  # the path is made
    others = comm.allgather(os.getpid())[1:]
    rest = comm.rank > 0 or come_to_rest(others, share=0.3)
    sums.all_reduce(torch.ones(3))
    parallel_assert(comm, rest, "they were busy all the time")
    sums.close()


@pytest.mark.ranks(2, 3)
def test_without_futex_ranks_wait_by_looking(comm: MPI.Intracomm, topology: Topology) -> None:
    path = SharedPath(topology.world, HostAccelerator())
    path._bell._number = None
    sums = Sums(topology.world, lambda *_: path)
    for value in range(20):
        found = sums.all_reduce(torch.full((3,), float(value)))
        parallel_assert(comm, bits(found) == bits(torch.full((3,), float(value * comm.size))))
    sums.close()


@pytest.mark.ranks(2)
def test_messages_go_on_while_a_rank_waits(comm: MPI.Intracomm, topology: Topology) -> None:
    """A large message that its sender has started arrives although the sender waits in a sum."""
    sums = sums_over(topology.world)
    sums.all_reduce(torch.ones(3))
    large = np.full(2**22, comm.rank, dtype=np.float64)
    if comm.rank == 0:
        request = comm.Isend(large, dest=1)
        found = sums.all_reduce(torch.ones(3))
        request.Wait()
    else:
        comm.Recv(large, source=0)
        found = sums.all_reduce(torch.ones(3))
    parallel_assert(comm, not large.any() and bits(found) == bits(torch.full((3,), 2.0)))
    sums.close()
