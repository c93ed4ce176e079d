"""Samples of several files with weights: in exact proportions, from any position on, on any number of ranks.

Owns: which source a position of a run belongs to, and which of its samples that is. Must not know: files, ranks.

[Note: Turns]
Weights are integers w_1 ... w_k with sum W. Of the first p positions source 1 has floor(p * w_1 / W). The positions
that it leaves are counted anew, and shared by the others in the same way. All of it is arithmetic on p: there is no
list, no random number, and nothing to restore. Every W positions hold exactly w_i of each source, and up to any
position a source is less than one sample for each source before it away from its share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from hpczero.data.batches import Int64Array, Sampler, Samples, check_global_batch, positions
from hpczero.errors import ConfigError

MOST_PERIOD = 10**6  # W; p * W must fit into 64 bits for any p that a run reaches
MOST_POSITION = 2**62 // MOST_PERIOD


class Turns:
    """Which of several sources has a position ([Note: Turns]).

    Args:
        weights: above 0; those of decimal digits are taken as they are written (0.1 is a tenth).

    Raises:
        ConfigError: a weight is not above 0, or they have no common period of at most a million.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        if not weights or not all(0 < weight < math.inf for weight in weights):
            raise ConfigError(f"got weights {list(weights)}, expected finite numbers above 0")
        exact = [Fraction(str(weight)) for weight in weights]
        denominator = math.lcm(*(weight.denominator for weight in exact))
        whole = [int(weight * denominator) for weight in exact]
        self.weights = [weight // math.gcd(*whole) for weight in whole]
        self.period = sum(self.weights)
        if self.period > MOST_PERIOD:
            raise ConfigError(
                f"got weights {list(weights)}, which repeat after {self.period:,} samples, expected at most "
                f"{MOST_PERIOD:,}; use fewer digits"
            )

    def of(self, places: npt.NDArray[np.integer]) -> tuple[Int64Array, Int64Array]:
        """Source of each position, and how many positions that source had before.

        Args:
            places: integers (n,), at least 0.

        Returns:
            Both int64 (n,).

        Raises:
            ValueError: a position is negative or above 4e12.
        """
        left = places.astype(np.int64)
        if left.size and not 0 <= int(left.min()) <= int(left.max()) <= MOST_POSITION:
            raise ValueError(f"Turns: got positions {left.min()} to {left.max()}")
        source = np.full(len(left), len(self.weights) - 1, dtype=np.int64)
        before = np.empty_like(left)
        undecided = np.arange(len(left))
        total = self.period
        for index, weight in enumerate(self.weights):
            had = left * weight // total
            mine = (left + 1) * weight // total > had
            source[undecided[mine]] = index
            before[undecided[mine]] = had[mine]
            undecided, left = undecided[~mine], (left - had)[~mine]
            total -= weight
        return source, before


class MixedBatches:
    """Training batches of several sources; as ``Batches``, whose order of samples each source has for itself.

    Args:
        sources: samples of each.
        weights: of each; see ``Turns``.
        global_batch: samples per optimizer step over all ranks.
        seed: of the orders.

    Raises:
        ConfigError: a weight or the global batch is out of range.
    """

    def __init__(
        self, sources: Sequence[Samples], weights: Sequence[float], global_batch: int, seed: int
    ) -> None:
        check_global_batch(global_batch)
        self.global_batch = global_batch
        self.turns = Turns(weights)
        self._sources = list(sources)
        self._samplers = [
            Sampler(len(source), seed + index * 0x9E3779B97F4A7C15)
            for index, source in enumerate(sources)
        ]

    def micro_batch(
        self, step: int, micro_step: int, rank: int, world_size: int, accumulation: int = 1
    ) -> tuple[Int64Array, Int64Array]:
        """The part of a step's global batch that one rank computes at once; as of ``Batches``."""
        places = positions(self.global_batch, step, micro_step, rank, world_size, accumulation)
        source, before = self.turns.of(places)
        samples = np.empty_like(before)
        for index, sampler in enumerate(self._samplers):
            samples[source == index] = sampler.samples(before[source == index])
        return _rows(self._sources, source, samples)


class Joined:
    """The samples of several sources one after another."""

    def __init__(self, sources: Sequence[Samples]) -> None:
        self._sources = list(sources)
        self._ends = np.cumsum([len(source) for source in sources])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def rows(self, samples: Int64Array, /) -> tuple[Int64Array, Int64Array]:
        """Inputs and targets of samples (n,), int64 (n, seq_len) each."""
        source = np.searchsorted(self._ends, samples, side="right")
        starts = np.concatenate([[0], self._ends[:-1]])
        return _rows(self._sources, source, samples - starts[source])


def _rows(
    sources: Sequence[Samples], source: Int64Array, samples: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """Inputs and targets of ``samples[i]`` of ``sources[source[i]]``, in that order."""
    x = y = np.empty((0, 0), dtype=np.int64)
    for index, one in enumerate(sources):
        mine = source == index
        if mine.any():
            inputs, targets = one.rows(samples[mine])
            if not x.size:
                x, y = (np.empty((len(source), inputs.shape[1]), dtype=np.int64) for _ in range(2))
            x[mine], y[mine] = inputs, targets
    return x, y
