"""Attachment: whether the model and its optimizers still hold what was sharded, and nothing else.

Owns: the refusal of parameters that came later. Must not know: buffers, values, what a step does.

It is checked at every step. To walk through modules by torch's own iterators costs more than the rest of a small step
(issue 17). The check therefore compares identities first, and looks for names once something is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from hpczero.errors import PlanError, StepError
from hpczero.zero.buffers import modules_of
from hpczero.zero.calls.ways import untraced
from hpczero.zero.schedule import Schedule
from hpczero.zero.units.guard import ShardedParameter, moved_or_cast
from hpczero.zero.units.unit import Unit
from hpczero.zero.update.optimizer_state import OptimizerState
from hpczero.zero.update.stepper import Stepper
from hpczero.zero.update.update import Step


class Zeroing:
    """Of one model; nothing here is collective."""

    def __init__(
        self,
        units: Sequence[Unit],
        schedule: Schedule,
        step: Step,
        *,
        next_part: Callable[[], object],
        begin_anew: Callable[[], None],
    ) -> None:
        """Hooks are attached.

        Args:
            units: of the model.
            schedule: of its backwards.
            step: of its optimizers, none yet.
            next_part: of ``accumulate``; another object after each part.
            begin_anew: ``accumulate`` has no part to come.
        """
        self._units = list(units)
        self._schedule, self._step = schedule, step
        self._next_part, self._begin_anew = next_part, begin_anew
        # Optimizers whose gradients were zeroed one after the other, with ``next_part`` meanwhile.
        self._row: tuple[object, set[int]] = None, set()

    @untraced
    def all(self, set_to_none: bool = True) -> None:
        """As torch's; also forgets local gradients of ``no_sync`` and an interrupted backward."""
        if self._schedule.backward.runs:
            self._schedule.reset()
        self._begin_anew()
        self._step.forget_gradients()
        for unit in self._units:
            if unit.spec.trainable:
                unit.gradients.drop(set_to_none=set_to_none)
            else:
                unit.whole.watch.drop_own_gradients(set_to_none=set_to_none)

    def of(self, stepper: Stepper) -> Callable[..., None]:
        """``zero_grad`` of one optimizer."""
        if len(self._step.steppers) == 1:
            return self.all

        @untraced
        def zero_grad(set_to_none: bool = True) -> None:
            if self._schedule.backward.runs:
                self._schedule.reset()
                self._step.history.interruption()  # until the other optimizers' are gone, too
            self._step.drop_gradients(stepper, set_to_none=set_to_none)
            part, zeroed = self._row
            if part is not self._next_part():
                part, zeroed = self._next_part(), set()
            self._row = part, zeroed | {stepper.index}
            if len(self._row[1]) == len(self._step.steppers):
                self._begin_anew()

        return zero_grad


# Where copy, pickle and torch look them up before the class.
_NAMES = ("__reduce_ex__", "_apply")


class HookSeal:
    """Seal on the model and on every module that has hooks.

    A copy of such a module would drive the original's units.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        """Put the seal on.

        Args:
            modules: by qualified name.
        """
        self._modules = modules
        self._handles = [
            each.register_load_state_dict_pre_hook(_refuse_values)  # type: ignore[no-untyped-call]
            for each in {*modules.values()}
        ]
        for name, module in modules.items():
            module.__dict__["__reduce_ex__"] = _refuse_copies
            module.__dict__["_apply"] = partial(_pass_what_changes_nothing, name, module)

    def remove(self) -> None:
        """Take the seal off."""
        for handle in self._handles:
            handle.remove()
        for module in self._modules.values():
            for name in _NAMES:
                module.__dict__.pop(name, None)


def _refuse_values(
    module: nn.Module, state: Mapping[str, Any], prefix: str, how: Mapping[str, Any], *_: Any
) -> None:
    """Refuse ``load_state_dict`` of parameters that are sharded, once; torch tells of each.

    Raises:
        StepError: the message names the way.
    """
    if how.get("assign_to_params_buffers"):  # the next step names what came
        return
    for name, parameter in module.named_parameters(prefix.removesuffix(".")):
        if isinstance(parameter, ShardedParameter) and name in state:
            raise StepError(
                f"parameter {name!r} is sharded and its memory given back (stage 3); call load_state_dict before "
                "zeroify, or inside `with hpczero.gathered(model, modifier_rank=0):`"
            )


def _refuse_copies(protocol: Any) -> NoReturn:
    """Refuse ``copy.deepcopy``, ``pickle`` and ``torch.save``.

    Raises:
        PlanError: always; the message says what to do instead.
    """
    raise PlanError(
        "a zeroified model or one of its units cannot be copied or pickled (copy.deepcopy, AveragedModel, "
        "torch.save(model)): a copy would share units and communicators with it. Save hpczero.full_state_dict(model); "
        "for a copy build a plain model and load that into it, or copy the model before zeroify"
    )


def _pass_what_changes_nothing(
    name: str, module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module:
    """Allow ``module._apply(fn)``, which is ``.to``, ``.float``, ``.cpu`` and the like, if ``fn`` changes nothing.

    Raises:
        StepError: it would change something; the message names the first such tensor. Nothing was changed.
    """
    prefix = f"{name}." if name else ""
    kinds = chain(
        (("parameter", n, p) for n, p in module.named_parameters(recurse=recurse)),
        (("buffer", n, b) for n, b in module.named_buffers(recurse=recurse)),
    )
    with torch.no_grad():
        for kind, of_module, tensor in kinds:
            changed = fn(tensor)
            if changed is not tensor:
                raise StepError(moved_or_cast(f"{kind} {prefix + of_module!r}", tensor, changed))
    return module


class Attachment:
    """Of one model and its optimizers.

    Attributes:
        modules: modules of the model, as ``check`` found them last.
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit], rank: int) -> None:
        """Not collective.

        Args:
            model: its parameters belong to ``units``.
            units: all units of the model.
            rank: rank of this process, for errors.
        """
        self._model = model
        self.modules = modules_of(model)
        self._rank = rank
        # Ids stay theirs: units keep the tensors.
        self._parameters = {id(p) for unit in units for p in unit.parameters}
        self._watched: list[tuple[Stepper, OptimizerState, set[int], int]] = []
        self._others: list[Callable[[], None]] = []

    def watch(self, stepper: Stepper, state: OptimizerState) -> None:
        """Check this optimizer too from now on."""
        count = len(stepper.optimizer.param_groups)
        self._watched.append((stepper, state, {id(shard) for shard in stepper.shards}, count))

    def follow(self) -> None:
        """The optimizers have more shards, and more groups."""
        watched, self._watched = self._watched, []
        for stepper, state, _, _ in watched:
            self.watch(stepper, state)

    def also(self, check: Callable[[], None]) -> None:
        """Call ``check`` too from now on; it may raise StepError or TierError, which all ranks then do."""
        self._others.append(check)

    def check(self) -> None:
        """Refuse parameters that came after ``zeroify``. No unit would reduce their gradients, and ranks would differ.

        Raises:
            StepError: the message names the first such parameter of the model, or the optimizer's group.
            StepError, TierError: of what was added by ``also``.
        """
        known = self._parameters
        self.modules = modules_of(self._model)
        for module in self.modules:
            for parameter in module._parameters.values():
                if parameter is not None and id(parameter) not in known:
                    self._refuse_parameter()
        for stepper, state, shards, count in self._watched:
            for index, group in enumerate(stepper.optimizer.param_groups[:count]):
                foreign = sum(id(parameter) not in shards for parameter in group["params"])
                if foreign:
                    raise StepError(
                        f"rank {self._rank}: group {index} of {stepper.name} has {foreign} parameter(s) put in "
                        "after zeroify, whose gradients nobody would reduce; put them in by "
                        "optimizer.add_param_group, in a group of their own"
                    )
            state.check(shards)
        for check in self._others:
            check()

    def _refuse_parameter(self) -> None:
        for name, parameter in self._model.named_parameters():
            if id(parameter) not in self._parameters:
                raise StepError(
                    f"rank {self._rank}: parameter {name!r} came into the model after zeroify (a module "
                    "replaced, load_state_dict(assign=True)?), so it is neither sharded nor trained; build the whole "
                    "model before zeroify, and change values inside `with hpczero.gathered(model, modifier_rank=0):`"
                )
