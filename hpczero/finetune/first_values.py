"""First values of a model on the meta device with low-rank products: the base's from elsewhere, the products' drawn.

Owns: which parameters are asked of whom. Must not know: files, shards. What fills the base by ranges, as the weights of
``hpczero.hf.load`` do, is still asked by each rank for its own shard alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from hpczero.finetune.lowrank import CHILD, draw
from hpczero.zero.filling import KnownValues, RangeInitializer


def first_values(
    initialize: Callable[[str, Tensor], None], *, seed: int = 0
) -> Callable[[str, Tensor], None]:
    """``initialize`` of ``zeroify`` for a model on the meta device that has low-rank products.

    Args:
        initialize: fills all other parameters: a function, or what ``hpczero.hf.load`` gave.
        seed: of the products.
    """
    if isinstance(initialize, KnownValues):
        return _Known(initialize, seed)
    if isinstance(initialize, RangeInitializer):
        return _Ranges(initialize, seed)

    def fill(name: str, values: Tensor) -> None:
        if _is_drawn(name):
            draw(name, values, seed)
        else:
            initialize(name, values)

    return fill


class _Ranges:
    """Of a base that is filled by ranges; products are small, and are drawn whole."""

    def __init__(self, base: RangeInitializer, seed: int) -> None:
        self._base, self._seed = base, seed

    def __call__(self, name: str, tensor: Tensor) -> None:
        if _is_drawn(name):
            draw(name, tensor, self._seed)
        else:
            self._base(name, tensor)

    def fill_range(self, name: str, shape: tuple[int, ...], start: int, values: Tensor) -> None:
        if not _is_drawn(name):
            self._base.fill_range(name, shape, start, values)
            return
        whole = torch.empty(shape, dtype=torch.float32, device="cpu")
        draw(name, whole, self._seed)
        values.copy_(whole.view(-1)[start : start + len(values)])


class _Known(_Ranges):
    """Of a base whose values stand in files."""

    def __init__(self, base: KnownValues, seed: int) -> None:
        super().__init__(base, seed)
        self._files = base

    def bind(self, parameters: Mapping[str, nn.Parameter], model: nn.Module) -> None:
        loaded = {name: each for name, each in parameters.items() if not _is_drawn(name)}
        self._files.bind(loaded, model)

    def fingerprint(self, name: str) -> int:
        if _is_drawn(name):
            return zlib.crc32(repr((name, self._seed)).encode())
        return self._files.fingerprint(name)


def _is_drawn(name: str) -> bool:
    return f".{name}".endswith((f".{CHILD}.A", f".{CHILD}.B"))
