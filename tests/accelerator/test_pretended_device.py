"""The pretended device of ``tests/helpers/pretended.py`` tells of every kind of fault, and of nothing that is right.

Right and wrong are CUDA's and torch's word: what is told here raises there or reads what is not its own.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.helpers.pretended import PretendedDevice, pretended_device
from tests.helpers.sides import DEVICE, HOST

# MPI is there for its buffers; what is looked at is one process.
pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1)]

Act = Callable[[PretendedDevice, Tensor], Any]
"""What somebody does with six numbers on a device."""


def on_host() -> Tensor:
    """(6,) of the host."""
    return torch.arange(6.0)


def number() -> Tensor:
    """One of the host; a tensor without a dimension."""
    return torch.tensor(3.0)


def give_to_mpi(tensor: Tensor) -> None:
    """The second element."""
    from mpi4py import MPI

    buffer = MPI.buffer.fromaddress(tensor.data_ptr() + 4, 4)
    assert buffer.tobytes() == np.float32(1.0).tobytes()


def exported(device: PretendedDevice, x: Tensor) -> Tensor:
    """``x`` in memory that other processes may map."""
    return device.accelerator.export(x.nbytes).memory.view(torch.float32).copy_(x)


def forget_too_early(device: PretendedDevice) -> None:
    """The source of a copy, which another lane comes behind, before anybody waits for that."""
    first, second = device.accelerator.lane(), device.accelerator.lane()
    into = device.accelerator.pinned(24).view(torch.float32)
    first.copy(into, device.accelerator.bring(on_host()))
    second.after(first.mark())
    second.finish()


def copy_by_lane(device: PretendedDevice, x: Tensor) -> None:
    """Down, with all memory kept until it has been waited for."""
    lane, into = device.accelerator.lane(), device.accelerator.pinned(24).view(torch.float32)
    lane.after(device.accelerator.mark())
    lane.copy(into, x)
    lane.finish()
    give_to_mpi(into)


def reuse_memory(device: PretendedDevice) -> None:
    """Of tensors that are gone; there are more of them than are looked at in one piece."""
    for _ in range(600):
        device.accelerator.bring(on_host())
        give_to_mpi(on_host())


def in_a_thread(device: PretendedDevice, act: Callable[[], Any]) -> None:
    """One that makes the device its own, as all do that work on one."""

    def run() -> None:
        device.accelerator.enter_thread()
        act()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def backward(x: Tensor, factor: Tensor) -> None:
    """A hook of autograd's multiplies by ``factor``."""
    x.requires_grad_().register_hook(lambda gradient: gradient * factor)
    (x * 2).sum().backward()


def step(x: Tensor, *, fused: bool, counter: torch.device | None = None) -> None:
    """Two of AdamW, whose counter is moved before the second."""
    weight = nn.Parameter(x)
    optimizer = torch.optim.AdamW([weight], fused=fused or None)
    for _ in range(2):
        weight.grad = torch.ones_like(x)
        optimizer.step()
        if counter is not None:
            optimizer.state[weight]["step"] = optimizer.state[weight]["step"].to(counter)


FAULTS: dict[str, tuple[str, Act]] = {
    "two operands": (r"aten\.add\.Tensor .* host \[\(6,\)\]", lambda _, x: x + on_host()),
    "an operand of the device": (r"aten\.mul_\.Tensor", lambda _, x: on_host().mul_(x[0])),
    "a result of the host": (r"aten\.add\.out", lambda _, x: torch.add(x, x, out=torch.empty(6))),
    "a sum of the host": (r"aten\.add_\.Tensor", lambda _, x: number().add_(x[0])),
    "a number in a stack": (r"aten\.stack.* \[\(\)\]", lambda _, x: torch.stack([x[0], number()])),
    "no elements": (r"aten\.cat.* \[\(0,\)\]", lambda _, x: torch.cat([x, torch.empty(0)])),
    "a matrix": (r"aten\.mv", lambda _, x: torch.ones(2, 6) @ x),
    "targets": (r"aten\.nll_loss", lambda _, x: F.cross_entropy(x, torch.tensor(2))),
    "an index of the device": (r"aten\.index\.Tensor", lambda _, x: on_host()[x.long()]),
    "values of the host": (
        r"aten\.index_put_",
        lambda _, x: x.index_put_((torch.tensor([0, 1]),), torch.ones(2)),
    ),
    "lists": (r"aten\._foreach_mul_", lambda _, x: torch._foreach_mul_([x, x], [on_host()] * 2)),
    "backward": (r"aten\.mul\.Tensor", lambda _, x: backward(x, on_host())),
    "a generator of the host": (
        r"aten\.normal_.* generator",
        lambda _, x: x.normal_(generator=torch.Generator()),
    ),
    "made by a generator of the host": (
        "randn is given a generator",
        lambda _, x: torch.randn(2, device=DEVICE, generator=torch.Generator()),
    ),
    "a lane without pinned memory": (
        "not pinned",
        lambda d, x: d.accelerator.lane().copy(x, on_host()),
    ),
    "a copy of what is gone": ("memory is gone", lambda d, _: forget_too_early(d)),
    "a thread": (r"aten\.add\.Tensor", lambda d, x: in_a_thread(d, lambda: x * 2 + on_host())),
    "a fused step": (r"aten\._fused_adamw_", lambda _, x: step(x, fused=True, counter=HOST)),
    "NumPy": (r"NumPy is shown", lambda _, x: x.numpy()),
    "an array of NumPy": (r"NumPy is shown", lambda _, x: np.asarray(x[2:])),
    "a buffer": ("somebody is shown", lambda _, x: np.from_dlpack(x)),
    "an address": ("MPI is given memory", lambda _, x: give_to_mpi(x)),
    "an address of a view": ("MPI is given memory", lambda _, x: give_to_mpi(x.view(3, 2).t())),
    "an exported address": ("MPI is given memory", lambda d, x: give_to_mpi(exported(d, x))),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_told_with_its_line(comm, fault):
    pattern, act = FAULTS[fault]
    with pretended_device() as device:
        x = device.accelerator.bring(on_host())
        assert not device.faults
        act(device, x)
    (told,) = device.faults
    assert re.search(pattern, told)
    assert __file__ in told


RIGHT: dict[str, Act] = {
    "a number of the host": lambda _, x: x * number() + 1,
    "a filling of the host": lambda _, x: x.masked_fill(x > 2, number()),
    "a choice": lambda _, x: torch.where(x > 2, x, number()),
    "an index of the host": lambda _, x: x[torch.tensor([0, 2])],
    "a number at an index": lambda _, x: x.index_put_((torch.tensor([0, 1]),), number()),
    "lists by a number": lambda _, x: torch._foreach_mul_([x, x], number()),
    "copies": lambda _, x: (x.copy_(on_host()), on_host().copy_(x)),
    "copies of lists": lambda _, x: torch._foreach_copy_([x], [on_host()]),
    "to the host": lambda _, x: (x.cpu() + x.to("cpu") + x.to(on_host()) + on_host()).numpy(),
    "to the device": lambda _, x: on_host().to(DEVICE) + on_host().to(x) + x.to(torch.float64),
    "made there": lambda _, x: (
        torch.zeros(6, device=x.device) + torch.full_like(x, 2) + x.new_ones(6)
    ),
    "made of numbers": lambda _, x: torch.tensor([1.0] * 6, device=x.device) + x,
    "made beside": lambda _, x: (
        torch.ones_like(x, device=HOST) + x.new_zeros(6, device=HOST)
    ).numpy(),
    "backward": lambda _, x: backward(x, x.detach()),
    "recomputed": lambda _, x: (
        checkpoint(torch.exp, x.requires_grad_(), use_reentrant=False).sum().backward()
    ),
    "a thread": lambda d, x: in_a_thread(d, lambda: x * 2 + torch.zeros(6, device=DEVICE)),
    "a fused step": lambda _, x: step(x, fused=True),
    "a step of lists": lambda _, x: step(x, fused=False),
    "a lane": copy_by_lane,
    "pinned memory": lambda d, x: give_to_mpi(
        d.accelerator.pinned(24).view(torch.float32).copy_(x)
    ),
    "a copy": lambda _, x: give_to_mpi(x.cpu()),
    "memory that was the device's": lambda d, _: reuse_memory(d),
}


@pytest.mark.parametrize("act", RIGHT.values(), ids=RIGHT.keys())
def test_what_a_device_does_is_not_told(comm, act):
    with pretended_device() as device:
        act(device, device.accelerator.bring(on_host()))
    assert not device.faults


def test_what_is_made_of_a_tensor_is_where_it_is(comm):
    with pretended_device() as device:
        source = on_host()
        x = device.accelerator.bring(source)
        weight = nn.Parameter(x[:4].view(2, 2))
        (weight.double() * 2).sum().backward()
        assert weight.grad is not None
        there = [x, x * 2, x[1:], x.detach(), x.half(), x.data, weight, weight.data, weight.grad]
        here = [source, x.cpu(), x.to(HOST), torch.empty_like(x, device=HOST), torch.zeros(6)]
        assert {tensor.device for tensor in there} == {DEVICE}
        assert {tensor.device for tensor in here} == {HOST}
        assert x.data_ptr() != source.data_ptr() != x.cpu().data_ptr() != x.data_ptr()
    assert x.device == HOST, "nothing is pretended any more"


WAITS: dict[str, tuple[dict[str, int], Act]] = {
    "arithmetic": ({}, lambda _, x: (x * number()).sum() + torch.full((), 2.0, device=DEVICE)),
    "a number": ({"_local_scalar_dense": 2}, lambda _, x: x[0].item() + float(x.sum())),
    "a question": (
        {"_local_scalar_dense": 1, "equal": 1},
        lambda _, x: bool((x > 9).any()) or torch.equal(x, x),
    ),
    "a list": ({"tolist": 1}, lambda _, x: x.tolist()),
    "sizes": ({"nonzero": 1, "index": 1}, lambda _, x: (x.nonzero(), x[x > 2])),
    "copies down": (
        {"copy to the host": 3},
        lambda _, x: (x.cpu(), x.to("cpu"), on_host().copy_(x)),
    ),
    "copies up": (
        {"copy to the device": 2},
        lambda _, x: (x.copy_(on_host()), torch.tensor([1.0], device=DEVICE)),
    ),
    "brought": ({}, lambda d, x: d.accelerator.bring(on_host())),
    "a mark": (
        {"mark": 2},
        lambda d, _: [f() for f in (d.accelerator.finish, d.accelerator.mark().wait)],
    ),
    "a lane": ({"mark": 1}, copy_by_lane),
    "the host's own": ({}, lambda _, x: (on_host().tolist(), number().item(), on_host().nonzero())),
}


@pytest.mark.parametrize("what", WAITS)
def test_waits_of_the_host_are_counted(comm, what):
    expected, act = WAITS[what]
    with pretended_device() as device:
        x = device.accelerator.bring(on_host())
        act(device, x)
    assert device.waits == expected
    assert not device.faults
