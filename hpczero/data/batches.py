"""Batches of token sequences, for training and for the held-out split.

The global batch is a list of samples in a fixed order, the same for every world size. Micro step m of rank r takes one
contiguous slice of the list. A rank reads only its own slices.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from hpczero.errors import ConfigError, DataError

Int64Array: TypeAlias = npt.NDArray[np.int64]
_UInt64Array: TypeAlias = npt.NDArray[np.uint64]

Found = TypeVar("Found")  # samples

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


class Tokens(Protocol):
    """A row of token ids that can be sliced: a ``TokenSplit`` of a token file, or a numpy array."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: slice, /) -> npt.NDArray[np.unsignedinteger]: ...


class Windows:
    """Samples of ``seq_len`` tokens and the one after them; sample i starts at token ``i * seq_len``.

    Raises:
        DataError: The split has fewer than ``seq_len + 1`` tokens.
        ConfigError: ``seq_len`` is below 1.
    """

    def __init__(self, tokens: Tokens, seq_len: int, split: str) -> None:
        if seq_len < 1:
            raise ConfigError(f"got a sequence length of {seq_len}, expected at least 1")
        if len(tokens) <= seq_len:
            raise DataError(
                f"the {split} split has {len(tokens)} tokens, one sample of sequence length {seq_len} needs "
                f"{seq_len + 1}; use more text, a shorter sequence or another validation fraction"
            )
        self._tokens, self._seq_len = tokens, seq_len

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._seq_len

    def rows(self, samples: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Inputs and targets of samples (n,), int64 (n, seq_len) each; targets are the inputs one token later."""
        starts = (int(sample) * self._seq_len for sample in samples)
        found = np.stack([self._tokens[start : start + self._seq_len + 1] for start in starts])
        rows = found.astype(np.int64)
        return np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:])


class Samples(Protocol):
    """What ``HeldOut`` takes samples from: ``Windows``, or those of several files."""

    def __len__(self) -> int: ...
    def rows(self, samples: Int64Array, /) -> tuple[Int64Array, Int64Array]:
        """Inputs and targets of samples (n,), int64 (n, seq_len) each."""


class StepBatches(ABC, Generic[Found]):
    """Training batches, of which each rank takes its part. Positions in the run are all that a source answers to.

    Attributes:
        global_batch: Samples per optimizer step over all ranks.
    """

    global_batch: int

    @abstractmethod
    def at(self, places: Int64Array) -> Found:
        """The samples at positions (n,) of the run; position 0 is the first sample of step 0."""

    def micro_batch(
        self,
        step: int,
        micro_step: int,
        rank: int,
        world_size: int,
        accumulation: int = 1,
        shares: Sequence[int] | None = None,
    ) -> Found:
        """The part of a step's global batch that one rank computes at once.

        With ``b = global_batch / (world_size * accumulation)`` and ``i = micro_step * world_size + rank`` it is samples
        ``[i b, (i + 1) b)`` of the global batch. With ``shares``, how many of the ``world_size * b`` samples of a micro
        step each rank has, it is that many of them. Not collective; equal arguments give equal results on every rank.

        Returns:
            Of text: inputs and targets, int64 (b, seq_len) each; targets are the inputs one token later.

        Raises:
            ConfigError: The global batch cannot be divided so, or ``rank`` or ``micro_step`` is out of range.
        """
        return self.at(
            positions(self.global_batch, step, micro_step, rank, world_size, accumulation, shares)
        )


class Batches(StepBatches[tuple[Int64Array, Int64Array]]):
    """Training batches: windows of ``seq_len`` tokens in an order given by (seed, global sample index) alone.

    Args:
        tokens: The training split.
        seq_len: Tokens per sample; sample i starts at token ``i * seq_len``.
        global_batch: Samples per optimizer step over all ranks.
        seed: Of the order.

    Raises:
        DataError: The split has fewer than ``seq_len + 1`` tokens.
        ConfigError: ``seq_len`` or ``global_batch`` is below 1.
    """

    def __init__(self, tokens: Tokens, seq_len: int, global_batch: int, seed: int) -> None:
        check_global_batch(global_batch)
        self._windows = Windows(tokens, seq_len, "training")
        self.global_batch = global_batch
        self.sampler = Sampler(len(self._windows), seed)

    @override
    def at(self, places: Int64Array) -> tuple[Int64Array, Int64Array]:
        return self._windows.rows(self.sampler.samples(places))


@dataclass(frozen=True)
class EvaluationBatch:
    """One rank's share of an evaluation round.

    Attributes:
        x: Inputs, int64 (n, seq_len), n at least 1.
        y: Targets, of the same shape.
        num_samples: How many of the rows count: n, or 0 if the one row only lets this rank take part.
    """

    x: Int64Array
    y: Int64Array
    num_samples: int

    @property
    def arrays(self) -> tuple[Int64Array, Int64Array]:
        """Inputs and targets."""
        return self.x, self.y


class HeldOut:
    """A fixed set of held-out samples, spread evenly over the split.

    The mean loss over the set is ``sum(loss * num_samples) / len(held_out)``, summed over all batches and ranks. The
    mean of batch means would give the samples of a smaller last batch more weight.

    Args:
        tokens: The validation split.
        seq_len: Tokens per sample.
        max_samples: Upper bound of the set; None takes every sample of the split.
        samples: Taken instead of windows of ``tokens``.

    Raises:
        DataError: The split has fewer than ``seq_len + 1`` tokens.
        ConfigError: ``seq_len`` or ``max_samples`` is below 1.
    """

    def __init__(
        self,
        tokens: Tokens,
        seq_len: int,
        max_samples: int | None = None,
        samples: Samples | None = None,
    ) -> None:
        if max_samples is not None and max_samples < 1:
            raise ConfigError(f"got {max_samples} held-out samples, expected at least 1")
        self._windows = samples or Windows(tokens, seq_len, "held-out")
        self.samples = at_even_distances(len(self._windows), max_samples)

    def __len__(self) -> int:
        return len(self.samples)

    def batches(self, *, micro_batch: int, rank: int, world_size: int) -> Iterator[EvaluationBatch]:
        """This rank's batches. Every rank gets the same number, because the forward of a sharded model is collective.

        A round gives ``micro_batch`` samples to each rank in turn. Ranks past the end of the set get one row that does
        not count. Not collective; equal arguments give equal results.

        Raises:
            ConfigError: ``micro_batch`` is below 1 or ``rank`` out of range.
        """
        for mine, num_samples in in_rounds(self.samples, micro_batch, rank, world_size):
            yield EvaluationBatch(*self._windows.rows(mine), num_samples)


def at_even_distances(available: int, most: int | None) -> Int64Array:
    """At most ``most`` of ``range(available)``, spread evenly, int64 (n,)."""
    wanted = min(available, most or available)
    return np.arange(wanted, dtype=np.int64) * available // wanted


def in_rounds(
    samples: Int64Array, micro_batch: int, rank: int, world_size: int
) -> Iterator[tuple[Int64Array, int]]:
    """One rank's samples of each evaluation round, and how many of them count; see ``HeldOut.batches``."""
    if micro_batch < 1 or not 0 <= rank < world_size:
        raise ConfigError(
            f"got micro batch {micro_batch} and rank {rank} of {world_size}, expected both in range"
        )
    for start in range(0, len(samples), micro_batch * world_size):
        mine = samples[start + rank * micro_batch :][:micro_batch]
        yield (mine, len(mine)) if len(mine) else (samples[:1], 0)


def check_global_batch(global_batch: int) -> None:
    """Refuse a global batch below 1 with a ConfigError."""
    if global_batch < 1:
        raise ConfigError(f"got a global batch of {global_batch} samples, expected at least 1")


def positions(
    global_batch: int,
    step: int,
    micro_step: int,
    rank: int,
    world_size: int,
    accumulation: int,
    shares: Sequence[int] | None = None,
) -> Int64Array:
    """Places in the run of the samples that one rank computes at once, int64 (n,); see ``Batches.micro_batch``.

    Raises:
        ConfigError: as there.
    """
    size = micro_batch_size(global_batch, world_size, accumulation)
    if not (0 <= rank < world_size and 0 <= micro_step < accumulation):
        raise ConfigError(
            f"got rank {rank} of {world_size} and micro step {micro_step} of {accumulation}, expected both in range"
        )
    shares = [size] * world_size if shares is None else shares
    if len(shares) != world_size or sum(shares) != world_size * size or min(shares) < 1:
        raise ConfigError(
            f"got shares {list(shares)[:16]} of {world_size} ranks, expected {world_size} numbers of 1 or more whose "
            f"sum is {world_size * size}"
        )
    start = step * global_batch + micro_step * world_size * size + sum(shares[:rank])
    return np.arange(start, start + shares[rank], dtype=np.int64)


def micro_batch_size(global_batch: int, world_size: int, accumulation: int) -> int:
    """Samples per rank and micro step.

    Raises:
        ConfigError: The global batch is not divisible; the message names the nearest values that are.
    """
    parts = world_size * accumulation
    if parts < 1:
        raise ConfigError(
            f"got world size {world_size} and accumulation {accumulation}, expected at least 1 of each"
        )
    size, rest = divmod(global_batch, parts)
    if rest or size < 1:
        valid = " or ".join(str(n * parts) for n in (size, size + 1) if n)
        raise ConfigError(
            f"global batch {global_batch} is not divisible by world size {world_size} x accumulation {accumulation} = "
            f"{parts}; use a global batch of {valid}, or another accumulation"
        )
    return size
