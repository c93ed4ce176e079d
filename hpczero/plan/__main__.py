"""The plan command: what fits, at which stage, with which micro-batch.

    python -m hpczero.plan --model gpt-60b --ranks 400 --ranks-per-node 16 --memory 32GB

Owns: its options and the table. Must not know: any formula (``sizing``), torch, MPI.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import tyro

from hpczero.errors import ConfigError, run
from hpczero.models.config import GPTConfig, parameter_count, parameter_shapes
from hpczero.models.presets import PRESETS
from hpczero.options import parse_command_line
from hpczero.plan.sizing import Fit, Machine, fewest_ranks, fit
from hpczero.regularfile import shown

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass(frozen=True)
class Options:
    """What to size.

    Attributes:
        memory: bytes one rank may use, such as 32GB or 80GiB; leave out what Python, torch and MPI take themselves.
        ranks: ranks that share the model: the world size.
        ranks_per_node: to show what a node needs.
        transport: flat counts messages between all ranks; hierarchical between nodes and inside them; ipc lets GPUs
            of a node read each other's memory, window shares the host's. The last three need the ranks per node; one
            node of all ranks is meant without.
        model: a preset, such as gpt2-xl or gpt-60b.
        layers: transformer blocks; given beside a preset, this and the next three replace its values.
        hidden: width of the residual stream.
        heads: attention heads; they change no byte, but must divide the width.
        vocab: token ids; 50257 (GPT-2) without a preset.
        sequence: tokens per sample; None: the context of the preset, 1024 without one.
        precision: of parameters, activations and the wire; masters and sums are fp32 in any case.
        micro_batch: samples per rank and forward that must fit.
        stage: the stage that must fit; given, the command ends with 78 where it does not.
        json: print one JSON object instead of a table; bytes are whole numbers.
    """

    memory: str
    ranks: int
    ranks_per_node: int | None = None
    transport: Literal["flat", "hierarchical", "ipc", "window"] = "flat"
    model: str | None = None
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    vocab: int | None = None
    sequence: int | None = None
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    micro_batch: int = 1
    stage: Literal[0, 1, 2, 3] | None = None
    json: tyro.conf.UseCounterAction[int] = 0  # a bare --json; a bool would be --json true


@dataclass(frozen=True)
class Report:
    """All that is printed, before it is formatted."""

    title: str
    config: GPTConfig
    sequence: int
    machine: Machine
    ranks_per_node: int | None
    transport: str
    precision: str
    micro_batch: int
    fits: tuple[Fit, ...]
    recommendation: str

    @property
    def best(self) -> Fit | None:
        """The smallest stage that fits: lower stages communicate less and are simpler."""
        return next((row for row in self.fits if row.fits), None)


def main() -> int:
    """Print the table; exit code 0 also where nothing fits: an answer, and an error only of a --stage that must.

    Raises:
        ConfigError: the stage that was asked for does not fit; says what would.
    """
    options = parse_command_line(
        Options,
        sys.argv[1:],
        prog="python -m hpczero.plan",
        description="Bytes per rank at every ZeRO stage, what fits, and the largest micro-batch. "
        "Nothing is built or communicated.",
        default=Options(memory=tyro.MISSING, ranks=tyro.MISSING),
    )
    report = build_report(options)
    if options.json:
        sys.stdout.write(f"{json.dumps(as_json(report), indent=2)}\n")
    elif sys.stdout.isatty():
        _write_rich(report)
    else:
        sys.stdout.write(as_text(report))
    if options.stage is not None and not report.fits[options.stage].fits:
        needed = _gb(report.fits[options.stage].needed_nbytes)
        raise ConfigError(
            f"--stage {options.stage} with micro-batch {options.micro_batch} needs {needed} per rank, and "
            f"{_gb(report.machine.memory_nbytes)} are there. {report.recommendation}"
        )
    return 0


def build_report(options: Options) -> Report:
    """Check the options and size every stage.

    Raises:
        ConfigError: a value that cannot be.
    """
    for name in ("ranks", "ranks_per_node", "sequence", "micro_batch"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')}: got {value}, expected at least 1")
    per_node = options.ranks_per_node
    if per_node is not None and options.ranks % per_node:
        raise ConfigError(
            f"--ranks-per-node: got {per_node}, which does not divide --ranks {options.ranks}; "
            f"expected whole nodes, e.g. --ranks {-(-options.ranks // per_node) * per_node}"
        )
    config = choose_config(options)
    sequence = options.sequence or config.context
    machine = Machine(
        options.ranks,
        parse_nbytes(options.memory),
        local_size=None if options.transport == "flat" else per_node or options.ranks,
        shares_memory=options.transport == "window",
        pulls=options.transport == "ipc",
    )

    def size(stage: int, ranks: int) -> Fit:
        return fit(
            config,
            parameter_shapes(config),
            dataclasses.replace(machine, ranks=ranks),
            stage=stage,
            precision=options.precision,
            sequence=sequence,
            micro_batch=options.micro_batch,
        )

    fits = tuple(size(stage, machine.ranks) for stage in range(4))
    report = Report(
        title=options.model or "custom model",
        config=config,
        sequence=sequence,
        machine=machine,
        ranks_per_node=per_node,
        transport=options.transport,
        precision=options.precision,
        micro_batch=options.micro_batch,
        fits=fits,
        recommendation="",
    )
    return dataclasses.replace(report, recommendation=recommend(report, lambda n: size(3, n)))


def choose_config(options: Options) -> GPTConfig:
    """The preset, with every size that was given put in its place; or a model from sizes alone.

    Raises:
        ConfigError: unknown preset, missing or impossible sizes.
    """
    given = {
        "layers": options.layers,
        "hidden": options.hidden,
        "heads": options.heads,
        "vocab_size": options.vocab,
    }
    # Any: the fields of GPTConfig have several types
    sizes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if options.model is None:
        missing = [name for name in ("layers", "hidden") if name not in sizes]
        if missing:
            raise ConfigError(
                f"no model: give --model ({', '.join(PRESETS)}), or --layers and --hidden; "
                f"missing: {', '.join(f'--{name}' for name in missing)}"
            )
        sizes = {"vocab_size": 50257, "heads": 1, "context": options.sequence or 1024} | sizes
    elif options.model not in PRESETS:
        raise ConfigError(
            f"--model: got {shown(options.model)}, expected one of {', '.join(PRESETS)}"
        )
    try:
        if options.model is None:
            return GPTConfig(**sizes)
        config = dataclasses.replace(PRESETS[options.model], **sizes)
        if options.sequence and options.sequence > config.context:
            config = dataclasses.replace(
                config, context=options.sequence
            )  # a longer position table
        return config
    except ValueError as error:
        raise ConfigError(str(error)) from error


def parse_nbytes(text: str) -> int:
    """``32GB`` (decimal) or ``80GiB`` (binary) as bytes; ``32G`` is refused because it could be either.

    Raises:
        ConfigError: not a size, or zero.
    """
    match = re.fullmatch(
        r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*((?:[KMGT]i?)?B)", text.strip(), re.IGNORECASE
    )
    nbytes = int(float(match.group(1)) * _UNITS[match.group(2).upper()]) if match else 0
    if nbytes == 0:
        raise ConfigError(
            f"--memory: got {shown(text)}, expected a size above zero with its unit, such as 32GB or 80GiB"
        )
    return nbytes


def recommend(report: Report, stage3: Callable[[int], Fit]) -> str:
    """One sentence: what to use, or what is missing.

    Args:
        report: everything but the recommendation.
        stage3: stage 3 at another number of ranks.
    """
    memory, best = report.machine.memory_nbytes, report.best
    if best is not None:
        plain, checkpointed = best.micro_batch, best.micro_batch_checkpointed
        how = "without" if plain >= report.micro_batch else "with"
        most = f"up to micro-batch {plain} without it and {checkpointed} with it"
        if plain == 0:
            most = f"up to micro-batch {checkpointed} with it, none without"
        return (
            f"Use stage {best.stage}, the smallest that fits: {_gb(best.needed_nbytes)} of {_gb(memory)} per rank "
            f"at micro-batch {report.micro_batch} {how} activation checkpointing; {most}."
        )
    last = report.fits[-1]
    short = (
        f"Nothing fits: stage 3 needs {_gb(last.needed_nbytes)} per rank, {_gb(memory)} are there"
    )
    if last.micro_batch_checkpointed:
        return f"{short}; use micro-batch {last.micro_batch_checkpointed} or less."
    ranks = fewest_ranks(lambda n: stage3(n).fits, report.machine.ranks)
    if ranks is not None:
        return f"{short}; from {ranks} ranks on it fits."
    return f"{short}, and no number of ranks helps: use shorter sequences, narrower blocks or more memory."


def rows(report: Report) -> list[tuple[str, list[str]]]:
    """The table: a name and one cell for each stage. Bytes are per rank, in the unit of ``table_unit``."""
    unit, scale = table_unit(report)

    def nbytes(label: str, value: Callable[[Fit], float]) -> tuple[str, list[str]]:
        cells = [value(row) / scale for row in report.fits]
        return label, [f"{cell:,.2f}" if cell < 1000 else f"{cell:,.0f}" for cell in cells]

    def words(label: str, value: Callable[[Fit], object]) -> tuple[str, list[str]]:
        return label, [str(value(row)) for row in report.fits]

    return [
        nbytes("parameters", lambda row: row.memory.parameters),
        nbytes("master", lambda row: row.memory.master),
        nbytes("gradients", lambda row: row.memory.gradients),
        nbytes("optimizer (Adam)", lambda row: row.memory.optimizer),
        nbytes("unsharded, peak", lambda row: row.memory.unsharded),
        nbytes("exchange buffer", lambda row: row.memory.exchange),
        nbytes(f"total, {unit}", lambda row: row.memory.total),
        nbytes("paper's 2+2+12 bytes", lambda row: row.ideal_nbytes),
        nbytes(f"with micro-batch {report.micro_batch}", lambda row: row.needed_nbytes),
        words("fits", lambda row: "yes" if row.fits else "no"),
        words("largest micro-batch", lambda row: row.micro_batch or "-"),
        words("  checkpointed", lambda row: row.micro_batch_checkpointed or "-"),
        nbytes(f"sent per step, {unit}", lambda row: row.traffic.nbytes),
    ]


def header(report: Report) -> str:
    """Two lines: the model, the machine."""
    config, machine = report.config, report.machine
    nodes = ""
    if report.ranks_per_node is not None:
        node_nbytes = machine.memory_nbytes * report.ranks_per_node
        nodes = (
            f" on {machine.ranks // report.ranks_per_node} nodes of {report.ranks_per_node} "
            f"({_gb(node_nbytes)} per node)"
        )
    return (
        f"{report.title}: {parameter_count(config):,} parameters, {config.layers} layers, hidden {config.hidden}, "
        f"vocabulary {config.vocab_size}, sequence {report.sequence}, {report.precision}\n"
        f"{machine.ranks} ranks{nodes}, {_gb(machine.memory_nbytes)} per rank, transport {report.transport}"
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


def _write_rich(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table()
    table.add_column(f"{table_unit(report)[0]} per rank")
    for row, title in zip(report.fits, stage_titles(report), strict=True):
        style = "bold green" if row is report.best else ("dim" if not row.fits else "")
        table.add_column(title, justify="right", style=style, no_wrap=True)
    for label, cells in rows(report):
        table.add_row(label, *cells, end_section=label.startswith(("exchange", "paper", "  ")))
    console.print(header(report))
    console.print(table)
    console.print(report.recommendation)


def as_json(report: Report) -> dict[str, object]:
    """The report for machines: bytes, one object for each stage."""
    return {
        "model": report.title,
        "parameters": parameter_count(report.config),
        "config": dataclasses.asdict(report.config),
        "sequence": report.sequence,
        "precision": report.precision,
        "ranks": report.machine.ranks,
        "ranks_per_node": report.ranks_per_node,
        "transport": report.transport,
        "memory_nbytes": report.machine.memory_nbytes,
        "micro_batch": report.micro_batch,
        "recommended_stage": report.best.stage if report.best else None,
        "recommendation": report.recommendation,
        "stages": [_stage_json(row) for row in report.fits],
    }


def _stage_json(row: Fit) -> dict[str, object]:
    memory, traffic = dataclasses.asdict(row.memory), dataclasses.asdict(row.traffic)
    return {
        **dataclasses.asdict(row),
        "memory": {**memory, "states": row.memory.states, "total": row.memory.total},
        "traffic": {**traffic, "numel": row.traffic.numel, "nbytes": row.traffic.nbytes},
    }


def table_unit(report: Report) -> tuple[str, int]:
    """MB for small models, GB as in the paper for others."""
    largest = max(row.needed_nbytes for row in report.fits)
    return ("GB", 10**9) if largest >= 10**9 else ("MB", 10**6)


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:,.1f} MB"


if __name__ == "__main__":
    run(main)
