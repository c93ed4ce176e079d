"""Conversions: parameters that are made of several tensors of a file, or of another shape, and back.

Owns: the groups of tensors that a converter of transformers takes together. Must not know: files, shards, MPI. The
experts of a Mixtral, say, are one tensor each in a file and one stacked parameter in the model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

# Assembly: a parameter that is put together from parts of several tensors, known without any of their values.
#
#     stack of 8 (w1 above w3)     elements [start, stop) -> boxes -> expert 3, rows 5 to 9 of w1, all columns

Box = tuple[range, ...]
Read = Callable[
    [str, Box], Tensor
]  # (key of a tensor, box of it) -> values of the shape of the box


class CannotAssembleError(Exception):
    """A function does more than move boxes."""


@dataclass(frozen=True, eq=False)
class Assembly:
    """A tensor of ``shape`` of which boxes can be read."""

    shape: torch.Size

    def read(self, box: Box, read: Read) -> Tensor:
        """Values of a box, by reading from tensors of files."""
        raise NotImplementedError

    # --- what converters ask of a tensor

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
        return _chunk(self, chunks, dim)

    def split(self, size: int | Sequence[int], dim: int = 0) -> tuple[Assembly, ...]:
        """As of a tensor."""
        return _split(self, size, dim)

    def transpose(self, dim0: int, dim1: int) -> Assembly:
        """As of a tensor."""
        return _transpose(self, dim0, dim1)

    def squeeze(self, dim: int) -> Assembly:
        """As of a tensor."""
        return _squeeze(self, dim)

    def unbind(self, dim: int = 0) -> tuple[Assembly, ...]:
        """As of a tensor."""
        return _unbind(self, dim)

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


@dataclass(frozen=True, eq=False)
class FileSource(Assembly):
    """A tensor of a file."""

    key: str

    def read(self, box: Box, read: Read) -> Tensor:
        """The box, from the file."""
        return read(self.key, box)


@dataclass(frozen=True, eq=False)
class _Stacked(Assembly):
    parts: tuple[Assembly, ...]
    along: int

    def read(self, box: Box, read: Read) -> Tensor:
        inner = box[: self.along] + box[self.along + 1 :]
        return torch.stack([self.parts[n].read(inner, read) for n in box[self.along]], self.along)


@dataclass(frozen=True, eq=False)
class _JoinedTensors(Assembly):
    parts: tuple[Assembly, ...]
    along: int

    def read(self, box: Box, read: Read) -> Tensor:
        found = []
        begin = 0
        for part in self.parts:
            length = part.shape[self.along]
            first = max(box[self.along].start - begin, 0)
            mine = range(first, min(box[self.along].stop - begin, length))
            if mine:
                found.append(part.read(_with(box, self.along, mine), read))
            begin += length
        return found[0] if len(found) == 1 else torch.cat(found, self.along)


@dataclass(frozen=True, eq=False)
class _Narrowed(Assembly):
    part: Assembly
    along: int
    first: int

    def read(self, box: Box, read: Read) -> Tensor:
        own = box[self.along]
        there = range(own.start + self.first, own.stop + self.first)
        return self.part.read(_with(box, self.along, there), read)


@dataclass(frozen=True, eq=False)
class _Squeezed(Assembly):
    part: Assembly
    along: int

    def read(self, box: Box, read: Read) -> Tensor:
        there = (*box[: self.along], range(1), *box[self.along :])
        return self.part.read(there, read).squeeze(self.along)


@dataclass(frozen=True, eq=False)
class _Transposed(Assembly):
    part: Assembly
    dims: tuple[int, int]

    def read(self, box: Box, read: Read) -> Tensor:
        return self.part.read(tuple(_swapped(box, *self.dims)), read).transpose(*self.dims)


# --- ranges --------------------------------------------------------------------------------------------------------


def source(key: str, shape: Sequence[int]) -> FileSource:
    """A tensor of a file as an assembly."""
    return FileSource(torch.Size(shape), key)


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


def runs(shape: Sequence[int], box: Box) -> Iterator[range]:
    """The elements of a box as flat ranges of a tensor of ``shape``, in order; as few as there are."""
    depth = len(shape)
    while depth and len(box[depth - 1]) == shape[depth - 1]:
        depth -= 1  # all of the last dimensions: what is before them lies end to end
    inner = prod(shape[depth:])
    if not depth:
        yield range(inner)
        return
    *outer, own = box[:depth]

    def visit(place: int, begin: int) -> Iterator[range]:
        if place == len(outer):
            first = begin * shape[place] + own.start
            yield range(first * inner, (first + len(own)) * inner)
            return
        for index in outer[place]:
            yield from visit(place + 1, begin * shape[place] + index)

    yield from visit(0, 0)


# --- functions of torch --------------------------------------------------------------------------------------------


def _stack(tensors: Sequence[Assembly], dim: int = 0) -> Assembly:
    first = tensors[0].shape
    if any(part.shape != first for part in tensors):
        raise ValueError(f"stack of shapes {[tuple(part.shape) for part in tensors]}")
    along = dim % (len(first) + 1)
    shape = (*first[:along], len(tensors), *first[along:])
    return _Stacked(torch.Size(shape), tuple(tensors), along)


def _cat(tensors: Sequence[Assembly], dim: int = 0) -> Assembly:
    first = tensors[0].shape
    along = dim % len(first)
    if len({(*p.shape[:along], *p.shape[along + 1 :]) for p in tensors}) > 1:
        raise ValueError(f"cat of shapes {[tuple(part.shape) for part in tensors]}")
    length = sum(part.shape[along] for part in tensors)
    shape = (*first[:along], length, *first[along + 1 :])
    return _JoinedTensors(torch.Size(shape), tuple(tensors), along)


def _chunk(tensor: Assembly, chunks: int, dim: int = 0) -> tuple[Assembly, ...]:
    return _split(tensor, -(-tensor.shape[dim] // chunks), dim)


def _split(
    tensor: Assembly, split_size_or_sections: int | Sequence[int], dim: int = 0
) -> tuple[Assembly, ...]:
    along, sizes = dim % tensor.ndim, split_size_or_sections
    length = tensor.shape[along]
    if isinstance(sizes, int):
        sizes = [min(sizes, length - begin) for begin in range(0, length, max(sizes, 1))]
    if sum(sizes) != length:
        raise ValueError(f"split of {length} into {list(sizes)}")
    found, begin = [], 0
    for size in sizes:
        shape = (*tensor.shape[:along], size, *tensor.shape[along + 1 :])
        found.append(_Narrowed(torch.Size(shape), tensor, along, begin))
        begin += size
    return tuple(found)


def _transpose(tensor: Assembly, dim0: int, dim1: int) -> Assembly:
    dims = (dim0 % tensor.ndim, dim1 % tensor.ndim)
    return _Transposed(torch.Size(_swapped(tensor.shape, *dims)), tensor, dims)


def _squeeze(tensor: Assembly, dim: int) -> Assembly:
    along = dim % tensor.ndim
    if tensor.shape[along] != 1:
        return tensor
    shape = (*tensor.shape[:along], *tensor.shape[along + 1 :])
    return _Squeezed(torch.Size(shape), tensor, along)


def _unbind(tensor: Assembly, dim: int = 0) -> tuple[Assembly, ...]:
    return tuple(_squeeze(part, dim) for part in _split(tensor, 1, dim))


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.stack: _stack,
    torch.cat: _cat,
    torch.chunk: _chunk,
    torch.split: _split,
    torch.transpose: _transpose,
    torch.squeeze: _squeeze,
    torch.unbind: _unbind,
}


def _with(box: Box, along: int, own: range) -> Box:
    return (*box[:along], own, *box[along + 1 :])


def _swapped(values: Sequence[Any], dim0: int, dim1: int) -> list[Any]:
    found = list(values)
    found[dim0], found[dim1] = found[dim1], found[dim0]
    return found


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
        """Find names and shapes of the results, without values.

        Args:
            model: of which the parameters are.
            shapes: of the sources by key.
        """
        # An assembly has few of a tensor's methods: whatever else a converter calls is computing, too.
        with suppress(CannotAssembleError, AttributeError):
            self.assemblies = self.convert(model, lambda key: source(key, shapes[key]))
        found: Mapping[str, Any] = self.assemblies or self.convert(
            model, lambda key: torch.empty(shapes[key], device="meta", dtype=torch.float32)
        )
        self.shapes = {name: tuple(value.shape) for name, value in found.items()}

    def convert(self, model: nn.Module, value_of: Callable[[str], Any]) -> dict[str, Any]:
        """The results by name.

        Args:
            model: of which the parameters are; only its shapes and configuration matter.
            value_of: gives a source by its key: a tensor, or an assembly.

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
