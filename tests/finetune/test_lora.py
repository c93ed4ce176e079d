"""Low-rank products beside frozen layers train as in plain torch; only they have masters, moments and gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import hpczero
from hpczero import finetune
from hpczero.errors import StepError
from tests.finetune.models import adapted_gpt, loss_of, off, optimizer_of, plain_steps, steps
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import raises_on_all, zeroified

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3)]


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("transport", ["flat", "auto"])
def test_training_equals_one_process_of_plain_torch(
    comm: MPI.Intracomm, topology: Topology, stage: int, transport: str
) -> None:
    plain, model = adapted_gpt(), adapted_gpt()
    plain_steps(plain, optimizer_of(plain), comm.size, range(4))
    optimizer = optimizer_of(model)
    options: dict[str, Any] = {"stage": stage, "transport": transport, "topology": topology}
    with zeroified(model, optimizer, **options):
        steps(model, optimizer, comm.rank, range(4))
        found = hpczero.full_state_dict(model) or {}
    frozen = off({n: value for n, value in found.items() if "lora" not in n}, plain)
    parallel_assert(comm, frozen == 0.0 and off(found, plain) <= 1e-6, f"{off(found, plain)}")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_only_what_trains_has_masters_gradients_and_moments(
    comm: MPI.Intracomm, topology: Topology, precision: str
) -> None:
    model = adapted_gpt()
    trained = sum(p.numel() for p in finetune.trained(model))
    total = sum(p.numel() for p in model.parameters())
    optimizer = optimizer_of(model)
    with zeroified(model, optimizer, precision=precision, topology=topology) as sharding:
        steps(model, optimizer, comm.rank, range(2))
        units = sharding.units
        elements = sum(u.owned_numel for u in units if u.spec.trainable)
        parallel_assert(comm, comm.allreduce(elements) == trained < total / 4)
        most = max(comm.allgather(sharding.optimizer_nbytes()))
        shards = sum(u.spec.layout.shard_numel for u in units if u.spec.trainable)
        parallel_assert(comm, most <= 8 * shards)
        held = {u.rest.tensor.dtype for u in units if not u.spec.trainable}
        expected = torch.float32 if precision == "fp32" else torch.bfloat16
        parallel_assert(comm, held == {expected}, f"frozen shards are {held}")
        plan = sharding.plan.memory(footprint=sharding.collectives.footprint)
        parallel_assert(comm, plan.optimizer == most, f"{most} held, {plan}")


def unfreeze(model: nn.Module, optimizer: Any) -> None:
    model.get_parameter("blocks.0.mlp.expansion.weight").requires_grad_(True)


def freeze(model: nn.Module, optimizer: Any) -> None:
    model.get_parameter("blocks.0.mlp.expansion.lora.A").requires_grad_(False)


def add_group(model: nn.Module, optimizer: Any) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "lr": 0.1})


def add_frozen(model: nn.Module, optimizer: Any) -> None:
    frozen = model.get_parameter("blocks.0.mlp.expansion.weight").requires_grad_(True)
    optimizer.add_param_group({"params": [frozen]})


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (unfreeze, "has .*an unfrozen parameter"),
        (freeze, r"has .*1 frozen parameter\(s\), first"),
        (add_group, r"optimizer has .* in group 1|put in after zeroify"),
        (add_frozen, r"optimizer has .* in group 1|put in after zeroify"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_what_trains_cannot_change_on_one_rank_and_every_rank_says_so(
    comm: MPI.Intracomm, topology: Topology, stage: int, change: Any, says: str
) -> None:
    model = adapted_gpt()
    optimizer = optimizer_of(model)
    with zeroified(model, optimizer, stage=stage, topology=topology):
        steps(model, optimizer, comm.rank, range(1))
        if comm.rank == comm.size - 1:  # one rank alone
            change(model, optimizer)
        loss_of(model, comm.rank, 1).backward()
        raises_on_all(comm, StepError, says, optimizer.step)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_released_model_goes_on_with_another_choice_of_what_trains(
    comm: MPI.Intracomm, topology: Topology, stage: int
) -> None:
    def choose(model: nn.Module) -> Any:
        model.get_parameter("blocks.0.mlp.expansion.weight").requires_grad_(True)
        model.get_parameter("blocks.1.mlp.expansion.lora.A").requires_grad_(False)
        return optimizer_of(model)

    plain, model = adapted_gpt(), adapted_gpt()
    plain_steps(plain, optimizer_of(plain), comm.size, range(2))
    plain_steps(plain, choose(plain), comm.size, range(2, 4))
    optimizer = optimizer_of(model)
    hpczero.zeroify(model, optimizer, stage=stage, topology=topology)
    steps(model, optimizer, comm.rank, range(2))
    hpczero.release(model, whole=True)
    optimizer = choose(model)
    with zeroified(model, optimizer, stage=stage, topology=topology):
        steps(model, optimizer, comm.rank, range(2, 4))
        apart = off(hpczero.full_state_dict(model), plain)
    parallel_assert(comm, apart <= 1e-6, f"off by {apart}")
