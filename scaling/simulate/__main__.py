"""One training step of all ranks of a large job, simulated on one core.

    python -m scaling.simulate --model gpt-60b --machine dgx-h100 --ranks 400 --ranks_per_node 8 16
    python -m scaling.simulate --parallel.tensor 8 --parallel.pipeline 5 --accumulation 20 --stage 1

One rank of each kind is recorded by the real engine, without data; ``--every_rank`` records all. Ranks that would not
meet are named, and nothing is replayed.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import tyro

from hpczero.errors import ConfigError, run
from hpczero.models.config import PRESETS
from hpczero.options.config import LayoutOptions
from hpczero.plan.degrees import check_micro_batches, check_model
from hpczero.plan.spread import Spread
from hpczero.predict.job import Job
from hpczero.predict.machine import Machine, load_machine
from hpczero.predict.model import predict
from scaling.evidence.harness import Report, at_least, one_of, options_of, record, say
from scaling.evidence.record import Row, head_of, of_kind, run_row, where_and_when
from scaling.evidence.spread import table_of
from scaling.layouts.cases import spread_of

if TYPE_CHECKING:
    from scaling.simulate.programs import Origin, Program

GB = 1e9
SHORT = {
    "compute": "computes",
    "other ranks": "other ranks",
    "links between nodes": "links between",
    "links inside nodes": "inside",
    "sums and messages of the host": "sums, host",
    "other stages": "stages",
}


@dataclass(frozen=True)
class Options:
    """What to simulate.

    Attributes:
        model: a preset.
        context: tokens of a sample; left out, those of the preset.
        machine: name of a machine in hpczero/predict/machines, or the path of a file like them.
        ranks: of each job.
        ranks_per_node: each with each of the jobs; left out, those of the machine.
        stage: of ZeRO.
        precision: of parameters and activations.
        micro_batch: samples of one forward.
        accumulation: forwards of a step; the micro-batches of a pipeline.
        checkpointing: keep inputs of blocks alone, and compute the rest again.
        message_us: of the host, for each message to another node, microseconds.
        every_rank: record every rank, and not one of each kind.
        parallel: which ranks share what.
        results: folder of all machines' results; left out, scaling/results.
    """

    model: str = "gpt-60b"
    context: int | None = None
    machine: str = "dgx-h100"
    ranks: tuple[int, ...] = (400,)
    ranks_per_node: tuple[int, ...] = ()
    stage: int = 3
    precision: str = "bf16"
    micro_batch: int = 4
    accumulation: int = 1
    checkpointing: tyro.conf.UseCounterAction[int] = 0  # a bare --checkpointing
    message_us: float = 3.0
    every_rank: tyro.conf.UseCounterAction[int] = 0
    parallel: LayoutOptions = field(default_factory=LayoutOptions)
    results: str | None = None

    def __post_init__(self) -> None:
        # Steps in fp16 may be skipped.
        one_of(self, model=PRESETS, stage=range(4), precision=("fp32", "bf16"))
        at_least(self, micro_batch=1, accumulation=1)
        if not self.message_us >= 0:
            raise ConfigError(f"--message_us: got {self.message_us}, expected 0 or above")


def main() -> int:
    """Simulate, write the rows, print the tables."""
    options = options_of(Options, "simulate")
    machine = load_machine(options.machine)
    spreads = list(spreads_of(options, machine))  # refuses what cannot be, before all is built
    rows = rows_of(options, machine, spreads)
    record(f"simulate-{options.model}", options.results, rows, REPORT)
    return 0


def spreads_of(options: Options, machine: Machine) -> Iterator[Spread]:
    """All jobs. Raises ConfigError: ranks, nodes, degrees and model do not suit each other."""
    config, layout = PRESETS[options.model], options.parallel
    config = replace(config, context=options.context or config.context)
    layout.check(stage=options.stage)
    check_model(layout, config)
    check_micro_batches(layout, options.accumulation)
    names = ("stage", "precision", "micro_batch", "accumulation")
    same = {name: getattr(options, name) for name in names}
    same["checkpointing"] = bool(options.checkpointing)
    for ranks in options.ranks:
        for local in options.ranks_per_node or (machine.ranks_per_node,):
            if ranks < 1 or local < 1 or (ranks > local and ranks % local):
                raise ConfigError(
                    f"--ranks: got {ranks} with {local} on a node, expected whole nodes, or fewer than one"
                )
            yield spread_of(config, layout, ranks, local, on_host=False, **same)


def rows_of(options: Options, machine: Machine, spreads: Sequence[Spread]) -> Iterator[Row]:
    """All rows."""
    # Here and not at the top: this starts torch and MPI, which --help and bad options must not do.
    import torch

    torch.set_num_threads(1)
    names = "model precision micro_batch accumulation message_us"
    yield run_row(options, names, title=machine.title)
    for spread in spreads:
        yield {"kind": "job", **_simulated(options, machine, spread)}
        say("simulate", f"{spread.mesh.size:,} ranks, {spread.ranks_per_node} on a node: done")


def _simulated(options: Options, machine: Machine, spread: Spread) -> Row:
    """A job on a described machine: recorded, matched, replayed, and put beside the forecast.

    Raises:
        OrderError: ranks would not meet.
    """
    from scaling.simulate.engine import Recorded, Subject, record
    from scaling.simulate.programs import check, expanded
    from scaling.simulate.replay import Network, replay

    begin = time.perf_counter()
    subject = Subject(spread, options.parallel, machine)
    described = replace(machine, ranks_per_node=spread.ranks_per_node)
    recorded: list[Recorded] = []

    def one(rank: int) -> tuple[Program, Mapping[str, Origin]]:
        recorded.append(found := record(subject, rank))
        return found.program, found.origins

    programs = expanded(one, subject.places, every_rank=bool(options.every_rank))
    check(programs)
    network = Network.of(described, message_s=options.message_us / 1e6)
    outcome = replay(programs, subject.places, network)
    forecast = predict(Job.of(spread, described))
    nbytes, messages = recorded[0].planned
    return {
        "layout": spread.as_json(),
        "ranks": spread.mesh.size,
        "ranks_per_node": spread.ranks_per_node,
        "stage": spread.stage,
        "recorded": len(recorded),
        "planned_nbytes": nbytes,
        "planned_messages": messages,
        "calls": sum(1 for _ in programs[0].calls),
        **outcome.as_row(),
        "idle_s": [min(outcome.idle_s), max(outcome.idle_s)],
        "between_nbytes": max(outcome.between_nbytes),
        "messages": max(outcome.messages),
        "used": outcome.used,
        "foretold_s": forecast.step_s,
        "foretold_compute_s": forecast.forward_s + forecast.backward_s + forecast.update_s,
        "took_s": time.perf_counter() - begin,
        "peak_nbytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def text(rows: list[Row]) -> str:
    """Heading and tables; markdown."""
    head, jobs = head_of(rows), list(of_kind(rows, "job"))

    def name(row: Row) -> str:
        degrees = {name: degree for name, degree in row["layout"]["mesh"].items() if degree > 1}
        layout = " x ".join(f"{name} {degree}" for name, degree in degrees.items()) or "one rank"
        return f"{row['ranks']:,} x {row['ranks_per_node']}, {layout}, stage {row['stage']}"

    def idle(row: Row) -> str:
        least, most = (100 * seconds / row["step_s"] for seconds in row["idle_s"])
        return f"{least:.1f} to {most:.1f}"

    spent = {
        f"{short}, s": lambda row, what=what: f"{row['spent'][what]:.3f}"
        for what, short in SHORT.items()
    }
    shown = table_of(
        jobs,
        {
            "ranks x on a node, layout": name,
            "step, s": lambda row: f"{row['step_s']:.3f}",
            **spent,
            "idle, %": idle,
            "links carry, %": lambda row: f"{100 * row['links']:.0f}",
            "GB between, a rank": lambda row: f"{row['between_nbytes'] / GB:.2f}",
            "messages": lambda row: f"{row['messages']:,}",
            "binds": lambda row: row["binds"],
            "predicted, s": lambda row: f"{row['foretold_s']:.3f}",
        },
    )
    title = (
        f"{head['model']} on {head['title']}, {head['precision']}, micro-batch {head['micro_batch']}, "
        f"{head['accumulation']} forward(s) a step; a message costs its host {head['message_us']:g} us. Simulated, not "
        f"measured; {where_and_when(head)}"
    )
    notes = [
        f"{name(row)}: {row['recorded']} rank(s) recorded, {row['calls']:,} calls of one; {row['took_s']:.0f} s and "
        f"{row['peak_nbytes'] / GB:.1f} GB here; compute predicted {row['foretold_compute_s']:.3f} s"
        for row in jobs
    ]
    return "\n".join([title, "", shown, "", *notes])


REPORT = Report("A step of many ranks, simulated", text)

if __name__ == "__main__":
    run(main)
