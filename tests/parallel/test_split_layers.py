"""Each cut layer and the cut loss against the plain one: outputs, gradients of inputs and weights, of every order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from hpczero.comm.sums import Sums, sums_over
from hpczero.errors import StepError
from hpczero.parallel.tensor import loss as loss_module
from hpczero.parallel.tensor.functions import own_part
from hpczero.parallel.tensor.layers import ColumnLinear, RowLinear, VocabularyEmbedding, words_of
from hpczero.parallel.tensor.loss import split_cross_entropy
from hpczero.plan.placement import Placement
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import grad
from tests.parallel.wholes import equal_on_all, off

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mpi4py import MPI

    from hpczero import Topology

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3, 4)]
SEQUENCE = pytest.mark.parametrize("sequence", [False, True], ids=["plain", "sequence"])


@pytest.fixture
def sums(topology: Topology) -> Iterator[Sums]:
    sums = sums_over(topology.world)
    yield sums
    sums.close()


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def placed(sums: Sums, whole: Tensor, dim: int, **more: Any) -> Placement:
    return Placement("w", tuple(whole.shape), dim, part=sums.rank, parts=sums.size, **more)


def own(whole: Tensor, placement: Placement) -> nn.Parameter:
    return nn.Parameter(part_of_whole(whole, placement))


def part_of_whole(whole: Tensor, placement: Placement) -> Tensor:
    local = torch.empty(placement.local_shape)
    placement.take(whole, local)
    return local


@SEQUENCE
@pytest.mark.parametrize("strips", [1, 3])
def test_column_then_row_is_two_dense_layers_whatever_a_model_makes_of_padding(
    comm: MPI.Intracomm, sums: Sums, strips: int, sequence: bool
) -> None:
    """A sigmoid between them makes 1/2 of padding, and a layer of ones there must not reach anything."""
    first, bias, second, last = drawn(15, 7), drawn(15), drawn(4, 15, seed=2), drawn(4)
    dense = [nn.Parameter(x.clone()) for x in (first, bias, second, last)]
    x = drawn(2, 5, 7, seed=3).requires_grad_()
    wanted = F.linear(torch.sigmoid(F.linear(x, dense[0], dense[1])), dense[2], dense[3])
    weight = drawn(2, 5, 4, seed=4)
    (wanted * weight).sum().backward()

    rows = placed(sums, first, 0, strips=strips)
    columns = placed(sums, second, 1, strips=strips)
    biases = placed(sums, bias, 0, strips=strips)
    column = ColumnLinear(own(first, rows), own(bias, biases), rows, sums, sequence=sequence)
    row = RowLinear(own(second, columns), nn.Parameter(last), columns, sums, sequence=sequence)
    y = x.detach().clone().requires_grad_()
    given = own_part(y, sums, 1) if sequence else y
    found = row(torch.sigmoid(column(given)))
    mine = sums.own_part(weight, 1) if sequence else weight
    (found * mine).sum().backward()
    cut = sums.own_part(wanted, 1) if sequence else wanted
    parallel_assert(comm, off(found, cut) < 1e-6, "output")
    parallel_assert(comm, off(grad(y), grad(x)) < 1e-6, "gradient of the input")
    parallel_assert(comm, equal_on_all(comm, grad(y)), "bits")
    pairs = ((column.weight, rows, 0), (column.bias, biases, 1), (row.weight, columns, 2))
    for parameter, placement, index in pairs:
        whole = grad(dense[index])
        local = part_of_whole(whole, placement)  # with zeros where padding is
        parallel_assert(comm, off(grad(parameter), local) < 2e-6, str(index))
        padding = part_of_whole(torch.ones_like(whole), placement) == 0
        parallel_assert(comm, not grad(parameter)[padding].any(), "padding has a gradient")
    total = grad(row.bias).numpy()
    total = comm.allreduce(total) if sequence else total
    parallel_assert(comm, off(torch.from_numpy(total), grad(dense[3])) < 1e-6, "bias")


@SEQUENCE
def test_an_embedding_cut_by_its_vocabulary_is_the_plain_one(
    comm: MPI.Intracomm, sums: Sums, sequence: bool
) -> None:
    table = drawn(11, 6)
    plain = nn.Embedding(11, 6, padding_idx=9, _weight=table.clone())
    tokens = torch.tensor([[0, 10, 9, 3, 3], [7, 9, 1, 10, 2]])
    placement = placed(sums, table, 0)
    layer = VocabularyEmbedding(own(table, placement), None, placement, sums, sequence=sequence)
    layer.padding_idx = 9
    weight = drawn(2, 5, 6, seed=2)
    wanted, found = plain(tokens), layer(tokens)
    (wanted * weight).sum().backward()
    (found * (sums.own_part(weight, 1) if sequence else weight)).sum().backward()
    cut = sums.own_part(wanted, 1) if sequence else wanted
    parallel_assert(comm, torch.equal(found, cut))
    local = part_of_whole(grad(plain.weight), placement)
    parallel_assert(comm, off(grad(layer.weight), local) < 1e-6)
    with pytest.raises(IndexError, match="id 11 of 11"):
        layer(torch.tensor([[11]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pieces", [2**24, 20])
def test_cross_entropy_over_parts_is_torchs(
    comm: MPI.Intracomm,
    sums: Sums,
    dtype: torch.dtype,
    pieces: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loss_module, "PIECE_NUMEL", pieces)
    logits = (drawn(9, 13) * 8).to(dtype)
    targets = torch.tensor([0, 12, -100, 5, 6, 7, -100, 12, 3])
    placement = placed(sums, logits, 1)
    for reduction in ("mean", "sum"):
        plain = logits.clone().requires_grad_()
        wanted = F.cross_entropy(plain.float(), targets, reduction=reduction)
        (wanted * 3).backward()
        local = part_of_whole(logits, placement)
        local[:, len(placement.owned) :] = 77  # padding counts for nothing
        mine = local.to(dtype).requires_grad_()
        words = words_of(Placement("w", (13, 1), 0, part=sums.rank, parts=sums.size))
        found = split_cross_entropy(mine, targets, sums, words, reduction=reduction)
        (found * 3).backward()
        parallel_assert(comm, off(found, wanted) < 1e-6, f"{found} {wanted}")
        parallel_assert(comm, equal_on_all(comm, found), "bits")
        gradient = part_of_whole(grad(plain).float(), placement)
        within = 1e-6 if dtype is torch.float32 else 2**-8
        parallel_assert(comm, off(grad(mine).float(), gradient) < within, reduction)
        parallel_assert(comm, not grad(mine)[:, len(placement.owned) :].any(), "padding")


def test_all_targets_ignored_is_torchs_nan_and_a_wrong_target_torchs_error(
    comm: MPI.Intracomm, sums: Sums
) -> None:
    placement = placed(sums, torch.empty(13, 1), 0)
    logits = drawn(2, placement.local_shape[0])
    found = split_cross_entropy(logits, torch.tensor([-100, -100]), sums, words_of(placement))
    parallel_assert(comm, found.isnan())
    for target in (13, -1):
        with pytest.raises(IndexError, match=f"Target {target} is out of bounds"):
            split_cross_entropy(logits, torch.tensor([0, target]), sums, words_of(placement))


def two_layers(sums: Sums, x: Tensor, weights: list[Tensor], targets: Tensor) -> Tensor:
    """Embedding-free chain of all cut layers up to the loss."""
    rows, columns, head = (placed(sums, w, dim) for w, dim in zip(weights, (0, 1, 0), strict=True))
    column = ColumnLinear(own(weights[0], rows), None, rows, sums)
    row = RowLinear(own(weights[1], columns), None, columns, sums)
    last = ColumnLinear(own(weights[2], head), None, head, sums)
    logits = last(row(torch.tanh(column(x))))
    return split_cross_entropy(logits, targets, sums, words_of(head))


def dense(x: Tensor, weights: list[Tensor], targets: Tensor) -> Tensor:
    y = torch.tanh(x @ weights[0].T) @ weights[1].T @ weights[2].T
    return F.cross_entropy(y, targets)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own forward mode
def test_gradients_of_gradients_forward_mode_and_torch_func_are_right_or_refused(
    comm: MPI.Intracomm, sums: Sums
) -> None:
    weights = [drawn(9, 5), drawn(5, 9, seed=2), drawn(11, 5, seed=3)]
    targets = torch.tensor([0, 10, 4])
    x, direction = drawn(3, 5, seed=4), drawn(3, 5, seed=5)

    def second(f: Any) -> Tensor:
        y = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(f(y), y, create_graph=True)
        (found,) = torch.autograd.grad((first * direction).sum() + first.square().sum(), y)
        return found

    def forward(f: Any) -> Tensor:
        with forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(f(forward_ad.make_dual(x, direction))).tangent
            assert tangent is not None
            return tangent

    def functional(f: Any) -> Tensor:
        return torch.func.grad(f)(x)

    for way in (second, forward, functional):
        wanted = way(lambda y: dense(y, weights, targets))
        found = way(lambda y: two_layers(sums, y, weights, targets))
        parallel_assert(comm, off(found, wanted) < 1e-5, f"{way.__name__} {found} {wanted}")
        parallel_assert(comm, equal_on_all(comm, found), way.__name__)
    if comm.size > 1:
        with pytest.raises(StepError, match="vmap"):
            torch.func.vmap(lambda y: two_layers(sums, y[None], weights, targets[:1]))(x)
