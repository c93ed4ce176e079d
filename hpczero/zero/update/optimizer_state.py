"""The optimizer's state of a zeroified model: whose it is.

The state is this rank's shards. Loaded on another rank, or cut another way, it has the right shapes and the wrong
numbers.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hpczero.errors import StepError
from hpczero.job.topology import Topology
from hpczero.plan import Plan
from hpczero.zero.calls.advice import Advice
from hpczero.zero.units.away_shard import AwayShard
from hpczero.zero.units.guard import is_guarded
from hpczero.zero.units.unit import Unit
from hpczero.zero.update.parts import method_behind

if TYPE_CHECKING:
    from hpczero.zero.update.update import Stepper

MARK = "hpczero"


def _is_of_the_model(key: object) -> bool:
    return isinstance(key, Tensor) and is_guarded(key)


def _for_shards(name: str) -> Any:
    """The method of ``defaultdict``, which refuses keys that are parameters of the model."""
    plain = getattr(defaultdict, name)

    @functools.wraps(plain)
    def method(states: ShardStates, key: Any, *rest: Any) -> Any:
        if _is_of_the_model(key):
            raise StepError(
                f"optimizer.state was asked for a parameter of the model, of shape {tuple(key.shape)}: after zeroify "
                "it is by this rank's shards. Use the tensors of optimizer.param_groups as keys (all of them, to reset "
                "it), or keep what you note about parameters in a dict of your own"
            )
        return plain(states, key, *rest)

    return method


class ShardStates(defaultdict[Any, Any]):
    """``optimizer.state`` by shards; the model's own parameters, which plain torch has there, are refused."""

    __missing__ = _for_shards("__missing__")
    __setitem__ = _for_shards("__setitem__")
    __delitem__ = _for_shards("__delitem__")
    __contains__ = _for_shards("__contains__")
    get, pop, setdefault = map(_for_shards, ("get", "pop", "setdefault"))
    # By ``__setitem__``, where that of dictionaries goes past it.
    update: Any = MutableMapping.update

    def __ior__(self, other: Any) -> ShardStates:  # type: ignore[misc]
        self.update(other)
        return self


class OptimizerState:
    """Hooks on ``state_dict`` and ``load_state_dict`` of one optimizer."""

    def __init__(
        self, stepper: Stepper, topology: Topology, plan: Plan, advice: Advice, *, count: int
    ) -> None:
        """Register them; not collective. ``count``: optimizers of the model."""
        self._stepper, optimizer = stepper, stepper.optimizer
        self._mine: dict[str, Any] = {
            "rank": topology.rank,
            "ranks": topology.size,
            "shards_optimizer": plan.stage.shards_optimizer,
        }
        self.follow(plan)
        if count > 1:
            self._mine["optimizer"] = [stepper.index, count]
        self._advice = advice
        self._optimizer = optimizer
        self._watch(optimizer)
        self._handles: list[RemovableHandle] = [
            optimizer.register_load_state_dict_post_hook(self._take_over),
            optimizer.register_state_dict_pre_hook(self._check_keys),
            optimizer.register_state_dict_post_hook(self._mark),
            optimizer.register_load_state_dict_pre_hook(self._check),
        ]

    def follow(self, plan: Plan) -> None:
        """The shards are those of ``plan`` from now on."""
        self._mine["units"] = [[unit.name, unit.layout.numel] for unit in plan.units]

    def remove(self) -> None:
        """Take the hooks away; not collective."""
        self._optimizer.state = defaultdict(dict, self._optimizer.state)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _take_over(self, optimizer: Optimizer) -> None:
        self._watch(optimizer)  # torch has made a new dictionary
        self._stepper.update.adopt()

    def _watch(self, optimizer: Optimizer) -> None:
        optimizer.state = ShardStates(dict, optimizer.state)

    def check(self, shards: Collection[int] = ()) -> None:
        """At a step: watch the dictionary that is there now, a user's say, and refuse what it holds by parameters.

        ``shards``: ids of keys that need no look.
        """
        if type(self._optimizer.state) is not ShardStates:
            self._watch(self._optimizer)
        self._refuse(
            key for key in self._optimizer.state if id(key) not in shards and _is_of_the_model(key)
        )

    def _check_keys(self, optimizer: Optimizer) -> None:
        """Before ``state_dict``: refuse all that torch has no place for, too."""
        self._check_near("state_dict")
        known = {id(shard) for group in optimizer.param_groups for shard in group["params"]}
        self._refuse(k for k in optimizer.state if isinstance(k, Tensor) and id(k) not in known)

    def _check_near(self, what: str) -> None:
        """Refuse to make, or take, a dictionary of state that is not in memory."""
        if self._stepper.streams:
            raise StepError(
                f"rank {self._mine['rank']}: optimizer.{what}() where its state rests on a memory tier (offload), "
                "expected it in memory; hpczero.checkpoint.save and load keep it, for any number of ranks and with or "
                "without offload"
            )

    def _refuse(self, foreign: Iterable[Tensor]) -> None:
        """Forget what ``optimizer.state[parameter]`` has made by being looked at; raise if something was put there."""
        held = self._optimizer.state
        for key in list(foreign):
            state = dict.__getitem__(held, key)
            if state:
                raise StepError(
                    f"rank {self._mine['rank']}: optimizer.state holds {sorted(state)} for a tensor of "
                    f"shape {tuple(key.shape)} that is not in optimizer.param_groups, expected state of this rank's "
                    "shards alone: after zeroify optimizer.state is by shards, not by the model's parameters; use the "
                    "tensors of optimizer.param_groups, or keep what you note about parameters in a dict of your own"
                )
            dict.__delitem__(held, key)

    def _mark(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        self._advice.about_optimizer_state()
        state[MARK] = dict(self._mine)

    def _check(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Refuse what is not this rank's own."""
        self._check_near("load_state_dict")
        found = state.get(MARK)
        if found == self._mine or not state.get("state"):
            return
        whose = "of a plain model" if not isinstance(found, dict) else _describe(found)
        raise StepError(
            f"rank {self._mine['rank']}: optimizer.load_state_dict got a state {whose}, expected one "
            f"{_describe(self._mine)} and the same units: its shards would not fit. hpczero.checkpoint.save and load "
            "keep the optimizer for any number of ranks and any stage"
        )


def _describe(mark: dict[str, Any]) -> str:
    cut = "cut" if mark.get("shards_optimizer") else "whole"
    place = mark.get("optimizer")
    which = f", optimizer {place[0]} of {place[1]}" if isinstance(place, list) else ""
    return f"of rank {mark.get('rank')} of {mark.get('ranks')}, {cut}{which}"


# AwayStates: what the optimizer keeps of pieces that rest on a tier.
#
# Between steps ``optimizer.state`` has of each piece what is one number, ``step`` say. The rest of its state is on the
# tier. Its names are there, and whatever would show, change or leave out its values is an error: a program
# that sets all of its momenta to zero must not set some.


def _of_all(name: str) -> Any:
    """The method of ``dict``, which refuses where a part is on the tier."""
    plain = getattr(dict, name)

    @functools.wraps(plain)
    def method(state: AwayState) -> Any:
        state._refuse(*state.elementwise)
        return plain(state)

    return method


class AwayState(dict[str, Any]):
    """State of one piece: what is one number; the rest is on the tier.

    Attributes:
        elementwise: names of what is there for every element, in the order in which they came.
    """

    def __init__(self) -> None:
        super().__init__()
        self.elementwise: dict[str, None] = {}

    @property
    def numbers(self) -> dict[str, Any]:
        """What is in memory."""
        return {name: dict.__getitem__(self, name) for name in dict.keys(self)}

    def __missing__(self, name: str) -> NoReturn:
        self._refuse(name)
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self.elementwise

    def __len__(self) -> int:
        return len({**dict.fromkeys(dict.keys(self)), **self.elementwise})

    def __iter__(self) -> Iterator[str]:
        return iter({**dict.fromkeys(dict.keys(self)), **self.elementwise})

    def __setitem__(self, name: str, value: Any) -> None:
        if is_elementwise(value):
            raise StepError(
                f"optimizer.state[...][{name!r}] = a tensor of shape {tuple(value.shape)}: it would stay in memory, "
                "and the state of this piece rests on a memory tier (offload); give the piece all of its state at "
                "once (optimizer.state[piece] = {...}), or leave the optimizer on the device"
            )
        self._refuse(name)
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        self._refuse(name)
        super().__delitem__(name)

    # Those of dictionaries go past the methods above, and these do not.
    get: Any = MutableMapping.get
    pop: Any = MutableMapping.pop
    setdefault: Any = MutableMapping.setdefault
    update: Any = MutableMapping.update

    def __ior__(self, other: Any) -> AwayState:  # type: ignore[override,misc]
        self.update(other)
        return self

    def clear(self) -> None:
        """The optimizer makes the state of this piece anew."""
        super().clear()
        self.elementwise.clear()

    items = _of_all("items")
    values = _of_all("values")
    popitem = _of_all("popitem")
    copy = _of_all("copy")

    def keys(self) -> Any:
        """Of all, wherever they are."""
        return dict.fromkeys(self).keys()

    def _refuse(self, *names: str) -> None:
        """Raise StepError if one of ``names`` is not in memory."""
        away = [name for name in names if name in self.elementwise]
        if away:
            raise StepError(
                f"optimizer.state[...][{away[0]!r}] rests on a memory tier (offload) and is not in memory between "
                "steps; hpczero.checkpoint.save keeps it, optimizer.state.clear() and optimizer.state[...].clear() "
                "make the optimizer begin anew, or leave it on the device"
            )


States = MutableMapping[Any, Any]  # optimizer.state
AWAY = object()  # in the place of what is on the tier


def state_of(states: States, piece: nn.Parameter) -> AwayState:
    """What is in memory of the state of one piece; made if there is nothing."""
    held: dict[Any, Any] = states  # type: ignore[assignment]
    state = dict.get(held, piece)
    if not isinstance(state, AwayState):
        numbers = {} if state is None else state
        state = AwayState()
        state.update({k: v for k, v in numbers.items() if not is_elementwise(v)})
        dict.__setitem__(held, piece, state)
    return state


def with_names(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """``state``, and AWAY for each name of what is on the tier."""
    if not isinstance(state, AwayState):
        return state
    return {**state.numbers, **dict.fromkeys(state.elementwise, AWAY)}


def adopt(unit: Unit, states: States) -> None:
    """What a program, or the optimizer, has put into ``optimizer.state`` for every element goes to the tier."""
    held: dict[Any, Any] = states  # type: ignore[assignment]
    found = (dict.get(held, piece) for piece in unit.optimized.parameters)
    plain = [{} if state is None or isinstance(state, AwayState) else state for state in found]
    for name in {n: None for state in plain for n, value in state.items() if is_elementwise(value)}:
        write_state(unit, name, [(states, state.get(name)) for state in plain])


def write_state(unit: Unit, name: str, entries: Sequence[tuple[States, Tensor | None]]) -> None:
    """Put state ``name`` of the pieces of ``unit`` on its tier, which has room for it or raises StepError.

    ``entries``: of each piece the dictionary of its optimizer, and a flat fp32 tensor; None: the state stays as it is.
    """
    shard = unit.away
    assert shard is not None, "it rests on the tier"
    check_name(shard, name)
    whole = torch.zeros(
        shard.windows[-1].stop if shard.windows else 0,
        device=shard.store.device,
        dtype=torch.float32,
    )
    if shard.has(name):
        shard.read(name, whole)
    optimized = unit.optimized
    for piece, place, (states, value) in zip(
        optimized.parameters, optimized.places, entries, strict=True
    ):
        if value is not None:
            if value.numel() != piece.numel():
                raise StepError(
                    f"optimizer.state[...][{name!r}]: got {value.numel():,} element(s), expected the {piece.numel():,} "
                    "of its piece in optimizer.param_groups"
                )
            whole[place] = value.detach().reshape(-1).to(whole.device)
            state_of(states, piece).elementwise[name] = None
    shard.write(name, whole)


def check_name(shard: AwayShard, name: str) -> None:
    """Raise StepError for state that the tier has no room for."""
    if name not in shard.parts:
        raise StepError(
            f"got state {name!r} for the optimizer, expected some of {list(shard.parts)}, which it makes with its "
            "options of today"
        )


def state_names(optimizer: Optimizer) -> list[str]:
    """What the optimizer keeps of every element, in the order in which it makes it; tried on one element.

    Each group's options count. Two steps, since some state comes with the second.
    """
    method = method_behind(optimizer)
    assert method is not None, "checked by zeroify"
    found: dict[str, None] = {}
    for group in optimizer.param_groups:
        devices = [p.device for p in group["params"][:1] if not p.is_meta] or [torch.device("cpu")]
        one = nn.Parameter(torch.ones(2, device=devices[0], dtype=torch.float32))
        kind: Any = type(optimizer)
        twin = kind([one])  # torch's own all have defaults
        for name, value in group.items():
            if name not in ("params", "param_names"):
                twin.param_groups[0][name] = value
        for _ in range(2):
            one.grad = torch.ones_like(one)
            method(twin)  # without the hooks that a program has put on all optimizers
        found.update(
            dict.fromkeys(name for name, value in twin.state[one].items() if is_elementwise(value))
        )
    return list(found)


def is_elementwise(value: Any) -> bool:
    """Whether a state is there for every element, or is one number."""
    return isinstance(value, Tensor) and value.dim() > 0
