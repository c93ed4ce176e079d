"""Training on a device: no operation mixes its tensors with the host's, and MPI gets no address of it.

The device is pretended, so that this is seen without one. Bits are those of the same training on the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hpczero
from hpczero import Offload
from hpczero.accelerator import Accelerator, HostAccelerator
from hpczero.optim import AdamW8bit
from tests.helpers.pretended import pretended_device
from tests.helpers.small_models import tiny_gpt, tiny_tokens
from tests.helpers.world import World

pytestmark = pytest.mark.mpi

STEPS = 3
Maker = Callable[[Any], torch.optim.Optimizer]
MAKERS: dict[str, Maker] = {
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "AdamW loop": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "AdamW 8 bits": lambda p: AdamW8bit(p, lr=1e-2),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, foreach=True),
}
Left = tuple[list[float], dict[str, Tensor] | None]
"""Losses, and whole weights on rank 0."""


class Training:
    """A small GPT in training on one device. Collective."""

    def __init__(
        self,
        world: World,
        accelerator: Accelerator,
        *,
        make: str = "AdamW fused",
        clip: float | None = None,
        **options: Any,
    ) -> None:
        self.model = tiny_gpt()
        self.optimizer = MAKERS[make](self.model.parameters())
        self._rank, self._accelerator, self._clip = world.rank, accelerator, clip
        where: dict[str, Any] = {"topology": world.topology, "device": accelerator}
        hpczero.zeroify(self.model, self.optimizer, **where | options)

    def step(self, number: int) -> Tensor:
        """One, and its loss, which nobody has asked for yet."""
        tokens = tiny_tokens(self._rank + 10 * number)
        inputs, targets = (
            self._accelerator.bring(part.contiguous()) for part in (tokens[:, :-1], tokens[:, 1:])
        )
        loss = self.model(inputs, targets)
        loss.backward()
        if self._clip is not None:
            hpczero.clip_grad_norm_(self.model, self._clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def steps(self, first: int = 0) -> list[float]:
        """Some, and their losses."""
        return [float(self.step(first + number)) for number in range(STEPS)]

    def save_and_load(self, folder: Path) -> list[float]:
        """Some steps after a save, and the same after it was loaded."""
        hpczero.checkpoint.save(folder, self.model, self.optimizer, step=STEPS)
        losses = self.steps(STEPS)
        hpczero.checkpoint.load(folder, self.model, self.optimizer)
        return losses + self.steps(STEPS)

    def end(self) -> dict[str, Tensor] | None:
        """Whole weights on rank 0; the model is released."""
        weights = hpczero.full_state_dict(self.model)
        hpczero.release(self.model)
        return weights


def trained(world: World, accelerator: Accelerator, **options: Any) -> Left:
    """What some steps leave."""
    training = Training(world, accelerator, **options)
    return training.steps(), training.end()


def check(world: World, run: Callable[[Accelerator], Left]) -> None:
    """``run`` on a device has no fault, and leaves the host's bits. Collective."""
    with pretended_device() as device:
        losses, weights = run(device.accelerator)
    world.check(not device.faults, "\n".join(device.faults))
    expected, its_weights = run(HostAccelerator())
    world.check_state(weights, its_weights)
    same = [loss.hex() for loss in losses] == [loss.hex() for loss in expected]
    world.check(same and math.isfinite(sum(losses)), f"{losses}, on the host {expected}")


def check_trained(world: World, **options: Any) -> None:
    """The same of a training."""
    check(world, lambda accelerator: trained(world, accelerator, **options))


@pytest.mark.ranks(1)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_one_rank(world: World, stage, precision, make, clip):
    check_trained(world, stage=stage, precision=precision, make=make, clip=clip)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("transport", ["flat", "hierarchical", "ipc", "auto"])
@pytest.mark.parametrize("make", ["AdamW fused", "AdamW 8 bits"])
def test_two_ranks(world: World, stage, transport, make):
    options = {"stage": stage, "transport": transport, "make": make}
    check_trained(world, **options, precision="bf16", clip=0.5)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_two_nodes(comm, stage, precision):
    """What travels between them does so on a thread of its own."""
    world = World(comm, hpczero.Topology.create(comm, nodes=[0, 1]))
    options = {"stage": stage, "precision": precision, "transport": "hierarchical"}
    check_trained(world, **options, clip=0.5)
    world.topology.free()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("make", ["AdamW fused", "AdamW 8 bits"])
def test_saved_and_loaded(world: World, folder, stage, make):
    def run(accelerator: Accelerator) -> Left:
        training = Training(world, accelerator, make=make, stage=stage, precision="bf16")
        losses = training.steps() + training.save_and_load(folder / type(accelerator).__name__)
        return losses, training.end()

    check(world, run)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    ("parts", "step"),
    [(1, "device"), (3, "device"), (2, "host"), (3, "host"), (2, "host, delayed")],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_rests_in_memory_of_the_host(world: World, parts, step, precision):
    """State of the optimizer, gradients too, parameters too."""
    side, _, delayed = step.partition(", ")
    names = ("optimizer", "gradients", "parameters")
    where: Any = dict.fromkeys(names[:parts], "host")
    offload = Offload(**where, window=2**14, buffers=4, step=side, delayed=bool(delayed))
    check_trained(world, stage=3, precision=precision, offload=offload, clip=0.5)


# --- the tests above can fail


@pytest.mark.ranks(1)
def test_a_batch_that_was_left_on_the_host_is_told(world: World, monkeypatch):
    with pretended_device() as device:
        monkeypatch.setattr(device.accelerator, "bring", lambda tensor: tensor)
        trained(world, device.accelerator)
    assert any("aten.embedding" in fault for fault in device.faults)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("transport", ["flat", "hierarchical"])
def test_an_mpi_that_is_given_addresses_is_told(world: World, monkeypatch, transport):
    """It is told to know devices, so this is what it should be given."""
    monkeypatch.setenv("HPCZERO_GPU_AWARE", "1")
    with pretended_device() as device:
        trained(world, device.accelerator, transport=transport)
    told = any("MPI is given memory of the device" in fault for fault in device.faults)
    world.check(told, "\n".join(device.faults))


# --- waits


@pytest.mark.ranks(1)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_the_host_waits_once_a_step(world: World, stage, precision, clip):
    """For the norm, or for whether gradients are finite."""
    with pretended_device() as device:
        training = Training(world, device.accelerator, clip=clip, stage=stage, precision=precision)
        for number in range(3):  # which make the optimizer's state, and see where it lies
            device.waits.clear()
            training.step(number)
        waits = dict(device.waits)
        training.end()
    assert waits == {"tolist": 1}
