"""What every tier must do. A new one adds a file beside ``test_disk.py`` with a subclass and its ``make``.

Bytes are compared with a model that is a dictionary: what was evicted last is what a fetch gives.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hpczero.errors import TierError
from hpczero.tier import Place, Record, StagedTier, Tier

BLOCKS, BLOCK_NBYTES = 3, 3 * 2**20
PART = "master"
SIZES = (0, 1, 7, 4095, 4096, 4097, 2**20 + 3)
ACTIONS = st.lists(
    st.tuples(
        st.integers(0, 2),  # place
        st.sets(st.sampled_from("abc")),  # read
        st.sets(st.sampled_from("abc")),  # changed and evicted
        st.booleans(),  # wait for the write
    ),
    max_size=12,
)


def content(nbytes: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), generator=generator, dtype=torch.uint8)


def put(tier: Tier, place: Place, parts: dict[str, Tensor]) -> None:
    """Evict these values; does not wait."""
    staged = tier.fetch(place, (), fresh=parts).wait()
    for name, value in parts.items():
        staged[name].copy_(value)
    tier.evict(staged, parts)


def filled(tier: Tier, nbytes: int, seed: int = 0, name: str = "r") -> Place:
    """A place with one part, which holds ``content(nbytes, seed)``."""
    place = tier.reserve(Record(name, {PART: nbytes}))
    put(tier, place, {PART: content(nbytes, seed)})
    return place


def get(tier: Tier, place: Place, *names: str) -> dict[str, Tensor]:
    """What rests there."""
    staged = tier.fetch(place, names).wait()
    found = {name: staged[name].clone() for name in names}
    tier.evict(staged, ())
    return found


def lanes_alive() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("hpczero-tier")]


class TierSuite:
    """Subclass it as ``TestX`` and set ``make``: (folder, blocks, block_nbytes) -> Tier."""

    make: Any  # a class or a static method

    def made(self, folder: Path) -> Any:
        return type(self).make(folder, blocks=BLOCKS, block_nbytes=BLOCK_NBYTES)

    @pytest.fixture
    def tier(self, tmp_path: Path):
        with self.made(tmp_path) as tier:
            yield tier

    # --- bytes

    @pytest.mark.parametrize("nbytes", SIZES)
    def test_part_of_any_size_comes_back(self, tier, nbytes):
        place = filled(tier, nbytes, 1)
        assert torch.equal(get(tier, place, PART)[PART], content(nbytes, 1))

    def test_parts_lie_beside_one_another_and_are_views_of_any_dtype(self, tier):
        sizes = {"a": 4 * 1001, "b": 0, "c": 2 * 3}
        place = tier.reserve(Record("r", sizes))
        staged = tier.fetch(place, (), fresh=sizes).wait()
        staged["a"].view(torch.float32).fill_(1.5)
        staged["c"].view(torch.bfloat16).fill_(2.0)
        assert {name: part.numel() for name, part in staged.items()} == sizes
        assert all(part.dim() == 1 and part.dtype is torch.uint8 for part in staged.values())
        tier.evict(staged, sizes)
        again = tier.fetch(place, ["a", "b", "c"]).wait()
        assert again["a"].view(torch.float32).tolist() == [1.5] * 1001
        assert again["c"].view(torch.bfloat16).tolist() == [2.0] * 3

    def test_some_parts_are_read_others_written_and_the_rest_stays(self, tier):
        place = tier.reserve(Record("r", dict.fromkeys("abc", 5000)))
        put(tier, place, {name: content(5000, i) for i, name in enumerate("abc")})
        staged = tier.fetch(place, ["c"], fresh=["a"]).wait()
        assert sorted(staged) == ["a", "c"]
        staged["a"].copy_(staged["c"])
        tier.evict(staged, ["a"])
        found = get(tier, place, "c", "b", "a")
        for name, seed in (("a", 2), ("b", 1), ("c", 2)):
            assert torch.equal(found[name], content(5000, seed)), name

    def test_fetch_sees_the_last_write_even_while_it_is_written(self, tier):
        place = tier.reserve(Record("r", {PART: 2**21 + 5}))
        for turn in range(10):
            put(tier, place, {PART: content(2**21 + 5, turn)})
            if turn < 5:  # then the last of several writes stays
                assert torch.equal(get(tier, place, PART)[PART], content(2**21 + 5, turn))
        tier.drain()
        assert torch.equal(get(tier, place, PART)[PART], content(2**21 + 5, 9))

    def test_write_does_not_overtake_an_earlier_read(self, tier):
        place = filled(tier, 2**20)
        for turn in range(10):
            writer = tier.fetch(place, [PART]).wait()
            reader = tier.fetch(place, [PART])
            writer[PART].copy_(content(2**20, turn + 1))
            tier.evict(writer, [PART])
            found = reader.wait()
            assert torch.equal(found[PART], content(2**20, turn)), turn
            tier.evict(found, ())

    def test_more_places_than_blocks(self, tier):
        places = [filled(tier, 100_000 + i, i) for i in range(4 * BLOCKS)]
        ahead = [tier.fetch(place, [PART]) for place in places[:BLOCKS]]
        for i, place in enumerate(places):
            fetch = ahead[i] if i < BLOCKS else tier.fetch(place, [PART])
            staged = fetch.wait()
            assert fetch.wait() is staged
            assert torch.equal(staged[PART], content(100_000 + i, i)), i
            staged[PART].add_(1)
            tier.evict(staged, [PART])
        for i, place in enumerate(places):
            assert torch.equal(get(tier, place, PART)[PART], content(100_000 + i, i) + 1), i

    def test_any_order_of_calls_gives_what_was_evicted_last(self, tmp_path):
        @given(actions=ACTIONS, sizes=st.tuples(*[st.integers(0, 20_000)] * 3))
        @settings(max_examples=25)
        def any_order(actions, sizes) -> None:
            with self.made(tmp_path) as tier:
                record = dict(zip("abc", sizes, strict=True))
                places = [tier.reserve(Record(f"r{i}", record)) for i in range(3)]
                rests: list[dict[str, Tensor]] = [{}, {}, {}]
                for turn, (index, read, changed, waits) in enumerate(actions):
                    known = read & rests[index].keys()
                    staged = tier.fetch(places[index], known, fresh=changed - known).wait()
                    for name in known:
                        assert torch.equal(staged[name], rests[index][name])
                    for name in changed:
                        rests[index][name] = content(record[name], turn)
                        staged[name].copy_(rests[index][name])
                    transfer = tier.evict(staged, changed)
                    if waits:
                        transfer.wait()
                tier.drain()
                for place, rest in zip(places, rests, strict=True):
                    found = get(tier, place, *rest)
                    assert all(torch.equal(found[name], value) for name, value in rest.items())

        any_order()

    # --- room that is given back

    def test_room_that_was_given_back_is_taken_again(self, tier):
        places: list[Place] = []
        for turn in range(30):
            if len(places) == 4:
                tier.release(places.pop(turn % 4))
            place = tier.reserve(Record(f"r{turn}", {PART: 2**20 + 5, "b": turn}))
            put(tier, place, {PART: content(2**20 + 5, turn), "b": content(turn, turn)})
            places.append(place)
        for place in places:
            turn = place.record.parts["b"]
            found = get(tier, place, PART, "b")
            assert torch.equal(found[PART], content(2**20 + 5, turn)), turn
            assert torch.equal(found["b"], content(turn, turn)), turn
        if isinstance(tier, StagedTier):
            assert tier._end <= 6 * 2**20  # and not 30 times as much

    def test_what_is_written_anew_comes_after_what_was_under_way_there(self, tier):
        first = filled(tier, 2**20)
        for turn in range(20):
            read = tier.fetch(first, [PART])
            staged = read.wait()
            assert torch.equal(staged[PART], content(2**20, turn))
            tier.evict(staged, ())
            put(tier, first, {PART: content(2**20, 1000)})  # still being written when it goes
            tier.release(first)
            first = tier.reserve(Record("r", {PART: 2**20}))
            with pytest.raises(TierError, match="no content"):
                tier.fetch(first, [PART])
            put(tier, first, {PART: content(2**20, turn + 1)})

    def test_a_place_that_was_released_is_refused(self, tier):
        place = filled(tier, 7)
        tier.release(place)
        for call in (lambda: tier.fetch(place, [PART]), lambda: tier.release(place)):
            with pytest.raises(TierError, match="released"):
                call()
        tier.drain()

    # --- accounts

    def test_traffic_counts_bytes_of_parts_exactly(self, tier):
        place = tier.reserve(Record("r", {"a": 4097, "b": 10}))
        put(tier, place, {"a": content(4097, 0), "b": content(10, 1)})
        get(tier, place, "b")
        get(tier, place, "a", "b")
        tier.drain()
        counts = {n: (f.read_nbytes, f.written_nbytes) for n, f in tier.traffic.parts.items()}
        expected = {"a": (4097, 4097), "b": (20, 10)}
        assert {n: c for n, c in counts.items() if any(c)} == expected
        total = tier.traffic.total
        assert (total.read_nbytes, total.written_nbytes) == (4117, 4107)
        assert total.waited_s >= 0
        assert tier.traffic["nobody"].read_nbytes == 0

    def test_staging_is_the_same_however_much_rests(self, tier):
        before = tier.staging_nbytes
        for i in range(20):
            filled(tier, 2**20, i)
        tier.drain()
        assert tier.staging_nbytes == before

    def test_description_is_one_line(self, tier):
        assert tier.describe()
        assert "\n" not in tier.describe()

    # --- refusals

    def test_part_without_content_is_refused(self, tier):
        place = tier.reserve(Record("blocks.3", {"a": 10, "b": 10}))
        with pytest.raises(TierError, match=r"blocks\.3.*'a'.*no content"):
            tier.fetch(place, ["a"])
        put(tier, place, {"a": content(10, 0), "b": content(10, 1)})
        tier.evict(tier.fetch(place, ["a"], fresh=["b"]).wait(), ["a"])
        with pytest.raises(TierError, match=r"'b'.*taken fresh"):
            tier.fetch(place, ["a", "b"])
        assert torch.equal(get(tier, place, "a")["a"], content(10, 0))

    def test_wrong_names_and_twice_evicted_are_refused(self, tier):
        place = tier.reserve(Record("r", {"a": 10, "b": 10}))
        put(tier, place, {"a": content(10, 0), "b": content(10, 1)})
        for read, fresh in ((["x"], []), (["a", "a"], []), ([], ["x"]), (["a"], ["a"])):
            with pytest.raises(TierError, match="once"):
                tier.fetch(place, read, fresh=fresh)
        staged = tier.fetch(place, ["a"]).wait()
        with pytest.raises(TierError, match=r"\['b'\].*\['a'\]"):
            tier.evict(staged, ["a", "b"])
        tier.evict(staged, ["a"])
        with pytest.raises(TierError, match="after they were evicted"):
            tier.evict(staged, ["a"])
        with pytest.raises(TierError, match="after they were evicted"):
            staged["a"]
        assert not staged.held

    def test_place_of_another_tier_is_refused(self, tier, tmp_path):
        with self.made(tmp_path) as other:
            place = other.reserve(Record("r", {PART: 1}))
            with pytest.raises(TierError, match="another tier"):
                tier.fetch(place, (), fresh=[PART])

    def test_request_beyond_a_block_names_both_sizes(self, tier):
        place = tier.reserve(Record("r", {"a": BLOCK_NBYTES, "b": 1}))
        put(tier, place, {"a": content(BLOCK_NBYTES, 0)})
        put(tier, place, {"b": content(1, 1)})
        with pytest.raises(TierError, match=f"{BLOCK_NBYTES + 1:,} bytes.*{BLOCK_NBYTES:,}"):
            tier.fetch(place, ["a", "b"])
        assert torch.equal(get(tier, place, "a")["a"], content(BLOCK_NBYTES, 0))

    def test_waiting_for_a_block_that_nobody_gives_back_is_refused(self, tier):
        place = filled(tier, 8)
        held = [tier.fetch(place, [PART]).wait() for _ in range(BLOCKS)]
        with pytest.raises(TierError, match=f"all {BLOCKS} blocks.*fetch of master of 'r'"):
            tier.fetch(place, [PART])
        tier.evict(held[0], [PART])
        assert torch.equal(get(tier, place, PART)[PART], content(8, 0))

    def test_records_of_nothing_or_of_negative_size_are_refused(self):
        for parts in ({}, {"a": -1}, {str(i): 1 for i in range(17)}):
            with pytest.raises(TierError, match="expected"):
                Record("r", parts)

    # --- ends

    def test_close_is_final_and_harmless_twice(self, tmp_path):
        alive = lanes_alive()
        tier = self.made(tmp_path)
        place = filled(tier, 2**20)
        staged = tier.fetch(place, [PART]).wait()
        tier.close()
        tier.close()
        assert lanes_alive() == alive
        assert list(tmp_path.iterdir()) == []
        # memory that somebody points to lives on
        assert torch.equal(staged[PART], content(2**20, 0))
        for call in (
            lambda: tier.reserve(Record("s", {PART: 1})),
            lambda: tier.fetch(place, [PART]),
            lambda: tier.evict(staged, [PART]),
            tier.drain,
        ):
            with pytest.raises(TierError, match="closed"):
                call()

    def test_forgotten_tier_ends_its_threads(self, tmp_path):
        before = set(threading.enumerate())
        tier = self.made(tmp_path)
        fresh = set(threading.enumerate()) - before
        started = [thread for thread in fresh if thread.name.startswith("hpczero-tier")]
        filled(tier, 9)
        del tier
        for thread in started:
            thread.join(10)
        assert not any(thread.is_alive() for thread in started)
