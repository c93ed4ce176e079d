"""The report of `scaling.sweep`: the numbers of a study, its tables, its CSV.

Owns: what is compared with what, and how sure it is. Must not know: how it was measured, how it is drawn. A step takes
as long as its slowest rank. Medians have the 95 % interval of order statistics (`scaling.spread`); speed-up and
efficiency are ratios of medians, with the 95 % interval of a percentile bootstrap, drawn with a fixed seed.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median

import numpy as np

from scaling.host import predict_on_host
from scaling.probe import Measured as MeasuredKernels
from scaling.record import Row, of_kind
from scaling.spread import CONFIDENCE, Spread
from scaling.study import Point
from scaling.table import table, with_spread

PARTS = ("compute", "communication", "optimizer", "data", "other")
CHECKPOINT = "checkpoint"
RESAMPLES = 2000
BUSY_SHARE = 0.05  # of the processors, for other programs: more than that makes times worthless
MIB = 2**20
LOSS_TOLERANCE = 1e-4  # order of fp32 sums, as in `scaling.peers`


@dataclass(frozen=True)
class Measured:
    """One point, all its jobs together.

    Attributes:
        point: of the first job.
        rows: of all jobs.
    """

    point: Point
    rows: Sequence[Row]

    @cached_property
    def steps_ms(self) -> list[float]:
        """Every step of every job, of its slowest rank, checkpoints left out."""
        found = []
        for row in self.rows:
            parts = [row["samples_ms"][part] for part in PARTS]
            for step in zip(*parts, strict=True):
                found.append(max(map(math.fsum, zip(*step, strict=True))))
        return found

    @cached_property
    def step(self) -> Spread:
        """Milliseconds."""
        return Spread.of(self.steps_ms)

    def part_ms(self, part: str) -> float:
        """Mean over steps, ranks and jobs: costs are averaged arithmetically."""
        values = [v for row in self.rows for step in row["samples_ms"][part] for v in step]
        return math.fsum(values) / len(values)

    @property
    def flops(self) -> float:
        """Model FLOPs of one step, all ranks together."""
        row, point = self.rows[0], self.point
        return float(row["flops_per_token"] * point.global_batch * point.config.context)

    @property
    def tflops(self) -> float:
        """Of one rank, in 1e12 per second, at the median."""
        return self.flops / self.point.ranks / (self.step.median / 1e3) / 1e12

    def worst(self, name: str) -> float:
        """Largest value of any rank and job."""
        return float(max(max(row[name]) for row in self.rows))

    @property
    def pss_nbytes(self) -> float:
        """Peak PSS of the largest rank, less what it had before there was a model."""
        peaks = [
            peak - base
            for row in self.rows
            for peak, base in zip(row["pss_peak_nbytes"], row["pss_baseline_nbytes"], strict=True)
        ]
        return float(max(peaks))

    @cached_property
    def predicted_ms(self) -> float | None:
        """By `scaling.model`, from what the ranks themselves measured; None between nodes, whose links they did not."""
        point = self.point
        if point.nodes > 1 or point.precision != "fp32":
            return None
        found = [
            predict_on_host(
                point.config,
                MeasuredKernels.of_ranks(row["probe"]),
                ranks=point.ranks,
                stage=point.stage,
                micro_batch=point.micro_batch,
                accumulation=point.batch // point.micro_batch,
            )
            for row in self.rows
        ]
        return median(prediction.step_s for prediction in found) * 1e3

    @property
    def planned_nbytes(self) -> int:
        """What the plan said beforehand, activations excluded."""
        return int(self.rows[0]["planned"]["total"])


@dataclass(frozen=True)
class Ratio:
    """A ratio to the base, with its interval; at the base itself exactly 1."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Curve:
    """What is equal but for the number of ranks.

    Attributes:
        name: in tables and legends.
        points: by number of ranks, fewest first.
    """

    name: str
    points: Sequence[Measured]

    @property
    def base(self) -> Measured:
        """Of fewest ranks: N0."""
        return self.points[0]

    def speed_up(self, measured: Measured) -> Ratio:
        """FLOP/s of all ranks over those of the base; for a fixed global batch that is T(N0) / T(N)."""
        found = _ratio_of_medians(self.base.steps_ms, measured.steps_ms)
        if measured is self.base:
            return Ratio(1.0, 1.0, 1.0)
        scale = measured.flops / self.base.flops
        return Ratio(found.value * scale, found.low * scale, found.high * scale)

    def predicted_speed_up(self, measured: Measured) -> float | None:
        """As ``speed_up``, of the predictions."""
        base, this = self.base.predicted_ms, measured.predicted_ms
        return (
            None if base is None or this is None else base / this * measured.flops / self.base.flops
        )

    def efficiency(self, measured: Measured) -> Ratio:
        """The speed-up over the ideal one."""
        found, ideal = self.speed_up(measured), measured.point.ranks / self.base.point.ranks
        return Ratio(found.value / ideal, found.low / ideal, found.high / ideal)


def curves(rows: list[Row]) -> list[Curve]:
    """All curves of a study, in the order they were asked for."""
    head = next(of_kind(rows, "run"))
    jobs: dict[tuple[str, int], list[tuple[Point, Row]]] = {}
    for row in of_kind(rows, "point"):
        point = Point.of_json(row["point"])
        jobs.setdefault((curve_name(head, point), point.ranks), []).append((point, row))
    found: dict[str, list[Measured]] = {}
    for (name, _), members in sorted(jobs.items(), key=lambda item: item[0][1]):
        measured = Measured(members[0][0], [row for _, row in members])
        found.setdefault(name, []).append(measured)
    return [Curve(name, points) for name, points in sorted(found.items())]


def curve_name(head: Row, point: Point) -> str:
    """What the points of one curve have in common."""
    model = "growing model" if head["grow"] else point.model
    strong = head["study"] == "strong"
    batch = f"global batch {point.global_batch}" if strong else f"batch {point.batch} per rank"
    return f"{model}, stage {point.stage}, {batch}"


def text(rows: list[Row]) -> str:
    """Heading, conditions, tables, losses; markdown."""
    parts = [heading(rows), "", *conditions(rows), ""]
    for curve in curves(rows):
        parts += [f"**{curve.name}**", "", _scaling_table(curve), _parts_table(curve)]
        parts.append(_memory_table(curve))
    parts += [*loss_parity(rows), ""]
    return "\n".join(parts)


def heading(rows: list[Row]) -> str:
    """What was run, where, when."""
    head, said = next(of_kind(rows, "run")), label(rows)
    definition = f"Set up like {head['definition'][0].lower()}{head['definition'][1:]}"
    if busy(rows):
        said = f"**Busy machine: these times are no result.** {said}"
    return (
        f"{said}{definition if label(rows) else head['definition']} N0 is the smallest number of ranks of a curve. "
        f"{head['points_done']} of {head['points_asked']} points; {head['malformed']} malformed lines skipped. "
        f"{head['steps']} steps of each point after {head['warm_up']} to warm up; commit {head['asked_at']}."
    )


def label(rows: list[Row]) -> str:
    """What must stand before any figure of this study."""
    found = list(of_kind(rows, "point"))
    if any(row["emulated"] for row in found):
        return "**Emulated nodes on one machine: this is not scaling.** "
    if any(row["oversubscribed"] for row in found):
        return "**More ranks than cores: this is not scaling.** "
    return ""


def busy(rows: list[Row]) -> bool:
    """Whether other programs took so much of the processors that times say little."""
    return median(row["foreign_share"] for row in of_kind(rows, "point")) > BUSY_SHARE


def conditions(rows: list[Row]) -> list[str]:
    """Everything that a reader must know of the measurement, as a list."""
    found = list(of_kind(rows, "point"))
    first = found[0]
    foreign = [row["foreign_share"] for row in found]
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    placements = sorted({row["placement"] for row in found})
    machines = max(len(set(row["hosts"])) for row in found)
    commits = sorted({row["commit"] for row in found})
    lines = [
        f"- {first['cpu']}, {first['cores']} cores, {first['threads']} thread(s) for each rank, "
        f"{machines} machine(s), {first['memory_gib']} GiB, Linux {first['kernel']}; "
        f"{first['mpi']}, Python {first['python']}, {versions}.",
        f"- Placements (nodes x ranks of a node): {', '.join(placements)}. Transport: "
        f"{', '.join(sorted({row['transport'] for row in found}))}. {first['point']['precision']}.",
        f"- {first['date']} to {found[-1]['date']}; commit {', '.join(commits)}.",
        f"- Other programs took {median(foreign):.1%} of the processors (median point), {max(foreign):.1%} at most.",
        f"- A step takes as long as its slowest rank. Medians [{CONFIDENCE:.0%} interval of order statistics]; "
        f"speed-up and efficiency [{CONFIDENCE:.0%} percentile bootstrap of the ratio of medians, {RESAMPLES} draws]. "
        "Steps of one job are not independent: intervals say nothing about other allocations, for which --jobs "
        "repeats a point.",
    ]
    if machines == 1 and any(row["point"]["ranks"] > 1 for row in found):
        lines.append(
            "- All ranks share one machine's memory, caches and clock: nothing here says how a network scales."
        )
    return lines


def _scaling_table(curve: Curve) -> str:
    header = ["ranks", "nodes", "step, ms", "predicted, ms", "speed-up", "efficiency"]
    header.append("GFLOP/s/rank")
    cells = []
    for measured in curve.points:
        base = measured is curve.base
        ups, efficiency = curve.speed_up(measured), curve.efficiency(measured)
        cells.append(
            [
                str(measured.point.ranks),
                str(measured.point.nodes),
                with_spread(measured.step, 1),
                "–" if measured.predicted_ms is None else f"{measured.predicted_ms:.1f}",
                "1" if base else _ratio(ups),
                "1" if base else _ratio(efficiency),
                f"{measured.tflops * 1e3:,.4g}",
            ]
        )
    return table(header, cells)


def _parts_table(curve: Curve) -> str:
    header = ["ranks", *(f"{part}, ms" for part in (*PARTS, CHECKPOINT)), "exposed communication"]
    cells = []
    for measured in curve.points:
        parts = {part: measured.part_ms(part) for part in (*PARTS, CHECKPOINT)}
        step_ms = math.fsum(parts[part] for part in PARTS)
        cells.append(
            [
                str(measured.point.ranks),
                *(f"{ms:.2f}" for ms in parts.values()),
                f"{parts['communication'] / step_ms:.1%}",
            ]
        )
    return table(header, cells)


def _memory_table(curve: Curve) -> str:
    header = ["ranks", "planned, MiB", "ledger, MiB", "ledger / planned", "PSS over the start, MiB"]
    cells = [
        [
            str(m.point.ranks),
            f"{m.planned_nbytes / MIB:,.1f}",
            f"{m.worst('ledger_nbytes') / MIB:,.1f}",
            f"{m.worst('ledger_nbytes') / m.planned_nbytes:.3f}",
            f"{m.pss_nbytes / MIB:,.1f}",
        ]
        for m in curve.points
    ]
    return table(header, cells)


def parity_groups(rows: list[Row]) -> dict[str, list[Row]]:
    """Points that must have the same losses: same model, same samples in every step."""
    groups: dict[str, list[Row]] = {}
    for row in of_kind(rows, "point"):
        point = Point.of_json(row["point"])
        name = f"{point.model}, global batch {point.global_batch}, {point.precision}"
        groups.setdefault(name, []).append(row)
    return groups


def loss_difference(row: Row, reference: Row) -> list[float]:
    """Absolute difference of the losses of each step that both have."""
    return [abs(a - b) for a, b in zip(row["losses"], reference["losses"], strict=False)]


def loss_parity(rows: list[Row]) -> list[str]:
    """A line for each group: how far losses are apart, whatever the stage and the ranks."""
    lines = []
    for name, members in parity_groups(rows).items():
        if len(members) < 2:
            continue
        worst = max(max(loss_difference(row, members[0])) for row in members[1:])
        verdict = (
            "equal" if worst <= LOSS_TOLERANCE else "**NOT equal: they do not train the same**"
        )
        lines.append(
            f"- Losses of {name}: {len(members)} points, at most {worst:.1e} apart over "
            f"{min(len(row['losses']) for row in members)} steps: {verdict} (tolerance {LOSS_TOLERANCE:g})."
        )
    return lines or [
        "- Losses: no two points train on the same samples, so there is nothing to compare."
    ]


def as_csv(rows: list[Row]) -> str:
    """One line for each point, numbers only, in the units of the column names."""
    head = next(of_kind(rows, "run"))
    out = io.StringIO()
    names = [
        "study",
        "curve",
        "model",
        "stage",
        "ranks",
        "nodes",
        "batch_per_rank",
        "global_batch",
        "jobs",
        "steps",
    ]
    names += ["emulated", "oversubscribed", "step_ms", "step_ms_low", "step_ms_high"]
    names.append("predicted_ms")
    names += [
        "speed_up",
        "speed_up_low",
        "speed_up_high",
        "efficiency",
        "efficiency_low",
        "efficiency_high",
    ]
    names += ["tflops_per_rank", *(f"{part}_ms" for part in (*PARTS, CHECKPOINT))]
    names += ["planned_nbytes", "ledger_nbytes", "pss_over_start_nbytes", "commit"]
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names)
    for curve in curves(rows):
        for m in curve.points:
            ups, efficiency, point = curve.speed_up(m), curve.efficiency(m), m.point
            writer.writerow(
                [
                    head["study"],
                    curve.name,
                    point.model,
                    point.stage,
                    point.ranks,
                    point.nodes,
                    point.batch,
                    point.global_batch,
                    len(m.rows),
                    len(m.steps_ms),
                    m.rows[0]["emulated"],
                    m.rows[0]["oversubscribed"],
                    *(f"{v:.4f}" for v in (m.step.median, m.step.low, m.step.high)),
                    "" if m.predicted_ms is None else f"{m.predicted_ms:.4f}",
                    *(f"{v:.4f}" for v in (ups.value, ups.low, ups.high)),
                    *(f"{v:.4f}" for v in (efficiency.value, efficiency.low, efficiency.high)),
                    f"{m.tflops:.6f}",
                    *(f"{m.part_ms(part):.4f}" for part in (*PARTS, CHECKPOINT)),
                    m.planned_nbytes,
                    int(m.worst("ledger_nbytes")),
                    int(m.pss_nbytes),
                    m.rows[0]["commit"],
                ]
            )
    return out.getvalue()


def write_tables(rows: list[Row], path: Path) -> None:
    """``.csv`` and ``.md`` beside ``path``."""
    path.with_suffix(".csv").write_text(as_csv(rows), encoding="utf-8")
    path.with_suffix(".md").write_text(f"{text(rows)}\n", encoding="utf-8")


def _ratio_of_medians(numerator: Sequence[float], denominator: Sequence[float]) -> Ratio:
    """Median over median, and a 95 % percentile bootstrap; the same numbers every time.

    Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), ch. 13.
    """
    draw = np.random.default_rng(0)

    def medians(values: Sequence[float]) -> np.ndarray:
        found = np.asarray(values)
        return np.median(found[draw.integers(len(found), size=(RESAMPLES, len(found)))], axis=1)

    low, high = np.quantile(
        medians(numerator) / medians(denominator), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]
    )
    return Ratio(median(numerator) / median(denominator), float(low), float(high))


def _ratio(ratio: Ratio) -> str:
    return f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
