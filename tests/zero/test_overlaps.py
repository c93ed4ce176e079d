"""Tensors that share memory are found by their addresses, compared with sets of all bytes."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from torch import Tensor

from hpczero.zero.refusals import overlaps


def _bytes(tensor: Tensor) -> list[int]:
    item, begin = tensor.element_size(), tensor.untyped_storage().data_ptr()
    return [
        begin + (int(tensor.storage_offset()) + int(np.dot(index, tensor.stride()))) * item + byte
        for index in np.ndindex(*tensor.shape)
        for byte in range(item)
    ]


def test_tensors_that_share_bytes_are_those_that_are_told() -> None:
    drawn = np.random.default_rng(5)
    for _ in range(300):
        memory = torch.zeros(80)
        tensors = []
        for _ in range(3):
            shape, strides = drawn.integers(0, 4, 2).tolist(), drawn.integers(0, 9, 2).tolist()
            view = memory.as_strided(shape, strides, int(drawn.integers(0, 30)))
            tensors.append(view.view(torch.int32) if drawn.random() < 0.3 else view)
        held = [_bytes(tensor) for tensor in tensors]
        alone = {
            place
            for place, mine in enumerate(held)
            if len(set(mine)) == len(mine)
            and all(set(mine).isdisjoint(held[other]) for other in range(3) if other != place)
        }
        told = set(itertools.chain.from_iterable(overlaps(tensors)))
        assert told == {0, 1, 2} - alone


def test_views_of_other_dtypes_and_of_numpy_arrays_share_memory() -> None:
    array = np.zeros(8, np.float32)
    whole, half = torch.from_numpy(array), torch.from_numpy(array[4:]).view(torch.bfloat16)
    assert list(overlaps([whole, half])) == [(0, 1)]
    assert not list(overlaps([whole[:4], half, torch.zeros(0), torch.zeros(3, device="meta")]))
    assert not list(overlaps([]))
