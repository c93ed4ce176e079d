"""Training from a disk beside training from memory, beside the disk alone, and beside fio, in turns in one MPI job.

    mpirun -n 2 python -m scaling.tiers --folder /local/scratch

In each round every case runs once, all ranks at a time, in an order drawn anew; a step follows its pass. Ratios are
formed within a round.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Literal

from hpczero.errors import run
from scaling.contenders.workload import WORKLOADS, scratch
from scaling.evidence import harness
from scaling.evidence.plot import Bar, Panels, as_bars
from scaling.evidence.record import Row, head_of, run_row
from scaling.evidence.spread import Spread, by_round, paired, table, with_spread

if TYPE_CHECKING:
    from hpczero.job.topology import Topology
    from scaling.tiers.cases import Pair

CONTEXT = 64
MOST_SEQUENCES = 256
TIMES = tuple(
    name
    for kind in ("pass", "step")
    for name in (f"{kind} from disk", f"{kind} in memory", f"disk of a {kind}")
)


@dataclass(frozen=True)
class Options(harness.Common):
    """What to measure.

    Attributes:
        folder: on the disk; left out, runs/scratch.
        workload: model; the batch is found by trial, so that computing takes twice as long as its disk.
        rounds: measured turns of each case; from 6 on there is a 95 % interval of the median.
        ahead: units whose parameters are read before they are used.
        window: MiB of a block of staging.
        buffers: blocks of each rank.
        fio_mib: MiB that each job of fio reads and writes; 0 leaves fio out.
    """

    folder: str | None = None
    workload: Literal["gpt-8x512", "gpt-12x768", "tiny"] = "gpt-12x768"
    rounds: int = 7
    ahead: int = 2
    window: int = 32
    buffers: int = 6
    fio_mib: int = 512

    def __post_init__(self) -> None:
        harness.at_least(self, rounds=1, window=1, buffers=3, ahead=0)
        scratch(self.folder)


def main() -> int:
    """Measure, write the rows, print the table, draw the plot. Collective over MPI's world."""
    return harness.on_ranks(Options, "tiers", _name, measure, REPORT)


def _name(topology: Topology, options: Options) -> str:
    return f"tiers-{options.workload}-{topology.size}"


def calibrated(
    topology: Topology,
    pair: Pair,
    clock: Callable[[Topology, Callable[[], object]], float] = harness.seconds,
) -> int:
    """Sequences with which a pass computes for twice as long as its disk takes alone. Collective.

    Both models take every pass, also the timed one: losses are compared in turn, so both must see the same batches.
    ``clock`` says the seconds of a call, the same on every rank.
    """
    for _ in range(2):  # the first makes the state
        pair.warm_up()

    def computing() -> float:
        pair.take_pass("disk")
        pair.take_step("disk")
        took = clock(topology, partial(pair.take_pass, "memory"))
        pair.take_step("memory")
        return took

    one = computing()
    wanted = 2 * clock(topology, pair.disk_of_a_pass)
    pair.sequences = many = min(max(math.ceil(wanted / one), 2), MOST_SEQUENCES)
    # A pass has costs that do not grow with its batch, so the first estimate is too low.
    each = max((computing() - one) / (many - 1), one / many)
    return min(max(math.ceil(1 + (wanted - one) / each), 1), MOST_SEQUENCES)


def measure(topology: Topology, options: Options) -> Iterator[Row]:
    """All rows, the same on every rank. Collective."""
    from hpczero import Offload
    from scaling.tiers.cases import Engine, Fio, Pair

    folder = scratch(options.folder)
    window, kept = options.window * 2**20, (options.buffers, options.ahead)
    everything = Offload("disk", "disk", "disk", folder, window, *kept)
    pair = Pair(topology, WORKLOADS[options.workload], everything)
    pair.sequences, pair.context = 1, min(CONTEXT, WORKLOADS[options.workload].context)
    pair.sequences = calibrated(topology, pair)
    pair.warm_up()
    yield run_row(
        options,
        "rounds",
        ranks=topology.size,
        description=pair.describe(),
        tokens=pair.sequences * pair.context,
        tier=pair.tier.describe().replace(str(folder), "FOLDER"),  # a reader's is another one
        staging=f"{options.buffers} blocks of {options.window} MiB, {options.ahead} units ahead",
    )
    engine = Engine(topology, folder)
    devices: dict[str, Engine | Fio] = {"engine": engine}
    if options.fio_mib:
        devices["fio"] = Fio(topology, folder, options.fio_mib * 2**20)
    groups: list[dict[str, Callable[[], object]]] = [
        {
            f"{kind} {where}": partial(take, twin)
            for kind, take in (("pass", pair.take_pass), ("step", pair.take_step))
        }
        for twin, where in (("disk", "from disk"), ("memory", "in memory"))
    ]
    groups += [{"disk of a pass": pair.disk_of_a_pass}, {"disk of a step": pair.disk_of_a_step}]
    for name, device in devices.items():
        groups += [{f"{name} reads": device.read}, {f"{name} writes": device.write}]
    order = random.Random(options.seed)
    for number, turn in harness.in_turns(groups, options.rounds, order, program="tiers"):
        for name, call in (case for group in turn for case in group.items()):
            if name == "disk of a step":
                pair.lay_gradients()
            before = pair.tier.traffic.total
            took = harness.seconds(topology, call)
            moved = pair.tier.traffic.total - before
            measured = devices.get(name.split()[0])
            yield {
                "kind": "case",
                "case": name,
                "round": number,
                "seconds": took,
                "waited_s": max(topology.gather(moved.waited_s)),
                "nbytes": moved.read_nbytes + moved.written_nbytes,
                **({"rate": measured.rate} if measured else {}),
            }
    engine.close()
    pair.close()


Times = dict[str, dict[int, float]]  # by case, then by round


def _figures(rows: list[Row]) -> tuple[Times, Times, Times]:
    """(seconds, seconds of waits for the disk, bytes/s of the cases that have such a rate)."""
    rated = [row for row in rows if "rate" in row]
    took, waited = (
        by_round(rows, "case", itemgetter("case"), itemgetter(name))
        for name in ("seconds", "waited_s")
    )
    return took, waited, by_round(rated, "case", itemgetter("case"), itemgetter("rate"))


def text(rows: list[Row]) -> str:
    """Heading and tables; markdown."""
    head, (took, waited, rates) = head_of(rows), _figures(rows)

    def of(values: dict[int, float], digits: int = 2, scale: float = 1.0) -> str:
        return with_spread(Spread.of(values.values()), digits, scale)

    cells = [
        [name, of(took[name]), of(waited[name]) if "from" in name else "–"]
        for name in TIMES
        if name in took
    ]
    cells += [[name, f"{of(found, 0, 1e-6)} MB/s", "–"] for name, found in sorted(rates.items())]
    title = (
        f"{head['description']}, stage 3, everything on a tier: {head['tier']}; {head['staging']}; {head['ranks']} "
        f"rank(s) of one thread on {head['cores']} cores of {head['cpu']}; fp32, fused AdamW; losses equal bit for "
        f"bit. Median of {head['rounds']} rounds [95 % interval, or least and most]. Commit {head['commit']}, "
        f"{head['date']}."
    )
    ratios_ = [[name, with_spread(spread, 2)] for name, spread in ratios(rows).items()]
    return "\n".join(
        [
            title,
            "",
            table(["case", "seconds", "of them waits for the disk"], cells),
            "",
            table(["ratio within a round", "median [interval]"], ratios_),
        ]
    )


def ratios(rows: list[Row]) -> dict[str, Spread]:
    """What the tier is judged by."""
    took, waited, rates = _figures(rows)
    found: dict[str, Spread | None] = {}
    for kind in ("step", "pass"):
        alone, memory = took[f"disk of a {kind}"], took[f"{kind} in memory"]
        bound = {number: max(alone[number], memory[number]) for number in alone}
        name = f"{kind} from disk / the longer of disk alone and memory"
        found[name] = paired(took[f"{kind} from disk"], bound)
    waits = paired(waited["pass from disk"], took["disk of a pass"])
    found["waits of a pass / its disk alone"] = waits
    for way in ("reads", "writes"):
        if f"fio {way}" in rates:
            name = f"engine {way} / fio {way}"
            found[name] = paired(rates[f"engine {way}"], rates[f"fio {way}"])
    return {name: spread for name, spread in found.items() if spread is not None}


@as_bars
def draw(rows: list[Row]) -> tuple[str, Panels]:
    """Seconds as bars."""
    head, (took, _, _) = head_of(rows), _figures(rows)
    bars = [Bar.of(name, took[name].values()) for name in TIMES]
    return head["description"], {"seconds, all ranks at a time": bars}


REPORT = harness.Report("Offload to host memory and disk", text, draw)

if __name__ == "__main__":
    run(main)
