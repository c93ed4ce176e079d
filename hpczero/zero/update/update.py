"""Step: what happens around ``optimizer.step()``.

Owns: when ranks agree before an update, the clipping, skipping, and what follows the update. Must not know: modules,
hooks on them, MPI calls, what ranks compare.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hpczero.comm.collectives import Collectives
from hpczero.errors import ConfigError, StepError
from hpczero.plan.precision import LossScaler, Precision
from hpczero.zero.calls.advice import Advice
from hpczero.zero.calls.untraced import untraced
from hpczero.zero.units.shard_gradient import guard_shards, open_shards
from hpczero.zero.units.unit import Unit
from hpczero.zero.update.agreement import Agreement
from hpczero.zero.update.gradient_history import GradientHistory
from hpczero.zero.update.gradient_norms import GradientNorms
from hpczero.zero.update.optimizers import describe_options
from hpczero.zero.update.parts import PartedUpdate
from hpczero.zero.update.skips import Skips
from hpczero.zero.update.step_hooks import StepHooks


@dataclass(frozen=True)
class ModelSide:
    """What a step asks of the model that it belongs to, and tells it.

    Attributes:
        in_backward: whether a backward runs, or was interrupted.
        check_attachment: raises StepError if model or optimizer hold parameters that no unit knows.
        before_update: called before values change.
        after_update: called once the parameters are up to date.
        replaced: what of the model is not as it was at first; compared over ranks.
    """

    in_backward: Callable[[], bool]
    check_attachment: Callable[[], None]
    before_update: Callable[[], None]
    after_update: Callable[[], None]
    replaced: Callable[[], list[str]]


class Step:
    """Pre- and post-hook of one optimizer. All public methods are collective over the transport's group."""

    def __init__(
        self,
        units: Sequence[Unit],
        comm: Collectives,
        model: ModelSide,
        *,
        precision: Precision,
        scaler: LossScaler,
        advice: Advice,
    ) -> None:
        """Not collective.

        Args:
            units: in unit order.
            comm: the transport.
            model: whose step it is.
            precision: what a non-finite gradient means.
            scaler: the loss scale, told of every step.
            advice: told what the comparison of ranks found.
        """
        self._all_units = list(units)
        self._units = [unit for unit in units if unit.spec.trainable]
        self._comm = comm
        self._model = model
        self.skips = Skips(comm, precision, scaler)
        self.agreement = Agreement(self._units, comm, advice)
        self.norms = GradientNorms(self._units, comm, self._check_reduced)
        self.history = GradientHistory(self._units, self.norms)
        self._open = False  # shards are, for the time of a step
        self._hooks: StepHooks | None = None
        self.parted: PartedUpdate | None = None

    def attach(self, optimizer: Optimizer) -> None:
        """Drive ``optimizer.step`` through torch's own hooks."""
        self._hooks = StepHooks(optimizer, self._before, self._after)
        self.parted = PartedUpdate(self._units, optimizer)
        self.parted.adopt()  # Adagrad has state from the start
        guard_shards(self._shards)

    def detach(self) -> None:
        """Take the hooks away; not collective. The optimizer must not step for this model any more."""
        if self._hooks is not None:
            self._hooks.remove()
        open_shards(self._shards)

    def forget_gradients(self) -> None:
        """The gradients are gone, and what was done to them is void."""
        self._guard()  # a step may have been cut off
        self.history.clear()

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
            for unit in self._units:
                if unit.gradients.present:
                    unit.gradients.scale(factor)
            self.norms.forget()
            self.norms.note_finite()  # finite numbers times one below 1
        return norm

    def _check_reduced(self) -> None:
        if self._model.in_backward() or self.history.incomplete:
            raise StepError(
                f"rank {self._comm.group.rank}: the last backward did not finish (an exception?), so some "
                "gradients are missing; call optimizer.zero_grad() and run backward again before the step"
            )
        waiting = [unit.spec.name for unit in self._units if unit.gradients.waiting]
        if waiting:
            raise StepError(
                f"rank {self._comm.group.rank}: {len(waiting)} unit(s), first {waiting[0]!r}, hold gradients "
                "that were never reduced over ranks; run the last backward before the step outside no_sync"
            )

    @untraced
    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs.get("closure") is not None or any(a is not None for a in args[1:]):
            raise ConfigError(
                "optimizer.step(closure) would run backward inside the step; call backward first, "
                "then optimizer.step()"
            )
        self._guard()  # torch's step before this one may have raised
        self._model.before_update()
        finite, used = self.agreement.reach(
            [*describe_options(optimizer), *self.history.texts, *self._model.replaced()],
            error=self._local_error(),
            known_finite=self.norms.are_finite,
        )
        self.skips.now = False
        if not finite:
            self._skip()
            return
        for unit, (now, emptied) in zip(self._units, used, strict=True):
            flags = unit.gradients.usage.step(now, emptied)
            if unit.gradients.present:
                unit.gradients.skip_unused(flags)
        if not any(unit.gradients.present for unit in self._units):
            self.skips.tell_nothing_to_do()
        assert self.parted is not None, "attached"
        self._open = True
        open_shards(self._shards)
        if self._hooks is not None and self._hooks.are_last:
            self.parted.take()

    def _guard(self) -> None:
        """After a step; also after one that has raised."""
        if self.parted is not None:
            self.parted.restore()
        if self._open:
            self._open = False
            guard_shards(self._shards)

    @property
    def _shards(self) -> Iterator[nn.Parameter]:
        return itertools.chain.from_iterable(unit.shards for unit in self._units)

    def _local_error(self) -> StepError | None:
        try:
            self._model.check_attachment()
            self._check_reduced()
            for unit in self._all_units:
                unit.whole.check_untouched()
                unit.optimized.check_place()
            for unit in self._units:
                if unit.gradients.usage.late:
                    raise StepError(
                        f"rank {self._comm.group.rank}: gradients of unit {unit.spec.name!r} in "
                        "optimizer.param_groups were set to None between two backwards of one step, which only this "
                        "rank sees; use optimizer.zero_grad() or model.zero_grad()"
                    )
        except StepError as error:
            return error
        return None

    def _skip(self) -> None:
        """Make this step do nothing, on every rank, or stop where that cannot help."""
        hopeless = self.skips.skip()
        if hopeless is not None:
            raise self.agreement.nonfinite_error(hopeless)
        for unit in self._units:
            unit.gradients.drop()

    @untraced
    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.parted is None or not self.parted.taken:
            for unit in self._all_units:
                unit.whole.check_values()  # an optimizer with a list of its own changes the model past the masters
        self._guard()
        # Also after a step that was skipped: what a loop has done to the optimizer's parameters before it stands.
        for unit in self._units:
            unit.refresh()
        for unit in self._units:
            unit.whole.wait_for_update()
            unit.note_step()
        torch.clear_autocast_cache()  # casts of the old weights, in a block around several steps
        if not self.skips.now:
            self._model.after_update()
        self.skips.end_step()
        self.forget_gradients()
        self._comm.step += 1
