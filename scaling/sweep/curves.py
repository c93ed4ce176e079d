"""The numbers of a scaling study: curves, speed-up, efficiency, and how sure they are.

A step takes as long as its slowest rank. What a point takes is the median of its jobs, and of each job the median of
its steps. Speed-up and efficiency are ratios of what two points take; at the base itself exactly 1.

Steps of one job share its nodes, its placement and its neighbours, so a thousand steps of one job say nothing of
another allocation. Where there are several jobs they are drawn first, and then steps within each that was drawn; the
same draws every time.

Source: Davison and Hinkley, Bootstrap Methods and their Application (1997), sec. 3.8 (hierarchical data); for a single
job Efron and Tibshirani, An Introduction to the Bootstrap (1993), ch. 13.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median

import numpy as np

from hpczero.predict.machine import MeasuredKernels
from scaling.evidence.record import Row, of_kind
from scaling.evidence.spread import CONFIDENCE, Spread, interval_rank
from scaling.predict.host import predict_on_host, transport_of
from scaling.sweep.study import PARTS, PLAIN, Point, nodes_of

RESAMPLES = 2000

Jobs = Sequence[Sequence[float]]  # of each job its steps


def spread_of_jobs(jobs: Jobs) -> Spread:
    """The median of the jobs' medians, and its interval.

    One job: that of order statistics over its steps . Several: that of the bootstrap.
    """
    if len(jobs) == 1:
        return Spread.of(jobs[0])
    low, high = _quantiles(_draw(jobs, np.random.default_rng(0)))
    return Spread(_middle(jobs), low, high, sum(map(len, jobs)), _are_enough(jobs))


def ratio_of_jobs(numerator: Jobs, denominator: Jobs) -> Spread:
    """One median of jobs over another, with a percentile bootstrap."""
    draw = np.random.default_rng(0)
    low, high = _quantiles(_draw(numerator, draw) / _draw(denominator, draw))
    both = _are_enough(numerator) and _are_enough(denominator)
    count = sum(map(len, numerator))
    return Spread(_middle(numerator) / _middle(denominator), low, high, count, both)


def _are_enough(jobs: Jobs) -> bool:
    """Whether the smallest and the largest of so many values enclose a median 19 times out of 20."""
    return interval_rank(len(jobs[0]) if len(jobs) == 1 else len(jobs)) > 0


def _middle(jobs: Jobs) -> float:
    return median(median(steps) for steps in jobs)


def _draw(jobs: Jobs, draw: np.random.Generator) -> np.ndarray:
    """(RESAMPLES,) medians of as many jobs, drawn with replacement, of as many steps each, likewise."""
    drawn = draw.integers(len(jobs), size=(RESAMPLES, len(jobs)))
    medians = np.empty(drawn.shape)
    for job, steps in enumerate(jobs):
        values, (rows, columns) = np.asarray(steps), np.nonzero(drawn == job)
        of_steps = draw.integers(len(values), size=(len(rows), len(values)))
        medians[rows, columns] = np.median(values[of_steps], axis=1)
    found: np.ndarray = np.median(medians, axis=1)
    return found


def _quantiles(values: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(values, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


@dataclass(frozen=True)
class Measured:
    """One point, all its jobs together."""

    point: Point  # of the first job
    rows: Sequence[Row]  # of all jobs

    @cached_property
    def jobs_ms(self) -> list[list[float]]:
        """Of each job every step, of its slowest rank, checkpoints left out."""
        found = []
        for row in self.rows:
            parts = [row["samples_ms"][part] for part in PARTS]
            steps = zip(*parts, strict=True)
            found.append([max(map(math.fsum, zip(*step, strict=True))) for step in steps])
        return found

    @cached_property
    def step(self) -> Spread:
        """Milliseconds."""
        return spread_of_jobs(self.jobs_ms)

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
        """Largest value of any rank and job; 0 where records do not have it."""
        return float(max(max(row.get(name, [0])) for row in self.rows))

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
        """By `hpczero.predict.model`, from what the ranks themselves measured and for the transport they ran over.

        None where they measured no links (several nodes), no such kernels (a device, other precisions than fp32), the
        model knows no such transport, or ranks share more than shards.
        """
        point, found = self.point, []
        of = {"ranks": point.ranks, "stage": point.stage, "micro_batch": point.micro_batch}
        of["accumulation"] = point.batch // point.micro_batch
        known = point.layout == PLAIN and point.nodes == 1 and point.precision == "fp32"
        for row in self.rows:
            transport = transport_of(row["transport"])
            if not (known and row["probe"] and transport):
                return None
            measured = MeasuredKernels.of_ranks(row["probe"])
            step = predict_on_host(point.config, measured, transport=transport, **of)
            found.append(step.step_s)
        return median(found) * 1e3

    @property
    def planned_nbytes(self) -> int:
        """What the plan said beforehand, activations excluded."""
        return int(self.rows[0]["planned"]["total"])


@dataclass(frozen=True)
class Curve:
    """What is equal but for the number of ranks."""

    name: str  # in tables and legends
    points: Sequence[Measured]  # by number of ranks, fewest first

    @property
    def base(self) -> Measured:
        """Of fewest ranks: N0."""
        return self.points[0]

    @property
    def base_ranks(self) -> int:
        """N0 itself: what does not fit on few ranks begins with more."""
        return self.base.point.ranks

    def speed_up(self, measured: Measured) -> Spread:
        """FLOP/s of all ranks over those of the base; for a fixed global batch that is T(N0) / T(N)."""
        found = ratio_of_jobs(self.base.jobs_ms, measured.jobs_ms)
        if measured is self.base:
            return replace(found, median=1.0, low=1.0, high=1.0)
        return found.times(measured.flops / self.base.flops)

    def predicted_speed_up(self, measured: Measured) -> float | None:
        """As ``speed_up``, of the predictions."""
        base, this = self.base.predicted_ms, measured.predicted_ms
        return (
            None if base is None or this is None else base / this * measured.flops / self.base.flops
        )

    def efficiency(self, measured: Measured) -> Spread:
        """The speed-up over the ideal one."""
        return self.speed_up(measured).times(self.base_ranks / measured.point.ranks)

    @cached_property
    def mixed(self) -> dict[str, list[str]]:
        """Circumstances that should be equal for all rows and are not, with their values."""
        return differing([row for measured in self.points for row in measured.rows])


def curves(rows: list[Row]) -> list[Curve]:
    """All curves of a study, by name."""
    head = next(of_kind(rows, "run"))
    placements = head.get("ranks_per_node") or [None]
    jobs: dict[tuple[str, int], list[tuple[Point, Row]]] = {}
    for row in of_kind(rows, "point"):
        point = Point.of_json(row["point"])
        for most in placements if len(placements) > 1 else [None]:
            name = curve_name(head, point)
            if most is not None:
                if nodes_of(point.ranks, most) != point.nodes:
                    continue
                name += f", {most} ranks per node"
            jobs.setdefault((name, point.ranks), []).append((point, row))
    found: dict[str, list[Measured]] = {}
    for (name, _), members in sorted(jobs.items(), key=lambda item: item[0][1]):
        measured = Measured(members[0][0], [row for _, row in members])
        found.setdefault(name, []).append(measured)
    return [Curve(name, points) for name, points in sorted(found.items())]


def curve_name(head: Row, point: Point) -> str:
    """What the points of one curve have in common."""
    model = "growing model" if head["grow"] else point.model
    weak = head["study"] == "weak"
    batch = f"batch {point.batch} per rank" if weak else f"global batch {point.global_batch}"
    return f"{model}, stage {point.stage}, {batch}{point.shared}"


def circumstances_of(row: Row) -> dict[str, str]:
    """What must be equal for times to be compared."""
    setting = row.get("setting", {})
    return {
        "device": computes_on(row),
        "MPI": row["mpi"],
        "torch": row["versions"].get("torch", ""),
        **{name: value for name, value in setting.items() if name.startswith("HPCZERO_")},
        **{name: setting[name] for name in ("partition", "constraint") if name in setting},
    }


def computes_on(row: Row) -> str:
    """The processor, or the device with the processor beside it."""
    if row.get("device", "cpu") == "cpu":
        return str(row["cpu"])
    return f"{row['device_name']}, beside {row['cpu']}"


def differing(rows: Sequence[Row]) -> dict[str, list[str]]:
    """By circumstance: all its values, where there are several."""
    found = [circumstances_of(row) for row in rows]
    names = dict.fromkeys(name for one in found for name in one)
    values = {name: sorted({one.get(name) or "not set" for one in found}) for name in names}
    return {name: several for name, several in values.items() if len(several) > 1}
