"""Which rank slows the others down, every K steps, with the name of its host.

Owns: each rank's own work per step, and what is said of it. Must not know: models, training, where times come from.

The measure is a rank's own work: loading, forward and backward without waits for others. The time in collectives would
say the opposite, because the slowest rank waits least. A rank is compared with the others, and with its own best.
Source of the measure and of 0.7: NVIDIA's nvidia-resiliency-ext, ``gpu_relative_perf_threshold``.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from hpczero.job.topology import Topology

THRESHOLD = 0.7  # speed relative to the others, or to itself
LEAST_S = 0.02  # what is lost per step, below which nothing is said
MOST_NAMED = 8


class Stragglers:
    """Own work of one rank since the last report."""

    def __init__(self, topology: Topology, *, every: int) -> None:
        """Not collective.

        Args:
            topology: topology of the run; borrowed.
            every: steps between reports; 0 reports nothing.
        """
        self._topology = topology
        self._every = every
        self._window: list[float] = []
        self._best: float | None = None

    def note(self, own_s: float) -> None:
        """Add one step: seconds of this rank's own work. Not collective."""
        if self._every:
            self._window.append(own_s)

    def report(self, done: int) -> list[str]:
        """Lines about ranks that are slow, the same on every rank. None if no report is due or no rank is slow.

        Collective over the topology's world.

        Args:
            done: steps done.
        """
        if not self._every or done % self._every or not self._window:
            return []
        own_s = statistics.median(self._window)
        self._window.clear()
        self._best = own_s if self._best is None else min(self._best, own_s)
        now, best = self._topology.gather(own_s), self._topology.gather(self._best)
        slow, tired = slower_than_others(now), slower_than_before(now, best)
        if not slow and not tired:
            return []
        hosts = self._topology.world.hosts()
        typical = statistics.median_low(now)
        lines = [
            f"straggler: rank {rank} on {hosts[rank]} works {now[rank] * 1e3:.1f} ms per step, others "
            f"{typical * 1e3:.1f} ms ({typical / now[rank]:.2f} of their speed)"
            for rank in slow[:MOST_NAMED]
        ]
        lines += [
            f"straggler: rank {rank} on {hosts[rank]} works {now[rank] * 1e3:.1f} ms per step, at its best "
            f"{best[rank] * 1e3:.1f} ms ({best[rank] / now[rank]:.2f} of its own speed)"
            for rank in [r for r in tired if r not in slow][:MOST_NAMED]
        ]
        left_out = len({*slow, *tired}) - len(lines)
        return [*lines, f"straggler: {left_out} more rank(s) are slow"] if left_out > 0 else lines


def slower_than_others(own_s: Sequence[float]) -> list[int]:
    """Ranks below the threshold of the typical rank's speed, slowest first."""
    typical = statistics.median_low(own_s)
    return _below([typical] * len(own_s), own_s)


def slower_than_before(own_s: Sequence[float], best_s: Sequence[float]) -> list[int]:
    """Ranks below the threshold of their own best speed, slowest first."""
    return _below(best_s, own_s)


def _below(wanted_s: Sequence[float], own_s: Sequence[float]) -> list[int]:
    found = [
        rank
        for rank, (wanted, own) in enumerate(zip(wanted_s, own_s, strict=True))
        if wanted < THRESHOLD * own and own - wanted > LEAST_S
    ]
    return sorted(found, key=lambda rank: -own_s[rank])
