"""Leaves: the micro-batches of a step by their global numbers, whose sum has the same bits on any number of ranks.

A step has M leaves of one shape. On N ranks micro-step i computes leaves ``i * N`` to ``i * N + N - 1``, in the order
of the ranks. Each backward reduces, and the owner of a shard adds leaf to leaf (kernels/tree_sum.py). Random numbers
are drawn anew for each leaf. docs/exact.md has what is promised.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor, nn

from hpczero.errors import ConfigError, StepError
from hpczero.kernels.norm import digest_of_bits
from hpczero.zero.buffers import persistent_buffers, version_of
from hpczero.zero.units.gradients import LeafTurn
from hpczero.zero.update.agreement import DeferredNumber
from hpczero.zero.zeroify import sharding


class Leaves:
    """The leaves of one step that this rank computes. Iterating is collective over the ranks of the model.

    ::

        leaves = hpczero.Leaves(model, 12, step=step)
        for leaf in leaves:                    # a number from 0 to 11
            loss = model(*batch(step, leaf))
            loss.backward()
            leaves.note(loss)
        optimizer.step(); optimizer.zero_grad()
        print(leaves.mean_loss())

    Gradients become the mean over all leaves: do not divide the loss. Inputs of a leaf depend on ``step`` and ``leaf``
    alone, and have one shape. The generators of torch, NumPy and Python are seeded anew before each leaf, from
    ``seed``, ``step`` and the leaf, and once more after the last one, on all ranks alike.

    Attributes:
        count: leaves of the step.
        turns: of each micro-step.
        now: the turn that the loop is in.
        gradients: of each leaf of this rank a digest of the gradient of each unit, if they are kept.

    Where ``count`` is no multiple of the ranks, some ranks compute the last leaf again at the end, because forward and
    backward are collective. Their gradients and losses do not count.
    """

    def __init__(
        self,
        model: nn.Module,
        count: int,
        *,
        step: int,
        seed: int = 0,
        check_every: int = 0,
        digests: bool = False,
    ) -> None:
        """Not collective.

        Args:
            model: zeroified with ``exact="require"`` or ``"prefer"``.
            count: leaves of the step, M; the same on every rank, and at least as many as ranks.
            step: number of the step in the whole training, whatever job it is in.
            seed: of the run.
            check_every: after each so many micro-steps of the training, every rank also computes a leaf of another
                rank, and the gradients are compared: a rank whose hardware is wrong is named. The loop gets some leaves
                more for it. 0: never.
            digests: whether ``gradients`` are kept.

        Raises:
            ConfigError: too few leaves, or the model was zeroified otherwise.
        """
        self._state = sharding(model)
        if self._state.exact is None:
            raise ConfigError(
                "Leaves: the model was zeroified with exact='off', or cannot be exact (the log says why); expected "
                "zeroify(..., exact='require')"
            )
        self._exact = self._state.exact
        self._state.advice.weighted = True  # each leaf counts the same, whatever its shape
        ranks = self._exact.ranks
        if not isinstance(count, int) or count < ranks:
            raise ConfigError(
                f"Leaves: got {count!r} leaves and {ranks} ranks, expected at least one leaf for each rank; make "
                "leaves smaller, or start fewer ranks"
            )
        self.count, self._step, self._seed = count, step, seed
        self._check_every, self._digests = check_every, digests
        self.turns = [
            LeafTurn(count, first, min(ranks, count - first), first + self._exact.place < count)
            for first in range(0, count, ranks)
        ]
        self.now = self.turns[0]
        self.gradients: dict[int, dict[str, int]] = {}
        self._losses: list[DeferredNumber | float] = []
        self._open = False
        self._buffers: dict[str, tuple[Tensor, int]] | None = (
            None  # of the model, when the first leaf began
        )

    @property
    def mine(self) -> list[int]:
        """The leaf of each micro-step on this rank."""
        place = self._exact.place
        return [min(turn.before + place, self.count - 1) for turn in self.turns]

    def __iter__(self) -> Generator[int, None, None]:
        """The leaves of this rank, each inside its turn.

        Raises:
            StepError: gradients of before are there; or a rank computed a leaf wrongly. On every rank.
        """
        self.check_begin()
        for number, leaf in enumerate(self.mine):
            turn, checks = self.turn_of(number), self._is_checked(number)
            own: dict[str, int] = {}
            if checks:
                turn = replace(turn, seen=_keeper(own))
            self.draw(leaf)
            with self.inside(turn):
                yield leaf
            if checks:
                if self._digests:
                    self.gradients[leaf] = own
                yield from self._check(turn, own)
        self.end()

    def turn_of(self, number: int) -> LeafTurn:
        """Of micro-step ``number``, with what keeps its digests."""
        turn = self.turns[number]
        if not (self._digests and turn.counts):
            return turn
        return replace(turn, seen=_keeper(self.gradients.setdefault(self.mine[number], {})))

    def _is_checked(self, number: int) -> bool:
        """Whether other ranks compute the leaves of micro-step ``number`` too; all ranks have one of their own then."""
        place = self._step * len(self.turns) + number + 1
        due = self._check_every > 0 and place % self._check_every == 0
        return due and self.turns[number].count == self._exact.ranks

    def _check(self, turn: LeafTurn, own: dict[str, int]) -> Iterator[int]:
        """Compare leaves of ``turn`` with those that another rank computes; ``own``: digests of this rank's."""
        place, ranks, first = self._exact.place, self._exact.ranks, turn.before
        found = [own]

        def again(behind: int) -> Iterator[int]:
            digests: dict[str, int] = {}
            leaf = first + (place - behind) % ranks
            self.draw(leaf)
            with self.inside(
                replace(turn, count=0, counts=False, adds=False, seen=_keeper(digests))
            ):
                yield leaf
            found.append(digests)

        yield from again(1)
        theirs = self._exact.compared(found)
        suspects = [p for p in range(ranks) if theirs[p][0] != theirs[(p + 1) % ranks][1]]
        if not self._exact.anywhere(bool(suspects)):
            return
        yield from again(0)
        yield from again(2)
        self._exact.accuse(self._exact.compared(found), suspects, [*own], self._step, first)

    def check_begin(self) -> None:
        """A sum over leaves begins. Not collective.

        Raises:
            StepError: gradients are there already, or the leaves of this object were taken before.
        """
        state = self._state
        if self._buffers is not None:
            raise StepError(
                f"rank {state.topology.rank}: the leaves of step {self._step} were taken already; make hpczero.Leaves "
                "anew for each step"
            )
        named = state.model.named_buffers()
        self._buffers = {name: (buffer, version_of(buffer)) for name, buffer in named}
        units = [unit for unit in state.units if unit.spec.trainable]
        if any(unit.gradients.present or unit.gradients.waiting for unit in units):
            raise StepError(
                f"rank {state.topology.rank}: a sum over leaves begins, and gradients of before are there; call "
                "optimizer.zero_grad() first, or make all of them leaves of one step"
            )
        # What ranks compare at the step.
        said = f"a sum over {self.count} leaves of step {self._step}, seed {self._seed} (Leaves)"
        state.step.history.scaling(said)

    def end(self) -> None:
        """The last leaf is done. Not collective.

        Raises:
            StepError: forward has changed a buffer, of which each rank has a state of its own then.
        """
        self.draw(self.count)
        kept = persistent_buffers(self._state.model)
        for name, buffer in self._state.model.named_buffers():
            before, version = (self._buffers or {}).get(name, (None, 0))
            changed = before is buffer and version_of(buffer) != version
            if changed or (before is not buffer and name in kept):
                self._exact.refuse(
                    f"forward has changed buffer {name!r}, as the leaves of each rank left it",
                    "keep no state in buffers that forward changes",
                )

    def draw(self, leaf: int, piece: int = 0) -> None:
        """Seed the generators for a leaf, of a part of the model; ``count`` for what follows the last leaf."""
        text = f"{self._seed} {self._step} {leaf} {piece}".encode()
        key = int.from_bytes(blake2b(text, digest_size=8).digest(), "little") >> 1
        torch.manual_seed(key)
        random.seed(key)
        np.random.seed(key >> 32)  # noqa: NPY002  (the generator that modules draw from)

    @contextmanager
    def inside(self, turn: LeafTurn) -> Iterator[None]:
        """Context for the forward and the backward of one turn."""
        backward = self._state.schedule.backward
        before = backward.sync, backward.turn
        backward.sync, backward.turn, self.now = True, turn, turn
        self._open = True
        try:
            yield
        finally:
            self._open = False
            backward.sync, backward.turn = before

    def note(self, loss: Tensor) -> None:
        """The loss of the leaf that is computed now. Not collective, and it does not wait for a device.

        Raises:
            StepError: outside of the loop over the leaves.
        """
        if not self._open:
            raise StepError(
                "Leaves.note outside of the loop over the leaves; call it inside, once for each leaf"
            )
        if self.now.counts:
            self._losses.append(self._state.step.norms.readings.add(loss))

    def note_all(self, losses: Sequence[float]) -> None:
        """The losses of the leaves of this rank, one for each micro-step."""
        self._losses += [x for x, turn in zip(losses, self.turns, strict=True) if turn.counts]

    @property
    def own_losses(self) -> list[float]:
        """Of the leaves of this rank that count; waits for a device."""
        return [loss if isinstance(loss, float) else loss() for loss in self._losses]

    def mean_loss(self) -> float:
        """Mean of the noted losses over all leaves, rounded once: the same bits on any number of ranks.

        Collective over ``topology.data``.
        """
        return self._state.topology.data.total(*self.own_losses) / self.count


def _keeper(digests: dict[str, int]) -> Callable[[str, Tensor], None]:
    """Keeps a digest of each unit's gradient."""

    def keep(name: str, gradient: Tensor) -> None:
        digests[name] = int(digest_of_bits(gradient.detach()))

    return keep
