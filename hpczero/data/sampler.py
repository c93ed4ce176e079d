"""Which sample comes at which position of a run.

Owns: a shuffle without state. Must not know: ranks, batches, files. Position p of a run lies in epoch p // num_samples.
Each epoch is a permutation of all samples, computed element by element from (seed, epoch). There is no list to store,
to broadcast or to restore. Resuming needs one integer, and the order cannot depend on the world size.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Int64Array: TypeAlias = npt.NDArray[np.int64]
_UInt64Array: TypeAlias = npt.NDArray[np.uint64]

_ROUNDS = 8
_GOLDEN = 0x9E3779B97F4A7C15
_MASK64 = 2**64 - 1


class Sampler:
    """A permutation of ``range(num_samples)`` per epoch.

    A Feistel network permutes the numbers of 2k bits, the smallest such domain that holds ``num_samples``. A result
    outside the range is fed in again until it falls inside (cycle walking), which keeps it a permutation.

    Args:
        num_samples: At least 1.
        seed: Any integer; only its low 64 bits count.

    Raises:
        ValueError: ``num_samples`` is below 1.

    Source: Luby and Rackoff, SIAM J. Comput. 17 (1988); Black and Rogaway, CT-RSA 2002, sec. 3 (cycle walking).
    """

    def __init__(self, num_samples: int, seed: int) -> None:
        if num_samples < 1:
            raise ValueError(f"Sampler: got {num_samples} samples, expected at least 1")
        self.num_samples = num_samples
        self.seed = seed
        self._half_bits = max(1, ((num_samples - 1).bit_length() + 1) // 2)

    def sample(self, position: int) -> int:
        """Index of the sample at one position."""
        return int(self.samples(np.array([position]))[0])

    def samples(self, positions: npt.NDArray[np.integer]) -> Int64Array:
        """Indices of the samples at many positions.

        Args:
            positions: Integers (n,), at least 0; they may span epochs.

        Returns:
            int64 (n,), each in ``range(num_samples)``.

        Raises:
            ValueError: A position is negative.
        """
        if positions.size and int(positions.min()) < 0:
            raise ValueError(f"Sampler: got position {int(positions.min())}, expected at least 0")
        epoch, index = np.divmod(positions.astype(np.uint64), np.uint64(self.num_samples))
        seed_key = _mix(np.array([self.seed + _GOLDEN & _MASK64], dtype=np.uint64))
        epoch_key = _mix(epoch + seed_key)
        index = self._feistel(index, epoch_key)
        while (outside := index >= self.num_samples).any():
            index[outside] = self._feistel(index[outside], epoch_key[outside])
        return index.astype(np.int64)

    def _feistel(self, value: _UInt64Array, epoch_key: _UInt64Array) -> _UInt64Array:
        bits, mask = np.uint64(self._half_bits), np.uint64(2**self._half_bits - 1)
        left, right = value >> bits, value & mask
        for round_index in range(_ROUNDS):
            round_key = epoch_key + np.uint64(round_index * _GOLDEN & _MASK64)
            left, right = right, left ^ (_mix(_mix(right) ^ round_key) & mask)
        joined: _UInt64Array = left << bits | right
        return joined


def _mix(value: _UInt64Array) -> _UInt64Array:
    """A bijection on 64 bits that spreads every input bit over the output: the finaliser of splitmix64.

    Source: Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014, variant 13.
    """
    value = (value ^ value >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ value >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    mixed: _UInt64Array = value ^ value >> np.uint64(31)
    return mixed
