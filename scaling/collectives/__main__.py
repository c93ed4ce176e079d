"""All-gather and reduce-scatter by every algorithm there is, side by side in one run, beside the MPI library's own.

    mpirun -n 8 python -m scaling.collectives --nic_gbit 100

The placement of ranks is the launcher's; one run measures one placement. In each round every mover works once, in an
order drawn anew. Ratios are formed within a round and only then summarised.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from hpczero.errors import ConfigError, run
from scaling.evidence import harness
from scaling.evidence.plot import Line, lines_figure
from scaling.evidence.record import Row, emulated, head_of, mpi_library, run_row, where_and_when
from scaling.evidence.spread import Spread, by_round, paired, table, with_spread

if TYPE_CHECKING:
    from hpczero.job.topology import Topology

LIBRARY = "MPI library"
AUTO = "window, auto"
TITLES = {"all_gather": "All-gather", "reduce_scatter": "Reduce-scatter"}


@dataclass(frozen=True)
class Options(harness.OnNodes):
    """What to measure.

    Attributes:
        sizes: bytes of one rank's shard; the whole buffer is as many times larger as there are ranks.
        rounds: of each mover at each size; from 6 on there is a 95 % interval of the median.
        nic_gbit: 10^9 bit/s that one node sends and receives between nodes, for the bound; left out, no bound.
    """

    sizes: tuple[int, ...] = (2**16, 2**20, 2**23)
    rounds: int = 7
    nic_gbit: float | None = None

    def __post_init__(self) -> None:
        if not self.sizes or any(size < 4 or size % 4 for size in self.sizes):
            raise ConfigError(f"--sizes: got {self.sizes}, expected bytes of fp32 shards")
        harness.at_least(self, rounds=1)
        if self.nic_gbit is not None and not 0 < self.nic_gbit < math.inf:
            raise ConfigError(f"--nic_gbit: got {self.nic_gbit}, expected a rate above 0")


def main() -> int:
    """Measure, write the rows, print the table, draw the plot. Collective over MPI's world."""
    return harness.on_ranks(Options, "collectives", _name, measure, REPORT)


def _name(topology: Topology, options: Options) -> str:
    rate = f"-{options.nic_gbit or 0:g}gbit" if options.emulated else ""
    return f"collectives-{harness.placement(topology)}{options.suffix}{rate}"


def measure(topology: Topology, options: Options) -> Iterator[Row]:
    """All rows, the same on every rank. Collective."""
    from scaling.collectives.candidates import candidates, tuned

    if topology.size < 2:
        raise ConfigError(
            "one rank has nobody to exchange with; type: mpirun -n 2 python -m scaling.collectives"
        )
    selection = tuned(topology)
    yield run_row(
        options,
        "nic_gbit rounds seed",
        mpi=mpi_library(),
        nodes=topology.num_nodes,
        **harness.nodes_of(topology, options),
        selection={"description": selection.describe(), **selection.as_json()},
    )
    order = random.Random(options.seed)
    for size in options.sizes:
        with candidates(topology, size, selection) as found:
            for mover in found:
                mover.call()  # connections, pages
            for number, turn in harness.in_turns(found, options.rounds, order):
                for mover in turn:
                    yield {
                        "kind": "call",
                        "operation": mover.operation,
                        "mover": mover.name,
                        "shard_nbytes": size,
                        "round": number,
                        "seconds": harness.seconds(topology, mover.call),
                    }
        harness.say("collectives", f"shards of {size:,} bytes done")


@dataclass(frozen=True)
class Group:
    """One operation at one size.

    Attributes:
        operation: of TITLES.
        shard_nbytes: of one rank.
        times: seconds by mover and round.
        bound_s: no algorithm is faster; None where the rate of the NICs is not known, or there is one node.
    """

    operation: str
    shard_nbytes: int
    times: dict[str, dict[int, float]]
    bound_s: float | None

    @property
    def name(self) -> str:
        """Such as ``All-gather of 1 MiB``."""
        return f"{TITLES[self.operation]} of {_size(self.shard_nbytes)}"

    def ratio(self, numerator: str, denominator: str) -> Spread | None:
        """Of times within a round."""
        return paired(self.times[numerator], self.times[denominator])

    def median(self, mover: str) -> float:
        """Seconds."""
        return Spread.of(self.times[mover].values()).median

    def best(self, beginning: str) -> str | None:
        """The fastest of those whose names begin so, but the automatic choice."""
        names = [name for name in self.times if name.startswith(beginning) and name != AUTO]
        return min(names, key=self.median, default=None)


def groups(rows: list[Row]) -> list[Group]:
    """In the order of operations and sizes."""
    head, key = head_of(rows), itemgetter("operation", "shard_nbytes", "mover")
    found: dict[tuple[str, int], dict[str, dict[int, float]]] = {}
    for (operation, size, mover), times in by_round(
        rows, "call", key, itemgetter("seconds")
    ).items():
        found.setdefault((operation, size), {})[mover] = times
    return [Group(of, size, found[of, size], _bound_s(head, size)) for of, size in sorted(found)]


def _bound_s(head: Row, shard_nbytes: int) -> float | None:
    """(G-1) L S / B: what must come into each node, over its connection (docs/performance.md)."""
    if head["nic_gbit"] is None or head["nodes"] < 2:
        return None
    local = head["ranks"] / head["nodes"]
    return float((head["nodes"] - 1) * local * shard_nbytes * 8 / (head["nic_gbit"] * 1e9))


def text(rows: list[Row]) -> str:
    """Heading, a table for each operation and size, and what the automatic choice is worth; markdown."""
    head, found = head_of(rows), groups(rows)
    parts = [_heading(head), ""]
    for group in found:
        title = f"{group.name.replace(' of ', ', ')} of each rank"
        if group.bound_s is not None:
            title += f"; bound {group.bound_s * 1e3:.1f} ms"
        parts += [f"**{title}**", "", _table(head, group)]
    parts += [*_verdicts(found), "", f"Chosen: {head['selection']['description']}."]
    return "\n".join(parts)


def _heading(head: Row) -> str:
    rate = "" if head["nic_gbit"] is None else f", {head['nic_gbit']:g} Gbit/s for each node"
    return (
        f"{emulated(head)}{head['ranks']} ranks as {head['placement']}{rate}; {head['cores']} cores of {head['cpu']}, "
        f"{head['mpi']}. fp32; median of {head['rounds']} rounds; a time is that of the slowest rank. Commit "
        f"{head['commit']}, {head['date']}."
    )


def _table(head: Row, group: Group) -> str:
    whole, share = group.shard_nbytes * head["ranks"], (head["ranks"] - 1) / head["ranks"]
    header = ["how", "ms", "algbw, MB/s", "busbw, MB/s", "% of bound", "MPI library / this"]
    cells = []
    for name, times in group.times.items():
        spread = Spread.of(times.values())
        rate = whole / spread.median / 1e6
        cells.append(
            [
                name,
                with_spread(spread, 1 if spread.median > 0.01 else 2, scale=1e3),
                f"{rate:,.0f}",
                f"{rate * share:,.0f}",
                "–" if group.bound_s is None else f"{group.bound_s / spread.median:.0%}",
                with_spread(group.ratio(LIBRARY, name), 2) if name != LIBRARY else "1",
            ]
        )
    return table(header, cells)


def _verdicts(found: list[Group]) -> Iterator[str]:
    """The automatic choice against the best that was measured, as ratios of times within a round."""
    for group in found:
        if AUTO not in group.times:
            continue
        best = {"two-level": group.best("window"), "flat": group.best("flat")}
        words = [
            f"{with_spread(group.ratio(AUTO, name), 2)} x the best {what} one ({name})"
            for what, name in best.items()
            if name is not None
        ]
        if words:
            yield f"- {group.name}, automatic: {', '.join(words)}."


def draw(rows: list[Row], path: Path) -> None:
    """Time over size for every mover and the bound, to ``path`` (PNG)."""
    styles = {"flat": "--", "wind": "-", "hier": "-."}
    panels: dict[str, dict[str, dict[float, float]]] = {}
    for group in groups(rows):
        lines = panels.setdefault(TITLES[group.operation], {})
        for name in group.times:
            lines.setdefault(name, {})[group.shard_nbytes] = group.median(name) * 1e3
        if group.bound_s is not None:
            lines.setdefault("bound", {})[group.shard_nbytes] = group.bound_s * 1e3
    head = head_of(rows)
    label = ", emulated" if head["emulated"] else ""
    figure = lines_figure(
        {
            axis: [
                Line(name, dict(values), styles.get(name[:4], ":"), reference=name == "bound")
                for name, values in lines.items()
            ]
            for axis, lines in panels.items()
        },
        title=f"{head['placement']}{label}, {head['mpi']}\n{where_and_when(head)}",
        x="one rank's shard",
        show_x=lambda nbytes: _size(round(nbytes)),
        y="ms, median",
    )
    figure.savefig(path)


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:g} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:g} KiB"


REPORT = harness.Report("Collectives between nodes, beside the MPI library", text, draw)

if __name__ == "__main__":
    run(main)
