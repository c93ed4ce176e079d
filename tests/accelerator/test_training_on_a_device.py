"""Training on a device: no operation mixes its tensors with the host's, and MPI gets no address of it.

The device is pretended, so that this is seen without one. Bits are those of the same training on the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

import hpczero
from hpczero import Offload
from hpczero.accelerator import Accelerator, HostAccelerator
from hpczero.optim import AdamW8bit
from tests.helpers.parallel import parallel_assert
from tests.helpers.pretended import pretended_device
from tests.helpers.small_models import tiny_gpt, tiny_tokens

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

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
    """A small GPT in training on one device. Collective over the topology's world."""

    def __init__(
        self,
        topology: Topology,
        accelerator: Accelerator,
        *,
        make: str = "AdamW fused",
        clip: float | None = None,
        **options: Any,
    ) -> None:
        self.model = tiny_gpt()
        self.optimizer = MAKERS[make](self.model.parameters())
        self._rank, self._accelerator, self._clip = topology.rank, accelerator, clip
        options = {"topology": topology, "device": accelerator, **options}
        hpczero.zeroify(self.model, self.optimizer, **options)

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


def trained(topology: Topology, accelerator: Accelerator, **options: Any) -> Left:
    """What some steps leave."""
    training = Training(topology, accelerator, **options)
    return training.steps(), training.end()


def check(comm: MPI.Intracomm, run: Callable[[Accelerator], Left]) -> None:
    """``run`` on a device has no fault, and leaves the host's bits. Collective over ``comm``."""
    with pretended_device() as device:
        losses, weights = run(device.accelerator)
    parallel_assert(comm, not device.faults, "\n".join(device.faults))
    expected, its_weights = run(HostAccelerator())
    same = [loss.hex() for loss in losses] == [loss.hex() for loss in expected]
    if weights is not None and its_weights is not None:
        same = same and all(
            torch.equal(value, its_weights[name]) for name, value in weights.items()
        )
    parallel_assert(comm, same and math.isfinite(sum(losses)), f"{losses}, on the host {expected}")


@pytest.mark.ranks(1)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_one_rank(
    comm: MPI.Intracomm,
    topology: Topology,
    stage: int,
    precision: str,
    make: str,
    clip: float | None,
) -> None:
    options = {"stage": stage, "precision": precision, "make": make, "clip": clip}
    check(comm, lambda device: trained(topology, device, **options))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("transport", ["flat", "hierarchical", "ipc", "auto"])
@pytest.mark.parametrize("make", ["AdamW fused", "AdamW 8 bits"])
def test_two_ranks(
    comm: MPI.Intracomm, topology: Topology, stage: int, transport: str, make: str
) -> None:
    options = {
        "stage": stage,
        "precision": "bf16",
        "transport": transport,
        "make": make,
        "clip": 0.5,
    }
    check(comm, lambda device: trained(topology, device, **options))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_two_nodes(comm: MPI.Intracomm, stage: int, precision: str) -> None:
    """What travels between them does so on a thread of its own."""
    topology = hpczero.Topology.create(comm, nodes=[0, 1])
    options = {"stage": stage, "precision": precision, "transport": "hierarchical", "clip": 0.5}
    check(comm, lambda device: trained(topology, device, **options))
    topology.free()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("make", ["AdamW fused", "AdamW 8 bits"])
def test_saved_and_loaded(
    comm: MPI.Intracomm, topology: Topology, folder: Path, stage: int, make: str
) -> None:
    def run(accelerator: Accelerator) -> Left:
        training = Training(topology, accelerator, make=make, stage=stage, precision="bf16")
        losses = training.steps() + training.save_and_load(folder / type(accelerator).__name__)
        return losses, training.end()

    check(comm, run)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    ("parts", "step"),
    [(1, "device"), (3, "device"), (2, "host"), (3, "host"), (2, "host, delayed")],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_rests_in_memory_of_the_host(
    comm: MPI.Intracomm, topology: Topology, parts: int, step: str, precision: str
) -> None:
    """State of the optimizer, gradients too, parameters too."""
    side, _, delayed = step.partition(", ")
    names = ("optimizer", "gradients", "parameters")
    where: Any = dict.fromkeys(names[:parts], "host")
    how: Any = {"window": 2**14, "buffers": 4, "step": side, "delayed": bool(delayed)}
    offload = Offload(**where, **how)
    options = {"stage": 3, "precision": precision, "offload": offload, "clip": 0.5}
    check(comm, lambda device: trained(topology, device, **options))


# --- the tests above can fail


@pytest.mark.ranks(1)
def test_a_batch_that_was_left_on_the_host_is_told(
    comm: MPI.Intracomm, topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pretended_device() as device:
        monkeypatch.setattr(device.accelerator, "bring", lambda tensor: tensor)
        trained(topology, device.accelerator)
    assert any("aten.embedding" in fault for fault in device.faults)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("transport", ["flat", "hierarchical"])
def test_an_mpi_that_is_given_addresses_is_told(
    comm: MPI.Intracomm, topology: Topology, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    """It is told to know devices, so this is what it should be given."""
    monkeypatch.setenv("HPCZERO_GPU_AWARE", "1")
    with pretended_device() as device:
        trained(topology, device.accelerator, transport=transport)
    told = any("MPI is given memory of the device" in fault for fault in device.faults)
    parallel_assert(comm, told, "\n".join(device.faults))


# --- waits


@pytest.mark.ranks(1)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_the_host_waits_once_a_step(
    comm: MPI.Intracomm, topology: Topology, stage: int, precision: str, clip: float | None
) -> None:
    """For the norm, or for whether gradients are finite."""
    with pretended_device() as device:
        training = Training(
            topology, device.accelerator, clip=clip, stage=stage, precision=precision
        )
        for number in range(3):  # which make the optimizer's state, and see where it lies
            device.waits.clear()
            training.step(number)
        waits = dict(device.waits)
        training.end()
    assert waits == {"tolist": 1}
