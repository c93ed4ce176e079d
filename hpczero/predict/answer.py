"""What the plan command answers: tables of ZeRO stages, a recommendation, the same for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from hpczero.errors import ConfigError
from hpczero.job.mesh import DEGREES
from hpczero.models.config import DecoderConfig, GPTConfig, parameter_count
from hpczero.plan.degrees import rank_map
from hpczero.plan.memory import STATE_TITLES
from hpczero.plan.sent import Sent, Wire, sent_by
from hpczero.plan.sizing import Fit, MachineSizes, fewest_ranks
from hpczero.plan.spread import Shares, Spread
from hpczero.predict.model import StepRange

GB, MB = 10**9, 10**6
Cells = tuple[str, list[str]]  # a name, and a cell for each stage


def gigabytes(nbytes: float) -> str:
    """Bytes as a user reads them."""
    return f"{nbytes / GB:,.1f} GB" if nbytes >= GB else f"{nbytes / MB:,.1f} MB"


def seconds(value: float) -> str:
    """A time as a user reads it."""
    return f"{value:,.2f} s" if value >= 1 else f"{value * 1e3:,.3g} ms"


def _unit_of(sizes: Sequence[int]) -> tuple[str, int]:
    """MB for small models, GB as in the paper for others."""
    return ("GB", GB) if max(sizes) >= GB else ("MB", MB)


def _cell(nbytes: float, scale: int) -> str:
    value = nbytes / scale
    return f"{value:,.2f}" if value < 1000 else f"{value:,.0f}"


def spread(found: StepRange) -> str:
    """Fast to slow, as a user reads them; empty where both are the same."""
    fast, slow = found.fast.step_s, found.slow.step_s
    return "" if fast == slow else f"{fast:,.3g} - {slow:,.3g} s"


def _speeds(found: Sequence[StepRange]) -> list[Cells]:
    ends = [
        ("  at the fast end", [seconds(each.fast.step_s) for each in found]),
        ("  at the slow end", [seconds(each.slow.step_s) for each in found]),
    ]
    return [
        *(ends if any(map(spread, found)) else []),
        ("predicted tokens/s", [f"{each.likely.tokens_per_s:,.0f}" for each in found]),
        ("predicted MFU", [f"{each.likely.mfu:.1%}" for each in found]),
    ]


def alike(found: Sequence[StepRange], names: Sequence[str]) -> str:
    """A sentence about which of ``names`` cannot be told from the first; empty if all can.

    Args:
        found: of each; the first is what was chosen, the others in the order of their likely step.
        names: for the sentence; where there are many, their number is said.
    """
    if len(found) < 2 or not spread(found[0]):
        return ""
    same = [one for one in range(1, len(found)) if found[one].overlaps(found[0])]
    if not same:
        return "No other range of steps overlaps with that of the first."
    said = ", ".join(names[one] for one in same[:MOST_NAMED])
    said += f" and {len(same) - MOST_NAMED} more" if len(same) > MOST_NAMED else ""
    slower = sum(found[one].slower(found[0]) for one in same)
    return (
        f"The ranges of {said} overlap with that of the first; {slower} of these {len(same)} are slower at both "
        "ends and at the likely one."
    )


MOST_NAMED = 8


@dataclass(frozen=True)
class PlanReport:
    """All that is printed, before it is formatted.

    ``config`` is None for a model of transformers of which only the parameters are known. ``predictions`` are by stage,
    and empty if no machine is described.
    """

    title: str
    config: GPTConfig | None
    numel: int
    sequence: int
    machine: MachineSizes
    ranks_per_node: int | None
    precision: str
    micro_batch: int
    fits: tuple[Fit, ...]
    recommendation: str
    device: str = "cpu"
    machine_title: str = ""
    predictions: tuple[StepRange, ...] = ()
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
            return round(self.predictions[row.stage].likely.step_s, 9)
        return row.traffic.nbytes

    @property
    def alike(self) -> str:
        """Which other stages that fit cannot be told from the best, by their times."""
        if self.best is None or not self.predictions:
            return ""
        fitting = [row.stage for row in self.fits if row.fits and row is not self.best]
        order = sorted(fitting, key=lambda stage: self.predictions[stage].likely.step_s)
        stages = [self.best.stage, *order]
        return alike([self.predictions[s] for s in stages], [f"stage {s}" for s in stages])

    def check(self, stage: int) -> None:
        """Refuse a stage that does not fit.

        Raises:
            ConfigError: says what would.
        """
        row, there = self.fits[stage], gigabytes(self.machine.memory_nbytes)
        if not row.fits:
            raise ConfigError(
                f"--stage {stage} with micro-batch {self.micro_batch} needs {gigabytes(row.needed_nbytes)} per rank, "
                f"and {there} are there. {self.recommendation}"
            )

    @property
    def unit(self) -> tuple[str, int]:
        """Of the table: its name and its bytes."""
        return _unit_of([row.needed_nbytes for row in self.fits])

    def table(self) -> list[Cells]:
        """A name and one cell for each stage. Bytes are per rank, in ``unit``."""
        unit, scale = self.unit

        def nbytes(label: str, value: Callable[[Fit], float]) -> Cells:
            return label, [_cell(value(row), scale) for row in self.fits]

        def words(label: str, value: Callable[[Fit], object]) -> Cells:
            return label, [str(value(row)) for row in self.fits]

        steps = ("predicted step", [seconds(found.likely.step_s) for found in self.predictions])
        activations = nbytes(f"with micro-batch {self.micro_batch}", lambda row: row.needed_nbytes)
        batches = [
            words("largest micro-batch", lambda row: row.micro_batch or "-"),
            words("  checkpointed", lambda row: row.micro_batch_checkpointed or "-"),
        ]
        return [
            nbytes("parameters", lambda row: row.memory.parameters),
            nbytes("master", lambda row: row.memory.master),
            nbytes("gradients", lambda row: row.memory.gradients),
            nbytes(STATE_TITLES[self.optimizer], lambda row: row.memory.optimizer),
            nbytes("unsharded, peak", lambda row: row.memory.unsharded),
            nbytes("exchange buffer", lambda row: row.memory.exchange),
            nbytes(f"total, {unit}", lambda row: row.memory.total),
            nbytes("paper's 2+2+12 bytes", lambda row: row.ideal_nbytes),
            *([] if self.config is None else [activations]),
            words("fits", lambda row: "yes" if row.fits else "no"),
            *([] if self.config is None else batches),
            nbytes(f"sent per step, {unit}", lambda row: row.traffic.nbytes),
            *([steps, *_speeds(self.predictions)] if self.predictions else []),
        ]

    def header(self) -> str:
        """Two lines: the model, the machine."""
        config, machine, nodes, sizes = self.config, self.machine, "", ""
        if self.ranks_per_node is not None:
            node_nbytes = machine.memory_nbytes * self.ranks_per_node
            nodes = (
                f" on {machine.ranks // self.ranks_per_node} nodes of {self.ranks_per_node} "
                f"({gigabytes(node_nbytes)} per node)"
            )
        if config is not None:
            sizes = (
                f"{config.layers} layers, hidden {config.hidden}, vocabulary {config.vocab_size}, "
            )
            sizes += f"sequence {self.sequence}, "
        return (
            f"{self.title}: {self.numel:,} parameters, {sizes}{self.precision}\n"
            f"{machine.ranks} ranks{nodes}, {gigabytes(machine.memory_nbytes)} per rank, transport {machine.transport}"
        )

    def as_text(self) -> str:
        """Header, aligned table, recommendation; the recommended stage is starred."""
        titles = [f"stage {row.stage}{' *' if row is self.best else ''}" for row in self.fits]
        table = [(f"{self.unit[0]} per rank", titles), *self.table()]
        lines = [
            f"{label:<22}" + "".join(f"{cell:>14}" for cell in cells) for label, cells in table
        ]
        said = [self.recommendation, *filter(None, (self.alike,))]
        if isinstance(self.config, DecoderConfig):
            said.append(ESTIMATED)
        return "\n".join([self.header(), "", *lines, "", *said, ""])

    def as_json(self) -> dict[str, object]:
        """The report for programs: bytes, one object for each stage."""
        return {
            "model": self.title,
            "parameters": self.numel,
            "config": self.config and dataclasses.asdict(self.config),
            "sequence": self.sequence,
            "precision": self.precision,
            "optimizer": self.optimizer,
            "ranks": self.machine.ranks,
            "ranks_per_node": self.ranks_per_node,
            "transport": self.machine.transport,
            "memory_nbytes": self.machine.memory_nbytes,
            "micro_batch": self.micro_batch,
            "recommended_stage": self.best.stage if self.best else None,
            "recommendation": self.recommendation,
            "machine": self.machine_title or None,
            "device": self.device,
            "stages": [self._stage_json(row) for row in self.fits],
        }

    def _stage_json(self, row: Fit) -> dict[str, object]:
        found = self.predictions[row.stage] if self.predictions else None
        memory, traffic = dataclasses.asdict(row.memory), dataclasses.asdict(row.traffic)
        return {
            **dataclasses.asdict(row),
            "memory": {**memory, "states": row.memory.states, "total": row.memory.total},
            "traffic": {**traffic, "numel": row.traffic.numel, "nbytes": row.traffic.nbytes},
            **_as_json(found),
        }


ESTIMATED = (
    "Activations and times are an estimate: as a decoder of fused kernels would have them. Modules of transformers "
    "keep more."
)


def _as_json(found: StepRange | None) -> dict[str, object]:
    if found is None:
        return dict.fromkeys(("step_s", "step_fast_s", "step_slow_s", "tokens_per_s", "mfu"))
    ends = {"step_fast_s": found.fast.step_s, "step_slow_s": found.slow.step_s}
    likely = {name: getattr(found.likely, name) for name in ("step_s", "tokens_per_s", "mfu")}
    return {**likely, **ends}


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
        step_s = report.predictions[best.stage].likely.step_s
        return f"the fastest that fits, {seconds(step_s)} a step as predicted on {report.machine_title}"
    if best.stage == smallest.stage:
        return "the smallest that fits"
    return (
        f"which sends no more than stage {smallest.stage}, the smallest that fits, and holds "
        f"{gigabytes(smallest.memory.states - best.memory.states)} less"
    )


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
    prediction: StepRange | None = None

    @cached_property
    def shares(self) -> Shares:
        """Bytes of a rank of the pipeline stage that holds most."""
        return self.spread.shares(self.spread.worst)

    @cached_property
    def sent(self) -> Sent:
        """What a rank of the pipeline stage sends that sends most."""
        found = [sent_by(self.spread, place) for place in self.spread.kinds]
        return max(found, key=lambda sent: sent.total.nbytes)

    @property
    def cost(self) -> float:
        """Seconds by prediction, else bytes sent."""
        if self.prediction is not None:
            return round(self.prediction.likely.step_s, 9)
        return self.sent.total.between or self.sent.total.nbytes

    def as_json(self) -> dict[str, object]:
        """For programs: one object for each kind of pipeline stage."""
        spread, found = self.spread, self.prediction
        return {
            "stage": spread.stage,
            "fits": self.fits,
            "checkpointing": spread.checkpointing,
            "worst_pipeline_stage": spread.worst,
            **_as_json(found),
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


def _cost(row: StageRow) -> float:
    return row.cost


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
ALWAYS = ("parameters", "gradients", "optimizer", "activations")
SENT = ("shards", "replicas", "tensor", "context", "pipeline", "ties")


@dataclass(frozen=True)
class LayoutReport:
    """All that is printed of a layout, before it is formatted.

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

    @cached_property
    def best(self) -> StageRow | None:
        """Of those that fit, the fastest by prediction, else the one that sends least; of equals the higher stage."""
        fitting = [row for row in self.rows if row.fits]
        return min(fitting, key=lambda row: (row.cost, -row.spread.stage), default=None)

    @property
    def unit(self) -> tuple[str, int]:
        """Of the tables: its name and its bytes."""
        return _unit_of([row.shares.total for row in self.rows])

    def check(self, stage: int) -> None:
        """Refuse a stage that does not fit.

        Raises:
            ConfigError: says what it needs.
        """
        if not self.rows[stage].fits:
            raise ConfigError(
                f"--stage {stage} in this layout needs {gigabytes(self.rows[stage].shares.total)} per rank, and "
                f"{gigabytes(self.memory_nbytes)} are there"
            )

    def as_text(self) -> str:
        """Header, both tables, the map of ranks and a sentence, with a line end."""
        spread = self.spread
        parts = [self._header(), self._table()]
        if spread.mesh.pipeline > 1:
            parts.append(self._stages())
        parts.append("\n".join(rank_map(spread.mesh, spread.ranks_per_node)))
        parts.append(self._sentence())
        return "\n\n".join(parts) + "\n"

    def _header(self) -> str:
        spread, model, how = self.spread, self.spread.model, []
        if spread.mesh.pipeline > 1:
            turns = f" of {spread.interleave} groups" if spread.interleave > 1 else ""
            how.append(
                f"{spread.schedule}{turns}, {spread.accumulation} micro-batch(es) of {spread.micro_batch}, bubble "
                f"{float(spread.bubble):.1%}"
            )
        if spread.sequence_parallel:
            how.append("sequence parallel")
        batch = f"global batch {spread.global_batch}"
        return (
            f"{self.title}: {parameter_count(model):,} parameters, {model.layers} layers, hidden {model.hidden}, "
            f"vocabulary {model.vocab_size}, sequence {model.context}, {spread.precision}\n"
            f"{gigabytes(self.memory_nbytes)} per rank, transport {spread.transport}; {'; '.join([*how, batch])}"
        )

    def _table(self) -> str:
        (unit, scale), rows = self.unit, self.rows
        titles = [f"stage {row.spread.stage}{' *' if row is self.best else ''}" for row in rows]
        table: list[Cells] = [(f"{unit} per rank", titles)]
        for label, name in HELD:
            cells = [_cell(getattr(row.shares, name), scale) for row in rows]
            if name in ALWAYS or any(cell != "0.00" for cell in cells):
                of_states = STATE_TITLES[self.spread.optimizer]
                table.append((of_states if name == "optimizer" else label, cells))
        table += [
            (f"total, {unit}", [_cell(row.shares.total, scale) for row in rows]),
            ("fits", ["yes" if row.fits else "no" for row in rows]),
            ("checkpointed", ["yes" if row.spread.checkpointing else "no" for row in rows]),
            (f"sent per step, {unit}", ["" for _ in rows]),
        ]
        for name in SENT:
            wires: list[Wire] = [getattr(row.sent, name) for row in rows]
            for where, sizes in (
                ("in node", [wire.inside for wire in wires]),
                ("between", [wire.between for wire in wires]),
            ):
                if any(sizes):
                    table.append((f"  {name}, {where}", [_cell(size, scale) for size in sizes]))
        table += self._predicted()
        return "\n".join(
            (f"{label:<26}" + "".join(f"{cell:>12}" for cell in cells)).rstrip()
            for label, cells in table
        )

    def _predicted(self) -> list[Cells]:
        ranges = [row.prediction for row in self.rows if row.prediction is not None]
        if not ranges:
            return []
        found = [each.likely for each in ranges]
        times = (
            ("predicted step, s", [each.step_s for each in found]),
            ("  waiting for stages, s", [each.fill_s + each.messages_s for each in found]),
            ("  sums, exchanges, s", [each.sums_s + each.context_s for each in found]),
            ("  shards, replicas, s", [each.communication_s + each.replicas_s for each in found]),
        )
        cells = [(label, [f"{value:,.3g}" for value in values]) for label, values in times]
        return [*cells, *_speeds(ranges)]

    def _stages(self) -> str:
        """One line for each kind of pipeline stage, at the ZeRO stage that is recommended, else at the last."""
        row = self.best or self.rows[-1]
        spread, (unit, scale) = row.spread, self.unit
        lines = [("stages", "blocks", "parameters", "alive", f"held, {unit}", f"sent, {unit}")]
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
            lines.append(cells)
        title = (
            f"pipeline at stage {spread.stage}, one line for stages of a kind, the first of them:"
        )
        return "\n".join([title, *("".join(f"{cell:>14}" for cell in cells) for cells in lines)])

    def _sentence(self) -> str:
        best = self.best
        if best is None:
            return (
                f"Nothing fits: stage 3 needs {gigabytes(self.rows[-1].shares.total)} per rank, "
                f"{gigabytes(self.memory_nbytes)} are there; larger tensor or pipeline degrees, smaller micro-batches "
                "or more ranks need less."
            )
        why = "sends least between nodes"
        if best.prediction is not None:
            step_s = best.prediction.likely.step_s
            why = f"is the fastest that fits, {step_s:,.3g} s a step as predicted on {self.machine_title}"
        how = "with" if best.spread.checkpointing else "without"
        return (
            f"Use stage {best.spread.stage}, which {why}: {gigabytes(best.shares.total)} of "
            f"{gigabytes(self.memory_nbytes)} per rank {how} activation checkpointing.{self._alike()}"
        )

    def _alike(self) -> str:
        others = sorted((row for row in self.rows if row.fits and row is not self.best), key=_cost)
        rows = [row for row in (self.best, *others) if row is not None]
        ranges = [row.prediction for row in rows if row.prediction is not None]
        said = alike(ranges, [f"stage {row.spread.stage}" for row in rows])
        return f" {said}" if said else ""

    def as_json(self) -> dict[str, object]:
        """The report for programs: bytes, seconds, one object for each ZeRO stage."""
        spread, best = self.spread, self.best
        return {
            "model": self.title,
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
            "memory_nbytes": self.memory_nbytes,
            "recommended_stage": best.spread.stage if best else None,
            "stages": [row.as_json() for row in self.rows],
        }
