"""AwayStates: what the optimizer keeps of pieces that rest on a tier.

Owns: what stands in ``optimizer.state`` for them, and the way of loaded state to the tier and back. Must not know:
windows, steps, media. Nothing here is collective.

Between steps ``optimizer.state`` has of each piece what is one number, ``step`` say. The rest of its state is on the
tier. Its names are there, and whatever would show, change or leave out its values is an error (issue 18): a program
that sets all of its momenta to zero must not set some.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpczero.errors import StepError
from hpczero.zero.units.away_shard import AwayShard
from hpczero.zero.units.unit import Unit
from hpczero.zero.update.parts import method_behind


class AwayState(dict[str, Any]):
    """State of one piece: what is one number; the rest is on the tier.

    Attributes:
        elementwise: names of what is there for every element, in the order in which they came.
    """

    def __init__(self) -> None:
        """Nothing yet."""
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

    def get(self, name: str, default: Any = None) -> Any:
        """As of any dictionary; refused for what is on the tier."""
        self._refuse(name)
        return super().get(name, default)

    def pop(self, name: str, *default: Any) -> Any:
        """As of any dictionary; refused for what is on the tier."""
        self._refuse(name)
        return super().pop(name, *default)

    def setdefault(self, name: str, default: Any = None) -> Any:
        """As of any dictionary; refused for what is on the tier."""
        if name not in self:
            self[name] = default
        return self[name]

    def update(self, *args: Any, **kwargs: Any) -> None:
        """As of any dictionary; refused for what is on the tier."""
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __ior__(self, other: Any) -> AwayState:  # type: ignore[override,misc]
        self.update(other)
        return self

    def clear(self) -> None:
        """The optimizer makes the state of this piece anew."""
        super().clear()
        self.elementwise.clear()

    def items(self) -> Any:
        """As of any dictionary; refused where a part is on the tier."""
        self._refuse(*self.elementwise)
        return super().items()

    def values(self) -> Any:
        """As of any dictionary; refused where a part is on the tier."""
        self._refuse(*self.elementwise)
        return super().values()

    def keys(self) -> Any:
        """Of all, wherever they are."""
        return dict.fromkeys(self).keys()

    def popitem(self) -> tuple[str, Any]:
        """As of any dictionary; refused where a part is on the tier."""
        self._refuse(*self.elementwise)
        return super().popitem()

    def copy(self) -> dict[str, Any]:
        """As of any dictionary; refused where a part is on the tier."""
        return dict(self.items())

    def _refuse(self, *names: str) -> None:
        """Raise if one of ``names`` is not in memory.

        Raises:
            StepError: says what works.
        """
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
    plain = [dict.get(held, piece) for piece in unit.optimized.parameters]
    names = {
        name: None
        for state in plain
        if state is not None and not isinstance(state, AwayState)
        for name, value in state.items()
        if is_elementwise(value)
    }
    for name in names:
        values = [
            None if state is None or isinstance(state, AwayState) else state.get(name)
            for state in plain
        ]
        write_state(unit, name, [(states, value) for value in values])


def write_state(unit: Unit, name: str, entries: Sequence[tuple[States, Tensor | None]]) -> None:
    """Put state ``name`` of the pieces of ``unit`` on its tier.

    Args:
        unit: which has one.
        name: of the state.
        entries: (pieces,) of each the dictionary of its optimizer, and a flat fp32 tensor; None: as it is.

    Raises:
        StepError: the tier has no room for such a state.
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
    """Refuse state that the tier has no room for.

    Raises:
        StepError: the optimizer did not make state ``name`` at zeroify.
    """
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
        device = group["params"][0].device if group["params"] else torch.device("cpu")
        device = torch.device("cpu") if device.type == "meta" else device
        one = nn.Parameter(torch.ones(2, device=device, dtype=torch.float32))
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
