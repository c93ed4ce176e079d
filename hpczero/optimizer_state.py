"""``optimizer.state_dict()`` of a zeroified model: whose it is, told when it is taken, checked when it is loaded.

Owns: the mark in the dictionary. Must not know: units, checkpoints.

The state is this rank's shards. Loaded on another rank, or cut another way, it has the right shapes and the wrong
numbers.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hpczero.advice import Advice
from hpczero.errors import StepError
from hpczero.plan import Plan
from hpczero.topology import Topology

MARK = "hpczero"


class OptimizerState:
    """Hooks on ``state_dict`` and ``load_state_dict`` of one optimizer."""

    def __init__(
        self, optimizer: Optimizer, topology: Topology, plan: Plan, advice: Advice
    ) -> None:
        """Register them; not collective."""
        self._mine = {
            "rank": topology.rank,
            "ranks": topology.size,
            "shards_optimizer": plan.stage.shards_optimizer,
            "units": [[unit.name, unit.layout.numel] for unit in plan.units],
        }
        self._advice = advice
        self._handles: list[RemovableHandle] = [
            optimizer.register_state_dict_pre_hook(self._check_keys),
            optimizer.register_state_dict_post_hook(self._mark),
            optimizer.register_load_state_dict_pre_hook(self._check),
        ]

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _check_keys(self, optimizer: Optimizer) -> None:
        """Forget what ``optimizer.state[parameter]`` has made for a parameter of the model by being looked at.

        Raises:
            StepError: something was put there, which torch has no place for.
        """
        known = {id(shard) for group in optimizer.param_groups for shard in group["params"]}
        foreign = [k for k in optimizer.state if isinstance(k, Tensor) and id(k) not in known]
        for key in foreign:
            if optimizer.state[key]:
                raise StepError(
                    f"rank {self._mine['rank']}: optimizer.state holds {sorted(optimizer.state[key])} for a tensor of "
                    f"shape {tuple(key.shape)} that is not in optimizer.param_groups, expected state of this rank's "
                    "shards alone: after zeroify optimizer.state is by shards, not by the model's parameters; use the "
                    "tensors of optimizer.param_groups, or keep what you note about parameters in a dict of your own"
                )
            del optimizer.state[key]

    def _mark(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        self._advice.about_optimizer_state()
        state[MARK] = dict(self._mine)

    def _check(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Refuse what is not this rank's own.

        Raises:
            StepError: says what differs.
        """
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
    return f"of rank {mark.get('rank')} of {mark.get('ranks')}, {cut}"
