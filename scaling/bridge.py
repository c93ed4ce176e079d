"""Collectives of torch.distributed over the bridge and over gloo: ``mpirun -n 2 python -m scaling.bridge``.

In each round each backend makes each call once, in an order drawn anew. Both get the same tensors, and must give the
same results.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from hpczero.errors import HpcZeroError, run
from scaling.evidence import harness
from scaling.evidence.plot import Bar, Panels, as_bars
from scaling.evidence.record import Row, head_of, run_row
from scaling.evidence.spread import Spread, by_round, paired, table_of, with_spread

if TYPE_CHECKING:
    from hpczero.job.topology import Topology

DTYPES = ("float32", "bfloat16")
VERBS = ("all_gather", "reduce_scatter", "all_reduce")
BACKENDS = ("bridge", "gloo")


@dataclass(frozen=True)
class Options(harness.Common):
    """What to measure.

    Attributes:
        mib: MiB of the whole tensor of a call: what is gathered, scattered or reduced.
        rounds: of each backend; from 6 on there is a 95 % interval of the median.
        warm_up: rounds before.
    """

    mib: tuple[int, ...] = (1, 64)
    rounds: int = 11
    warm_up: int = 2

    def __post_init__(self) -> None:
        harness.at_least(self, mib=1, rounds=1, warm_up=1)


def main() -> int:
    """Measure, write the rows, print the table, draw the plot. Collective over MPI's world."""
    return harness.on_ranks(
        Options, "bridge", lambda on, _: f"bridge-{harness.placement(on)}", measure, REPORT
    )


def measure(topology: Topology, options: Options) -> Iterator[Row]:
    """All rows, the same on every rank. Collective. Raises HpcZeroError: the backends give different results."""
    import torch
    import torch.distributed as dist

    import hpczero.bridge

    load = topology.world.gather(os.getloadavg()[0])[0]
    where = {"ranks": topology.size, "placement": harness.placement(topology)}
    yield run_row(options, "rounds", load=load, **where)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # of one node
    hpczero.bridge.init(topology.world.comm, timeout_s=0)
    groups = {"bridge": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    order = random.Random(options.seed)
    cases = [
        Case(verb, getattr(torch, name), mib, topology.size, topology.rank)
        for name in DTYPES
        for mib in options.mib
        for verb in VERBS
    ]
    calls = list(itertools.product(cases, BACKENDS))
    for number, turn in harness.in_turns(
        calls, options.rounds, order, warm_up=options.warm_up, program="bridge"
    ):
        for case, backend in turn:
            case.refill()
            took, spent = harness.timed(topology, partial(case.run, groups[backend]))
            cpu = sum(topology.gather(spent)) / topology.size
            case.compare(backend)
            if number >= 0:
                what = {**case.words(), "backend": backend, "round": number}
                yield {"kind": "call", **what, "seconds": took, "cpu_s": cpu}
    dist.destroy_process_group()


class Case:
    """One call, with its tensors."""

    def __init__(self, verb: str, dtype: Any, mib: int, size: int, rank: int) -> None:
        import torch

        self.verb, self.dtype, self.mib = verb, dtype, mib
        part = mib * 2**20 // dtype.itemsize // size
        self._given = torch.full((part * (1 if verb == "all_gather" else size),), 1.5 + rank)
        self._given = self._given.to(dtype)
        self._out = torch.empty(part if verb == "reduce_scatter" else part * size, dtype=dtype)
        self._first: Any = None

    def words(self) -> Row:
        """Names of the case."""
        name = str(self.dtype).removeprefix("torch.")
        return {"verb": self.verb, "dtype": name, "mib": self.mib}

    def refill(self) -> None:
        """What the call changes is as it was."""
        if self.verb == "all_reduce":
            self._out.copy_(self._given)
        else:
            self._out.zero_()

    def run(self, group: Any) -> float:
        """The call; CPU seconds of all threads of this rank. Collective over ``group``."""
        import torch.distributed as dist

        # The second names are those before torch 2.13.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        before = time.process_time()
        calls: dict[str, Callable[[], object]] = {
            "all_gather": lambda: gather(self._out, self._given, group=group),
            "reduce_scatter": lambda: scatter(self._out, self._given, group=group),
            "all_reduce": lambda: dist.all_reduce(self._out, group=group),
        }
        calls[self.verb]()
        return time.process_time() - before

    def compare(self, backend: str) -> None:
        """Raises HpcZeroError where the result is not that of the calls before."""
        import torch

        if self._first is None:
            self._first = self._out.clone()
        if not torch.equal(self._out, self._first):
            raise HpcZeroError(f"{self.words()}: {backend} gives another result, expected the same")


Called = tuple[str, str, int]  # verb, dtype, MiB


def _times(rows: list[Row], name: str) -> dict[tuple[Called, str], dict[int, float]]:
    """Figure ``name`` by call, backend and round."""
    called = itemgetter("verb", "dtype", "mib")
    return by_round(rows, "call", lambda row: (called(row), row["backend"]), itemgetter(name))


def text(rows: list[Row]) -> str:
    """Heading and table; markdown."""
    head, took, spent = head_of(rows), _times(rows, "seconds"), _times(rows, "cpu_s")

    def ms(backend: str) -> Callable[[Called], str]:
        return lambda call: with_spread(Spread.of(took[call, backend].values()), 2, scale=1e3)

    def cpu_ms(call: Called) -> str:
        middles = (Spread.of(spent[call, name].values()).median for name in BACKENDS)
        return " / ".join(f"{1e3 * middle:.1f}" for middle in middles)

    shown = table_of(
        dict.fromkeys(call for call, _ in took),
        {
            "call": lambda call: "{} {} {} MiB".format(*call),
            "bridge, ms": ms("bridge"),
            "gloo, ms": ms("gloo"),
            "gloo / bridge": lambda call: with_spread(
                paired(took[call, "gloo"], took[call, "bridge"]), 2
            ),
            "CPU ms of a rank": cpu_ms,
        },
    )
    return (
        f"torch.distributed over MPI and over gloo, {head['ranks']} ranks as {head['placement']}; {head['cores']} "
        f"cores of {head['cpu']}, load {head['load']:.1f} at the start. Median of {head['rounds']} calls of each, in "
        f"turn; equal results. Commit {head['commit']}, {head['date']}.\n\n{shown}"
    )


@as_bars
def draw(rows: list[Row]) -> tuple[str, Panels]:
    """Times of the largest calls as bars."""
    head, took = head_of(rows), _times(rows, "seconds")
    most = max(mib for (_, _, mib), _ in took)
    bars = {
        f"{call[0]} {call[1]}, ms": [
            Bar.of(name, took[call, name].values(), 1e3) for name in BACKENDS
        ]
        for call, _ in took
        if call[2] == most
    }
    return f"{most} MiB, {head['placement']}", bars


REPORT = harness.Report("torch.distributed over MPI, beside gloo", text, draw)

if __name__ == "__main__":
    run(main)
