"""This host as a machine of `hpczero.predict.model`, from what it measured of itself.

Owns: which measurement stands for which number of a machine. Must not know: how anything was measured, torch, MPI.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpczero.predict.machine import Machine


@dataclass(frozen=True)
class Measured:
    """Seconds; ``Kernels`` of one rank.

    Attributes:
        products: FLOP/s of square products, by side.
        fresh: bytes per second of host memory that the kernel hands out anew; None: not measured.
        few: FLOP/s of products of so many tokens with square weights; empty where it was not measured.
        inner: FLOP/s of gradients of such weights, whose inner side is the tokens.
        elements: of one element, by kind and pass, as in ``norm/forward``.
        attention: FLOP/s of both products, whole square counted: forward, backward.
        update: of one element.
        sums: of one element of the sum of one block, and of each further block.
        memory_rate: bytes per second of a copy.
        dispatch: of one small operation.
        exchange: bytes per second from rank to rank, by messages; None for one rank.
        wait: of a barrier of the ranks of a node, after equal work of all; None for one rank.
        wait_between: the same of ranks on different nodes; None for one node.
        between: bytes per second from a rank to one on another node, while all ranks send; None for one node.
        disk_read, disk_write: bytes per second of one rank's disk tier, while all ranks do the same; None: no folder.
        host_read, host_write: the same of a tier in memory of the host; None where that is the device.
        host_update: of one element on the host beside a device; None where that is the device.
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
    between: float | None = None
    wait_between: float | None = None
    disk_read: float | None = None
    disk_write: float | None = None
    host_read: float | None = None
    host_write: float | None = None
    host_update: float | None = None
    fresh: float | None = None
    few: Mapping[str, float] = field(default_factory=dict)
    inner: Mapping[str, float] = field(default_factory=dict)

    def matmul_s(self, m: int, k: int, n: int) -> float:
        """By the rate of a square product of the same FLOPs, or of one as thin where that is slower."""
        flops, least = 2 * m * k * n, min(m, k, n)
        rates = [_at(self.products, (m * k * n) ** (1 / 3))]
        thin = self.inner if least == k else self.few
        if thin and least <= max(map(int, thin)):
            rates.append(_at(thin, least))
        return flops / min(rates)

    def attention_s(self, tokens: int, sequence: int, width: int, *, backward: bool) -> float:
        """By the rate of both products."""
        return (2 if backward else 1) * 4 * tokens * sequence * width / self.attention[backward]

    def element_s(self, kind: str, *, backward: bool) -> float:
        """As measured."""
        return self.elements[f"{kind}/{'backward' if backward else 'forward'}"]

    def update_s(self, numel: int) -> float:
        """As measured, for each element."""
        return numel * self.update

    def sum_s(self, blocks: int, numel: int) -> float:
        """One block, and each further one."""
        return numel * (self.sums[0] + (blocks - 1) * self.sums[1])

    @property
    def dispatch_s(self) -> float:
        """As measured."""
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

        def if_any(name: str, mean: Callable[[Sequence[float]], float]) -> float | None:
            values = [rank[name] for rank in found if rank.get(name)]
            return mean(values) if values else None

        def table(name: str) -> dict[str, float]:
            return {key: rate(each(name, key)) for key in found[0].get(name, {})}

        first = found[0]
        return cls(
            products=table("products"),
            fresh=if_any("fresh", rate),
            few=table("few"),
            inner=table("inner"),
            elements={kind: seconds(each("elements", kind)) for kind in first["elements"]},
            attention=[rate(each("attention", way)) for way in (0, 1)],
            update=seconds(all_of("update")),
            sums=[seconds(each("sums", term)) for term in (0, 1)],
            memory_rate=rate(all_of("memory_rate")),
            dispatch=seconds(all_of("dispatch")),
            exchange=if_any("exchange", rate),
            wait=if_any("wait", seconds),
            between=if_any("between", rate),
            wait_between=if_any("wait_between", seconds),
            disk_read=if_any("disk_read", min),  # a step waits for the slowest
            disk_write=if_any("disk_write", min),
            host_read=if_any("host_read", min),
            host_write=if_any("host_write", min),
            host_update=if_any("host_update", max),
        )


def _at(rates: Mapping[str, float], size: float) -> float:
    """The rate at ``size``, interpolated between those measured."""
    place = math.log(size)
    known = sorted((math.log(int(s)), math.log(rate)) for s, rate in rates.items())
    low, high = known[0], known[-1]
    for left, right in itertools.pairwise(known):
        if left[0] <= place <= right[0]:
            low, high = left, right
    if place <= low[0] or low[0] == high[0]:
        return math.exp(low[1])
    share = min((place - low[0]) / (high[0] - low[0]), 1.0)
    return math.exp(low[1] + share * (high[1] - low[1]))


RESERVED_NBYTES = 0.3e9  # Python, torch and MPI: 265 MiB (docs/performance.md)


def machine_of(
    measured: Measured, *, ranks_per_node: int, memory_nbytes: float, title: str
) -> Machine:
    """The measured host as a machine of so many ranks on each node.

    Args:
        measured: by as many ranks at once as will train.
        ranks_per_node: ranks of a node.
        memory_nbytes: bytes of one rank.
        title: for reports.
    """
    between = measured.between or measured.exchange or measured.memory_rate
    return Machine(
        name="host",
        title=title,
        ranks_per_node=ranks_per_node,
        memory=memory_nbytes,
        reserved=RESERVED_NBYTES,
        peak=dict.fromkeys(("fp32", "bf16", "fp16"), max(measured.products.values())),
        matmul_efficiency=1.0,
        memory_rate=measured.memory_rate,
        dispatch=measured.dispatch,
        node_rate=measured.exchange or measured.memory_rate,
        node_latency=measured.wait or 0.0,
        nics=ranks_per_node,  # the rate between nodes is that of one rank while all send
        nic_rate=between,
        nic_latency=measured.wait_between or measured.wait or 0.0,
        disk_read=measured.disk_read or 0.0,
        disk_write=measured.disk_write or 0.0,
        host_read=measured.host_read or 0.0,
        host_write=measured.host_write or 0.0,
        host_update=1 / measured.host_update if measured.host_update else 0.0,
        fresh_rate=measured.fresh or 0.0,
        shares_memory=True,
        sources={"all": "measured by hpczero.probe"},
    )
