"""Slots: buffers of a node take shared memory in turn, and nobody sees what is not theirs."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING

import pytest
import torch

from hpczero.comm.hierarchical import Hierarchical
from hpczero.comm.inside import PAGE, Segment
from hpczero.comm.window import Addresses, Window, WindowSlot, WindowSlots
from hpczero.memory.buffers import Buffer, Use
from tests.comm.test_segment import pages_of
from tests.helpers.parallel import parallel_assert

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mpi4py import MPI

    from hpczero import Topology

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]

NUMEL = 3 * 1024 * 6  # a multiple of 2 and 3 ranks


@pytest.mark.ranks(2)
@pytest.mark.parametrize("seed", range(20))
def test_no_two_buffers_share_a_range_and_no_more_is_held_than_was_needed_at_once(
    comm: MPI.Intracomm, seed: int
) -> None:
    """Those of no elements begin where another one does: a range that they lost would be replaced behind the end."""
    draw = random.Random(seed)
    sizes = [PAGE * draw.choice([0, 1, 2, 2, 2, 5]) for _ in range(12)]
    segment = Segment.create(comm, sum(sizes), "a test")
    slots = WindowSlots(segment)
    taken: dict[int, int] = {}
    most, wrong = 0, []
    for _ in range(400 if comm.rank == 0 else 0):
        number = draw.randrange(len(sizes))
        if number in taken and draw.random() < 0.8:
            slots.leave(number)
            del taken[number]
        else:
            slot = slots.take(number, sizes[number])
            end = slot.begin + sizes[number]
            if slot.fresh and sizes[number]:
                segment.claim(slot.begin, end)
            if end > sum(sizes):
                wrong.append(f"{end} is behind the end")
            if taken.get(number, slot.begin) != slot.begin:
                wrong.append("a buffer that stays taken has moved")
            taken[number] = slot.begin
        ranges = sorted((begin, begin + sizes[number]) for number, begin in taken.items())
        if any(first[1] > second[0] for first, second in itertools.pairwise(ranges)):
            wrong.append(f"{ranges} overlap")
        most = max(most, sum(sizes[number] for number in taken))
        if slots.held_nbytes > most or pages_of(segment) != slots.held_nbytes:
            wrong.append(f"held {slots.held_nbytes}, pages {pages_of(segment)}, needed {most}")
    parallel_assert(comm, not wrong, str(wrong[:3]))


@pytest.mark.ranks(2)
def test_passes_after_the_second_get_no_new_pages_and_one_large_need_is_forgotten(
    comm: MPI.Intracomm,
) -> None:
    segment = Segment.create(comm, 10 * PAGE, "a test")
    slots = WindowSlots(segment)

    def one_pass() -> list[bool]:
        """Buffer 0 throughout, two of the others at a time."""
        fresh = [slots.take(0, PAGE).fresh, slots.take(1, PAGE).fresh]
        for number in range(2, 10):
            fresh.append(slots.take(number, PAGE).fresh)
            slots.leave(number - 1)
        slots.leave(9)
        slots.leave(0)
        return fresh

    assert sum(one_pass()) == 3
    one_pass()
    assert not any(one_pass())
    for number in range(10):
        slots.take(number, PAGE)
    for number in range(10):
        slots.leave(number)
    assert slots.held_nbytes == 3 * PAGE
    assert not any(one_pass())
    comm.Barrier()


@pytest.mark.ranks(2)
def test_a_range_stays_fresh_until_it_is_left_for_ranks_that_hear_of_the_second_take_first(
    comm: MPI.Intracomm,
) -> None:
    slots = WindowSlots(Segment.create(comm, 4 * PAGE, "a test"))
    assert slots.take(0, PAGE).fresh
    assert slots.take(0, PAGE).fresh
    slots.take(1, PAGE)
    slots.leave(0)
    assert not slots.take(0, PAGE).fresh
    comm.Barrier()


def test_addresses_show_what_was_written_elsewhere_and_zeros_while_hidden(
    comm: MPI.Intracomm,
) -> None:
    segment = Segment.create(comm, 4 * PAGE, "a test")
    one, other = Addresses(PAGE + 10), Addresses(PAGE + 10)
    before = one.bytes.data_ptr()
    slot = WindowSlot(2 * PAGE, fresh=True)
    segment.claim(2 * PAGE, 4 * PAGE)
    one.show(segment.file, slot)
    if comm.rank == 0:
        one.bytes.fill_(7)
    comm.Barrier()
    other.show(segment.file, WindowSlot(2 * PAGE, fresh=False))
    parallel_assert(comm, bool((one.bytes == 7).all() and (other.bytes == 7).all()))
    one.hide()
    parallel_assert(comm, not one.bytes.any() and bool((other.bytes == 7).all()))
    one.bytes.fill_(3)  # lost, and nobody else's
    parallel_assert(
        comm, bool((other.bytes == 7).all()) and bool((segment.bytes[:PAGE] == 0).all())
    )
    one.show(segment.file, WindowSlot(2 * PAGE, fresh=False))
    parallel_assert(comm, bool((one.bytes == 7).all()) and one.bytes.data_ptr() == before)


@pytest.fixture
def transport(topology: Topology) -> Iterator[Hierarchical]:
    transport = Hierarchical(topology)
    yield transport
    transport.close()


def buffers(transport: Hierarchical, count: int) -> list[Buffer]:
    made = [
        transport.allocate(NUMEL, torch.float32, category="unsharded", use=Use.GATHER, keep=False)
        for _ in range(count)
    ]
    transport.settle()
    return made


def fill(transport: Hierarchical, buffer: Buffer, value: float) -> None:
    buffer.take()
    index, size = transport.group.index, transport.group.size
    part = NUMEL // size
    buffer.tensor[index * part : (index + 1) * part] = value + index
    transport.all_gather(buffer.tensor, name=f"{value}").wait()


def right(transport: Hierarchical, buffer: Buffer, value: float) -> bool:
    parts = buffer.tensor.view(transport.group.size, -1)
    return all(bool((part == value + index).all()) for index, part in enumerate(parts))


def segment_of(transport: Hierarchical) -> Segment:
    level = transport._node
    assert isinstance(level, Window)
    assert level._passing.segment is not None
    return level._passing.segment


def test_buffers_take_turns_in_the_pages_of_those_in_use(
    comm: MPI.Intracomm, transport: Hierarchical
) -> None:
    units = buffers(transport, 9)
    draw, wrong, most = random.Random(comm.rank), [], 0
    for turn in range(6):
        order = units if turn % 2 == 0 else units[::-1]
        before = None
        for number, unit in enumerate(order):
            fill(transport, unit, 100 * turn + number)
            if draw.random() < 0.3:
                torch.randn(300, 300).mm(torch.randn(300, 300))  # ranks are not at one place
            if not right(transport, unit, 100 * turn + number):
                wrong.append((turn, number))
            if before is not None:
                before.release()
            before = unit
            most = max(most, pages_of(segment_of(transport)))
        if before is not None:
            before.release()
        comm.Barrier()  # values change between two uses of a buffer only when all ranks are through with it
    # Ranks are at most a unit apart, so a release may be seen one unit late.
    parallel_assert(comm, not wrong and most <= 4 * units[0].tensor.nbytes, f"{wrong} {most}")


def test_rank_that_goes_on_using_a_buffer_keeps_it_from_others(
    comm: MPI.Intracomm, transport: Hierarchical
) -> None:
    units = buffers(transport, 6)
    fill(transport, units[0], 5.0)
    if comm.rank != comm.size - 1:
        units[0].release()
    wrong = []
    for turn in range(3):
        for number, unit in enumerate(units[1:]):
            fill(transport, unit, 10 * turn + number)
            if not right(transport, unit, 10 * turn + number):
                wrong.append(number)
            unit.release()
            if comm.rank == comm.size - 1 and not right(transport, units[0], 5.0):
                wrong.append(-1)
    comm.Barrier()
    # All ranks use it again, the last one without having released it.
    fill(transport, units[0], 6.0)
    if not right(transport, units[0], 6.0):
        wrong.append(-2)
    units[0].release()
    parallel_assert(comm, not wrong, str(wrong))
