"""Real nodes with different numbers of ranks: what the links carry, against the plan and against even nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from tests.cluster.emulated import JOBS, EmulatedCluster, reported
from tests.helpers.cases import EVERYTHING

HOSTS, RATE_MBIT = 3, 1000
NUMEL = 64 * 60 * 256  # divides into 4, 5 and 6 shards
TIMES = 3
# What MPI says to start and end a job, and headers of 9,000-byte packets.
LAUNCH_NBYTES, HEADERS = 400_000, 1.02


@dataclass(frozen=True)
class Carried:
    """Bytes of one job, by host: what its ranks say they sent, and what its link sent and received."""

    said: list[int]
    sent: list[int]
    received: list[int]
    digests: set[str]


def run(cluster: EmulatedCluster, transports: str, ranks: Sequence[int], times: int) -> Carried:
    def counted() -> list[tuple[int, int]]:
        return [(cluster.bytes_sent(h), cluster.bytes_received(h)) for h in range(len(ranks))]

    before = counted()
    done = cluster.run(
        [*JOBS, "crossing", transports, str(NUMEL), str(times)], ranks_per_host=ranks, timeout=90
    )
    found, after = reported(done), counted()
    return Carried(
        [sum(r["sent"] for r in found if r["node"] == node) for node in range(len(ranks))],
        [new[0] - old[0] for new, old in zip(after, before, strict=True)],
        [new[1] - old[1] for new, old in zip(after, before, strict=True)],
        {digest for rank in found for digest in rank["digests"]},
    )


THREE = ((2, 2, 1), (2, 2, 2))
TWO = ((3, 1), (2, 2))


@pytest.mark.slow
@pytest.mark.parametrize(("uneven", "even"), [TWO, THREE] if EVERYTHING else [THREE])
def test_links_carry_what_the_plan_says_a_tenth_more_than_between_even_nodes_at_most_with_the_bits_of_flat(
    cluster: EmulatedCluster, uneven: tuple[int, ...], even: tuple[int, ...]
) -> None:
    found, compared = (run(cluster, "window", ranks, TIMES) for ranks in (uneven, even))
    shard, nodes = 4 * NUMEL // sum(uneven), len(uneven)
    for host, ranks in enumerate(uneven):
        others = sum(uneven) - ranks
        # In a reduction every shard of others leaves once; in a gather each of its own, to each other node.
        leaves = TIMES * shard * (others + (nodes - 1) * ranks)
        comes = TIMES * shard * ((nodes - 1) * ranks + others)
        assert found.said[host] == leaves
        for counted, payload in ((found.sent, leaves), (found.received, comes)):
            assert payload < counted[host] < HEADERS * payload + LAUNCH_NBYTES, found
        both = found.sent[host] + found.received[host]
        of_even = min(map(sum, zip(compared.sent, compared.received, strict=True)))
        assert both <= 1.1 * of_even, (found, compared)
    beside = run(cluster, "flat,hierarchical", uneven, TIMES)
    assert len(found.digests | beside.digests) == 1
