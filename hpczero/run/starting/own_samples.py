"""Samples that an adapter brings, in the order of a run: any tensors, one row of each per sample.

Owns: which rows a rank sees in a step and in an evaluation, and what makes two data sets the same. Must not know: MPI,
what the rows mean, where they come from. Position p of a run is the sample that ``Sampler`` says, for any number of
ranks, so a run goes on anywhere with the next sample.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from hpczero.data.batches import Sampler, micro_batch_size
from hpczero.errors import ConfigError, DataError

LOOKED_AT = 1024  # rows of a set that its digest is made of


class Rows:
    """A data set as rows by number; a row is a tuple of tensors. Not collective.

    Args:
        given: a tuple of tensors of equal first dimension, or an object with ``__len__`` and ``__getitem__(index)``.
        what: names it in messages.

    Raises:
        DataError: it is neither, or is empty.
    """

    def __init__(self, given: Any, what: str) -> None:
        tensors = getattr(given, "tensors", given)  # of a TensorDataset
        self._tensors: tuple[Tensor, ...] | None = None
        self._items, self._what = given, what
        if isinstance(tensors, (tuple, list)) and all(isinstance(t, Tensor) for t in tensors):
            self._tensors = tuple(t.detach() for t in tensors)
            sizes = [t.shape[0] if t.dim() else 0 for t in tensors]
            if len({*sizes}) != 1:
                raise DataError(
                    f"{what}: got tensors of {sizes} rows, expected one number of rows in all of them"
                )
            self._size = sizes[0]
        elif isinstance(given, tuple) and any(isinstance(part, np.ndarray) for part in given):
            raise DataError(
                f"{what}: got a tuple with arrays of NumPy, expected one of tensors: torch.from_numpy(...)"
            )
        elif hasattr(given, "__len__") and hasattr(given, "__getitem__"):
            self._size = len(given)
        else:
            raise DataError(
                f"{what}: got {type(given).__name__}, expected a tuple of tensors, or an object with __len__ and "
                "__getitem__(index); an iterator cannot go on where another job stopped"
            )
        if self._size < 1:
            raise DataError(f"{what}: has no samples")

    def __len__(self) -> int:
        return self._size

    def take(self, indices: Sequence[int] | np.ndarray[Any, Any]) -> tuple[Tensor, ...]:
        """The rows with these numbers, stacked; tensors of the host."""
        if self._tensors is not None:
            chosen = torch.as_tensor(np.asarray(indices, dtype=np.int64))
            return tuple(tensor[chosen] for tensor in self._tensors)
        items = [self._items[int(index)] for index in indices]
        try:
            batch = default_collate(items)
        except (RuntimeError, TypeError, KeyError) as error:
            raise DataError(
                f"{self._what}: samples {', '.join(str(int(index)) for index in indices[:3])} ... cannot be stacked "
                f"({str(error).splitlines()[0]}), expected tensors of one shape, numbers, or tuples of them"
            ) from error
        found = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
        if not all(isinstance(tensor, Tensor) for tensor in found):
            raise DataError(
                f"{self._what}: a sample is {type(items[0]).__name__} of "
                f"{', '.join(type(tensor).__name__ for tensor in found)}, expected tensors, numbers or a tuple"
            )
        return found

    def digest(self) -> str:
        """Equal for equal sets: number of rows, and the bytes of at most ``LOOKED_AT`` rows at even distances."""
        looked_at = min(self._size, LOOKED_AT)
        numbers = np.arange(looked_at, dtype=np.int64) * self._size // looked_at
        digest = hashlib.sha256(f"{self._size}".encode())
        for tensor in self.take(numbers):
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            dense = tensor.to_dense() if tensor.layout is not torch.strided else tensor
            digest.update(dense.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


class OwnBatches:
    """Training batches of rows, as ``data.Batches`` of tokens.

    Args:
        rows: training set.
        global_batch: samples per step over all ranks.
        seed: of the order.
    """

    def __init__(self, rows: Rows, global_batch: int, seed: int) -> None:
        self._rows, self._global_batch = rows, global_batch
        self._sampler = Sampler(len(rows), seed)

    def micro_batch(
        self, step: int, micro_step: int, rank: int, world_size: int, accumulation: int = 1
    ) -> tuple[Tensor, ...]:
        """Samples ``[i b, (i + 1) b)`` of a step, as of ``data.Batches``: one tensor for each part of a row.

        Raises:
            ConfigError: the global batch cannot be divided so.
        """
        size = micro_batch_size(self._global_batch, world_size, accumulation)
        start = step * self._global_batch + (micro_step * world_size + rank) * size
        return self._rows.take(self._sampler.samples(np.arange(start, start + size)))


@dataclass(frozen=True)
class OwnPart:
    """One rank's share of an evaluation round, as ``data.EvaluationBatch``.

    Attributes:
        arrays: n rows, n at least 1.
        num_samples: how many of them count: n, or 0 where the one row only lets this rank take part.
    """

    arrays: tuple[Tensor, ...]
    num_samples: int


class OwnHeldOut:
    """A fixed set of held-out samples at even distances, as ``data.HeldOut`` of tokens.

    Args:
        rows: held-out set.
        max_samples: upper bound of the set.
    """

    def __init__(self, rows: Rows, max_samples: int) -> None:
        wanted = min(len(rows), max_samples)
        self._rows = rows
        self._numbers = np.arange(wanted, dtype=np.int64) * len(rows) // wanted

    def __len__(self) -> int:
        return len(self._numbers)

    def batches(self, *, micro_batch: int, rank: int, world_size: int) -> Iterator[OwnPart]:
        """This rank's batches; every rank gets the same number, because the forward of a sharded model is collective.

        Raises:
            ConfigError: ``micro_batch`` is below 1.
        """
        if micro_batch < 1:
            raise ConfigError(f"got micro batch {micro_batch}, expected at least 1")
        for start in range(0, len(self), micro_batch * world_size):
            mine = self._numbers[start + rank * micro_batch :][:micro_batch]
            yield OwnPart(self._rows.take(mine if len(mine) else self._numbers[:1]), len(mine))
