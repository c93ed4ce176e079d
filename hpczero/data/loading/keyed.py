"""A data set whose samples are drawn by their place in the run, whoever draws them.

Owns: the random streams around one sample. Must not know: batches, ranks.

[Note: Random numbers of a sample]
Augmentation draws from torch, NumPy and Python. In a worker of torch's loader these streams depend on the worker's
number and on how many samples it had before, so a resumed run or another number of ranks would draw others. Here each
sample has streams of its own, seeded by (seed, position). The streams of the program are put back afterwards.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset


class Keyed(Dataset[Any]):
    """``dataset`` asked for (index, position)."""

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self._dataset = dataset
        self._seed = seed

    def __getitem__(self, key: tuple[int, int]) -> Any:
        """The sample of an index, with the random numbers of a position."""
        index, position = key
        with _streams_of(self._seed, position):
            return self._dataset[index]


class Plain(Dataset[Any]):
    """``dataset`` asked for (index, position), where samples draw nothing."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self._dataset = dataset

    def __getitems__(self, keys: list[tuple[int, int]]) -> Any:
        """The samples of several indices."""
        indices = [index for index, _ in keys]
        at_once = getattr(self._dataset, "__getitems__", None)
        return at_once(indices) if at_once else [self._dataset[index] for index in indices]


@contextmanager
def _streams_of(seed: int, position: int) -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002  data sets draw from it
    first, second = np.random.SeedSequence([seed, position]).generate_state(2).tolist()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(first << 32 | second)
        np.random.seed(first)  # noqa: NPY002
        random.seed(first << 32 | second)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002
