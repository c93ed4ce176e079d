"""What a program has set as torch's default dtype or device is nothing to a save, a load or a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import hpczero
from tests.helpers.small_models import adamw, mlp_input
from tests.helpers.world import World

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2)]


@contextmanager
def default(what: Any) -> Iterator[None]:
    """``what`` is torch's default inside: a dtype or the name of a device."""
    if isinstance(what, str):
        with torch.device(what):
            yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(what)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def muon(model: torch.nn.Module) -> torch.optim.Optimizer:
    return hpczero.optim.Muon.of(model, lr=1e-2)


@pytest.mark.parametrize("what", [torch.bfloat16, torch.float64, "meta"], ids=str)
@pytest.mark.parametrize("make", [adamw, muon])
@pytest.mark.parametrize("stage", [0, 3])
def test_run_that_is_saved_and_loaded_goes_on_bit_for_bit(
    world: World, what: Any, make: Any, stage: int
) -> None:
    def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> None:
        for seed in seeds:
            model(mlp_input(seed)).square().mean().backward()
            with default(what if isinstance(what, torch.dtype) else "cpu"):
                optimizer.step()
            optimizer.zero_grad()

    found = []
    for saved in (False, True):
        with world.mlp(make, stage=stage) as (model, optimizer):
            steps(model, optimizer, range(2 if saved else 4))
            if not saved:
                found.append(hpczero.full_state_dict(model))
                continue
            with default(what):
                hpczero.checkpoint.save(world.folder, model, optimizer, step=2)
        with world.mlp(make, stage=stage) as (model, optimizer):
            with default(what):
                hpczero.checkpoint.load(world.folder, model, optimizer)
            steps(model, optimizer, range(2, 4))
            found.append(hpczero.full_state_dict(model))
    world.check_state(*found)
