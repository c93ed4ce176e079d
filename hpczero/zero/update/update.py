"""Step: what happens around ``optimizer.step()``.

Owns: when ranks agree before an update, the clipping, skipping, and what follows the update. Must not know: modules,
hooks on them, MPI calls, what ranks compare.
"""

from __future__ import annotations

import itertools
import logging
import math
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hpczero.comm.collectives import Collectives
from hpczero.errors import ConfigError, StepError
from hpczero.plan.precision import LossScaler, Precision
from hpczero.zero.calls.advice import Advice
from hpczero.zero.calls.untraced import untraced
from hpczero.zero.units.shard_gradient import guard_shards, open_shards
from hpczero.zero.units.unit import Unit
from hpczero.zero.update.agreement import Agreement
from hpczero.zero.update.gradient_norms import GradientNorms
from hpczero.zero.update.optimizers import describe_options
from hpczero.zero.update.parts import PartedUpdate

logger = logging.getLogger("hpczero.step")


@dataclass
class StepCounts:
    """Steps that were skipped because some gradient was not finite; equal on every rank."""

    skipped: int = 0
    in_a_row: int = 0


class Step:
    """Pre- and post-hook of one optimizer. All public methods are collective over the transport's group."""

    def __init__(
        self,
        units: Sequence[Unit],
        comm: Collectives,
        *,
        precision: Precision,
        scaler: LossScaler,
        advice: Advice,
        in_backward: Callable[[], bool],
        check_attachment: Callable[[], None],
        before_update: Callable[[], None],
        after_update: Callable[[], None],
        replaced: Callable[[], list[str]],
    ) -> None:
        """Not collective.

        Args:
            units: in unit order.
            comm: the transport.
            precision: what a non-finite gradient means.
            scaler: the loss scale, told of every step.
            advice: told what the comparison of ranks found.
            in_backward: whether a backward runs, or was interrupted.
            check_attachment: raises StepError if model or optimizer hold parameters that no unit knows.
            before_update: called before values change.
            after_update: called once the parameters are up to date.
            replaced: what of the model is not as it was at first; compared over ranks.
        """
        self.counts = StepCounts()
        self._all_units = list(units)
        self._units = [unit for unit in units if unit.spec.trainable]
        self._comm = comm
        self._precision = precision
        self._scaler = scaler
        self.agreement = Agreement(self._units, comm, advice)
        self._in_backward = in_backward
        self._check_attachment = check_attachment
        self._before_update = before_update
        self._after_update = after_update
        self._replaced = replaced
        self.norms = GradientNorms(self._units, comm, self._check_reduced)
        self._incomplete = False  # some gradients are those of a backward that did not finish
        self._scalings: list[str] = []
        self._changes = 0  # of all changes of single gradients, in their order
        self._skipping = False
        self._open = False  # shards are, for the time of a step
        self._told = False
        self._handles: list[RemovableHandle] = []
        self._optimizer: Optimizer | None = None
        self._parted: PartedUpdate | None = None

    def attach(self, optimizer: Optimizer) -> None:
        """Drive ``optimizer.step`` through torch's own hooks."""
        pre = cast(OrderedDict[int, Any], optimizer._optimizer_step_pre_hooks)
        post = cast(OrderedDict[int, Any], optimizer._optimizer_step_post_hooks)
        before = optimizer.register_step_pre_hook(self._before)
        after = optimizer.register_step_post_hook(self._after)
        self._handles = [before, after]
        # Hooks of the user's find guarded gradients before a step and new values on all ranks after it, whether they
        # were registered before these or later.
        post.move_to_end(after.id, last=False)

        def register_step_pre_hook(hook: Any) -> RemovableHandle:
            handle = Optimizer.register_step_pre_hook(optimizer, hook)
            if before.id in pre:
                pre.move_to_end(before.id)
            return handle

        optimizer.__dict__["register_step_pre_hook"] = register_step_pre_hook
        self._optimizer = optimizer
        self._parted = PartedUpdate(self._units, optimizer)
        guard_shards(self._shards)

    def detach(self) -> None:
        """Take the hooks away; not collective. The optimizer must not step for this model any more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._optimizer is not None:
            self._optimizer.__dict__.pop("register_step_pre_hook", None)
        open_shards(self._shards)

    def forget_gradients(self) -> None:
        """The gradients are gone, and what was done to them is void."""
        self._guard()  # a step may have been cut off
        self.norms.forget()
        self._scalings.clear()
        self._changes = 0
        self._incomplete = False

    def note_interruption(self) -> None:
        """A backward did not finish; until all its gradients are gone there is no step."""
        self._incomplete = True

    def note_drop(self) -> None:
        """A gradient is gone."""
        self._incomplete = self._incomplete and self._any_gradients

    @property
    def _any_gradients(self) -> bool:
        return any(u.gradients.present or u.gradients.waiting for u in self._units)

    def note_scaling(self, what: str) -> None:
        """This rank's gradients were scaled by something that must be equal on all ranks; the step compares it."""
        self.norms.forget()
        if what not in self._scalings:
            self._scalings.append(what)

    def note_change(self, name: str, what: str) -> None:
        """As ``note_scaling``, of one parameter's gradient; which ones and in which order is compared too."""
        self.note_scaling(what)
        self._changes = zlib.crc32(f"{name} {what}".encode(), self._changes)

    def clip(self, max_norm: float, norm_type: float) -> float:
        """Scale the gradients so that their norm is at most ``max_norm``; returns the norm before, as torch does.

        A norm that is not finite leaves the gradients alone: the step decides what that means.
        """
        if not max_norm > 0:
            raise ConfigError(f"max_norm: got {max_norm!r}, expected a number above 0")
        self.note_scaling(f"gradients clipped with max_norm={max_norm!r}")
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
        if self._in_backward() or self._incomplete:
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
        self._before_update()
        finite, used = self.agreement.reach(
            self._equal_on_all_ranks(optimizer),
            error=self._local_error(),
            known_finite=self.norms.are_finite,
        )
        self._skipping = not finite
        if self._skipping:
            self._skip()
            return
        for unit, (now, emptied) in zip(self._units, used, strict=True):
            flags = unit.gradients.usage.step(now, emptied)
            if unit.gradients.present:
                unit.gradients.skip_unused(flags)
        if not any(unit.gradients.present for unit in self._units):
            self._tell_nothing_to_do()
        assert self._parted is not None, "attached"
        self._open = True
        open_shards(self._shards)
        self._parted.take()

    def _guard(self) -> None:
        """After a step; also after one that has raised."""
        if self._parted is not None:
            self._parted.restore()
        if self._open:
            self._open = False
            guard_shards(self._shards)

    @property
    def _shards(self) -> Iterator[nn.Parameter]:
        return itertools.chain.from_iterable(unit.shards for unit in self._units)

    def _tell_nothing_to_do(self) -> None:
        if self._comm.group.is_root and not self._told:
            self._told = True
            logger.warning(
                "step %d: no parameter has a gradient, so the optimizer changes nothing, as in plain torch; was "
                "backward called since zero_grad, on a loss that this very model made?",
                self._comm.step,
            )

    def _equal_on_all_ranks(self, optimizer: Optimizer) -> list[str]:
        texts = [*describe_options(optimizer), *self._scalings, *self._replaced()]
        if self._changes:
            texts.append(f"changes of parameter.grad, by parameter and order: {self._changes:08x}")
        return texts

    def _local_error(self) -> StepError | None:
        try:
            self._check_attachment()
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
        self.counts.skipped += 1
        self.counts.in_a_row += 1
        scaled = self._precision.loss_scale is not None
        if not scaled and self._precision.nonfinite == "raise":
            reason = "precision.nonfinite='skip' would skip such steps"
        elif scaled and self._scaler.exhausted:
            reason = f"the loss scale is at its minimum {self._scaler.scale:g}"
        elif self.counts.in_a_row >= self._precision.max_skips:
            reason = f"{self.counts.in_a_row} steps in a row were skipped"
        else:
            if self._comm.group.is_root:
                logger.warning(
                    "step %d skipped: a gradient is not finite (loss scale %g, %d skipped so far)",
                    self._comm.step,
                    self._scaler.scale,
                    self.counts.skipped,
                )
            for unit in self._units:
                unit.gradients.drop()
            return
        raise self.agreement.nonfinite_error(reason)

    @untraced
    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._parted is None or not self._parted.taken:
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
        if not self._skipping:
            self.counts.in_a_row = 0
            self._after_update()
        self._scaler.update(overflow=self._skipping)
        self.forget_gradients()
        self._comm.step += 1
