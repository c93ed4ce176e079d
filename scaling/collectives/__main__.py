"""All-gather and reduce-scatter by every algorithm there is, side by side in one run, beside the MPI library's own.

    mpirun -n 8 python -m scaling.collectives --nic_gbit 100

Owns: the order of a run. Must not know: how anything moves, the arithmetic of the report. The placement of ranks is
the launcher's; one run measures one placement. In each round every mover works once, in an order drawn anew.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import tyro

from hpczero.errors import ConfigError, run
from hpczero.options.reading import parse_command_line
from scaling.evidence.record import Row, circumstances

if TYPE_CHECKING:
    from hpczero.job.topology import Topology


@dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
        sizes: bytes of one rank's shard; the whole buffer is as many times larger as there are ranks.
        rounds: of each mover at each size; from 6 on there is a 95 % interval of the median.
        nic_gbit: 10^9 bit/s that one node sends and receives between nodes, for the bound; left out, no bound.
        emulated: the nodes are emulated on one machine: say so in every table.
        seed: of the order in the rounds.
        results: folder of all machines' results; left out, scaling/results.
    """

    sizes: tuple[int, ...] = (2**16, 2**20, 2**23)
    rounds: int = 7
    nic_gbit: float | None = None
    emulated: tyro.conf.UseCounterAction[int] = 0  # a bare --emulated
    seed: int = 0
    results: str | None = None

    def __post_init__(self) -> None:
        if not self.sizes or any(size < 4 or size % 4 for size in self.sizes):
            raise ConfigError(f"--sizes: got {self.sizes}, expected bytes of fp32 shards")
        if self.rounds < 1:
            raise ConfigError(f"--rounds: got {self.rounds}, expected at least 1")
        if self.nic_gbit is not None and not 0 < self.nic_gbit < math.inf:
            raise ConfigError(f"--nic_gbit: got {self.nic_gbit}, expected a rate above 0")


def main() -> int:
    """Measure; rank 0 writes the rows, prints the table, draws the plot. Collective over MPI's world."""
    options = parse_command_line(
        Options,
        sys.argv[1:],
        prog="python -m scaling.collectives",
        description="All-gather and reduce-scatter by every algorithm, in one run; start it under mpirun or srun.",
        default=Options(),
    )
    # Here and not at the top: this import starts MPI, which --help and bad options must not do.
    from hpczero.job.launch import start_topology
    from scaling.collectives.report import draw, text
    from scaling.evidence.clock import placement, record

    topology = start_topology(None)
    if topology.size < 2:
        raise ConfigError(
            "one rank has nobody to exchange with; type: mpirun -n 2 python -m scaling.collectives"
        )
    where = placement(topology)
    label = f"{where}-emulated-{options.nic_gbit or 0:g}gbit" if options.emulated else where
    rows = measure(topology, options)
    name = f"collectives-{label}"
    record(topology, rows, name, results=options.results, text=text, draw=draw)
    topology.free()
    return 0


def measure(topology: Topology, options: Options) -> Iterator[Row]:
    """All rows, the same on every rank. Collective."""
    import torch
    from mpi4py import MPI

    from scaling.collectives.candidates import candidates, tuned
    from scaling.evidence.clock import placement, seconds

    torch.set_num_threads(1)
    selection = tuned(topology)
    yield {
        "kind": "run",
        **circumstances(),
        "mpi": MPI.Get_library_version().split(",")[0].strip("\0 \n"),
        "ranks": topology.size,
        "nodes": topology.num_nodes,
        "placement": placement(topology),
        "emulated": bool(options.emulated),
        "nic_gbit": options.nic_gbit,
        "rounds": options.rounds,
        "seed": options.seed,
        "selection": {"description": selection.describe(), **selection.as_json()},
    }
    order = random.Random(options.seed)
    for size in options.sizes:
        with candidates(topology, size, selection) as found:
            for mover in found:
                mover.call()  # connections, pages
            for number in range(options.rounds):
                for mover in order.sample(found, len(found)):
                    took = seconds(topology, mover.call)
                    yield {
                        "kind": "call",
                        "operation": mover.operation,
                        "mover": mover.name,
                        "shard_nbytes": size,
                        "round": number,
                        "seconds": took,
                    }
        if topology.is_root:
            sys.stderr.write(f"collectives: shards of {size:,} bytes done\n")


if __name__ == "__main__":
    run(main)
