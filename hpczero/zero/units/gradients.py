"""UnitGradients: the gradients of one unit, from autograd to the optimizer.

local       this rank's gradient      (padded_numel,) param dtype, from first use in backward to the reduction;
                                      one rank alone collects it where the mean will lie, in fp32
reduced     mean over ranks           fp32, this rank's shard, or the whole unit where the optimizer is replicated;
                                      ``shards[i].grad`` are views of it; made in backward, gone with zero_grad
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from typing_extensions import override

from hpczero.comm.calls import Work
from hpczero.comm.codes import SentCodes
from hpczero.comm.collectives import Collectives
from hpczero.comm.rows import RowExchange
from hpczero.errors import StepError
from hpczero.kernels.tree_sum import LeafSum, ShardSum, carried
from hpczero.memory.buffers import DTYPES, Buffer, Use
from hpczero.plan import Plan, UnitSpec
from hpczero.plan.layout import ShardLayout
from hpczero.plan.precision import CODES
from hpczero.zero.units.away_shard import GradientRest
from hpczero.zero.units.guard import (
    own_gradient,
    set_own_data,
    set_own_gradient,
    set_own_gradients,
    take_own_gradient,
)
from hpczero.zero.units.rows import RowGradient

# LocalGradient: one rank's own gradient of a whole unit, from autograd to the reduction.
#
# Autograd's tensors are copied and dropped: cheaper than accumulating into a buffer that must be zeroed first, and a
# parameter without a gradient costs nothing until the buffer is completed. Large ones go one by one, so that they are
# not there twice. Small ones, of norms and biases, wait for each other: one call, or launch, moves all of them.

SMALL_NUMEL = 2**14  # a copy of more takes longer than its call


class LocalGradient:
    """(padded_numel,) in the parameter dtype, held from the first gradient to ``clear``, or for ever with ``keep``.

    Where the mean over ranks is this rank's own gradient, it is collected where the mean will lie (``landing``).

    Attributes:
        filled: for each slot, whether a gradient has come in.
    """

    def __init__(
        self,
        layout: ShardLayout,
        dtype: torch.dtype,
        *,
        comm: Collectives,
        keep: bool,
        landing: Callable[[], Tensor | None] | None = None,
    ) -> None:
        """Not collective.

        Args:
            layout: of the unit.
            dtype: of the parameters.
            comm: the transport, for memory.
            keep: whether the memory stays between steps.
            landing: asked at the first gradient of a reduction: (padded_numel,) of ``dtype`` for all of them, which
                stays the caller's, or None. Without it there is never any.
        """
        self.filled = [False] * len(layout.slots)
        self._layout = layout
        self._comm = comm
        self._wire = comm.allocate(
            layout.padded_numel,
            dtype,
            category="gradients" if keep else "unsharded",
            use=Use.REDUCE,
            keep=keep,
        )
        self._wire.release()
        self._landing = landing
        self._flat: Tensor | None = None  # where gradients go until ``clear``, if not to ``_sum``
        self._sum: Buffer | None = None  # fp32 sum over micro-batches, for half dtypes only
        self._views: list[Tensor] = []  # of ``_flat``, one for each slot
        self._small: dict[int, Tensor] = {}  # gradients that wait, by slot
        self._small_adds = False  # they are added, else copied
        self._shapes = [
            torch.empty(slot.shape, device="meta", dtype=torch.float32) for slot in layout.slots
        ]
        # torch 2.8 gives views of no elements the shape (0,).
        self._empty = [(p, slot.shape) for p, slot in enumerate(layout.slots) if not slot.numel]

    @property
    def _half(self) -> bool:
        return self._wire.tensor.dtype is not torch.float32

    def add(self, position: int, gradient: Tensor, accumulating: bool) -> None:
        """Add ``gradient``, of the slot's shape, to slot ``position``.

        Where more micro-batches follow before the reduction (``accumulating``), half gradients are summed in fp32:
        their sum in half precision loses what is small against it.
        """
        if gradient.layout is torch.sparse_coo:
            gradient = gradient.coalesce().to_dense()
        if torch.is_grad_enabled():  # create_graph=True
            gradient = gradient.detach()
        adds = self.filled[position]
        if self._layout.slots[position].numel <= SMALL_NUMEL and not (accumulating and self._half):
            small = self._small
            if not small:
                self._buffer(False)  # it is planned to be there from the first gradient on
            elif adds != self._small_adds or position in small:
                self._move_small()
            small[position], self._small_adds = gradient, adds
            self.filled[position] = True
            return
        self._move_small()
        into = self._view(position, accumulating)
        if adds:
            into.add_(gradient)
        else:
            into.copy_(gradient)
        self.filled[position] = True

    def _move_small(self) -> None:
        """Those that wait go to the buffer."""
        if not self._small:
            return
        self._buffer(False)
        # Where they go to the wire or to the mean, the views of all slots are there.
        views = self._views if self._sum is None else None
        into = [views[p] if views else self._view(p, False) for p in self._small]
        gradients = [*self._small.values()]
        self._small.clear()
        if self._small_adds:
            torch._foreach_add_(into, gradients)
        else:
            torch._foreach_copy_(into, gradients)

    def _view(self, position: int, accumulating: bool) -> Tensor:
        """Of the buffer that gradients go to now, in the slot's shape."""
        flat = self._buffer(accumulating)
        if self._sum is None:
            return self._views[position]
        slot = self._layout.slots[position]
        return flat[slot.offset : slot.stop].view(slot.shape)

    def _make_views(self, flat: Tensor) -> None:
        # Memory that is given back and taken again comes back to its views; some transports give other memory instead.
        if not (self._views and torch._C._is_alias_of(self._views[0], flat)):  # type: ignore[attr-defined]
            with torch.inference_mode(False):
                # One call for all: they are made anew each step where the mean is collected in place.
                self._views = [*torch._C._nn.unflatten_dense_tensors(flat, self._shapes)]
                for position, shape in self._empty:
                    self._views[position] = flat[:0].view(shape)

    def complete(self) -> Tensor:
        """The whole gradient for the wire: zero where none came in, padding included."""
        self._move_small()
        gradients = self._buffer(False)
        if not all(self.filled):
            for filled, slot in zip(self.filled, self._layout.slots, strict=True):
                if not filled:
                    gradients[slot.offset : slot.stop].zero_()
        if self._layout.numel < self._layout.padded_numel:
            gradients[self._layout.numel :].zero_()
        summed = self._sum
        if summed is not None:
            self._sum = None
            gradients = self._buffer(False)
            gradients.copy_(summed.tensor)
            summed.release()
        return gradients

    def clear(self) -> None:
        """Forget everything and give the memory back, unless it is kept."""
        self.filled = [False] * len(self.filled)
        self._small.clear()
        if self._sum is not None:
            self._sum.release()
            self._sum = None
        if self._flat is not None and self._flat is not self._wire.tensor:
            self._views = []  # else the mean would stay in memory after everybody has dropped it
        self._flat = None
        self._wire.release()

    def _buffer(self, accumulating: bool) -> Tensor:
        if accumulating and self._sum is None and self._half:
            self._sum = self._comm.allocate(
                self._layout.padded_numel, torch.float32, category="accumulated"
            )
            if any(self.filled):  # an earlier backward was not announced as one of several
                self._sum.tensor.copy_(self._wire.tensor)
        if self._sum is not None:
            return self._sum.tensor
        if self._flat is None:
            landing = None if self._landing is None else self._landing()
            if landing is None:
                self._wire.take()
                landing = self._wire.tensor
            self._make_views(landing)
            self._flat = landing
        return self._flat


class Reducer:
    """The sum of the transport: fp32, in one order, whatever the ranks and nodes.

    There is one for each model. Units call it in the same order on every rank.
    """

    def __init__(self, comm: Collectives, *, apart: bool = False, tables: bool = False) -> None:
        """Collective with ``tables``: whether there are any of which rows travel.

        ``apart``: whether means lie elsewhere than where gradients are collected, of any unit of the model.
        """
        self._comm, self._apart = comm, apart
        self._rows = RowExchange(comm) if tables else None

    @property
    def rows(self) -> RowExchange:
        """Of the tables of which rows travel."""
        assert self._rows is not None, "there is no such table"
        return self._rows

    def close(self) -> None:
        """Free the communicator of rows. Collective."""
        if self._rows is not None:
            self._rows.close()

    @property
    def in_place(self) -> bool:
        """Whether ``into`` may be ``local`` itself, where it is not added to: nobody else has a part of the sum."""
        return self._comm.alone and not self._apart

    def reduce(
        self, local: Tensor, into: ShardSum, *, name: str, codes: SentCodes | None = None
    ) -> Work:
        """Start to bring this rank's part of the sum of every rank's ``local`` ``into`` its place. Collective.

        Args:
            local: (num_shards * shard_numel,) fp32, bf16 or fp16; not changed, and kept until the work is done.
            into: of (shard_numel,); ``local`` itself where ``in_place``, which is changed then.
            name: of the unit; what a reducer keeps from one step to the next, it keeps by this name.
            codes: as which the sum of a node travels; None: as it is.
        """
        return self._comm.reduce_scatter(local, into, name=name, codes=codes)


class PartialReducer(Reducer):
    """For gradients of which every tensor rank has a part of the sum, although each holds the whole parameter.

    With the tokens of a sample split over tensor ranks (sequence parallelism), norms and biases see a part of the
    tokens. Their gradients are summed over the tensor ranks after the data parallel ranks: what travels is a shard of
    them, once per reduction.

    Source: Korthikanti et al., arXiv 2205.05198, sec. 4.2.2.
    """

    def __init__(
        self, comm: Collectives, over_tensor: Collectives, units: Sequence[UnitSpec], *, apart: bool
    ) -> None:
        """Over ranks with other samples, then over the tensor ranks, which have the same shapes. Not collective."""
        super().__init__(comm, apart=apart)
        self._over_tensor, index = over_tensor, comm.group.index
        self._runs: Mapping[str, list[slice]] = {
            spec.name: runs for spec in units if (runs := _partial_runs(spec, index))
        }

    @override
    def reduce(
        self, local: Tensor, into: ShardSum, *, name: str, codes: SentCodes | None = None
    ) -> Work:
        """As of every reducer. Collective over the tensor ranks too, when the work is waited for."""
        runs = self._runs.get(name)
        if runs is None or not into.last:
            return super().reduce(local, into, name=name, codes=codes)
        out, fresh = into.out, into.out
        if into.accumulate:
            fresh = torch.empty_like(out)
            into = ShardSum(fresh, into.scale)
        work = super().reduce(local, into, name=name, codes=codes)

        def finish() -> None:
            work.wait()
            self._sum([fresh[run] for run in runs], name)
            if fresh is not out:
                out.add_(fresh)

        return Work(name, finish)

    def _sum(self, parts: Sequence[Tensor], name: str) -> None:
        """Replace each of ``parts`` by its sum over the tensor ranks, in one exchange."""
        group = self._over_tensor.group
        numels = [len(part) for part in parts]
        share = -(-sum(numels) // group.size)
        full = torch.zeros(share * group.size, device=parts[0].device, dtype=torch.float32)
        torch.cat(list(parts), out=full[: sum(numels)])
        mine = torch.empty(share, device=full.device, dtype=torch.float32)
        self._over_tensor.reduce_scatter(full, mine, scale=1.0, name=name).wait()
        full[group.index * share :][:share].copy_(mine)
        self._over_tensor.all_gather(full, name=name).wait()
        for part, total in zip(parts, torch.split(full[: sum(numels)], numels), strict=True):
            part.copy_(total)


def _partial_runs(spec: UnitSpec, index: int) -> list[slice]:
    """Elements of shard ``index`` whose gradients are partial sums, neighbours as one."""
    first, found = spec.layout.shard_range(index).start, list[slice]()
    for position in spec.partial:
        slot = spec.layout.slots[position]
        part = spec.layout.overlap(index, slot.name)
        if not part:
            continue
        start = slot.offset + part.start - first
        if found and found[-1].stop == start:
            start = found.pop().start
        found.append(slice(start, slot.offset + part.stop - first))
    return found


# Shards: what the optimizer sees of one unit.
#
# [Note: Changes of values between steps]
# A loop may write to the optimizer's parameters before the step: the step brings the model up to date. What is written
# after it would be in this rank's masters and not in the model, at some stages on some ranks only. The next use of the
# model finds it by the version counters, which all shards of a unit share.

_trains = attrgetter("requires_grad")


class Shards:
    """The shards of one unit, in the order of its slots.

    Attributes:
        parameters: what the optimizer's groups hold: one for each model parameter this rank owns a part of.
        slots: (parameters,) the slot of each.
        pieces: (parameters,) which rank's piece each is.
        places: (parameters,) where each lies in the master.
        start: element of the unit at which the master begins.
        master: (elements of all pieces,) fp32; a program may give it other memory.
    """

    def __init__(self, layout: ShardLayout, master: Tensor, *, start: int, pieces: range) -> None:
        """``master``: of the ``pieces`` of these ranks; it begins at element ``start`` of the unit. Not collective."""
        self.parameters: list[nn.Parameter] = []
        self.slots: list[int] = []
        self.pieces: list[int] = []
        self._layout, self.start = layout, start
        self.places: list[slice] = []
        self.master = master
        self._version = 0  # of the master
        self._at: list[int] = []  # where each lay when last found right
        self._of_slot: dict[int, list[int]] = {}  # which of them belong to a slot
        for position, slot in enumerate(layout.slots):
            for piece in pieces:
                part = layout.overlap(piece, slot.name)
                if part:
                    self._of_slot.setdefault(position, []).append(len(self.parameters))
                    begin = slot.offset + part.start - start
                    self.parameters.append(nn.Parameter(master[begin : begin + len(part)]))
                    self.slots.append(position)
                    self.pieces.append(piece)
                    self.places.append(slice(begin, begin + len(part)))
        lengths = [place.stop - place.start for place in self.places]
        self._lengths = [*lengths, len(master) - sum(lengths)]  # the last: padding
        self.note()

    def cut(self, flat: Tensor) -> Sequence[Tensor]:
        """The part of each parameter in ``flat``, which is cut as the masters are; views, and one more of the padding.

        As ``parts_of``, at a fifth of its cost: they follow each other without gaps.
        """
        return flat.split_with_sizes(self._lengths)

    def parts_of(self, flat: Tensor) -> Iterator[tuple[int, nn.Parameter, Tensor]]:
        """Slot, parameter, and the part of ``flat``, which is cut as the masters are, that belongs to it."""
        for position, shard, place in zip(self.slots, self.parameters, self.places, strict=True):
            yield position, shard, flat[place]

    def parts_at(self, position: int, flat: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Of one slot: which rank's piece each part is, and the part of ``flat`` as above."""
        for index in self._of_slot.get(position, ()):
            yield self.pieces[index], flat[self.places[index]]

    def of_piece(self, index: int) -> Iterator[tuple[int, nn.Parameter]]:
        """Slot and parameter of each part of rank ``index``'s piece."""
        for piece, position, shard in zip(self.pieces, self.slots, self.parameters, strict=True):
            if piece == index:
                yield position, shard

    def follow(self) -> None:
        """The masters have other memory, and the values of before."""
        for _, shard, part in self.parts_of(self.master):
            set_own_data(shard, part)
        self.note()

    # --- [Note: Changes of values between steps] ------------------------------------------------------------------

    def note(self) -> None:
        """What they hold now is what the model holds, or is about to."""
        self._version = self.master._version

    def check_seen(self) -> None:
        """Raise if a value was changed since ``note``, which the model would not see.

        Raises:
            StepError: names the parameter.
        """
        self.check_place()
        if self.parameters and self.master._version != self._version:
            raise StepError(
                f"the part of {self._layout.slots[self.slots[0]].name!r} in optimizer.param_groups (or of a "
                "parameter beside it) was changed since the last step, or that step did not finish (an exception? then "
                "load a checkpoint), and the model would not see it. Change "
                "it before optimizer.step() and after backward, or change the model's own parameters inside "
                "`with hpczero.gathered(model, modifier_rank=0):`"
            )

    def check_place(self) -> None:
        """Raise if one was frozen, or was given other memory, from which nothing comes to the model.

        Raises:
            StepError: names the parameter.
        """
        with torch._C.DisableTorchFunctionSubclass():
            at = [*map(Tensor.data_ptr, self.parameters)]
            if at != self._at or not all(map(_trains, self.parameters)):
                self._look_at_each()
                self._at = at

    def _look_at_each(self) -> None:
        for position, shard, place in zip(self.slots, self.parameters, self.places, strict=True):
            if not shard.requires_grad:
                raise StepError(
                    f"requires_grad of the part of {self._layout.slots[position].name!r} in optimizer.param_groups "
                    "is False; freeze the model's own parameter, or set the learning rate of its group to 0"
                )
            same = torch._C._is_alias_of(shard, self.master)  # type: ignore[attr-defined]
            if not same or shard.storage_offset() != self.master.storage_offset() + place.start:
                raise StepError(
                    f"the part of {self._layout.slots[position].name!r} in optimizer.param_groups was given other "
                    "memory (p.data = ...), which the model does not see; change it in place before "
                    "optimizer.step(): p.data.mul_(...), p.data.copy_(...)"
                )


# Usage: which parameters of a unit have a gradient, on whatever rank; the others have None, as in plain torch.
#
# A zero gradient is not None: weight decay and momentum go on with it. A loop may set gradients to None through the
# model, which all ranks see, or through the optimizer's pieces, which only the owner of a piece sees. So each rank
# keeps what it used since the last step apart from what was known before it, and the step puts together what all have
# seen.

Flags = npt.NDArray[np.bool_]


class Usage:
    """Of the slots of one unit; not collective.

    Attributes:
        now: (slots,) whether this rank had a gradient since the last step.
        emptied: (slots,) whether a piece that this rank holds was found to be None at the first reduction since.
        late: whether one was found so at a later one; nobody else can tell then what was used before it.
        reductions: since the last step.
    """

    def __init__(self, slots: int) -> None:
        self.now = np.zeros(slots, dtype=bool)
        self.emptied = np.zeros(slots, dtype=bool)
        self.late = False
        self._before = np.zeros(slots, dtype=bool)  # known to all ranks at the last step
        self._announced = np.zeros(slots, dtype=bool)  # set to None where all ranks see it
        self.reductions = 0

    def __len__(self) -> int:
        return len(self.now)

    def found_none(self, position: int) -> None:
        """A reduction finds that a piece of a slot was set to None since the last one."""
        if self._announced[position]:
            return
        if self.reductions:
            self.late = True
        else:
            self.emptied[position] = True

    def reduced(self, filled: Sequence[bool]) -> None:
        """A reduction brings gradients of the slots that this rank ``filled``."""
        if all(filled):
            self.now[:] = True
        else:
            self.now |= np.array(filled, dtype=bool)
        self._announced[:] = False
        self.reductions += 1

    def drop(self, position: int) -> None:
        """The gradient of one slot was set to None, on all ranks."""
        self.now[position] = self._before[position] = False
        self._announced[position] = True

    def drop_all(self) -> None:
        """All gradients are gone, on all ranks."""
        for flags in (self.now, self.emptied, self._before, self._announced):
            flags[:] = False
        self.late, self.reductions = False, 0

    def step(self, now: Flags, emptied: Flags) -> Flags:
        """The step begins. Args: ``now`` and ``emptied`` of any rank. Returns which slots have a gradient, (slots,)."""
        used = now | (self._before & ~emptied)
        self.drop_all()
        self._before = used
        return used


def whole_copy(values: Tensor, layout: ShardLayout, comm: Collectives, *, name: str) -> Tensor:
    """(layout.numel,) fp32 copy. Collective where ``values`` are a shard.

    ``values``: (padded_numel,), equal on all ranks, or (shard_numel,), this rank's.
    """
    if values.numel() == layout.padded_numel:
        return values[: layout.numel].detach().to(torch.float32, copy=True)
    full = torch.empty(layout.padded_numel, dtype=torch.float32, device=comm.device)
    index = comm.group.index
    full[index * layout.shard_numel : (index + 1) * layout.shard_numel].copy_(values.detach())
    comm.all_gather(full, name=name).wait()
    return full[: layout.numel]


@dataclass(frozen=True)
class LeafTurn:
    """A micro-step of a step that is summed leaf by leaf (kernels/tree_sum.py). Equal on all ranks but for ``counts``.

    Attributes:
        leaves: of the step.
        before: leaves of earlier micro-steps.
        count: leaves of this one.
        counts: whether this rank's own backward is of a leaf; else it takes part in what is collective, and no more.
        seen: is shown the name of each unit and this rank's gradient of it, (numel,) in the parameters' dtype.
        adds: whether gradients are added up; else they are shown, and dropped.
    """

    leaves: int
    before: int
    count: int
    counts: bool
    seen: Callable[[str, Tensor], None] | None = None
    adds: bool = True

    @property
    def last(self) -> bool:
        """Whether no leaf follows."""
        return self.before + self.count == self.leaves


class UnitGradients:
    """Of one trained unit.

    Attributes:
        usage: which parameters have a gradient.
        rest: where ``reduced`` lies from its reduction to the step.
        drops: (slots,) int64, how often each slot's gradient was set to None.
    """

    def __init__(
        self,
        spec: UnitSpec,
        optimized: Shards,
        plan: Plan,
        comm: Collectives,
        *,
        reducer: Reducer,
        rest: GradientRest,
    ) -> None:
        """Not collective; memory is taken in the first backward. ``plan`` says stage and precision."""
        self._spec, self._optimized = spec, optimized
        self._plan, self._comm, self._reducer = plan, comm, reducer
        layout, precision = spec.layout, plan.precision
        self.rest = rest
        in_place = reducer.in_place and not precision.has_masters  # else the mean has another dtype
        self._local: LocalGradient | RowGradient
        if spec.row:
            self._local = RowGradient(spec, DTYPES[precision.param], reducer.rows)
        else:
            self._local = LocalGradient(
                layout,
                DTYPES[precision.param],
                comm=comm,
                keep=plan.stage.keeps_local_gradients and not in_place,
                landing=self._land if in_place else None,
            )
        self.usage = Usage(len(layout.slots))
        self.drops = np.zeros(len(layout.slots), dtype=np.int64)
        self._dropped: set[int] = set()  # slots whose reduced gradient was set to None
        self._present = False
        self._reduction: Work | None = None
        self._summed = 0  # leaves, in a step that has not come to its last
        self._carries: list[Buffer] = []  # sums of them, beside the one in ``reduced``

    def capture(self, position: int, parameter: Tensor, accumulating: bool) -> None:
        """Take the gradient autograd left on ``parameter``, the one at ``position``; see LocalGradient.add."""
        gradient = take_own_gradient(parameter)
        if self._dropped:
            self._dropped.discard(position)
        if gradient is not None:
            self._local.add(position, gradient, accumulating)

    def _land(self) -> Tensor | None:
        """The memory of the mean; None where a mean is there, which is added to."""
        if self._present:
            return None
        self.rest.take()
        return self.rest.tensor

    @property
    def waiting(self) -> bool:
        """Whether gradients wait for a reduction, or for leaves that follow."""
        return any(self._local.filled) or bool(self._summed)

    def reduce(self, scale: float, turn: LeafTurn | None = None) -> None:
        """Start adding ``scale`` times the sum over ranks of the local gradients to the shards' ``grad``. Collective.

        Parameters without a gradient on this rank count as zero. Frees the local gradient unless the stage keeps it.
        ``finish`` follows. With a ``turn`` the sum is over leaves: it is there after the last one, times ``scale``.
        """
        if turn is not None:
            self._reduce_leaves(scale, turn)
            return
        accumulate = self._prepare_reduced()
        codes, coding = None, None
        if self._plan.precision.reduce in CODES:
            coding = self._plan.coding(self._spec)
        if coding is not None:
            step, number = self._comm.calls.step, self.usage.reductions
            codes = SentCodes(coding, f"step {step}, {number}, {self._spec.name}")
        self.usage.reduced(self._local.filled)
        if isinstance(self._local, RowGradient):
            self._local.reduce(self.reduced, scale=scale, accumulate=accumulate)
            self._reduction = Work(self._spec.name)
        else:
            self._reduction = self._reducer.reduce(
                self._local.complete(),
                ShardSum(self._reduced_mine, scale, accumulate=accumulate),
                name=self._spec.name,
                codes=codes,
            )
        self._local.clear()
        self._dropped.clear()
        self._present = True

    def _reduce_leaves(self, scale: float, turn: LeafTurn) -> None:
        """As ``reduce``, of one turn."""
        local = self._local
        assert isinstance(local, LocalGradient), "tables go whole where leaves are summed"
        whole = local.complete()
        if turn.seen is not None:
            turn.seen(self._spec.name, whole[: self._spec.layout.numel])
        if not turn.adds:
            local.clear()
            return
        self.finish()
        if turn.before != self._summed or self._present:
            raise StepError(
                f"unit {self._spec.name!r} has a sum over {self._summed} leaves where leaf {turn.before} follows: a "
                "leaf had two backwards or none, gradients were dropped between leaves, or a part of the model was "
                "unfrozen. Add the losses of a leaf and call backward once, and zero_grad before the first leaf alone"
            )
        self.rest.take()
        after = turn.before + turn.count
        held = max(carried(turn.before), 0 if turn.last else carried(after))
        numel = self._spec.layout.shard_numel
        while len(self._carries) < held - 1:
            self._carries.append(self._comm.allocate(numel, torch.float32, category="carried"))
        mine = self._reduced_mine
        into = LeafSum(
            mine,
            scale,
            carries=[mine, *(carry.tensor for carry in self._carries)],
            before=turn.before,
            count=turn.count,
            last=turn.last,
        )
        if turn.counts:
            self.usage.reduced(self._local.filled)
        self._reduction = self._reducer.reduce(whole, into, name=self._spec.name)
        local.clear()
        self._summed, self._present = 0 if turn.last else after, turn.last

    def _drop_carries(self) -> None:
        for carry in self._carries:
            carry.release()
        self._carries.clear()

    def finish(self) -> None:
        """Return when the shards' ``grad`` have what ``reduce`` adds. Collective; nothing if none goes on."""
        if self._reduction is None:
            return
        self._reduction.wait()
        self._reduction = None
        if self._summed:  # leaves follow
            self.rest.put_away()
            return
        self._drop_carries()
        is_part = isinstance(self._local, LocalGradient)  # of a table every rank has all rows
        if is_part and not self._plan.stage.shards_optimizer and self._comm.group.size > 1:
            self._comm.all_gather(self.reduced, name=self._spec.name).wait()
        shards = self._optimized
        set_own_gradients(shards.parameters, shards.cut(self.reduced))
        self.rest.put_away()

    def _prepare_reduced(self) -> bool:
        """Whether the reduced buffer holds gradients to add to; what was set to None meanwhile becomes zero."""
        self.rest.take()
        if not self.present:
            return False
        for position, shard, gradient in self._gradient_parts():
            if own_gradient(shard) is None:
                gradient.zero_()
                self.usage.found_none(position)
        return True

    def _gradient_parts(self) -> Iterator[tuple[int, nn.Parameter, Tensor]]:
        return self._optimized.parts_of(self.reduced)

    @property
    def reduced(self) -> Tensor:
        """The mean over ranks so far, fp32; only where it is ``present``, and inside ``rest.at_hand``."""
        return self.rest.tensor

    @property
    def version(self) -> int:
        """Of the reduced gradient: another one where somebody has changed it in place."""
        return self.rest.version if self.present else -1

    @property
    def _reduced_mine(self) -> Tensor:
        if self._plan.stage.shards_optimizer or self._comm.group.size == 1:
            return self.reduced
        index, numel = self._comm.group.index, self._spec.layout.shard_numel
        return self.reduced[index * numel : (index + 1) * numel]

    @property
    def owned(self) -> Tensor:
        """This rank's part of the reduced gradient without padding, the same elements in every stage; fp32."""
        numel = len(self._spec.layout.shard_range(self._comm.group.index))
        return self._reduced_mine[:numel]

    @property
    def present(self) -> bool:
        """Whether a reduced gradient waits for the optimizer; equal on all ranks, also where this rank owns nothing."""
        return self._present

    def scale(self, factor: float) -> None:
        """Multiply the reduced gradient."""
        self.rest.scale(factor)

    def skip_unused(self, used_anywhere: Flags) -> None:
        """Drop the gradient of parameters no rank used: the optimizer then leaves them alone, as in torch."""
        if used_anywhere.all():
            return
        for shard, position in zip(self._optimized.parameters, self._optimized.slots, strict=True):
            if not used_anywhere[position]:
                set_own_gradient(shard, None)

    def drop(self, *, set_to_none: bool = True) -> None:
        """Forget local and reduced gradients; with ``set_to_none=False`` reduced ones become zero."""
        if self._summed:
            self.finish()  # it may still be written to
            self._summed = 0
            self._drop_carries()
            self.rest.drop()
        self._local.clear()
        if not set_to_none:
            with self.rest.at_hand(changes=True) if self.present else nullcontext():
                for shard in self._optimized.parameters:
                    if (gradient := own_gradient(shard)) is not None:
                        gradient.zero_()
        else:
            set_own_gradients(self._optimized.parameters, itertools.repeat(None))
            self.drops += 1
            self.rest.drop()
            self.usage.drop_all()
            self._dropped.clear()
            self._present = False

    # --- the gradient of one slot --------------------------------------------------------------------------------

    def is_at(self, position: int) -> bool:
        """Whether a slot has a gradient, reduced (then on all ranks alike) or waiting for it."""
        reduced = self.present and position not in self._dropped
        summed = self._summed and self.usage.now[position]
        return bool(reduced or summed or self._local.filled[position])

    def pieces_at(self, position: int, *, owned: bool = False) -> list[Tensor]:
        """Views of what this rank holds of a slot's reduced gradient; ``owned``: each element on one rank only.

        To be used inside ``rest.at_hand``.
        """
        if not self.present:
            return []
        mine = self._comm.group.index
        parts = self._optimized.parts_at(position, self.reduced)
        return [part for piece, part in parts if piece == mine or not owned]

    def drop_slots(self, positions: Collection[int], *, set_to_none: bool = True) -> None:
        """As ``drop``, of some slots; after the last one the memory is given back."""
        if len(positions) == len(self._spec.layout.slots):
            self.drop(set_to_none=set_to_none)
            return
        if self._summed:
            raise StepError(
                f"gradients of some parameters of unit {self._spec.name!r} were dropped between the leaves of a step, "
                "whose sum is not complete; drop all of them (model.zero_grad()), or drop after the last leaf"
            )
        chosen = set(positions)
        for position in chosen:
            self._local.filled[position] = False
        with self.rest.at_hand(changes=True) if self.present else nullcontext():
            for slot, shard, gradient in self._gradient_parts() if self.present else ():
                if slot in chosen:
                    gradient.zero_()
                    if set_to_none:
                        set_own_gradient(shard, None)
        if set_to_none:
            for position in chosen:
                self.drops[position] += 1
                self.usage.drop(position)
            self._dropped |= chosen
            if len(self._dropped) == len(self._spec.layout.slots):
                self.drop()

    # --- whole copies --------------------------------------------------------------------------------------------

    def whole_copy(self) -> Tensor:
        """(numel,) fp32 copy of the reduced gradient. Collective."""
        name = self._spec.name
        with ExitStack() as stack:
            agreed = (
                nullcontext() if self.rest.resident else self._comm.group.agreed(f"read {name!r}")
            )
            with agreed:
                reduced = stack.enter_context(self.rest.at_hand())
                if self.rest.failure is not None:
                    raise self.rest.failure
            return whole_copy(reduced, self._spec.layout, self._comm, name=name)
