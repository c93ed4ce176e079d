"""``parameter.grad`` after backward: what plain torch does with it works on shards, or is refused (issue 15)."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import hpczero
from hpczero.errors import StepError
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import MLP, grad, mlp_input, raises_on_all, sgd, zeroified

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3)]

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
TRANSPORTS = pytest.mark.parametrize("transport", ["auto", "flat"])


class Wrapper(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


Act = Callable[[nn.Module], None]


def clip(model: nn.Module) -> None:
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    assert norm > 0.5, "nothing to clip"


def clip_one_by_one(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=False)


def clip_a_part(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(list(model.parameters())[1:4], 0.2)


def clip_by_the_largest(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=math.inf)


def clip_by_the_third_norm(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=3.0)


def clip_in_two_calls(model: nn.Module) -> None:
    parameters = list(model.parameters())
    norm = torch.nn.utils.get_total_norm([grad(p) for p in parameters])
    torch.nn.utils.clip_grads_with_norm_(parameters, 0.3, norm)


def clip_values(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.05)


def scale(model: nn.Module) -> None:
    for index, parameter in enumerate(model.parameters()):
        grad(parameter).mul_(0.25 + index)


def scale_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        grad(parameter).data.div_(torch.tensor(3.0))
        parameter.grad = grad(parameter).mul_(0.5)


def normalise(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = grad(parameter).div_(grad(parameter).norm() + 1e-3)


def drop_some(model: nn.Module) -> None:
    for parameter in list(model.parameters())[::2]:
        parameter.grad = None


def zero_some(model: nn.Module) -> None:
    for parameter in list(model.parameters())[::2]:
        grad(parameter).zero_()


def signs(model: nn.Module) -> None:
    for parameter in model.parameters():
        grad(parameter).sign_()


def zero_a_submodule(model: nn.Module) -> None:
    model.get_submodule("layers.1").zero_grad()


ACTS: list[Act] = [
    clip,
    clip_one_by_one,
    clip_a_part,
    clip_by_the_largest,
    clip_by_the_third_norm,
    clip_in_two_calls,
    clip_values,
    scale,
    scale_data,
    normalise,
    drop_some,
    zero_some,
    signs,
    zero_a_submodule,
]


def forget_by_wrapper(model: nn.Module) -> None:
    Wrapper(model).zero_grad()


def forget_by_loop(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def forget_by_zeros(model: nn.Module) -> None:
    Wrapper(model).zero_grad(set_to_none=False)


FORGET: list[Act] = [forget_by_wrapper, forget_by_loop, forget_by_zeros]


def train_plain(size: int, act: Act, forget: Act) -> nn.Module:
    """Three steps in one process on the mean of the ranks' losses, two backward passes each."""
    model = MLP()
    optimizer = sgd(model)
    for step in range(3):
        for part in range(2):
            losses = [
                model((step + part + 1) * mlp_input(rank)).square().mean() for rank in range(size)
            ]
            (sum(losses) / size).backward()
        act(model)
        optimizer.step()
        forget(model)
    return model


def compare(comm: MPI.Intracomm, topology: Topology, act: Act, forget: Act, **options: Any) -> None:
    expected = train_plain(comm.size, act, forget)
    model = MLP()
    optimizer = sgd(model)
    with zeroified(model, optimizer, topology=topology, **options):
        for step in range(3):
            for part in range(2):
                model((step + part + 1) * mlp_input(comm.rank)).square().mean().backward()
            act(model)
            optimizer.step()
            forget(model)
        with hpczero.gathered(model):
            pairs = zip(model.parameters(), expected.parameters(), strict=True)
            worst = max(float((a - b).detach().abs().max()) for a, b in pairs)
    parallel_assert(comm, worst < 2e-6, f"differs by {worst} from one process")


@STAGES
@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.__name__)
def test_changes_of_gradients(
    comm: MPI.Intracomm, topology: Topology, stage: int, act: Act
) -> None:
    compare(comm, topology, act, FORGET[stage % 3], stage=stage, transport="auto")


@TRANSPORTS
@STAGES
@pytest.mark.parametrize("forget", FORGET, ids=lambda act: act.__name__)
def test_ways_to_forget_gradients(
    comm: MPI.Intracomm, topology: Topology, stage: int, transport: str, forget: Act
) -> None:
    compare(comm, topology, lambda model: None, forget, stage=stage, transport=transport)


def _read(model: nn.Module) -> None:
    grad(next(model.parameters())).isnan()


def _noise(model: nn.Module) -> None:
    parameter = next(model.parameters())
    grad(parameter).add_(torch.ones(parameter.shape))


def _assign(model: nn.Module) -> None:
    parameter = next(model.parameters())
    parameter.grad = torch.ones(parameter.shape)


def _second_optimizer(model: nn.Module) -> None:
    with hpczero.gathered(model):
        torch.optim.SGD(model.parameters(), lr=0.1).step()


@STAGES
@pytest.mark.parametrize(
    "act", [_read, _noise, _assign, _second_optimizer], ids=lambda a: a.__name__
)
def test_what_needs_elements_is_refused_by_name(
    comm: MPI.Intracomm, topology: Topology, stage: int, act: Act
) -> None:
    model = MLP()
    with zeroified(model, sgd(model), stage=stage, topology=topology):
        model(mlp_input(comm.rank)).sum().backward()
        said = r"parameter\.grad of 'layers\.0\.0\.weight'|is not the one that zeroify was given"
        with pytest.raises(StepError, match=said):
            act(model)


@STAGES
def test_gradients_that_are_not_reduced_yet(
    comm: MPI.Intracomm, topology: Topology, stage: int
) -> None:
    model = MLP()
    with zeroified(model, sgd(model), stage=stage, topology=topology):
        with hpczero.no_sync(model):
            model(mlp_input(comm.rank)).sum().backward()
        with pytest.raises(StepError, match="not reduced over ranks"):
            grad(next(model.parameters())).mul_(2)
        with pytest.raises(StepError, match="never reduced over ranks"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


@STAGES
def test_there_is_no_gradient_before_backward_and_after_zero_grad(
    comm: MPI.Intracomm, topology: Topology, stage: int
) -> None:
    model = MLP()
    optimizer = sgd(model)
    with zeroified(model, optimizer, stage=stage, topology=topology):
        before = all(p.grad is None for p in model.parameters())
        model(mlp_input(comm.rank)).sum().backward()
        there = all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
        optimizer.zero_grad()
        parallel_assert(comm, before and there and all(p.grad is None for p in model.parameters()))


@pytest.mark.parametrize("stage", [0, 2])
def test_a_copy_of_a_parameter_is_an_ordinary_one(
    comm: MPI.Intracomm, topology: Topology, stage: int
) -> None:
    model = MLP()
    with zeroified(model, sgd(model), stage=stage, topology=topology):
        model(mlp_input(comm.rank)).sum().backward()
        twin = copy.deepcopy(next(model.parameters()))
        parallel_assert(comm, type(twin) is nn.Parameter and twin.grad is None)


def test_a_step_without_any_gradient_is_told_once(
    comm: MPI.Intracomm, topology: Topology, caplog: pytest.LogCaptureFixture
) -> None:
    model = MLP()
    optimizer = sgd(model)
    with (
        caplog.at_level(logging.WARNING, logger="hpczero"),
        zeroified(model, optimizer, stage=3, topology=topology),
    ):
        optimizer.step()
        optimizer.step()
    said = [record for record in caplog.records if "no parameter has a gradient" in record.message]
    parallel_assert(comm, len(said) == (1 if comm.rank == 0 else 0))


@STAGES
def test_a_gradient_that_was_kept_over_zero_grad_is_refused(
    comm: MPI.Intracomm, topology: Topology, stage: int
) -> None:
    model = MLP()
    with zeroified(model, sgd(model), stage=stage, topology=topology):
        model(mlp_input(comm.rank)).sum().backward()
        kept = [grad(parameter) for parameter in model.parameters()]
        model.zero_grad()
        model(2 * mlp_input(comm.rank)).sum().backward()
        for act in (
            lambda: torch._foreach_norm(kept),
            lambda: kept[0].mul_(2),
            lambda: setattr(next(model.parameters()), "grad", kept[0]),
        ):
            with pytest.raises(StepError, match="was kept over a zero_grad"):
                act()


@STAGES
def test_a_gradient_that_came_after_none_is_not_thrown_away(
    comm: MPI.Intracomm, topology: Topology, stage: int
) -> None:
    model = MLP()
    with zeroified(model, sgd(model), stage=stage, topology=topology):
        weight, bias = list(model.parameters())[:2]
        weight.grad = None
        with hpczero.no_sync(model):
            model(mlp_input(comm.rank)).sum().backward()
        bias.grad = None
        parallel_assert(comm, weight.grad is not None and bias.grad is None)


@STAGES
def test_setting_a_gradient_to_none_in_a_hook_that_comes_too_late_is_refused(
    comm: MPI.Intracomm, topology: Topology, stage: int
) -> None:
    model = MLP()
    with zeroified(model, sgd(model), stage=stage, topology=topology):
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        with pytest.raises(StepError, match=r"before zeroify, or use parameter\.register_hook"):
            model(mlp_input(comm.rank)).sum().backward()


@STAGES
def test_dropping_one_gradient_of_an_interrupted_backward_leaves_the_others_incomplete(
    comm: MPI.Intracomm, topology: Topology, stage: int
) -> None:
    model = MLP()
    optimizer = sgd(model)

    def interrupt(gradient: torch.Tensor) -> None:
        raise RuntimeError("stop")

    with zeroified(model, optimizer, stage=stage, topology=topology):
        handle = next(model.parameters()).register_hook(interrupt)
        with pytest.raises(RuntimeError, match="stop"):
            model(mlp_input(comm.rank)).sum().backward()
        handle.remove()
        list(model.parameters())[-1].grad = None
        raises_on_all(comm, StepError, "did not finish", optimizer.step)
        for parameter in model.parameters():
            parameter.grad = None
        model(mlp_input(comm.rank)).sum().backward()
        optimizer.step()


def _other_parameters(model: nn.Module, rank: int) -> None:
    for parameter in model.get_submodule(f"layers.{rank}").parameters():
        parameter.grad = None


def _more_often(model: nn.Module, rank: int) -> None:
    for _ in range(rank + 1):
        for parameter in model.parameters():
            grad(parameter).mul_(0.5)


@STAGES
@pytest.mark.ranks(2)
@pytest.mark.parametrize("act", [_other_parameters, _more_often], ids=lambda a: a.__name__)
def test_changes_that_differ_between_ranks_are_refused(
    comm: MPI.Intracomm, topology: Topology, stage: int, act: Callable[..., None]
) -> None:
    model = MLP()
    optimizer = sgd(model)
    with zeroified(model, optimizer, stage=stage, topology=topology):
        model(mlp_input(comm.rank)).sum().backward()
        act(model, comm.rank)
        raises_on_all(comm, StepError, "changes of parameter.grad|take the step", optimizer.step)


@STAGES
def test_a_model_that_was_frozen_for_a_while(
    comm: MPI.Intracomm, topology: Topology, stage: int
) -> None:
    def freeze_and_look(model: nn.Module) -> None:
        model.requires_grad_(False)
        x = mlp_input(comm.rank).requires_grad_()
        model(x).sum().backward()  # as a generator's step through its discriminator
        model(x.detach()).mean()
        model.requires_grad_(True)

    compare(
        comm,
        topology,
        lambda model: None,
        freeze_and_look_then_forget(freeze_and_look),
        stage=stage,
    )


def freeze_and_look_then_forget(look: Act) -> Act:
    def forget(model: nn.Module) -> None:
        look(model)
        model.zero_grad()

    return forget
