"""The reports of `scaling.predict`: forecasts, the ZeRO paper's runs, and prediction against measurement.

Owns: tables and plots. Must not know: how anything was predicted or measured. Ratios are formed within a turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from pathlib import Path

from hpczero.predict.model import Prediction
from scaling.evidence.neighbours import BUSY_SHARE
from scaling.evidence.plot import Bar, Line, draw_bars, draw_lines
from scaling.evidence.record import Row, commit, of_kind, where_and_when
from scaling.evidence.spread import Spread
from scaling.evidence.table import table, with_spread
from scaling.predict.fits import needed_nbytes
from scaling.predict.paper import ANCHOR_TFLOPS, FIGURE_3, Comparison


def forecast_table(found: Sequence[tuple[Prediction, int, bool]]) -> str:
    """One line for each number of ranks; efficiency is tokens per second and rank over those of the first line.

    Args:
        found: prediction, largest micro-batch that fits, whether that needs checkpointed activations.

    The host's time is that of messages and launches, hidden or not; compute is forward and backward.
    """
    header = ["ranks", "stage", "micro-batch", "largest", "step, s", "exposed", "hidden, s"]
    header += [
        "host, s",
        "host / compute",
        "update, ms",
        "TFLOP/s/rank",
        "MFU",
        "efficiency",
        "GB/rank",
    ]
    cells = []
    first = found[0][0] if found else None
    for prediction, most, checkpointed in found:
        job = prediction.job
        base = first.tokens_per_s / first.job.ranks if first else 1.0
        micro = f"{job.micro_batch}" + (f" x {job.accumulation}" if job.accumulation > 1 else "")
        cells.append(
            [
                f"{job.ranks:,}",
                str(job.stage),
                micro + (" ckpt" if job.checkpointing else ""),
                f"{most}{' ckpt' if checkpointed else ''}",
                f"{prediction.step_s:.3f}",
                f"{prediction.communication_s / prediction.step_s:.0%}",
                f"{prediction.hidden_s:.3f}",
                f"{prediction.host_s:.3f}",
                f"{prediction.host_s / prediction.computing_s:.1%}",
                f"{prediction.update_s * 1e3:.2f}",
                f"{prediction.tflops:.3g}",
                f"{prediction.mfu:.0%}",
                f"{prediction.tokens_per_s / job.ranks / base:.0%}",
                f"{needed_nbytes(job) / 1e9:.1f}",
            ]
        )
    return table(header, cells)


def draw_forecast(found: Sequence[tuple[Prediction, int, bool]], path: Path, *, title: str) -> None:
    """FLOP/s of a rank and of all ranks, over ranks, to ``path`` (PNG or SVG)."""
    ranks = {prediction.job.ranks: prediction for prediction, _, _ in found}
    first = found[0][0]
    whole = {float(n): p.tflops * n for n, p in ranks.items()}
    ideal = {float(n): first.tflops * n for n in ranks}
    panels = {
        "of one rank": [Line("predicted", {float(n): p.tflops for n, p in ranks.items()})],
        "of all ranks": [Line("predicted", whole), Line("ideal", ideal, ":", reference=True)],
    }
    draw_lines(
        panels,
        path,
        title=f"PREDICTION, nothing was run. {title}\n{_by_what()}",
        x="ranks",
        y="model TFLOP/s",
        from_zero=["of one rank"],
    )


def _by_what() -> str:
    """Whose prediction it is: the model's of this day."""
    return f"model of commit {commit()}, {date.today()}"


def draw_paper(curve: Sequence[Comparison], path: Path) -> None:
    """The predicted curve of figure 3 beside what was published, to ``path`` (PNG or SVG)."""
    predicted = {float(c.run.ranks): c.prediction.tflops for c in curve}
    published = {float(c.run.ranks): c.run.tflops for c in curve if c.run.tflops is not None}
    base = curve[0]
    speed_up = {
        float(c.run.ranks): c.prediction.tokens_per_s / base.prediction.tokens_per_s for c in curve
    }
    ideal = {float(c.run.ranks): c.run.ranks / base.run.ranks for c in curve}
    ours = "predicted; calibrated at 400"
    panels = {
        "each GPU": [
            Line(ours, predicted),
            Line("read off figure 3: unverified", published, joined=False),
        ],
        "all GPUs": [Line(ours, speed_up), Line("linear", ideal, ":", reference=True)],
    }
    names = {"each GPU": "model TFLOP/s of one GPU", "all GPUs": "speed-up over 64 GPUs"}
    title = f"60 B of the ZeRO paper on 64 to 400 V100: PREDICTION, nothing was run\n{_by_what()}"
    draw_lines(panels, path, title=title, x="GPUs", y=names, from_zero=["each GPU"])


def paper_text(curve: Sequence[Comparison], others: Sequence[Comparison], efficiency: float) -> str:
    """The super-linear curve beside the published one, then the other runs; markdown."""
    base = curve[0].prediction
    header = [
        "60 B, MP 16",
        "batch per 16 GPUs",
        "fits",
        "states, GB",
        "step, s",
        "exposed",
        "TFLOP/s/GPU",
    ]
    header += ["speed-up over 64", "linear", "published TFLOP/s/GPU"]
    rows = []
    for found in curve:
        prediction, run = found.prediction, found.run
        rows.append(
            [
                run.name,
                str(run.batch),
                str(found.largest_batch),
                f"{found.state_nbytes / 1e9:.1f}",
                f"{prediction.step_s:.1f}",
                f"{prediction.communication_s / prediction.step_s:.0%}",
                f"{prediction.tflops:.1f}",
                f"{prediction.tokens_per_s / base.tokens_per_s:.2f}",
                f"{run.ranks / curve[0].run.ranks:.2f}",
                _published(found),
            ]
        )
    more = [
        [
            c.run.name,
            *map(str, (c.run.ranks, c.run.model_parallel, c.run.batch)),
            f"{c.prediction.tflops:.1f}",
            _published(c),
        ]
        for c in others
    ]
    slowest, last = curve[0], curve[-1]
    read = FIGURE_3[0].tflops or ANCHOR_TFLOPS
    constant = (slowest.prediction.tflops / read - 1) * slowest.prediction.step_s
    return "\n".join(
        [
            "**Figure 3 of the ZeRO paper: 60 B on 64 to 400 V100.** More ranks hold less state each, so larger "
            "batches fit (*fits*: the largest multiple of 16 by the paper's formulas, with 27.7 to 28.8 of the 32 GB "
            "usable; it is the published batch in all four cases), and the exchange of gradients and parameters, which "
            "costs the same whatever the batch, takes a smaller share of the step.",
            "",
            table(header, rows),
            f"Calibrated: matrix products reach {efficiency:.1%} of the peak, so that 400 GPUs give "
            f"{ANCHOR_TFLOPS:.1f} TFLOP/s each (15 PFLOP/s). All else is predicted. From {slowest.run.ranks} to "
            f"{last.run.ranks} GPUs the speed-up is "
            f"{last.prediction.tokens_per_s / base.tokens_per_s:.2f} where linear is "
            f"{last.run.ranks / slowest.run.ranks:.2f}: super-linear, as published. **Not explained:** the figure's "
            f"value at {FIGURE_3[0].ranks} GPUs, if it is really near {read:g} TFLOP/s. A step there would have to "
            f"spend {constant:.0f} s on something that the {last.prediction.step_s:.0f} s step on {last.run.ranks} "
            "GPUs does not have; no cost per step or per sample does that.",
            "",
            "**The same constant on the other published runs:**",
            "",
            table(["model", "GPUs", "MP", "batch", "predicted TFLOP/s/GPU", "published"], more),
        ]
    )


def _published(found: Comparison) -> str:
    run = found.run
    return "–" if run.tflops is None else f"{run.tflops:.1f} ({run.said})"


# --- prediction against measurement


def points(rows: list[Row]) -> dict[tuple[str, int, int], list[Row]]:
    """Turns by (workload, ranks, stage): the quiet ones, or all where none was quiet."""
    found: dict[tuple[str, int, int], list[Row]] = {}
    for row in of_kind(rows, "turn"):
        found.setdefault((row["workload"], row["ranks"], row["stage"]), []).append(row)
    return {key: quiet(turns) or turns for key, turns in sorted(found.items())}


def quiet(turns: Sequence[Row]) -> list[Row]:
    """Those during which, probes included, other programs hardly worked; else probe and steps see other machines."""
    return [turn for turn in turns if turn["foreign_share"] <= BUSY_SHARE]


def ratio(turns: Sequence[Row]) -> Spread:
    """Predicted over measured, within turns."""
    return Spread.of([turn["predicted_s"] / turn["measured_s"] for turn in turns])


def text(rows: list[Row]) -> str:
    """Heading, table, verdict; markdown."""
    head = next(of_kind(rows, "run"))
    tolerance = head["tolerance"]
    cells, missed, used, busy = [], 0, 0, 0
    for (workload, ranks, stage), turns in points(rows).items():
        used += len(quiet(turns))
        busy += not quiet(turns)
        found = ratio(turns)
        good = abs(found.median - 1) <= tolerance
        missed += not good
        cells.append(
            [
                workload,
                str(ranks),
                str(stage),
                with_spread(Spread.of([turn["measured_s"] for turn in turns]), 0, 1e3),
                with_spread(Spread.of([turn["predicted_s"] for turn in turns]), 0, 1e3),
                with_spread(found, 2),
                "yes" if good else "**no**",
                str(len(turns)),
                f"{max(turn['foreign_share'] for turn in turns):.0%}",
            ]
        )
    header = ["workload", "ranks", "stage", "measured, ms", "predicted, ms", "predicted / measured"]
    header += [f"within {tolerance:.0%}", "turns", "foreign CPU at most"]
    return "\n".join(
        [
            f"Prediction against measurement on this host: {head['cores']} cores of {head['cpu']}, commit "
            f"{head['commit']}, {head['date']}. {head['rounds']} turns of {head['steps']} steps; the host is probed by "
            "the same ranks before and after each turn. Median [95 % interval, or smallest and largest below 6 turns].",
            "",
            table(header, cells),
            f"{len(cells) - missed} of {len(cells)} points within {tolerance:.0%}. {used} of "
            f"{len(list(of_kind(rows, 'turn')))} turns were quiet: other programs took at most {BUSY_SHARE:.0%} of the "
            "processors from the first probe to the last. Where a point has quiet turns, only they are used.",
            *(
                [f"**Busy machine: {busy} points had no quiet turn, their lines are no result.**"]
                if busy
                else []
            ),
        ]
    )


def draw(rows: list[Row], path: Path) -> None:
    """Ratios as bars, to ``path`` (PNG)."""
    head = next(of_kind(rows, "run"))
    bars = []
    for (workload, ranks, stage), turns in points(rows).items():
        found = ratio(turns)
        label = f"{workload}, {ranks} rank(s), stage {stage}"
        bars.append(Bar(label, found.median, found.low, found.high))
    title = f"prediction against measurement\n{where_and_when(head)}"
    axis = "predicted / measured step time (band: within 20 %)"
    draw_bars({axis: bars}, path, title=title, wanted=(0.8, 1.0, 1.2))
