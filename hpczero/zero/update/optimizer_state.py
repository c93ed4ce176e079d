"""The optimizer's state of a zeroified model: whose it is.

Owns: the refusal of the model's parameters as its keys; the mark in ``optimizer.state_dict()``, told when that is taken
and checked when it is loaded. Must not know: units, checkpoints.

The state is this rank's shards. Loaded on another rank, or cut another way, it has the right shapes and the wrong
numbers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hpczero.errors import StepError
from hpczero.job.topology import Topology
from hpczero.plan import Plan
from hpczero.zero.calls.advice import Advice
from hpczero.zero.units.guard import is_guarded

MARK = "hpczero"


class ShardStates(defaultdict[Any, Any]):
    """``optimizer.state`` by shards; the model's own parameters, which plain torch has there, are refused."""

    def __missing__(self, key: Any) -> Any:
        _refuse_model_parameter(key)
        return super().__missing__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        _refuse_model_parameter(key)
        super().__setitem__(key, value)

    def __contains__(self, key: object) -> bool:
        _refuse_model_parameter(key)
        return super().__contains__(key)

    def __delitem__(self, key: Any) -> None:
        _refuse_model_parameter(key)
        super().__delitem__(key)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """As of any dictionary."""
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def __ior__(self, other: Any) -> ShardStates:  # type: ignore[misc]
        self.update(other)
        return self

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """As of any dictionary."""
        _refuse_model_parameter(key)
        return super().setdefault(key, default)

    def get(self, key: Any, default: Any = None) -> Any:
        """As of any dictionary."""
        _refuse_model_parameter(key)
        return super().get(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        """As of any dictionary."""
        _refuse_model_parameter(key)
        return super().pop(key, *default)


def _is_of_the_model(key: object) -> bool:
    return isinstance(key, Tensor) and is_guarded(key)


def _refuse_model_parameter(key: Any) -> None:
    if _is_of_the_model(key):
        raise StepError(
            f"optimizer.state was asked for a parameter of the model, of shape {tuple(key.shape)}: after zeroify it "
            "is by this rank's shards. Use the tensors of optimizer.param_groups as keys (all of them, to reset it), "
            "or keep what you note about parameters in a dict of your own"
        )


class OptimizerState:
    """Hooks on ``state_dict`` and ``load_state_dict`` of one optimizer."""

    def __init__(
        self,
        optimizer: Optimizer,
        topology: Topology,
        plan: Plan,
        advice: Advice,
        *,
        place: tuple[int, int],
        loaded: Callable[[], None],
        away: bool = False,
    ) -> None:
        """Register them; not collective.

        Args:
            optimizer: of the model.
            topology: for who this rank is.
            plan: for what its shards are.
            advice: told when the state is taken.
            place: which of how many optimizers of the model it is.
            loaded: called when ``load_state_dict`` has put state there.
            away: most of the state rests on a memory tier, and a dictionary of it would lack that.
        """
        self._loaded, self._away = loaded, away
        self._mine: dict[str, Any] = {
            "rank": topology.rank,
            "ranks": topology.size,
            "shards_optimizer": plan.stage.shards_optimizer,
        }
        self.follow(plan)
        if place[1] > 1:
            self._mine["optimizer"] = list(place)
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
        self._loaded()

    def _watch(self, optimizer: Optimizer) -> None:
        optimizer.state = ShardStates(dict, optimizer.state)

    def check(self, shards: Collection[int] = ()) -> None:
        """At a step: watch the dictionary that is there now, a user's say, and refuse what it holds by parameters.

        Args:
            shards: ids of keys that need no look.

        Raises:
            StepError: state was put there for a parameter of the model, which the optimizer would not look at.
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
        """Refuse to make, or take, a dictionary of state that is not in memory.

        Raises:
            StepError: says what to call.
        """
        if self._away:
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
        """Refuse what is not this rank's own.

        Raises:
            StepError: says what differs.
        """
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
