"""Agreement: what ranks compare before an update, in one exchange.

Owns: what is compared, and what is said where ranks differ. Must not know: modules, what is done about a gradient that
is not finite.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hpczero.comm.collectives import Collectives
from hpczero.errors import StepError, TierError
from hpczero.job.group import unlike
from hpczero.job.topology import Topology
from hpczero.kernels.norm import numbers_of, sum_of_bits
from hpczero.zero.calls.advice import Advice
from hpczero.zero.units.unit import Unit
from hpczero.zero.units.unit_gradients import Flags
from hpczero.zero.update.gradient_norms import Readings, squares_of

# Replicas: values and gradients that every rank holds whole and updates by itself, which must stay the same bits.
#
# At stage 0 nothing brings ranks together again after an update. Noise drawn with a seed of its own on each rank, in
# the optimizer or in what a loop adds to a gradient, would let them drift apart for ever. One pass over memory per step
# finds it (see bits).


class Replicas:
    """Of the trainable units of one model. Where the optimizer is sharded there are none."""

    def __init__(self, units: Sequence[Unit], comm: Collectives) -> None:
        """Not collective."""
        self._units = list(units)
        self._comm = comm

    def word(self) -> int:
        """A uint32 that is equal on all ranks where all they hold is; not collective. One transfer from a device."""
        return zlib.crc32(np.array(self._sums(), dtype=np.int64).tobytes())

    def check(self) -> None:
        """Raise if ranks hold different replicas. Collective over world.

        Raises:
            StepError: on every rank; where a rank differs from rank 0, of the first unit in which it does.
        """
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
# Source: issue 19.

# Of all norms together. What rounding does is below a thousandth, in half precision too.
MOST_OFF = 1e-2


class TensorCopies:
    """Of the trainable units of one model."""

    def __init__(self, units: Sequence[Unit], topology: Topology) -> None:
        """Not collective.

        Args:
            units: the trainable ones.
            topology: its tensor ranks are compared.
        """
        self._topology = topology
        self._slots = [(unit, place) for unit in units for place in unit.spec.kept]
        self._away = [u for u in units if u.spec.kept and not u.gradients.rest.resident]
        self._compared = 0  # times; the same number on all ranks

    def error(self, options: Sequence[str]) -> StepError | None:
        """What differs, the same on each of the tensor ranks; None where nothing does. Collective over them.

        Args:
            options: texts that must be equal.
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
        """Not collective.

        Args:
            units: the trainable ones.
            comm: the transport.
            topology: of the ranks.
            advice: told what the comparison of ranks found.
            readings: numbers that are read with whether gradients are finite.
        """
        self._comm = comm
        self._topology = topology
        self._advice = advice
        self._readings = readings
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
    """Whether this rank's gradients of ``slots`` are; units that rest elsewhere have left their sums of squares.

    Args:
        slots: which gradients.
        read: as ``kernels.norm.numbers_of``.
    """
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
