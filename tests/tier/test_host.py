"""The host tier, with copies that are done at once and with copies that come late."""

from __future__ import annotations

import pytest
import torch

from hpczero.errors import ConfigError, OutOfMemory
from hpczero.tier import HostTier
from hpczero.tier import host as host_module
from tests.helpers.late import LateAccelerator
from tests.tier.suite import PART, TierSuite, content, filled, get


class TestHost(TierSuite):
    make = staticmethod(lambda folder, **sizes: HostTier(**sizes))


class TestHostOfALateDevice(TierSuite):
    @staticmethod
    def make(folder, **sizes):
        return HostTier(accelerator=LateAccelerator(), **sizes)


def test_what_is_staged_is_a_copy():
    with HostTier(blocks=2, block_nbytes=100) as tier:
        place = filled(tier, 100)
        staged = tier.fetch(place, [PART]).wait()
        staged[PART].zero_()
        assert torch.equal(get(tier, place, PART)[PART], content(100, 0))


def test_parts_may_lie_across_slabs(monkeypatch):
    monkeypatch.setattr(host_module, "SLAB_NBYTES", 3 * 4096)
    with HostTier(blocks=2, block_nbytes=100_000) as tier:
        places = [filled(tier, 9000 * i, i) for i in range(10)]
        for i, place in enumerate(places):
            assert torch.equal(get(tier, place, PART)[PART], content(9000 * i, i))


def test_staging_of_nothing_and_beyond_all_memory_are_refused():
    with pytest.raises(ConfigError, match="0 blocks"):
        HostTier(blocks=0, block_nbytes=1)
    with pytest.raises(ConfigError, match="1 blocks of 0"):
        HostTier(blocks=1, block_nbytes=0)
    with pytest.raises(ConfigError, match="0 lanes"):
        HostTier(blocks=1, block_nbytes=1, lanes=0)
    with pytest.raises(OutOfMemory, match="do not fit"):
        HostTier(blocks=1, block_nbytes=2**60)
