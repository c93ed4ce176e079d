"""The report of `scaling.peers`: table and plot from its rows.

Owns: what is compared with what. Must not know: how it was measured. Ratios are formed within a round of a group and
only then summarised, so that what slows the machine down for a while slows both sides of a ratio.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from scaling.contenders import BEFORE, COMPILED
from scaling.evidence.plot import Bar, draw_bars
from scaling.evidence.record import Row, of_kind, where_and_when
from scaling.evidence.spread import Spread, paired_ratios
from scaling.evidence.table import table, with_spread

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
    head = next(of_kind(rows, "run"))
    times: dict[str, dict[object, float]] = {}
    for turn in of_kind(rows, "turn"):
        # Ranks wait for each other in every step, those of the floor at the end of the turn.
        slowest = max(turn["seconds"]) / turn["steps"]
        times.setdefault(turn["contender"], {})[turn["group"], turn["round"]] = slowest
    lines = []
    for memory in of_kind(rows, "memory"):
        name = memory["contender"]
        others = {reference: reference for reference in REFERENCES} | {BEFORE: f"{BEFORE}{name}"}
        if name.endswith(COMPILED):
            others[COMPILED] = name.removesuffix(COMPILED)
        ratios = {
            reference: Spread.of(paired)
            for reference, other in others.items()
            if (paired := paired_ratios(times[name], times.get(other, {})))
        }
        peaks = memory["step_peak_nbytes"]
        lines.append(
            Line(
                name=name,
                title=head["titles"][name],
                step_s=Spread.of(list(times[name].values())),
                ratios=ratios,
                peak_nbytes=max(peaks),
                baseline_nbytes=memory["baseline_nbytes"][peaks.index(max(peaks))],
            )
        )
    return lines


def text(rows: list[Row]) -> str:
    """Heading, table, and what a reader must know to judge it; markdown."""
    lines = summarise(rows)
    titles = {**REFERENCES, BEFORE: "/ before", COMPILED: "/ eager"}
    columns = [r for r in titles if any(r in line.ratios for line in lines)]
    memory = {line.name: line.peak_nbytes for line in lines}
    whole = memory.get(MEMORY_REFERENCE)
    header = ["contender", "ms per step", *(titles[r] for r in columns)]
    header += ["peak PSS, MiB", "before the model", "peak / FSDP2"]
    earlier = {name: memory[f"{BEFORE}{name}"] for name in memory if f"{BEFORE}{name}" in memory}
    header += ["peak / before"] if earlier else []
    cells = [
        [
            line.title,
            with_spread(line.step_s, 0, scale=1000),
            *(_ratio(line, reference) for reference in columns),
            f"{line.peak_nbytes / MIB:,.0f}",
            f"{line.baseline_nbytes / MIB:,.0f}",
            _share(line.peak_nbytes, whole),
            *([_share(line.peak_nbytes, earlier.get(line.name))] if earlier else []),
        ]
        for line in lines
    ]
    return "\n".join([heading(rows), "", table(header, cells), *notes(rows, lines)])


def heading(rows: list[Row]) -> str:
    """What was run, where, when."""
    head = next(of_kind(rows, "run"))
    versions = ", ".join(f"{name} {version}" for name, version in head["versions"].items())
    return (
        f"{head['description']}; {head['ranks']} ranks of one thread on {head['cores']} cores of {head['cpu']}; "
        f"fp32, fused AdamW. Commit {head['commit']}, {head['date']}, {versions}."
    )


def notes(rows: list[Row], lines: Sequence[Line]) -> list[str]:
    """How to read the table, and how quiet the machine was."""
    head = next(of_kind(rows, "run"))
    turns = list(of_kind(rows, "turn"))
    intervals = all(line.step_s.is_interval for line in lines)
    shares = {
        who: [turn[f"{who}_cpu_s"] / (turn["window_s"] * head["cores"]) for turn in turns]
        for who in ("foreign", "sleeping")
    }
    foreign, sleeping = shares["foreign"], shares["sleeping"]
    count = max(len(row["losses"]) for row in of_kind(rows, "losses"))
    return [
        f"Median of {head['rounds']} rounds [{'95 % interval' if intervals else 'smallest and largest'}]; ratios are "
        "formed within a round, then summarised likewise. Rounds of contenders in several groups are pooled. PSS is of "
        "the largest rank, each contender alone.",
        "",
        f"Losses agree over {count} steps. Of the machine's CPU time, other programs took {median(foreign):.1%} "
        f"(median turn; at most {max(foreign):.1%}), sleeping contenders at most {max(sleeping):.1%}.",
        "",
        *settings(rows),
    ]


def settings(rows: list[Row]) -> list[str]:
    """Settings of each contender, as a list."""
    titles = next(of_kind(rows, "run"))["titles"]
    lines = []
    for row in of_kind(rows, "memory"):
        said = ", ".join(f"{name} {value}" for name, value in row["settings"].items())
        lines.append(f"- {titles[row['contender']]}: {said}")
    return lines


def draw(rows: list[Row], path: Path) -> None:
    """Step times and memory as bars, to ``path`` (PNG)."""
    lines = summarise(rows)
    steps = [
        Bar(line.title, line.step_s.median * 1000, line.step_s.low * 1000, line.step_s.high * 1000)
        for line in lines
    ]
    memory = [
        Bar(line.title, line.peak_nbytes / MIB, below=line.baseline_nbytes / MIB) for line in lines
    ]
    head = next(of_kind(rows, "run"))
    draw_bars(
        {"ms per step": steps, "peak PSS per rank, MiB (dark: before the model)": memory},
        path,
        title=f"{head['description']}, {head['ranks']} ranks\n{where_and_when(head)}",
    )


def _ratio(line: Line, reference: str) -> str:
    return "1" if line.name == reference else with_spread(line.ratios.get(reference), 2)


def _share(nbytes: int, of_nbytes: int | None) -> str:
    return f"{nbytes / of_nbytes:.2f}" if of_nbytes else "–"
