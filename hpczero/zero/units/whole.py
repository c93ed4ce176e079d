"""WholeParameters: whether a unit's parameters are whole, and the flat buffer that they are views of.

[Note: Kept views]
``parameter.detach()``, ``.numpy()`` and ``module.state_dict()`` are views of the buffer, and nothing tells us of them.
After ``gathered`` memory that was given back would be read through them: a crash. The same holds for a view that a
block returns. The buffer therefore leaves its memory to them there (it was lent) and goes on with other memory; where
nobody keeps a view, nobody keeps the old memory either. A graph that saved such views goes on with the same values.
Memory that ranks share cannot be left: what is seen there shows later values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from itertools import repeat
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from hpczero.comm import Collectives, Work
from hpczero.comm.codes import SentCodes
from hpczero.errors import StepError, TierError
from hpczero.kernels.norm import sum_of_bits
from hpczero.memory.buffers import DTYPES, Buffer, Use
from hpczero.plan import Plan, UnitSpec
from hpczero.plan.layout import Slot
from hpczero.zero.units.guard import (
    Guard,
    LateUpdate,
    is_at,
    own_gradient,
    set_own_gradient,
    set_own_gradients,
)

# ParameterWatch: the model's parameters as views of a flat memory, and what the program does to them.
#
# [Note: Shared memory]
# On some transports the ranks of a node see one copy of a unit's buffer. Nobody may then write it but its owner, slice
# by slice. While a user may write (``hpczero.gathered``), parameters are therefore views of a copy of this rank's own.

_version = attrgetter("_version")
_trains = attrgetter("requires_grad")


def _named(parameters: Iterable[Tensor], slots: Iterable[Slot], *, train: bool) -> list[str]:
    """Names of the parameters whose ``requires_grad`` is ``train``."""
    with torch._C.DisableTorchFunctionSubclass():
        found = [*map(_trains, parameters)]
    if train not in found:
        return []
    return [slot.name for slot, trains in zip(slots, found, strict=True) if trains is train]


class ParameterWatch:
    """The parameters of one unit as views of its buffer; nothing here is collective.

    Attributes:
        guards: of the parameters, in slot order.
    """

    def __init__(
        self, spec: UnitSpec, parameters: Sequence[nn.Parameter], buffer: Buffer, *, rank: int
    ) -> None:
        """``parameters``: the model's own, in slot order. ``make`` follows, which makes them views of ``buffer``."""
        self._slots, self._parameters = spec.layout.slots, list(parameters)
        self._buffer, self._rank = buffer, rank
        self.guards = [Guard(p, slot.name) for p, slot in zip(parameters, self._slots, strict=True)]
        self._versions: list[int] = []
        # Memory and form of the buffer and of each, when last found right.
        self._places: list[Any] = []
        self._own: Tensor | None = None  # see [Note: Shared memory]
        self._bits: Tensor | None = None  # of the values at ``note_bits``

    @property
    def now(self) -> Tensor:
        """(padded_numel,), what the parameters are views of now: the buffer, or the copy."""
        return self._buffer.tensor if self._own is None else self._own

    def note_versions(self) -> None:
        """What the parameters hold now is right."""
        self._versions = self._versions_now()

    def _versions_now(self) -> list[int]:
        with torch._C.DisableTorchFunctionSubclass():  # metadata: no need to ask each guard
            return [*map(_version, self._parameters)]

    def moved(self) -> list[str]:
        """Names of those that lie elsewhere than they were put, or in another order of elements."""
        flat = self.now
        with torch._C.DisableTorchFunctionSubclass():
            places = zip(self._parameters, self._slots, strict=True)
            return [slot.name for p, slot in places if not is_at(p, flat, slot)]

    @property
    def frozen(self) -> list[str]:
        """Names of those that have ``requires_grad=False``."""
        return _named(self._parameters, self._slots, train=False)

    @property
    def unfrozen(self) -> list[str]:
        """Names of those that have ``requires_grad=True``."""
        return _named(self._parameters, self._slots, train=True)

    def drop_own_gradients(self, *, set_to_none: bool) -> None:
        """Of a frozen unit: parameters that were unfrozen may have gradients, which nobody has reduced yet."""
        for parameter in self._parameters if self.unfrozen else ():
            gradient = own_gradient(parameter)
            if gradient is not None and set_to_none:
                set_own_gradient(parameter, None)
            elif gradient is not None:
                gradient.detach().zero_()

    def forget_own_gradients(self) -> None:
        """What autograd has left on the parameters, in a backward that did not finish, is gone."""
        set_own_gradients(self._parameters, repeat(None))

    def check_guards(self) -> None:
        """Raises StepError if torch has exchanged a parameter's content together with its guard and hooks."""
        for guard, slot in zip(self.guards, self._slots, strict=True):
            if guard.is_swapped:
                raise StepError(
                    f"rank {self._rank}: torch swapped the tensor of parameter {slot.name!r} for another "
                    "one, which took hpczero's hooks along, so it would train no more; call "
                    "torch.__future__.set_swap_module_params_on_conversion(False) and use no torch.utils.swap_tensors "
                    "after zeroify; build and zeroify the model anew"
                )

    def check_values(self) -> None:
        """Raises StepError if one was changed in place, or is not the view of the buffer that it should be."""
        flat = self._buffer.tensor
        with torch._C.DisableTorchFunctionSubclass():
            # Asked of every parameter at every step: where all lie as when last found right, nothing is left to see.
            # ``flat`` is alive, so nothing else has its memory.
            everything = self._parameters
            places = [
                flat.data_ptr(),
                *map(Tensor.data_ptr, everything),
                *map(Tensor.stride, everything),
                *map(Tensor.size, everything),
            ]
            if places != self._places or self._versions_now() != self._versions:
                self._look_at_each(flat)
                self._places = places

    def _look_at_each(self, flat: Tensor) -> None:
        for parameter, slot, version in zip(
            self._parameters, self._slots, self._versions, strict=True
        ):
            if parameter._version != version:
                raise StepError(
                    f"rank {self._rank}: parameter {slot.name!r} was changed in place since zeroify, and the "
                    "optimizer's copy was not; change parameters inside `with hpczero.gathered(model, "
                    "modifier_rank=0):`"
                )
            if not is_at(parameter, flat, slot):
                raise StepError(
                    f"rank {self._rank}: parameter {slot.name!r} got new memory since zeroify, or other strides "
                    "(model.to(), .half(), load_state_dict(assign=True), parameter.data = ...?); do that before "
                    "zeroify, or change values inside `with hpczero.gathered(model, modifier_rank=0):`"
                )

    def make(self) -> None:
        """Views of the buffer instead of what the parameters were, on the meta device, too. Gradients go."""
        flat = self._buffer.tensor
        for guard, parameter, view in zip(
            self.guards, self._parameters, self._cut(flat), strict=True
        ):
            if parameter.device.type == "meta":
                # A meta parameter cannot take CPU data; swap the tensors' contents, the object stays.
                empty = torch.empty(0, device=flat.device, dtype=torch.float32)
                real = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                # Keeps a version counter of its own: see memory/buffers.py: [Note: Refilling freed parameters].
                real.data = view
                guard.fill(real)
            else:
                parameter.data = view
            parameter.grad = None

    def point_at(self, flat: Tensor) -> None:
        """Views of ``flat``, whose values count from now on."""
        for parameter, view in zip(self._parameters, self._cut(flat), strict=True):
            parameter.data = view

    def _cut(self, flat: Tensor) -> list[Tensor]:
        return [flat[slot.offset : slot.stop].view(slot.shape) for slot in self._slots]

    # --- while the user may write

    def copy(self) -> None:
        """Views of a copy of this rank's own until ``end_copy``; nothing if they are. See [Note: Shared memory]."""
        if self._own is None:
            self._own = self._buffer.tensor.clone()
            self.point_at(self._own)

    def end_copy(self) -> bool:
        """Views of the buffer again, without what was written to the copy. Whether there was one."""
        if self._own is None:
            return False
        self._own = None
        self.point_at(self._buffer.tensor)
        return True

    def note_bits(self) -> None:
        """What the values are now is what ``was_modified`` compares with."""
        self._bits = sum_of_bits(self.now)

    def was_modified(self) -> bool:
        """Whether a parameter was changed since ``note_bits``, in place (by NumPy, too) or by other memory."""
        if self.moved() or self._versions_now() != self._versions:
            return True
        return bool(sum_of_bits(self.now) != self._bits)

    def take_over(self) -> bool:
        """Values that the user put into other memory, by ``parameter.data = ...``, go where they are looked for.

        The memory of before may still be somebody's: of a backup, or of another parameter that was exchanged for this
        one. It is left to them.

        Returns:
            Whether the buffer has other memory now.

        Raises:
            StepError: values have another shape or dtype; says which parameter.
        """
        dtype = self.now.dtype
        for parameter, slot in zip(self._parameters, self._slots, strict=True):
            if parameter.shape != slot.shape or parameter.dtype != dtype:
                raise StepError(
                    f"parameter {slot.name!r} was given {parameter.dtype} {tuple(parameter.shape)} inside gathered, "
                    f"expected {dtype} {slot.shape}; build the model as it shall be before zeroify"
                )
        if not self.moved():
            return False
        values = [parameter.detach().clone() for parameter in self._parameters]
        if self._own is None:
            self._buffer.renew()
            self._buffer.tensor.zero_()
        else:
            self._own = torch.zeros_like(self._own)
        self.point_at(self.now)
        with torch.no_grad():
            for parameter, value in zip(self._parameters, values, strict=True):
                parameter.copy_(value)
        return self._own is None


# Marks: how a rank whose medium has failed tells its peers so through a gather.
#
# A rank cannot raise where its peers wait for its part of a collective: they would wait for ever. It takes part with a
# mark in the place of its values, a NaN of bits that no arithmetic makes, and all ranks raise once the gather has
# ended. No message more is sent for it.

# Quiet NaNs: by the bytes of an element, and for half types with both exponents.
BITS = {4: (torch.int32, 0x7FD1BAD5), 2: (torch.int16, 0x7FD1)}


class Marks:
    """Of the gathers of one unit, one at a time."""

    def __init__(self, name: str, *, rank: int, shards: int, is_job: bool) -> None:
        """For messages the unit's name and this rank; ``shards`` ranks, perhaps all of the job, give a part each."""
        self._is_job = is_job
        self._name, self._rank, self._shards = name, rank, shards
        self._error: TierError | None = None

    def read(self, read: Callable[[Tensor], None], into: Tensor) -> None:
        """Call ``read`` with ``into``, (shard_numel,), which is marked where that fails."""
        self._error = None
        try:
            read(into)
        except TierError as error:
            self._error = error
            kind, bits = BITS[into.element_size()]
            with torch.no_grad():
                into.view(kind).fill_(bits)

    def found(self, flat: Tensor) -> TierError | None:
        """What all ranks are to raise, if one of them has marked its part of ``flat``, (padded_numel,)."""
        kind, bits = BITS[flat.element_size()]
        firsts = flat.detach().view(kind).view(self._shards, -1)[:, :1]
        ranks = [rank for rank, first in enumerate(firsts.flatten().tolist()) if first == bits]
        if not ranks:
            return None
        if self._error is not None:
            error = TierError(
                f"rank {self._rank}: parameters of unit {self._name!r}: {self._error}"
            )
        else:
            error = TierError(
                f"rank {self._rank}: parameters of unit {self._name!r} could not be read from the memory tier of "
                f"rank(s) {ranks}, which say why"
            )
        error.agreed = self._is_job
        return error


CUT_OFF = (
    "the last `with hpczero.gathered(model)` block was left by an exception, or refused, after parameters had been "
    "changed, or an optimizer.step() or a load on a memory tier was cut off"
)


class UnitState(Enum):
    """Where the whole parameters are."""

    SHARDED = auto()
    RETAINED = auto()  # as SHARDED for what ranks do together; for this rank's program as WHOLE
    GATHERING = auto()
    WHOLE = auto()


class WholeParameters:
    """The whole parameters of one unit; built empty, filled by ``load``.

    Attributes:
        spec, parameters: names, shapes and places; the model's own parameter objects, in slot order.
        state: whether they are whole.
        shared: whether the ranks of a node see one copy of the buffer.
        lasts: whether the buffer keeps its content while the parameters are sharded.
        mine: this rank's slice of the buffer.
        watch: over them, with their guards.
        late: values of an update that are on their way.
        holds: how many ``gathered`` blocks are open.
        doubtful: why nobody may use them: changes were cut off, say, and what is kept of them depends on the transport.
            Empty where they are certain.
        by_rows: whether passes read rows by lookups, and never need the whole.
    """

    by_rows = False

    def __init__(
        self,
        spec: UnitSpec,
        parameters: Sequence[nn.Parameter],
        plan: Plan,
        comm: Collectives,
        *,
        given_back: bool = False,
    ) -> None:
        """Allocate the buffer. Collective on transports that share memory.

        ``plan`` says stage and precision. ``given_back``: its memory is, while the parameters are sharded, on every
        transport. So it is with a codec, and of tables.
        """
        self.parameters = list(parameters)
        self.state = UnitState.WHOLE
        self.spec = spec
        self._comm = comm
        stage, precision = plan.stage, plan.precision
        self._sharded = stage.shards_parameters
        self._plan, self._coded = plan, self._sharded and precision.gather != "exact"
        self._draw: int | None = None  # which draws the codes of the values as they are
        layout, index = spec.layout, comm.group.index
        own = spec.codec is not None or self.by_rows  # each rank's own, on every transport
        self.mine = slice(index * layout.shard_numel, (index + 1) * layout.shard_numel)
        in_flight = self._sharded and (given_back or own or not comm.footprint.lasting)
        self._buffer = comm.allocate(
            layout.padded_numel,
            DTYPES[precision.param],
            category="unsharded" if in_flight else "parameters",
            # A replicated optimizer writes the whole buffer: then every rank needs one of its own.
            use=Use.GATHER if stage.shards_optimizer and not own else Use.PRIVATE,
            keep=not in_flight,
        )
        self.shared = self._buffer.shared
        self.lasts = not in_flight
        self._buffer.release()
        self.watch = ParameterWatch(spec, self.parameters, self._buffer, rank=comm.rank)
        replaced = stage.shards_optimizer and not stage.shards_parameters and not self.shared
        # In fp32 the masters are a part of the buffer, and the next update would change what is on its way.
        allowed = comm.footprint.overlap and replaced and precision.has_masters
        self.late = LateUpdate(self.parameters, self.watch.guards, layout, allowed=allowed)
        size, told = layout.num_shards, comm.group.is_job
        self._marks = Marks(spec.name, rank=index, shards=size, is_job=told) if given_back else None
        self._work: Work | None = None
        self._gathered = False  # every rank's newest slice is in the buffer
        self.holds = 0
        self._lent = False  # see [Note: Kept views]
        self.doubtful = ""

    @property
    def flat(self) -> Tensor:
        """(padded_numel,) in the parameter dtype, valid while whole; this rank's slice always, where it ``lasts``."""
        return self._buffer.tensor

    @property
    def flat_of_user(self) -> Tensor:
        """What the parameters are views of now."""
        return self.watch.now

    def load(self, values: Tensor | None) -> None:
        """Make the parameters views of the buffer.

        Args:
            values: (padded_numel,) fp32, equal on all ranks; None: ``update`` follows, which brings them.
        """
        self._buffer.take()
        self.forget_copy()
        if values is not None:
            with torch.no_grad():
                if self.shared:
                    self.flat[self.mine].copy_(values[self.mine])
                else:
                    self.flat.copy_(values)
        self.watch.make()
        self.note_versions()
        if self._sharded:
            self.reshard()
        elif self.shared and values is not None:
            self.update(lambda mine: None)  # it is there
            self.wait_for_update()

    # --- verbs ---------------------------------------------------------------------------------------------------

    def unshard(self, read: Callable[[Tensor], None], *, exact: bool = False) -> None:
        """Start making the parameters whole; nothing if they are, or if it has started. Collective.

        ``read`` puts the newest values of this rank's slice into that slice, (shard_numel,). ``exact``: no codes, for
        whoever takes the values out or changes them, and does not compute with them.
        """
        self.check_certain()
        if self.state not in (UnitState.SHARDED, UnitState.RETAINED):
            return
        if self._gathered and self.lasts:
            self.state = UnitState.GATHERING
            return
        self._buffer.take()
        codes = None if exact or not self._coded else self._codes()
        if codes is not None:
            # Ranks that share the buffer may still compute with what the codes of before have left there.
            self._start_gather(self.flat, again=True, read=read, codes=codes)
        else:
            if self._marks is None:
                read(self.flat[self.mine])
            else:
                self._marks.read(read, self.flat[self.mine])
            self._start_gather(self.flat, again=not (exact and self._coded))
        self.state = UnitState.GATHERING  # not before: memory may run out

    def _codes(self) -> SentCodes | None:
        """As what the parameters travel between nodes; a unit that was frozen may train by now."""
        coding = self._plan.coding(self.spec, gathers=True)
        if coding is None:
            return None
        # One draw until the values change: forward and backward compute with the same.
        if self._draw is None:
            self._draw = self._comm.calls.step
        return SentCodes(coding, f"step {self._draw}, values of {self.spec.name}")

    def _start_gather(
        self,
        flat: Tensor,
        *,
        again: bool = False,
        read: Callable[[Tensor], None] | None = None,
        codes: SentCodes | None = None,
    ) -> None:
        """Start to bring all ranks' slices of ``flat`` together; arguments as of ``all_gather``. Collective."""
        try:
            self._work = self._comm.all_gather(
                flat, name=self.spec.name, again=again, read=read, codes=codes
            )
        except BaseException as error:  # whatever a signal handler of the program's own raises
            if self._comm.group.size > 1:  # else nothing was sent
                self.doubt(f"{type(error).__name__} cut off the gather of unit {self.spec.name!r}")
            raise
        self._gathered = True

    def wait_for_unshard(self, *, given_up: bool = False) -> None:
        """Return when the parameters are whole. ``given_up``: nobody is going to use them.

        Raises:
            TierError: on every rank; one of them could not read its part. They are sharded again then.
        """
        self.late.settle()
        if self.state is not UnitState.GATHERING:
            return
        self._wait()
        for guard in self.watch.guards:
            guard.open()
        self.state = UnitState.WHOLE
        error = None if self._marks is None or given_up else self._marks.found(self.flat)
        if error is not None:
            self.forget_copy()
            holds, self.holds = self.holds, 0
            self.reshard()
            self.holds = holds
            raise error

    def reshard(self, *, retain: bool = False) -> None:
        """Give the whole parameters back where the stage shards them and nobody holds them; nothing otherwise.

        Args:
            retain: this rank goes on using them. The next ``unshard`` is collective all the same, since other ranks may
                have no reason to: it brings the same values again.
        """
        if not self._sharded or self.state is UnitState.SHARDED or self.holds:
            return
        self.wait_for_unshard(given_up=not retain)
        if retain:
            self.state = UnitState.RETAINED
            return
        if not self.shared and (self._lent or self._buffer.pinned):
            self._buffer.renew()
            self.watch.point_at(self.flat)
        self._lent = False
        for guard in self.watch.guards:
            guard.close()
        self._buffer.release()
        self.state = UnitState.SHARDED

    def update(self, read: Callable[[Tensor], None]) -> None:
        """Every rank's slice has new values. Collective where the buffer keeps them.

        ``wait_for_update`` follows where the parameters are whole. ``read`` puts this rank's values into its slice.
        """
        self.late.settle()
        self.forget_copy()
        self._gathered = False
        if self.lasts:
            read(self.flat[self.mine])
            self._work = self._comm.all_gather(self.flat, name=self.spec.name)
            self._gathered = True

    def forget_copy(self) -> None:
        """The values are others from now on: what the transport keeps of them must not serve the next unshard."""
        if self._comm.secondary is not None:
            self._comm.secondary.forget(self.spec.name)
        self._draw = None

    def draw_anew(self, number: int) -> None:
        """``number`` draws the codes of the values of now: the step that they are for, whoever asks first."""
        self._draw = number

    def wait_for_update(self, *, late: bool = False) -> None:
        """Return when parameters that stay whole have the values of ``update``; with ``late`` whoever asks may wait."""
        work = self._work
        if work is not None and late and self.late.put_off(self.flat, work.wait):
            self._work = None
        elif self.state is UnitState.WHOLE:
            self._wait()

    def note_step(self, positions: Sequence[int]) -> None:
        """An optimizer has changed these: a graph made before may not need their values any more, as in torch."""
        torch.autograd.graph.increment_version([self.parameters[place] for place in positions])
        self.note_versions()

    def _wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None

    # --- access by the user --------------------------------------------------------------------------------------

    def hold(self) -> None:
        """Keep the parameters whole, whatever runs, until as many calls of ``let_go``; the user may write to them."""
        self.holds += 1
        if self.shared:
            self.watch.copy()
        if self.holds == 1:
            self.watch.note_bits()

    def let_go(self, *, retain: bool = False, in_use: bool = False) -> None:
        """End one ``hold``; after the last one see ``reshard``, unless a call that goes on has them ``in_use``."""
        self.holds -= 1
        if self.holds:
            return
        if self.watch.end_copy():
            self.watch.note_versions()
        elif self._sharded:
            self.lend()
            self.watch.note_versions()
        if not in_use:
            self.reshard(retain=retain)

    def lend(self) -> None:
        """The memory has views that outlive ``reshard``. See [Note: Kept views]."""
        self._lent = True

    def is_seen_by(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is a view of the whole parameters."""
        return bool(torch._C._is_alias_of(tensor, self.flat_of_user))  # type: ignore[attr-defined]

    def leave(self) -> None:
        """The model is released: what is whole becomes memory of this rank's own."""
        self.wait_for_unshard()
        if self.shared and self.state in (UnitState.WHOLE, UnitState.RETAINED):
            self.watch.point_at(self.flat.clone())
        for guard in self.watch.guards:
            guard.leave()

    def doubt(self, why: str = CUT_OFF) -> None:
        """What was changed is lost or not; see ``doubtful``. Afterwards values can be set as ever."""
        self.doubtful = why
        if not (self._sharded or self.holds) and self.watch.moved():
            self.watch.point_at(self.flat)

    def check_certain(self) -> None:
        """Raises StepError where the parameters are ``doubtful``."""
        if self.doubtful:
            raise StepError(
                f"rank {self._comm.rank}: {self.doubtful}; load a checkpoint, or repeat the change in a "
                "`with hpczero.gathered(model, modifier_rank=0):` that ends well"
            )

    def note_versions(self) -> None:
        """What the parameters hold now is right."""
        self.doubtful = ""
        self.watch.note_versions()

    def check_untouched(self) -> None:
        """Raise if a parameter was changed or moved behind the unit's back, or is about to be.

        Raises:
            StepError: names the parameter.
        """
        if self.holds:
            raise StepError(
                f"rank {self._comm.rank}: optimizer.step() inside `with hpczero.gathered(model):` would leave "
                "old values in the gathered parameters; take the step outside"
            )
        self.check_values()

    def check_values(self) -> None:
        """Raises StepError if masters lack what parameters show. Inside a ``hold`` changes count at its end only."""
        self.check_certain()
        if self._buffer.moved:
            raise StepError(
                f"rank {self._comm.rank}: torch moved the parameters of {self.spec.name!r} to other memory since "
                "zeroify, as model.share_memory() and torch.multiprocessing's queues do, and the ranks of the node "
                "share the old one; give a queue copies (value.clone()), or take transport flat "
                "(HPCZERO_TRANSPORT=flat)"
            )
        if not (self.holds or self.late.pending):
            self.watch.check_guards()
            self.watch.check_values()
