"""Tiers that are slow, late or failing: the same bits, and one named error where a result is waited for."""

from __future__ import annotations

import errno
import threading

import pytest
import torch
from torch import Tensor

from hpczero.errors import TierError
from hpczero.tier import Record
from tests.tier.suite import PART, TierSuite, content, filled, get, put
from tests.tier.twins import SPOILED, FailingTier, LateTier, PageTier, SlowTier


class TestSlow(TierSuite):
    make = staticmethod(lambda folder, **sizes: SlowTier(**sizes))


class TestLate(TierSuite):
    make = staticmethod(lambda folder, **sizes: LateTier(**sizes))


class TestFailingThatDoesNotFail(TierSuite):
    make = staticmethod(lambda folder, **sizes: FailingTier(**sizes))


def test_late_tier_shows_who_keeps_a_part_after_evicting_it():
    with LateTier(blocks=1, block_nbytes=4096) as tier:
        place = tier.reserve(Record("r", {PART: 4096}))
        staged = tier.fetch(place, (), fresh=[PART]).wait()
        kept = staged[PART]
        assert (kept == SPOILED).all()
        kept.fill_(1)
        tier.evict(staged, [PART]).wait()
        assert (kept == SPOILED).all()
        assert (get(tier, place, PART)[PART] == 1).all()


def test_read_error_is_raised_at_every_wait_and_the_block_comes_back():
    with FailingTier(doing="read", last=1, blocks=1) as tier:
        place = filled(tier, 10)
        fetch = tier.fetch(place, [PART])
        for _ in range(2):
            with pytest.raises(TierError, match=r"read at byte 0: .*\(EIO\); got 0 of 4,096 bytes"):
                fetch.wait()
        assert torch.equal(get(tier, place, PART)[PART], content(10, 0))


def test_write_error_is_told_by_the_write_the_fetch_and_the_drain_until_it_is_written_again():
    with FailingTier(doing="write", number=errno.ENOSPC, last=1, blocks=1) as tier:
        place, other = (tier.reserve(Record(name, {PART: 10})) for name in "rs")
        staged = tier.fetch(place, (), fresh=[PART]).wait()
        write = tier.evict(staged, [PART])
        for call in (write.wait, tier.fetch(place, [PART]).wait, tier.drain, tier.drain):
            with pytest.raises(TierError, match=r"write at byte 0: .*\(ENOSPC\)"):
                call()
        put(tier, other, {PART: content(10, 1)})  # the block is free
        put(tier, place, {PART: content(10, 2)})
        tier.drain()
        assert torch.equal(get(tier, place, PART)[PART], content(10, 2))
        assert torch.equal(get(tier, other, PART)[PART], content(10, 1))


def test_error_in_one_of_many_calls_fails_the_whole_part():
    with FailingTier(doing="write", first=2, last=3, block_nbytes=2**20) as tier:
        filled(tier, 2**20)
        with pytest.raises(TierError, match="EIO"):
            tier.drain()


def test_no_room_is_told_at_once_and_leaves_the_tier_usable():
    with FailingTier(doing="room", number=errno.ENOSPC, first=1, last=2) as tier:
        place = tier.reserve(Record("r", {PART: 10}))
        with pytest.raises(TierError, match="ENOSPC"):
            tier.reserve(Record("s", {PART: 10}))
        put(tier, place, {PART: content(10, 0)})
        filled(tier, 10)
        assert torch.equal(get(tier, place, PART)[PART], content(10, 0))


def test_errors_that_no_medium_foresaw_are_named_too():
    class Broken(PageTier):
        def _read(self, into: Tensor, offset: int) -> None:
            raise ZeroDivisionError("oops")

    with Broken(blocks=1, block_nbytes=10) as tier:
        place = filled(tier, 10)
        with pytest.raises(TierError, match="fetch of master of 'r': ZeroDivisionError: oops"):
            tier.fetch(place, [PART]).wait()


class Gated(PageTier):
    """Writes wait for a gate."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.gate, self.begun = threading.Event(), threading.Event()

    def _write(self, source: Tensor, offset: int) -> None:
        self.begun.set()
        self.gate.wait()
        super()._write(source, offset)


def test_closing_fails_what_has_not_begun_and_waits_for_what_has():
    tier = Gated(blocks=3, block_nbytes=2**20, lanes=1)
    places = [tier.reserve(Record(str(i), {PART: 10})) for i in range(2)]
    writes = []
    for place in places:
        writes.append(tier.evict(tier.fetch(place, (), fresh=[PART]).wait(), [PART]))
    assert tier.begun.wait(10)
    closing = threading.Thread(target=tier.close)
    closing.start()
    writes[1].settle()
    tier.gate.set()
    closing.join(10)
    assert not closing.is_alive()
    writes[0].wait()
    with pytest.raises(TierError, match="closed before"):
        writes[1].wait()


def test_seconds_waited_are_those_of_the_part_that_was_waited_for():
    with Gated(blocks=2, block_nbytes=2**20) as tier:
        places = [tier.reserve(Record(str(i), {name: 10})) for i, name in enumerate("ab")]
        write = tier.evict(tier.fetch(places[0], (), fresh=["a"]).wait(), ["a"])
        tier.begun.wait()
        threading.Timer(0.2, tier.gate.set).start()
        write.wait()
        put(tier, places[1], {"b": content(10, 0)})
        tier.drain()
        assert tier.traffic["a"].waited_s > 0.1
        assert tier.traffic["b"].waited_s < 0.1


def test_lanes_work_side_by_side(tmp_path):
    met = threading.Barrier(3)

    class Meeting(PageTier):
        def _write(self, source: Tensor, offset: int) -> None:
            met.wait(10)  # or breaks, which is an error
            super()._write(source, offset)

    with Meeting(blocks=1, block_nbytes=3 * 2**18, lanes=3) as tier:
        filled(tier, 3 * 2**18)
        tier.drain()
