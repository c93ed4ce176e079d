"""Collectives of torch.distributed over the bridge and over gloo, side by side in one MPI job.

    mpirun -n 2 python -m scaling.bridge

Owns: the order of a run. Must not know: how anything moves, the arithmetic of the report. In each round each backend
makes each call once, in an order drawn anew. Both get the same tensors, and must give the same results.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from hpczero.errors import ConfigError, HpcZeroError, run
from hpczero.options.reading import parse_command_line
from scaling.evidence.record import Row, circumstances

if TYPE_CHECKING:
    from hpczero.job.topology import Topology

DTYPES = ("float32", "bfloat16")
VERBS = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
        mib: MiB of the whole tensor of a call: what is gathered, scattered or reduced.
        rounds: of each backend; from 6 on there is a 95 % interval of the median.
        warm_up: rounds before.
        seed: of the order in the rounds.
        results: folder of all machines' results; left out, scaling/results.
    """

    mib: tuple[int, ...] = (1, 64)
    rounds: int = 11
    warm_up: int = 2
    seed: int = 0
    results: str | None = None

    def __post_init__(self) -> None:
        for name in ("rounds", "warm_up"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name}: got {getattr(self, name)}, expected at least 1")
        if not self.mib or min(self.mib) < 1:
            raise ConfigError(f"--mib: got {self.mib}, expected numbers of at least 1")


def main() -> int:
    """Measure; rank 0 writes the rows, prints the table, draws the plot. Collective over MPI's world."""
    options = parse_command_line(
        Options,
        sys.argv[1:],
        prog="python -m scaling.bridge",
        description="torch.distributed over MPI and over gloo, in one run on one node; start it under mpirun.",
        default=Options(),
    )
    # Here and not at the top: this import starts MPI, which --help and bad options must not do.
    from hpczero.job.launch import start_topology
    from scaling.bridge.report import draw, text
    from scaling.evidence.clock import placement, record

    topology = start_topology(None)
    rows = measure(topology, options)
    record(
        topology,
        rows,
        f"bridge-{placement(topology)}",
        results=options.results,
        text=text,
        draw=draw,
    )
    topology.free()
    return 0


def measure(topology: Topology, options: Options) -> Iterator[Row]:
    """All rows, the same on every rank. Collective.

    Raises:
        HpcZeroError: the backends give different results.
    """
    import torch
    import torch.distributed as dist

    import hpczero.bridge
    from scaling.evidence.clock import placement, seconds

    torch.set_num_threads(1)
    yield {
        "kind": "run",
        **circumstances(),
        "ranks": topology.size,
        "placement": placement(topology),
        "rounds": options.rounds,
        "load": topology.world.gather(os.getloadavg()[0])[0],
    }
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
    for number in range(-options.warm_up, options.rounds):
        for case in cases:
            for backend in order.sample(sorted(groups), len(groups)):
                case.refill()
                spent = [0.0]
                took = seconds(topology, partial(case.run, groups[backend], spent))
                cpu = sum(topology.gather(spent[0])) / topology.size
                case.compare(backend)
                if number >= 0:
                    yield {
                        "kind": "call",
                        **case.words(),
                        "backend": backend,
                        "round": number,
                        "seconds": took,
                        "cpu_s": cpu,
                    }
        if topology.is_root and number >= 0:
            sys.stderr.write(f"bridge: round {number + 1} of {options.rounds} done\n")
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

    def run(self, group: Any, spent: list[float]) -> None:
        """The call; ``spent[0]`` is then CPU seconds of all threads of this rank. Collective over ``group``."""
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
        spent[0] = time.process_time() - before

    def compare(self, backend: str) -> None:
        """The result is that of the calls before.

        Raises:
            HpcZeroError: it is not.
        """
        import torch

        if self._first is None:
            self._first = self._out.clone()
        if not torch.equal(self._out, self._first):
            raise HpcZeroError(f"{self.words()}: {backend} gives another result, expected the same")


if __name__ == "__main__":
    run(main)
