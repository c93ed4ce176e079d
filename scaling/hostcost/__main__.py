"""What the collectives of a step cost the host of one rank of a large job, and how many messages they are.

    python -m scaling.hostcost
    python -m scaling.hostcost --against FOLDER         # beside another checkout

Owns: the cases. Must not know: how a case is measured (``step``), the report. Each case is a process of its own, which
needs one core, no other rank and no GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from hpczero.errors import ConfigError, HpcZeroError, run
from hpczero.models.config import PRESETS, parameter_shapes
from hpczero.options.reading import parse_command_line
from hpczero.plan.footprint import footprint_of
from hpczero.plan.sizing import blockwise_plan
from scaling.evidence.record import ROOT, Recorder, Row, circumstances, commit, path_of
from scaling.hostcost.report import OTHER, THIS, text

PROGRAM = "import step, sys; sys.exit(step.main(sys.argv[1:]))"
LIMIT_S = 600.0


@dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
        model: a preset.
        precision: of its parameters: fp32, bf16 or fp16.
        ranks: of the jobs.
        ranks_per_node: each with each of the jobs.
        kernel_us: host time that one launch of the kernel for sums is charged, microseconds.
        operation_us: the same for one operation of torch.
        against: folder of another checkout; its transports are measured beside these.
        results: folder of all machines' results; left out, scaling/results.
    """

    model: str = "gpt-60b"
    precision: str = "bf16"
    ranks: tuple[int, ...] = (400, 4096, 100_000)
    ranks_per_node: tuple[int, ...] = (8, 16)
    kernel_us: float = 20.0
    operation_us: float = 6.0
    against: str | None = None
    results: str | None = None

    def __post_init__(self) -> None:
        if self.model not in PRESETS:
            names = ", ".join(PRESETS)
            raise ConfigError(f"--model: got {self.model!r}, expected one of {names}")
        if self.precision not in ("fp32", "bf16", "fp16"):
            raise ConfigError(f"--precision: got {self.precision!r}, expected fp32, bf16 or fp16")
        for ranks, local in product(self.ranks, self.ranks_per_node):
            if local < 1 or ranks < 2 * local or ranks % local:
                raise ConfigError(
                    f"--ranks: got {ranks} with {local} on a node, expected two or more whole nodes"
                )
        if self.against is not None and not Path(self.against, "hpczero").is_dir():
            raise ConfigError(f"--against: got {self.against}, expected a checkout of hpczero")


def main() -> int:
    """Measure, write the rows, print the table."""
    options = parse_command_line(
        Options,
        sys.argv[1:],
        prog="python -m scaling.hostcost",
        description="Host time and messages of a step of a large job, against communicators that move nothing.",
        default=Options(),
    )
    with Recorder(path_of("hostcost", options.results)) as recorder:
        for row in measure(options):
            recorder.write(row.pop("kind"), row)
    sys.stdout.write(f"{text(recorder.rows)}\nrows in {recorder.path}\n")
    return 0


def measure(options: Options) -> Iterator[Row]:
    """All rows."""
    trees = {THIS: ROOT}
    if options.against is not None:
        trees[OTHER] = Path(options.against).resolve()
    head = {
        **circumstances(),
        "model": options.model,
        "precision": options.precision,
        "kernel_us": options.kernel_us,
        "operation_us": options.operation_us,
        "load": os.getloadavg()[0],
        "against": commit(trees[OTHER]) if OTHER in trees else None,
    }
    yield {"kind": "run", **head}
    for ranks, local in product(options.ranks, options.ranks_per_node):
        planned = planned_messages(options.model, options.precision, ranks, local)
        for tree, folder in trees.items():
            found = measured(folder, options, ranks, local)
            yield {"kind": "case", "tree": tree, "planned_messages": planned, **found}
            sys.stderr.write(f"hostcost: {ranks:,} ranks, {local} on a node, {tree}: done\n")


def planned_messages(model: str, precision: str, ranks: int, local: int) -> int:
    """Messages between nodes in a step at stage 3 that the plan foretells for one rank."""
    shapes = parameter_shapes(PRESETS[model])
    plan = blockwise_plan(shapes, num_shards=ranks, stage=3, precision=precision)
    footprint = footprint_of("ipc", ranks=ranks, local_size=local)
    return plan.traffic(footprint=footprint).messages


def measured(tree: Path, options: Options, ranks: int, local: int) -> Row:
    """What ``step`` says of one case with the code of ``tree``.

    Raises:
        HpcZeroError: the process failed, or did not end in time.
    """
    case = {
        "model": options.model,
        "precision": options.precision,
        "ranks": ranks,
        "ranks_per_node": local,
    }
    command = [sys.executable, "-c", PROGRAM, json.dumps(case)]
    places = os.pathsep.join((os.fspath(tree), os.fspath(Path(__file__).parent)))
    environment = {**os.environ, "PYTHONPATH": places, "PYTHONSAFEPATH": "1"}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=True
        )
    except subprocess.CalledProcessError as error:
        raise HpcZeroError(
            f"{ranks:,} ranks with the code of {tree}: exit code {error.returncode}; it said: {error.stderr[-2000:]}"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise HpcZeroError(
            f"{ranks:,} ranks with the code of {tree}: not done after {LIMIT_S:.0f} s; ask for fewer --ranks"
        ) from error
    found: Row = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    run(main)
