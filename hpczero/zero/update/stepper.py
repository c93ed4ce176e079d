"""Stepper: one of the optimizers of a model, and what of the units is its own.

Owns: which slots it steps on, its hooks and its update. Must not know: the agreement of ranks, other optimizers.

A unit may hold parameters of several optimizers. What is reduced, gathered and checked goes by units; what is stepped
on, dropped or guarded goes by slots.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hpczero.comm.collectives import Collectives
from hpczero.zero.units.gradients import Flags
from hpczero.zero.units.seen_gradient import guard_shards, open_shards
from hpczero.zero.units.unit import Unit
from hpczero.zero.update.coded import ATTRIBUTE as CODED
from hpczero.zero.update.coded import CodedUpdate
from hpczero.zero.update.host_update import DelayedUpdate, HostUpdate
from hpczero.zero.update.optimizers import OptimizerSet, needs_whole, repoint
from hpczero.zero.update.parts import PartedUpdate, Update
from hpczero.zero.update.streamed import StreamedUpdate, TwinUpdate
from hpczero.zero.update.whole import WholeUpdate


class StepHooks:
    """Hooks on ``optimizer.step``: the last before it, the first after it.

    Hooks of the user's find guarded gradients before a step and new values on all ranks after it, whether they were
    registered before these or later.
    """

    def __init__(
        self, optimizer: Optimizer, before: Callable[..., None], after: Callable[..., None]
    ) -> None:
        """Register them; not collective."""
        self._optimizer = optimizer
        pre = cast(OrderedDict[int, Any], optimizer._optimizer_step_pre_hooks)
        post = cast(OrderedDict[int, Any], optimizer._optimizer_step_post_hooks)
        first = optimizer.register_step_pre_hook(before)
        last = optimizer.register_step_post_hook(after)
        self._handles = [first, last]
        post.move_to_end(last.id, last=False)

        def register_step_pre_hook(hook: Any) -> RemovableHandle:
            handle = Optimizer.register_step_pre_hook(optimizer, hook)
            if first.id in pre:
                pre.move_to_end(first.id)
            return handle

        optimizer.__dict__["register_step_pre_hook"] = register_step_pre_hook

    @property
    def are_last(self) -> bool:
        """Whether no hook follows before torch's step: one registered past the optimizer's own method may."""
        return bool(
            next(reversed(self._optimizer._optimizer_step_pre_hooks)) == self._handles[0].id
        )

    def remove(self) -> None:
        """Take them away; not collective."""
        for handle in self._handles:
            handle.remove()
        self._optimizer.__dict__.pop("register_step_pre_hook", None)


class Stepper:
    """Of one optimizer, which has been pointed at its shards; nothing is collective but ``begin`` where ``together``.

    Attributes:
        optimizer: torch's.
        index: its place among the optimizers of the model.
        name: what a message calls it.
        slots: trainable units with a parameter of its, in unit order, each with the positions of those.
        shards: what its groups hold.
        parted: its update over long tensors.
        streams: some of what it works on rests on a memory tier.
        together: what fails in its step on one rank must fail on all.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        index: int,
        units: Sequence[Unit],
        *,
        name: str,
        groups: range,
        comm: Collectives,
        sharded: bool,
        before: Callable[..., None],
        after: Callable[..., None],
    ) -> None:
        """Hook into ``optimizer.step``.

        Args:
            optimizer: pointed at the shards.
            index: see the attribute.
            units: the trainable ones of the model.
            name: see the attribute.
            groups: numbers of its groups, as the plan has them.
            comm: the transport.
            sharded: whether each rank steps on its own shards alone.
            before: called last before torch's step.
            after: called first after it.
        """
        self.optimizer = optimizer
        self.index = index
        self.name = name
        self._place(units, groups)
        self._hooks = StepHooks(optimizer, before, after)
        away = [unit for unit in self.slots if unit.away is not None]
        here = [unit for unit in self.slots if unit.away is None]
        self.streams = bool(away)
        self.parted: Update
        if needs_whole(optimizer):
            self.parted = WholeUpdate(self.slots, optimizer, groups, comm, replicated=not sharded)
        elif hasattr(type(optimizer), CODED):
            self.parted = CodedUpdate(self.slots, optimizer)
        else:
            self.parted = _update_of(optimizer, here, away)
        self.together = self.streams or self.parted.together
        self.parted.adopt()  # Adagrad has state from the start
        self._open = False  # shards are, for the time of a step
        guard_shards(self.shards)

    def _place(self, units: Sequence[Unit], groups: range) -> None:
        """Which slots of ``units`` are its."""
        places = {
            unit: [place for place, group in enumerate(unit.spec.groups) if group in groups]
            for unit in units
        }
        self.slots = {unit: own for unit, own in places.items() if own}
        self.shards: list[nn.Parameter] = [
            shard
            for unit, own in self.slots.items()
            for shard, slot in zip(unit.shards, unit.optimized.slots, strict=True)
            if slot in set(own)
        ]

    def follow(self, units: Sequence[Unit], groups: range) -> None:
        """``units`` are the trainable ones from now on, new ones in memory; ``groups``: numbers of its groups."""
        self._place(units, groups)
        self.parted = self.parted.follow(self.slots, groups)
        guard_shards(self.shards)

    def adopt(self) -> None:
        """State was loaded, or put into ``optimizer.state``."""
        self.parted.adopt()

    def detach(self) -> None:
        """Take the hooks away; the optimizer must not step for this model any more."""
        self._hooks.remove()
        if not self.streams:  # else there is no memory behind them, which only the guard says
            open_shards(self.shards)

    def check(self) -> None:
        """Refuse a step that cannot be taken.

        Raises:
            StepError: on ranks whose optimizer is not as it was at zeroify.
        """
        self.parted.check(last=self._hooks.are_last)

    def begin(self) -> None:
        """Torch's step follows, as far as it is not taken here."""
        self._open = True
        open_shards(self.shards)
        self.parted.take(last=self._hooks.are_last)

    @property
    def pending(self) -> bool:
        """Whether an update is on its way that the model does not have yet; equal on all ranks."""
        return self.parted.pending

    def finish(self) -> None:
        """Take what a delayed update has made, if one is on its way."""
        self.parted.finish()

    def abandon(self) -> None:
        """What a delayed update has made is of no use any more."""
        self.parted.abandon()

    def end(self) -> None:
        """After a step; also after one that has raised."""
        self.parted.restore()
        if self._open:
            self._open = False
            guard_shards(self.shards)

    def has_gradients(self, used: dict[Unit, Flags]) -> bool:
        """Whether any rank used a parameter of its, by the flags (slots,) of each unit."""
        return any(
            unit.gradients.present and used[unit][own].any() for unit, own in self.slots.items()
        )

    def drop_gradients(self, *, set_to_none: bool = True) -> None:
        """Those of its parameters are gone, or zero; the others of the same units stay."""
        for unit, own in self.slots.items():
            unit.gradients.drop_slots(own, set_to_none=set_to_none)


def _update_of(optimizer: Optimizer, here: Sequence[Unit], away: Sequence[Unit]) -> Update:
    """Its update over units of which some rest on a tier."""
    stores = [unit.away.store for unit in away if unit.away is not None]
    if not stores:
        return PartedUpdate(here, optimizer)
    kind = StreamedUpdate if stores[0].ascent is None else HostUpdate
    kind = DelayedUpdate if stores[0].delayed else kind
    streamed = kind(away, optimizer, stores[0])
    return TwinUpdate(PartedUpdate(here, optimizer), streamed) if here else streamed


def point_at_shards(optimizers: OptimizerSet, units: Sequence[Unit]) -> None:
    """Make the optimizers' groups hold the shards of ``units`` instead of the model's parameters; not collective."""
    shards: dict[int, list[tuple[nn.Parameter, nn.Parameter]]] = {}
    for unit in units:
        for shard, position in zip(unit.shards, unit.optimized.slots, strict=True):
            pair = (unit.parameters[position], shard)
            shards.setdefault(unit.spec.groups[position], []).append(pair)
    for index, optimizer in enumerate(optimizers):
        numbers = optimizers.groups_of(index)
        repoint(optimizer, {place: shards.get(n, ()) for place, n in enumerate(numbers)})
