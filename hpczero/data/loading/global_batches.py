"""Which samples of a data set are in which batch of a run, and which of them a rank takes.

Owns: that arithmetic. Must not know: torch, MPI, what a sample is. The global batch is a list of samples in a fixed
order, the same for every number of ranks. A rank takes one contiguous slice of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpczero.data.sampler import Int64Array, Sampler
from hpczero.errors import ConfigError

MOST_SEED = 2**63  # torch takes no larger one


@dataclass(frozen=True)
class Share:
    """What one rank takes of a global batch.

    Attributes:
        samples: indices into the data set, int64 (n,), n at least 1.
        positions: the place of each in the run, int64 (n,): epoch * num_samples + place in the epoch.
        weight: what the mean loss over ``samples`` counts: number of ranks * n / samples of the global batch. The mean
            over ranks of weight * loss is then the mean loss over the global batch. It is 0 for a rank that has no
            sample of its own and takes one to be in step with the others.
    """

    samples: Int64Array
    positions: Int64Array
    weight: float


@dataclass(frozen=True)
class GlobalBatches:
    """The batches of a run over a data set, epoch after epoch.

    Attributes:
        num_samples: length of the data set.
        global_batch: samples of a step over all ranks.
        seed: of the order.
        shuffle: whether each epoch has an order of its own; otherwise it is that of the data set.
        drop_last: whether samples that fill no global batch are left out of the epoch.

    Raises:
        ConfigError: a number is below 1, or no batch is left, or the seed is none.
    """

    num_samples: int
    global_batch: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = True

    def __post_init__(self) -> None:
        for name in ("num_samples", "global_batch"):
            value = getattr(self, name)
            if not isinstance(value, (int, np.integer)) or value < 1:
                raise ConfigError(f"{name}: got {value!r}, expected a whole number of at least 1")
        if not isinstance(self.seed, (int, np.integer)) or not 0 <= self.seed < MOST_SEED:
            raise ConfigError(
                f"seed: got {self.seed!r}, expected a whole number from 0 to 2^63 - 1"
            )
        if self.drop_last and self.num_samples < self.global_batch:
            raise ConfigError(
                f"got {self.num_samples} samples and a global batch of {self.global_batch}, so no batch is full; use a "
                "smaller one, or drop_last=False"
            )

    def __len__(self) -> int:
        """Batches of an epoch."""
        whole, rest = divmod(self.num_samples, self.global_batch)
        return whole + (rest > 0 and not self.drop_last)

    def is_even(self, world_size: int) -> bool:
        """Whether every rank takes as many samples of every batch as every other."""
        rest = 0 if self.drop_last else self.num_samples % self.global_batch
        return self.global_batch % world_size == 0 and rest % world_size == 0

    def share(self, batch: int, rank: int, world_size: int) -> Share:
        """What one rank takes of a batch. Not collective.

        Args:
            batch: number of the batch in the run, from 0; it counts through all epochs.
            rank: of ``world_size``.
            world_size: number of ranks that train on different samples.
        """
        epoch, index = divmod(batch, len(self))
        begin = index * self.global_batch
        count = min(self.global_batch, self.num_samples - begin)
        start, stop = count * rank // world_size, count * (rank + 1) // world_size
        weight = world_size * (stop - start) / count
        if start == stop:
            start, stop = 0, 1
        places = np.arange(begin + start, begin + stop, dtype=np.int64)
        positions = epoch * self.num_samples + places
        samples = places
        if self.shuffle:
            samples = Sampler(self.num_samples, self.seed).samples(positions)
        return Share(samples, positions, weight)
