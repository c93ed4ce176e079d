"""How long a device stands still for collectives: by its own clock, once for what is nested, without waiting for it."""

from __future__ import annotations

import pytest
import torch

import hpczero
from hpczero.accelerator import HostAccelerator, Span
from hpczero.comm.calls import Exposed
from hpczero.comm.devices import StagedReach
from tests.helpers.late import LateAccelerator
from tests.helpers.world import World


class SlowClock(Span):
    """Says it is over only when it was told so or waited for."""

    def __init__(self, seconds: float) -> None:
        self.is_over = False
        self._seconds = seconds

    def end(self) -> None:
        return

    def passed(self) -> bool:
        return self.is_over

    def seconds(self) -> float:
        self.is_over = True
        return self._seconds


class SlowDevice(HostAccelerator):
    """Its spans take 1, 2, 4, ... seconds."""

    is_host = False

    def __init__(self) -> None:
        super().__init__()
        self.spans: list[SlowClock] = []

    def span(self) -> Span:
        self.spans.append(SlowClock(2.0 ** len(self.spans)))
        return self.spans[-1]


def test_on_the_host_there_is_nothing_to_tell() -> None:
    exposed = Exposed(HostAccelerator())
    exposed.end(exposed.begin())
    assert exposed.seconds() is None


def test_the_device_is_waited_for_only_when_somebody_asks() -> None:
    device = SlowDevice()
    exposed = Exposed(device)
    for _ in range(4):
        exposed.end(exposed.begin())
    assert not any(span.is_over for span in device.spans)
    assert exposed.seconds() == 15.0
    assert exposed.seconds() == 15.0


def test_spans_that_are_over_are_not_kept() -> None:
    device = SlowDevice()
    exposed = Exposed(device)
    exposed.end(exposed.begin())
    exposed.end(exposed.begin())
    device.spans[0].is_over = True
    exposed.end(exposed.begin())
    assert len(exposed._spans) == 2, "only what the device has yet to do"
    assert exposed.seconds() == 7.0


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_a_call_and_the_wait_for_it_count_once_each(world: World) -> None:
    """The twin's clock is the host's: what it tells is what the accounts of the host tell."""
    transport = hpczero.Flat(world.topology, reach=StagedReach(LateAccelerator()))
    full = torch.zeros(2 * 40_000)
    for number in range(5):
        transport.all_gather(full, name=f"u{number}").wait()
        transport.barrier()
    told, accounts = transport.calls.exposed.seconds(), transport.stats.seconds
    transport.close()
    assert told is not None
    world.check(abs(told - accounts) <= 0.2 * accounts + 1e-3, f"{told} of {accounts}")
