"""Balance: ranks that compute faster take more samples of every micro-batch (``--train.balance``).

A step takes as long as its slowest rank. Ranks measure their own work, loading, forward and backward without waits for
others, and every ``EVERY`` steps they divide the samples anew. The samples of a step stay the same, in the same order;
each rank has a run of them. A rank's loss is the mean over its samples, weighted by how many they are, so the sum over
ranks is the mean over all. Numbers of micro-batches stay equal, because forwards of sharded models are collective.

Source: Li et al., Poplar, arXiv 2408.12596 (unequal micro-batches over unlike devices).
"""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hpczero.errors import ConfigError
from hpczero.job.topology import Topology
from hpczero.options.config import MOST_SHARE, RunConfig

EVERY = 10  # steps between decisions
LEAST = 2  # samples of a rank: norms over a batch refuse one
LEAST_GAIN = 0.05  # of a step's time, predicted, below which nothing is changed


@dataclass(frozen=True)
class WorkTime:
    """Seconds that a rank works in one step: ``fixed + each * samples``."""

    fixed: float
    each: float

    def of(self, samples: int) -> float:
        """Seconds for so many samples of each micro-batch."""
        return self.fixed + self.each * samples

    @classmethod
    def fitted(cls, seen: dict[int, float]) -> WorkTime:
        """From seconds by number of samples, the newest last; of one number nothing is known to be fixed."""
        *before, (samples, seconds) = seen.items()
        each = seconds / samples
        if before:
            other, took = before[-1]
            slope = (seconds - took) / (samples - other)
            each = min(max(slope, 0.1 * each), each)  # a disturbed clock predicts no wonders
        return cls(seconds - each * samples, each)


def divided(total: int, times: Sequence[WorkTime], most: int) -> list[int]:
    """Samples of each rank, at least ``LEAST`` and at most ``most``: one by one to whoever would be through first."""
    found = [LEAST] * len(times)
    waiting = [(each.of(LEAST + 1), rank) for rank, each in enumerate(times) if most > LEAST]
    heapq.heapify(waiting)
    for _ in range(total - sum(found)):
        _, rank = heapq.heappop(waiting)
        found[rank] += 1
        if found[rank] < most:
            heapq.heappush(waiting, (times[rank].of(found[rank] + 1), rank))
    return found


class Balance:
    """Shares of the ranks in every micro-batch.

    Attributes:
        shares: samples of each rank, in rank order; the same on every rank.
    """

    def __init__(self, topology: Topology, micro_batch: int) -> None:
        """Even shares of ``micro_batch`` samples. Not collective."""
        self._ranks, self._even = topology.data, micro_batch
        self.shares = [micro_batch] * self._ranks.size
        self._window: list[float] = []
        self._seen: list[dict[int, float]] = [{} for _ in self.shares]

    @property
    def weight(self) -> float:
        """Of this rank's loss: its samples over those of an even share."""
        return self.shares[self._ranks.rank] / self._even

    def note(self, own_s: float) -> None:
        """A step is done, in which this rank worked so many seconds. Not collective."""
        self._window.append(own_s)

    def decide(self) -> str:
        """Divide the samples anew, if a decision is due. Collective over the topology's data group.

        Returns:
            What has changed, in words; empty where nothing has.
        """
        if len(self._window) < EVERY:
            return ""
        mine = np.array([statistics.median(self._window[1:])])  # the first may have got new memory
        self._window.clear()
        took = self._ranks.share(mine)[:, 0].tolist()
        for seen, samples, seconds in zip(self._seen, self.shares, took, strict=True):
            seen.pop(samples, None)
            seen[samples] = seconds
        times = [WorkTime.fitted(seen) for seen in self._seen]
        shares = divided(self._even * len(times), times, MOST_SHARE * self._even)
        now, then = max(took), max(map(WorkTime.of, times, shares))
        if then > (1 - LEAST_GAIN) * now:
            return ""
        self.shares = shares
        slowest = took.index(now)
        return (
            f"balance: rank {slowest} works {now * 1e3:.0f} ms a step, the fastest {min(took) * 1e3:.0f} ms; from now "
            f"on ranks have {_in_words(shares)} samples of a micro-batch (even: {self._even}), predicted to take "
            f"{then * 1e3:.0f} ms"
        )


def _in_words(shares: Sequence[int]) -> str:
    shown = ", ".join(map(str, shares[:16]))
    return shown if len(shares) <= 16 else f"{shown}, ... ({min(shares)} to {max(shares)})"


def balance_of(config: RunConfig, topology: Topology, micro_batch: int) -> Balance | None:
    """None where the run has even shares. Not collective.

    Raises:
        ConfigError: shares cannot be uneven; names the option.
    """
    if not config.train.balance:
        return None
    for degree in ("tensor", "pipeline", "context"):
        if (got := getattr(config.parallel, degree)) > 1:
            raise ConfigError(
                f"train.balance: got true, and parallel.{degree} is {got}; ranks that share a sample work as fast as "
                f"the slowest of them; expected train.balance false, or parallel.{degree} 1"
            )
    if micro_batch <= LEAST:
        raise ConfigError(
            f"train.balance: got true with micro-batches of {micro_batch}, of which nothing can be moved; expected "
            f"train.balance false, or a train.micro_batch of {LEAST + 1} or more"
        )
    return Balance(topology, micro_batch)
