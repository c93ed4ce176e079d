"""``python -m hpczero.plan --calibrate RUN [RUN ...]``: a described machine with the numbers that runs on it show.

    python -m hpczero.plan --calibrate runs/x runs/y --machine dgx-h100 --out here.toml
    python -m hpczero.plan --model gpt-8b --ranks 64 --machine here.toml

It reads what a run leaves in its folder, config.toml and metrics.jsonl, and needs neither torch nor MPI.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from hpczero.errors import ConfigError
from hpczero.files.durable import write_text
from hpczero.files.regular import WHY, Explained
from hpczero.job.mesh import Mesh
from hpczero.models.config import BYTE_VOCAB, GPTConfig, flops_per_token
from hpczero.options.config import RunConfig
from hpczero.options.reading import load_toml, parse_command_line
from hpczero.plan.footprint import Named, fastest_transport
from hpczero.plan.sizing import Batch
from hpczero.predict.calibrated import Seen, calibrated, machine_toml
from hpczero.predict.job import Job
from hpczero.predict.machine import Machine, load_machine
from hpczero.run.results.folder import RunFolder
from hpczero.run.results.metrics import StepMetrics, read_metrics
from hpczero.run.starting.precheck import activations_of, model_config

FIRST = 2  # steps of a run that do not count: they allocate
LEAST_STEPS = 4
DEGREES = ("tensor", "pipeline", "context")
STANDSTILL = 3  # times the median: a step beside which the machine stood still, or saved


@dataclass(frozen=True)
class CalibrateOptions:
    """Which runs, of which machine.

    Attributes:
        runs: folders of runs on one or two nodes, without tensor, pipeline, context and offload; two of different width
            tell products from passes over memory.
        machine: what is known of their machine, as for the plan: a description that comes with hpczero, or a path.
        ranks_per_node: of the runs; left out, all ranks of a run were on one node.
        vocab: tokens of the runs' tokenizer; left out, 257 with bytes, else that of the preset.
        out: file of the machine, which the plan's --machine takes afterwards.
    """

    runs: tyro.conf.Positional[tuple[str, ...]]
    machine: str
    out: str
    ranks_per_node: int | None = None
    vocab: int | None = None

    def __post_init__(self) -> None:
        if not self.runs:
            raise ConfigError(
                "--calibrate: got no run, expected the folder of one, such as runs/default"
            )


def main(arguments: list[str]) -> int:
    """Write the machine, and print what has changed.

    Args:
        arguments: of the command line, without ``--calibrate``.
    """
    options = parse_command_line(
        CalibrateOptions,
        arguments,
        prog="python -m hpczero.plan --calibrate",
        description="Describe a machine by what measured steps of runs on it show.",
    )
    before = load_machine(options.machine)
    local = options.ranks_per_node
    seen = [seen_in(Path(run), before, local, options.vocab) for run in options.runs]
    local = max(each.job.ranks_per_node for each in seen)
    machine = dataclasses.replace(before, ranks_per_node=local)
    after = calibrated(machine, seen, source=f"measured: steps of {', '.join(options.runs)}")
    told = f"{options.out}: cannot be written ({WHY}); give --out another name"
    with Explained(ConfigError, told):
        write_text(Path(options.out), machine_toml(after))
    said = [f"{options.out}: {before.title} by {sum(len(each.computing_s) for each in seen)} steps"]
    for each in dataclasses.fields(Machine):
        old, new = (getattr(machine, each.name) for machine in (before, after))
        if each.name not in ("bounds", "sources") and old != new:
            low, high = after.bounds.get(each.name, (0, 0))
            spread = f", {low:.4g} to {high:.4g} by its steps" if high else ""
            said.append(f"  {each.name}: {old:.4g} -> {new:.4g}{spread}")
    sys.stdout.write("\n".join([*said, ""]))
    return 0


def seen_in(run: Path, machine: Machine, local: int | None, vocab: int | None) -> Seen:
    """What a run's folder says of its steps.

    Raises:
        ConfigError: the run is of a layout that does not tell enough, has too few steps, or another vocabulary.
    """
    folder = RunFolder(run)
    config = load_toml(folder.config, RunConfig)
    _refuse(run, config)
    try:
        steps = [step for step in read_metrics(folder.metrics) if step.step > FIRST]
    except FileNotFoundError as error:
        raise ConfigError(
            f"{run}: has no {folder.metrics.name}, so it is no folder of a run"
        ) from error
    # Of a run that went on with other ranks, the steps with the last ones.
    steps = [step for step in steps if math.isclose(_share(step), _share(steps[-1]), rel_tol=1e-3)]
    usual = sorted(step.step_ms for step in steps)[len(steps) // 2] if steps else 0.0
    steps = [step for step in steps if step.step_ms < STANDSTILL * usual]
    if len(steps) < LEAST_STEPS:
        raise ConfigError(
            f"{run}: got {len(steps)} step(s) after the first {FIRST}, expected at least {LEAST_STEPS}"
        )
    tokens = BYTE_VOCAB if config.data.tokenizer == "bytes" else None
    model = model_config(config.model)
    model = dataclasses.replace(model, vocab_size=vocab or tokens or model.vocab_size)
    return Seen(
        _job(run, config, model, steps[-1], machine, local),
        computing_s=[
            (step.forward_ms + step.backward_ms - step.communication_ms) / 1e3 for step in steps
        ],
        communication_s=[step.communication_ms / 1e3 for step in steps],
        update_s=[step.optimizer_ms / 1e3 for step in steps],
        beside_s=[
            (step.step_ms - step.forward_ms - step.backward_ms - step.optimizer_ms) / 1e3
            for step in steps
        ],
    )


def _refuse(run: Path, config: RunConfig) -> None:
    """Layouts in which waits are not told from computing, and models that are not sizes."""
    parallel, offload = config.parallel, config.offload
    rests = (offload.optimizer, offload.gradients, offload.parameters, config.activations.rest)
    wrong = {
        **{f"parallel.{name}": getattr(parallel, name) > 1 for name in DEGREES},
        "parallel.shard": parallel.shard != "world",
        "offload": any(on != "device" for on in rests),
        "model.factory": config.model.factory,
        "local.steps": config.local.steps,
    }
    if named := [name for name, found in wrong.items() if found]:
        raise ConfigError(
            f"{run}: was trained with {', '.join(named)}, expected a run of a GPT without any of these, whose parts "
            "say how fast products, memory and links are"
        )


def _share(step: StepMetrics) -> float:
    """Tokens for each TFLOP of one rank: as many times more as there are ranks."""
    return step.tokens_per_s / step.tflops


def _job(
    run: Path,
    config: RunConfig,
    model: GPTConfig,
    step: StepMetrics,
    machine: Machine,
    local: int | None,
) -> Job:
    on_host = step.device_peak_nbytes is None
    if on_host != machine.shares_memory:
        where, wanted = ("CPUs", "GPUs") if on_host else ("GPUs", "CPUs")
        raise ConfigError(
            f"{run}: was trained on {where}, and {machine.name} is a machine of {wanted}; give the --machine that it "
            "ran on"
        )
    ranks = _share(step) * flops_per_token(model) / 1e12
    world = round(ranks)
    if world < 1 or abs(ranks - world) > 1e-3 * world:
        raise ConfigError(
            f"{run}: its FLOP/s are of {ranks:.3f} ranks with a vocabulary of {model.vocab_size}, expected a whole "
            "number; give the --vocab of its tokenizer"
        )
    local = min(local or world, world)
    parallel, kept = config.parallel, activations_of(config)
    batch = Batch.resolve(config.train, world)
    transport: Named = (
        parallel.transport
        if parallel.transport != "auto"
        else fastest_transport(local, world // local, on_host=machine.shares_memory)
    )
    return Job(
        model,
        Mesh(shard=world),
        local,
        stage=parallel.stage,
        precision=parallel.precision,
        reduce=parallel.reduce,
        gather=parallel.gather,
        micro_batch=batch.micro_batch,
        accumulation=batch.accumulation,
        checkpointing=kept.checkpointing != "none",
        kept=kept,
        transport=transport,
        on_device=not machine.shares_memory,
        overlap=parallel.overlap,
        machine=machine,
    )
