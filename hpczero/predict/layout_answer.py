"""What the plan command answers of a layout: a table of ZeRO stages, one of pipeline stages, the map of ranks.

Owns: their words and columns. Must not know: any formula (``plan.spread``, ``plan.sent``, ``predict.layout``), options.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from hpczero.job.mesh import DEGREES
from hpczero.models.config import parameter_count
from hpczero.plan.degrees import rank_map
from hpczero.plan.memory import STATE_TITLES
from hpczero.plan.sent import Sent, Wire, sent_by
from hpczero.plan.spread import Shares, Spread
from hpczero.predict.answer import gigabytes
from hpczero.predict.layout import LayoutPrediction

GB = 10**9
MB = 10**6


@dataclass(frozen=True)
class Row:
    """One ZeRO stage of a layout.

    Attributes:
        spread: the layout; checkpointed only where it does not fit otherwise.
        fits: whether the worst pipeline stage is within the memory of a rank.
        prediction: of a step; None if no machine is described.
    """

    spread: Spread
    fits: bool
    prediction: LayoutPrediction | None = None

    @property
    def shares(self) -> Shares:
        """Bytes of a rank of the pipeline stage that holds most."""
        return self.spread.shares(self.spread.worst)

    @property
    def sent(self) -> Sent:
        """What a rank of the pipeline stage sends that sends most."""
        found = [sent_by(self.spread, place) for place in self.spread.kinds]
        return max(found, key=lambda sent: sent.total.nbytes)


@dataclass(frozen=True)
class LayoutReport:
    """All that is printed, before it is formatted.

    Attributes:
        title: name of the model.
        memory_nbytes: bytes that a rank may have.
        rows: a layout at each ZeRO stage.
        machine_title: of the described machine; empty without one.
    """

    title: str
    memory_nbytes: int
    rows: tuple[Row, ...]
    machine_title: str = ""

    @property
    def spread(self) -> Spread:
        """What all rows have in common."""
        return self.rows[0].spread

    @property
    def best(self) -> Row | None:
        """Of those that fit, the fastest by prediction, else the one that sends least; of equals the higher stage."""
        fitting = [row for row in self.rows if row.fits]
        return min(fitting, key=lambda row: (self._cost(row), -row.spread.stage), default=None)

    def _cost(self, row: Row) -> float:
        if row.prediction is not None:
            return round(row.prediction.step_s, 9)
        return row.sent.total.between or row.sent.total.nbytes


def layout_text(report: LayoutReport) -> str:
    """Header, both tables, the map of ranks and a sentence, with a line end."""
    spread = report.spread
    parts = [_header(report), _table(report)]
    if spread.mesh.pipeline > 1:
        parts.append(_stages(report))
    parts.append("\n".join(rank_map(spread.mesh, spread.ranks_per_node)))
    parts.append(_sentence(report))
    return "\n\n".join(parts) + "\n"


def _header(report: LayoutReport) -> str:
    spread, model = report.spread, report.spread.model
    how = []
    if spread.mesh.pipeline > 1:
        turns = f" of {spread.interleave} groups" if spread.interleave > 1 else ""
        how.append(
            f"{spread.schedule}{turns}, {spread.accumulation} micro-batch(es) of {spread.micro_batch}, bubble "
            f"{float(spread.bubble):.1%}"
        )
    if spread.sequence_parallel:
        how.append("sequence parallel")
    if spread.secondary:
        how.append("a second shard in the node")
    batch = f"global batch {spread.global_batch}"
    return (
        f"{report.title}: {parameter_count(model):,} parameters, {model.layers} layers, hidden {model.hidden}, "
        f"vocabulary {model.vocab_size}, sequence {model.context}, {spread.precision}\n"
        f"{gigabytes(report.memory_nbytes)} per rank, transport {spread.transport}; {'; '.join([*how, batch])}"
    )


def _table(report: LayoutReport) -> str:
    scale, unit = _scale(report)

    def held(label: str, name: str) -> tuple[str, list[str]]:
        return label, [_cell(getattr(row.shares, name), scale) for row in report.rows]

    def sent(label: str, wire: Callable[[Sent], Wire]) -> list[tuple[str, list[str]]]:
        found = [wire(row.sent) for row in report.rows]
        lines = []
        if any(each.inside for each in found):
            lines.append((f"{label}, in node", [_cell(each.inside, scale) for each in found]))
        if any(each.between for each in found):
            lines.append((f"{label}, between", [_cell(each.between, scale) for each in found]))
        return lines

    kept = [held(label, name) for label, name in HELD]
    kept = [(label, cells) for label, cells in kept if label in ALWAYS or any(map(_above, cells))]
    states = {ADAM: STATE_TITLES[report.rows[0].spread.optimizer]}
    kept = [(states.get(label, label), cells) for label, cells in kept]
    table = [
        (
            f"{unit} per rank",
            [f"stage {row.spread.stage}{_star(report, row)}" for row in report.rows],
        ),
        *kept,
        (f"total, {unit}", [_cell(row.shares.total, scale) for row in report.rows]),
        ("fits", ["yes" if row.fits else "no" for row in report.rows]),
        ("checkpointed", ["yes" if row.spread.checkpointing else "no" for row in report.rows]),
        (f"sent per step, {unit}", ["" for _ in report.rows]),
        *(line for label, name in SENT for line in sent(label, lambda s, n=name: getattr(s, n))),  # type: ignore[misc]
        *_predicted(report),
    ]
    return "\n".join(
        (f"{label:<26}" + "".join(f"{cell:>12}" for cell in cells)).rstrip()
        for label, cells in table
    )


ADAM = STATE_TITLES["adamw"]
HELD = (
    ("parameters", "parameters"),
    ("master", "master"),
    ("gradients", "gradients"),
    (ADAM, "optimizer"),
    ("second shard", "secondary"),
    ("whole for the step", "held"),
    ("unsharded, peak", "unsharded"),
    ("exchange buffer", "exchange"),
    ("own gradients", "accumulated"),
    ("activations", "activations"),
    ("between stages", "boundary"),
)
ALWAYS = ("parameters", "gradients", ADAM, "activations")
SENT = tuple(
    (f"  {name}", name) for name in ("shards", "replicas", "tensor", "context", "pipeline", "ties")
)


def _predicted(report: LayoutReport) -> list[tuple[str, list[str]]]:
    found = [row.prediction for row in report.rows if row.prediction is not None]
    if not found:
        return []
    return [
        ("predicted step, s", [f"{each.step_s:,.3g}" for each in found]),
        ("  waiting for stages, s", [f"{each.fill_s + each.messages_s:,.3g}" for each in found]),
        ("  sums, exchanges, s", [f"{each.sums_s + each.context_s:,.3g}" for each in found]),
        (
            "  shards, replicas, s",
            [f"{each.communication_s + each.replicas_s:,.3g}" for each in found],
        ),
        ("predicted tokens/s", [f"{each.tokens_per_s:,.0f}" for each in found]),
        ("predicted MFU", [f"{each.mfu:.1%}" for each in found]),
    ]


def _stages(report: LayoutReport) -> str:
    """One line for each kind of pipeline stage, at the ZeRO stage that is recommended, else at the last."""
    row = report.best or report.rows[-1]
    spread, (scale, unit) = row.spread, _scale(report)
    titles = ("stages", "blocks", "parameters", "alive", f"held, {unit}", f"sent, {unit}")
    lines = ["".join(f"{title:>14}" for title in titles)]
    for place, many in spread.kinds.items():
        part = spread.part(place)
        cells = (
            f"{place}" if many == 1 else f"{place} (x {many})",
            f"{part.blocks}",
            f"{part.numel:,}",
            f"{float(spread.alive(place)):g}",
            _cell(spread.shares(place).total, scale),
            _cell(sent_by(spread, place).total.nbytes, scale),
        )
        lines.append("".join(f"{cell:>14}" for cell in cells))
    return "\n".join(
        [
            f"pipeline at stage {spread.stage}, one line for stages of a kind, the first of them:",
            *lines,
        ]
    )


def _sentence(report: LayoutReport) -> str:
    best = report.best
    if best is None:
        last = report.rows[-1]
        return (
            f"Nothing fits: stage 3 needs {gigabytes(last.shares.total)} per rank, "
            f"{gigabytes(report.memory_nbytes)} are there; larger tensor or pipeline degrees, smaller micro-batches or "
            "more ranks need less."
        )
    spread = best.spread
    why = "sends least between nodes"
    if best.prediction is not None:
        why = f"is the fastest that fits, {best.prediction.step_s:,.3g} s a step as predicted on {report.machine_title}"
    how = "with" if spread.checkpointing else "without"
    return (
        f"Use stage {spread.stage}, which {why}: {gigabytes(best.shares.total)} of {gigabytes(report.memory_nbytes)} "
        f"per rank {how} activation checkpointing."
    )


def layout_json(report: LayoutReport) -> dict[str, object]:
    """The report for programs: bytes, seconds, one object for each ZeRO stage."""
    spread, best = report.spread, report.best
    return {
        "model": report.title,
        "parameters": parameter_count(spread.model),
        "precision": spread.precision,
        "ranks": spread.mesh.size,
        "ranks_per_node": spread.ranks_per_node,
        "mesh": dict(zip(DEGREES, spread.mesh.degrees, strict=True)),
        "schedule": spread.schedule,
        "interleave": spread.interleave,
        "micro_batch": spread.micro_batch,
        "micro_batches": spread.accumulation,
        "global_batch": spread.global_batch,
        "bubble": float(spread.bubble),
        "memory_nbytes": report.memory_nbytes,
        "recommended_stage": best.spread.stage if best else None,
        "stages": [_row_json(row) for row in report.rows],
    }


def _row_json(row: Row) -> dict[str, object]:
    spread, found = row.spread, row.prediction
    return {
        "stage": spread.stage,
        "fits": row.fits,
        "checkpointing": spread.checkpointing,
        "worst_pipeline_stage": spread.worst,
        "step_s": found.step_s if found else None,
        "mfu": found.mfu if found else None,
        "pipeline": [
            {
                "first": place,
                "stages": many,
                "blocks": spread.part(place).blocks,
                "parameters": spread.part(place).numel,
                "alive": float(spread.alive(place)),
                "memory": dataclasses.asdict(spread.shares(place)),
                "needed_nbytes": spread.shares(place).total,
                "sent": dataclasses.asdict(sent_by(spread, place)),
            }
            for place, many in spread.kinds.items()
        ],
    }


def _scale(report: LayoutReport) -> tuple[int, str]:
    largest = max(row.shares.total for row in report.rows)
    return (GB, "GB") if largest >= GB else (MB, "MB")


def _cell(nbytes: float, scale: int) -> str:
    value = nbytes / scale
    return f"{value:,.2f}" if value < 1000 else f"{value:,.0f}"


def _above(cell: str) -> bool:
    return cell != "0.00"


def _star(report: LayoutReport, row: Row) -> str:
    return " *" if row is report.best else ""
