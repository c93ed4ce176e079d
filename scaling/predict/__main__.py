"""What a step will take, on machines by their data sheets or on this host by its own measurement.

python -m scaling.predict --machine dgx-h100 --model gpt-60b --ranks 64 512 4096
python -m scaling.predict --paper          # the ZeRO paper's super-linear speed-up
python -m scaling.predict --published      # runs of other programs with tensor and pipeline parallelism
python -m scaling.predict --scale          # 400, 4,096 and 100,000 ranks, and the host's time
python -m scaling.predict --layouts 400    # the best layout of each machine
python -m scaling.predict --check          # measures this host, trains, compares
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from hpczero.errors import ConfigError, run
from hpczero.plan.footprint import Named, fastest_transport
from hpczero.plan.sizing import Fit, MachineSizes, fit
from hpczero.predict.job import Job
from hpczero.predict.machine import Machine, load_machine, machine_names
from hpczero.predict.model import Prediction, predict
from scaling.contenders.ranks import end_on_sigterm
from scaling.contenders.workload import find_model
from scaling.evidence.harness import at_least, options_of, record
from scaling.evidence.plot import Line, lines_figure
from scaling.evidence.record import cores
from scaling.evidence.spread import table_of


@dataclass(frozen=True)
class Options:
    """What to predict.

    Attributes:
        machine: a file in hpczero/predict/machines, a path to one like it, or host, which is measured first.
        model: a preset such as gpt-60b, or a workload such as gpt-8x512.
        ranks: numbers of ranks; efficiency is relative to the first.
        stage: of ZeRO.
        precision: of parameters and activations; on host always fp32.
        micro_batch: sequences of one forward; left out, as many as fit, at most 64.
        global_batch: strong scaling: sequences of all ranks; micro-batch and accumulation follow.
        checkpointing: a bare --checkpointing: always; otherwise only where not one sequence fits without.
        transport: flat, hierarchical, window (ranks of a node share memory), ipc (they read each other's device
            memory), or auto: what hpczero would take; on host always that.
        no_overlap: a bare --no_overlap: nothing is hidden between nodes.
        sources: a bare --sources: where the machine's numbers come from.
        paper: a bare --paper: the runs of the ZeRO paper, nothing else.
        published: a bare --published: runs of other programs in layouts that hpczero has, nothing else.
        scale: a bare --scale: gpt-60b at 400, 4,096 and 100,000 ranks, nothing else.
        layouts: the best layout of gpt-60b on so many ranks of each machine that comes with hpczero, nothing else.
        check: a bare --check: predict and measure on this host, in turn.
        workloads: of --check.
        rounds: of --check; from 6 on there is a 95 % interval.
        steps: of one turn of --check.
        results: folder of all machines' results of --check; left out, runs/scaling.
        json: a bare --json: one object for each line.
        plot: also draw the forecast or the paper's curve into this file (.png or .svg).
    """

    machine: str = "dgx-a100"
    model: str = "gpt-8b"
    ranks: tuple[int, ...] = (8, 16, 32, 64, 128, 256, 512, 1024)
    stage: Literal[0, 1, 2, 3] = 3
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    micro_batch: int | None = None
    global_batch: int | None = None
    checkpointing: tyro.conf.UseCounterAction[int] = 0
    transport: Literal["auto", "flat", "hierarchical", "window", "ipc"] = "auto"
    no_overlap: tyro.conf.UseCounterAction[int] = 0
    sources: tyro.conf.UseCounterAction[int] = 0
    paper: tyro.conf.UseCounterAction[int] = 0
    published: tyro.conf.UseCounterAction[int] = 0
    scale: tyro.conf.UseCounterAction[int] = 0
    layouts: int | None = None
    check: tyro.conf.UseCounterAction[int] = 0
    workloads: tuple[Literal["gpt-8x512", "gpt-12x768", "tiny"], ...] = ("gpt-8x512", "gpt-12x768")
    rounds: int = 6
    steps: int = 3
    results: str | None = None
    json: tyro.conf.UseCounterAction[int] = 0
    plot: str | None = None

    def __post_init__(self) -> None:
        at_least(self, ranks=1, micro_batch=1, global_batch=1, rounds=1, steps=1, layouts=1)
        if self.check and not self.workloads:
            raise ConfigError("--workloads: got nothing, expected at least one")


Forecast = tuple[Prediction, int, bool]  # largest micro-batch, whether it needs checkpointing
SETTINGS = ("ranks", "stage", "precision", "micro_batch", "accumulation", "checkpointing")
PARTS = ("step", "forward", "backward", "communication", "hidden", "host", "update")
MOST_SEQUENCES = 64  # where the batch is not given: more changes little, and no run would take it


def main() -> int:
    """Print a table. Exit code 1 if --check finds a point outside of its tolerance."""
    options = options_of(Options, "predict")
    if options.check:
        return check(options)
    sys.stdout.write(_answer(options))
    return 0


def _answer(options: Options) -> str:
    """What is printed; draws the plot that is asked for."""
    if options.paper:
        from scaling.predict import paper

        if options.plot:
            paper.draw_paper(Path(options.plot))
        return f"{paper.paper_text()}\n"
    if options.published:
        from scaling.predict.published import published_text

        return f"{published_text()}\n"
    if options.scale:
        from scaling.predict.scale import charges_text, steps

        return f"{charges_text(list(steps()))}\n"
    if options.layouts is not None:
        from scaling.predict.scale import layouts_text

        return f"{layouts_text(options.layouts)}\n"
    found = list(forecast(options))
    job = found[0][0].job
    if options.plot:
        title = f"{options.model}, stage {options.stage}, {job.machine.title}"
        draw_forecast(found, Path(options.plot), title=title)
    if options.json:
        return "".join(f"{json.dumps(as_json(*one))}\n" for one in found)
    batch = "fixed global batch" if options.global_batch else "fixed batch per rank or the largest"
    said = (
        f"{options.model} on {job.machine.title}, {job.precision}, {job.transport}; {batch}. A prediction, "
        f"nothing was run; assumptions: hpczero/predict/model.py.\n\n{forecast_table(found)}"
    )
    if not job.machine.message_host and options.machine != "host":
        said += f"\n{job.machine.name} has no message_host: what messages cost the host is not charged.\n"
    if options.sources:
        lines = (f"- {name}: {source}\n" for name, source in job.machine.sources.items())
        said += f"\n{''.join(lines)}"
    return said


def forecast(options: Options) -> Iterator[Forecast]:
    """The forecast for each number of ranks. Raises ConfigError: nothing fits, or the batch does not divide."""
    for ranks in options.ranks:
        job = job_of(options, ranks)
        most, checkpointed = largest_micro_batch(job)
        if not most:
            need = fit_of(job).needed_nbytes / 1e9
            raise ConfigError(
                f"{options.model} at stage {options.stage} on {ranks} ranks of {job.machine.name}: one sequence needs "
                f"{need:.1f} GB, a rank has {job.machine.usable / 1e9:.1f} GB; use more ranks, a higher --stage, or "
                "python -m hpczero.plan to see what fits"
            )
        job = dataclasses.replace(job, checkpointing=checkpointed)
        yield predict(_with_batch(job, options, most)), most, checkpointed


def _with_batch(job: Job, options: Options, most: int) -> Job:
    if options.global_batch is None:
        micro = options.micro_batch or min(most, MOST_SEQUENCES)
        if micro > most:
            fits = dataclasses.replace(job, checkpointing=True)
            if micro > largest_micro_batch(fits)[0]:
                raise ConfigError(
                    f"--micro_batch: got {micro}, at most {largest_micro_batch(fits)[0]} fit on {job.ranks} ranks"
                )
            return dataclasses.replace(fits, micro_batch=micro)
        return dataclasses.replace(job, micro_batch=micro)
    if options.global_batch % job.ranks:
        raise ConfigError(
            f"--global_batch: got {options.global_batch}, which {job.ranks} ranks do not divide"
        )
    mine = options.global_batch // job.ranks
    limit = min(most, options.micro_batch or most)
    micro = max(size for size in range(1, mine + 1) if mine % size == 0 and size <= limit)
    return dataclasses.replace(job, micro_batch=micro, accumulation=mine // micro)


def job_of(options: Options, ranks: int) -> Job:
    """What the options mean, with one sequence."""
    kernels, precision = None, options.precision
    machine: Machine
    transport: Named
    if options.machine == "host":
        from scaling.predict.check import probe_host
        from scaling.predict.host import host_machine

        if ranks > cores():
            raise ConfigError(
                f"--machine host: got {ranks} ranks, this host has {cores()} cores; name a machine of "
                f"{', '.join(machine_names())} for more"
            )
        kernels, precision = probe_host(ranks), "fp32"
        machine = host_machine(kernels, ranks)
        transport = "window" if ranks > 1 else "flat"  # what ``auto`` takes on one node
    else:
        machine = load_machine(options.machine, others=["host"])
        local = min(machine.ranks_per_node, ranks)
        taken = fastest_transport(local, ranks // local, on_host=machine.shares_memory)
        transport = taken if options.transport == "auto" else options.transport
    return Job.plain(
        find_model(options.model),
        machine,
        ranks,
        options.stage,
        precision,
        1,
        checkpointing=bool(options.checkpointing),
        transport=transport,
        overlap=not options.no_overlap,
        kernels=kernels,
    )


def check(options: Options) -> int:
    """Measure, write the rows, print the table, draw the plot."""
    from scaling.predict.check import REPORT, is_near, measure, points

    end_on_sigterm()
    ranks = [size for size in (1, 2) if size <= cores()]
    rounds = measure(options.workloads, ranks, (0, 3), rounds=options.rounds, steps=options.steps)
    rows = record("predict-host", options.results or "runs/scaling", rounds, REPORT)
    return 0 if all(is_near(turns) for turns in points(rows).values()) else 1


def fit_of(job: Job) -> Fit:
    """Bytes and the largest micro-batch of one forward a step, by the plan."""
    room = MachineSizes(
        job.ranks,
        job.machine.usable,
        local_size=job.shards.local,
        transport=job.transport,
        on_device=job.on_device,
    )
    return fit(job.model, job.plan, room, sequence=job.length, micro_batch=job.micro_batch)


def needed_nbytes(job: Job) -> int:
    """Bytes of a rank: states, buffers and activations, which are checkpointed if and only if the job says so."""
    return fit_of(job).memory.total + job.held(0).peak_nbytes()


def largest_micro_batch(job: Job) -> tuple[int, bool]:
    """(sequences, whether activations must be checkpointed) of the largest forward that fits; 0 if none does.

    It is without checkpointing if at least one sequence fits so, because to recompute costs a third.
    """
    found = fit_of(job)
    if found.micro_batch and not job.checkpointing:
        return found.micro_batch, False
    return found.micro_batch_checkpointed, True


def forecast_table(found: Sequence[Forecast]) -> str:
    """One line for each number of ranks; efficiency is tokens per second and rank over those of the first line.

    The host's time is that of messages and launches, hidden or not; compute is forward and backward.
    """
    first = found[0][0]
    base = first.tokens_per_s / first.job.ranks

    def of(say: Callable[[Prediction], str]) -> Callable[[Forecast], str]:
        return lambda one: say(one[0])

    def micro_batch(step: Prediction) -> str:
        job = step.job
        times = f" x {job.accumulation}" if job.accumulation > 1 else ""
        return f"{job.micro_batch}{times}{' ckpt' if job.checkpointing else ''}"

    return table_of(
        found,
        {
            "ranks": of(lambda step: f"{step.job.ranks:,}"),
            "stage": of(lambda step: str(step.job.stage)),
            "micro-batch": of(micro_batch),
            "largest": lambda one: f"{one[1]}{' ckpt' if one[2] else ''}",
            "step, s": of(lambda step: f"{step.step_s:.3f}"),
            "exposed": of(lambda step: f"{step.communication_s / step.step_s:.0%}"),
            "hidden, s": of(lambda step: f"{step.hidden_s:.3f}"),
            "host, s": of(lambda step: f"{step.host_s:.3f}"),
            "host / compute": of(lambda step: f"{step.host_s / step.computing_s:.1%}"),
            "update, ms": of(lambda step: f"{step.update_s * 1e3:.2f}"),
            "TFLOP/s/rank": of(lambda step: f"{step.tflops:.3g}"),
            "MFU": of(lambda step: f"{step.mfu:.0%}"),
            "efficiency": of(lambda step: f"{step.tokens_per_s / step.job.ranks / base:.0%}"),
            "GB/rank": of(lambda step: f"{needed_nbytes(step.job) / 1e9:.1f}"),
        },
    )


def draw_forecast(found: Sequence[Forecast], path: Path, *, title: str) -> None:
    """FLOP/s of a rank and of all ranks, over ranks, to ``path`` (PNG or SVG)."""
    from scaling.predict.paper import by_what

    ranks = {prediction.job.ranks: prediction for prediction, _, _ in found}
    first = found[0][0]
    whole = {float(n): p.tflops * n for n, p in ranks.items()}
    ideal = {float(n): first.tflops * n for n in ranks}
    panels = {
        "of one rank": [Line("predicted", {float(n): p.tflops for n, p in ranks.items()})],
        "of all ranks": [Line("predicted", whole), Line("ideal", ideal, ":", reference=True)],
    }
    figure = lines_figure(
        panels,
        title=f"PREDICTION, nothing was run. {title}\n{by_what()}",
        x="ranks",
        y="model TFLOP/s",
        from_zero=["of one rank"],
    )
    figure.savefig(path)


def as_json(prediction: Prediction, most: int, checkpointed: bool) -> dict[str, Any]:  # Any: JSON
    """A line for programs."""
    job = prediction.job
    return {
        "machine": job.machine.name,
        **{name: getattr(job, name) for name in SETTINGS},
        "largest_micro_batch": most,
        "largest_needs_checkpointing": checkpointed,
        **{f"{part}_s": getattr(prediction, f"{part}_s") for part in PARTS},
        **{name: getattr(prediction, name) for name in ("messages", "launches", "tokens_per_s")},
        "tflops_per_rank": prediction.tflops,
        "mfu": prediction.mfu,
        "needed_nbytes": needed_nbytes(job),
    }


if __name__ == "__main__":
    run(main)
