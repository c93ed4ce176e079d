"""A training step over tensor ranks or pipeline stages, by hpczero and by torch: ``python -m scaling.parallel``.

Both sides of a layout stay resident. Their losses are compared before the first time is taken; then each takes its
steps in turn, in an order drawn anew for each round. Nothing is measured while two contenders run.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

from hpczero.errors import ConfigError, run
from scaling.contenders import Entry
from scaling.contenders.ranks import Crew, TurnOptions, end_on_sigterm, turns, warm_up
from scaling.contenders.workload import WORKLOADS, Workload
from scaling.evidence.harness import Report, at_least, check_same_losses, options_of, record, say
from scaling.evidence.host import BUSY_SHARE
from scaling.evidence.plot import Bar, Panels, as_bars
from scaling.evidence.record import Row, head_of, of_kind, run_row, where_and_when
from scaling.evidence.spread import Spread, by_round, paired, table, with_spread

# Of the first loss: fp32 by the order of sums, bf16 by the rounding of activations.
TOLERANCES = {"fp32": 1e-5, "bf16": 2**-8}
LATER = 10.0  # times that after the first step; a wrong gradient moves the loss by 1e-2 soon
TENSOR_GOAL, PIPELINE_GOAL = 0.8, 0.9  # of torch's time, at most


@dataclass(frozen=True)
class Options(TurnOptions):
    """What to measure.

    Attributes:
        workload: model, and batch of each rank with samples of its own.
        ranks: of each contender, one thread each.
        matches: names such as "tensor-4 tensor-4-sequence pipeline-4"; left out, all.
        micro_batches: of a pipeline's step.
        stage: of ZeRO over the ranks that share no layer; torch's FSDP2 and DDP do that with other bytes.
        precision: of parameters and activations; in bf16 tensor parallelism alone.
    """

    workload: Literal["gpt-8x512", "gpt-8x512-short", "gpt-12x768", "tiny"] = "gpt-8x512"
    ranks: int = 4
    matches: tuple[str, ...] = ()
    micro_batches: int = 8
    stage: Literal[0, 1] = 1
    precision: Literal["fp32", "bf16"] = "fp32"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, ranks=2, micro_batches=1)
        if self.ranks % 2:
            raise ConfigError(f"--ranks: got {self.ranks}, expected an even number")

    @property
    def what(self) -> Workload:
        """The workload that is meant."""
        # Four heads, so that four ranks have one each.
        tiny = Workload("tiny", 4, 64, 4, sequences=2, vocab_size=256, context=32)
        return tiny if self.quick else WORKLOADS[self.workload]

    @property
    def chosen(self) -> list[Match]:
        """What is compared. Raises ConfigError: an unknown name."""
        known = {match.name: match for match in matches_of(self)}
        for name in self.matches:
            if name not in known:
                raise ConfigError(f"--matches: got {name!r}, expected some of {', '.join(known)}")
        return [known[name] for name in self.matches or known]


@dataclass(frozen=True)
class Match:
    """One layout, trained by both."""

    name: str  # in tables and on the command line
    own: Entry  # hpczero
    other: Entry  # torch
    workload: Workload  # of one rank with samples of its own
    goal: float  # own time over torch's, at most


# Of torch: its title, its class in ``torch_layouts``, what its names begin with; and the goal.
TENSOR = ("torch DTensor", "TensorParallel", "dtensor", TENSOR_GOAL)
PIPELINE = ("torch pipelining", "Pipelined", "torch", PIPELINE_GOAL)


def matches_of(options: Options) -> list[Match]:
    """Tensor parallelism over all ranks and over half of them, with and without sequence parallelism; then pipelines.

    Degrees of 1 are left out; pipelines are compared in fp32 alone, and have a sample for each micro-batch.
    """
    ranks, micro_batches, workload = options.ranks, options.micro_batches, options.what
    degrees = [degree for degree in (ranks, ranks // 2) if degree > 1]

    def match(name: str, torch: tuple[str, str, str, float], **words: int | str) -> Match:
        title, kind, prefix, goal = torch
        given = {**words, "stage": options.stage}
        own = Entry(
            f"hpczero-{name}", "hpczero", "hpczero_stage", "mpi", arguments=given, kind="Layout"
        )
        other = Entry(
            f"{prefix}-{name}", title, "torch_layouts", "gloo", arguments=words, kind=kind
        )
        return Match(name, own, other, workload, goal)

    found = [
        match(
            f"tensor-{degree}{'-sequence' if sequence else ''}",
            TENSOR,
            tensor=degree,
            sequence=sequence,
            precision=options.precision,
        )
        for degree in degrees
        for sequence in (0, 1)
    ]
    if options.precision == "fp32":
        samples = -(-workload.sequences // micro_batches) * micro_batches
        workload = replace(workload, sequences=samples)
        for degree in degrees:
            words = {"pipeline": degree, "micro_batches": micro_batches}
            found.append(match(f"pipeline-{degree}", PIPELINE, **words))
    return found


def main() -> int:
    """Measure, write the rows, print the table, draw the plot."""
    options = options_of(Options, "parallel")
    end_on_sigterm()
    name = f"parallel-{options.what.name}-{options.ranks}-{options.precision}"
    record(name, options.folder, measure(options, options.chosen), REPORT)
    return 0


def measure(options: Options, chosen: Sequence[Match]) -> Iterator[Row]:
    """All rows."""
    yield run_row(
        options,
        "ranks precision",
        rounds=options.timing[0],
        tolerance=TOLERANCES[options.precision],
        workload=options.what.name,
        description=options.what.describe(),
    )
    order = random.Random(options.seed)
    for match in chosen:
        yield from compare(match, options, order)
        say("parallel", f"{match.name} done")


def compare(match: Match, options: Options, order: random.Random) -> Iterator[Row]:
    """Rows of one layout. Raises HpcZeroError: a contender failed, or the two do not train the same."""
    rounds, turn_s = options.timing
    tolerance = TOLERANCES[options.precision]
    with contextlib.ExitStack() as stack:
        crews = [
            stack.enter_context(Crew(entry, match.workload, size=options.ranks))
            for entry in (match.own, match.other)
        ]
        ready = warm_up(crews, options.warm_up, turn_s)
        apart({name: values[:1] for name, values in ready.losses.items()}, tolerance)
        yield {
            "kind": "match",
            "match": match.name,
            "title": match.other.title,
            "own": match.own.name,
            "other": match.other.name,
            "goal": match.goal,
            "apart": apart(ready.losses, LATER * tolerance),
            "settings": ready.settings,
            "losses": {name: list(values) for name, values in ready.losses.items()},
        }
        check = lambda losses: apart(losses, LATER * tolerance)  # noqa: E731
        for row in turns(crews, ready, rounds, order, check):
            yield {"kind": row.pop("kind"), "match": match.name, **row}


def apart(losses: Mapping[str, Sequence[float]], most: float) -> float:
    """The largest difference of two contenders' losses. Raises HpcZeroError: it is above ``most``."""
    (own, mine), (other, theirs) = losses.items()
    return check_same_losses(own, mine, other, theirs, most)


def _times(rows: list[Row]) -> dict[str, dict[int, float]]:
    """Seconds of a step of the slowest rank, by contender and round."""
    return by_round(
        rows, "turn", lambda row: row["contender"], lambda row: max(row["seconds"]) / row["steps"]
    )


def text(rows: list[Row]) -> str:
    """Heading and table; markdown."""
    cells, times = [], _times(rows)
    for row in of_kind(rows, "match"):
        own, other = times.get(row["own"]), times.get(row["other"])
        ratio = paired(own, other)
        if not own or not other or ratio is None:
            continue
        cells.append(
            [
                f"{row['match']} ({row['title']})",
                *(with_spread(Spread.of(of.values()), 1, scale=1e3) for of in (own, other)),
                with_spread(ratio, 2),
                f"{row['goal']:g}",
                "yes" if ratio.median <= row["goal"] else "no",
                f"{row['apart']:.1e}",
            ]
        )
    header = ["layout", "hpczero, ms", "torch, ms", "hpczero / torch", "goal", "met"]
    return "\n".join([_heading(rows), "", table([*header, "losses apart"], cells)])


def _heading(rows: list[Row]) -> str:
    head = head_of(rows)
    shares = [
        row["foreign_cpu_s"] / (row["window_s"] * head["cores"]) for row in of_kind(rows, "turn")
    ]
    foreign = median(shares) if shares else 0.0
    busy = "**Busy machine: these times are no result.** " if foreign > BUSY_SHARE else ""
    crowded = "; more ranks than cores" if head["ranks"] > head["cores"] else ""
    return (
        f"{busy}{head['description']}, {head['precision']}, {head['ranks']} ranks of one thread{crowded}; AdamW, "
        f"clipped. Both sides of a layout train in turns, {head['rounds']} rounds; losses agreed within "
        f"{head['tolerance']:g} before times were taken. Median of the slowest rank's step; torch over gloo. Other "
        f"programs took {foreign:.1%} of the processors (median turn). {where_and_when(head)}"
    )


@as_bars
def draw(rows: list[Row]) -> tuple[str, Panels]:
    """Own time over torch's as bars."""
    head, times = head_of(rows), _times(rows)
    ratios = {
        row["match"]: paired(times.get(row["own"]), times.get(row["other"]))
        for row in of_kind(rows, "match")
    }
    bars = [Bar.of(name, ratio) for name, ratio in ratios.items() if ratio is not None]
    what = f"{head['description']}, {head['precision']}, {head['ranks']} ranks"
    return what, {"step time, hpczero / torch": bars}


REPORT = Report("Tensor and pipeline parallelism, beside torch", text, draw)

if __name__ == "__main__":
    run(main)
