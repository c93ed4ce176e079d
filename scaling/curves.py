"""The numbers of a scaling study: curves, speed-up, efficiency, and how sure they are.

Owns: what is compared with what. Must not know: how it was measured, how it is written or drawn. A step takes as long
as its slowest rank. Medians have the 95 % interval of order statistics (`scaling.spread`); speed-up and efficiency are
ratios of medians, with the 95 % interval of a percentile bootstrap, drawn with a fixed seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

import numpy as np

from scaling.host import predict_on_host
from scaling.probe import Measured as MeasuredKernels
from scaling.record import Row, of_kind
from scaling.spread import CONFIDENCE, Spread
from scaling.study import Point

PARTS = ("compute", "communication", "optimizer", "data", "other")
RESAMPLES = 2000
BUSY_SHARE = 0.05  # of the processors, for other programs: more than that makes times worthless


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


def busy(rows: list[Row]) -> bool:
    """Whether other programs took so much of the processors that times say little."""
    return median(row["foreign_share"] for row in of_kind(rows, "point")) > BUSY_SHARE


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
