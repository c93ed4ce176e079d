"""Placement: which part of a parameter of the whole model a rank holds, where ranks share one copy of the model.

A parameter is cut along one dimension. The dimension may consist of ``strips`` that are cut each by itself: the
products q, k and v in one weight are three. The cut falls between ``grain`` elements, a head say, that stay together.
Where the grains do not divide, the last parts are padded in memory; files and norms know no padding.

    whole (3C, C), strips 3, 2 parts     | q q | k k | v v |     part 0:  | q | k | v |    three runs of the whole

Source: Shoeybi et al., Megatron-LM, arXiv 1909.08053, sec. 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
KEY = "_hpczero_part"  # in the ``__dict__`` of a model that is a part of one


class Runs(NamedTuple):
    """Runs of consecutive elements, as three arrays of equal length; ascending in ``local``.

    Attributes:
        whole: first element of each run, counted in the whole parameter.
        local: first element of each run, counted in the part.
        numel: elements of each run.
    """

    whole: Indices
    local: Indices
    numel: Indices


@dataclass(frozen=True)
class Placement:
    """What one rank holds of one parameter of the whole model.

    Attributes:
        name: in the whole model.
        shape: in the whole model.
        dim: along which it is cut; None where the rank holds all of it.
        strips: equal ranges of ``dim`` that are cut each by itself.
        grain: elements of ``dim`` that stay together.
        part: which part this rank holds.
        parts: number of parts.
        partial: whether gradients of the tensor ranks are partial sums, although each holds the whole parameter.
        tied: whether the first and the last pipeline stage both hold it.
        counted: whether this rank's copy enters norms and checkpoints. Of ranks that hold the same it is one.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None = None
    strips: int = 1
    grain: int = 1
    part: int = 0
    parts: int = 1
    partial: bool = False
    tied: bool = False
    counted: bool = True

    def __post_init__(self) -> None:
        if self.dim is None:
            if (self.strips, self.grain, self.part, self.parts) != (1, 1, 0, 1):
                raise ValueError(f"{self.name!r} is not cut, expected one strip, grain and part")
            return
        if not 0 <= self.dim < len(self.shape):
            raise ValueError(
                f"{self.name!r} has the shape {self.shape}, and no dimension {self.dim}"
            )
        if self.strips < 1 or self.grain < 1 or not 0 <= self.part < self.parts:
            raise ValueError(
                f"{self.name!r}: got strips {self.strips}, grain {self.grain}, part {self.part} of {self.parts}"
            )
        if self.shape[self.dim] % (self.strips * self.grain):
            raise ValueError(
                f"{self.name!r} has {self.shape[self.dim]} elements along dimension {self.dim}, expected a multiple "
                f"of {self.strips} strip(s) of {self.grain} elements that stay together"
            )

    @property
    def strip(self) -> int:
        """Elements of one strip of the whole parameter along ``dim``."""
        assert self.dim is not None, "only of one that is cut"
        return self.shape[self.dim] // self.strips

    @property
    def room(self) -> int:
        """Elements that every part has of a strip, padding included."""
        return -(-self.strip // (self.parts * self.grain)) * self.grain

    @property
    def owned(self) -> range:
        """Elements of a strip that this part holds, padding excluded; may be empty."""
        start = min(self.part * self.room, self.strip)
        return range(start, min(start + self.room, self.strip))

    @property
    def is_padded(self) -> bool:
        """Whether this part has elements that the whole parameter has not."""
        return self.dim is not None and len(self.owned) < self.room

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's part, padding included."""
        if self.dim is None:
            return self.shape
        return (*self.shape[: self.dim], self.strips * self.room, *self.shape[self.dim + 1 :])

    @property
    def local_numel(self) -> int:
        """Elements of this rank's part, padding included."""
        return prod(self.local_shape)

    def runs(self, start: int = 0, stop: int | None = None) -> Runs:
        """Where elements ``start`` to ``stop`` of the part lie in the whole parameter; padding is left out.

        Args:
            start: in the part, flat.
            stop: one after the last; None: the end of the part.
        """
        stop = self.local_numel if stop is None else stop
        if self.dim is None:
            full = np.array([start], dtype=np.int64)
            return _cut(full, full, np.array([stop - start], dtype=np.int64))
        before, after = prod(self.shape[: self.dim]), prod(self.shape[self.dim + 1 :])
        width = self.room * after  # of a strip in the part
        if not width or stop <= start:
            return _cut(*(np.zeros(0, dtype=np.int64) for _ in range(3)))
        first, last = start // width, min(-(-stop // width), before * self.strips)
        strips = np.arange(first, last, dtype=np.int64)
        local = strips * width
        whole = strips * (self.strip * after) + self.owned.start * after
        count = np.full(len(strips), len(self.owned) * after, dtype=np.int64)
        late = np.maximum(start - local, 0)
        ends = np.minimum(local + count, stop)
        return _cut(whole + late, local + late, ends - local - late)

    def take(self, whole: Any, local: Any) -> None:
        """Fill ``local`` with this rank's part of ``whole``; padding becomes zero.

        Args:
            whole: a tensor or array of ``shape``.
            local: of ``local_shape``, the same kind.
        """
        if self.dim is None:
            local[...] = whole
            return
        local[...] = 0
        for mine, theirs in self._slices():
            local[mine] = whole[theirs]

    def put(self, local: Any, whole: Any) -> None:
        """Write this rank's part into ``whole``; the inverse of ``take``."""
        if self.dim is None:
            whole[...] = local
            return
        for mine, theirs in self._slices():
            whole[theirs] = local[mine]

    def _slices(self) -> list[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """For each strip, its place in the part and in the whole parameter."""
        assert self.dim is not None, "checked by the callers"
        lead = (slice(None),) * self.dim
        owned, found = self.owned, []
        for strip in range(self.strips):
            mine = slice(strip * self.room, strip * self.room + len(owned))
            theirs = slice(strip * self.strip + owned.start, strip * self.strip + owned.stop)
            found.append(((*lead, mine), (*lead, theirs)))
        return found


@dataclass(frozen=True)
class ModelPart:
    """What of a whole model this rank's model is.

    Attributes:
        names: parameters of the whole model in its own order, each once.
        aliases: further names of tied parameters of the whole model, with the one in ``names``.
        placements: by the name in this rank's model.
        first: whether it takes the inputs of the whole model: it is the first pipeline stage.
        last: whether it makes the outputs of the whole model.
    """

    names: tuple[str, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    placements: Mapping[str, Placement] = field(default_factory=dict)
    first: bool = True
    last: bool = True

    def placement(self, name: str, shape: tuple[int, ...]) -> Placement:
        """That of the parameter ``name`` of this rank's model; one that nobody has cut is whole."""
        return self.placements.get(name) or Placement(name, tuple(shape))


def part_of(model: Any) -> ModelPart | None:
    """What ``model`` is a part of; None where it is whole."""
    found = model.__dict__.get(KEY)
    return found if isinstance(found, ModelPart) else None


def _cut(whole: Indices, local: Indices, count: Indices) -> Runs:
    kept = count > 0
    return Runs(whole[kept], local[kept], count[kept])
