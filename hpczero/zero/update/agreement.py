"""Agreement: what ranks compare before an update, in one exchange."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from weakref import WeakSet

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hpczero.comm.collectives import Collectives
from hpczero.errors import ConfigError, StepError, TierError
from hpczero.job.group import Group, unlike
from hpczero.job.topology import Topology
from hpczero.kernels.norm import (
    EXACT_WORDS,
    exact_square_words,
    largest,
    largest_magnitude,
    numbers_of,
    square_sums,
    squares,
    sum_of_bits,
    sum_of_powers,
    sum_of_squares,
)
from hpczero.zero.calls.advice import Advice
from hpczero.zero.units.gradients import Flags
from hpczero.zero.units.unit import Unit

# Readings: numbers that a program wants of a step, read together with those that the step asks for itself.
#
# Whoever asks a tensor on a device for a number waits until the device has come that far. A step asks once anyway, for
# the norm or for whether gradients are finite. What a program wants to know of the same step, its loss above all, comes
# along then.


class DeferredNumber:
    """A number that is read when it is asked for, or with others before that."""

    def __init__(self, tensor: Tensor, readings: Readings) -> None:
        """``tensor``: 0-dimensional, fp64, of its own."""
        self._tensor, self._readings = tensor, readings
        self._number: float | None = None

    def __call__(self) -> float:
        """The number. It waits for the device where nothing has read it yet."""
        if self._number is None:
            self._readings.read([self._tensor])  # itself among what waits there
        assert self._number is not None, "it was read"
        return self._number


class Readings:
    """Numbers of one model that wait to be read. Nothing here is collective."""

    def __init__(self) -> None:
        self._waiting: WeakSet[DeferredNumber] = WeakSet()  # what nobody has, nobody asks for

    def add(self, tensor: Tensor) -> DeferredNumber:
        """The number in ``tensor``, one element of any real dtype, as it is now; ConfigError for any other tensor."""
        if tensor.numel() != 1 or tensor.is_complex():
            raise ConfigError(
                f"a number to read later: got {tuple(tensor.shape)} {tensor.dtype}, expected one real element; take "
                "the mean or the sum before"
            )
        # A copy: what the program does to the tensor afterwards is not meant.
        with torch.inference_mode(False), torch.no_grad():
            own = tensor.detach().reshape(()).to(torch.float64, copy=True)
        reading = DeferredNumber(own, self)
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
        beside = [each for each in self._waiting if each._tensor.device == wanted.device]
        if beside:
            wanted = torch.cat([wanted.double(), torch.stack([each._tensor for each in beside])])
        found: list[float] = wanted.tolist()
        for reading, number in zip(beside, found[len(numbers) :], strict=True):
            reading._number = number
            self._waiting.discard(reading)
        return found[: len(numbers)]


class GradientNorms:
    """Norms of the gradients of one model. All methods but ``forget`` are collective over topology.world.

    Attributes:
        readings: numbers that are read with those of a norm.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        comm: Collectives,
        model_ranks: Group,
        check: Callable[[], None],
        *,
        exact: bool = False,
    ) -> None:
        """Not collective.

        Args:
            units: the trainable ones; the caller changes the list where other units train, and calls ``forget``.
            comm: the transport.
            model_ranks: the ranks that hold one copy of the model together.
            check: raises StepError where gradients are not reduced over ranks.
            exact: whether the norm of all has the same bits on any number of ranks.
        """
        self._exact = exact
        self._units = units
        self._comm, self._model_ranks = comm, model_ranks
        self._check = check
        self.readings = Readings()
        # By order, with the versions of the gradients they are of; a norm is taken out when asked for: see of_slot.
        self._of_slots: dict[float, tuple[dict[tuple[Unit, int], float], list[int]]] = {}
        # Versions of the gradients when they were last known to be finite.
        self._finite: list[int] | None = None

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
        """Norm over all parameters, of order 2.0 or inf; the same bits on every rank and in every stage.

        Right to fp64 rounding, so it is also that of any other number of ranks but for the last digits; with ``exact``
        those too.

        Raises:
            ConfigError: another order.
            StepError: gradients of ``no_sync`` wait for a reduction.
        """
        if norm_type not in (2.0, math.inf):
            raise ConfigError(f"norm_type: got {norm_type!r}, expected 2.0 or inf")
        self._check()
        square = norm_type == 2.0
        if square and self._exact:
            return self._exact_norm()
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

    def _exact_norm(self) -> float:
        """Of order 2, the same bits on any number of ranks: see kernels/norm.py."""
        top = self.of_all(math.inf)  # which notes that all are finite
        if not math.isfinite(top) or not top:
            return top
        present = [unit for unit in self._units if unit.gradients.present]
        near = [unit for unit in present if unit.gradients.rest.resident]
        words = exact_square_words([part for unit in near for part in counted(unit)], top)
        found = self.readings.read(words)
        for unit in present:
            if not unit.gradients.rest.resident:
                with unit.gradients.rest.at_hand():
                    found += numbers_of(exact_square_words(counted(unit), top))
        of_part = self._comm.total(*found, name="grad_norm")
        return math.sqrt(math.fsum(self._model_ranks.share(np.array([of_part]))[:, 0].tolist()))

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

        Ranks ask for the same parameters in the same order. ``order``: above 0, or inf.

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
        if self._exact and not math.isinf(order):
            return self._share_exactly(slots, order, changed)
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

    def _share_exactly(
        self, slots: Sequence[tuple[Unit, int]], order: float, changed: bool
    ) -> tuple[list[float], bool]:
        """As ``_share``, with the same bits on any number of ranks; of order 2."""
        if order != 2.0:
            raise StepError(
                f"exact: a norm of order {order:g} of parameter.grad depends on the number of ranks; take order 2 or "
                "inf"
            )
        tops, changed = self._share(slots, math.inf, changed)
        mine = np.zeros((len(slots), EXACT_WORDS))
        for words, (unit, place), top in zip(mine, slots, tops, strict=True):
            if math.isfinite(top) and top and unit.gradients.present:
                with unit.gradients.rest.at_hand():
                    pieces = unit.gradients.pieces_at(place, owned=True)
                    found = numbers_of(exact_square_words(pieces, top))
                words[: len(found)] = found
        shared = self._comm.share(mine.ravel(), name="gradient norms")
        sums = shared.reshape(len(shared), len(slots), EXACT_WORDS).transpose(1, 0, 2)
        norms = [math.sqrt(math.fsum(of_slot.ravel())) for of_slot in sums]
        return [n if math.isfinite(t) else t for n, t in zip(norms, tops, strict=True)], changed


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
        """``units``: the trainable ones, as of ``norms``, which is told that gradients change."""
        self._units = units
        self._norms = norms
        self._scalings: list[str] = []
        self._changes = 0  # of all changes of single gradients, in their order
        self.incomplete = False
        self._zeroed: set[int] = set()  # optimizers, since a backward was cut off

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
        """As ``scaling``, of one parameter's gradient; ranks compare which parameters, and in which order."""
        self.scaling(what)
        self._changes = zlib.crc32(f"{name} {what}".encode(), self._changes)

    @property
    def texts(self) -> list[str]:
        """Equal on all ranks, or one of them has done something that others have not."""
        if not self._changes:
            return list(self._scalings)
        changes = f"changes of parameter.grad, by parameter and order: {self._changes:08x}"
        return [*self._scalings, changes]


# Replicas: values and gradients that every rank holds whole and updates by itself, which must stay the same bits.
#
# At stage 0 nothing brings ranks together again after an update. Noise drawn with a seed of its own on each rank, in
# the optimizer or in what a loop adds to a gradient, would let them drift apart for ever. One pass over memory per step
# finds it (see bits).


class Replicas:
    """Of the trainable units of one model. Where the optimizer is sharded there are none."""

    def __init__(self, units: Sequence[Unit], comm: Collectives) -> None:
        self._units = list(units)
        self._comm = comm

    def word(self) -> int:
        """A uint32 that is equal on all ranks where all they hold is; not collective. One transfer from a device."""
        return zlib.crc32(np.array(self._sums(), dtype=np.int64).tobytes())

    def check(self) -> None:
        """Raise StepError on every rank if ranks hold different replicas. Collective over world."""
        mine = np.array(self._sums(), dtype=np.int64)
        if not len(mine) or self._comm.everybody.size == 1:
            return
        # Bytes as numbers: those of an int64 may be a NaN, which equals nothing, or more than an fp64 tells apart.
        everybody = self._comm.share(
            mine.view(np.uint8).astype(np.float64), name="replicas", replicas=True
        )
        with self._comm.everybody.agreed("compare what ranks have updated"):
            differ = (everybody[self._comm.everybody.rank] != everybody[0]).reshape(-1, 2, 8)
            of_units = differ.any(axis=2)
            if of_units.any():
                first = int(of_units.any(axis=1).argmax())
                what = "parameters" if of_units[first, 0] else "gradients"
                raise StepError(
                    f"rank {self._comm.rank}, step {self._comm.calls.step}: the {what} of unit "
                    f"{self._units[first].spec.name!r} that the optimizer holds are not those of rank 0, and at stage "
                    "0 every rank updates all of them by itself (random numbers with a seed of each rank's own, in "
                    "the optimizer or in what is done to optimizer.param_groups?). Use stage=1, which costs nothing "
                    "more, or draw the same random numbers on all ranks"
                )

    def _sums(self) -> list[int]:
        """(units * 2,) of the values and of the gradients of each."""
        if self._comm.everybody.size == 1:
            return []
        held = list(itertools.chain.from_iterable(unit.replicas for unit in self._units))
        if not held:
            return []
        return [int(total) for total in torch.stack([sum_of_bits(t) for t in held]).tolist()]


# TensorCopies: what tensor ranks hold whole, each for itself, and must do alike: gradients and optimizers' options.
#
# Every tensor rank steps norms, some biases and positions by itself. Their gradients are equal as long as all have the
# same samples, targets and loss, and as long as the rule says of every layer where it stands. Where one of that is not
# so, no shape need be wrong, and each rank would train a model of its own without a word. One norm for each such
# parameter and step finds it. Kernels that add in no fixed order may round differently, so norms may differ a little.
#
# Gradients that rest on a memory tier have to be brought for it. All are at the first step, where a wrong rule shows
# before anything is updated. After that one unit is at each step, by turns.
#
# Of all norms together. What rounding does is below a thousandth, in half precision too.
MOST_OFF = 1e-2


class TensorCopies:
    """Of the trainable units of one model, whose tensor ranks are compared."""

    def __init__(self, units: Sequence[Unit], topology: Topology) -> None:
        self._topology = topology
        self._slots = [(unit, place) for unit in units for place in unit.spec.kept]
        self._away = [u for u in units if u.spec.kept and not u.gradients.rest.resident]
        self._compared = 0  # times; the same number on all ranks

    def error(self, options: Sequence[str]) -> StepError | None:
        """What differs, the same on each of the tensor ranks; None where nothing does. Collective over them.

        ``options``: texts that must be equal.
        """
        group = self._topology.tensor
        if group.size == 1:
            return None
        word = zlib.crc32("\n".join(options).encode())
        found = group.share(np.array([self._topology.shard_index, word, *self._norms()]))
        if (found[:, 1] != found[0, 1]).any():
            here = "; ".join(options)
            return StepError(
                f"rank {self._topology.rank}: ranks that share the layers of one model (mesh: tensor) have other "
                f"options of the optimizer, or have changed gradients otherwise; here {here}. Give all of them the "
                "same numbers: a scheduler the same loss, clip_grad_norm_ the same max_norm"
            )
        if (found[:, 0] != found[0, 0]).any():
            return None  # shards of other elements
        return self._unequal(found[:, 2:])

    def _norms(self) -> list[float]:
        """Of what this rank owns of each gradient; one transfer from a device. 0 where it is not this one's turn."""
        near = {u for u, _ in self._slots if u.gradients.rest.resident}
        found, owners = self._norms_in(near)
        for unit in self._turn():
            with unit.gradients.rest.at_hand() if unit.gradients.present else nullcontext():
                norms, places = self._norms_in([unit])
            found += norms
            owners += places
        squares = np.zeros(len(self._slots))
        if found:
            np.add.at(squares, owners, np.square(torch.stack(found).double().cpu().numpy()))
        roots: list[float] = np.sqrt(squares).tolist()
        return roots

    def _norms_in(self, units: Collection[Unit]) -> tuple[list[torch.Tensor], list[int]]:
        """Norms of pieces in memory, and which slot each is of."""
        found, owners = [], []
        for index, (unit, place) in enumerate(self._slots):
            if unit in units and unit.gradients.present:
                parts = unit.gradients.pieces_at(place, owned=True)
                norms = [torch.linalg.vector_norm(part.detach()) for part in parts if part.numel()]
                found += norms
                owners += [index] * len(norms)
        return found, owners

    def _turn(self) -> Sequence[Unit]:
        """Whose gradients are brought this time, of those that rest elsewhere; the same on all ranks."""
        self._compared += 1
        if not self._away or self._compared == 1:
            return self._away
        return [self._away[self._compared % len(self._away)]]

    def _unequal(self, norms: npt.NDArray[np.float64]) -> StepError | None:
        """Judge (tensor ranks, slots). What is not finite is left to those who skip steps."""
        finite = np.isfinite(norms).all(axis=0)
        norms = np.where(finite, norms, 0.0)
        off = np.abs(norms - norms[0])
        if not (off.sum(axis=1) > MOST_OFF * norms.sum(axis=1).max(initial=0.0)).any():
            return None
        rank, slot = np.unravel_index(int(off.argmax()), off.shape)
        unit, place = self._slots[slot]
        return StepError(
            f"rank {self._topology.rank}: the gradient of {unit.spec.layout.slots[place].name!r}, which all ranks hold "
            f"that share the layers of one model, has the norm {norms[rank, slot]:.6g} on tensor rank {rank} and "
            f"{norms[0, slot]:.6g} on tensor rank 0, expected the same. Give all of them the same samples, targets and "
            "loss, and the same seed for whatever is dropped outside of nn.Dropout. If they have, the rule of split is "
            "wrong about a layer: one within cut features is Kept.INSIDE, and what counts heads belongs to Rule.counts"
        )


Slots = Mapping[Unit, Sequence[int]]
"""Of units the positions of some of their parameters."""


class Agreement:
    """Of the ranks that train one model. All methods are collective over the topology's world.

    Ranks that hold the same part of the model compare what they have set, and which parameters were used.
    Tensor ranks compare what each of them holds whole. Ranks that hold other parts of one copy then learn what matters
    to all: errors, and gradients that are not finite.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        comm: Collectives,
        topology: Topology,
        advice: Advice,
        readings: Readings,
    ) -> None:
        """``units``: the trainable ones; ``readings`` are read with whether gradients are finite. Not collective."""
        self._comm, self._topology = comm, topology
        self._advice, self._readings = advice, readings
        self.follow(units)

    def follow(self, units: Sequence[Unit]) -> None:
        """``units`` are the trainable ones from now on. Not collective."""
        self._units = list(units)
        self.replicas = Replicas(self._units, self._comm)
        self._copies = TensorCopies(self._units, self._topology)

    def reach(
        self,
        options: Sequence[str],
        owned: Sequence[Slots],
        *,
        error: StepError | TierError | None,
        known_finite: bool,
    ) -> tuple[list[bool], list[Flags]]:
        """One exchange: same options on all ranks, every gradient finite, and which parameters were used.

        Args:
            options: what must be equal on all ranks, as texts.
            owned: the slots of each optimizer.
            error: what is wrong on this rank, which the others are told instead of being left alone.
            known_finite: this rank's gradients are finite, and need no pass over them.

        Returns:
            Whether every gradient is finite, of each optimizer; which parameters have one, (2, slots) for each unit:
            see ``Usage.step``.

        Raises:
            StepError, TierError: on every rank.
        """
        words = [
            zlib.crc32("\n".join(options).encode()),
            self.replicas.word(),
            *self._advice.words(),
        ]
        seen = np.array(words, dtype=np.uint32).view(np.uint8)  # 4 bytes each, equal on all ranks
        usages = [
            np.stack([unit.gradients.usage.now, unit.gradients.usage.emptied])
            for unit in self._units
        ]
        used = np.concatenate(usages or [np.zeros((2, 0), dtype=bool)], axis=1)
        # Last: here a device is waited for, which is better busy while the host does the rest.
        bad = [not known_finite and not are_finite(held, self._readings.read) for held in owned]
        differing = self._copies.error(options)  # collective, whatever is wrong here
        failures = (unit.gradients.rest.failure for unit in self._units)  # of a read for it too
        error = differing or error or next(filter(None, failures), None)
        verdict = np.array([error is not None, *bad], dtype=np.uint8)
        mine = np.concatenate([seen, ~seen, verdict, np.packbits(used)])
        agreed = self._comm.agree(mine, name="step")
        both, rest = agreed[: 2 * len(seen)].reshape(2, -1, 4), agreed[2 * len(seen) :]
        same = (both[0] == ~both[1]).all(axis=1).tolist()
        same_options, same_replicas, same_samples, same_generator = same
        problem: StepError | TierError | None = error
        if not same_options:
            problem = self._unequal(options) or error
        stop = bool(rest[0]) or not same_options
        bad = rest[1 : len(verdict)].astype(bool).tolist()
        packed = rest[len(verdict) :]
        (stop, *bad), same_parts = self._anywhere([stop, *bad], words[-1])
        if stop:
            with self._topology.agreed("take the step"):
                if problem is not None:
                    raise problem
        if not same_replicas:
            self.replicas.check()
        self._advice.compared(
            same_samples=same_samples, same_generator=same_generator, same_parts=same_parts
        )
        flags = np.unpackbits(packed, count=used.size).astype(bool).reshape(used.shape)
        ends = np.cumsum([len(unit.gradients.usage) for unit in self._units])
        return [not each for each in bad], np.split(flags, ends[:-1], axis=1) if len(ends) else []

    def _anywhere(self, mine: Sequence[bool], word: int) -> tuple[list[bool], bool]:
        """Of each, whether it is true on any rank of this copy of the model; whether all have ``word``. Collective."""
        found = self._topology.model_parallel.share(np.array([*mine, word], dtype=np.float64))
        *flags, words = found.T
        return [bool(each.any()) for each in flags], bool((words == word).all())

    def _unequal(self, options: Sequence[str]) -> StepError | None:
        """What this rank has that rank 0 has not. Collective over the ranks with the same part of the model."""
        differs = unlike(self._comm.everybody, options)
        if not differs:
            return None
        return StepError(
            f"rank {self._comm.rank}: the optimizer has {differs[0]}, where rank 0 has {differs[1]}. Give "
            "schedulers that look at a loss the mean over ranks "
            "(sum(topology.gather(loss.item())) / topology.size), and every rank the same numbers; freeze, unfreeze "
            "and add groups on all ranks alike"
        )

    def nonfinite_error(self, reason: str) -> StepError:
        """Names ranks and units; a rank named here owns the element, it need not have made it."""
        bad = [u.spec.name for u in self._units if not are_finite({u: range(len(u.parameters))})]
        counts = self._topology.world.share(np.array([len(bad)], dtype=np.float64))[:, 0]
        ranks = [int(rank) for rank in np.flatnonzero(counts)]
        here = f"; in this rank's shards: {', '.join(bad[:4])}" if bad else ""
        error = StepError(
            f"step {self._comm.calls.step}: the mean gradient has NaN or infinity (shards of rank(s) "
            f"{ranks}{here}), and {reason}. Nothing was updated. Lower the learning rate, check the data, "
            "or use bf16 instead of fp16"
        )
        error.agreed = self._topology.world.is_job
        return error


def are_finite(slots: Slots, read: Callable[[Sequence[Tensor]], list[float]] = numbers_of) -> bool:
    """Whether this rank's gradients of ``slots`` are; units that rest elsewhere have left their sums of squares."""
    present = {unit: own for unit, own in slots.items() if unit.gradients.present}
    near: list[Tensor] = []
    for unit, own in present.items():
        if unit.gradients.rest.resident:
            near += _owned(unit, own)
    return all_finite(near, read) and all(
        _rests_finite(unit, own)
        for unit, own in present.items()
        if not unit.gradients.rest.resident
    )


def _owned(unit: Unit, positions: Sequence[int]) -> list[Tensor]:
    gradients = unit.gradients
    if len(positions) == len(gradients.usage):
        return [gradients.owned]
    return [part for place in positions for part in gradients.pieces_at(place, owned=True)]


def _rests_finite(unit: Unit, positions: Sequence[int]) -> bool:
    if not unit.spec.uncounted and all(map(math.isfinite, squares_of(unit))):
        return True
    if not unit.spec.uncounted and len(positions) == len(unit.gradients.usage):
        return False
    with unit.gradients.rest.at_hand():
        return all_finite(_owned(unit, positions))


def all_finite(
    gradients: Sequence[Tensor], read: Callable[[Sequence[Tensor]], list[float]] = numbers_of
) -> bool:
    """Whether every element is finite; the sums tell, unless one overflows by itself. One transfer if they do."""
    if all(map(math.isfinite, read([gradient.sum() for gradient in gradients]))):
        return True
    return all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
