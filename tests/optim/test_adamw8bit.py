"""AdamW8bit: the same codes on any number of ranks and at every stage, what they take, and how near AdamW they stay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hpczero
from hpczero.checkpoint.disk.folder import read_manifest
from hpczero.optim import AdamW8bit
from hpczero.optim.adamw8bit import Signed, Unsigned
from hpczero.plan.memory import STATE_BYTES
from hpczero.zero.update.coded import CodedState
from tests.checkpoint.programs import first_ranks, state_digests
from tests.helpers.small_models import MLP, update, zeroified
from tests.helpers.world import World
from tests.optim.rules import Training, adamw8bit, same_bits, trained

BLOCK = 64


def numbers(count: int = 40 * BLOCK) -> Tensor:
    """Of many magnitudes, also in one block; zero in one whole block."""
    generator = torch.Generator().manual_seed(4)
    found = torch.randn(count, generator=generator)
    found *= 10.0 ** torch.randint(-12, 6, (count,), generator=generator)
    found[BLOCK : 2 * BLOCK] = 0
    return found


@pytest.mark.parametrize("codec", [Signed, Unsigned])
def test_what_was_decoded_is_encoded_as_it_was(codec):
    values = numbers() if codec is Signed else numbers().square()
    codes, scales = codec.encode(values)
    decoded = codec.decode(codes, scales)
    again = codec.encode(decoded)
    assert torch.equal(again[0], codes)
    assert torch.equal(again[1], scales)
    blocks = values.view(-1, BLOCK)
    assert torch.equal(scales, blocks.abs().amax(1)), "the largest of each is kept"
    # Half a step of the map at the number itself, and what the map is bent there.
    largest = blocks.abs().amax(1, keepdim=True).clamp(min=1e-38)
    part = (blocks / largest).abs().double()
    step = part.sqrt() / 127 + 127**-2 if codec is Signed else 3.5 * part**0.75 / 255 + 255**-4
    error = ((decoded.view(-1, BLOCK) - blocks) / largest).abs()
    assert (error <= 1.001 * step).all()


def test_a_second_moment_above_zero_stays_above_it():
    values = torch.full((BLOCK,), 1e-20)
    values[0], values[1] = 1.0, 0.0
    codes, scales = Unsigned.encode(values)
    found = Unsigned.decode(codes, scales)
    assert (found[2:] > 0).all()
    assert found[1] == 0


def test_an_overflow_stays_in_its_element():
    values = torch.ones(BLOCK)
    values[5] = torch.inf
    found = Unsigned.decode(*Unsigned.encode(values))
    assert found.isfinite().all()
    assert found[5] > 3e38


def given(parameter: Tensor, seed: int) -> Tensor:
    """A gradient in eighths, whose mean over up to 4 equal ones is exactly itself."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-15, 16, parameter.shape, generator=generator) / 8


def given_loss(model: nn.Module, step: int) -> Tensor:
    terms = [(p * given(p, 100 * step + place)).sum() for place, p in enumerate(model.parameters())]
    return torch.stack(terms).sum()


class Given(nn.Module):
    """Parameters whose gradients are given; one unit, which no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(13, 17), (5,), (61,), (3, 3), (71, 2)]
        self.parts = nn.ParameterList(nn.Parameter(given(torch.empty(s), 7)) for s in shapes)

    def forward(self, step: int) -> Tensor:
        return given_loss(self, step)


def two_groups(model: nn.Module) -> AdamW8bit:
    parameters = [*model.parameters()]
    groups: list[dict[str, Any]] = [
        {"params": parameters[::2]},
        {"params": parameters[1::2], "lr": 0.02},
    ]
    return AdamW8bit(groups, lr=0.01, weight_decay=0.1)


@pytest.mark.mpi
@pytest.mark.ranks(4)
def test_one_to_four_ranks_have_the_same_bits_from_given_gradients(comm, folder):
    for n in (1, 2, 3, 4):
        with first_ranks(comm, n) as topology:
            if topology is not None:
                model = Given()
                optimizer = two_groups(model)
                with zeroified(model, optimizer, stage=(0, 3, 2, 1)[n - 1], topology=topology):
                    for step in range(5):
                        model(step).backward()
                        update(optimizer)
                    hpczero.checkpoint.save(folder / str(n), model, optimizer, step=5)
    if comm.rank == 0:
        paths = [folder / str(n) / "step-000000005" for n in (1, 2, 3, 4)]
        digests = [state_digests(path) for path in paths]
        assert {"/state/master", "/state/exp_avg", "/state/exp_avg_sq"} <= digests[0].keys()
        assert digests[1:] == digests[:1] * 3
        assert read_manifest(paths[0]).meta["optimizer"]["class"] == "AdamW8bit"


@pytest.mark.mpi
@pytest.mark.ranks(1)
def test_codes_are_those_of_adamw_written_down_in_fp64(world: World):
    model = Given()
    parameters = [*model.parameters()]
    sizes = [p.numel() for p in parameters]
    p = np.concatenate([p.detach().numpy().ravel() for p in parameters]).astype(np.float64)
    padded = -(-len(p) // BLOCK) * BLOCK
    m, v = np.zeros(padded), np.zeros(padded)
    optimizer = AdamW8bit(model.parameters(), lr=0.01, weight_decay=0.1)
    with world.zeroified(model, optimizer, stage=3):
        for step in range(4):
            model(step).backward()
            update(optimizer)
            gradients = [given(q, 100 * step + i).numpy() for i, q in enumerate(parameters)]
            g = np.pad(np.concatenate([x.ravel() for x in gradients]), (0, padded - len(p)))
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            hat = m / (1 - 0.9 ** (step + 1)), v / (1 - 0.999 ** (step + 1))
            p = p * (1 - 0.01 * 0.1) - (0.01 * hat[0] / (np.sqrt(hat[1]) + 1e-8))[: len(p)]
            m, v = coded(m, 127, 2), coded(v, 255, 4)
        with hpczero.gathered(model):
            found = torch.cat([q.detach().ravel() for q in model.parameters()]).numpy()
        states = [optimizer.state[q] for q in optimizer.param_groups[0]["params"]]
        assert all(isinstance(s["exp_avg"], CodedState) for s in states)
        kept = torch.cat([s["exp_avg"].read() for s in states]).numpy()
    assert sum(sizes) == len(found)
    # A code beside its own where fp32 and fp64 round to different sides; it moves a weight by a part of lr.
    assert (np.abs(found - p) < 1e-6).mean() > 0.98
    assert np.abs(found - p).max() < 1e-3
    assert (np.abs(kept - m[: len(p)]) < 1e-6).mean() > 0.98


@pytest.mark.mpi
@pytest.mark.ranks(1, 2)
def test_maximizing_is_minimizing_with_the_other_sign(world: World):
    found = []
    for sign, maximize in ((-1.0, False), (1.0, True)):
        model = Given()
        optimizer = AdamW8bit(model.parameters(), lr=0.01, maximize=maximize)
        with world.zeroified(model, optimizer, stage=1):
            for step in range(3):
                (sign * model(step)).backward()
                update(optimizer)
            found.append(hpczero.full_state_dict(model))
    world.check(same_bits(found), "maximize is not the other sign")


def coded(values: np.ndarray, levels: int, power: int) -> np.ndarray:
    """To codes and back."""
    blocks = values.reshape(-1, BLOCK)
    scales = np.abs(blocks).max(axis=1, keepdims=True)
    part = np.abs(blocks) / np.where(scales == 0, 1, scales)
    codes = np.round(part ** (1 / power) * levels)
    return (np.sign(blocks) * (codes / levels) ** power * scales).ravel()


@pytest.mark.mpi
@pytest.mark.ranks(3)
def test_stages_and_transports_have_the_same_bits_and_what_the_plan_foretells(world: World):
    found = []
    for stage, transport in ((0, "auto"), (1, "flat"), (2, "auto"), (3, "auto"), (3, "flat")):
        ours = Training(adamw8bit, world.topology, stage=stage, transport=transport)
        ours.train()
        found.append(hpczero.full_state_dict(ours.model))
        sharding = hpczero.sharding(ours.model)
        expected = sharding.plan.memory(optimizer_bytes=STATE_BYTES["adamw8bit"]).optimizer
        held = sharding.optimizer_nbytes()
        world.check(held == expected, f"stage {stage} holds {held}, expected {expected}")
        ours.close()
    world.check(same_bits(found), "stages and transports differ")


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_losses_stay_near_those_of_adamw(world: World):
    losses: list[list[float]] = []
    for kind in (torch.optim.AdamW, AdamW8bit):
        model = MLP((7, 31, 3))
        optimizer = kind(trained(model), lr=1e-2)
        generator = torch.Generator().manual_seed(6 + world.rank)
        with world.zeroified(model, optimizer):
            losses.append([])
            for _ in range(60):
                x = torch.randn(16, 7, generator=generator)
                loss = (model(x) - x[:, :3].sin()).square().mean()
                loss.backward()
                update(optimizer)
                losses[-1].append(sum(world.topology.gather(loss.item())) / world.size)
    start, *_ = losses[0]
    ends = [sum(each[-10:]) / 10 for each in losses]
    assert ends[0] < start / 3, "it learned"
    assert ends[1] == pytest.approx(ends[0], rel=0.05)
