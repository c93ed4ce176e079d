"""Sharding: the object behind a zeroified model.

Owns: the parts of one sharded model and their attachment to model and optimizer. Must not know: how any part works
inside.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hpczero.casting import Casting
from hpczero.comm import Collectives
from hpczero.device import DTYPES, Memory
from hpczero.errors import PlanError, StepError
from hpczero.optimizers import repoint
from hpczero.plan import Plan
from hpczero.precision import LossScaler
from hpczero.schedule import Schedule
from hpczero.step import Step
from hpczero.unit import Unit

KEY = "_hpczero_sharding"


class Sharding:
    """What stands behind a zeroified model.

    Attributes:
        model, optimizer: as passed to ``zeroify``; optimizer None for inference.
        topology, plan, precision: the decisions.
        collectives: the transport, with ``stats``.
        units: in plan order.
        buffers: the model's persistent buffers.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        plan: Plan,
        collectives: Collectives,
        *,
        owns_topology: bool = False,
    ) -> None:
        """Collective on some transports (memory may be shared).

        Args:
            model: checked, its parameters still its own.
            optimizer: over the model's parameters, not yet over shards; None for inference.
            plan: the units.
            collectives: closed by ``detach``.
            owns_topology: ``detach`` also frees ``collectives.topology``.
        """
        self.model = model
        self.optimizer = optimizer
        self.plan = plan
        self.precision = plan.precision
        self.topology = collectives.topology
        self.collectives = collectives
        self._owns_topology = owns_topology
        self.scaler = LossScaler(plan.precision.loss_scale)
        parameters = dict(model.named_parameters())
        self.units = [
            Unit(
                spec,
                [parameters[slot.name] for slot in spec.layout.slots],
                stage=plan.stage,
                precision=plan.precision,
                comm=collectives,
            )
            for spec in plan.units
        ]
        collectives.settle()
        self.buffers = persistent_buffers(model)
        self.step = Step(
            self.units,
            collectives,
            precision=plan.precision,
            scaler=self.scaler,
            in_backward=lambda: self.schedule is not None and self.schedule.in_backward,
            check_attachment=self._check_attachment,
            after_update=self.share_buffers,
        )
        self.schedule: Schedule | None = None
        self._casting: Casting | None = None
        self._state_dict_hook: RemovableHandle | None = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse ``copy.deepcopy`` and ``pickle`` of the model: a copy would share units and communicators with it.

        Raises:
            PlanError: always; says what to do instead.
        """
        raise PlanError(
            "a zeroified model cannot be copied or pickled; build a plain model and load "
            "hpczero.full_state_dict(model) into it, or copy the model before zeroify"
        )

    @property
    def memory(self) -> Memory:
        """Ledger of bytes held by category."""
        return self.collectives.memory

    @property
    def skipped_steps(self) -> int:
        """Steps skipped so far because a gradient was not finite."""
        return self.step.counts.skipped

    @property
    def loss_scale(self) -> float:
        """Current loss scale; 1 without loss scaling."""
        return self.scaler.scale

    def optimizer_nbytes(self) -> int:
        """Bytes of optimizer state this rank holds, scalars per parameter left out."""
        if self.optimizer is None:
            return 0
        states = itertools.chain.from_iterable(s.values() for s in self.optimizer.state.values())
        return sum(
            t.numel() * t.element_size() for t in states if isinstance(t, Tensor) and t.dim()
        )

    def attach(self) -> None:
        """Hook into the model and the optimizer, after the units are filled."""
        model, optimizer = self.model, self.optimizer
        self._casting = Casting(model, DTYPES[self.precision.param], lambda: self.scaler.scale)
        self.schedule = Schedule(
            model,
            self.units,
            gradient_factor=self._gradient_factor,
            ahead=self.plan.stage.shards_parameters and self.collectives.sharing.overlap,
        )
        model.__dict__[KEY] = self
        model.__dict__["zero_grad"] = self._zero_grad
        if self.plan.stage.shards_parameters:
            self._state_dict_hook = model.register_state_dict_post_hook(_copy_parameters)  # type: ignore[no-untyped-call]
        if optimizer is not None:
            shards: dict[int, list[nn.Parameter]] = {}
            for unit in self.units:
                for shard, group in unit.shards_with_groups():
                    shards.setdefault(group, []).append(shard)
            repoint(optimizer, shards)
            self.step.attach(optimizer)
            optimizer.__dict__["zero_grad"] = self._zero_grad

    def _check_attachment(self) -> None:
        """Refuse parameters that came after ``attach``: no unit would reduce their gradients, and ranks would drift.

        Raises:
            StepError: names the first such parameter of the model, or the optimizer's group.
        """
        known = {id(parameter) for unit in self.units for parameter in unit.parameters}
        for name, parameter in self.model.named_parameters():
            if id(parameter) not in known:
                raise StepError(
                    f"rank {self.topology.rank}: parameter {name!r} came into the model after zeroify (a module "
                    "replaced, load_state_dict(assign=True)?), so it is neither sharded nor trained; build the whole "
                    "model before zeroify, and change values inside `with hpczero.gathered(model, modifier_rank=0):`"
                )
        if self.optimizer is None:
            return
        shards = {id(shard) for unit in self.units for shard in unit.shards}
        for index, group in enumerate(self.optimizer.param_groups):
            foreign = sum(id(parameter) not in shards for parameter in group["params"])
            if foreign:
                raise StepError(
                    f"rank {self.topology.rank}: group {index} of the optimizer has {foreign} parameter(s) put in "
                    "after zeroify (add_param_group?), whose gradients nobody would reduce; make all groups before "
                    "zeroify"
                )

    def _gradient_factor(self) -> float:
        """Mean over ranks, loss scale taken out."""
        assert self._casting is not None, "hooks are attached"
        if self.precision.loss_scale is not None and not self._casting.scaled:
            raise StepError(
                "this backward did not come in through the outputs of the model, so its gradients carry no "
                "loss scale; call the model itself, not a submodule, when training in fp16"
            )
        self.step.forget_norm()
        return 1.0 / (self.topology.shard.size * self.scaler.scale)

    def _zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; also forgets local gradients of ``no_sync`` and an interrupted backward."""
        assert self.schedule is not None, "hooks are attached"
        if self.schedule.in_backward:
            self.schedule.reset()
        self.step.forget_norm()
        for unit in self.units:
            unit.drop_gradients(set_to_none=set_to_none)

    def share_buffers(self) -> None:
        """Give every rank rank 0's persistent buffers (running statistics), as DDP does. Collective over world."""
        if not self.buffers:
            return
        with torch.no_grad():
            parts = [buffer.detach().reshape(-1).view(torch.uint8) for buffer in self.buffers]
            packed = torch.cat(parts)
            self.collectives.broadcast(packed, root=0, name="buffers").wait()
            sizes = [part.numel() for part in parts]
            pieces = torch.split(packed, sizes)
            for buffer, new in zip(self.buffers, pieces, strict=True):
                buffer.copy_(new.clone().view(buffer.dtype).view(buffer.shape))

    def detach(self) -> None:
        """Undo ``attach`` and close the transport. Collective; parameters stay as they are."""
        if self.schedule is not None:
            self.schedule.remove()
        if self._casting is not None:
            self._casting.remove()
        if self._state_dict_hook is not None:
            self._state_dict_hook.remove()
        self.step.detach()
        self.collectives.close()
        if self._owns_topology:
            self.topology.free()
        self.model.__dict__.pop("zero_grad", None)
        self.model.__dict__.pop(KEY, None)
        if self.optimizer is not None:
            self.optimizer.__dict__.pop("zero_grad", None)


def _copy_parameters(
    model: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]
) -> None:
    """Make ``model.state_dict()`` inside ``gathered`` hold copies: its views would outlive the memory they show."""
    copies: dict[int, Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        value = state.get(prefix + name)
        if (
            value is not None and value is not parameter
        ):  # keep_vars=True asks for the parameters themselves
            state[prefix + name] = copies.setdefault(id(parameter), value.clone())


def persistent_buffers(model: nn.Module) -> list[Tensor]:
    """Buffers that state_dict would save, each once."""
    found: dict[int, Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[id(buffer)] = buffer
    return list(found.values())
