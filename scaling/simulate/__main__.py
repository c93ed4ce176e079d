"""One training step of all ranks of a large job, simulated on one core.

    python -m scaling.simulate --model gpt-60b --machine dgx-h100 --ranks 400 --ranks_per_node 8 16
    python -m scaling.simulate --parallel.tensor 8 --parallel.pipeline 5 --accumulation 20 --stage 1

Owns: the options. Must not know: how a job is simulated (`job`), the report. One rank of each kind is recorded by the
real engine, without data; ``--every_rank`` records all. Ranks that would not meet are named, and nothing is replayed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import tyro

from hpczero.errors import ConfigError, run
from hpczero.models.config import PRESETS
from hpczero.options.config import LayoutOptions
from hpczero.options.reading import parse_command_line
from hpczero.plan.degrees import check_micro_batches, check_model, mesh_of
from hpczero.plan.footprint import fastest_transport
from hpczero.plan.spread import Spread
from hpczero.predict.machine import Machine, load_machine
from scaling.evidence.record import Recorder, Row, circumstances, path_of
from scaling.simulate.report import text

if TYPE_CHECKING:
    from scaling.simulate.engine import Subject


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
        if self.model not in PRESETS:
            raise ConfigError(f"--model: got {self.model!r}, expected one of {', '.join(PRESETS)}")
        if self.stage not in range(4):
            raise ConfigError(f"--stage: got {self.stage}, expected 0, 1, 2 or 3")
        if self.precision not in ("fp32", "bf16"):
            raise ConfigError(
                f"--precision: got {self.precision!r}, expected fp32 or bf16, whose steps none is skipped of"
            )
        for name in ("micro_batch", "accumulation"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name}: got {getattr(self, name)}, expected at least 1")
        if not self.message_us >= 0:
            raise ConfigError(f"--message_us: got {self.message_us}, expected 0 or above")


def main() -> int:
    """Simulate, write the rows, print the tables."""
    options = parse_command_line(
        Options,
        sys.argv[1:],
        prog="python -m scaling.simulate",
        description="A step of all ranks of a large job, recorded by the real engine and replayed on a network.",
        default=Options(),
    )
    machine = load_machine(options.machine)
    subjects = list(
        subjects_of(options, machine)
    )  # refuses what cannot be, before anything is built
    with Recorder(path_of(f"simulate-{options.model}", options.results)) as recorder:
        for row in rows_of(options, machine, subjects):
            recorder.write(row.pop("kind"), row)
    sys.stdout.write(f"{text(recorder.rows)}\nrows in {recorder.path}\n")
    return 0


def subjects_of(options: Options, machine: Machine) -> Iterator[tuple[Spread, LayoutOptions]]:
    """All jobs.

    Raises:
        ConfigError: ranks, nodes, degrees and model do not suit each other.
    """
    config, layout = PRESETS[options.model], options.parallel
    config = replace(config, context=options.context or config.context)
    layout.check(stage=options.stage)
    check_model(layout, config)
    check_micro_batches(layout, options.accumulation)
    for ranks in options.ranks:
        for local in options.ranks_per_node or (machine.ranks_per_node,):
            if ranks < 1 or local < 1 or (ranks > local and ranks % local):
                raise ConfigError(
                    f"--ranks: got {ranks} with {local} on a node, expected whole nodes, or fewer than one"
                )
            spread = Spread(
                config,
                mesh_of(layout, ranks, local),
                local,
                stage=options.stage,
                precision=options.precision,
                micro_batch=options.micro_batch,
                accumulation=options.accumulation,
                checkpointing=bool(options.checkpointing),
                sequence_parallel=layout.sequence,
                secondary=layout.secondary,
                schedule=layout.order,
                interleave=layout.interleave,
            )
            shards = spread.shards
            transport = fastest_transport(shards.local, shards.nodes, on_host=False)
            yield replace(spread, transport=transport), layout


def rows_of(
    options: Options, machine: Machine, spreads: list[tuple[Spread, LayoutOptions]]
) -> Iterator[Row]:
    """All rows."""
    # Here and not at the top: these start torch and MPI, which --help and bad options must not do.
    import torch

    from scaling.simulate.engine import Subject
    from scaling.simulate.job import row_of

    torch.set_num_threads(1)
    yield {
        "kind": "run",
        **circumstances(),
        "model": options.model,
        "title": machine.title,
        "precision": options.precision,
        "micro_batch": options.micro_batch,
        "accumulation": options.accumulation,
        "message_us": options.message_us,
    }
    for spread, layout in spreads:
        subject: Subject = Subject(spread, layout, machine)
        row = row_of(
            subject,
            machine,
            message_s=options.message_us / 1e6,
            every_rank=bool(options.every_rank),
        )
        yield {"kind": "job", **row}
        sys.stderr.write(
            f"simulate: {spread.mesh.size:,} ranks, {spread.ranks_per_node} on a node: done\n"
        )


if __name__ == "__main__":
    run(main)
