"""Shards: what the optimizer sees of one unit.

Owns: the fp32 parameters in the optimizer's groups, where each lies in the masters, and the watch over changes of them
that nobody announced. Must not know: optimizers, gradients' reduction, MPI.

[Note: Changes of values between steps]
A loop may write to the optimizer's parameters before the step: the step brings the model up to date. What is written
after it would be in this rank's masters and not in the model, at some stages on some ranks only. The next use of the
model finds it by the version counters, which all shards of a unit share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter

import torch
from torch import Tensor, nn

from hpczero.errors import StepError
from hpczero.plan.layout import ShardLayout
from hpczero.zero.units.guard import set_own_data

_trains = attrgetter("requires_grad")


class Shards:
    """The shards of one unit, in the order of its slots.

    Attributes:
        parameters: what the optimizer's groups hold: one for each model parameter this rank owns a part of.
        slots: (parameters,) the slot of each.
        pieces: (parameters,) which rank's piece each is.
        places: (parameters,) where each lies in the master.
        master: (elements of all pieces,) fp32; a program may give it other memory.
    """

    def __init__(self, layout: ShardLayout, master: Tensor, *, start: int, pieces: range) -> None:
        """Not collective.

        Args:
            layout: of the unit.
            master: (elements of ``pieces``,) fp32.
            start: element of the unit at which ``master`` begins.
            pieces: of which ranks.
        """
        self.parameters: list[nn.Parameter] = []
        self.slots: list[int] = []
        self.pieces: list[int] = []
        self._layout = layout
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
