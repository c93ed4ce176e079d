"""Models built without weights: buffers are computed as ever, parameters of one object stay one, NaN is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hpczero.errors import PlanError
from hpczero.hf.building import build, check_buffers


class Parts(nn.Module):
    """A table, a weight under two names, an attribute on a parameter, a buffer that nobody fills."""

    def __init__(self, *, fill: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(3, 4, bias=False)
        weight = nn.Parameter(torch.ones(4, 3))
        self.first.weight = weight
        self.second.weight = weight
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("table", torch.arange(5.0).cos())
        scale = torch.empty(3)
        self.register_buffer("scale", scale.fill_(2.0) if fill else scale, persistent=False)


def test_parameters_have_no_values_and_buffers_have_theirs() -> None:
    model = build(Parts, seed=1)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(model.table, torch.arange(5.0).cos())  # type: ignore[arg-type]
    assert model.first.weight is model.second.weight  # type: ignore[union-attr]
    assert not model.frozen.requires_grad
    check_buffers(model, filled=())
    assert not any(parameter.is_meta for parameter in Parts().parameters()), "the hook is gone"


def test_a_buffer_that_nobody_fills_is_refused() -> None:
    model = build(lambda: Parts(fill=False), seed=1)
    with pytest.raises(PlanError, match="scale"):
        check_buffers(model, filled=("table",))
    check_buffers(model, filled=("scale",))


def test_a_buffer_made_of_a_parameter_is_refused() -> None:
    class Derived(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.register_buffer("norm", self.weight.detach().norm())

    with pytest.raises(PlanError, match="norm"):
        build(Derived, seed=1)


def test_what_a_build_draws_is_the_same_on_every_call() -> None:
    class Random(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("features", torch.randn(4))

    one, other = build(Random, seed=1), build(Random, seed=1)
    assert torch.equal(one.features, other.features)  # type: ignore[arg-type]
