"""Which tensors have memory in common, whoever made them so: views, ``.data``, NumPy.

Owns: the comparison of addresses. Must not know: parameters, modules, what is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from torch import Tensor


def overlaps(tensors: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    """Pairs of places in ``tensors`` that share a byte, or a place twice where a tensor has one element at two indices.

    Each tensor that shares memory is in a pair, but not every pair is told. Columns of one matrix interleave and share
    nothing.
    """
    runs = [_runs(tensor) for tensor in tensors]
    starts = np.concatenate([np.empty(0, np.int64), *(begins for begins, _ in runs)])
    stops = np.concatenate([np.empty(0, np.int64), *(begins + length for begins, length in runs)])
    owners = np.repeat(np.arange(len(runs)), [len(begins) for begins, _ in runs])
    order = np.argsort(starts, kind="stable")
    starts, stops, owners = starts[order], stops[order], owners[order]
    reached = np.maximum.accumulate(stops)
    for place in np.flatnonzero(reached[:-1] > starts[1:]) + 1:
        earlier = int(np.argmax(stops[:place] == reached[place - 1]))
        yield int(owners[earlier]), int(owners[place])


def _runs(tensor: Tensor) -> tuple[np.ndarray, int]:
    """Addresses (runs,) int64 where the tensor's unbroken runs of bytes begin, and how long each is."""
    item = tensor.element_size()
    address = tensor.untyped_storage().data_ptr()
    if not address or not tensor.numel():  # meta, or a subclass that has its memory elsewhere
        return np.empty(0, np.int64), 0
    begins = np.array([address + tensor.storage_offset() * item], np.int64)
    length = item
    for step, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if step * item == length or extent == 1:
            length *= extent
        else:
            begins = (begins[:, None] + np.arange(extent) * (step * item)).reshape(-1)
    return begins, length
