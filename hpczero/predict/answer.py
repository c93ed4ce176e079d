"""What the plan command answers: a table of stages, a recommendation, the same for programs.

Owns: their words and columns. Must not know: any formula (``sizing``, ``predict``), options, torch, MPI.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from hpczero.models.config import GPTConfig
from hpczero.plan.memory import STATE_TITLES
from hpczero.plan.sizing import Fit, Machine, fewest_ranks
from hpczero.predict.model import Prediction


@dataclass(frozen=True)
class Report:
    """All that is printed, before it is formatted.

    ``config`` is None for a model of transformers, whose activations are not counted. ``predictions`` are by stage, and
    empty if no machine is described.
    """

    title: str
    config: GPTConfig | None
    numel: int
    sequence: int
    machine: Machine
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


def recommend(report: Report, stage3: Callable[[int], Fit]) -> str:
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


def _why(report: Report, best: Fit, smallest: Fit) -> str:
    if report.predictions:
        step_s = report.predictions[best.stage].step_s
        return f"the fastest that fits, {_ms(step_s)} a step as predicted on {report.machine_title}"
    if best.stage == smallest.stage:
        return "the smallest that fits"
    return (
        f"which sends no more than stage {smallest.stage}, the smallest that fits, and holds "
        f"{gigabytes(smallest.memory.states - best.memory.states)} less"
    )


def rows(report: Report) -> list[tuple[str, list[str]]]:
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


def header(report: Report) -> str:
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


def stage_titles(report: Report) -> list[str]:
    """Column titles; the recommended stage is starred."""
    return [f"stage {row.stage}{' *' if row is report.best else ''}" for row in report.fits]


def as_text(report: Report) -> str:
    """Header, aligned table, recommendation; for a pipe or a batch log."""
    unit, _ = table_unit(report)
    table = [(f"{unit} per rank", stage_titles(report)), *rows(report)]
    lines = [f"{label:<22}" + "".join(f"{cell:>14}" for cell in cells) for label, cells in table]
    return "\n".join([header(report), "", *lines, "", report.recommendation, ""])


def as_json(report: Report) -> dict[str, object]:
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


def _predicted_json(report: Report, row: Fit) -> dict[str, object]:
    if not report.predictions:
        return {"step_s": None, "tokens_per_s": None, "mfu": None}
    found = report.predictions[row.stage]
    return {"step_s": found.step_s, "tokens_per_s": found.tokens_per_s, "mfu": found.mfu}


def table_unit(report: Report) -> tuple[str, int]:
    """MB for small models, GB as in the paper for others."""
    largest = max(row.needed_nbytes for row in report.fits)
    return ("GB", 10**9) if largest >= 10**9 else ("MB", 10**6)


def _ms(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1e3:,.3g} ms"


def gigabytes(nbytes: float) -> str:
    """Bytes as a user reads them."""
    return f"{nbytes / 1e9:,.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:,.1f} MB"
