"""Arguments of checkpointed blocks: which of them move, and that all come as they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.activations.stacks import BATCH, INPUT_NBYTES, WIDTH, batch, grads, on_disk, same, torchs


class Several(nn.Module):
    """A block of many arguments, of which some move."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.seen: list[Any] = []

    def forward(
        self,
        x: Tensor,
        again: Tensor,
        gain: Tensor,
        mask: Tensor,
        few: Tensor,
        box: Any,
        *,
        scale: Tensor,
    ) -> tuple[Tensor, Tensor]:
        self.seen.append((gain is self.gain, box, x is again))
        box["calls"] = box.get("calls", 0) + 1
        y = self.layer(x) * gain * scale + few.sum()
        return y.masked_fill(mask, 0.0) + again, x * 2


def test_arguments_of_every_kind_come_as_they_were(tmp_path):
    found = []
    with on_disk(tmp_path) as checkpointing:
        for call in (checkpointing, torchs):
            block, box = Several(), dict[str, int]()
            stem = nn.Linear(WIDTH, WIDTH)
            nn.init.eye_(stem.weight)
            nn.init.zeros_(stem.bias)
            x, few = stem(batch()), torch.ones(3)
            mask, scale = batch(5) > 1, torch.full((WIDTH,), 0.5)
            # something between, so that x is not the newest
            y, z = call(block, x, x, block.gain, mask, few, box, scale=scale)
            w, v = call(block, z, y, block.gain, mask, few, box, scale=scale)
            (w.sum() + v.square().sum()).backward()
            found.append([*grads(block), *grads(stem)])
            assert all(seen[0] and seen[1] is box for seen in block.seen)
            assert block.seen[0][2]  # the same tensor twice is one
            assert box == {"calls": 4}
        flow = checkpointing.traffic
        # x once, and z; y is the newest
        assert flow.read_nbytes == flow.written_nbytes == 2 * INPUT_NBYTES
    assert same(*found)


STRANGE = {
    "transposed": lambda x: x.t(),
    "a slice with gaps": lambda x: x[:, 3:40],
    "expanded": lambda x: x[:1].expand(BATCH * 20, WIDTH),
    "beginning elsewhere": lambda x: x[1:],
    "channels last": lambda x: x.view(2, 44, 6, 8).contiguous(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("strange", STRANGE.values(), ids=STRANGE.keys())
def test_strides_and_alignment_come_back(tmp_path, strange):
    seen: list[tuple[Any, ...]] = []

    def block(x: Tensor) -> Tensor:
        seen.append((x.shape, x.stride(), x.data_ptr() % 64, x.detach().clone()))
        return torch.sin(x)

    with on_disk(tmp_path) as checkpointing:
        x = batch().requires_grad_()
        y = checkpointing(block, strange(x * 1.5))
        checkpointing(torch.sin, x * 2)  # newer
        y.square().sum().backward()
        assert checkpointing.traffic.read_nbytes > 0
    first, second = seen
    assert first[:3] == second[:3]
    assert torch.equal(first[3], second[3])


def test_an_input_that_is_changed_in_place_is_right_or_torchs_error(tmp_path):
    with on_disk(tmp_path) as checkpointing:
        x = batch().requires_grad_()
        inner = x * 1.0
        y = checkpointing(torch.sin, inner)
        inner.mul_(2)  # it is still the newest, and not written
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
        inner = x * 1.0
        y = checkpointing(torch.sin, inner)
        checkpointing(torch.sin, x * 1.0)
        inner.mul_(2)  # it is away
        (gradient,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(gradient, torch.cos(x.detach()))
        gain = torch.ones(WIDTH, requires_grad=True)
        y = checkpointing(torch.mul, x * 1.0, gain)
        with torch.no_grad():
            gain.mul_(2)  # it did not move: torch's own rule
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_a_keyword_may_have_any_name(tmp_path):
    def block(x: Tensor, *, block: int, self: int) -> Tensor:
        return torch.sin(x) * block * self

    with on_disk(tmp_path) as checkpointing:
        x = batch().requires_grad_()
        (gradient,) = torch.autograd.grad(checkpointing(block, x * 1.0, block=2, self=3).sum(), x)
        assert torch.equal(gradient, torch.cos(x.detach()) * 6)
