"""Weights of another program together with the state of its optimizer: what checkpoints of DCP and DeepSpeed hold."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from hpczero.checkpoint.disk.format import some
from hpczero.checkpoint.foreign.weight_files import HeldTensor, WeightFiles, is_equal
from hpczero.errors import CheckpointMismatch

STEP = "step"

logger = logging.getLogger("hpczero.checkpoint")

State = Mapping[str, HeldTensor]
Groups = tuple[
    Sequence[Mapping[str, Any]], Mapping[str, int]
]  # options of each; group of each parameter


class Collected(dict[str, HeldTensor]):
    """Tensors by the names of the model, and state of the optimizer. A subclass says where they are.

    Attributes:
        path: as given.
        states: of each parameter that has a state: of each element, or one number, by key.
        known_tied: further names of tied parameters, each with the name that is kept, as far as the files state them.
        known_buffers: names of buffers, as far as the files state them.
        left: keys of what is no weight and no state of an optimizer.
        metadata: as of ``WeightFiles``; nothing.
        model: as of ``WeightFiles``; nothing.
    """

    def __init__(self, path: Path, tensors: Mapping[str, HeldTensor], states: Mapping[str, State]):
        super().__init__(tensors)
        self.path, self.states = path, states
        self.known_tied: dict[str, str] = {}
        self.known_buffers: Sequence[str] = ()
        self.left: list[str] = []
        self.metadata: dict[str, str] = {}
        self.model: dict[str, Any] = {}
        lost = [name for name in states if name not in tensors]
        if lost:
            raise CheckpointMismatch(
                f"{path}: holds the optimizer's state of {some(lost)}, and no weights of these names; expected both"
            )
        self.elements = self._elementwise()

    def groups(self) -> Groups:
        """Groups of the optimizer. Reads. Raises CheckpointError."""
        raise NotImplementedError

    def check(self, part: int, parts: int) -> None:
        """Check all values against checksums, where there are some. Each of ``parts`` readers takes its share.

        Raises:
            CheckpointError: the message names what is damaged.
        """
        raise NotImplementedError

    def _elementwise(self) -> dict[str, dict[str, HeldTensor]]:
        """Values of each element, by key of the state and parameter.

        Raises:
            CheckpointMismatch: a tensor is neither of the parameter's shape nor one number.
        """
        found: dict[str, dict[str, HeldTensor]] = {}
        for name, state in self.states.items():
            shape = self[name].shape
            for key, value in state.items():
                if not value.shape and (shape or key == STEP):
                    continue
                if value.shape != shape:
                    raise CheckpointMismatch(
                        f"{value.label}: is {value.shape}, expected the shape {shape} of {name}, or one number; such "
                        "a state cannot be imported, so take the weights alone (--optimizer None)"
                    )
                found.setdefault(key, {})[name] = value
        return found

    def step(self) -> int:
        """Steps of the parameter that has the most; 0 where none says it. Reads."""
        found = [state[STEP] for state in self.states.values() if STEP in state]
        return max((int(value.whole().item()) for value in found), default=0)

    def optimizer(self, kind: str) -> tuple[dict[str, Any] | None, Mapping[str, int]]:
        """What a manifest says of the optimizer, of the class ``kind``; and the group of each parameter. Reads.

        Raises:
            CheckpointMismatch: parameters have different kinds of one state.
        """
        if not self.states:
            return None, {}
        kinds: dict[str, str] = {}
        present: dict[str, dict[str, Any]] = {}
        for name, state in self.states.items():
            for key, value in state.items():
                whole = name in self.elements.get(key, {})
                found = "elements" if whole else f"tensor:{str(value.dtype).removeprefix('torch.')}"
                if kinds.setdefault(key, found) != found:
                    raise CheckpointMismatch(
                        f"{self.path}: state {key!r} of {name} is {found}, and of others {kinds[key]}; expected one "
                        "kind, so take the weights alone (--optimizer None)"
                    )
                number = None if whole else value.whole().item()
                present.setdefault(key, {})[name] = number
        groups, places = self.groups()
        meta = {"class": kind, "groups": list(map(_plain, groups)), "kinds": kinds}
        return {**meta, "present": present}, places


def likely_tied(
    weights: Collected, unknown: Iterable[str], trained: Mapping[str, int]
) -> dict[str, str]:
    """Names of ``unknown``, which the optimizer does not know, each with a tensor of equal values that it trains.

    Reads. A program saves a tied parameter under every name, and its state under one. Values that are all alike, as
    those of a fresh normalisation, tell nothing.
    """
    found: dict[str, str] = {}
    for name in unknown:
        held = weights[name]
        same = (one for one in trained if one in weights and weights[one].shape == held.shape)
        owner = next((one for one in same if is_equal(weights, name, one)), None)
        if owner is not None:
            values = held.whole().reshape(-1)
            found |= {name: owner} if bool((values != values[:1]).any()) else {}
    if found:
        told = [f"{name} to {owner}" for name, owner in found.items()]
        logger.warning("%s: taken for tied, by equal values: %s", weights.path, some(told))
    return found


def _plain(value: Any) -> Any:
    """Options as JSON holds them."""
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


Weights = WeightFiles | Collected
