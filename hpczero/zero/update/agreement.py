"""Agreement: what ranks compare before an update, in one exchange.

Owns: what is compared, and what is said where ranks differ. Must not know: modules, what is done about a gradient that
is not finite.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from hpczero.comm.collectives import Collectives
from hpczero.errors import StepError, TierError
from hpczero.job.group import unlike
from hpczero.job.topology import Topology
from hpczero.kernels.norm import numbers_of
from hpczero.zero.calls.advice import Advice
from hpczero.zero.units.unit import Unit
from hpczero.zero.units.usage import Flags
from hpczero.zero.update.gradient_norms import squares_of
from hpczero.zero.update.readings import Readings
from hpczero.zero.update.replicas import Replicas
from hpczero.zero.update.tensor_copies import TensorCopies

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
