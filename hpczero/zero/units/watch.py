"""Watch: over changes of a unit's parameters that nobody announced.

Owns: their guards, and what they were when they were last right. Must not know: buffers' lives, when parameters are
whole, masters, MPI.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from hpczero.errors import StepError
from hpczero.plan import UnitSpec
from hpczero.zero.units.guard import (
    Guard,
    is_at,
    own_gradient,
    set_own_gradient,
    set_own_gradients,
)

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
