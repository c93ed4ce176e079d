"""full_state_dict: the whole model, as ``state_dict()`` of a plain one would be.

Owns: which value has which name. Must not know: how values are gathered, MPI.

Names are those of the model's own ``state_dict()``, so what its modules and hooks add or rename is kept. Where ranks
hold parts of a model they are those of the whole one (``whole_model``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hpczero.zero.sharding import Sharding
from hpczero.zero.units.unit import Unit
from hpczero.zero.whole_model import WholeModel, is_whole, own_state_dict
from hpczero.zero.zeroify import sharding


def full_state_dict(model: nn.Module) -> dict[str, Any] | None:
    """Whole fp32 parameters and persistent buffers under the model's own names, on the CPU. Collective over world.

    They are gathered unit by unit. Tied parameters, and buffers of a module at several places, appear under every name,
    as the same tensor. What ``model.state_dict()`` holds beside them (``get_extra_state``) is included as it is on
    world rank 0.

    Where ranks hold parts of a model, names and values are those of the whole one: parameters, their further names,
    buffers of all stages.

    Returns:
        The dictionary on world rank 0, None elsewhere. Values are tensors, but for what a module has put there itself.

    Raises:
        StepError: on every rank. A parameter came after ``zeroify`` or was changed outside of ``gathered``, or ranks
            differ at stage 0.
        PlanError: on every rank, of a part of a model: a module adds to its ``state_dict()``, or renames there.
    """
    with sharding(model).topology.watchdog.operation("full_state_dict"):
        return _full_state(model)


def _full_state(model: nn.Module) -> dict[str, Any] | None:
    state = _checked(model)
    if not is_whole(state):
        return _put_together(WholeModel(state), {} if state.topology.is_root else None)
    values: dict[int, Tensor] | None = {} if state.topology.is_root else None
    for unit in state.units:
        found = _values_of(unit)
        if values is not None:
            values |= {key: value.cpu() for key, value in found.items()}
    with state.topology.agreed("name the weights"):
        return None if values is None else _named(model, values)


class StateByUnit:
    """``full_state_dict`` unit by unit, for a model that is larger than memory.

    For models whose ``state_dict()`` holds the parameters as they are: their values are not there when it is called.

    Attributes:
        tensors: what ``full_state_dict`` returns, but of each parameter a tensor of its shape on "meta"; None but on
            world rank 0.
    """

    def __init__(self, model: nn.Module) -> None:
        """Collective over world.

        Raises:
            StepError, PlanError: as of ``full_state_dict``.
        """
        self._state = _checked(model)
        self.tensors: dict[str, Any] | None = None
        self._known: dict[int, Tensor] = {}  # what stands for a parameter, by its id
        self._parts = None if is_whole(self._state) else WholeModel(self._state)
        if self._parts is not None:
            shapes = self._parts.shapes if self._state.topology.is_root else {}
            known = {
                name: torch.empty(shape, device="meta", dtype=torch.float32)
                for name, shape in shapes.items()
            }
            buffers = self._parts.buffers()
            if self._state.topology.is_root:
                self.tensors = _ordered(self._parts, known, buffers)
            return
        with self._state.topology.agreed("name the weights"):
            if self._state.topology.is_root:
                for unit in self._state.units:
                    for parameter, slot in zip(
                        unit.parameters, unit.spec.layout.slots, strict=True
                    ):
                        self._known[id(parameter)] = torch.empty(
                            slot.shape, device="meta", dtype=torch.float32
                        )
                self.tensors = _named(model, self._known)

    def units(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Of each unit, what stands for each parameter and its whole fp32 value; none but on world rank 0.

        Units that train come first, where the model is whole. Each list is empty again once the next is asked for.
        Collective over world, each item: if one rank stops early, all do.
        """
        if self._parts is not None:
            for values in self._parts.collected(Unit.gather_values):
                stands = self.tensors or {}
                yield (pairs := [(stands[name], value) for name, value in values.items()])
                pairs.clear()
                values.clear()
            return
        for unit in sorted(self._state.units, key=lambda unit: not unit.spec.trainable):
            found = [
                (self._known[key], value) for key, value in _values_of(unit).items() if self._known
            ]
            yield found
            found.clear()


def _put_together(parts: WholeModel, values: dict[str, Tensor] | None) -> dict[str, Any] | None:
    """``full_state_dict`` of a part of a model, in ``values`` on world rank 0. Collective over world."""
    for found in parts.collected(Unit.gather_values):
        if values is not None:
            values |= found
    buffers = parts.buffers()
    return None if values is None else _ordered(parts, values, buffers)


def _ordered(
    parts: WholeModel, values: dict[str, Tensor], buffers: dict[str, Tensor]
) -> dict[str, Any]:
    """All names of the whole model; a tied parameter is the same tensor under each of its."""
    found = {name: values[name] for name in parts.names}
    return found | {name: values[own] for name, own in parts.aliases.items()} | buffers


def _checked(model: nn.Module) -> Sharding:
    """The model's sharding, once its values can be collected. Collective over world."""
    state = sharding(model)
    state.step.finish_updates()
    with state.topology.agreed("collect the weights"):
        state.attachment.check()
        state.check_values()
    state.step.agreement.replicas.check()
    return state


def _values_of(unit: Unit) -> dict[int, Tensor]:
    """Whole fp32 values of a unit on every rank, by the ids of its parameters. Collective over world."""
    flat = unit.gather_values()
    return {
        id(parameter): flat[slot.offset : slot.stop].view(slot.shape)
        for parameter, slot in zip(unit.parameters, unit.spec.layout.slots, strict=True)
    }


def _named(model: nn.Module, values: dict[int, Tensor]) -> dict[str, Any]:
    """What ``model.state_dict()`` gives if the parameters are ``values``, by their ids."""
    shown: dict[int, nn.Parameter] = {}
    result: dict[int, Tensor] = {}
    held: list[Any] = []  # so that what is known by its id keeps it

    def whole(found: Any) -> Any:
        if not isinstance(found, Tensor):
            return found
        if id(found) not in result:
            held.append(found)
            result[id(found)] = found.detach().to("cpu", copy=True)
        return result[id(found)]

    with _parameters_shown(model, values, shown):
        result.update((id(shown[key]), values[key]) for key in shown)
        found = own_state_dict(model)
        with torch.no_grad():
            return {name: whole(value) for name, value in found.items()}


@contextmanager
def _parameters_shown(
    model: nn.Module, values: dict[int, Tensor], shown: dict[int, nn.Parameter]
) -> Iterator[None]:
    """Context: whole parameters, noted in ``shown``, replace the model's own. Hooks of ``state_dict`` may read them."""
    own: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []
    try:
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                key = id(parameter)
                if key not in shown:
                    shown[key] = nn.Parameter(values[key], parameter.requires_grad)
                own.append((module._parameters, name, parameter))
                module._parameters[name] = shown[key]
        yield
    finally:
        for place, name, parameter in own:
            place[name] = parameter
