"""What the plan command answers: a table of stages, a recommendation, the same for programs.

Owns: their words and columns. Must not know: any formula (``sizing``, ``predict``), options, torch, MPI.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from hpczero.job.mesh import DEGREES
from hpczero.models.config import GPTConfig, parameter_count
from hpczero.plan.degrees import rank_map
from hpczero.plan.memory import STATE_TITLES
from hpczero.plan.sent import Sent, Wire, sent_by
from hpczero.plan.sizing import Fit, MachineSizes, fewest_ranks
from hpczero.plan.spread import Shares, Spread
from hpczero.predict.layout import LayoutPrediction
from hpczero.predict.model import Prediction


@dataclass(frozen=True)
class PlanReport:
    """All that is printed, before it is formatted.

    ``config`` is None for a model of transformers, whose activations are not counted. ``predictions`` are by stage, and
    empty if no machine is described.
    """

    title: str
    config: GPTConfig | None
    numel: int
    sequence: int
    machine: MachineSizes
    ranks_per_node: int | None
    transport: str
    precision: str
    micro_batch: int
    fits: tuple[Fit, ...]
    recommendation: str
    device: str = "cpu"
    machine_title: str = ""
    predictions: tuple[Prediction, ...] = ()
    optimizer: str = "adamw"

    @property
    def smallest(self) -> Fit | None:
        """The smallest stage that fits."""
        return next((row for row in self.fits if row.fits), None)

    @property
    def best(self) -> Fit | None:
        """Of the stages that fit, the fastest by prediction.

        Without one, the highest that sends no more than any other. Of two that cost the same it is the higher one: it
        leaves more memory for larger micro batches.
        """
        fitting = [row for row in self.fits if row.fits]
        return min(fitting, key=lambda row: (self._cost(row), -row.stage), default=None)

    def _cost(self, row: Fit) -> float:
        if self.predictions:
            return round(self.predictions[row.stage].step_s, 9)
        return row.traffic.nbytes


def recommend(report: PlanReport, stage3: Callable[[int], Fit]) -> str:
    """One sentence: what to use, or what is missing.

    Args:
        report: everything but the recommendation.
        stage3: stage 3 at another number of ranks.
    """
    memory, best, smallest = report.machine.memory_nbytes, report.best, report.smallest
    if best is not None and report.config is None:
        return (
            f"States and buffers take {gigabytes(best.needed_nbytes)} of {gigabytes(memory)} per rank at stage "
            f"{best.stage}; activations come on top, and are not counted for a model of transformers."
        )
    if best is not None and smallest is not None:
        plain, checkpointed = best.micro_batch, best.micro_batch_checkpointed
        how = "without" if plain >= report.micro_batch else "with"
        most = f"up to micro-batch {plain} without it and {checkpointed} with it"
        if plain == 0:
            most = f"up to micro-batch {checkpointed} with it, none without"
        return (
            f"Use stage {best.stage}, {_why(report, best, smallest)}: {gigabytes(best.needed_nbytes)} of "
            f"{gigabytes(memory)} per rank at micro-batch {report.micro_batch} {how} activation checkpointing; {most}."
        )
    last = report.fits[-1]
    short = f"Nothing fits: stage 3 needs {gigabytes(last.needed_nbytes)} per rank, {gigabytes(memory)} are there"
    if last.micro_batch_checkpointed:
        return f"{short}; use micro-batch {last.micro_batch_checkpointed} or less."
    ranks = fewest_ranks(lambda n: stage3(n).fits, report.machine.ranks)
    if ranks is not None:
        return f"{short}; from {ranks} ranks on it fits."
    return f"{short}, and no number of ranks helps: use shorter sequences, narrower blocks or more memory."


def _why(report: PlanReport, best: Fit, smallest: Fit) -> str:
    if report.predictions:
        step_s = report.predictions[best.stage].step_s
        return f"the fastest that fits, {_ms(step_s)} a step as predicted on {report.machine_title}"
    if best.stage == smallest.stage:
        return "the smallest that fits"
    return (
        f"which sends no more than stage {smallest.stage}, the smallest that fits, and holds "
        f"{gigabytes(smallest.memory.states - best.memory.states)} less"
    )


def rows(report: PlanReport) -> list[tuple[str, list[str]]]:
    """The table: a name and one cell for each stage. Bytes are per rank, in the unit of ``table_unit``."""
    unit, scale = table_unit(report)

    def nbytes(label: str, value: Callable[[Fit], float]) -> tuple[str, list[str]]:
        cells = [value(row) / scale for row in report.fits]
        return label, [f"{cell:,.2f}" if cell < 1000 else f"{cell:,.0f}" for cell in cells]

    def words(label: str, value: Callable[[Fit], object]) -> tuple[str, list[str]]:
        return label, [str(value(row)) for row in report.fits]

    predicted = [
        ("predicted step", [_ms(found.step_s) for found in report.predictions]),
        ("predicted tokens/s", [f"{found.tokens_per_s:,.0f}" for found in report.predictions]),
        ("predicted MFU", [f"{found.mfu:.1%}" for found in report.predictions]),
    ]
    activations = nbytes(f"with micro-batch {report.micro_batch}", lambda row: row.needed_nbytes)
    batches = [
        words("largest micro-batch", lambda row: row.micro_batch or "-"),
        words("  checkpointed", lambda row: row.micro_batch_checkpointed or "-"),
    ]
    return [
        nbytes("parameters", lambda row: row.memory.parameters),
        nbytes("master", lambda row: row.memory.master),
        nbytes("gradients", lambda row: row.memory.gradients),
        nbytes(STATE_TITLES[report.optimizer], lambda row: row.memory.optimizer),
        nbytes("unsharded, peak", lambda row: row.memory.unsharded),
        nbytes("exchange buffer", lambda row: row.memory.exchange),
        nbytes(f"total, {unit}", lambda row: row.memory.total),
        nbytes("paper's 2+2+12 bytes", lambda row: row.ideal_nbytes),
        *([] if report.config is None else [activations]),
        words("fits", lambda row: "yes" if row.fits else "no"),
        *([] if report.config is None else batches),
        nbytes(f"sent per step, {unit}", lambda row: row.traffic.nbytes),
        *(predicted if report.predictions else []),
    ]


def header(report: PlanReport) -> str:
    """Two lines: the model, the machine."""
    config, machine = report.config, report.machine
    nodes = ""
    if report.ranks_per_node is not None:
        node_nbytes = machine.memory_nbytes * report.ranks_per_node
        nodes = (
            f" on {machine.ranks // report.ranks_per_node} nodes of {report.ranks_per_node} "
            f"({gigabytes(node_nbytes)} per node)"
        )
    sizes = ""
    if config is not None:
        sizes = f"{config.layers} layers, hidden {config.hidden}, vocabulary {config.vocab_size}, "
        sizes += f"sequence {report.sequence}, "
    return (
        f"{report.title}: {report.numel:,} parameters, {sizes}{report.precision}\n"
        f"{machine.ranks} ranks{nodes}, {gigabytes(machine.memory_nbytes)} per rank, transport {report.transport}"
    )


def stage_titles(report: PlanReport) -> list[str]:
    """Column titles; the recommended stage is starred."""
    return [f"stage {row.stage}{' *' if row is report.best else ''}" for row in report.fits]


def as_text(report: PlanReport) -> str:
    """Header, aligned table, recommendation; for a pipe or a batch log."""
    unit, _ = table_unit(report)
    table = [(f"{unit} per rank", stage_titles(report)), *rows(report)]
    lines = [f"{label:<22}" + "".join(f"{cell:>14}" for cell in cells) for label, cells in table]
    return "\n".join([header(report), "", *lines, "", report.recommendation, ""])


def as_json(report: PlanReport) -> dict[str, object]:
    """The report for machines: bytes, one object for each stage."""
    return {
        "model": report.title,
        "parameters": report.numel,
        "config": report.config and dataclasses.asdict(report.config),
        "sequence": report.sequence,
        "precision": report.precision,
        "optimizer": report.optimizer,
        "ranks": report.machine.ranks,
        "ranks_per_node": report.ranks_per_node,
        "transport": report.transport,
        "memory_nbytes": report.machine.memory_nbytes,
        "micro_batch": report.micro_batch,
        "recommended_stage": report.best.stage if report.best else None,
        "recommendation": report.recommendation,
        "machine": report.machine_title or None,
        "device": report.device,
        "stages": [{**_stage_json(row), **_predicted_json(report, row)} for row in report.fits],
    }


def _stage_json(row: Fit) -> dict[str, object]:
    memory, traffic = dataclasses.asdict(row.memory), dataclasses.asdict(row.traffic)
    return {
        **dataclasses.asdict(row),
        "memory": {**memory, "states": row.memory.states, "total": row.memory.total},
        "traffic": {**traffic, "numel": row.traffic.numel, "nbytes": row.traffic.nbytes},
    }


def _predicted_json(report: PlanReport, row: Fit) -> dict[str, object]:
    if not report.predictions:
        return {"step_s": None, "tokens_per_s": None, "mfu": None}
    found = report.predictions[row.stage]
    return {"step_s": found.step_s, "tokens_per_s": found.tokens_per_s, "mfu": found.mfu}


def table_unit(report: PlanReport) -> tuple[str, int]:
    """MB for small models, GB as in the paper for others."""
    largest = max(row.needed_nbytes for row in report.fits)
    return ("GB", 10**9) if largest >= 10**9 else ("MB", 10**6)


def _ms(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1e3:,.3g} ms"


def gigabytes(nbytes: float) -> str:
    """Bytes as a user reads them."""
    return f"{nbytes / 1e9:,.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:,.1f} MB"


GB = 10**9
MB = 10**6


@dataclass(frozen=True)
class StageRow:
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
    rows: tuple[StageRow, ...]
    machine_title: str = ""

    @property
    def spread(self) -> Spread:
        """What all rows have in common."""
        return self.rows[0].spread

    @property
    def best(self) -> StageRow | None:
        """Of those that fit, the fastest by prediction, else the one that sends least; of equals the higher stage."""
        fitting = [row for row in self.rows if row.fits]
        return min(fitting, key=lambda row: (self._cost(row), -row.spread.stage), default=None)

    def _cost(self, row: StageRow) -> float:
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


def _row_json(row: StageRow) -> dict[str, object]:
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


def _star(report: LayoutReport, row: StageRow) -> str:
    return " *" if row is report.best else ""
