"""ParameterViews: the model's parameters as views of a flat memory, and what the program does to them.

Owns: where they point, the copy that a user writes to, and whether one was changed. Must not know: buffers' lives, when
parameters are whole, stages, MPI.

[Note: Shared memory]
On some transports the ranks of a node see one copy of a unit's buffer. Nobody may then write it but its owner, slice by
slice. While a user may write (``hpczero.gathered``), parameters are therefore views of a copy of this rank's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from hpczero.errors import StepError, TierError
from hpczero.kernels.norm import sum_of_bits
from hpczero.plan import UnitSpec
from hpczero.zero.units.guard import Guard, is_at, own_gradient, set_own_gradient, set_own_gradients

_version = attrgetter("_version")
_trains = attrgetter("requires_grad")


class Watch:
    """Of one unit; nothing here is collective.

    Attributes:
        guards: of the parameters, in slot order.
    """

    def __init__(self, spec: UnitSpec, parameters: Sequence[nn.Parameter], *, rank: int) -> None:
        """Not collective.

        Args:
            spec: names, shapes and places.
            parameters: in slot order.
            rank: of this process, for errors.
        """
        self._slots = spec.layout.slots
        self._parameters = list(parameters)
        self._rank = rank
        self.guards = [Guard(p, slot.name) for p, slot in zip(parameters, self._slots, strict=True)]
        self._versions: list[int] = []
        self._places: list[Any] = []  # memory and form of flat and of each, when last found right

    def note_versions(self) -> None:
        """What the parameters hold now is right."""
        self._versions = self._versions_now()

    def _versions_now(self) -> list[int]:
        with torch._C.DisableTorchFunctionSubclass():  # metadata: no need to ask each guard
            return [*map(_version, self._parameters)]

    @property
    def changed_in_place(self) -> bool:
        """Whether one was, since ``note_versions``, where torch counts it."""
        return self._versions_now() != self._versions

    def moved(self, flat: Tensor) -> list[str]:
        """Names of those that are not the views of ``flat`` that they should be, or have another order of elements."""
        with torch._C.DisableTorchFunctionSubclass():
            places = zip(self._parameters, self._slots, strict=True)
            return [slot.name for p, slot in places if not is_at(p, flat, slot)]

    @property
    def frozen(self) -> list[str]:
        """Names of those that have ``requires_grad=False``."""
        with torch._C.DisableTorchFunctionSubclass():
            if all(map(_trains, self._parameters)):
                return []
            found = zip(self._parameters, self._slots, strict=True)
            return [slot.name for parameter, slot in found if not parameter.requires_grad]

    @property
    def unfrozen(self) -> list[str]:
        """Names of those that have ``requires_grad=True``."""
        with torch._C.DisableTorchFunctionSubclass():
            if not any(map(_trains, self._parameters)):
                return []
            found = zip(self._parameters, self._slots, strict=True)
            return [slot.name for parameter, slot in found if parameter.requires_grad]

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

    def check_values(self, flat: Tensor) -> None:
        """Raises StepError if one was changed in place, or is not the view of ``flat`` that it should be; names it."""
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
                self._check_values(flat)
                self._places = places

    def _check_values(self, flat: Tensor) -> None:
        alias, begins = torch._C._is_alias_of, flat.storage_offset()  # type: ignore[attr-defined]
        seen = zip(self._parameters, self._slots, self._versions, strict=True)
        for parameter, slot, version in seen:
            if parameter._version != version:
                raise StepError(
                    f"rank {self._rank}: parameter {slot.name!r} was changed in place since zeroify, and the "
                    "optimizer's copy was not; change parameters inside `with hpczero.gathered(model, "
                    "modifier_rank=0):`"
                )
            if slot.numel and not (
                alias(parameter, flat)
                and parameter.storage_offset() == begins + slot.offset
                and parameter.shape == slot.shape
                and parameter.is_contiguous()
            ):
                raise StepError(
                    f"rank {self._rank}: parameter {slot.name!r} got new memory since zeroify, or other strides "
                    "(model.to(), .half(), load_state_dict(assign=True), parameter.data = ...?); do that before "
                    "zeroify, or change values inside `with hpczero.gathered(model, modifier_rank=0):`"
                )


# Marks: how a rank whose medium has failed tells its peers so through a gather.
#
# A rank cannot raise where its peers wait for its part of a collective: they would wait for ever. It takes part with a
# mark in the place of its values, a NaN of bits that no arithmetic makes, and all ranks raise once the gather has
# ended. No message more is sent for it (issue 18).

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


class ParameterViews:
    """Of one unit. Nothing here is collective. ``flat`` is the unit's buffer everywhere, (padded_numel,).

    Attributes:
        watch: over the parameters, with their guards.
    """

    def __init__(self, spec: UnitSpec, parameters: Sequence[nn.Parameter], *, rank: int) -> None:
        """Not collective; ``make`` follows.

        Args:
            spec: names, shapes and places.
            parameters: the model's own objects, in slot order.
            rank: of this process, for errors.
        """
        self.watch = Watch(spec, parameters, rank=rank)
        self._slots, self._parameters = spec.layout.slots, list(parameters)
        self._own: Tensor | None = None  # see [Note: Shared memory]
        self._bits = torch.zeros(
            (), dtype=torch.int64, device="cpu"
        )  # of the values at ``note_bits``

    def make(self, flat: Tensor) -> None:
        """Views of ``flat`` instead of what the parameters were, on the meta device, too. Gradients go."""
        views = self._cut(flat)
        for guard, parameter, view in zip(self.watch.guards, self._parameters, views, strict=True):
            if parameter.device.type == "meta":
                # A meta parameter cannot take CPU data; swap the tensors' contents, the object stays.
                empty = torch.empty(0, device=flat.device, dtype=torch.float32)
                real = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                # Keeps a version counter of its own: see device.[Note: Refilling freed parameters].
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

    def now_of(self, flat: Tensor) -> Tensor:
        """What the parameters are views of now: ``flat``, or the copy."""
        return flat if self._own is None else self._own

    def copy(self, flat: Tensor) -> None:
        """Views of a copy of this rank's own until ``end_copy``; nothing if they are. See [Note: Shared memory]."""
        if self._own is None:
            self._own = flat.clone()
            self.point_at(self._own)

    def end_copy(self, flat: Tensor) -> bool:
        """Views of ``flat`` again, without what was written to the copy. Whether there was one."""
        if self._own is None:
            return False
        self._own = None
        self.point_at(flat)
        return True

    def note_bits(self, flat: Tensor) -> None:
        """What the values are now is what ``was_modified`` compares with."""
        self._bits = sum_of_bits(self.now_of(flat))

    def was_modified(self, flat: Tensor) -> bool:
        """Whether a parameter was changed since ``note_bits``, in place (by NumPy, too) or by other memory."""
        if self.moved(flat) or self.watch.changed_in_place:
            return True
        return bool(sum_of_bits(self.now_of(flat)) != self._bits)

    def moved(self, flat: Tensor) -> list[str]:
        """Names of parameters that lie elsewhere than they were put, or in another order of elements."""
        return self.watch.moved(self.now_of(flat))

    def take_over(self, flat: Tensor, renew: Callable[[], Tensor]) -> bool:
        """Values that the user put into other memory, by ``parameter.data = ...``, go where they are looked for.

        The memory of before may still be somebody's: of a backup, or of another parameter that was exchanged for this
        one. It is left to them.

        Args:
            flat: the buffer.
            renew: gives the buffer other memory, of zeros, and returns it.

        Returns:
            Whether the buffer has other memory now.

        Raises:
            StepError: values have another shape or dtype; says which parameter.
        """
        now = self.now_of(flat)
        for parameter, slot in zip(self._parameters, self._slots, strict=True):
            if parameter.shape != slot.shape or parameter.dtype != now.dtype:
                raise StepError(
                    f"parameter {slot.name!r} was given {parameter.dtype} {tuple(parameter.shape)} inside gathered, "
                    f"expected {now.dtype} {slot.shape}; build the model as it shall be before zeroify"
                )
        if not self.moved(flat):
            return False
        values = [parameter.detach().clone() for parameter in self._parameters]
        if self._own is not None:
            self._own = torch.zeros_like(self._own)
        self.point_at(renew() if self._own is None else self._own)
        with torch.no_grad():
            for parameter, value in zip(self._parameters, values, strict=True):
                parameter.copy_(value)
        return self._own is None
