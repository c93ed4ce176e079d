"""ParameterViews: the model's parameters as views of a flat memory, and what the program does to them.

Owns: where they point, the copy that a user writes to, and whether one was changed. Must not know: buffers' lives, when
parameters are whole, stages, MPI.

[Note: Shared memory]
On some transports the ranks of a node see one copy of a unit's buffer. Nobody may then write it but its owner, slice by
slice. While a user may write (``hpczero.gathered``), parameters are therefore views of a copy of this rank's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from hpczero.errors import StepError
from hpczero.kernels.bits import sum_of_bits
from hpczero.plan import UnitSpec
from hpczero.zero.units.watch import Watch


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
