"""Assemblies have the elements that torch's own functions give, and read no element twice."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hpczero.checkpoint.foreign.weight_files import runs
from hpczero.hf.converting import (
    Assembly,
    Box,
    CannotAssembleError,
    TensorGroup,
    boxes,
    source,
)

SHAPES = {"a": (3, 4), "b": (3, 4), "c": (2, 4), "d": (3, 2, 5)}
TENSORS = {
    key: torch.arange(float(prod(shape))).view(shape) + 1000 * place
    for place, (key, shape) in enumerate(SHAPES.items())
}
Get = Callable[[str], Any]
WAYS: dict[str, Callable[[Get], Any]] = {
    "itself": lambda get: get("d"),
    "stack": lambda get: torch.stack([get("a"), get("b")], dim=1),
    "cat": lambda get: torch.cat([get("a"), get("c")], dim=0),
    "experts": lambda get: torch.cat(
        [torch.stack([get("a"), get("b")]), torch.stack([get("b"), get("a")])], dim=1
    ),
    "chunk": lambda get: torch.chunk(get("d"), 2, dim=2)[1].contiguous(),
    "split": lambda get: torch.split(get("d"), [2, 3], dim=-1)[1],
    "transposed": lambda get: torch.transpose(torch.stack([get("a"), get("b")]), 1, 2),
    "unbound": lambda get: torch.cat([p.squeeze(0) for p in get("d").chunk(3)], dim=1),
}


class Reader:
    """Reads from the tensors, and counts what of them."""

    def __init__(self) -> None:
        self.read: Counter[tuple[str, int]] = Counter()

    def __call__(self, key: str, box: Box) -> Tensor:
        flat = TENSORS[key].reshape(-1)
        parts = list(runs(SHAPES[key], box))
        self.read.update((key, place) for run in parts for place in run)
        found = torch.cat([flat[run.start : run.stop] for run in parts])
        return found.view([len(own) for own in box])


@pytest.mark.parametrize("way", WAYS)
def test_every_range_has_the_elements_of_the_converted_tensor(way: str) -> None:
    expected = WAYS[way](TENSORS.__getitem__)
    assembly: Assembly = WAYS[way](lambda key: source(key, SHAPES[key]))
    assert tuple(assembly.shape) == tuple(expected.shape)
    flat = expected.reshape(-1)
    for start, stop in itertools.combinations(range(len(flat) + 1), 2):
        reader = Reader()
        parts = [assembly.read(box, reader) for box in boxes(assembly.shape, start, stop)]
        found = torch.cat([part.reshape(-1) for part in parts])
        assert torch.equal(found, flat[start:stop]), (start, stop)
        assert reader.read.total() == stop - start, "more elements were read than asked for"


def test_what_computes_is_not_assembled() -> None:
    one = source("a", SHAPES["a"])
    with pytest.raises(CannotAssembleError):
        torch.add(one, 1)  # type: ignore[call-overload]
    with pytest.raises(AttributeError):
        one.reshape(-1)  # type: ignore[attr-defined]


def test_a_converter_that_computes_is_given_whole_tensors() -> None:
    from transformers.core_model_loading import Interleave, WeightConverter

    converter = WeightConverter("x.w13", "x.gate_up", [Interleave(dim=0)])
    group = TensorGroup("x.gate_up", converter, [("x.w13", "x.w13")])
    model: Any = SimpleNamespace(config=None)
    group.plan(model, {"x.w13": (6, 2)})
    assert not group.assemblies
    assert group.shapes == {"x.gate_up": (6, 2)}
    found = group.convert(model, lambda key: torch.arange(12.0).view(6, 2))
    assert found["x.gate_up"][:, 0].tolist() == [0.0, 4.0, 8.0, 2.0, 6.0, 10.0]
