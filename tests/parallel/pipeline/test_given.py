"""What a program gives a pipeline: gradients of inputs, targets, and a stage that is called by itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn

from hpczero import Mesh, Pipeline, Topology
from hpczero.errors import ConfigError, StepError
from hpczero.parallel import Stages, cut
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import adamw, zeroified

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = pytest.mark.mpi


class Shifted(nn.Module):
    """Linear layers over an input with a shift that the model does not own, such as a prompt; a scalar comes out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        self.end = nn.Linear(3, 1)

    def forward(self, x: Tensor, shift: Tensor, weight: Tensor) -> Tensor:
        x = x + shift
        for layer in self.layers:
            x = layer(x)
        return (self.end(x) * weight).square().mean()


@contextmanager
def shifted(comm: MPI.Intracomm, interleave: int = 1) -> Iterator[nn.Module]:
    """Zeroified stages."""
    topology = Topology.create(comm, mesh=Mesh(pipeline=2))
    stages = Stages(
        "layers",
        (),
        ("end",),
        enter=lambda model, x, shift: x + shift,
        call=lambda model, layer, x: layer(x),
        leave=lambda model, x, weight: (model.end(x) * weight).square().mean(),
    )
    model = cut(Shifted(), topology, stages, interleave=interleave)
    with zeroified(model, adamw(model), topology=topology):
        yield model
    topology.free()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("interleave", [1, 2])
def test_gradients_of_inputs_are_those_of_the_mean(comm: MPI.Intracomm, interleave: int) -> None:
    """As of parameters: a prompt that all micro-batches share gets the gradient that one process computes."""
    x, weight = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(1)), torch.ones(1)
    shift, expected = torch.zeros(3, requires_grad=True), torch.zeros(3, requires_grad=True)
    with shifted(comm, interleave) as model:
        Pipeline(model, micro_batches=4).step([(each, shift) for each in x], [weight] * 4)
    plain = Shifted()
    sum(plain(each, expected, weight) / 4 for each in x).backward()
    found, wanted = shift.grad, expected.grad
    assert wanted is not None
    same = comm.rank == 1 or (found is not None and torch.allclose(found, wanted, atol=1e-7))
    parallel_assert(comm, same, f"{found} {wanted}")


@pytest.mark.ranks(2)
def test_targets_that_need_gradients_are_refused(comm: MPI.Intracomm) -> None:
    """On the last stage; the others are given none."""
    x, weight = (torch.ones(2, 3), torch.zeros(3)), torch.ones(1, requires_grad=True)
    with shifted(comm) as model:
        pipeline = Pipeline(model, micro_batches=2)
        if comm.rank == 1:
            with pytest.raises(ConfigError, match="the targets of micro-batch 0 need a gradient"):
                pipeline.step(None, [weight, weight])
        loss = pipeline.step([x, x], [torch.ones(1)] * 2)
        parallel_assert(comm, loss > 0)


@pytest.mark.ranks(2)
def test_a_stage_that_is_called_by_itself_is_refused(comm: MPI.Intracomm) -> None:
    """It would take a hidden state for inputs, or give one for outputs."""
    said = f"Shifted was called by itself.*stage {comm.rank} of 2"
    with shifted(comm) as model, pytest.raises(StepError, match=said):
        model(torch.ones(2, 3), torch.zeros(3))
