"""GradientNorms: norms of the mean gradient, of all of it and of single parameters.

Owns: what each rank adds to a norm, and how long norms stay true. Must not know: optimizers, who clips, when. The sums
over elements are in `norm.py`.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from hpczero.comm.collectives import Collectives
from hpczero.errors import ConfigError, StepError
from hpczero.job.group import Group
from hpczero.kernels.norm import (
    largest,
    largest_magnitude,
    square_sums,
    squares,
    sum_of_powers,
    sum_of_squares,
)
from hpczero.zero.units.unit import Unit

# Readings: numbers that a program wants of a step, read together with those that the step asks for itself.
#
# Whoever asks a tensor on a device for a number waits until the device has come that far. A step asks once anyway, for
# the norm or for whether gradients are finite. What a program wants to know of the same step, its loss above all, comes
# along then (issue 20, 2).


class Reading:
    """A number that is read when it is asked for, or with others before that."""

    def __init__(self, tensor: Tensor, waiting: WeakSet[Reading]) -> None:
        """``tensor``: 0-dimensional, fp64, of its own; ``waiting``: where it stands until it is read."""
        self._tensor: Tensor | None = tensor
        self._waiting = waiting
        self._number = 0.0

    def __call__(self) -> float:
        """The number. It waits for the device where nothing has read it yet."""
        if self._tensor is not None:
            beside = {
                each: there
                for each in self._waiting
                if (there := each.on(self._tensor.device)) is not None
            }
            found = torch.stack([*beside.values()]).tolist()
            for reading, number in zip(beside, found, strict=True):
                reading.take(number)
        return self._number

    def take(self, number: float) -> None:
        """It was read."""
        self._tensor, self._number = None, number
        self._waiting.discard(self)

    def on(self, device: torch.device) -> Tensor | None:
        """What is to be read, if it is there."""
        tensor = self._tensor
        return tensor if tensor is not None and tensor.device == device else None


class Readings:
    """Of one model. Nothing here is collective."""

    def __init__(self) -> None:
        self._waiting: WeakSet[Reading] = WeakSet()  # what nobody has, nobody asks for

    def add(self, tensor: Tensor) -> Reading:
        """One number, as it is now.

        Args:
            tensor: one element of any real dtype on any device.

        Raises:
            ConfigError: it has another number of elements, or is complex.
        """
        if tensor.numel() != 1 or tensor.is_complex():
            raise ConfigError(
                f"a number to read later: got {tuple(tensor.shape)} {tensor.dtype}, expected one real element; take "
                "the mean or the sum before"
            )
        # A copy: what the program does to the tensor afterwards is not meant.
        with torch.inference_mode(False), torch.no_grad():
            own = tensor.detach().reshape(()).to(torch.float64, copy=True)
        reading = Reading(own, self._waiting)
        self._waiting.add(reading)
        return reading

    def read(self, numbers: Sequence[Tensor]) -> list[float]:
        """These numbers, and whatever waits on their device, in one transfer.

        Args:
            numbers: 0-dimensional, of one dtype on one device. Without any there is no transfer.

        Returns:
            Of ``numbers`` alone; the others have theirs.
        """
        if not numbers:
            return []
        wanted = torch.stack(list(numbers))
        beside = {
            reading: tensor
            for reading in self._waiting
            if (tensor := reading.on(wanted.device)) is not None
        }
        if beside:
            wanted = torch.cat([wanted.double(), torch.stack([*beside.values()])])
        found: list[float] = wanted.tolist()
        for reading, number in zip(beside, found[len(numbers) :], strict=True):
            reading.take(number)
        return found[: len(numbers)]


class GradientNorms:
    """All methods but ``forget`` are collective over topology.world.

    Attributes:
        readings: numbers that are read with those of a norm.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        comm: Collectives,
        model_ranks: Group,
        check: Callable[[], None],
    ) -> None:
        """Not collective.

        Args:
            units: the trainable ones.
            comm: the transport.
            model_ranks: the ranks that hold one copy of the model together.
            check: raises StepError where gradients are not reduced over ranks.
        """
        self._units = list(units)
        self._comm, self._model_ranks = comm, model_ranks
        self._check = check
        self.readings = Readings()
        # By order, with the versions of the gradients they are of; a norm is taken out when asked for: see of_slot.
        self._of_slots: dict[float, tuple[dict[tuple[Unit, int], float], list[int]]] = {}
        self._finite: list[int] | None = (
            None  # versions of the gradients when they were last known to be
        )

    def follow(self, units: Sequence[Unit]) -> None:
        """``units`` are the trainable ones from now on."""
        self._units = list(units)
        self.forget()

    def forget(self) -> None:
        """The gradients changed."""
        self._of_slots.clear()
        self._finite = None

    def note_finite(self) -> None:
        """The gradients, as they are now, are finite on all ranks."""
        self._finite = self._versions

    @property
    def are_finite(self) -> bool:
        """Whether a norm has shown it of the gradients as they are now; a pass over them is not needed then."""
        return self._finite is not None and self._finite == self._versions

    @property
    def _versions(self) -> list[int]:
        return [unit.gradients.version for unit in self._units]

    def of_all(self, norm_type: float) -> float:
        """Norm over all parameters, the same bits on every rank and in every stage.

        Right to fp64 rounding, so it is also that of any other number of ranks but for the last digits.

        Args:
            norm_type: 2.0 or inf.

        Raises:
            ConfigError: another norm.
            StepError: gradients of ``no_sync`` wait for a reduction.
        """
        if norm_type not in (2.0, math.inf):
            raise ConfigError(f"norm_type: got {norm_type!r}, expected 2.0 or inf")
        self._check()
        square = norm_type == 2.0
        mine, others = self._squares() if square else self._largest()
        if square:  # in each step of training: no list of all ranks
            of_part = self._comm.total(mine, name="grad_norm")
        else:
            everybody = self._comm.share(np.array([mine]), name="grad_norm")[:, 0].tolist()
            of_part = largest(everybody)
        parts = self._model_ranks.share(np.array([of_part]))[:, 0].tolist()
        norm = math.sqrt(math.fsum(parts)) if square else largest(parts)
        # What another rank counts, the norm says nothing of.
        if math.isfinite(norm) and math.isfinite(others):
            self.note_finite()
        return norm

    def _squares(self) -> tuple[float, float]:
        """Sums of squares of this rank's gradients: what it adds to the norm, and what another rank adds.

        Those in memory at once, with one transfer from a device.
        """
        present = [unit for unit in self._units if unit.gradients.present]
        near = [unit for unit in present if unit.gradients.rest.resident]
        sums = square_sums([part for unit in near for part in counted(unit)])
        others = [u for u in near if u.spec.uncounted]
        of_others = square_sums([p for u in others for p in pieces_of(u, u.spec.uncounted)])
        numbers = self.readings.read([*sums, *of_others])
        found, beside = numbers[: len(sums)], numbers[len(sums) :]
        for unit in present:
            if not unit.gradients.rest.resident:
                found += squares_of(unit)
                if unit.spec.uncounted:
                    with unit.gradients.rest.at_hand():
                        beside += squares(pieces_of(unit, unit.spec.uncounted))
        return math.fsum(found), math.fsum(beside)

    def _largest(self) -> tuple[float, float]:
        """Largest magnitude of what this rank adds to the norm; NaN for what another rank adds, which is not looked at.

        0 where it adds nothing.
        """
        present = [unit.gradients for unit in self._units if unit.gradients.present]
        near = [each.owned for each in present if each.rest.resident]
        found = [largest_magnitude(near, self.readings.read)]
        for each in present:
            if not each.rest.resident:
                with each.rest.at_hand():
                    found.append(largest_magnitude([each.owned]))
        others = any(unit.spec.uncounted and unit.gradients.present for unit in self._units)
        return largest(found), math.nan if others else 0.0

    def of_slot(self, unit: Unit, position: int, order: float) -> float:
        """Norm over one parameter, the same bits on every rank.

        The first to be asked for is computed with those of all parameters, in one exchange: torch asks for one after
        the other. Each is kept until it is asked for, once, or until gradients change. So all ranks come to an exchange
        at the same call, also where a change through the optimizer's groups is seen by those alone that own a piece. Of
        every order there is one such set, so that several may be asked for by turns; at an exchange all ranks forget
        the other sets if one of them has seen a change.

        Args:
            unit: of the parameter; ranks ask for the same ones in the same order.
            position: of it in the unit.
            order: above 0, or inf.

        Raises:
            StepError: gradients of ``no_sync`` wait for a reduction, or were changed through the optimizer's groups
                between the norms of two parameters.
        """
        self._check()
        if self._model_ranks.size > 1:
            raise StepError(
                f"rank {self._comm.rank}: the norm of one parameter's gradient, or torch's clip_grad_norm_, in a model "
                f"that {self._model_ranks.size} ranks hold together: this rank has a part of it. Use "
                "hpczero.clip_grad_norm_(model, max_norm), which takes all parts once"
            )
        versions = self._versions
        kept, known = self._of_slots.get(order, ({}, versions))
        if (unit, position) not in kept:
            kept = self._exchange(order, versions)
        elif versions != known:
            raise StepError(
                "gradients in optimizer.param_groups were changed between the norms of two parameters; take the norms "
                "of all parameters before a change or after it"
            )
        return kept.pop((unit, position))

    def _exchange(self, order: float, versions: list[int]) -> dict[tuple[Unit, int], float]:
        """All norms of one order, kept from now on."""
        slots = [
            (unit, place) for unit in self._units for place in range(len(unit.gradients.usage))
        ]
        changed = any(known != versions for _, known in self._of_slots.values())
        norms, changed = self._share(slots, order, changed)
        if changed:
            self._of_slots.clear()
        kept = dict(zip(slots, norms, strict=True))
        self._of_slots[order] = kept, versions
        return kept

    def _share(
        self, slots: Sequence[tuple[Unit, int]], order: float, changed: bool
    ) -> tuple[list[float], bool]:
        """The norms, and whether ``changed`` is true on any rank."""
        mine = []
        for unit, of_unit in itertools.groupby(slots, key=lambda slot: slot[0]):
            positions = [position for _, position in of_unit]
            with unit.gradients.rest.at_hand() if unit.gradients.present else nullcontext():
                for position in positions:
                    pieces = unit.gradients.pieces_at(position, owned=True)
                    if math.isinf(order):
                        mine.append(largest_magnitude(pieces))
                    elif order == 2.0:
                        mine.append(sum_of_squares(pieces))
                    else:
                        mine.append(sum_of_powers(pieces, order))
        shared = self._comm.share(np.array([*mine, float(changed)]), name="gradient norms")
        *everybody, changes = shared.T.tolist()
        if math.isinf(order):
            norms = [largest(values) for values in everybody]
        else:
            norms = [math.fsum(values) ** (1.0 / order) for values in everybody]
        return norms, any(changes)


def squares_of(unit: Unit) -> list[float]:
    """As ``norm.squares``, of what this rank adds to a norm; not computed where a reduction has left them."""
    known = unit.gradients.rest.squares
    if known is not None and not unit.spec.uncounted:
        return known
    with unit.gradients.rest.at_hand():
        return squares(counted(unit))


def counted(unit: Unit) -> list[Tensor]:
    """Of the gradient that this rank owns what no other rank with the same parameter adds to a norm."""
    if not unit.spec.uncounted:
        return [unit.gradients.owned]
    return pieces_of(
        unit, sorted(set(range(len(unit.spec.layout.slots))).difference(unit.spec.uncounted))
    )


def pieces_of(unit: Unit, slots: Sequence[int]) -> list[Tensor]:
    """What this rank owns of the gradients of these slots."""
    return [part for place in slots for part in unit.gradients.pieces_at(place, owned=True)]


class GradientHistory:
    """Since the gradients were last gone; not collective.

    Attributes:
        incomplete: some gradients are those of a backward that did not finish.
    """

    def __init__(self, units: Sequence[Unit], norms: GradientNorms) -> None:
        """Empty.

        Args:
            units: the trainable ones.
            norms: told that gradients change.
        """
        self._units = list(units)
        self._norms = norms
        self._scalings: list[str] = []
        self._changes = 0  # of all changes of single gradients, in their order
        self.incomplete = False
        self._zeroed: set[int] = set()  # optimizers, since a backward was cut off

    def follow(self, units: Sequence[Unit]) -> None:
        """``units`` are the trainable ones from now on."""
        self._units = list(units)

    def clear(self) -> None:
        """The gradients are gone, and what was done to them is void."""
        self._norms.forget()
        self._scalings.clear()
        self._changes = 0
        self.incomplete = False

    def interruption(self) -> None:
        """A backward did not finish; until all its gradients are gone there is no step."""
        self.incomplete = True
        self._zeroed.clear()

    def zeroed(self, index: int, optimizers: int) -> None:
        """The gradients of optimizer ``index`` of so many are gone, or zero."""
        self._zeroed.add(index)
        if len(self._zeroed) == optimizers:
            self.incomplete = False

    def drop(self) -> None:
        """A gradient is gone."""
        left = (u.gradients.present or u.gradients.waiting for u in self._units)
        self.incomplete = self.incomplete and any(left)

    def scaling(self, what: str) -> None:
        """This rank's gradients were scaled by something that must be equal on all ranks; the step compares it."""
        self._norms.forget()
        if what not in self._scalings:
            self._scalings.append(what)

    def change(self, name: str, what: str) -> None:
        """As ``scaling``, of one parameter's gradient; which ones and in which order is compared too."""
        self.scaling(what)
        self._changes = zlib.crc32(f"{name} {what}".encode(), self._changes)

    @property
    def texts(self) -> list[str]:
        """Equal on all ranks, or one of them has done something that others have not."""
        if not self._changes:
            return list(self._scalings)
        changes = f"changes of parameter.grad, by parameter and order: {self._changes:08x}"
        return [*self._scalings, changes]
