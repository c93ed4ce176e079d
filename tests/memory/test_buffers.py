"""Memory that is given back and taken again under autograd's nose, and the ledger of what is held."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hpczero.memory.buffers import Buffer, Memory


def buffer_of(numel: int, dtype: torch.dtype = torch.float32) -> tuple[Buffer, Memory]:
    memory = Memory()
    return Buffer(numel, dtype, memory=memory, category="test"), memory


def storage_nbytes(buffer: Buffer) -> int:
    return buffer.tensor.untyped_storage().nbytes()


def test_release_gives_the_storage_back_and_take_gets_it_again() -> None:
    buffer, _ = buffer_of(1000, torch.bfloat16)
    tensor = buffer.tensor
    assert (buffer.held, storage_nbytes(buffer)) == (True, 2000)
    buffer.release()
    assert (buffer.held, storage_nbytes(buffer)) == (False, 0)
    buffer.take()
    assert (buffer.held, storage_nbytes(buffer), buffer.nbytes) == (True, 2000, 2000)
    assert buffer.tensor is tensor
    assert tensor.shape == (1000,)


def test_release_and_take_twice_or_of_nothing_are_harmless() -> None:
    buffer, memory = buffer_of(10)
    buffer.take()
    assert memory.current == {"test": 40}
    buffer.release()
    buffer.release()
    assert memory.current == {"test": 0}
    empty, memory = buffer_of(0)
    empty.release()
    empty.take()
    assert (empty.tensor.shape, memory.total) == ((0,), 0)


def refill(buffer: Buffer, values: Tensor) -> None:
    """What a unit does between forward and backward."""
    buffer.release()
    buffer.take()
    with torch.no_grad():
        buffer.tensor.copy_(values)


def as_parameter(buffer: Buffer, *shape: int) -> nn.Parameter:
    """A parameter as a unit makes it: it shares memory with the buffer, not the version counter."""
    parameter = nn.Parameter(torch.empty(shape))
    parameter.data = buffer.tensor.view(shape)
    return parameter


def test_refilled_parameter_keeps_its_version_and_gives_the_right_gradients() -> None:
    buffer, _ = buffer_of(12)
    values = torch.arange(12.0)
    buffer.tensor.copy_(values)
    weight = as_parameter(buffer, 3, 4)
    x = torch.ones(2, 4, requires_grad=True)
    version = weight._version
    y = (x @ weight.t()).square().sum()  # saves a view of the weight
    buffer.release()
    refill(buffer, values)
    y.backward()

    dense, x_dense = values.view(3, 4).clone().requires_grad_(), x.detach().requires_grad_()
    (x_dense @ dense.t()).square().sum().backward()
    assert weight._version == version
    for ours, plain in ((x, x_dense), (weight, dense)):
        assert ours.grad is not None
        assert plain.grad is not None
        assert torch.equal(ours.grad, plain.grad)


def test_backward_uses_what_was_refilled() -> None:
    # so that the test above cannot pass on a stale copy
    buffer, _ = buffer_of(12)
    buffer.tensor.fill_(1.0)
    weight = as_parameter(buffer, 3, 4)
    x = torch.ones(1, 4, requires_grad=True)
    y = (x @ weight.t()).sum()
    refill(buffer, torch.full((12,), 5.0))
    y.backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[15.0] * 4]


def test_change_of_the_parameter_itself_is_still_seen() -> None:
    buffer, _ = buffer_of(12)
    buffer.tensor.fill_(1.0)
    weight = as_parameter(buffer, 3, 4)
    x = torch.ones(1, 4, requires_grad=True)
    y = (x @ weight.t()).sum()
    with torch.no_grad():
        weight.add_(1.0)
    assert weight._version == 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_renewed_memory_leaves_the_old_one_to_its_views() -> None:
    buffer, memory = buffer_of(12)
    buffer.tensor.copy_(torch.arange(12.0))
    tensor, array = buffer.tensor, buffer.tensor.view(3, 4).numpy()
    assert buffer.pinned
    buffer.renew()
    assert not buffer.pinned
    assert buffer.tensor is tensor
    buffer.release()
    assert (memory.total, storage_nbytes(buffer)) == (0, 0)
    buffer.take()
    buffer.tensor.fill_(7.0)
    assert array.tolist() == torch.arange(12.0).view(3, 4).tolist()


def test_ledger_counts_by_category_with_peaks() -> None:
    memory = Memory()
    first = Buffer(10, torch.float32, memory=memory, category="a")
    second = Buffer(5, torch.bfloat16, memory=memory, category="a")
    third = Buffer(3, torch.float32, memory=memory, category="b")
    assert memory.current == {"a": 50, "b": 12}
    assert memory.total == 62
    first.release()
    third.release()
    assert memory.current == {"a": 10, "b": 0}
    assert memory.peak == {"a": 50, "b": 12}
    memory.reset_peak()
    third.take()
    assert memory.peak == {"a": 10, "b": 12}
    second.release()
    assert memory.peak["a"] == 10
