"""What steps cost that are the same on any number of ranks: ``mpirun -n 2 python -m scaling.exact``.

A GPT trains with ``run.exact`` off and on, on the same samples in the same micro-batches. Both models stay resident; in
each round each takes one step, in an order drawn anew. Then the exact norm is timed beside one in fp64 by chunks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Literal

from hpczero.errors import run
from scaling.contenders.workload import WORKLOADS
from scaling.evidence import harness
from scaling.evidence.plot import Bar, Panels, as_bars
from scaling.evidence.record import Row, head_of, of_kind, run_row, where_and_when
from scaling.evidence.spread import Spread, by_round, paired, table_of, with_spread

if TYPE_CHECKING:
    from hpczero.job.topology import Topology

WAYS = ("off", "require")
NORM_NUMEL = 10_000_000
GRADIENTS = ("gradients", "accumulated", "carried")  # of the ledger


@dataclass(frozen=True)
class Options(harness.Common):
    """What to measure.

    Attributes:
        workload: model; a micro-batch has one sequence.
        leaves: micro-batches of a step over all ranks.
        stage: ZeRO stage.
        precision: of parameters.
        rounds: measured steps of each way; from 6 on there is a 95 % interval of the median.
        warm_up: steps before the first round.
    """

    workload: Literal["gpt-8x512", "gpt-12x768", "tiny"] = "gpt-8x512"
    leaves: int = 8
    stage: Literal[0, 1, 2, 3] = 3
    precision: Literal["fp32", "bf16"] = "fp32"
    rounds: int = 7
    warm_up: int = 2

    def __post_init__(self) -> None:
        harness.at_least(self, leaves=1, rounds=1, warm_up=1)


def main() -> int:
    """Measure, write the rows, print the table, draw the plot. Collective over MPI's world."""
    return harness.on_ranks(Options, "exact", _name, measure, REPORT)


def _name(topology: Topology, options: Options) -> str:
    placed = f"stage{options.stage}-{options.precision}-{harness.placement(topology)}"
    return f"exact-{options.workload}-{placed}"


def measure(topology: Topology, options: Options) -> Iterator[Row]:
    """All rows, the same on every rank. Collective."""
    import torch

    import hpczero
    from hpczero.adapters.gpt import GPTAdapter
    from hpczero.kernels.norm import exact_square_words, largest_magnitude, numbers_of
    from hpczero.run.evaluation import LeafPlan
    from scaling.contenders.training import GPTTraining, random_samples

    model, ranks = WORKLOADS[options.workload].model, topology.size
    names = "workload leaves stage precision rounds warm_up"
    yield run_row(options, names, ranks=ranks, model=WORKLOADS[options.workload].describe())
    accumulation = -(-options.leaves // ranks)

    def leaf_of(number: int, leaf: int) -> tuple[object, ...]:
        return random_samples((number, leaf), 1, model)

    def own_of(number: int, micro_step: int) -> tuple[object, ...]:
        return leaf_of(number, micro_step * ranks + topology.rank)

    trained = {}
    for way in WAYS:
        exact = way == "require"
        trained[way] = GPTTraining(
            GPTAdapter(model),
            topology,
            leaf_of if exact else own_of,
            accumulation=accumulation,
            stage=options.stage,
            precision=options.precision,
            exact=way,
            plan=LeafPlan(options.leaves, 0) if exact else None,
        )
    losses: dict[str, list[float]] = {way: [] for way in WAYS}
    order = random.Random(options.seed)
    turns = harness.in_turns(WAYS, options.rounds, order, warm_up=options.warm_up, program="exact")
    for number, turn in turns:
        for way in turn:
            training = trained[way]
            state = hpczero.sharding(training.model)
            state.memory.reset_peak()
            state.collectives.stats.reset()
            took, taken = harness.timed(topology, training.take)
            losses[way].append(taken.loss)
            if number >= 0:
                yield {
                    "kind": "step",
                    "way": way,
                    "round": number,
                    "seconds": took,
                    "sent_nbytes": sum(state.collectives.stats.sent_nbytes.values()),
                    "peak_nbytes": dict(state.memory.peak),
                }
    harness.check_same_losses("exact", losses["require"], "off", losses["off"], 1e-4)
    for training in trained.values():
        training.close()
    values = torch.randn(NORM_NUMEL, generator=torch.Generator().manual_seed(0))
    chunk = torch.empty(2**15, dtype=torch.float64)

    def by_chunks() -> None:
        sums = []
        for part in torch.split(values, len(chunk)):
            wide = chunk[: len(part)].copy_(part)
            sums.append(wide.mul_(wide).sum())
        numbers_of(sums)

    def exactly() -> None:
        numbers_of(exact_square_words([values], largest_magnitude([values])))

    norms = {"fp64 by chunks": by_chunks, "exact": exactly}
    for number, names_in_turn in harness.in_turns([*norms], options.rounds, order, warm_up=1):
        for name in names_in_turn:
            took = harness.seconds(topology, norms[name])
            if number >= 0:
                yield {"kind": "norm", "way": name, "round": number, "seconds": took}


def _times(rows: list[Row], kind: str) -> dict[str, dict[int, float]]:
    return by_round(rows, kind, itemgetter("way"), itemgetter("seconds"))


def text(rows: list[Row]) -> str:
    """Heading and tables; markdown."""
    head = head_of(rows)
    parts = [
        f"{head['model']}; {head['leaves']} leaves of one sequence on {head['ranks']} ranks, stage {head['stage']}, "
        f"{head['precision']}. Median of {head['rounds']} steps of each, in turn. {where_and_when(head)}"
    ]
    for kind, first in (("step", WAYS[0]), ("norm", "fp64 by chunks")):
        found = _times(rows, kind)
        parts.append(table_of(found, _columns(rows, kind, found, first)))
    return "\n\n".join(parts)


def _columns(
    rows: list[Row], kind: str, found: dict[str, dict[int, float]], first: str
) -> dict[str, Callable[[str], str]]:
    def ratio(way: str) -> str:
        return "1" if way == first else with_spread(paired(found[way], found[first]), 2)

    def mib(way: str, *names: str) -> str:
        last = [row for row in of_kind(rows, kind) if row["way"] == way][-1]
        held = last["peak_nbytes"] if names else {"": last["sent_nbytes"]}
        return f"{sum(held.get(name, 0) for name in names or held) / 2**20:.1f}"

    columns: dict[str, Callable[[str], str]] = {
        "run.exact" if kind == "step" else "norm": str,
        "ms": lambda way: with_spread(Spread.of([1e3 * s for s in found[way].values()]), 1),
        f"this / {first}": ratio,
    }
    if kind == "step":
        columns["gradients and sums of leaves, MiB"] = lambda way: mib(way, *GRADIENTS)
        columns["all categories, MiB"] = lambda way: mib(way, *found_categories(rows))
        columns["sent, MiB"] = mib
    return columns


def found_categories(rows: list[Row]) -> list[str]:
    """Of the ledger, of any way."""
    return sorted({name for row in of_kind(rows, "step") for name in row["peak_nbytes"]})


@as_bars
def draw(rows: list[Row]) -> tuple[str, Panels]:
    """Step times as bars."""
    bars = [Bar.of(way, values.values()) for way, values in _times(rows, "step").items()]
    return f"{head_of(rows)['ranks']} ranks, {head_of(rows)['leaves']} leaves", {"s per step": bars}


REPORT = harness.Report("Steps that are the same on any number of ranks", text, draw)

if __name__ == "__main__":
    run(main)
