"""Training from a disk beside training from memory, beside the disk alone, and beside fio, in turns in one MPI job.

    mpirun -n 2 python -m scaling.tiers --folder /local/scratch

Owns: the order of a run. Must not know: how a tier works, the arithmetic of the report. In each round every case runs
once, all ranks at a time, in an order drawn anew; a step follows its pass.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hpczero.errors import ConfigError, run
from hpczero.options.reading import parse_command_line
from scaling.contenders.scratch import scratch
from scaling.contenders.workload import WORKLOADS
from scaling.evidence.record import Row, circumstances

if TYPE_CHECKING:
    from hpczero.job.topology import Topology
    from scaling.tiers.cases import Pair

CONTEXT = 64
MOST_SEQUENCES = 256


@dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
        folder: on the disk; left out, runs/scratch.
        workload: model; the batch is found by trial, so that computing takes twice as long as its disk.
        rounds: measured turns of each case; from 6 on there is a 95 % interval of the median.
        ahead: units whose parameters are read before they are used.
        window: MiB of a block of staging.
        buffers: blocks of each rank.
        fio_mib: MiB that each job of fio reads and writes; 0 leaves fio out.
        seed: of the order in the rounds.
        results: folder of all machines' results; left out, scaling/results.
    """

    folder: str | None = None
    workload: Literal["gpt-8x512", "gpt-12x768", "tiny"] = "gpt-12x768"
    rounds: int = 7
    ahead: int = 2
    window: int = 32
    buffers: int = 6
    fio_mib: int = 512
    seed: int = 0
    results: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("rounds", 1), ("window", 1), ("buffers", 3), ("ahead", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"--{name}: got {getattr(self, name)}, expected at least {least}")
        if self.folder is not None and not Path(self.folder).is_dir():
            raise ConfigError(f"--folder: got {self.folder!r}, expected a folder on a disk")


def main() -> int:
    """Measure; rank 0 writes the rows, prints the table, draws the plot. Collective over MPI's world."""
    options = parse_command_line(
        Options,
        sys.argv[1:],
        prog="python -m scaling.tiers",
        description="Training from a disk beside the disk alone and fio, in one run; start it under mpirun or srun.",
        default=Options(),
    )
    # Here and not at the top: this import starts MPI, which --help and bad options must not do.
    from hpczero.job.launch import start_topology
    from scaling.evidence.clock import record
    from scaling.tiers.report import draw, text

    topology = start_topology(None)
    rows = measure(topology, options)
    name = f"tiers-{options.workload}-{topology.size}"
    record(topology, rows, name, results=options.results, text=text, draw=draw)
    topology.free()
    return 0


def calibrated(
    topology: Topology,
    pair: Pair,
    clock: Callable[[Topology, Callable[[], object]], float] | None = None,
) -> int:
    """Sequences with which a pass computes for twice as long as its disk takes alone. Collective.

    Both models take every pass, also the timed one: losses are compared in turn, so both must see the same batches.

    Args:
        topology: the ranks.
        pair: the models.
        clock: seconds of a call, the same on every rank; None: those of the slowest rank.
    """
    if clock is None:
        from scaling.evidence.clock import seconds

        clock = seconds
    for _ in range(2):  # the first makes the state
        pair.warm_up()

    def computing() -> float:
        pair.disk_pass()
        pair.disk_step()
        took = clock(topology, pair.resident_pass)
        pair.resident_step()
        return took

    one = computing()
    wanted = 2 * clock(topology, pair.disk_of_a_pass)
    pair.sequences = many = min(max(math.ceil(wanted / one), 2), MOST_SEQUENCES)
    # A pass has costs that do not grow with its batch, so the first estimate is too low.
    each = max((computing() - one) / (many - 1), one / many)
    return min(max(math.ceil(1 + (wanted - one) / each), 1), MOST_SEQUENCES)


def measure(topology: Topology, options: Options) -> Iterator[Row]:
    """All rows, the same on every rank. Collective."""
    import torch

    from hpczero import Offload
    from scaling.evidence.clock import seconds
    from scaling.tiers.cases import Pair
    from scaling.tiers.disks import Engine, Fio

    torch.set_num_threads(1)
    folder = scratch() if options.folder is None else Path(options.folder)
    everything = Offload(
        "disk",
        "disk",
        "disk",
        folder,
        options.window * 2**20,
        options.buffers,
        options.ahead,
    )
    pair = Pair(topology, WORKLOADS[options.workload], everything)
    pair.sequences, pair.context = 1, min(CONTEXT, WORKLOADS[options.workload].context)
    pair.sequences = calibrated(topology, pair)
    pair.warm_up()
    yield {
        "kind": "run",
        **circumstances(),
        "ranks": topology.size,
        "rounds": options.rounds,
        "description": pair.describe(),
        "tokens": pair.sequences * pair.context,
        "tier": pair.tier.describe().replace(str(folder), "FOLDER"),  # a reader's is another one
        "staging": f"{options.buffers} blocks of {options.window} MiB, {options.ahead} units ahead",
    }
    engine, fio = Engine(topology, folder), None
    if options.fio_mib:
        fio = Fio(topology, folder, options.fio_mib * 2**20)
    groups = [
        (("pass from disk", pair.disk_pass), ("step from disk", pair.disk_step)),
        (("pass in memory", pair.resident_pass), ("step in memory", pair.resident_step)),
        (("disk of a pass", pair.disk_of_a_pass),),
        (("disk of a step", pair.disk_of_a_step),),
        (("engine reads", engine.read),),
        (("engine writes", engine.write),),
        *(((("fio reads", fio.read),), (("fio writes", fio.write),)) if fio is not None else ()),
    ]
    order = random.Random(options.seed)
    for number in range(options.rounds):
        for group in order.sample(groups, len(groups)):
            for name, call in group:
                if name == "disk of a step":
                    pair.lay_gradients()
                before = pair.tier.traffic.total
                took = seconds(topology, call)
                moved = pair.tier.traffic.total - before
                rates = (
                    {"rate": call.__self__.rate} if isinstance(call.__self__, Engine | Fio) else {}
                )
                yield {
                    "kind": "case",
                    "case": name,
                    "round": number,
                    "seconds": took,
                    "waited_s": max(topology.gather(moved.waited_s)),
                    "nbytes": moved.read_nbytes + moved.written_nbytes,
                    **rates,
                }
        if topology.is_root:
            sys.stderr.write(f"tiers: round {number + 1} of {options.rounds} done\n")
    engine.close()
    pair.close()


if __name__ == "__main__":
    run(main)
