"""One training step with all and with fewer bytes between nodes: ``mpirun -n 4 python -m scaling.codes``.

    python -m tests.cluster --hosts 4 --ranks-per-host 1 --rate 250 -- -m scaling.codes --rate_mbit 250 --emulated

A GPT sends codes. A recommender, ``--workload dlrm``, sends of its tables the rows that a batch touches.

All models stay resident; in each round each takes one step, in an order drawn anew. Ratios are formed within a round.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from statistics import mean, median
from typing import TYPE_CHECKING, Any, Literal

from hpczero.errors import run
from hpczero.plan.precision import Precision
from scaling.contenders.workload import RECOMMENDER, WORKLOADS
from scaling.evidence import harness
from scaling.evidence.plot import Bar, Panels, as_bars
from scaling.evidence.record import Row, emulated, head_of, of_kind, run_row, where_and_when
from scaling.evidence.spread import Spread, by_round, paired, table_of, with_spread

if TYPE_CHECKING:
    from hpczero.job.topology import Topology

# By their names in tables; the others are compared with the first. Parameters travel in codes at stage 3 only.
FORMS: dict[str, dict[str, Any]] = {
    "exact": {},
    "sums in bf16": {"precision": Precision(reduce="bf16")},
    "sums in int8": {"precision": Precision(reduce="int8")},
    "sums in int4": {"precision": Precision(reduce="int4")},
    "parameters in int8, sums in int4": {"precision": Precision(reduce="int4", gather="int8")},
    "kept parameters in int8, sums in int4": {
        "precision": Precision(reduce="int4", gather="int8"),
        "secondary": True,
    },
}
ROWS: dict[str, dict[str, Any]] = {"whole tables": {}, "rows": {"sparse_gradients": True}}

SENT = ("all_gather", "reduce_scatter", "ask_rows", "fetch_rows", "reduce_rows", "spread_rows")


@dataclass(frozen=True)
class Options(harness.OnLinks):
    """What to measure.

    Attributes:
        workload: model and batch.
        stage: ZeRO stage.
        rounds: measured steps of each form; from 6 on there is a 95 % interval of the median.
        warm_up: steps before the first round.
    """

    workload: Literal["gpt-8x512", "gpt-8x512-short", "gpt-12x768", "tiny", "dlrm"] = (
        "gpt-8x512-short"
    )
    stage: Literal[0, 1, 2, 3] = 3
    rounds: int = 7
    warm_up: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        harness.at_least(self, rounds=1, warm_up=1)


def main() -> int:
    """Measure, write the rows, print the table, draw the plot. Collective over MPI's world."""
    return harness.on_ranks(Options, "codes", _name, measure, REPORT)


def _name(topology: Topology, options: Options) -> str:
    rate = f"-{options.rate_mbit:g}mbit" if options.rate_mbit else ""
    placed = f"stage{options.stage}-{harness.placement(topology)}{options.suffix}{rate}"
    return f"codes-{options.workload}-{placed}"


def measure(topology: Topology, options: Options) -> Iterator[Row]:
    """All rows, the same on every rank. Collective."""
    import hpczero
    from scaling.contenders import base, hpczero_stage

    with topology.agreed("look for the links"):
        options.check_links()
    workload: Any = RECOMMENDER
    made: type[hpczero_stage.Contender] = hpczero_stage.RecommenderContender
    batch: Callable[..., Any] = base.clicks
    if options.workload in WORKLOADS:
        workload, made, batch = WORKLOADS[options.workload], hpczero_stage.Contender, base.batch
    yield run_row(
        options,
        "rate_mbit stage rounds",
        **harness.nodes_of(topology, options),
        workload=workload.name,
        description=workload.describe(),
    )
    contenders: dict[str, hpczero_stage.Contender] = {}
    for name, form in (ROWS if workload is RECOMMENDER else FORMS).items():
        if options.stage < 3 and form.get("precision", Precision()).gather != "exact":
            continue
        contender = contenders[name] = made(options.stage, "auto", **form)
        contender.join(topology)
        contender.build(workload)
        sharding = hpczero.sharding(contender.model)
        told = sharding.collectives.describe()
        yield {"kind": "form", "form": name, "transport": told}
    turns = harness.in_turns(
        [*contenders],
        options.rounds,
        random.Random(options.seed),
        warm_up=options.warm_up,
        program="codes",
    )
    for number, turn in turns:
        samples = batch(workload, step=number + options.warm_up, rank=topology.rank)
        for name in turn:
            stats = hpczero.sharding(contenders[name].model).collectives.stats
            stats.reset()
            before = harness.sent_on_links(topology, options)
            took, loss = harness.timed(topology, partial(contenders[name].step, *samples))
            after = harness.sent_on_links(topology, options)
            mine = sum(stats.sent_nbytes[kind] for kind in SENT)
            sent, losses = topology.gather(float(mine)), topology.gather(loss)
            if number >= 0:
                yield {
                    "kind": "step",
                    "form": name,
                    "round": number,
                    "seconds": took,
                    "loss": mean(losses),
                    "sent_nbytes": sent,
                    "on_links_nbytes": [b - a for a, b in zip(before, after, strict=True)],
                }
    for contender in contenders.values():
        hpczero.release(contender.model)


def _times(rows: list[Row]) -> dict[str, dict[int, float]]:
    """Seconds of a step by form and round, forms in the order in which they were built."""
    found = by_round(rows, "step", itemgetter("form"), itemgetter("seconds"))
    return {row["form"]: found[row["form"]] for row in of_kind(rows, "form")}


def text(rows: list[Row]) -> str:
    """Heading and table; markdown. Compares with exact messages."""
    head, found = head_of(rows), _times(rows)

    def of_form(name: str, what: str) -> list[list[float]]:
        return [row[what] for row in of_kind(rows, "step") if row["form"] == name]

    first = next(iter(found))

    def ratio(name: str) -> str:
        return "1" if name == first else with_spread(paired(found[first], found[name]), 2)

    def per_rank(name: str, what: str) -> str:
        counted = [mean(nodes) for nodes in of_form(name, what) if nodes]
        return f"{median(counted) / 1e6:.4g}" if counted else "not counted"

    shown = table_of(
        found,
        {
            "between nodes": str,
            "s per step": lambda name: with_spread(Spread.of(found[name].values()), 2),
            f"{first} / this": ratio,
            "MB sent per rank": lambda name: per_rank(name, "sent_nbytes"),
            "MB on each host's link": lambda name: per_rank(name, "on_links_nbytes"),
        },
    )
    link = f", links of {head['rate_mbit']:g} Mbit/s" if head["rate_mbit"] else ""
    title = (
        f"{emulated(head)}{head['description']}, stage {head['stage']}, {head['ranks']} ranks as "
        f"{head['placement']}{link}; fp32, fused AdamW. Median of {head['rounds']} steps of each, in turn. "
        f"{where_and_when(head)}"
    )
    return "\n".join([title, "", shown])


@as_bars
def draw(rows: list[Row]) -> tuple[str, Panels]:
    """Step times as bars."""
    head = head_of(rows)
    bars = [Bar.of(name, values.values()) for name, values in _times(rows).items()]
    label = ", emulated" if head["emulated"] else ""
    return f"{head['description']}, {head['placement']}{label}", {"s per step": bars}


REPORT = harness.Report("Exact and coded messages between nodes", text, draw)

if __name__ == "__main__":
    run(main)
