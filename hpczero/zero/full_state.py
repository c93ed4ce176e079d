"""full_state_dict: the whole model, as ``state_dict()`` of a plain one would be.

Names are those of the model's own ``state_dict()``, so what its modules and hooks add or rename is kept. Where ranks
hold parts of a model they are those of the whole one.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hpczero.errors import PlanError
from hpczero.job.messages import bring
from hpczero.plan.placement import ModelPart, Placement, part_of
from hpczero.zero.buffers import bytes_of, persistent_buffers
from hpczero.zero.sharding import Sharding
from hpczero.zero.units.unit import Unit
from hpczero.zero.zeroify import sharding

# WholeModel: whole parameters and buffers of a model of which ranks hold parts, brought together on world rank 0.
#
# The units of all stages come one after the other. The ranks of a stage gather one of their units over its shards, and
# of each tensor part one rank sends it to rank 0. Nobody holds more than a unit. Replicas send nothing.

ROOT = 0
NAMED = 5  # in a message

Values = Callable[[Unit], Tensor | None]


@dataclass(frozen=True)
class _Sender:
    """A rank that speaks for all that hold the same part.

    Attributes:
        rank: of the world.
        stage: its pipeline stage.
        units: of each unit, the slots that count: place in the unit, and placement.
        buffers: name, dtype and shape of each persistent buffer that it brings.
    """

    rank: int
    stage: int
    units: list[list[tuple[int, Placement]]]
    buffers: list[tuple[str, str, tuple[int, ...]]]


class WholeModel:
    """Of one model. Each method is collective over world.

    Attributes:
        part: what of the whole model this rank's model is.
    """

    def __init__(self, sharding: Sharding) -> None:
        """Tell everybody who holds what. Collective over world.

        Raises:
            PlanError: on every rank: the model is no part of one, or its ``state_dict()`` holds more than its
                parameters and buffers by their own names.
        """
        self._sharding, self._topology = sharding, sharding.topology
        topology = self._topology
        self._stage = topology.mesh.coordinates(topology.rank)[0]
        with topology.agreed("look at this rank's part of the model"):
            part = part_of(sharding.model)
            if part is None:
                raise PlanError(
                    f"rank {topology.rank}: the model is whole, and {topology.model_parallel.size} ranks are to hold "
                    "parts of one; give each rank its part (docs/parallel.md)"
                )
            _check_names(sharding)
            text = self._described(part)
        self.part = part
        self._senders = [_read(text) for text in topology.world.gather_text(text) if text]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every whole parameter that a rank has, by name."""
        slots = (slot for sender in self._senders for unit in sender.units for slot in unit)
        return {placement.name: placement.shape for _, placement in slots}

    def collected(self, values_of: Values) -> Iterator[dict[str, Tensor]]:
        """Whole fp32 values by name, unit by unit; empty but on world rank 0. Collective over world, each item.

        Args:
            values_of: gives (numel,) fp32 values of a unit on every rank that shares it, or None on all of them;
                collective over these.
        """
        for stage in sorted({sender.stage for sender in self._senders}):
            senders = [sender for sender in self._senders if sender.stage == stage]
            for index in range(len(senders[0].units)):
                flat = None
                with self._topology.agreed("collect whole values"):
                    if stage == self._stage:
                        flat = values_of(self._sharding.units[index])
                found: dict[str, Tensor] = {}
                for sender in senders:
                    self._collect(sender, sender.units[index], index, flat, found)
                yield found

    def _collect(
        self,
        sender: _Sender,
        slots: Sequence[tuple[int, Placement]],
        index: int,
        flat: Tensor | None,
        found: dict[str, Tensor],
    ) -> None:
        """Bring one rank's part of a unit to rank 0, and put it into ``found`` there."""
        rank = self._topology.rank
        if not slots or rank not in (sender.rank, ROOT):
            return
        present = np.array([flat is not None])
        bring(self._topology.world, present, sender.rank, ROOT)
        if not present[0]:
            return
        local = torch.empty(
            sum(placement.local_numel for _, placement in slots), dtype=torch.float32, device="cpu"
        )
        if rank == sender.rank:
            assert flat is not None, "present"
            places = self._sharding.units[index].spec.layout.slots
            parts = [flat[places[at].offset : places[at].stop] for at, _ in slots]
            local.copy_(torch.cat(parts))
        bring(self._topology.world, local.numpy(), sender.rank, ROOT)
        if rank != ROOT:
            return
        begin = 0
        for _, placement in slots:
            end = begin + placement.local_numel
            if placement.name not in found:
                found[placement.name] = torch.empty(
                    placement.shape, dtype=torch.float32, device="cpu"
                )
            placement.put(local[begin:end].view(placement.local_shape), found[placement.name])
            begin = end

    def buffers(self) -> dict[str, Tensor]:
        """Persistent buffers of all stages by name, copies on the CPU; empty but on world rank 0. Collective."""
        own = persistent_buffers(self._sharding.model)
        found: dict[str, Tensor] = {}
        for sender in self._senders:
            for name, dtype, shape in sender.buffers:
                if self._topology.rank not in (sender.rank, ROOT):
                    continue
                values = torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
                flat = values.view(-1).view(torch.uint8).numpy()
                if self._topology.rank == sender.rank:
                    flat[...] = bytes_of(own[name].detach().cpu()).numpy()
                bring(self._topology.world, flat, sender.rank, ROOT)
                if self._topology.rank == ROOT:
                    found.setdefault(name, values)
        return found

    def _described(self, part: ModelPart) -> str:
        """What this rank brings, as JSON; nothing where another one with the same part does."""
        if self._topology.data_sequence.rank:
            return ""
        units = []
        for unit in self._sharding.units:
            placed = [part.placement(slot.name, slot.shape) for slot in unit.spec.layout.slots]
            units.append([[at, asdict(p)] for at, p in enumerate(placed) if p.counted])
        buffers: list[Any] = []
        if self._topology.tensor.rank == 0:
            buffers = [
                [name, str(b.dtype).removeprefix("torch."), list(b.shape)]
                for name, b in persistent_buffers(self._sharding.model).items()
            ]
        return json.dumps([self._topology.rank, self._stage, units, buffers])


def is_whole(sharding: Sharding) -> bool:
    """Whether every rank's model is the whole one."""
    return sharding.topology.model_parallel.size == 1


def _read(text: str) -> _Sender:
    rank, stage, units, buffers = json.loads(text)
    return _Sender(
        rank,
        stage,
        [
            [(at, Placement(**{**p, "shape": tuple(p["shape"])})) for at, p in unit]
            for unit in units
        ],
        [(name, dtype, tuple(shape)) for name, dtype, shape in buffers],
    )


def _check_names(sharding: Sharding) -> None:
    """Refuse a model whose ``state_dict()`` says more, or other things, than names of parameters and buffers.

    Raises:
        PlanError: the message names keys.
    """
    model = sharding.model
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    kept = {id(buffer) for buffer in sharding.buffers}
    known |= {n for n, b in model.named_buffers(remove_duplicate=False) if id(b) in kept}
    odd = sorted(known.symmetric_difference(own_state_dict(model)))
    if odd:
        more = f" and {len(odd) - NAMED} more" if len(odd) > NAMED else ""
        raise PlanError(
            f"rank {sharding.topology.rank}: state_dict() of this model and its parameters and buffers differ in "
            f"{', '.join(odd[:NAMED])}{more}; ranks that hold parts of a model cannot put together what a module adds "
            "or renames: save it with hpczero.checkpoint.save, or take the hook of the module away"
        )


def own_state_dict(model: nn.Module) -> dict[str, Any]:
    """``model.state_dict()`` with the parameters themselves, if the model's own method can tell them."""
    parameters = inspect.signature(model.state_dict).parameters.values()
    tells = any(p.name == "keep_vars" or p.kind is p.VAR_KEYWORD for p in parameters)
    found: dict[str, Any] = model.state_dict(keep_vars=True) if tells else model.state_dict()
    return found


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
        return _of_parts(WholeModel(state), is_root=state.topology.is_root)
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
        on_every_rank: whether every rank has all names and values; else world rank 0 alone, as ranks hold parts.
        tensors: what ``full_state_dict`` returns, but of each parameter a tensor of its shape on "meta"; None where
            names and values are not.
    """

    def __init__(self, model: nn.Module) -> None:
        """Collective over world.

        Raises:
            StepError, PlanError: as of ``full_state_dict``.
        """
        self._state = _checked(model)
        self.tensors: dict[str, Any] | None = None
        self._known: dict[int, Tensor] = {}  # what stands for a parameter, by its id
        self.on_every_rank = is_whole(self._state)
        self._parts = None if self.on_every_rank else WholeModel(self._state)
        if self._parts is not None:
            shapes = self._parts.shapes if self._state.topology.is_root else {}
            known = {name: _shown_as(shape) for name, shape in shapes.items()}
            buffers = self._parts.buffers()
            if self._state.topology.is_root:
                self.tensors = _ordered(self._parts, known, buffers)
            return
        with self._state.topology.agreed("name the weights"):
            for unit in self._state.units:
                for parameter, slot in zip(unit.parameters, unit.spec.layout.slots, strict=True):
                    self._known[id(parameter)] = _shown_as(slot.shape)
            self.tensors = _named(model, self._known)

    def units(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Of each unit, what stands for each parameter and its whole fp32 value; none where names and values are not.

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
            found = [(self._known[key], value) for key, value in _values_of(unit).items()]
            yield found
            found.clear()


def _shown_as(shape: Sequence[int]) -> Tensor:
    return torch.empty(shape, device="meta", dtype=torch.float32)


def _of_parts(parts: WholeModel, *, is_root: bool) -> dict[str, Any] | None:
    """``full_state_dict`` of a part of a model. Collective over world."""
    values: dict[str, Tensor] = {}
    for found in parts.collected(Unit.gather_values):
        values |= found
    buffers = parts.buffers()
    return _ordered(parts, values, buffers) if is_root else None


def _ordered(
    parts: WholeModel, values: dict[str, Tensor], buffers: dict[str, Tensor]
) -> dict[str, Any]:
    """All names of the whole model; a tied parameter is the same tensor under each of its."""
    found = {name: values[name] for name in parts.part.names}
    return found | {name: values[own] for name, own in parts.part.aliases.items()} | buffers


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
