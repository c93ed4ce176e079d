"""Sums over ranks that are rounded once: those of ``math.fsum``, in any order; and what a step exchanges for them."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hpczero
from hpczero.accelerator import HostAccelerator
from hpczero.job.group import DIGITS, LENGTH, MOST_RANKS, WIDTH, digits_of, values_of
from hpczero.job.signals import Signals
from hpczero.options.environment import Environment
from hpczero.run.evaluation import PlainPasses
from hpczero.run.step import TrainingStep
from hpczero.run.stopping import Deadline, Stops, Wish
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import adamw, tiny_gpt, tiny_tokens

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

FINITE = st.floats(allow_nan=False, allow_infinity=False)
LARGEST, SMALLEST = 1.7976931348623157e308, 5e-324


def added(values: list[float]) -> float:
    """The sum, as ranks with one value each would come to it."""
    total = digits_of(values[:1])
    for value in values[1:]:
        total = total + digits_of([value])
    return values_of(total)[0]


@given(st.lists(FINITE, min_size=1, max_size=9))
def test_sum_is_that_of_fsum(values: list[float]) -> None:
    try:
        expected = math.fsum(values)
    except OverflowError:  # half way, or at its end: then no double is large enough
        exact = sum(int(v) if abs(v) > 1e300 else 0 for v in values)
        expected = math.inf if exact > 0 else -math.inf
        if abs(exact) < 2**1023:
            return
    assert added(values) == expected


@pytest.mark.parametrize(
    "values",
    [
        [0.1] * 10,
        [1.0, 2.0**-53, 2.0**-105],  # rounded twice it would be 1
        [1.0, 2.0**-53],  # halfway: to the even one
        [1e16, 1.0, -1e16],
        [SMALLEST, SMALLEST, -SMALLEST],
        [LARGEST, -LARGEST, SMALLEST],
        [-0.0, 0.0],
        [math.pi],
    ],
)
def test_hard_sums_are_those_of_fsum_in_every_order(values: list[float]) -> None:
    for order in itertools.islice(itertools.permutations(values), 24):
        assert added(list(order)) == math.fsum(values)


def test_what_is_not_finite_wins() -> None:
    assert math.isnan(added([1.0, math.nan, math.inf]))
    assert math.isnan(added([math.inf, -math.inf]))
    assert added([1.0, math.inf, math.inf]) == math.inf
    assert added([LARGEST, -math.inf]) == -math.inf
    assert added([LARGEST, LARGEST]) == math.inf
    assert added([-LARGEST, -LARGEST]) == -math.inf


def test_digits_of_as_many_ranks_as_can_be_fit_their_integers() -> None:
    assert digits_of([LARGEST]).shape == (1, LENGTH)
    assert (2**WIDTH - 1) * MOST_RANKS < 2**63
    assert int(LARGEST) << 1074 < 2 ** (WIDTH * DIGITS)
    (digits,) = digits_of([-LARGEST]).tolist()
    many = digits_of([-LARGEST]) * (MOST_RANKS - 1)
    assert many.tolist() == [[digit * (MOST_RANKS - 1) for digit in digits]]


# --- over ranks


@pytest.mark.mpi
@pytest.mark.ranks(1, 2, 3, 4)
def test_ranks_get_the_sum_of_fsum_and_the_largest(comm: MPI.Intracomm, topology: Topology) -> None:
    values = [random.Random(7 * rank).uniform(-1, 1) * 10.0 ** (9 * rank) for rank in range(4)]
    found = topology.world.total(values[comm.rank])
    parallel_assert(comm, found == math.fsum(values[: comm.size]), f"{found} of {values}")
    largest = topology.world.largest(7 - (comm.rank - 1) ** 2)
    parallel_assert(comm, largest == (6 if comm.size == 1 else 7), f"{largest}")
    lost = topology.world.total(math.nan if comm.rank == comm.size - 1 else 1.0)
    parallel_assert(comm, math.isnan(lost), f"{lost}")


def counting(comm: MPI.Intracomm, seen: list[int]) -> Any:
    """``comm``, which notes the numbers that each small collective brings."""
    from mpi4py import MPI

    class Counting(MPI.Intracomm):
        def Allgather(self, sendbuf: Any, recvbuf: Any) -> None:
            seen.append(recvbuf.size)
            super().Allgather(sendbuf, recvbuf)

        def Allreduce(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> None:
            seen.append(recvbuf.size)
            super().Allreduce(sendbuf, recvbuf, op)

        def allgather(self, sendobj: Any) -> Any:
            seen.append(-1)
            return super().allgather(sendobj)

    return Counting(comm)


@pytest.mark.mpi
@pytest.mark.ranks(1, 2, 3, 4)
def test_a_step_and_the_wishes_after_it_bring_as_many_numbers_at_any_number_of_ranks(
    comm: MPI.Intracomm, topology: Topology, folder: Any
) -> None:
    seen: list[int] = []
    world = replace(topology.world, comm=counting(topology.world.comm, seen))
    counted = replace(topology, world=world, data=world, shard=world, data_sequence=world)
    model = tiny_gpt()
    optimizer = adamw(model)
    hpczero.zeroify(model, optimizer, stage=3, topology=counted)
    accelerator = HostAccelerator()
    tokens = tiny_tokens(comm.rank).numpy().astype(np.int64)
    passes = PlainPasses(
        model, loss=lambda m, x, y: m(x, y), accumulation=1, accelerator=accelerator
    )
    step = TrainingStep(
        model,
        optimizer,
        passes=passes,
        samples=lambda number, micro: (tokens[:, :-1], tokens[:, 1:]),
        accelerator=accelerator,
        clip=1.0,
    )
    stops = Stops(folder, counted, Signals(), Deadline(Environment()))
    step.take(0)
    seen.clear()
    taken = step.take(1)
    wish = stops.wish()
    of_step = list(seen)
    hpczero.release(model)
    parallel_assert(comm, wish is Wish.NOTHING and math.isfinite(taken.loss))
    # norm, the agreement before an update, loss, wishes: none is a list of all ranks
    sums = [LENGTH] if comm.size == 1 else [LENGTH, LENGTH]
    kept = [numel for numel in of_step if numel not in (LENGTH, 1)]
    parallel_assert(comm, len(kept) == 1 and of_step == [LENGTH, *kept, *sums[1:], 1], f"{of_step}")
