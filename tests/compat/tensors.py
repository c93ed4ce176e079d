# mypy: disable-error-code="override, operator, assignment, arg-type"
"""Unusual tensors and indexing inside blocks and between them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.compat.construct import BF16, WIDTH, Habits, Net, Place, Residual
from tests.helpers.small_models import seeded

habits = Habits()


@habits.block("complex-activations", read=lambda x: x.abs())
class ComplexBlock(Residual):
    """Complex activations between blocks.

    Complex activations inside and on the way to the next block; real weights.
    """

    def forward(self, z: Tensor) -> Tensor:
        z = z if z.is_complex() else torch.complex(z, torch.zeros_like(z))
        return torch.complex(self.branch(z.real), self.branch(z.imag)) * torch.exp(1j * z.real)


@habits.block(
    "complex-weights", refused="only real numbers can be sharded", remark="`torch.view_as_real`"
)
class ComplexWeights(nn.Module):
    """Complex parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.cfloat) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + (x.to(torch.cfloat) @ self.weight).abs()


@habits.block("fourier")
class Fourier(Residual):
    """`torch.fft` and `view_as_complex` of a parameter.

    FNet, FNO: a filter in frequency space.
    """

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, 2) * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x) * torch.view_as_complex(self.filter)
        return super().forward(torch.fft.irfft(spectrum, n=WIDTH))


@habits.block("einsum")
class Einsum(nn.Module):
    """`torch.einsum` over a parameter of four dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.core = nn.Parameter(torch.randn(2, 3, 2, 3) * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.einsum("bij,ijkl->bkl", x.view(4, 2, 3), self.core)
        return x + torch.tanh(h).reshape(4, WIDTH)


def graph(place: Place, layout: torch.layout = torch.sparse_coo) -> Any:
    """A ring of four nodes whose weights differ from rank to rank."""
    rows = torch.arange(4)
    index = torch.stack([torch.cat([rows, rows]), torch.cat([(rows + 1) % 4, rows])])
    adjacency = torch.sparse_coo_tensor(index, place.normal(8).abs(), (4, 4), check_invariants=True)
    adjacency = adjacency.coalesce()
    if layout is torch.sparse_csr:
        adjacency = adjacency.to_sparse_csr()
    return place.normal(4, WIDTH), adjacency, Place(place.rank, place.step, 50).normal(4, 3)


class GraphLayer(nn.Module):
    """GCN: a sparse adjacency times features."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return torch.tanh(torch.sparse.mm(adjacency, self.layer(x))) + x


@habits.model("graph-coo", block=GraphLayer, batch=graph)
class GraphNet(Net):
    """A sparse (COO) argument to the model and its blocks: GCN."""

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, adjacency)
        return self.head(x)


def edges(place: Place) -> Any:
    found = torch.stack([torch.arange(6) % 4, place.integers(4, 6)])
    return place.normal(4, WIDTH), found, Place(place.rank, place.step, 50).normal(4, 3)


@habits.block("message-passing", model=GraphNet, batch=edges)
class MessagePassing(nn.Module):
    """Message passing by `index_add` and `scatter_reduce`."""

    def __init__(self) -> None:
        super().__init__()
        self.message = nn.Linear(2 * WIDTH, WIDTH)
        self.update = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        messages = torch.relu(self.message(torch.cat([x[edges[0]], x[edges[1]]], dim=1)))
        total = torch.zeros_like(x).index_add(0, edges[1], messages)
        most = torch.zeros_like(x).scatter_reduce(
            0, edges[1][:, None].expand_as(messages), messages, "amax"
        )
        return x + torch.tanh(self.update(torch.cat([total, most], dim=1)))


@habits.block("index-put")
class IndexPut(Residual):
    """`index_put`, `masked_fill`, `scatter_add`."""

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        out[torch.tensor([0, 2]), 1:3] = self.branch(x)[:2, :2]
        out = out.index_put((torch.tensor([1, 3]),), self.branch(x)[2:], accumulate=True)
        out = out.masked_fill(x > 2, 0.1)
        return x + out.scatter_add(1, torch.argsort(x, dim=1), self.branch(x))


class Nested(Residual):
    """Jagged nested tensors from block to block."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.tanh(self.inner(x)))


@habits.model("nested-tensors", block=Nested)
class NestedNet(Net):
    """Jagged nested tensors between blocks."""

    def through(self, x: Any) -> Any:
        nested = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 1, 4]))
        return super().through(nested).values()


@habits.block("double-inside")
class Doubles(Residual):
    """Numbers in fp64 inside a block."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.inner.weight.double()
        y = torch.logcumsumexp(F.linear(x.double(), weight), dim=1)
        return x + self.outer(torch.tanh(y.float()))


@habits.block("autocast-inside", tolerance=BF16)
class Halves(Residual):
    """`torch.autocast` inside a block."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x).float()


@habits.block("triangular-solve")
class Solves(nn.Module):
    """`torch.linalg.solve_triangular` with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.lower = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        lower = self.lower.tril(-1) + torch.eye(WIDTH) * 3.0
        return x + torch.linalg.solve_triangular(lower, x.T, upper=False).T


class TakesNumbers(Residual):
    """Arguments that are no tensors: floats, strings, dtypes, functions, shapes."""

    def forward(self, x: Tensor, *rest: Any, **named: Any) -> Tensor:
        scale, name, kind, act, shape = rest
        assert name == "gelu"
        assert named["size"] == x.shape
        return act(self.branch(x) * scale).to(kind).view(shape) + x


@habits.call("other-arguments", block=TakesNumbers)
def with_numbers(block: Any, x: Tensor) -> Any:
    """Floats, strings, dtypes, functions and shapes as arguments."""
    return block(x, 0.5, "gelu", torch.float32, F.gelu, (4, WIDTH), size=x.shape)


@habits.block("integer-outputs", read=lambda x: x[0])
class IntegerIO(nn.Module):
    """Integers among the outputs (codes of a quantiser).

    Integers out of one block into the next: codes of a quantiser.
    """

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(5, WIDTH))

    def forward(self, x: Any) -> Any:
        x = x[0] if isinstance(x, tuple) else x
        nearest = torch.cdist(x, self.codes).argmin(1)
        return x + 0.3 * self.codes[nearest], nearest


@habits.model("block-skipped")
class EarlyExit(Net):
    """A block that all ranks skip.

    A branch on a value that is the same on all ranks.
    """

    def through(self, x: Any) -> Any:
        for index, block in enumerate(self.blocks):
            if index < 2 or x.dim() > 2:
                x = block(x)
        return x


@habits.block("empty-batch")
class EmptyBatch(Residual):
    """A batch of no samples inside a block."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)[:0].sum() + self.branch(x[:0]).sum() + 0.5 * self.branch(x)


@habits.change(
    "integer-parameter", refused="only floating-point numbers can be sharded", remark="a buffer"
)
def with_integers(model: Any) -> None:
    """An int64 parameter."""
    model.steps = nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)


habits.add(
    "graph-csr",
    "a sparse (CSR) argument",
    block=GraphLayer,
    model=GraphNet,
    batch=lambda place: graph(place, torch.sparse_csr),
)
habits.add(
    "double-model",
    "a model in fp64",
    build=lambda: seeded(Net).double(),
    batch=lambda place: (place.normal(4, WIDTH).double(), place.normal(4, 3).double()),
    refused="holds torch.float64, expected torch.float32",
    remark="`model.float()` before",
)
