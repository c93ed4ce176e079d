"""Architectures of transformers come from disk into shards, train there as in plain torch, and go back to disk."""

from __future__ import annotations

import pytest

from tests.compat.architectures import ARCHITECTURES, Architecture
from tests.foreign.more_architectures import MORE
from tests.foreign.round_trip import RoundTrip
from tests.helpers.cases import EVERYTHING
from tests.helpers.world import World

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.ranks(2, 3),
    pytest.mark.limit(600),
    # Others' code warns of itself; a warning of hpczero's is an error as everywhere.
    pytest.mark.filterwarnings("ignore", "error:::hpczero"),
]

# Ties, layouts of old files, experts that are stacked, an encoder beside a decoder, running statistics.
CHOSEN = {
    "qwen2": (3, "flat"),
    "mixtral": (3, "window"),
    "t5": (2, "flat"),
    "resnet": (1, "window"),
}
CASES = [(stage, transport) for stage in (0, 1, 2, 3) for transport in ("flat", "window")]


@pytest.mark.parametrize(
    "architecture",
    [each for each in [*ARCHITECTURES, *MORE] if EVERYTHING or each.name in CHOSEN],
    ids=lambda each: each.name,
)
def test_trains_from_disk_to_disk(world: World, architecture: Architecture) -> None:
    trip = RoundTrip(world, architecture)
    for stage, transport in CASES if EVERYTHING else [CHOSEN[architecture.name]]:
        trip.run(stage=stage, transport=transport)
    world.check(not trip.problems, "\n".join(trip.problems[:8]))
