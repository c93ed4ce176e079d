"""Filling: the first values of all units.

``initialize`` draws parameters of the whole model, and a rank keeps its part of each. First values are therefore the
same bits for every layout of ranks.

    f(name, tensor)     every rank draws every parameter whole, one at a time; ranks compare all values
    a RangeInitializer  every rank draws its own shard (``drawing``); ranks compare samples of each parameter before
    loaded_later        nobody draws: a checkpoint is loaded next (decision 0028)
"""

from __future__ import annotations

import ctypes
import itertools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from hpczero.comm import Collectives
from hpczero.errors import PlanError
from hpczero.job.group import told_all, unlike
from hpczero.job.messages import hand_out
from hpczero.job.topology import Topology
from hpczero.kernels.norm import sum_of_bits
from hpczero.plan.layout import ShardLayout, Slot
from hpczero.plan.placement import ModelPart, Placement, Runs
from hpczero.zero.units.unit import Unit

# Drawing: this rank's shard of first values, from an ``initialize`` that can give any range of a parameter.
#
#     shard of a unit     elements of this rank's part of some parameters
#     part of one         runs of the whole parameter (``Placement.runs``), many short ones where it is cut by columns
#     a call              one run, or a span of runs with what lies between them where that is cheaper than a call each

# Elements between two runs that are drawn and dropped: a call takes the time of about as many.
GAP = 2**12
# Elements that are drawn together for one call, at most, where they do not go straight to their place.
SPAN = 2**18
# Elements that stand for a parameter, at its begin and its end each.
SAMPLE = 64


@runtime_checkable
class RangeInitializer(Protocol):
    """An ``initialize`` of which each rank asks for its own elements alone. Nothing here is collective."""

    def __call__(self, name: str, tensor: Tensor) -> None:
        """Fill one whole parameter in place, fp32 on the CPU, given its name in the whole model."""

    def fill_range(self, name: str, shape: tuple[int, ...], start: int, values: Tensor) -> None:
        """Fill ``values`` with elements of one parameter.

        They must be a function of (name, place) alone: the same in every range, on every rank, at every call.

        Args:
            name: in the whole model.
            shape: in the whole model.
            start: the first element, counted in the whole parameter, flat.
            values: (n,) fp32 on the CPU, contiguous; n may be 0.
        """


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

    def fingerprint(self, name: str) -> int:
        """32 bits that stand for one parameter, equal on ranks that will give equal values of it."""


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
        """Fill ``values`` with shard number ``shard`` of a unit of this layout.

        ``values``: (elements of the shard without padding,), of any floating dtype, on any device. PlanError where a
        range has other values when it is asked for again.
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
            alone = len(span.numel) == 1
            first = int(span.local[0]) - own.start
            place = values[first : first + stop - begin]
            if alone and straight:
                self._draw(placement, begin, place)
                continue
            drawn = torch.empty(stop - begin, dtype=torch.float32, device="cpu")
            self._draw(placement, begin, drawn)
            if alone:
                place.copy_(drawn)
            else:
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


Initializer = Callable[[str, Tensor], None]

_DRAW = "draw from a generator keyed by (seed, name), not from the global one"
AWAITED = "the model was zeroified with initialize=hpczero.loaded_later, and no checkpoint has been loaded"


def loaded_later(name: str, tensor: Tensor) -> None:
    """As ``zeroify(initialize=...)``: values come with a checkpoint that is loaded next, so none are drawn.

    Whoever uses the parameters before that gets a StepError. It is no function to be called: it fills with NaN.
    """
    tensor.fill_(float("nan"))


def way_of(initialize: Initializer | None) -> str:
    """Where first values come from; of ranks with other ways some would wait for the others."""
    if initialize is None:
        return "rank 0"
    if initialize is loaded_later:
        return "a checkpoint"
    return "ranges" if isinstance(initialize, RangeInitializer) else "whole parameters"


def fill(
    units: Sequence[Unit],
    topology: Topology,
    collectives: Collectives,
    initialize: Initializer | None,
    part: ModelPart | None,
) -> None:
    """Give every unit its first values: rank 0's, or ``initialize``'s. Collective over world.

    Args:
        units: of this rank's model.
        topology: the ranks.
        collectives: the transport of the units.
        initialize: fills one whole fp32 parameter in place, given its name in the whole model, or a RangeInitializer,
            or ``loaded_later``. None: among ranks that hold the same part of the model the first gives its values to
            the others.
        part: what the model is a part of; None where it is whole.

    Raises:
        PlanError: on every rank: ranks draw different values, or stages have a tied weight with different ones.
    """
    if initialize is loaded_later:
        _leave_empty(units, topology)
        return
    filling = Filling(topology, collectives, initialize, part)
    if topology.shard.size == topology.size:  # every unit is everybody's, and so is every error
        filling.fill(units)
        return
    error: Exception | None = None
    try:
        filling.fill(units)
    except Exception as caught:  # known to the ranks of the unit, told to all below
        error = caught
    with topology.agreed("give the model its first values"):
        if error is not None:
            raise error
    filling.compare_parts()


def _leave_empty(units: Sequence[Unit], topology: Topology) -> None:
    """Zeros, which cost no time, and which nobody may use. Collective over world: a tier may fail."""
    for unit in units:
        unit.whole.load(None)
    with topology.agreed("make room for the values of a checkpoint"):
        for unit in units:
            with unit.owned_values(changes=True, anew=True) as values, torch.no_grad():
                values.zero_()
            unit.note_step(())
            unit.whole.doubt(AWAITED)


class Filling:
    """The first values of one model, unit by unit.

    Attributes:
        checksums: of what each parameter was filled with, or of a sample of it, by its name in the whole model.
    """

    def __init__(
        self,
        topology: Topology,
        collectives: Collectives,
        initialize: Initializer | None,
        part: ModelPart | None,
    ) -> None:
        """For the arguments see ``fill``. Not collective."""
        self._topology, self._collectives = topology, collectives
        self._initialize, self._part = initialize, part or ModelPart(())
        self.checksums: dict[str, int] = {}

    def fill(self, units: Sequence[Unit]) -> None:
        """Fill all units. Collective over the units' ranks."""
        if isinstance(self._initialize, RangeInitializer):
            drawing = Drawing(self._initialize, self._part)
            self._compare_samples(units, drawing)
            for unit in units:
                self._draw_shard(unit, drawing)
            return
        fills = self._from_rank_0 if self._initialize is None else self._from_initialize
        for unit in units:
            unit.load(partial(fills, unit))

    def _placement(self, slot: Slot) -> Placement:
        return self._part.placement(slot.name, slot.shape)

    def _from_rank_0(self, unit: Unit, values: Tensor) -> None:
        topology, slots = self._topology, unit.spec.layout.slots
        with torch.no_grad():
            for parameter, slot in zip(unit.parameters, slots, strict=True):
                values[slot.offset : slot.stop].view(slot.shape).copy_(parameter)
        self._collectives.broadcast(values, root=0, name=unit.spec.name).wait()
        for slot in slots:
            placement, mine = self._placement(slot), values[slot.offset : slot.stop]
            if placement.dim is None:  # tensor ranks hold all of it
                hand_out(topology.tensor, _array(mine))
            if placement.tied:
                self.checksums[placement.name] = _checksum(mine)

    def _from_initialize(self, unit: Unit, values: Tensor) -> None:
        name = unit.spec.name
        # Replicas among them: one that left alone would be waited for below.
        same_part = self._topology.data_sequence
        with same_part.agreed(f"initialise unit {name!r}"), torch.no_grad():
            for slot in unit.spec.layout.slots:
                self._draw(self._placement(slot), values[slot.offset : slot.stop].view(slot.shape))
        own = [self.checksums[self._placement(slot).name] for slot in unit.spec.layout.slots]
        mine = zlib.crc32(np.array(own, dtype=np.uint32).tobytes())
        found = same_part.gather(float(mine))
        if any(other != found[0] for other in found):
            error = PlanError(
                f"initialize gave different values for unit {name!r} on different ranks; {_DRAW}"
            )
            raise told_all(error, same_part.comm)

    def _compare_samples(self, units: Sequence[Unit], drawing: Drawing) -> None:
        """Refuse ranks that would draw another model, before anything is drawn. Collective."""
        same_part = self._topology.data_sequence
        with same_part.agreed("draw samples of the first values"):
            for unit in units:
                for slot in unit.spec.layout.slots:
                    placement = self._placement(slot)
                    self.checksums[placement.name] = drawing.sample(placement)
        here = unlike(same_part, [f"{name!r} ({found})" for name, found in self.checksums.items()])
        with same_part.agreed("compare samples of the first values"):
            if here is not None:
                raise PlanError(
                    f"initialize.fill_range gave other values on rank {self._topology.rank} than on the first of the "
                    f"ranks that hold the same parameters: {here[0].split('; ')[0]} and {here[1].split('; ')[0]}, "
                    f"name and checksum of a sample; {_DRAW}"
                )

    def _draw_shard(self, unit: Unit, drawing: Drawing) -> None:
        """Draw this rank's shard of a unit. Collective over the unit's ranks."""
        unit.whole.load(None)
        name, shard, total = unit.spec.name, self._collectives.group.index, 0
        same_part, replicate = self._topology.data_sequence, self._topology.replicate
        # Replicas among them: one that left alone would be waited for below.
        with (
            same_part.agreed(f"initialise unit {name!r}"),
            unit.owned_values(changes=True, anew=True) as values,
            torch.no_grad(),
        ):
            drawing.fill(unit.spec.layout, shard, values)
            if replicate.size > 1:
                total = int(sum_of_bits(values))
        if replicate.size > 1:
            here = unlike(replicate, [str(total)])
            with same_part.agreed(f"compare replicas of unit {name!r}"):
                if here is not None:
                    raise PlanError(
                        f"rank {self._topology.rank}: initialize.fill_range gave other values for a shard of unit "
                        f"{name!r} than on its first replica; {_DRAW}"
                    )
        unit.publish()

    def _draw(self, placement: Placement, local: Tensor) -> None:
        """Fill ``local``, this rank's part of one parameter."""
        assert self._initialize is not None, "chosen by the caller"
        whole = (
            local
            if placement.dim is None
            else torch.empty(placement.shape, dtype=torch.float32, device="cpu")
        )
        self._initialize(placement.name, whole)
        self.checksums[placement.name] = _checksum(whole)
        if whole is not local:
            placement.take(whole, local)

    def compare_parts(self) -> None:
        """Refuse parts that are not of one model. Collective over world.

        Tensor ranks must have drawn the same whole parameters, and two stages the same tied weight.

        Raises:
            PlanError: on every rank; the message names a parameter.
        """
        topology = self._topology
        drawn = []
        if self._initialize is not None:  # otherwise checksums are of parts, which differ
            drawn = [f"{name!r} with checksum {value}" for name, value in self.checksums.items()]
        here = unlike(topology.tensor, drawn)
        with topology.agreed("compare the first values of tensor ranks"):
            if here is not None:
                raise PlanError(
                    f"initialize gave {here[0].split('; ')[0]} on rank {topology.rank}, and "
                    f"{here[1].split('; ')[0]} on the first of its tensor ranks; {_DRAW}"
                )
        own = {p.name for p in self._part.placements.values() if p.tied}
        text = "\n".join(f"{self.checksums[name]} {name}" for name in self.checksums if name in own)
        stages = topology.pipeline.gather_text(text)
        with topology.agreed("compare the first values of tied weights"):
            seen: dict[str, str] = {}
            for stage, lines in enumerate(stages):
                for checksum, name in (line.split(" ", 1) for line in lines.splitlines()):
                    if seen.setdefault(name, checksum) != checksum:
                        raise PlanError(
                            f"tied parameter {name!r} has other first values on stage {stage} than on the first that "
                            "has it; build the model from one seed on every rank, or pass initialize=f(name, tensor)"
                        )


def _array(values: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """The bytes of contiguous host memory. Not through ``numpy()``: torch then refuses to give the storage back."""
    if not values.nbytes:
        return np.empty(0, dtype=np.uint8)
    memory = (ctypes.c_ubyte * values.nbytes).from_address(values.data_ptr())
    return np.frombuffer(memoryview(memory), dtype=np.uint8)


def _checksum(values: Tensor) -> int:
    held = values.contiguous()  # keep it: its memory is read below
    return zlib.crc32(_array(held).data)
