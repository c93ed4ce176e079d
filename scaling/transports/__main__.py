"""One training step of the same model over each transport, side by side in one MPI job.

    mpirun -n 8 python -m scaling.transports --workload gpt-8x512

Owns: the order of a run. Must not know: how a transport works, the arithmetic of the report. All models stay resident;
in each round each takes one step, in an order drawn anew.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import tyro

from hpczero.errors import ConfigError, HpcZeroError, run
from hpczero.options.reading import parse_command_line
from scaling.contenders.workload import WORKLOADS
from scaling.evidence.record import Row, circumstances

if TYPE_CHECKING:
    from hpczero.job.topology import Topology


@dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
        workload: model and batch.
        stage: ZeRO stage.
        transports: as in "flat window"; window-inline moves nothing while the model computes.
        rounds: measured steps over each transport; from 6 on there is a 95 % interval of the median.
        warm_up: steps before the first round.
        emulated: the nodes are emulated on one machine: say so in every table.
        link: what joins the nodes, for the table, such as "1 Gbit/s".
        seed: of the order in the rounds.
        results: folder of all machines' results; left out, scaling/results.
    """

    workload: Literal["gpt-8x512", "gpt-8x512-short", "gpt-12x768", "tiny"] = "gpt-8x512"
    stage: Literal[0, 1, 2, 3] = 3
    transports: tuple[Literal["flat", "hierarchical", "window-inline", "window"], ...] = (
        "flat",
        "hierarchical",
        "window-inline",
        "window",
    )
    rounds: int = 7
    warm_up: int = 2
    emulated: tyro.conf.UseCounterAction[int] = 0  # a bare --emulated
    link: str = ""
    seed: int = 0
    results: str | None = None

    def __post_init__(self) -> None:
        for name in ("rounds", "warm_up"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name}: got {getattr(self, name)}, expected at least 1")
        if not self.transports or len(set(self.transports)) < len(self.transports):
            raise ConfigError(f"--transports: got {self.transports}, expected each at most once")


def main() -> int:
    """Measure; rank 0 writes the rows, prints the table, draws the plot. Collective over MPI's world."""
    options = parse_command_line(
        Options,
        sys.argv[1:],
        prog="python -m scaling.transports",
        description="Step time of one model over each transport, in one run; start it under mpirun or srun.",
        default=Options(),
    )
    # Here and not at the top: this import starts MPI, which --help and bad options must not do.
    from hpczero.job.launch import start_topology
    from scaling.evidence.clock import placement, record
    from scaling.transports.report import draw, text

    topology = start_topology(None)
    label = f"{options.workload}-{placement(topology)}{'-emulated' if options.emulated else ''}"
    rows = measure(topology, options)
    name = f"transports-{label}"
    record(topology, rows, name, results=options.results, text=text, draw=draw)
    topology.free()
    return 0


def measure(topology: Topology, options: Options) -> Iterator[Row]:
    """All rows, the same on every rank. Collective.

    Raises:
        HpcZeroError: the transports do not train the same, bit for bit.
    """
    import torch

    import hpczero
    from scaling.contenders.base import batch
    from scaling.contenders.hpczero_stage import Contender
    from scaling.evidence.clock import placement, seconds

    torch.set_num_threads(1)
    workload = WORKLOADS[options.workload]
    yield {
        "kind": "run",
        **circumstances(),
        "ranks": topology.size,
        "placement": placement(topology),
        "emulated": bool(options.emulated),
        "link": options.link,
        "stage": options.stage,
        "rounds": options.rounds,
        "workload": workload.name,
        "description": workload.describe(),
    }
    contenders: dict[str, Contender] = {}
    for name in options.transports:
        transport, _, inline = name.partition("-")
        contender = Contender(options.stage, transport, overlap=not inline)
        contender.join(topology)
        contender.build(workload)
        contenders[name] = contender
        said = hpczero.sharding(contender.model).collectives.describe()
        yield {"kind": "transport", "transport": name, "description": said}
    order = random.Random(options.seed)
    for number in range(-options.warm_up, options.rounds):
        samples = batch(workload, step=number + options.warm_up, rank=topology.rank)
        losses: dict[str, float] = {}

        def step(name: str, samples: Any = samples, losses: dict[str, float] = losses) -> None:
            losses[name] = contenders[name].step(*samples)

        for name in order.sample(options.transports, len(options.transports)):
            took = seconds(topology, partial(step, name))
            if number >= 0:
                yield {"kind": "step", "transport": name, "round": number, "seconds": took}
        found = {name: topology.gather(loss) for name, loss in sorted(losses.items())}
        if any(values != found[options.transports[0]] for values in found.values()):
            raise HpcZeroError(
                f"losses of round {number} differ between transports, expected the same bits: {found}"
            )
        if topology.is_root and number >= 0:
            sys.stderr.write(f"transports: round {number + 1} of {options.rounds} done\n")
    for contender in contenders.values():
        hpczero.release(contender.model)


if __name__ == "__main__":
    run(main)
