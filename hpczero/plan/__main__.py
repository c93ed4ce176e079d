"""The plan command: what fits, at which stage, with which micro-batch.

python -m hpczero.plan --model gpt-60b --ranks 400 --ranks-per-node 16 --memory 32GB
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tyro

from hpczero.errors import ConfigError, run
from hpczero.files.regular import parse_json, read_text, shown
from hpczero.models.config import DECODERS, PRESETS, DecoderConfig, GPTConfig, parameter_shapes
from hpczero.options.config import LayoutOptions, PlannedModel
from hpczero.options.reading import parse_command_line
from hpczero.plan.degrees import check_micro_batches, check_model, mesh_of
from hpczero.plan.footprint import Named, fastest_transport
from hpczero.plan.memory import STATE_BYTES
from hpczero.plan.offload import Activations
from hpczero.plan.plan import Plan
from hpczero.plan.precision import Precision
from hpczero.plan.sizing import Fit, MachineSizes, blockwise_plan, fit
from hpczero.plan.spread import Spread
from hpczero.predict.answer import LayoutReport, PlanReport, StageRow, recommend
from hpczero.predict.job import Job
from hpczero.predict.machine import Machine as Described
from hpczero.predict.machine import load_machine
from hpczero.predict.model import StepRange, predict

CONFIG_NBYTES = 2**22
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass(frozen=True, kw_only=True)
class PlanOptions(PlannedModel):
    """What to size.

    Attributes:
        memory: bytes one rank may use, such as 32GB or 80GiB, without what Python, torch and MPI take themselves;
            left out, that of --machine.
        ranks: ranks that share the model: the world size.
        ranks_per_node: left out, those of --machine, or one node of all ranks.
        machine: a description that comes with hpczero, such as dgx-h100, or a path to one like it: predicts the time
            of a step.
        device: where the model is, for the transport; left out, that of --machine, or cpu.
        transport: flat counts messages between all ranks; hierarchical between nodes and inside them; ipc lets GPUs
            of a node read each other's memory, window shares the host's; auto: what training takes.
        model: a preset, such as gpt2-xl or gpt-60b; or a folder of transformers with a config.json, or that file: its
            weights are not read; activations and times are estimated of llama, mistral, mixtral, qwen2, qwen3.
        optimizer: adamw, as training takes; adamw8bit: hpczero.optim.AdamW8bit of a program of your own, 2.125 bytes of
            state for each element instead of 8.
        micro_batch: samples per rank and forward that must fit.
        checkpointing: what is computed again where activations do not fit otherwise: block, all but a block's input; or
            selective, all but products and attention.
        accumulation: forwards of a step; with more than one, whole gradients of each rank wait for the last.
        stage: the stage that must fit; given, the command ends with 78 where it does not.
        json: print one JSON object instead of a table; bytes are whole numbers.
        parallel: which ranks share what; with any of these the answer is of that layout alone.
        auto: choose the settings that train fastest, by a probe of this machine or by --machine; it has options of its
            own: --auto --help.
        calibrate: give a --machine the numbers that measured steps of runs on it show; it has options of its own:
            --calibrate --help.
    """

    ranks: int
    memory: str | None = None
    ranks_per_node: int | None = None
    machine: str | None = None
    device: Literal["cpu", "cuda"] | None = None
    transport: Literal["auto", "flat", "hierarchical", "ipc", "window"] = "auto"
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    micro_batch: int = 1
    checkpointing: Literal["block", "selective"] = "block"
    accumulation: int = 1
    stage: Literal[0, 1, 2, 3] | None = None
    parallel: LayoutOptions = field(default_factory=LayoutOptions)
    json: tyro.conf.UseCounterAction[int] = 0  # a bare --json; a bool would be --json true
    auto: tyro.conf.UseCounterAction[int] = 0
    calibrate: tyro.conf.UseCounterAction[int] = 0


def main() -> int:
    """Print the table. The exit code is 0 even if nothing fits: that is an answer, unless a --stage was given.

    Raises:
        ConfigError: the stage that was given does not fit; the message says what would.
    """
    if "--auto" in sys.argv[1:]:
        from hpczero.plan.auto import main as choose  # the planner, which others do without

        return choose([word for word in sys.argv[1:] if word != "--auto"], choose_config)
    if "--calibrate" in sys.argv[1:]:
        from hpczero.plan.calibrate import main as calibrate  # reads runs, which others do without

        return calibrate([word for word in sys.argv[1:] if word != "--calibrate"])
    options = parse_command_line(
        PlanOptions,
        sys.argv[1:],
        prog="python -m hpczero.plan",
        description="Bytes per rank at every ZeRO stage, what fits, and the largest micro-batch. "
        "Nothing is built or communicated.",
        default=PlanOptions(ranks=tyro.MISSING),
    )
    report = layout_report(options) if options.parallel.changed else build_report(options)
    text = f"{json.dumps(report.as_json(), indent=2)}\n" if options.json else report.as_text()
    sys.stdout.write(text)
    if options.stage is not None:
        report.check(options.stage)
    return 0


def _device(options: PlanOptions, described: Described | None) -> str:
    return options.device or ("cpu" if described is None or described.shares_memory else "cuda")


def _where(options: PlanOptions) -> tuple[Described | None, int | None]:
    """(the described machine, ranks per node) of the options, checked.

    Raises:
        ConfigError: an option has an impossible value.
    """
    for name in ("ranks", "ranks_per_node", "sequence", "micro_batch", "accumulation"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')}: got {value}, expected at least 1")
    if options.machine is not None and options.optimizer != "adamw":
        raise ConfigError(
            f"--machine: the time of a step with --optimizer {options.optimizer} is not known; give --memory and "
            "--ranks-per-node instead, which give bytes"
        )
    described = None if options.machine is None else load_machine(options.machine)
    per_node = options.ranks_per_node
    if per_node is None and described is not None:
        per_node = min(described.ranks_per_node, options.ranks)
    if per_node is not None and options.ranks % per_node:
        raise ConfigError(
            f"--ranks-per-node: got {per_node}, which does not divide --ranks {options.ranks}; "
            f"expected whole nodes, e.g. --ranks {-(-options.ranks // per_node) * per_node}"
        )
    return described, per_node


def build_report(options: PlanOptions) -> PlanReport:
    """Check the options and size every stage.

    Raises:
        ConfigError: an option has an impossible value.
    """
    described, per_node = _where(options)
    config, plan_of = choose_plans(options)
    sequence = options.sequence or (1 if config is None else config.context)
    device = _device(options, described)
    machine = MachineSizes(
        options.ranks,
        choose_memory(options, described),
        local_size=per_node or options.ranks,
        transport=choose_transport(options, per_node or options.ranks, device),
        on_device=device != "cpu",
    )

    def size(stage: int, ranks: int) -> Fit:
        return fit(
            config,
            plan_of(ranks, stage),
            dataclasses.replace(machine, ranks=ranks, local_size=per_node or ranks),
            sequence=sequence,
            micro_batch=options.micro_batch,
            accumulation=options.accumulation,
            optimizer_bytes=STATE_BYTES[options.optimizer],
            kept=Activations(options.checkpointing),
        )

    def step(row: Fit, config: GPTConfig, on: Described) -> StepRange:
        job = Job.plain(
            dataclasses.replace(config, context=sequence),
            on,
            options.ranks,
            row.stage,
            options.precision,
            options.micro_batch,
            ranks_per_node=machine.local_size,
            reduce=options.reduce,
            accumulation=options.accumulation,
            checkpointing=row.micro_batch < options.micro_batch,
            kept=Activations(options.checkpointing),
            transport=machine.transport,
        )
        return StepRange.around(predict(job))

    fits = tuple(size(stage, machine.ranks) for stage in range(4))
    report = PlanReport(
        title=options.model or "custom model",
        config=config,
        numel=plan_of(1, 0).numel,
        sequence=sequence,
        machine=machine,
        ranks_per_node=per_node,
        precision=options.precision,
        optimizer=options.optimizer,
        micro_batch=options.micro_batch,
        fits=fits,
        recommendation="",
        device=device,
        machine_title="" if described is None else described.title,
        predictions=tuple(step(row, config, described) for row in fits)
        if described and config
        else (),
    )
    return dataclasses.replace(report, recommendation=recommend(report, lambda n: size(3, n)))


def layout_report(options: PlanOptions) -> LayoutReport:
    """Check the options and size their layout at every stage.

    Raises:
        ConfigError: an option has an impossible value; the degrees do not suit each other, the ranks, the nodes or the
            model.
    """
    described, per_node = _where(options)
    local = per_node or options.ranks
    config = choose_config(options)
    device, room = _device(options, described), choose_memory(options, described)
    parallel = options.parallel
    parallel.check(stage=3 if options.stage is None else options.stage)
    config = dataclasses.replace(config, context=options.sequence or config.context)
    check_model(parallel, config)
    check_micro_batches(parallel, options.accumulation)
    spread = Spread(
        config,
        mesh_of(parallel, options.ranks, local),
        local,
        precision=options.precision,
        reduce=options.reduce,
        micro_batch=options.micro_batch,
        accumulation=options.accumulation,
        sequence_parallel=parallel.sequence,
        schedule=parallel.order,
        interleave=parallel.interleave,
        on_device=device != "cpu",
        optimizer=options.optimizer,
        kept=Activations(options.checkpointing),
    )
    shards = spread.shards
    transport = choose_transport(options, shards.local, device, nodes=shards.nodes)
    rows = []
    for stage in range(4):
        row = dataclasses.replace(
            spread, stage=stage, secondary=parallel.secondary and stage == 3, transport=transport
        )
        if row.needed_nbytes > room:
            row = dataclasses.replace(row, checkpointing=True)
        found = StepRange.around(predict(Job.of(row, described))) if described else None
        rows.append(StageRow(row, row.needed_nbytes <= room, found))
    title = "" if described is None else described.title
    return LayoutReport(options.model or "custom model", room, tuple(rows), title)


def choose_transport(
    options: PlanOptions, local_size: int, device: str, *, nodes: int | None = None
) -> Named:
    """The transport that was given, or the one that training would take.

    Raises:
        ConfigError: it is for memory that the named device does not have.
    """
    if options.transport != "auto":
        wrong = {"window": "cuda", "ipc": "cpu"}.get(options.transport)
        if wrong == device and (options.device or options.machine):
            raise ConfigError(
                f"--transport: got {options.transport}, which is not for {device}; expected auto, "
                f"{'ipc' if device == 'cuda' else 'window'}, hierarchical or flat"
            )
        return options.transport
    nodes = nodes or options.ranks // local_size
    return fastest_transport(local_size, nodes, on_host=device == "cpu")


def choose_memory(options: PlanOptions, described: Described | None) -> int:
    """Bytes of memory of one rank.

    Raises:
        ConfigError: neither an option nor the machine's description has it.
    """
    if options.memory is not None:
        return parse_nbytes(options.memory)
    if described is None:
        raise ConfigError(
            "--memory: got nothing, expected what one rank may use, such as 32GB, or a --machine that says so"
        )
    return described.usable


def choose_plans(options: PlanOptions) -> tuple[GPTConfig | None, Callable[[int, int], Plan]]:
    """(sizes of a GPT, None for a model of transformers; the plan over so many ranks at a stage).

    Raises:
        ConfigError: as ``choose_config``; or the folder's config.json cannot be used.
    """
    precision = Precision.of(options.precision, reduce=options.reduce)
    file = _config_json(options.model)
    if file is None or _decoder_in(file) is not None:
        config = choose_config(options)
        shapes = list(parameter_shapes(config))
        return config, lambda ranks, stage: blockwise_plan(
            shapes, num_shards=ranks, stage=stage, precision=precision
        )
    from hpczero.hf.building import (
        ModelChoice,
        build,  # torch and transformers take seconds to import
        of_folder,
    )
    from hpczero.plan.rules import default_rule

    _refuse_sizes(options, file, "sequence")
    model = build(lambda: of_folder(file.parent, ModelChoice()), seed=0)
    return None, lambda ranks, stage: Plan.build(
        model, num_shards=ranks, stage=stage, precision=precision, rule=default_rule
    )


def _config_json(model: str | None) -> Path | None:
    """The file that describes a model of transformers; None where a preset or sizes are meant."""
    named = Path(model or "")
    file = named if named.name == "config.json" else named / "config.json"
    return file if model and model not in PRESETS and os.path.exists(file) else None


def _decoder_in(file: Path) -> DecoderConfig | None:
    """The sizes of a decoder that is counted here; None of another model, which transformers has to build."""
    try:
        found = parse_json(read_text(file, CONFIG_NBYTES))
    except (OSError, ValueError):  # transformers says what is wrong
        return None
    if not isinstance(found, dict) or found.get("model_type") not in DECODERS:
        return None
    try:
        return DecoderConfig.from_hugging_face(found)
    except ValueError as error:
        raise ConfigError(f"{file}: {error}") from error


def _refuse_sizes(options: PlannedModel, file: Path, *more: str) -> None:
    sizes = ("layers", "hidden", "heads", "vocab", "positions", *more)
    if given := [name for name in sizes if getattr(options, name) is not None]:
        raise ConfigError(
            f"--{given[0]}: is not for a model of transformers, whose sizes are those of {file}"
        )


def choose_config(options: PlannedModel) -> GPTConfig:
    """The preset with every given size replaced, a decoder of transformers, or a model from sizes alone.

    Args:
        options: of this command, or of ``--auto``: both name sizes alike.

    Raises:
        ConfigError: the preset is unknown, or sizes are missing or impossible.
    """
    file = _config_json(options.model)
    if file is not None and (decoder := _decoder_in(file)) is not None:
        _refuse_sizes(options, file)
        longest = max(options.sequence or 0, decoder.context)
        return dataclasses.replace(decoder, context=longest)
    names = {"vocab": "vocab_size"} | {n: n for n in ("layers", "hidden", "heads", "positions")}
    given = {theirs: getattr(options, ours) for ours, theirs in names.items()}
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
        of_factory = ":" in options.model and (
            ", because nothing is built here, as a model of --model.factory would have to be; hpczero.train tells in "
            "its first lines what such a run holds; expected a preset:"
        )
        near = difflib.get_close_matches(options.model, PRESETS, n=2, cutoff=0.4)
        meant = f"; did you mean {' or '.join(near)}?" if near and not of_factory else ""
        raise ConfigError(
            f"--model: got {shown(options.model)}{of_factory or ', expected one of'} {', '.join(PRESETS)}, or a folder "
            f"of transformers with a config.json (without --auto and --parallel){meant}"
        )
    try:
        if options.model is None:
            return GPTConfig(**sizes)
        config = dataclasses.replace(PRESETS[options.model], **sizes)
        if options.sequence and options.sequence > config.context:
            # A longer position table.
            config = dataclasses.replace(config, context=options.sequence)
        return config
    except ValueError as error:
        raise ConfigError(str(error)) from error


def parse_nbytes(text: str) -> int:
    """``32GB`` (decimal) or ``80GiB`` (binary) as bytes; ``32G`` is refused because it could be either.

    Raises:
        ConfigError: it is not a size, or zero.
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


if __name__ == "__main__":
    run(main)
