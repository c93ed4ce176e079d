"""What this host computes and moves per second, measured in a few seconds: kernels for `hpczero.predict.model`.

Owns: the pieces of work, and how their times are turned into those of others. Must not know: the models that are
predicted; the sizes here are the same for all. All ranks of a job probe at once, as they will compute at once: cores
share memory, caches and clock. Also one rank of a contender that can be asked to probe (`scaling.contenders.ranks`).
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from hpczero.errors import run

SIDES = (64, 256, 512, 1024)  # of square products
ROWS, WIDTH, VOCAB = 512, 1024, 8192  # of memory-bound work: 2 MiB and 16 MiB in fp32
HEADS, HEAD, SEQUENCE, SAMPLES = 8, 64, 128, 4
UPDATED = 2**22  # elements of the update and of sums: 16 MiB each
TURN_S = 0.12  # for each piece of work
LEAST = 3  # repetitions of each
POOL_NBYTES = 2**26  # of operands: twice a large cache


@dataclass(frozen=True)
class Measured:
    """Seconds; ``Kernels`` of one rank.

    Attributes:
        products: FLOP/s of square products, by side.
        elements: of one element, by kind and pass, as in ``norm/forward``.
        attention: FLOP/s of both products, whole square counted: forward, backward.
        update: of one element.
        sums: of one element of the sum of one block, and of each further block.
        memory_rate: bytes per second of a copy.
        dispatch: of one small operation.
        exchange: bytes per second from rank to rank, by messages; None for one rank.
        wait: of a barrier; None for one rank.
    """

    products: Mapping[str, float]
    elements: Mapping[str, float]
    attention: Sequence[float]
    update: float
    sums: Sequence[float]
    memory_rate: float
    dispatch: float
    exchange: float | None = None
    wait: float | None = None

    def matmul_s(self, m: int, k: int, n: int) -> float:
        """By the rate at the same number of FLOPs, interpolated."""
        side = math.log((m * k * n) ** (1 / 3))
        known = sorted((math.log(int(s)), math.log(rate)) for s, rate in self.products.items())
        low, high = known[0], known[-1]
        for left, right in itertools.pairwise(known):
            if left[0] <= side <= right[0]:
                low, high = left, right
        if side <= low[0] or low[0] == high[0]:
            rate = math.exp(low[1])
        else:
            share = min((side - low[0]) / (high[0] - low[0]), 1.0)
            rate = math.exp(low[1] + share * (high[1] - low[1]))
        return 2 * m * k * n / rate

    def attention_s(self, tokens: int, sequence: int, width: int, *, backward: bool) -> float:
        return (2 if backward else 1) * 4 * tokens * sequence * width / self.attention[backward]

    def element_s(self, kind: str, *, backward: bool) -> float:
        return self.elements[f"{kind}/{'backward' if backward else 'forward'}"]

    def update_s(self, numel: int) -> float:
        return numel * self.update

    def sum_s(self, blocks: int, numel: int) -> float:
        return numel * (self.sums[0] + (blocks - 1) * self.sums[1])

    @property
    def dispatch_s(self) -> float:
        return self.dispatch

    @classmethod
    def of_ranks(cls, found: Sequence[Mapping[str, Any]]) -> Measured:
        """What the ranks of one job say together: the mean of their times."""

        def seconds(values: Sequence[float]) -> float:
            return math.fsum(values) / len(values)

        def rate(values: Sequence[float]) -> float:
            return 1 / seconds([1 / value for value in values])

        def each(name: str, key: Any) -> list[float]:
            return [rank[name][key] for rank in found]

        def all_of(name: str) -> list[float]:
            return [rank[name] for rank in found]

        first = found[0]
        return cls(
            products={side: rate(each("products", side)) for side in first["products"]},
            elements={kind: seconds(each("elements", kind)) for kind in first["elements"]},
            attention=[rate(each("attention", way)) for way in (0, 1)],
            update=seconds(all_of("update")),
            sums=[seconds(each("sums", term)) for term in (0, 1)],
            memory_rate=rate(all_of("memory_rate")),
            dispatch=seconds(all_of("dispatch")),
            exchange=None if first["exchange"] is None else rate(all_of("exchange")),
            wait=None if first["wait"] is None else seconds(all_of("wait")),
        )


def measure(topology: Any) -> dict[str, Any]:  # Any: a Topology; JSON
    """All pieces of work on this rank. Collective: the ranks begin every piece together."""
    import torch
    from torch.nn import functional as F

    from hpczero.kernels.tree_sum import tree_sum

    def seconds(call: Callable[[], object]) -> float:
        """Of one call, the first left out: the mean, as a step is a sum, and other programs take their share of it."""
        call()
        topology.barrier()
        times, begin = 0, time.perf_counter()
        while times < LEAST or time.perf_counter() < begin + TURN_S:
            call()
            times += 1
        return (time.perf_counter() - begin) / times

    def both(
        make: Callable[[], Any], inputs: Sequence[torch.Tensor], numel: int, name: str
    ) -> dict[str, float]:
        """Forward and backward of what ``make`` computes, for each of ``numel`` elements."""
        forward = seconds(make)
        out = make()
        gradient = torch.ones_like(out)
        # Not out.backward(), which would add to the gradients of the calls before.
        backward = seconds(lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True))
        return {f"{name}/forward": forward / numel, f"{name}/backward": backward / numel}

    def fresh(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, requires_grad=True)

    products = {}
    for side in SIDES:
        # A step touches more than a cache holds, so every product finds its operands in memory.
        many = max(POOL_NBYTES // (3 * 4 * side * side), 1)
        pool = itertools.cycle([torch.ones(3, side, side) for _ in range(many)])

        def product(pool: Iterator[torch.Tensor] = pool) -> None:
            a, b, out = next(pool)
            torch.matmul(a, b, out=out)

        products[str(side)] = 2 * side**3 / seconds(product)

    x, wide = fresh(ROWS, WIDTH), fresh(ROWS, 4 * WIDTH)
    plain, other = x.detach(), torch.randn(ROWS, WIDTH)
    scale, shift = fresh(WIDTH), fresh(WIDTH)
    numel = ROWS * WIDTH
    elements = both(
        lambda: F.layer_norm(x, (WIDTH,), scale, shift), [x, scale, shift], numel, "norm"
    )
    elements |= both(lambda: F.gelu(wide, approximate="tanh"), [wide], 4 * numel, "gelu")
    elements["add/forward"] = elements["fork/backward"] = seconds(lambda: plain + other) / numel
    elements["bias/backward"] = seconds(lambda: wide.detach().sum(0)) / (4 * numel)
    elements["copy/forward"] = elements["copy/backward"] = seconds(plain.clone) / numel
    elements["add/backward"] = elements["fork/forward"] = elements["bias/forward"] = 0.0

    logits, targets = fresh(ROWS, VOCAB), torch.zeros(ROWS, dtype=torch.int64)
    loss = both(
        lambda: F.cross_entropy(logits, targets, reduction="sum"), [logits], ROWS * VOCAB, "loss"
    )
    loss["loss/backward"] += loss["loss/forward"]  # the loss is computed once more
    elements |= loss

    q, k, v = (fresh(SAMPLES, HEADS, SEQUENCE, HEAD) for _ in range(3))
    attended = both(
        lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), [q, k, v], 1, "attention"
    )
    flops = 4 * SAMPLES * SEQUENCE * SEQUENCE * HEADS * HEAD
    attention = [
        flops / attended["attention/forward"],
        2 * flops / attended["attention/backward"],
    ]

    weight = torch.zeros(UPDATED, requires_grad=True)
    weight.grad = torch.ones(UPDATED)
    update = seconds(torch.optim.AdamW([weight], lr=1e-3, fused=True).step) / UPDATED

    blocks, out = [torch.ones(UPDATED) for _ in range(3)], torch.empty(UPDATED)
    sums = [
        seconds(partial(tree_sum, blocks[:terms], out, groups=[range(terms)], scale=0.5)) / UPDATED
        for terms in (1, 3)
    ]
    small, one = torch.ones(8, requires_grad=True), torch.ones(8)
    found: dict[str, Any] = {
        "products": products,
        "elements": dict(sorted(elements.items())),
        "attention": attention,
        "update": update,
        "sums": [sums[0], max((sums[1] - sums[0]) / 2, 0.0)],
        "memory_rate": 2 * 4 * UPDATED / seconds(lambda: out.copy_(blocks[0])),
        "dispatch": seconds(lambda: small * one),
        "exchange": None,
        "wait": None,
    }
    if topology.size > 1:
        found |= _between_ranks(topology, out)
    return found


def _between_ranks(topology: Any, whole: Any) -> dict[str, float]:
    """Messages between the ranks. Collective, so every rank does the same number of them."""
    from mpi4py import MPI

    nbytes = whole.numel() // topology.size * 4
    buffer = MPI.buffer.fromaddress(whole.data_ptr(), nbytes * topology.size)

    def mean(call: Callable[[], object], times: int) -> float:
        call()
        topology.barrier()
        start = time.perf_counter()
        for _ in range(times):
            call()
        return (time.perf_counter() - start) / times

    gathered = mean(
        lambda: topology.world.comm.Allgather(MPI.IN_PLACE, [buffer, nbytes, MPI.BYTE]), 5
    )
    return {
        "exchange": nbytes * (topology.size - 1) / gathered,
        "wait": mean(topology.barrier, 200),
    }


def main() -> int:
    """As ``python -m scaling.contenders.rank``, and answers ``probe`` too."""
    from scaling.contenders.rank import Rank
    from scaling.contenders.rank import main as answer

    class Prober(Rank):
        def probe(self) -> dict[str, Any]:
            return measure(self._contender.topology)  # type: ignore[attr-defined]  # of hpczero

    return answer(Prober)


def as_json(measured: Measured) -> dict[str, Any]:
    """For records."""
    return asdict(measured)


if __name__ == "__main__":
    run(main)
