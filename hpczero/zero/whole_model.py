"""WholeModel: whole parameters and buffers of a model of which ranks hold parts, brought together on world rank 0.

Owns: who sends what, and the names of the whole model. Must not know: how shards are gathered, what values are for.

The units of all stages come one after the other. The ranks of a stage gather one of their units over its shards, and of
each tensor part one rank sends it to rank 0. Nobody holds more than a unit. Replicas send nothing.

Source: issue 19.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hpczero.errors import PlanError
from hpczero.job.messages import bring
from hpczero.plan.placement import ModelPart, Placement, part_of
from hpczero.zero.sharding import Sharding
from hpczero.zero.units.module_buffers import bytes_of, persistent_buffers
from hpczero.zero.units.unit import Unit

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
    """Of one model. Each method but ``names`` is collective over world."""

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
        self._part = part
        self._senders = [_read(text) for text in topology.world.gather_text(text) if text]

    @property
    def names(self) -> list[str]:
        """Parameters of the whole model, in its order."""
        return list(self._part.names)

    @property
    def aliases(self) -> dict[str, str]:
        """Further names of tied parameters."""
        return dict(self._part.aliases)

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
