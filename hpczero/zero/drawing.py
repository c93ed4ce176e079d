"""Drawing: this rank's shard of first values, from an ``initialize`` that can give any range of a parameter.

Owns: which ranges of the whole model's parameters a shard consists of, and that a range has the same values however it
is asked for. Must not know: units' verbs, transports, other ranks.

    shard of a unit     elements of this rank's part of some parameters
    part of one         runs of the whole parameter (``Placement.runs``), many short ones where it is cut by columns
    a call              one run, or a span of runs with what lies between them where that is cheaper than a call each
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Mapping
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from hpczero.errors import PlanError
from hpczero.plan.layout import ShardLayout
from hpczero.plan.placement import ModelPart, Placement, Runs

GAP = (
    2**12
)  # elements between two runs that are drawn and dropped: a call takes the time of about as many
SPAN = (
    2**18
)  # elements that are drawn together for one call, at most, where they do not go straight to their place
SAMPLE = 64  # elements that stand for a parameter, at its begin and its end each


@runtime_checkable
class RangeInitializer(Protocol):
    """An ``initialize`` of which each rank asks for its own elements alone. Nothing here is collective."""

    def __call__(self, name: str, tensor: Tensor) -> None:
        """Fill one whole parameter in place, fp32 on the CPU, given its name in the whole model."""
        ...

    def fill_range(self, name: str, shape: tuple[int, ...], start: int, values: Tensor) -> None:
        """Fill ``values`` with elements of one parameter.

        They must be a function of (name, place) alone: the same in every range, on every rank, at every call.

        Args:
            name: in the whole model.
            shape: in the whole model.
            start: the first element, counted in the whole parameter, flat.
            values: (n,) fp32 on the CPU, contiguous; n may be 0.
        """
        ...


@runtime_checkable
class KnownValues(RangeInitializer, Protocol):
    """A RangeInitializer of values that stand in files: nothing is asked for twice to compare it.

    Persistent buffers of the model have their values before ``zeroify``.
    """

    def bind(self, parameters: Mapping[str, nn.Parameter], model: nn.Module) -> None:
        """Find out which parameters will be asked for, before any is; a name may be another's since values were found.

        Args:
            parameters: those that this rank has whole, by their names in the whole model.
            model: this rank's.

        Raises:
            PlanError: there are no values of one of them.
        """
        ...

    def fingerprint(self, name: str) -> int:
        """32 bits that stand for one parameter, equal on ranks that will give equal values of it."""
        ...


def bind(initialize: object, model: nn.Module, part: ModelPart | None) -> None:
    """Let an ``initialize`` of known values see the parameters of ``model``. Not collective.

    Raises:
        PlanError: it has no values of one of them.
    """
    if not isinstance(initialize, KnownValues):
        return
    found = {}
    for name, parameter in model.named_parameters():
        placement = (part or ModelPart(())).placement(name, tuple(parameter.shape))
        if placement.dim is None:
            found[placement.name] = parameter
    initialize.bind(found, model)


class Drawing:
    """Draws for one model."""

    def __init__(self, initialize: RangeInitializer, part: ModelPart) -> None:
        """``part``: what of the whole model this rank's model is."""
        self._initialize, self._part = initialize, part

    def fill(self, layout: ShardLayout, shard: int, values: Tensor) -> None:
        """Fill ``values`` with shard number ``shard`` of a unit.

        Args:
            layout: of the unit.
            shard: number of the shard.
            values: (elements of the shard without padding,), of any floating dtype, on any device.

        Raises:
            PlanError: a range has other values when it is asked for again.
        """
        begin = layout.shard_range(shard).start
        for slot in layout.slots:
            own = layout.overlap(shard, slot.name)
            if own:
                first = slot.offset + own.start - begin
                placement = self._part.placement(slot.name, slot.shape)
                self._fill_part(placement, own, values[first : first + len(own)])

    def sample(self, placement: Placement) -> int:
        """A checksum of the first and the last elements of the whole parameter, or its fingerprint."""
        if isinstance(self._initialize, KnownValues):
            return self._initialize.fingerprint(placement.name)
        numel = int(np.prod(placement.shape, dtype=np.int64))
        count = min(SAMPLE, numel)
        drawn = torch.empty(2 * count, dtype=torch.float32, device="cpu")
        self._draw(placement, 0, drawn[:count])
        self._draw(placement, numel - count, drawn[count:])
        return zlib.crc32(drawn.numpy().data)

    def _draw(self, placement: Placement, start: int, values: Tensor) -> None:
        with torch.no_grad():
            self._initialize.fill_range(placement.name, placement.shape, start, values)

    def _fill_part(self, placement: Placement, own: range, values: Tensor) -> None:
        """Fill ``values`` with the elements ``own`` of this rank's part of a parameter."""
        runs = placement.runs(own.start, own.stop)
        if placement.is_padded:
            values.zero_()
        if not len(runs.numel):
            return
        straight = values.dtype == torch.float32 and values.device.type == "cpu"
        for span in _spans(runs, straight=straight):
            begin, stop = int(span.whole[0]), int(span.whole[-1] + span.numel[-1])
            if len(span.numel) == 1:
                first = int(span.local[0]) - own.start
                place = values[first : first + stop - begin]
                if straight:
                    self._draw(placement, begin, place)
                    continue
                drawn = torch.empty(stop - begin, dtype=torch.float32, device="cpu")
                self._draw(placement, begin, drawn)
                place.copy_(drawn)
            else:
                drawn = torch.empty(stop - begin, dtype=torch.float32, device="cpu")
                self._draw(placement, begin, drawn)
                sources, places = _elements(span, begin, own.start)
                values[places.to(values.device)] = drawn[sources].to(values.device, values.dtype)
        self._check(placement, runs, own, values)

    def _check(self, placement: Placement, runs: Runs, own: range, values: Tensor) -> None:
        """Ask for the last elements of the last run again, where they are drawn."""
        if isinstance(self._initialize, KnownValues):
            return
        count = min(SAMPLE, int(runs.numel[-1]))
        end = int(runs.local[-1] + runs.numel[-1]) - own.start
        start = int(runs.whole[-1] + runs.numel[-1]) - count
        again = torch.empty(count, dtype=torch.float32, device="cpu")
        self._draw(placement, start, again)
        found = values[end - count : end].cpu()
        wrong = (again.to(found.dtype) != found) & ~(again.isnan() & found.isnan())
        if wrong.any():
            raise PlanError(
                f"initialize.fill_range gave other values for elements {start} to {start + count - 1} of "
                f"{placement.name!r} when they were asked for again, in another range; each element must be a function "
                "of (name, place), drawn from a counter-based generator, say"
            )


def _spans(runs: Runs, *, straight: bool) -> Iterator[Runs]:
    """The runs in groups that are drawn together; a run that is longer than a span is divided unless ``straight``."""
    gaps = runs.whole[1:] - (runs.whole[:-1] + runs.numel[:-1])
    bounds = [0, *(np.flatnonzero(gaps > GAP) + 1).tolist(), len(runs.numel)]
    for first, last in itertools.pairwise(bounds):
        while first < last:
            begin = runs.whole[first]
            ends = runs.whole[first:last] + runs.numel[first:last]
            until = first + max(int(np.searchsorted(ends, begin + SPAN, side="right")), 1)
            if until == first + 1:
                yield from _divided(runs, first, runs.numel[first] if straight else SPAN)
            else:
                yield Runs(*(array[first:until] for array in runs))
            first = until


def _divided(runs: Runs, place: int, most: int) -> Iterator[Runs]:
    whole, local, numel = (int(array[place]) for array in runs)
    for done in range(0, numel, int(most)):
        ends = (whole + done, local + done, min(int(most), numel - done))
        yield Runs(*(np.array([end], dtype=np.int64) for end in ends))


def _elements(span: Runs, begin: int, start: int) -> tuple[Tensor, Tensor]:
    """Places of all elements of some runs, counted from ``begin`` in the whole parameter and from ``start`` here."""
    before = np.cumsum(span.numel) - span.numel
    inside = np.arange(int(span.numel.sum()), dtype=np.int64)
    sources = inside + np.repeat(span.whole - begin - before, span.numel)
    places = inside + np.repeat(span.local - start - before, span.numel)
    return torch.from_numpy(sources), torch.from_numpy(places)
