"""What the collectives of a step cost the host of one rank of a large job, and how many messages they are.

    python -m scaling.hostcost
    python -m scaling.hostcost --against FOLDER         # beside another checkout

Each case is a process of its own, which needs one core, no other rank and no GPU (``step``).
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
from hpczero.plan.footprint import footprint_of
from hpczero.plan.sizing import blockwise_plan
from scaling.evidence.harness import Report, one_of, options_of, record, say
from scaling.evidence.record import (
    Row,
    checkouts,
    commit,
    head_of,
    of_kind,
    run_row,
    where_and_when,
)
from scaling.evidence.spread import table_of

PROGRAM = "import step, sys; sys.exit(step.main(sys.argv[1:]))"
THIS, OTHER = "this", "other"
MIB = 2**20


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
        one_of(self, model=PRESETS, precision=("fp32", "bf16", "fp16"))
        for ranks, local in product(self.ranks, self.ranks_per_node):
            if local < 1 or ranks < 2 * local or ranks % local:
                raise ConfigError(
                    f"--ranks: got {ranks} with {local} on a node, expected two or more whole nodes"
                )
        checkouts(self.against)


def main() -> int:
    """Measure, write the rows, print the table."""
    options = options_of(Options, "hostcost")
    record("hostcost", options.results, measure(options), REPORT)
    return 0


def measure(options: Options) -> Iterator[Row]:
    """All rows."""
    trees = checkouts(options.against, OTHER)
    against = commit(trees[OTHER]) if OTHER in trees else None
    names = "model precision kernel_us operation_us"
    yield run_row(options, names, load=os.getloadavg()[0], against=against)
    for ranks, local in product(options.ranks, options.ranks_per_node):
        planned = planned_messages(options.model, options.precision, ranks, local)
        for tree, folder in trees.items():
            found = measured(folder, options, ranks, local)
            yield {"kind": "case", "tree": tree, "planned_messages": planned, **found}
            say("hostcost", f"{ranks:,} ranks, {local} on a node, {tree}: done")


def planned_messages(model: str, precision: str, ranks: int, local: int) -> int:
    """Messages between nodes in a step at stage 3 that the plan predicts for one rank."""
    shapes = parameter_shapes(PRESETS[model])
    plan = blockwise_plan(shapes, num_shards=ranks, stage=3, precision=precision)
    footprint = footprint_of("ipc", ranks=ranks, local_size=local)
    return plan.traffic(footprint=footprint).messages


def measured(tree: Path, options: Options, ranks: int, local: int) -> Row:
    """What ``step`` says of one case with the code of ``tree``.

    Raises:
        HpcZeroError: the process failed.
    """
    sizes = {"ranks": ranks, "ranks_per_node": local}
    case = {"model": options.model, "precision": options.precision, **sizes}
    command = [sys.executable, "-c", PROGRAM, json.dumps(case)]
    places = os.pathsep.join((os.fspath(tree), os.fspath(Path(__file__).parent)))
    environment = {**os.environ, "PYTHONPATH": places, "PYTHONSAFEPATH": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise HpcZeroError(
            f"{ranks:,} ranks with the code of {tree}: exit code {done.returncode}; it said: {done.stderr[-2000:]}"
        )
    found: Row = json.loads(done.stdout)
    return found


def launches_s(row: Row, head: Row) -> float:
    """Seconds that the launches of sums in one step are charged."""
    kernels, operations = row["kernels"], row["operations"]
    return 1e-6 * float(kernels * head["kernel_us"] + operations * head["operation_us"])


def seconds(row: Row, head: Row) -> float:
    """Of one step, all parts."""
    measured = row["gather_s"] + row["exchange_s"] + row["agreements_s"]
    return float(measured) + launches_s(row, head)


def text(rows: list[Row]) -> str:
    """Tables of messages and of host time."""
    head, cases = head_of(rows), list(of_kind(rows, "case"))
    other = f"; beside commit {head['against']}" if head["against"] else ""
    title = (
        f"{head['model']}, {head['precision']}, stage 3: collectives of one step, one rank; "
        f"{where_and_when(head)}{other}. "
        f"Launches are charged {head['kernel_us']:g} us (own kernel) and {head['operation_us']:g} us (torch)."
    )
    commits = {THIS: head["commit"], OTHER: head["against"]}

    def name(row: Row) -> str:
        code = f", {commits[row['tree']]}" if head["against"] else ""
        return f"{row['ranks']:,} x {row['ranks_per_node']}{code}"

    counted = {
        "ranks x on a node": name,
        "messages of a gather": lambda row: f"{row['gather_messages']:,}",
        "of a reduction": lambda row: f"{row['reduce_messages']:,}",
        "of a step": lambda row: f"{row['messages']:,}",
        "buffers, MiB": lambda row: f"{row['exchange_nbytes'] / MIB:,.0f}",
        "agreements, bytes": lambda row: (
            f"{row['agreements_nbytes']:,}" if "agreements_nbytes" in row else "–"
        ),
    }
    timed = {
        "ranks x on a node": name,
        "gathers, s": lambda row: f"{row['gather_s']:.3g}",
        "exchanges, s": lambda row: f"{row['exchange_s']:.3g}",
        "launches, s": lambda row: f"{launches_s(row, head):.3g}",
        "agreements, s": lambda row: f"{row['agreements_s']:.3g}",
        "all": lambda row: f"{seconds(row, head):.3g}",
    }
    return f"{title}\n\n{table_of(cases, counted)}\n{table_of(cases, timed)}"


REPORT = Report("Messages and host time at up to 100,000 ranks", text)

if __name__ == "__main__":
    run(main)
