"""Which operations work on the optimizer's pieces between steps: elementwise ones; the others raise."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hpczero.errors import StepError
from hpczero.zero.units.guard import Guard
from hpczero.zero.units.seen_gradient import ShardPiece, guard_shards, open_shards
from tests.helpers.small_models import grad


def _piece() -> nn.Parameter:
    """(6,) fp32 as in a group of the optimizer, with a gradient."""
    piece = nn.Parameter(torch.linspace(-1.0, 1.6, 6))
    piece.grad = torch.linspace(2.1, -3.0, 6)
    guard_shards([piece])
    return piece


# Of a piece and its gradient.
REFUSED: dict[str, Callable[[Any, Any], object]] = {
    "norm of a chunk": lambda p, g: p.chunk(2)[0].norm(),
    "norm of a part": lambda p, g: g[:3].norm(),
    "norms of a list": lambda p, g: torch._foreach_norm(torch._foreach_mul([p, p], 1.0)),
    "norm of what is cast": lambda p, g: g.to(torch.float64).norm(),
    "norm without its graph": lambda p, g: g.detach().norm(),
    "norm of its data": lambda p, g: g.data.norm(2),
    "root of squares": lambda p, g: (g * g).sum().sqrt(),
    "truth": lambda p, g: bool((g > 1).any()),
    "numbers": lambda p, g: g.tolist(),
    "variance": lambda p, g: torch.var_mean(g),
    "roll": lambda p, g: g.roll(1),
    "largest of lists": lambda p, g: torch._foreach_max([g]),
    "softmax": lambda p, g: g.softmax(0),
    "mse_loss": lambda p, g: F.mse_loss(g, torch.zeros(6)),
    "cosine_similarity": lambda p, g: F.cosine_similarity(g, p, dim=0),
    "matrix by vector": lambda p, g: g.view(1, -1).mv(p),
    "linear": lambda p, g: F.linear(g.view(1, -1), g.view(1, -1)),
    "trace": lambda p, g: g.view(2, 3).trace(),
    "isin": lambda p, g: torch.isin(g, g),
    "dlpack": lambda p, g: torch.utils.dlpack.from_dlpack(g),
    "array": lambda p, g: p.detach().numpy(),
    "truth of an element": lambda p, g: bool(g[0] > 0),
    "unbind": lambda p, g: [abs(element) for element in p.unbind()],
    "count": lambda p, g: g.count_nonzero(),
    "positions": lambda p, g: torch.where(g > 0),
    "mask": lambda p, g: g[g > 0],
    "renorm": lambda p, g: g.view(1, -1).renorm(2, 0, 1.0),
    "running sum": lambda p, g: g.cumsum(0),
    "largest": lambda p, g: g.max(),
    "one element times all": lambda p, g: g.mul_(g[0]),
    "one element times all of a list": lambda p, g: torch._foreach_mul_([g], g[0]),
    "outer product": lambda p, g: g * g.view(-1, 1),
}

ALLOWED: dict[str, Callable[[Any, Any], object]] = {
    "difference": lambda p, g: 1 - g - p,
    "product": lambda p, g: 2 * g * p + 2 / (g / p) + 1,
    "power": lambda p, g: 2**g + g**2,
    "remainder": lambda p, g: g % 2 + g // 2,
    "sum with an ordinary tensor": lambda p, g: torch.ones(6) + g + torch.ones(6),
    "comparisons": lambda p, g: (g > 0) & ~(p <= 0) | (g == p),
    "signs": lambda p, g: g.sign() * g.abs().sqrt(),
    "clamp": lambda p, g: torch.clamp(g, -1, 1).clip(-0.5, 0.5),
    "soft threshold": lambda p, g: F.softshrink(p, 0.1),
    "where": lambda p, g: torch.where(g > 0, g, 0.0),
    "without NaN": lambda p, g: torch.where(torch.isfinite(g), g, 0.0).nan_to_num(),
    "mask filled": lambda p, g: g.masked_fill(g > 1, 1.0),
    "addcmul": lambda p, g: torch.addcmul(g, p, p).addcdiv(g, g),
    "list": lambda p, g: torch._foreach_add(torch._foreach_mul([p, g], 0.5), [g, p]),
    "moved": lambda p, g: g.detach().clone().to(torch.float64).float().half().cpu(),
    "like it": lambda p, g: (torch.zeros_like(g) + torch.randn_like(g) + g.new_ones(6)).clone(),
    "shapes": lambda p, g: g.view(2, 3).reshape(6).flatten().unsqueeze(0).squeeze(0),
    "all of it": lambda p, g: (g[:], g[...], g[None], torch.cat([p, g])),
    "text": lambda p, g: f"{p} {g!r}",
    "copies": lambda p, g: (copy.deepcopy(p), pickle.dumps(g)),
}

IN_PLACE: dict[str, Callable[[Any, Any], object]] = {
    "scaled": lambda p, g: g.mul_(0.5).add_(p, alpha=0.1).div_(2),
    "operators": lambda p, g: g.__imul__(0.5).__iadd__(p.detach()),
    "clamped": lambda p, g: (g.clamp_(-1, 1), p.clamp_(min=-0.5)),
    "copied": lambda p, g: g.copy_(p).neg_(),
    "filled": lambda p, g: (g.zero_(), p.fill_(2.0)),
    "set": lambda p, g: (g.__setitem__(g > 1, 1.0), g.__setitem__(slice(None), 0.5 * g)),
    "lists": lambda p, g: torch._foreach_mul_(torch._foreach_add([p, g], 1.0), 2.0),
    "lists in place": lambda p, g: torch._foreach_lerp_([g], [p.detach()], 0.5),
    "values clipped": lambda p, g: nn.utils.clip_grad_value_([p], 0.5),
    "values clipped one by one": lambda p, g: nn.utils.clip_grad_value_([p], 0.5, foreach=False),
    "normal": lambda p, g: g.normal_(0.0, 0.1),
    "bernoulli": lambda p, g: g.bernoulli_(0.5),
    "init": lambda p, g: nn.init.normal_(g),
    "data": lambda p, g: (p.data.clamp_(-0.1, 0.1), g.data.mul_(2)),
}


@pytest.mark.parametrize("act", REFUSED.values(), ids=REFUSED)
def test_what_is_not_elementwise_is_refused(act):
    piece = _piece()
    with torch.no_grad(), pytest.raises(StepError, match="this rank's pieces of the gradients"):
        act(piece, grad(piece))


def _tensors(result: object) -> list[Tensor]:
    items = result if isinstance(result, (list, tuple)) else [result]
    nested = [_tensors(item) for item in items if isinstance(item, (list, tuple))]
    return [item for item in items if isinstance(item, Tensor)] + [t for n in nested for t in n]


@pytest.mark.parametrize("act", ALLOWED.values(), ids=ALLOWED)
def test_what_is_elementwise_gives_what_an_ordinary_tensor_gives(act):
    piece, plain = _piece(), _piece()
    open_shards([plain])
    torch.manual_seed(0)
    found = _tensors(act(piece, grad(piece)))
    torch.manual_seed(0)
    expected = _tensors(act(plain, grad(plain)))
    for one, other in zip(found, expected, strict=True):
        assert isinstance(one, (ShardPiece, type(piece))), "unguarded"
        with torch._C.DisableTorchFunctionSubclass():
            torch.testing.assert_close(one.detach().as_subclass(Tensor), other.detach())


@pytest.mark.parametrize("act", IN_PLACE.values(), ids=IN_PLACE)
def test_changes_in_place_are_those_of_an_ordinary_tensor(act):
    piece, plain = _piece(), _piece()
    open_shards([plain])
    with torch.no_grad():
        for tensor in (piece, plain):
            torch.manual_seed(0)
            act(tensor, grad(tensor))
    open_shards([piece])
    assert torch.equal(piece, plain)
    assert torch.equal(grad(piece), grad(plain))


def test_metadata_is_there():
    piece = _piece()
    for tensor in (piece, grad(piece)):
        assert (tensor.shape, tensor.size(0), tensor.numel(), tensor.dim()) == ((6,), 6, 6, 1)
        assert (tensor.dtype, tensor.device.type) == (torch.float32, "cpu")
        assert (tensor.stride(), tensor.is_contiguous(), len(tensor)) == ((1,), True, 6)
        assert tensor in {tensor}
    assert piece.requires_grad_() is piece


@pytest.mark.parametrize("of", ["parameter", "gradient"])
def test_a_sharded_parameter_beside_a_piece_is_refused_as_ever(of):
    whole = nn.Parameter(torch.ones(6))
    Guard(whole, "layer.weight").close()
    piece = _piece()
    tensor = piece if of == "parameter" else grad(piece)
    with torch.no_grad(), pytest.raises(StepError, match=r"'layer\.weight' is sharded"):
        tensor.add_(whole)


def test_what_is_assigned_to_a_gradient_is_a_tensor_of_its_shape():
    piece: Any = _piece()
    before = grad(piece).clone()
    with pytest.raises(TypeError, match="got int, expected a Tensor or None"):
        piece.grad = 3
    for wrong in (torch.ones(1), torch.ones(()), torch.ones(2, 3)):
        with pytest.raises(StepError, match=r"got shape \(.*\), expected \(6,\)"):
            piece.grad = wrong
    open_shards([piece])
    assert torch.equal(piece.grad, before.as_subclass(Tensor))


def _assigned(piece: Any) -> None:
    piece.grad = piece.grad + 0.5 * piece


def _added(piece: Any) -> None:
    piece.grad += 0.5 * piece


def _added_in_place(piece: Any) -> None:
    piece.grad.add_(piece, alpha=0.5)


@pytest.mark.parametrize("decay", [_assigned, _added, _added_in_place])
def test_a_gradient_takes_what_has_a_graph_and_gets_none(decay):
    plain = _piece()
    open_shards([plain])
    decay(plain)
    buffer = torch.zeros(8)
    piece: Any = nn.Parameter(torch.linspace(-1.0, 1.6, 6))
    piece.grad = buffer[1:7].copy_(torch.linspace(2.1, -3.0, 6))
    with torch.no_grad():
        piece.grad = buffer[1:7]  # a view that was cut without a graph, as those of a unit are
    guard_shards([piece])
    decay(piece)
    assert torch.equal(buffer[1:7], grad(plain).detach())
    assert not buffer.requires_grad
