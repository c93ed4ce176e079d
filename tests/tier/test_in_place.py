"""The host tier that is worked on in place: what any tier must do, and the order of work and copies."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from hpczero.errors import TierError
from hpczero.tier import InPlaceTier, Place, Record
from hpczero.tier import host as module
from tests.helpers import late
from tests.helpers.late import LateAccelerator
from tests.tier.suite import PART, TierSuite, content, filled, get, put


class TestInPlace(TierSuite):
    make = staticmethod(lambda folder, **sizes: InPlaceTier(**sizes))


class TestInPlaceOfALateDevice(TierSuite):
    @staticmethod
    def make(folder, **sizes):
        return InPlaceTier(accelerator=LateAccelerator(), **sizes)


@pytest.fixture
def tier():
    with InPlaceTier(blocks=3, block_nbytes=20_000, accelerator=LateAccelerator()) as made:
        yield made


def test_what_is_opened_is_what_rests_and_nothing_moves(tier):
    place = tier.reserve(Record("r", {PART: 100, "state": 50}))
    put(tier, place, {PART: content(100, 0)})
    tier.drain()
    before = tier.traffic.total
    parts = tier.open(place, [PART], fresh=["state"]).wait()
    parts[PART].add_(1)
    parts["state"].fill_(7)
    tier.evict(parts, [PART, "state"])
    assert tier.traffic.total == before
    found = get(tier, place, PART, "state")
    assert torch.equal(found[PART], content(100, 0) + 1)
    assert found["state"].eq(7).all()


def test_work_begins_behind_the_copies_before_it(tier, monkeypatch):
    monkeypatch.setattr(late, "LATE_S", 50e-3)
    place = tier.reserve(Record("r", {PART: 9000}))
    for seed in range(4):
        put(tier, place, {PART: content(9000, seed)})
        parts = tier.open(place, [PART]).wait()
        assert torch.equal(parts[PART], content(9000, seed))
        tier.evict(parts, [PART])


def test_work_begins_behind_the_reads_before_it(tier, monkeypatch):
    place = filled(tier, 9000)
    tier.drain()
    monkeypatch.setattr(late, "LATE_S", 50e-3)
    fetch = tier.fetch(place, [PART])
    parts = tier.open(place, [PART]).wait()
    parts[PART].fill_(3)
    staged = fetch.wait()
    assert torch.equal(staged[PART], content(9000, 0)), "overwritten under the copy"
    tier.evict(staged, ())
    parts.end()


def test_a_copy_waits_until_the_work_has_ended(tier):
    place = filled(tier, 9000)
    opening = tier.open(place, [PART])
    put(tier, place, {PART: content(9000, 1)})  # the next gradient comes down
    ended = threading.Event()

    def work() -> None:
        parts = opening.wait()
        time.sleep(30e-3)
        assert torch.equal(parts[PART], content(9000, 0)), "overwritten under the work"
        ended.set()
        parts.end()

    thread = threading.Thread(target=work)
    thread.start()
    assert torch.equal(get(tier, place, PART)[PART], content(9000, 1))
    assert ended.is_set()
    thread.join()


def test_a_read_sees_what_the_work_has_made(tier):
    place = filled(tier, 9000)
    opening = tier.open(place, [PART])
    fetch = tier.fetch(place, [PART])
    parts = opening.wait()
    time.sleep(10e-3)
    parts[PART].fill_(3)
    tier.evict(parts, [PART])
    staged = fetch.wait()
    assert staged[PART].eq(3).all()
    tier.evict(staged, ())


def test_a_copy_that_failed_is_told_by_the_work_and_stops_nobody(tier, monkeypatch):
    place = tier.reserve(Record("r", {PART: 9000}))

    def broken(source: torch.Tensor, offset: int) -> None:
        raise TierError(f"offset {offset}: the link is down")

    with monkeypatch.context() as patch:
        patch.setattr(tier, "_write", broken)
        put(tier, place, {PART: content(9000, 0)})
        with pytest.raises(TierError, match="the link is down"):
            tier.open(place, [PART]).wait()
    put(tier, place, {PART: content(9000, 1)})
    assert torch.equal(get(tier, place, PART)[PART], content(9000, 1))


def test_content_that_is_not_there_is_refused(tier):
    place = tier.reserve(Record("r", {PART: 10, "state": 10}))
    with pytest.raises(TierError, match=r"\['master'\] have no content"):
        tier.open(place, [PART])
    parts = tier.open(place, (), fresh=[PART, "state"]).wait()
    parts[PART].zero_()
    tier.evict(parts, [PART])
    with pytest.raises(TierError, match=r"\['state'\] have no content"):
        tier.open(place, [PART, "state"])
    with pytest.raises(TierError, match="another tier"):
        InPlaceTier(blocks=1, block_nbytes=10).open(place, [PART])


def test_records_lie_in_one_piece_in_few_slabs(monkeypatch):
    monkeypatch.setattr(module, "SLAB_NBYTES", 2**16 - 4096)
    with InPlaceTier(blocks=2, block_nbytes=100_000) as tier:
        places = [tier.reserve(Record(str(i), {PART: 900 * i, "b": 7})) for i in range(1, 60)]
        for i, place in enumerate(places):
            put(tier, place, {PART: content(900 * (i + 1), i), "b": content(7, i)})
        for i, place in enumerate(places):
            parts = tier.open(place, [PART, "b"]).wait()
            assert torch.equal(parts[PART], content(900 * (i + 1), i))
            assert torch.equal(parts["b"], content(7, i))
            tier.evict(parts, ())
        needed = sum(place.end - place.begin for place in places)
        assert needed <= tier._capacity <= 1.3 * needed + 2**20


def test_room_that_was_given_back_at_the_end_of_a_slab_holds_no_record_across_it(monkeypatch):
    page = 4096
    monkeypatch.setattr(module, "SLAB_NBYTES", 2**16 - page)
    with InPlaceTier(blocks=2, block_nbytes=100_000) as tier:

        def reserve(name: str, pages: int) -> Place:
            return filled(tier, page * pages, pages, name)

        def holds(place: Place) -> bool:
            wanted = content(place.end - place.begin, (place.end - place.begin) // page)
            parts = tier.open(place, [PART]).wait()
            found = torch.equal(parts[PART], wanted)
            tier.evict(parts, ())
            return found and torch.equal(get(tier, place, PART)[PART], wanted)

        kept, last = reserve("kept", 1), reserve("last", 14)  # up to the end of a slab
        tier.release(last)
        long = reserve("long", 15)
        assert holds(kept)
        assert holds(long)
        last = reserve("last", 14)  # again
        beside = reserve("beside", 1)
        tier.release(last)
        tier.release(long)
        places = [reserve(str(pages), pages) for pages in (20, 13, 3)]
        assert all(map(holds, [kept, beside, *places]))


def test_a_record_of_nothing_is_opened(tier):
    place = tier.reserve(Record("r", {PART: 0}))
    parts = tier.open(place, (), fresh=[PART]).wait()
    assert parts[PART].numel() == 0
    tier.evict(parts, [PART])
    assert get(tier, place, PART)[PART].numel() == 0
