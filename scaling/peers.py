"""One training step of the same model by hpczero and by its peers, side by side: ``python -m scaling.peers``.

First every contender runs alone and its memory is measured; then as many as fit together stay resident, and in each
round all are woken one after the other, in an order drawn anew, for the same number of steps. Nothing is measured while
two contenders run. Ratios are formed within a round of a group and only then summarised, so that what slows the machine
down for a while slows both sides of a ratio.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

from hpczero.errors import ConfigError, run
from hpczero.options.values import Transport
from scaling.contenders import BEFORE, COMPILED, ENTRIES, FLOOR, Entry, find_entry, from_tree
from scaling.contenders.ranks import PEERS_PYTHON, Crew, TurnOptions, end_on_sigterm, turns, warm_up
from scaling.contenders.workload import WORKLOADS, Workload
from scaling.evidence.harness import Report, at_least, check_same_losses, options_of, record, say
from scaling.evidence.host import available_nbytes
from scaling.evidence.plot import Bar, Panels, as_bars
from scaling.evidence.record import Row, head_of, of_kind, run_row
from scaling.evidence.spread import Spread, paired, table_of, with_spread

ANCHORS = (FLOOR, "hpczero-3", "ddp", "fsdp2")
DRAWN_TOLERANCE = 1e-1  # of another checkout, which may draw other first values; of the first step
MEMORY_STEPS = 4
MEMORY_RUNS = 5  # with --against: one peak differs from the next by up to 2 % (two ranks, by pages)
MEMORY_SHARE = 0.9  # of what is free at the start; libraries that contenders share count twice
# What step times are divided by, and how the column is called.
REFERENCES = {
    "independent": "/ floor",
    "ddp": "/ DDP",
    "fsdp2": "/ FSDP2",
    "deepspeed-3": "/ DeepSpeed 3",
}
MEMORY_REFERENCE = "fsdp2"
MIB = 2**20


@dataclass(frozen=True)
class Options(TurnOptions):
    """What to measure.

    Attributes:
        workload: model and batch.
        contenders: as in "hpczero-3 fsdp2 independent"; left out, all that are set up, but hpczero-disk and
            deepspeed-disk. hpczero-3@flat is hpczero over that transport.
        ranks: of each contender, one thread each, bound to no core.
        transport: of hpczero where the contender's name has none.
        against: folder of another checkout of hpczero; each of hpczero's contenders runs with its code, too;
            half of the rounds are run after all were built in the reverse order.
    """

    workload: Literal["gpt-8x512", "gpt-12x768", "gpt-12x768-short", "tiny"] = "gpt-8x512"
    contenders: tuple[str, ...] = ()
    ranks: int = 2
    transport: Transport = "auto"
    against: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, ranks=1)

    @property
    def what(self) -> Workload:
        """The workload that is meant."""
        return WORKLOADS["tiny" if self.quick else self.workload]


def main() -> int:
    """Measure, write the rows, print the table, draw the plot."""
    options = options_of(Options, "peers")
    end_on_sigterm()
    entries = choose(options)
    record(f"peers-{options.what.name}", options.folder, measure(options, entries), REPORT)
    return 0


def choose(options: Options) -> list[Entry]:
    """The contenders that are asked for; those of the other environment only where that is set up.

    Raises:
        ConfigError: an unknown contender, or no checkout to compare with.
    """
    names = list(dict.fromkeys(options.contenders))
    if not names:
        everyday = [entry for entry in ENTRIES.values() if not entry.named]
        names = [e.name for e in everyday if e.python == "main" or PEERS_PYTHON.exists()]
        if len(names) < len(everyday):
            say("peers", "without DeepSpeed, which is not set up; type: install/peers.sh")
    entries = [find_entry(name, transport=options.transport) for name in names]
    if options.against:
        tree = Path(options.against).resolve()
        ours = [e for e in entries if e.module == "hpczero_stage" and not e.named]
        entries += [from_tree(e, tree) for e in ours]
    return entries


def measure(options: Options, entries: Sequence[Entry]) -> Iterator[Row]:
    """The whole run: memory of each contender alone, in turns; then the rounds of each group."""
    limit = int(MEMORY_SHARE * available_nbytes())
    yield run_row(
        options,
        "ranks warm_up transport seed",
        rounds=options.timing[0],
        workload=options.what.name,
        description=options.what.describe(),
        titles={entry.name: entry.title for entry in entries},
    )
    needs = {}
    measured: dict[str, list[Row]] = {entry.name: [] for entry in entries}
    for _ in range(MEMORY_RUNS if options.against and not options.quick else 1):
        for entry in entries:
            measured[entry.name].append(measure_memory(entry, options))
    for name, found in measured.items():
        found.sort(key=lambda row: max(row["step_peak_nbytes"]))
        row = found[(len(found) - 1) // 2]
        needs[name] = sum(row["peak_nbytes"])
        yield {"kind": "memory", **row}
    by_name = {entry.name: entry for entry in entries}
    order = random.Random(options.seed)
    for index, names in enumerate(make_groups(needs, ANCHORS, limit)):
        say("peers", f"group {index + 1}: {', '.join(names)}")
        for row in time_orders([by_name[name] for name in names], options, order):
            yield {"kind": row.pop("kind"), "group": index, **row}


def measure_memory(entry: Entry, options: Options) -> Row:
    """Largest PSS of each rank while the contender runs alone, and what it was before the model."""
    with Crew(entry, options.what, size=options.ranks) as crew:
        built = crew.ask("build")
        trained = crew.ask("memory", steps=MEMORY_STEPS)
        at_build = [answer["peak_nbytes"] for answer in built]
        at_steps = [answer["peak_nbytes"] for answer in trained]
        say("peers", f"{entry.title}: {max(at_steps) / MIB:,.0f} MiB per rank while it trains")
        return {
            "contender": entry.name,
            "settings": built[0]["settings"],
            "baseline_nbytes": crew.baseline_nbytes,
            "build_peak_nbytes": at_build,
            "step_peak_nbytes": at_steps,
            "peak_nbytes": [max(pair) for pair in zip(at_build, at_steps, strict=True)],
        }


def make_groups(
    needs: Mapping[str, int], anchors: Sequence[str], limit_nbytes: int
) -> list[list[str]]:
    """Split the contenders so that each group, anchors included, fits; as few groups as first fit finds.

    Times of different groups are never divided by each other, so every group holds the anchors.

    Args:
        needs: bytes of all ranks together, by contender; groups keep this order.
        anchors: contenders that are in every group; those not in ``needs`` are ignored.
        limit_nbytes: what one group may take.

    Raises:
        ConfigError: the anchors with one other contender do not fit.
    """

    def check(names: Sequence[str]) -> None:
        nbytes = sum(needs[name] for name in names)
        if nbytes > limit_nbytes:
            raise ConfigError(
                f"{', '.join(names)} need {nbytes / 2**30:.1f} GiB together, {limit_nbytes / 2**30:.1f} GiB may be "
                "used; name fewer with --contenders, or end other programs"
            )

    shared = [name for name in needs if name in anchors]
    others: list[list[str]] = []
    for name in needs:
        if name in shared:
            continue
        check([name, *shared])
        for group in others:
            if sum(needs[n] for n in (*group, name, *shared)) <= limit_nbytes:
                group.append(name)
                break
        else:
            others.append([name])
    if not others:
        check(shared)
    members = [{*shared, *group} for group in others] or [set(shared)]
    return [[name for name in needs if name in group] for group in members]


def time_orders(entries: Sequence[Entry], options: Options, order: random.Random) -> Iterator[Row]:
    """Rows of one group; with --against, of half of the rounds after contenders were built in the reverse order.

    Of two equal contenders the second built is slower by up to 8 %: it gets worse pages of memory.
    """
    rounds, _ = options.timing
    half = (rounds + 1) // 2 if options.against else rounds
    yield from time_group(entries, options, order, range(half))
    if options.against:
        yield from time_group(entries[::-1], options, order, range(half, rounds))


def time_group(
    entries: Sequence[Entry], options: Options, order: random.Random, rounds: range
) -> Iterator[Row]:
    """Rows of the rounds of one group, then the losses, which are compared before anything is believed.

    Raises:
        HpcZeroError: a contender failed, or trains something else.
    """
    turn_s = options.timing[1]
    with contextlib.ExitStack() as stack:
        crews = [stack.enter_context(Crew(e, options.what, size=options.ranks)) for e in entries]
        ready = warm_up(crews, options.warm_up, turn_s)
        say("peers", f"{len(rounds)} rounds of {ready.steps} steps")
        for row in turns(crews, ready, len(rounds), order, check_losses, program="peers"):
            yield {**row, "round": rounds[row["round"]]}
        for name, values in ready.losses.items():
            yield {"kind": "losses", "contender": name, "losses": values}


def check_losses(losses: dict[str, list[float]]) -> None:
    """Every contender must have the same loss after the same steps; the floor, which averages nothing, at the first.

    Those of another checkout must agree with each other as closely, and roughly with the others at the first step.

    Raises:
        HpcZeroError: names the contender, the step and both losses.
    """
    reference = next((name for name in losses if name != FLOOR), FLOOR)
    theirs = next((name for name in losses if name.startswith(BEFORE)), None)
    for name, values in losses.items():
        comparable = 1 if name == FLOOR else len(values)
        if name.startswith(BEFORE) and theirs is not None:
            check_same_losses(name, values, theirs, losses[theirs])
            check_same_losses(name, values[:1], reference, losses[reference], DRAWN_TOLERANCE)
        else:
            check_same_losses(name, values[:comparable], reference, losses[reference])


@dataclass(frozen=True)
class Line:
    """What is said of one contender.

    Attributes:
        name, title: of the contender.
        step_s: seconds of one step.
        ratios: to each reference that shared rounds with it; under ``BEFORE`` to itself in the other checkout, under
            ``COMPILED`` to itself without torch.compile.
        peak_nbytes: PSS of the largest rank while training.
        baseline_nbytes: of that, what was there before the model.
    """

    name: str
    title: str
    step_s: Spread
    ratios: Mapping[str, Spread]
    peak_nbytes: int
    baseline_nbytes: int


def summarise(rows: list[Row]) -> list[Line]:
    """One line for each contender, in the order they were measured."""
    titles = head_of(rows)["titles"]
    times: dict[str, dict[object, float]] = {}
    for turn in of_kind(rows, "turn"):
        # Ranks wait for each other in every step, those of the floor at the end of the turn.
        slowest = max(turn["seconds"]) / turn["steps"]
        times.setdefault(turn["contender"], {})[turn["group"], turn["round"]] = slowest
    lines = []
    for memory in of_kind(rows, "memory"):
        name, peaks = memory["contender"], memory["step_peak_nbytes"]
        others = {reference: reference for reference in REFERENCES} | {BEFORE: f"{BEFORE}{name}"}
        if name.endswith(COMPILED):
            others[COMPILED] = name.removesuffix(COMPILED)
        ratios = {
            reference: ratio
            for reference, other in others.items()
            if (ratio := paired(times[name], times.get(other)))
        }
        baseline = memory["baseline_nbytes"][peaks.index(max(peaks))]
        step_s = Spread.of(times[name].values())
        lines.append(Line(name, titles[name], step_s, ratios, max(peaks), baseline))
    return lines


def text(rows: list[Row]) -> str:
    """Heading, table, and what a reader must know to judge it; markdown."""
    head, lines = head_of(rows), summarise(rows)
    versions = ", ".join(f"{name} {version}" for name, version in head["versions"].items())
    title = (
        f"{head['description']}; {head['ranks']} ranks of one thread on {head['cores']} cores of {head['cpu']}; "
        f"fp32, fused AdamW. Commit {head['commit']}, {head['date']}, {versions}."
    )
    return "\n".join([title, "", _table(lines), *_notes(rows, lines)])


def _table(lines: Sequence[Line]) -> str:
    memory = {line.name: line.peak_nbytes for line in lines}
    columns = {"contender": lambda line: line.title}
    columns["ms per step"] = lambda line: with_spread(line.step_s, 0, scale=1000)

    def ratio(reference: str) -> Callable[[Line], str]:
        return lambda line: (
            "1" if line.name == reference else with_spread(line.ratios.get(reference), 2)
        )

    def share(nbytes: int, of_nbytes: int | None) -> str:
        return f"{nbytes / of_nbytes:.2f}" if of_nbytes else "–"

    for reference, title in {**REFERENCES, BEFORE: "/ before", COMPILED: "/ eager"}.items():
        if any(reference in line.ratios for line in lines):
            columns[title] = ratio(reference)
    columns |= {
        "peak PSS, MiB": lambda line: f"{line.peak_nbytes / MIB:,.0f}",
        "before the model": lambda line: f"{line.baseline_nbytes / MIB:,.0f}",
        "peak / FSDP2": lambda line: share(line.peak_nbytes, memory.get(MEMORY_REFERENCE)),
    }
    if any(f"{BEFORE}{name}" in memory for name in memory):
        columns["peak / before"] = lambda line: share(
            line.peak_nbytes, memory.get(f"{BEFORE}{line.name}")
        )
    return table_of(lines, columns)


def _notes(rows: list[Row], lines: Sequence[Line]) -> list[str]:
    """How to read the table, how quiet the machine was, and the settings of each contender."""
    head, turns_ = head_of(rows), list(of_kind(rows, "turn"))
    intervals = all(line.step_s.is_interval for line in lines)
    foreign, sleeping = (
        [turn[f"{who}_cpu_s"] / (turn["window_s"] * head["cores"]) for turn in turns_]
        for who in ("foreign", "sleeping")
    )
    count = max(len(row["losses"]) for row in of_kind(rows, "losses"))
    settings = {
        head["titles"][row["contender"]]: ", ".join(f"{n} {v}" for n, v in row["settings"].items())
        for row in of_kind(rows, "memory")
    }
    return [
        f"Median of {head['rounds']} rounds [{'95 % interval' if intervals else 'smallest and largest'}]; ratios are "
        "formed within a round, then summarised likewise. Rounds of contenders in several groups are pooled. PSS is of "
        "the largest rank, each contender alone.",
        "",
        f"Losses agree over {count} steps. Of the machine's CPU time, other programs took {median(foreign):.1%} "
        f"(median turn; at most {max(foreign):.1%}), sleeping contenders at most {max(sleeping):.1%}.",
        "",
        *(f"- {title}: {said}" for title, said in settings.items()),
    ]


@as_bars
def draw(rows: list[Row]) -> tuple[str, Panels]:
    """Step times and memory as bars."""
    head, lines = head_of(rows), summarise(rows)

    def memory(line: Line) -> Bar:
        before = {"before the model": line.baseline_nbytes / MIB}
        return Bar(line.title, line.peak_nbytes / MIB, parts=before)

    panels = {
        "ms per step": [Bar.of(line.title, line.step_s, 1000) for line in lines],
        "peak PSS per rank, MiB": [memory(line) for line in lines],
    }
    return f"{head['description']}, {head['ranks']} ranks", panels


REPORT = Report("A training step, beside FSDP2, DDP and DeepSpeed", text, draw)

if __name__ == "__main__":
    run(main)
