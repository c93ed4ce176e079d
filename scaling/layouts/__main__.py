"""One training step of the same model over several layouts of ranks, side by side in one MPI job.

    python -m tests.cluster --hosts 4 --ranks-per-host 2 --rate 250 -- -m scaling.layouts --rate_mbit 250

All layouts stay resident; in each round each takes its steps, in an order drawn anew. What is predicted comes from a
probe of all ranks at once, before the first round, and the rate of the links. Ratios are formed within a round.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from statistics import mean, median
from typing import TYPE_CHECKING

from hpczero.errors import run
from scaling.evidence import harness
from scaling.evidence.plot import Bar, Panels, as_bars
from scaling.evidence.record import Row, emulated, head_of, of_kind, run_row, where_and_when
from scaling.evidence.spread import Spread, by_round, paired, table, with_spread
from scaling.layouts.cases import TurnsOfLayouts, cases_on, on_links

if TYPE_CHECKING:
    from hpczero.job.topology import Topology
    from scaling.layouts.training import Training


@dataclass(frozen=True)
class Options(TurnsOfLayouts):
    """What to measure.

    Attributes:
        algorithms: between nodes, as in --parallel.algorithms.
    """

    algorithms: str = "auto"


def main() -> int:
    """Measure, write the rows, print the tables, draw the plot. Collective over MPI's world."""
    return harness.on_ranks(Options, "layouts", _name, measure, REPORT)


def _name(topology: Topology, options: Options) -> str:
    rate = f"-{options.rate_mbit:g}mbit" if options.rate_mbit else ""
    return f"layouts-{harness.placement(topology)}{options.suffix}{rate}"


def measure(topology: Topology, options: Options) -> Iterator[Row]:
    """All rows, the same on every rank. Collective.

    Raises:
        ConfigError: nodes of different sizes, a model that a layout cannot cut, or a rate without an interface.
        HpcZeroError: the layouts do not train the same.
    """
    import torch

    import hpczero
    from hpczero.accelerator import HostAccelerator
    from hpczero.predict.machine import machine_of
    from hpczero.probe.job import probe_job
    from scaling.layouts.training import Training

    with topology.agreed("choose the layouts"):
        options.check_links()
        cases = cases_on(topology.world.nodes, options, options.only)
    yield run_row(
        options,
        "rate_mbit rounds steps",
        **harness.nodes_of(topology, options),
        tolerance=harness.LOSS_TOLERANCE,
        description=options.describe(),
    )
    measured, _ = probe_job(topology, HostAccelerator(), dtype=torch.float32)
    nodes = topology.world.nodes
    per_node = len(nodes[0])
    machine = machine_of(measured, ranks_per_node=per_node, memory_nbytes=1.0, title="this machine")
    machine = on_links(machine, options.rate_mbit)
    # The processors send messages too: where ranks outnumber them, computing and sending take turns.
    here = topology.size if options.emulated else per_node
    overlap = here <= len(os.sched_getaffinity(0))
    trainings: dict[str, Training] = {}
    losses: dict[str, list[float]] = {}
    parts = ("forward", "backward", "sums", "messages", "fill", "communication", "replicas")
    for case in cases:
        training = Training(topology, case, algorithms=options.algorithms)
        trainings[case.name] = training
        losses[case.name] = training.steps(options.warm_up)
        step = case.predicted(machine, measured, overlap=overlap)
        sent = topology.gather(float(case.sent_between(training.topology.pipeline.rank)))
        yield {
            "kind": "layout",
            "layout": case.name,
            "transport": hpczero.sharding(training.model).collectives.describe(),
            "foretold_s": step.step_s,
            "parts": {part: getattr(step, f"{part}_s") for part in (*parts, "hidden", "update")},
            "planned_nbytes": [sum(sent[rank] for rank in ranks) for ranks in nodes],
        }
    _check(losses)
    order = random.Random(options.seed)
    for number, turn in harness.in_turns([*trainings], options.rounds, order, program="layouts"):
        for name in turn:
            training = trainings[name]
            before, waited = harness.sent_on_links(topology, options), training.passes.waited_s
            took, found = harness.timed(topology, partial(training.steps, options.steps))
            losses[name] += found
            after = harness.sent_on_links(topology, options)
            waits = topology.gather((training.passes.waited_s - waited) / options.steps)
            yield {
                "kind": "turn",
                "layout": name,
                "round": number,
                "seconds": took / options.steps,
                "sent_nbytes": [
                    (b - a) / options.steps for a, b in zip(before, after, strict=True)
                ],
                "waited_s": waits if training.topology.pipeline.size > 1 else [],
            }
        _check(losses)
    for training in trainings.values():
        training.close()


def _check(losses: dict[str, list[float]]) -> None:
    """Every layout must have the same losses; all ranks see the same numbers, so all raise."""
    reference = next(iter(losses))
    for name, values in losses.items():
        harness.check_same_losses(name, values, reference, losses[reference])


def agreement(
    predicted: Mapping[str, float], seen: Mapping[str, Spread]
) -> tuple[int, int, int, int]:
    """How far two orders of the same layouts agree.

    Returns:
        How many pairs of layouts there are, and how many both order in the same way; then the same of the pairs whose
        intervals of the measured median do not overlap.
    """
    alike = clear = clear_alike = 0
    pairs = list(itertools.combinations(seen, 2))
    for a, b in pairs:
        same = (predicted[a] < predicted[b]) == (seen[a].median < seen[b].median)
        apart = seen[a].high < seen[b].low or seen[b].high < seen[a].low
        alike += same
        clear += apart
        clear_alike += same and apart
    return len(pairs), alike, clear, clear_alike


def _times(rows: list[Row]) -> dict[str, dict[int, float]]:
    """Seconds of a step by layout and round, layouts in the order in which they were built."""
    found = by_round(rows, "turn", itemgetter("layout"), itemgetter("seconds"))
    names = (row["layout"] for row in of_kind(rows, "layout"))
    return {name: found[name] for name in names if name in found}


def text(rows: list[Row]) -> str:
    """Heading, tables and what they come to; markdown."""
    head, found = head_of(rows), _times(rows)
    link = f", links of {head['rate_mbit']:g} Mbit/s" if head["rate_mbit"] else ""
    title = (
        f"{emulated(head)}{head['description']}, {head['ranks']} ranks as {head['placement']}{link}; {head['rounds']} "
        f"rounds of {head['steps']} step(s) of each layout, in turn; fp32, fused AdamW, clipped; losses equal within "
        f"{head['tolerance']:g}. {where_and_when(head)}"
    )
    return "\n".join([title, "", _layouts_table(rows, found), *_order(rows, found)])


def _layouts_table(rows: list[Row], found: dict[str, dict[int, float]]) -> str:
    reference = next(iter(found))
    header = ["layout", "s per step", "this / first", "predicted, s", "predicted / seen"]
    header += ["MB between nodes per host", "planned, MB", "seen / planned", "waits for stages, s"]
    cells = []
    for row in of_kind(rows, "layout"):
        name = row["layout"]
        if name not in found:
            continue
        turns = [turn for turn in of_kind(rows, "turn") if turn["layout"] == name]
        seen = Spread.of(found[name].values())
        ratio = paired(found[name], found[reference])
        counted = [mean(turn["sent_nbytes"]) for turn in turns if turn["sent_nbytes"]]
        planned = mean(row["planned_nbytes"])
        waits = [mean(turn["waited_s"]) for turn in turns if turn["waited_s"]]
        sent = median(counted) if counted else None
        cells.append(
            [
                name,
                with_spread(seen, 3),
                "1" if name == reference else with_spread(ratio, 2),
                f"{row['foretold_s']:.3f}",
                f"{row['foretold_s'] / seen.median:.2f}",
                "–" if sent is None else f"{sent / 1e6:.2f}",
                f"{planned / 1e6:.2f}",
                "–" if sent is None or not planned else f"{sent / planned:.3f}",
                f"{median(waits):.3f}" if waits else "–",
            ]
        )
    return table(header, cells)


def _order(rows: list[Row], found: dict[str, dict[int, float]]) -> list[str]:
    """Both orders, and how far they agree."""
    predicted = {row["layout"]: row["foretold_s"] for row in of_kind(rows, "layout")}
    seen = {name: Spread.of(values.values()) for name, values in found.items()}
    by_seen = sorted(seen, key=lambda name: seen[name].median)
    by_plan = sorted(seen, key=lambda name: predicted[name])
    cells = [
        [str(place), plan, real]
        for place, (plan, real) in enumerate(zip(by_plan, by_seen, strict=True), start=1)
    ]
    pairs, alike, clear, clear_alike = agreement(predicted, seen)
    # Of Kendall: 1 for equal orders, -1 for opposite ones.
    tau = 2 * alike / pairs - 1 if pairs else 0.0
    said = (
        f"{alike} of {pairs} pairs of layouts are predicted in the order in which they were seen (Kendall's tau "
        f"{tau:.2f}); of the {clear} pairs whose intervals (up to five rounds: ranges) do not overlap, {clear_alike}."
    )
    return [table(["place", "predicted", "seen"], cells), said]


@as_bars
def draw(rows: list[Row]) -> tuple[str, Panels]:
    """Seconds seen and predicted as bars."""
    head, found = head_of(rows), _times(rows)
    predicted = {row["layout"]: row["foretold_s"] for row in of_kind(rows, "layout")}
    panels = {
        "s per step": [Bar.of(name, values.values()) for name, values in found.items()],
        "predicted, s": [Bar(name, predicted[name]) for name in found],
    }
    label = ", emulated" if head["emulated"] else ""
    return f"{head['description']}, {head['placement']}{label}", panels


REPORT = harness.Report("Layouts of tensor, pipeline and data parallelism", text, draw)

if __name__ == "__main__":
    run(main)
