"""Attachment: whether the model and its optimizers still hold what was sharded; and Unfreezing: what trains since.

The attachment is checked at every step. To walk through modules by torch's own iterators costs more than the rest of a
small step. The check therefore compares identities first, and looks for names once something is wrong.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from hpczero.errors import HpcZeroError, PlanError, StepError
from hpczero.job.group import unlike
from hpczero.plan.placement import part_of
from hpczero.zero.buffers import modules_of
from hpczero.zero.calls.ways import untraced
from hpczero.zero.refusals import check_embeddings
from hpczero.zero.units.guard import ShardedParameter, moved_or_cast, own_gradient
from hpczero.zero.units.unit import Unit
from hpczero.zero.update.optimizer_state import OptimizerState
from hpczero.zero.update.optimizers import OptimizerSet, point_at_shards
from hpczero.zero.update.update import Stepper

if TYPE_CHECKING:
    from hpczero.zero.sharding import Sharding


class Zeroing:
    """``zero_grad`` of a model and of its optimizers; nothing here is collective."""

    def __init__(self, sharding: Sharding) -> None:
        self._sharding, self._schedule = sharding, sharding.schedule
        # Optimizers whose gradients were zeroed one after the other, with ``next_part`` of accumulate meanwhile.
        self._row: tuple[object, set[int]] = None, set()

    @untraced
    def all(self, set_to_none: bool = True) -> None:
        """As torch's; also forgets local gradients of ``no_sync`` and an interrupted backward."""
        if self._schedule.backward.runs:
            self._schedule.reset()
        self._sharding.next_part = None
        self._sharding.step.forget_gradients()
        for unit in self._sharding.units:
            if unit.spec.trainable:
                unit.gradients.drop(set_to_none=set_to_none)
            else:
                unit.whole.watch.drop_own_gradients(set_to_none=set_to_none)

    def of(self, stepper: Stepper) -> Callable[..., None]:
        """``zero_grad`` of one optimizer."""
        sharding, step = self._sharding, self._sharding.step
        if len(step.steppers) == 1:
            return self.all

        @untraced
        def zero_grad(set_to_none: bool = True) -> None:
            if self._schedule.backward.runs:
                self._schedule.reset()
                step.history.interruption()  # until the other optimizers' are gone, too
            step.drop_gradients(stepper, set_to_none=set_to_none)
            part, zeroed = self._row
            zeroed = zeroed if part is sharding.next_part else set()
            self._row = sharding.next_part, zeroed | {stepper.index}
            if len(self._row[1]) == len(step.steppers):
                sharding.next_part = None

        return zero_grad


# Where copy, pickle and torch look them up before the class.
_NAMES = ("__reduce_ex__", "_apply")


class HookSeal:
    """Seal on the model and on every module that has hooks, whose copy would drive the original's units."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        """Put the seal on modules, by qualified name."""
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
    """Refuse ``load_state_dict`` of parameters that are sharded, once; torch tells of each."""
    if how.get("assign_to_params_buffers"):  # the next step names what came
        return
    for name, parameter in module.named_parameters(prefix.removesuffix(".")):
        if isinstance(parameter, ShardedParameter) and name in state:
            raise StepError(
                f"parameter {name!r} is sharded and its memory given back (stage 3); call load_state_dict before "
                "zeroify, or inside `with hpczero.gathered(model, modifier_rank=0):`"
            )


def _refuse_copies(protocol: Any) -> NoReturn:
    """Refuse ``copy.deepcopy``, ``pickle`` and ``torch.save``."""
    raise PlanError(
        "a zeroified model or one of its units cannot be copied or pickled (copy.deepcopy, AveragedModel, "
        "torch.save(model)): a copy would share units and communicators with it. Save hpczero.full_state_dict(model); "
        "for a copy build a plain model and load that into it, or copy the model before zeroify"
    )


def _pass_what_changes_nothing(
    name: str, module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module:
    """Allow ``module._apply(fn)``, which is ``.to``, ``.float``, ``.cpu`` and the like, if ``fn`` changes nothing."""
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
    """Of one model and its optimizers. Not collective.

    Attributes:
        modules: modules of the model, as ``check`` found them last.
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit], rank: int) -> None:
        """``units``: all units of ``model``; ``rank`` of this process, for errors."""
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


# Unfreezing: parameters that train from some step on, and groups that optimizers get meanwhile.
#
#     between steps      requires_grad_(True), optimizer.add_param_group      noted, on each rank by itself
#     end of backward    all ranks compare what they have noted; where it is equal, frozen units become trained ones, in
#                        place, and the gradients that autograd has left on their parameters are reduced
#     step               all ranks compare what is noted and what is frozen, with everything else that a step compares
#
# Forward and backward up to its end make the same calls on all ranks, whatever each rank has noted. So ranks that have
# noted different things meet at the step, which refuses it by name.
#
# A parameter that is frozen again keeps its master, its place in the optimizer and its state, as in torch: it gets no
# gradient, and the step leaves it alone.

FROZEN = " (frozen)"
_trains = attrgetter("requires_grad")

Place = tuple[int, int]
"""An optimizer, and one of its groups."""


@dataclass(frozen=True)
class Change:
    """What is about to change.

    Attributes:
        units: that are going to train.
        places: of each of their parameters, by name.
        waiting: of each frozen parameter in a group, by name.
    """

    units: list[Unit]
    places: dict[str, Place]
    waiting: dict[str, Place]


class Unfreezing:
    """Of one model with optimizers."""

    def __init__(self, sharding: Sharding) -> None:
        """Before the optimizers are pointed at shards. Not collective."""
        self._sharding = sharding
        self._optimizers: OptimizerSet = sharding.optimizers
        self._names = {id(p): name for name, p in sharding.model.named_parameters()}
        # Frozen parameters that are in a group: torch keeps them there, and steps on them once they have gradients.
        self._waiting: dict[str, Place] = dict(
            self._raw(self._optimizers, [0] * len(self._optimizers))
        )
        for unit in sharding.units:
            for slot in unit.spec.layout.slots if unit.spec.trainable else ():
                self._waiting.pop(slot.name, None)
        self._cut_off = False
        self._note()

    def _note(self) -> None:
        """The plan is as model and optimizers are now."""
        self._counts = [len(optimizer.param_groups) for optimizer in self._optimizers]
        units = self._sharding.units
        self._frozen = [p for u in units if not u.spec.trainable for p in u.parameters]

    @property
    def pending(self) -> bool:
        """Whether there is anything that the plan does not know, on this rank. Asked in every backward and step."""
        if not self._counts:
            return False
        groups = [len(optimizer.param_groups) for optimizer in self._optimizers]
        return bool(self._unfrozen) or groups != self._counts

    @property
    def _unfrozen(self) -> list[nn.Parameter]:
        with torch._C.DisableTorchFunctionSubclass():
            return [*filter(_trains, self._frozen)]

    @property
    def texts(self) -> list[str]:
        """What must be equal on all ranks at a step."""
        found = []
        names = [n for u in self._sharding.units if u.spec.trainable for n in u.whole.watch.frozen]
        if names:
            found.append(
                f"{len(names)} frozen parameter(s), first {names[0]!r} ({_sum(names):08x})"
            )
        if self.pending:
            found += self._changes()
        return found

    @property
    def _in_parts(self) -> bool:
        sharding = self._sharding
        return sharding.topology.model_parallel.size > 1 or part_of(sharding.model) is not None

    def check(self) -> None:
        """Before a step: refuse what ranks with other parts of the model know nothing of, and half of a change.

        Raises:
            StepError: on ranks where something was unfrozen or added, or an exception has left the change.
        """
        if self._cut_off:
            raise StepError(
                f"rank {self._sharding.topology.rank}: an exception cut off the change of what trains, so some units "
                "may train in no group of an optimizer; build and zeroify the model anew, and load a checkpoint"
            )
        if self.pending and self._in_parts:
            raise StepError(
                f"rank {self._sharding.topology.rank}: there is {self._changes()[0]} in a model of which ranks hold "
                "parts (tensor or pipeline parallelism); unfreeze parameters and make groups before zeroify"
            )

    @property
    def _delayed(self) -> bool:
        store = self._sharding.away.store
        return store is not None and store.delayed

    def _changes(self) -> list[str]:
        units = [unit for unit in self._sharding.units if not unit.spec.trainable]
        names = [name for unit in units for name in unit.whole.watch.unfrozen]
        found = [f"an unfrozen parameter {name!r}" for name in names]
        for index, optimizer in enumerate(self._optimizers):
            for number in range(self._counts[index], len(optimizer.param_groups)):
                group = optimizer.param_groups[number]
                held = [self._names.get(id(p), "?") for p in group["params"]]
                found.append(
                    f"an added group {number} of {self._optimizers.name(index)}, with {len(held)} parameter(s), first "
                    f"{held[:1]} ({_sum(held):08x})"
                )
            for number in range(len(optimizer.param_groups), self._counts[index]):
                found.append(f"no group {number} of {self._optimizers.name(index)} any more")
        return found

    def _raw(self, optimizers: OptimizerSet, first: Sequence[int]) -> Iterator[tuple[str, Place]]:
        """Parameters of the model in groups from ``first`` on, of each optimizer."""
        for index, optimizer in enumerate(optimizers):
            for number, group in enumerate(optimizer.param_groups):
                for parameter in group["params"] if number >= first[index] else ():
                    if id(parameter) in self._names:
                        yield self._names[id(parameter)], (index, number)

    # --- the change ----------------------------------------------------------------------------------------------

    def have_gradients(self) -> bool:
        """Whether parameters that the plan has as frozen have gradients, on this rank."""
        unfrozen = self._unfrozen if self._counts else ()
        return any(own_gradient(parameter) is not None for parameter in unfrozen)

    def after_backward(self) -> None:
        """Settle where all ranks ask for the same, and it can be done; else the step tells. Collective over world.

        Nothing where no parameter is frozen, or where ranks hold parts of a model.
        """
        sharding = self._sharding
        if not (self._counts and self._frozen) or self._in_parts or self._cut_off:
            return
        change = None
        if self.pending:
            with suppress(HpcZeroError):
                change = self._change()
        words = np.array(
            [0 if change is None else 1 + _sum(self._changes())], dtype=np.uint64
        ).view(np.uint8)
        agreed = sharding.collectives.agree(np.concatenate([words, ~words]), name="what trains")
        same = (agreed[: len(words)] == ~agreed[len(words) :]).all()
        if change is not None and same:
            self._apply(change)
            sharding.reduce(change.units)

    def settle_at_step(self) -> bool:
        """Bring plan, units and optimizers to what is asked for; whether there was anything. Collective over world.

        All ranks ask for the same, which the step has compared.

        Raises:
            StepError: on every rank: it cannot be done; nothing has changed.
        """
        if not self.pending:
            return False
        topology = self._sharding.topology
        with topology.agreed("change what trains"):
            change = self._change()
        have = topology.world.share(np.array([float(self.have_gradients())])).any()
        self._apply(change)
        if have:
            self._sharding.reduce(change.units)
        return True

    def settle(self) -> None:
        """As ``settle_at_step``, where nobody has compared yet. Collective over world.

        Raises:
            StepError: on every rank: ranks ask for different things, or it cannot be done; nothing has changed.
        """
        if not self._counts or self._in_parts:
            return
        topology, texts = self._sharding.topology, self._changes()
        everybody = topology.world.share(np.array([float(_sum(texts))]))[:, 0]
        differs = unlike(topology.world, texts) if (everybody != everybody[0]).any() else None
        with topology.agreed("compare what trains"):
            self.check()
            if differs is not None:
                raise StepError(
                    f"rank {topology.rank}: since the last step there is {differs[0]}, where rank 0 has {differs[1]}; "
                    "unfreeze parameters and add groups on all ranks alike"
                )
        self.settle_at_step()

    def _change(self) -> Change:
        """What is asked for.

        Raises:
            StepError: it cannot be done; names the parameter or the group.
        """
        sharding = self._sharding
        self._check_groups()
        waiting = dict(self._waiting)
        known = {s.name for u in sharding.units if u.spec.trainable for s in u.spec.layout.slots}
        for name, place in self._raw(self._optimizers, self._counts):
            if name in waiting or name in known:
                raise StepError(
                    f"parameter {name!r} in group {place[1]} of {self._optimizers.name(place[0])}, which was added, is "
                    "in another group already; give each parameter to one group"
                )
            waiting[name] = place
        units = [u for u in sharding.units if not u.spec.trainable and u.whole.watch.unfrozen]
        for unit in units:
            self._check_unit(unit)
        names = [slot.name for unit in units for slot in unit.spec.layout.slots]
        missing = [name for name in names if name not in waiting]
        if missing:
            raise StepError(
                f"{len(missing)} parameter(s) are unfrozen and in no optimizer group, first {missing[0]!r}; add a "
                "group with them before the next forward (optimizer.add_param_group), or freeze them again"
            )
        if units:
            check_embeddings(sharding.model)
        places = {name: waiting.pop(name) for name in names}
        return Change(units, places, waiting)

    def _check_groups(self) -> None:
        for index, optimizer in enumerate(self._optimizers):
            count, name = self._counts[index], self._optimizers.name(index)
            if len(optimizer.param_groups) < count:
                raise StepError(
                    f"{name} has {len(optimizer.param_groups)} groups, and had {count}; keep all groups"
                )
            if len(optimizer.param_groups) > count and self._delayed:
                raise StepError(
                    f"group {count} of {name} was added after zeroify, with a delayed update (offload), which is one "
                    "step late and would not be for it; make all groups before zeroify, or take delayed=False"
                )
            for number, group in enumerate(optimizer.param_groups[count:], count):
                foreign = sum(id(p) not in self._names for p in group["params"])
                if foreign:
                    raise StepError(
                        f"group {number} of {name} has {foreign} parameter(s) put in after zeroify "
                        "(add_param_group?) that are not of this model, whose gradients nobody would reduce; "
                        "give it parameters that were in the model at zeroify"
                    )

    def _check_unit(self, unit: Unit) -> None:
        """Refuse what cannot be unfrozen."""
        sharding, name = self._sharding, unit.whole.watch.unfrozen[0]
        title = f"parameter {name!r} was unfrozen after zeroify, "
        frozen = unit.whole.watch.frozen
        if unit.spec.codec is not None:
            raise StepError(
                f"{title}and rests as {unit.spec.codec.name}: its values are codes, which no step of an optimizer "
                "changes; leave it frozen, or zeroify the model without quantize"
            )
        if self._delayed:
            raise StepError(
                f"{title}with a delayed update (offload), which is one step late and would not be for it; unfreeze "
                "before zeroify, or take delayed=False"
            )
        if sharding.averages:
            raise StepError(
                f"{title}while averages of the weights are kept ({sorted(sharding.averages)}), which know what trained "
                "when they were made; close them first"
            )
        if frozen:
            raise StepError(
                f"{title}and {frozen[0]!r}, of the same unit {unit.spec.name!r}, was not; unfreeze whole units, give "
                "such parts units of their own (rule=...), or unfreeze before zeroify"
            )

    @torch.no_grad()
    @torch.inference_mode(False)
    def _apply(self, change: Change) -> None:
        """Everything follows; nothing here can be refused."""
        sharding, self._cut_off = self._sharding, True
        numbers = self._optimizers.recount()
        first = [self._optimizers.groups_of(index).start for index in range(len(self._optimizers))]
        taken = {unit.spec.name for unit in sharding.units}
        for unit in sharding.units:
            spec = unit.spec
            if unit in change.units:
                places = [change.places[slot.name] for slot in spec.layout.slots]
                title = _title(spec.name, taken)
                taken.add(title)
                groups = tuple(first[index] + number for index, number in places)
                sharding.train(unit, replace(spec, name=title, groups=groups, trainable=True))
            elif any(numbers.get(group, group) != group for group in spec.groups):
                unit.spec = replace(spec, groups=tuple(numbers.get(g, g) for g in spec.groups))
        point_at_shards(self._optimizers, change.units, kept=self._counts)
        self._waiting = change.waiting
        sharding.follow_units()
        self._note()
        self._cut_off = False


def _title(name: str, taken: set[str]) -> str:
    """Of a unit that was frozen, unlike all others."""
    base = name.removesuffix(FROZEN) + " (unfrozen)"
    number, title = 1, base
    while title in taken:
        number += 1
        title = f"{base} {number}"
    return title


def _sum(texts: Sequence[Any]) -> int:
    return zlib.crc32("\n".join(texts).encode())
