# mypy: disable-error-code="override, operator, assignment, arg-type"
"""Unusual tensors and indexing inside blocks and between them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.compat.construct import BF16, WIDTH, Construct, Net, Place, Residual, net, seeded


class ComplexBlock(Residual):
    """Complex activations inside and on the way to the next block; real weights."""

    def forward(self, z: Tensor) -> Tensor:
        z = z if z.is_complex() else torch.complex(z, torch.zeros_like(z))
        return torch.complex(self.branch(z.real), self.branch(z.imag)) * torch.exp(1j * z.real)


class ComplexWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.cfloat) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + (x.to(torch.cfloat) @ self.weight).abs()


class Fourier(Residual):
    """FNet, FNO: a filter in frequency space."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, 2) * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x) * torch.view_as_complex(self.filter)
        return super().forward(torch.fft.irfft(spectrum, n=WIDTH))


class Einsum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.core = nn.Parameter(torch.randn(2, 3, 2, 3) * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.einsum("bij,ijkl->bkl", x.view(4, 2, 3), self.core)
        return x + torch.tanh(h).reshape(4, WIDTH)


class GraphLayer(nn.Module):
    """GCN: a sparse adjacency times features."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return torch.tanh(torch.sparse.mm(adjacency, self.layer(x))) + x


class GraphNet(Net):
    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, adjacency)
        return self.head(x)


def graph(place: Place, layout: torch.layout = torch.sparse_coo) -> Any:
    """A ring of four nodes whose weights differ from rank to rank."""
    rows = torch.arange(4)
    index = torch.stack([torch.cat([rows, rows]), torch.cat([(rows + 1) % 4, rows])])
    adjacency = torch.sparse_coo_tensor(index, place.normal(8).abs(), (4, 4), check_invariants=True)
    adjacency = adjacency.coalesce()
    if layout is torch.sparse_csr:
        adjacency = adjacency.to_sparse_csr()
    return place.normal(4, WIDTH), adjacency, Place(place.rank, place.step, 50).normal(4, 3)


class MessagePassing(nn.Module):
    """Messages along edges, gathered by index_add and scatter_reduce."""

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


def edges(place: Place) -> Any:
    found = torch.stack([torch.arange(6) % 4, place.integers(4, 6)])
    return place.normal(4, WIDTH), found, Place(place.rank, place.step, 50).normal(4, 3)


class IndexPut(Residual):
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


class NestedNet(Net):
    def through(self, x: Any) -> Any:
        nested = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 1, 4]))
        return super().through(nested).values()


class Doubles(Residual):
    """fp64 inside, for a sum that must be exact."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.inner.weight.double()
        y = torch.logcumsumexp(F.linear(x.double(), weight), dim=1)
        return x + self.outer(torch.tanh(y.float()))


class Halves(Residual):
    """A block that computes in bf16 under a local autocast."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x).float()


class Solves(nn.Module):
    """linalg inside: a triangular solve with a weight."""

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


def with_numbers(block: Any, x: Tensor) -> Any:
    return block(x, 0.5, "gelu", torch.float32, F.gelu, (4, WIDTH), size=x.shape)


class IntegerIO(nn.Module):
    """Integers out of one block into the next: codes of a quantiser."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(5, WIDTH))

    def forward(self, x: Any) -> Any:
        x = x[0] if isinstance(x, tuple) else x
        nearest = torch.cdist(x, self.codes).argmin(1)
        return x + 0.3 * self.codes[nearest], nearest


class EarlyExit(Net):
    """A branch on a value that is the same on all ranks."""

    def through(self, x: Any) -> Any:
        for index, block in enumerate(self.blocks):
            if index < 2 or x.dim() > 2:
                x = block(x)
        return x


class EmptyBatch(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)[:0].sum() + self.branch(x[:0]).sum() + 0.5 * self.branch(x)


def with_integers(model: Any) -> None:
    model.steps = nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)


CONSTRUCTS = [
    Construct(
        "complex-activations",
        "complex activations between blocks",
        net(ComplexBlock, read=lambda x: x.abs()),
    ),
    Construct(
        "complex-weights",
        "complex parameters",
        net(ComplexWeights),
        refused="only real numbers can be sharded",
        remark="`torch.view_as_real`",
    ),
    Construct("fourier", "`torch.fft` and `view_as_complex` of a parameter", net(Fourier)),
    Construct("einsum", "`torch.einsum` over a parameter of four dimensions", net(Einsum)),
    Construct(
        "graph-coo",
        "a sparse (COO) argument to the model and its blocks: GCN",
        net(GraphLayer, GraphNet),
        batch=graph,
    ),
    Construct(
        "graph-csr",
        "a sparse (CSR) argument",
        net(GraphLayer, GraphNet),
        batch=lambda place: graph(place, torch.sparse_csr),
    ),
    Construct(
        "message-passing",
        "message passing by `index_add` and `scatter_reduce`",
        net(MessagePassing, GraphNet),
        batch=edges,
    ),
    Construct("index-put", "`index_put`, `masked_fill`, `scatter_add`", net(IndexPut)),
    Construct("nested-tensors", "jagged nested tensors between blocks", net(Nested, NestedNet)),
    Construct("double-inside", "fp64 inside a block", net(Doubles)),
    Construct("autocast-inside", "`torch.autocast` inside a block", net(Halves), tolerance=BF16),
    Construct("triangular-solve", "`torch.linalg.solve_triangular` with a parameter", net(Solves)),
    Construct(
        "other-arguments",
        "floats, strings, dtypes, functions and shapes as arguments",
        net(TakesNumbers, call=with_numbers),
    ),
    Construct(
        "integer-outputs",
        "integers among the outputs (codes of a quantiser)",
        net(IntegerIO, read=lambda x: x[0]),
    ),
    Construct("block-skipped", "a block that all ranks skip", net(kind=EarlyExit)),
    Construct("empty-batch", "a batch of no samples inside a block", net(EmptyBatch)),
    Construct(
        "double-model",
        "a model in fp64",
        lambda: seeded(Net).double(),
        batch=lambda place: (place.normal(4, WIDTH).double(), place.normal(4, 3).double()),
        refused="holds torch.float64, expected torch.float32",
        remark="`model.float()` before",
    ),
    Construct(
        "integer-parameter",
        "an int64 parameter",
        net(change=with_integers),
        refused="only floating-point numbers can be sharded",
        remark="a buffer",
    ),
]
