"""Step: what happens around ``optimizer.step()``; and Stepper: one of the optimizers of a model."""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hpczero.comm.collectives import Collectives
from hpczero.errors import ConfigError, StepError, TierError
from hpczero.job.topology import Topology
from hpczero.plan.precision import LossScaler, Precision
from hpczero.zero.calls.advice import Advice
from hpczero.zero.calls.ways import untraced
from hpczero.zero.units.gradients import Flags
from hpczero.zero.units.seen_gradient import guard_shards, open_shards
from hpczero.zero.units.unit import Unit
from hpczero.zero.update.agreement import Agreement, GradientHistory, GradientNorms
from hpczero.zero.update.coded import ATTRIBUTE as CODED
from hpczero.zero.update.coded import CodedUpdate
from hpczero.zero.update.optimizers import OptimizerSet, describe_options, needs_whole
from hpczero.zero.update.parts import PartedUpdate, Update
from hpczero.zero.update.streamed import DelayedUpdate, HostUpdate, StreamedUpdate
from hpczero.zero.update.whole import WholeUpdate

# Rounds: which steps of several optimizers belong to one backward.
#
# A round: the steps between two reductions, at most one of each optimizer. If an optimizer steps again, a new round
# begins. A model with one optimizer has a round for each step.
#
# [Note: Overflow and several optimizers]
# A gradient that is not finite skips all steps of its round, as one optimizer over all parameters would. Each skipped
# step drops the gradients of its own parameters. Those of an optimizer that does not step in this round stay, and with
# them what is not finite: its next step is skipped, too, as torch's GradScaler has it. Until then they skip nobody
# else, and the loss scale is told once.


class Rounds:
    """Of one model; equal on all ranks, because steps and reductions are.

    Attributes:
        skipped: whether the steps of this round are skipped.
        told: whether the loss scale was told of this round.
    """

    def __init__(self, optimizers: int) -> None:
        self.skipped = self.told = False
        self._stepped: set[int] = set()
        # Of each optimizer, whether its gradients are known not to be finite since a round before this one.
        self._spoiled = [False] * optimizers

    def gradients_come(self) -> None:
        """A reduction begins: what steps afterwards steps on other gradients."""
        self._stepped.clear()

    def gradients_go(self, index: int) -> None:
        """Those of one optimizer are gone."""
        self._spoiled[index] = False

    def overflows(self, index: int, finite: Sequence[bool]) -> bool:
        """Whether the step of optimizer ``index`` makes its round a skipped one.

        Some optimizer's gradients are not finite then, and no earlier step knew of it. ``finite[i]``: whether those of
        optimizer i are finite.
        """
        found = zip(finite, self._spoiled, strict=True)
        new = any(not good and not spoiled for good, spoiled in found)
        return new and (self._begins(index) or not self.skipped)

    def begin_step(self, index: int, finite: Sequence[bool]) -> bool:
        """As ``overflows``; whether the step is to be skipped."""
        overflow = self.overflows(index, finite)
        if self._begins(index):
            self._stepped.clear()
            self.skipped = self.told = False
        self.skipped = self.skipped or overflow
        self._spoiled = [not good for good in finite]
        return self.skipped or not finite[index]

    def _begins(self, index: int) -> bool:
        return not self._stepped or index in self._stepped

    def end_step(self, index: int) -> bool:
        """Its step is over; whether it was the first of the round."""
        self._stepped.add(index)
        return len(self._stepped) == 1

    @property
    def texts(self) -> list[str]:
        """What must be equal on all ranks."""
        return [
            f"gradients of optimizer {i} not finite" for i, bad in enumerate(self._spoiled) if bad
        ]


logger = logging.getLogger("hpczero.step")


class Skips:
    """Steps of one model that are skipped, and what becomes of the loss scale.

    Attributes:
        skipped: how many so far; equal on every rank.
    """

    def __init__(
        self, comm: Collectives, precision: Precision, scaler: LossScaler, *, speaks: bool
    ) -> None:
        """``speaks``: whether this rank writes the log."""
        self.skipped = self._in_a_row = 0
        self._speaks = speaks
        self._comm = comm
        self._precision = precision
        self._scaler = scaler
        self._told = False

    def skip(self) -> str | None:
        """Count the step that is taken now as skipped; why that cannot help, or None where it may."""
        self.skipped += 1
        self._in_a_row += 1
        scaled = self._precision.loss_scale is not None
        if not scaled and self._precision.nonfinite == "raise":
            return "precision.nonfinite='skip' would skip such steps"
        if scaled and self._scaler.exhausted:
            return f"the loss scale is at its minimum {self._scaler.scale:g}"
        if self._in_a_row >= self._precision.max_skips:
            return f"{self._in_a_row} steps in a row were skipped"
        if self._speaks:
            logger.warning(
                "step %d skipped: a gradient is not finite (loss scale %g, %d skipped so far)",
                self._comm.calls.step,
                self._scaler.scale,
                self.skipped,
            )
        return None

    def skip_late(self, name: str) -> None:
        """Count a step that is skipped because its gradients have not been finite since an earlier one."""
        self.skipped += 1
        if self._speaks:
            logger.warning(
                "step %d of %s skipped: its gradients hold what was not finite when another optimizer stepped (%d "
                "skipped so far); zero_grad of it after that step would have begun anew",
                self._comm.calls.step,
                name,
                self.skipped,
            )

    def end_step(self, *, overflow: bool) -> None:
        """The step is over."""
        if not overflow:
            self._in_a_row = 0
        self._scaler.update(overflow=overflow)

    def tell_nothing_to_do(self) -> None:
        """Say once that no parameter has a gradient."""
        if self._speaks and not self._told:
            self._told = True
            logger.warning(
                "step %d: no parameter has a gradient, so the optimizer changes nothing, as in plain torch; was "
                "backward called since zero_grad, on a loss that this very model made?",
                self._comm.calls.step,
            )


# A unit may hold parameters of several optimizers. What is reduced, gathered and checked goes by units; what is stepped
# on, dropped or guarded goes by slots.


class StepHooks:
    """Hooks on ``optimizer.step``: the last before it, the first after it.

    Hooks of the user's find guarded gradients before a step and new values on all ranks after it, whether they were
    registered before these or later.
    """

    def __init__(
        self, optimizer: Optimizer, before: Callable[..., None], after: Callable[..., None]
    ) -> None:
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
        """Take the hooks away."""
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
        update: how its step is taken.
        streams: some of what it works on rests on a memory tier.
        together: what fails in its step on one rank must fail on all.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        index: int,
        optimizers: OptimizerSet,
        units: Sequence[Unit],
        hooks: StepHooks,
        comm: Collectives,
        *,
        sharded: bool,
        aligned: bool,
    ) -> None:
        """Not collective.

        Args:
            optimizer: pointed at the shards.
            index: see the attribute.
            optimizers: of the model.
            units: the trainable ones of the model.
            hooks: on the optimizer's step.
            comm: the transport.
            sharded: whether each rank steps on its own shards alone.
            aligned: whether bits must not depend on where a shard begins.
        """
        self.optimizer, self.index, self.name = optimizer, index, optimizers.name(index)
        self._optimizers, self._hooks = optimizers, hooks
        self._place(units)
        away = next((unit.away for unit in self.slots if unit.away is not None), None)
        self.streams = away is not None
        self.update: Update
        if needs_whole(optimizer):
            self.update = WholeUpdate(optimizer, comm, replicated=not sharded)
        elif hasattr(type(optimizer), CODED):
            self.update = CodedUpdate(optimizer)
        elif away is None:
            self.update = PartedUpdate(optimizer, aligned=aligned)
        else:
            kind = StreamedUpdate if away.store.ascent is None else HostUpdate
            kind = DelayedUpdate if away.store.delayed else kind
            self.update = kind(optimizer, away.store, aligned=aligned)
        self.together = self.streams or self.update.together
        self._open = False  # shards are, for the time of a step
        self.follow(units)
        self.update.adopt()  # Adagrad has state from the start

    def _place(self, units: Sequence[Unit]) -> None:
        """Which slots of ``units`` are its."""
        groups = self._optimizers.groups_of(self.index)
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

    def follow(self, units: Sequence[Unit]) -> None:
        """``units`` are the trainable ones from now on; new ones are in memory."""
        self._place(units)
        self.update.follow(self.slots, self._optimizers.groups_of(self.index))
        guard_shards(self.shards)

    def detach(self) -> None:
        """Take the hooks away; the optimizer must not step for this model any more."""
        self._hooks.remove()
        if not self.streams:  # else there is no memory behind them, which only the guard says
            open_shards(self.shards)

    def check(self) -> None:
        """Raise StepError where the optimizer is not as it was at zeroify."""
        self.update.check(last=self._hooks.are_last)

    def begin(self) -> None:
        """Open the shards and take the step here if that is possible.

        Torch's own step follows. It finds empty groups if the step was taken here; otherwise it takes the step.
        """
        self._open = True
        open_shards(self.shards)
        self.update.take(last=self._hooks.are_last)

    def end(self) -> None:
        """After a step; also after one that has raised."""
        self.update.restore()
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


class ModelSide(Protocol):
    """What a step asks of the model that it belongs to, and tells it; ``Sharding`` is one."""

    units: list[Unit]
    collectives: Collectives
    topology: Topology
    precision: Precision
    scaler: LossScaler
    advice: Advice

    @property
    def exact(self) -> object | None:
        """None where bits may depend on the number of ranks."""

    @property
    def in_backward(self) -> bool:
        """Whether a backward runs, or was interrupted."""

    @property
    def in_call(self) -> bool:
        """Whether a forward runs."""

    def check_attachment(self) -> None:
        """Raise StepError if model or optimizer hold parameters that no unit knows."""

    def before_update(self, units: Collection[Unit]) -> list[Unit]:
        """Values of ``units`` change now; returns the units that were kept whole for a later backward."""

    def after_update(self) -> None:
        """The parameters are up to date."""

    @property
    def texts(self) -> list[str]:
        """Buffers, and what trains, where they are not as they were at first; compared over ranks."""

    def settle(self) -> bool:
        """Make plan, units and optimizers follow what was unfrozen or added since the plan was made. Collective.

        Returns whether there was any such change.
        """


@dataclass(frozen=True)
class CurrentStep:
    """The step that is taken now.

    Attributes:
        ended: units that were kept whole for a backward when it began.
        overflow: whether the loss scale is told of gradients that are not finite.
        skipped: whether it does nothing.
    """

    ended: list[Unit]
    overflow: bool
    skipped: bool


class Step:
    """What happens around the steps of a model's optimizers. Collective over the topology's world, unless said.

    Attributes:
        steppers: of the optimizers, in their order.
        rounds, skips: which steps are of one backward, and which do nothing.
        agreement, norms, history: see each.
    """

    def __init__(self, model: ModelSide) -> None:
        """Not collective."""
        comm, topology = model.collectives, model.topology
        self._model, self._comm, self._topology = model, comm, topology
        self._all_units = model.units
        self._units = [unit for unit in model.units if unit.spec.trainable]
        self.skips = Skips(comm, model.precision, model.scaler, speaks=topology.is_root)
        self.norms = GradientNorms(
            self._units,
            comm,
            topology.model_parallel,
            self._check_reduced,
            exact=model.exact is not None,
        )
        self.agreement = Agreement(self._units, comm, topology, model.advice, self.norms.readings)
        self.history = GradientHistory(self._units, self.norms)
        self.rounds = Rounds(0)
        self.steppers: list[Stepper] = []
        self._now: CurrentStep | None = None

    def attach(self, optimizers: OptimizerSet, *, sharded: bool) -> None:
        """Drive each one's ``step`` through torch's own hooks; not collective.

        ``optimizers`` hold shards. ``sharded``: each rank steps on its own shards alone.
        """
        self.rounds = Rounds(len(optimizers))
        self.steppers = [
            Stepper(
                optimizer,
                index,
                optimizers,
                self._units,
                StepHooks(optimizer, self._before, self._after),
                self._comm,
                sharded=sharded,
                aligned=self._model.exact is not None,
            )
            for index, optimizer in enumerate(optimizers)
        ]

    def follow(self) -> None:
        """More units train, and optimizers have more groups; not collective."""
        # In place: norms and history have the same list.
        self._units[:] = [unit for unit in self._all_units if unit.spec.trainable]
        self.norms.forget()
        self.agreement.follow(self._units)
        for stepper in self.steppers:
            stepper.follow(self._units)

    def detach(self) -> None:
        """Take the hooks away; not collective. The optimizers must not step for this model any more."""
        for stepper in self.steppers:
            stepper.detach()

    def gradients_come(self) -> None:
        """A reduction begins; not collective."""
        self.norms.forget()
        self.rounds.gradients_come()

    def forget_gradients(self) -> None:
        """The gradients are gone, and what was done to them is void; not collective."""
        self._end_steps()  # a step may have been cut off
        self.history.clear()
        for stepper in self.steppers:
            self.rounds.gradients_go(stepper.index)

    def drop_gradients(self, stepper: Stepper, *, set_to_none: bool = True) -> None:
        """Those of one optimizer are gone; not collective."""
        self._end_steps()
        stepper.drop_gradients(set_to_none=set_to_none)
        self.rounds.gradients_go(stepper.index)
        self.history.zeroed(stepper.index, len(self.steppers))
        left = any(unit.gradients.present for unit in self._units)
        if left:
            self.history.change(stepper.name, "zero_grad of one optimizer")
        self.history.drop()
        if not (left or self.history.incomplete):
            self.history.clear()

    def forget_state(self) -> None:
        """State is about to be replaced: let go of its memory; not collective."""
        for stepper in self.steppers:
            stepper.update.forget()

    def adopt_state(self) -> None:
        """State was loaded; not collective."""
        for stepper in self.steppers:
            stepper.update.adopt()

    def clip(self, max_norm: float, norm_type: float) -> float:
        """Scale the gradients so that their norm is at most ``max_norm``; returns the norm before, as torch does.

        A norm that is not finite leaves the gradients alone: the step decides what that means.
        """
        if not max_norm > 0:
            raise ConfigError(f"max_norm: got {max_norm!r}, expected a number above 0")
        self.history.scaling(f"gradients clipped with max_norm={max_norm!r}")
        norm = self.norms.of_all(norm_type)
        factor = max_norm / (norm + 1e-6)
        if math.isfinite(norm) and factor < 1.0:
            finite = self.norms.are_finite
            for unit in self._units:
                if unit.gradients.present:
                    unit.gradients.scale(factor)
            self.norms.forget()
            if finite:
                self.norms.note_finite()  # finite numbers times one below 1
        return norm

    def _check_reduced(self) -> None:
        if self._model.in_backward or self.history.incomplete:
            raise StepError(
                f"rank {self._comm.rank}: the last backward did not finish (an exception?), so some "
                "gradients are missing; call optimizer.zero_grad() and run backward again before the step"
            )
        waiting = [unit.spec.name for unit in self._units if unit.gradients.waiting]
        if waiting:
            raise StepError(
                f"rank {self._comm.rank}: {len(waiting)} unit(s), first {waiting[0]!r}, hold gradients "
                "that were never reduced over ranks; run the last backward before the step outside no_sync, and a loop "
                "over hpczero.Leaves to its end"
            )

    @untraced
    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs.get("closure") is not None or any(a is not None for a in args[1:]):
            raise ConfigError(
                "optimizer.step(closure) would run backward inside the step; call backward first, "
                "then optimizer.step()"
            )
        self._end_steps()  # torch's step before this one may have raised
        stepper = self._stepper_of(optimizer)
        several = len(self.steppers) > 1
        ended = self._model.before_update(stepper.slots if several else self._all_units)
        while True:
            finite, used = self.agreement.reach(
                [
                    *([f"a step of {stepper.name}"] if several else []),
                    *describe_options(optimizer),
                    *self.history.texts,
                    *self.rounds.texts,
                    *self._model.texts,
                ],
                [each.slots for each in self.steppers],
                error=self._local_error(stepper),
                known_finite=self.norms.are_finite,
            )
            if not self._model.settle():
                break  # else there are more units, and more gradients
        now = self._now = self._judged(stepper, finite, ended)
        flags = {}
        for unit, (fresh, emptied) in zip(self._units, used, strict=True):
            flags[unit] = unit.gradients.usage.step(fresh, emptied)
            if unit.gradients.present:
                unit.gradients.skip_unused(flags[unit])
        # Bring this optimizer's delayed update of the step before to the model, even if this step is skipped.
        # ``pending`` is equal on all ranks, so all ranks do it or none.
        if stepper.update.pending:
            self._stream(stepper, stepper.update.finish)
        if now.skipped:
            stepper.drop_gradients()
            self.rounds.gradients_go(stepper.index)
            return  # gradients are None now, so torch's own step changes nothing
        if stepper.slots and not stepper.has_gradients(flags):
            self.skips.tell_nothing_to_do()
        if stepper.together:
            self._stream(stepper, stepper.begin)
        else:
            stepper.begin()

    def finish_updates(self) -> None:
        """Bring what delayed updates have made to the model; nothing where none is on its way.

        Raises:
            StepError: on every rank; a backward runs, or the update has failed.
            TierError: on every rank; a gradient could not be brought to where it is stepped on.
        """
        for stepper in self.steppers:
            if not stepper.update.pending:
                continue
            with self._topology.agreed("finish the update"):
                if self._model.in_call or self._model.in_backward:
                    raise StepError(
                        "a delayed update (offload) would change parameters while a forward or a backward runs, or "
                        "after a backward that was cut off, expected none; call hpczero.finish_update(model) before "
                        "forward, and optimizer.zero_grad() after a backward that did not finish"
                    )
            ended = self._model.before_update(self._all_units)
            self._stream(stepper, stepper.update.finish)
            self._refresh(stepper, ended)

    def _stream(self, stepper: Stepper, take: Callable[[], None]) -> None:
        """What fails on one rank, on its tier say, fails on all, and leaves values of two steps that nobody may use."""
        try:
            with self._comm.everybody.agreed("take the step"):
                take()
        except BaseException:
            stepper.update.abandon()  # what ranks have begun where others have failed
            for unit in stepper.slots:
                unit.whole.doubt()
            raise

    def _judged(self, stepper: Stepper, finite: Sequence[bool], ended: list[Unit]) -> CurrentStep:
        """Whether this step does anything, the same on every rank; stops where skipping cannot help."""
        overflow = self.rounds.overflows(stepper.index, finite)
        hopeless = self.skips.skip() if overflow else None
        if hopeless is not None:
            raise self.agreement.nonfinite_error(hopeless)
        skipped = self.rounds.begin_step(stepper.index, finite)
        if skipped and not self.rounds.skipped:
            self.skips.skip_late(stepper.name)
        return CurrentStep(ended, overflow, skipped)

    def _stepper_of(self, optimizer: Optimizer) -> Stepper:
        return next(stepper for stepper in self.steppers if stepper.optimizer is optimizer)

    def _end_steps(self) -> None:
        """Put pieces back into their groups and guard them; nothing if no step is open."""
        for stepper in self.steppers:
            stepper.end()

    def _local_error(self, stepper: Stepper) -> StepError | TierError | None:
        try:
            stepper.check()
            self._model.check_attachment()
            self._check_reduced()
            for unit in self._all_units:
                unit.whole.check_untouched()
                unit.optimized.check_place()
            for unit in self._units:
                if unit.gradients.rest.failure is not None:
                    raise unit.gradients.rest.failure
                if unit.gradients.usage.late:
                    raise StepError(
                        f"rank {self._comm.rank}: gradients of unit {unit.spec.name!r} in "
                        "optimizer.param_groups were set to None between two backwards of one step, which only this "
                        "rank sees; use optimizer.zero_grad() or model.zero_grad()"
                    )
        except (StepError, TierError) as error:
            return error
        return None

    @untraced
    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stepper, now = self._stepper_of(optimizer), self._now
        assert now is not None, "the hook before it has run"
        if not stepper.update.taken:
            for unit in self._all_units:
                unit.whole.check_values()  # an optimizer with a list of its own changes the model past the masters
        self._end_steps()
        # Also after a step that was skipped: what a loop has done to the optimizer's parameters before it stands.
        self._refresh(stepper, now.ended)
        torch.clear_autocast_cache()  # casts of the old weights, in a block around several steps
        if not now.skipped:
            self._model.after_update()
        self.history.clear()
        # The loss scale is told once in a round, and of an overflow always.
        if now.overflow or not (now.skipped or self.rounds.told):
            self.skips.end_step(overflow=now.overflow)
            self.rounds.told = True
        if self.rounds.end_step(stepper.index):
            self._comm.calls.step += 1

    def _refresh(self, stepper: Stepper, ended: Collection[Unit]) -> None:
        """The model gets the new values; ``ended`` were kept whole for a backward."""
        for unit in stepper.slots:
            unit.refresh()
            # A pass may come before another optimizer's step ends this one.
            unit.whole.draw_anew(self._comm.calls.step + 1)
        for unit, own in stepper.slots.items():
            unit.whole.wait_for_update(late=len(self.steppers) == 1)
            # A graph may need parameters of other optimizers. Where the unit was kept whole for it, they are gone.
            unit.note_step(range(len(unit.parameters)) if unit in ended else own)
