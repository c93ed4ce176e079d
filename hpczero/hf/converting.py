"""Conversions: parameters that are made of several tensors of a file, or of another shape, and back.

The experts of a Mixtral, say, are one tensor each in a file and one stacked parameter in the model.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

# Assembly: a parameter that is put together from parts of several tensors, known without any of their values.
#
#     stack of 8 (w1 above w3)     elements [start, stop) -> boxes -> expert 3, rows 5 to 9 of w1, all columns

T = TypeVar("T")
Box = tuple[range, ...]
# (key of a tensor, box of it) -> values of the shape of the box
Read = Callable[[str, Box], Tensor]


class CannotAssembleError(Exception):
    """A function does more than move boxes."""


@dataclass(frozen=True, eq=False)
class Assembly:
    """A tensor of which boxes can be read. It has the methods that converters ask of a tensor, and no others.

    Attributes:
        shape: of the tensor.
        read: gives the values of a box, by reading boxes of tensors of files.
    """

    shape: torch.Size
    read: Callable[[Box, Read], Tensor]

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def dim(self) -> int:
        """Number of dimensions."""
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        """Shape, or one length of it."""
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> Assembly:
        """Itself: boxes have no strides."""
        return self

    def chunk(self, chunks: int, dim: int = 0) -> tuple[Assembly, ...]:
        """As of a tensor."""
        return self.split(-(-self.shape[dim] // chunks), dim)

    def split(
        self, split_size_or_sections: int | Sequence[int], dim: int = 0
    ) -> tuple[Assembly, ...]:
        """As of a tensor."""
        along, sizes = dim % self.ndim, split_size_or_sections
        length = self.shape[along]
        if isinstance(sizes, int):
            sizes = [min(sizes, length - begin) for begin in range(0, length, max(sizes, 1))]
        if sum(sizes) != length:
            raise ValueError(f"split of {length} into {list(sizes)}")
        begins = itertools.accumulate(sizes, initial=0)
        return tuple(self._narrowed(along, *each) for each in zip(begins, sizes, strict=False))

    def _narrowed(self, along: int, first: int, length: int) -> Assembly:
        def values(box: Box, read: Read) -> Tensor:
            own = range(box[along].start + first, box[along].stop + first)
            return self.read(_with(box, along, own), read)

        return Assembly(torch.Size(_with(self.shape, along, length)), values)

    def transpose(self, dim0: int, dim1: int) -> Assembly:
        """As of a tensor."""
        dims = (dim0 % self.ndim, dim1 % self.ndim)

        def values(box: Box, read: Read) -> Tensor:
            return self.read(tuple(_swapped(box, *dims)), read).transpose(*dims)

        return Assembly(torch.Size(_swapped(self.shape, *dims)), values)

    def squeeze(self, dim: int) -> Assembly:
        """As of a tensor."""
        along = dim % self.ndim
        if self.shape[along] != 1:
            return self

        def values(box: Box, read: Read) -> Tensor:
            there = (*box[:along], range(1), *box[along:])
            return self.read(there, read).squeeze(along)

        return Assembly(torch.Size(_with(self.shape, along)), values)

    def unbind(self, dim: int = 0) -> tuple[Assembly, ...]:
        """As of a tensor."""
        return tuple(part.squeeze(dim) for part in self.split(1, dim))

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func not in _FUNCTIONS:
            raise CannotAssembleError(getattr(func, "__name__", str(func)))
        return _FUNCTIONS[func](*args, **(kwargs or {}))


def source(key: str, shape: Sequence[int]) -> Assembly:
    """A tensor of a file as an assembly."""
    return Assembly(torch.Size(shape), lambda box, read: read(key, box))


def _stack(tensors: Sequence[Assembly], dim: int = 0) -> Assembly:
    first = tensors[0].shape
    if any(part.shape != first for part in tensors):
        raise ValueError(f"stack of shapes {[tuple(part.shape) for part in tensors]}")
    parts = tuple(tensors)  # the caller may change its list
    along = dim % (len(first) + 1)

    def values(box: Box, read: Read) -> Tensor:
        inner = _with(box, along)
        return torch.stack([parts[n].read(inner, read) for n in box[along]], along)

    return Assembly(torch.Size((*first[:along], len(parts), *first[along:])), values)


def _cat(tensors: Sequence[Assembly], dim: int = 0) -> Assembly:
    first = tensors[0].shape
    along = dim % len(first)
    if len({_with(part.shape, along) for part in tensors}) > 1:
        raise ValueError(f"cat of shapes {[tuple(part.shape) for part in tensors]}")
    parts = tuple(tensors)

    def values(box: Box, read: Read) -> Tensor:
        found = []
        begin = 0
        for part in parts:
            length = part.shape[along]
            mine = range(max(box[along].start - begin, 0), min(box[along].stop - begin, length))
            if mine:
                found.append(part.read(_with(box, along, mine), read))
            begin += length
        return found[0] if len(found) == 1 else torch.cat(found, along)

    length = sum(part.shape[along] for part in parts)
    return Assembly(torch.Size(_with(first, along, length)), values)


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.stack: _stack,
    torch.cat: _cat,
    torch.chunk: Assembly.chunk,
    torch.split: Assembly.split,
    torch.transpose: Assembly.transpose,
    torch.squeeze: Assembly.squeeze,
    torch.unbind: Assembly.unbind,
}


def _with(values: Sequence[T], along: int, *own: T) -> tuple[T, ...]:
    """``values`` with ``own`` in the place of the one at ``along``; without ``own`` that is left out."""
    return (*values[:along], *own, *values[along + 1 :])


def _swapped(values: Sequence[T], dim0: int, dim1: int) -> list[T]:
    found = list(values)
    found[dim0], found[dim1] = found[dim1], found[dim0]
    return found


# --- ranges --------------------------------------------------------------------------------------------------------


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Boxes whose elements, one box after the other, are the flat elements [start, stop). At most 2 ndim - 1."""
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    inner = prod(shape[1:])
    first, last = start // inner, (stop - 1) // inner
    if first == last:
        for box in boxes(shape[1:], start - first * inner, stop - first * inner):
            yield (range(first, first + 1), *box)
        return
    if start % inner:
        yield from boxes(shape, start, (first + 1) * inner)
        first += 1
    whole = stop // inner
    if first < whole:
        yield (range(first, whole), *(range(length) for length in shape[1:]))
    if stop % inner:
        yield from boxes(shape, whole * inner, stop)


@dataclass
class TensorGroup:
    """Tensors that are converted together.

    Attributes:
        first: the name by which transformers knows the result.
        converter: one of its ``WeightTransform``.
        sources: key of each tensor, and which of the converter's patterns it has met.
        shapes: of the results by name, once ``plan`` was called.
        assemblies: the results by name where they can be read by ranges, once ``plan`` was called; else empty.
    """

    first: str
    converter: Any
    sources: list[tuple[str, str]] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    assemblies: dict[str, Assembly] = field(default_factory=dict)

    def plan(self, model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Find names and shapes of the results without values, from the ``shapes`` of the sources by key."""
        # An assembly has few of a tensor's methods: whatever else a converter calls is computing, too.
        with suppress(CannotAssembleError, AttributeError):
            self.assemblies = self.convert(model, lambda key: source(key, shapes[key]))
        found: Mapping[str, Any] = self.assemblies or self.convert(
            model, lambda key: torch.empty(shapes[key], device="meta", dtype=torch.float32)
        )
        self.shapes = {name: tuple(value.shape) for name, value in found.items()}

    def convert(self, model: nn.Module, value_of: Callable[[str], Any]) -> dict[str, Any]:
        """The results by name, of a model of which only shapes and configuration matter.

        ``value_of`` gives a source by its key: a tensor, or an assembly.

        Raises:
            CannotAssembleError: of assemblies: the converter does more than move boxes.
        """
        converter = copy.deepcopy(self.converter)
        for key, pattern in self.sources:
            converter.add_tensor(self.first, key, pattern, value_of(key))
        with torch.no_grad():
            found = converter.convert(self.first, model=model, config=model.config)
        return {
            name: value[0] if isinstance(value, list) else value for name, value in found.items()
        }
