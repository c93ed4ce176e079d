"""The device tier: nothing moves."""

from __future__ import annotations

from hpczero.tier import DeviceTier, Record
from tests.tier.suite import PART, TierSuite, content, put


class TestDevice(TierSuite):
    @staticmethod
    def make(folder, blocks, block_nbytes):
        return DeviceTier()


def test_fetch_gives_the_resident_memory_itself() -> None:
    with DeviceTier() as tier:
        place = tier.reserve(Record("r", {PART: 100}))
        put(tier, place, {PART: content(100, 0)})
        first, second = (tier.fetch(place, [PART]).wait() for _ in range(2))
        assert first[PART].data_ptr() == second[PART].data_ptr()
