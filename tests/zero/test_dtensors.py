"""DTensors as parameters, buffers and inputs of a model: a named error on every rank, and nothing half done."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from hpczero.errors import PlanError
from tests.helpers.bridged import bridge
from tests.helpers.small_models import MLP, adamw, mlp_input, update
from tests.helpers.world import World

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=str)
def test_parameter_that_is_a_dtensor_is_refused_by_name(world: World, placement, stage):
    with bridge(world.comm):
        mesh, model = init_device_mesh("cpu", (world.size,)), MLP()
        layer = model.layers[1][0]  # type: ignore[index]
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [placement]))
        said = r"parameter 'layers\.1\.0\.weight' is a DTensor, cut over ranks already; give zeroify the plain"
        world.refuses(PlanError, said, model, adamw(model), stage=stage)


@pytest.mark.parametrize("persistent", [True, False])
def test_buffer_that_is_a_dtensor_is_refused_by_name(world: World, persistent):
    with bridge(world.comm):
        mesh, model = init_device_mesh("cpu", (world.size,)), MLP()
        table = distribute_tensor(torch.ones(6, 2), mesh, [Shard(0)])
        model.register_buffer("table", table, persistent=persistent)
        said = r"buffer 'table' is a DTensor, cut over ranks already; give zeroify the plain"
        world.refuses(PlanError, said, model, adamw(model))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 3])
def test_input_that_is_a_dtensor_is_torchs_error(world: World, stage, precision):
    """Plain torch refuses it too beside plain parameters."""
    with bridge(world.comm):
        mesh, model = init_device_mesh("cpu", (world.size,)), MLP()
        optimizer = adamw(model)
        x = DTensor.from_local(mlp_input(world.rank), mesh, [Shard(0)])
        with world.zeroified(model, optimizer, stage=stage, precision=precision) as sharding:
            world.raises(RuntimeError, "mixed torch.Tensor and DTensor", lambda: model(x))
            for _ in range(2):
                model(mlp_input(world.rank)).square().mean().backward()
                update(optimizer)
            world.check(sharding.skipped_steps == 0)
