"""How a measurement runs: its options, turns in an order drawn anew, a clock over ranks, rows written, shown and drawn.

A measurement is a dataclass of options, a generator of rows, and a `Report` of these rows.
"""

from __future__ import annotations

import itertools
import math
import random
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import tyro

from hpczero.errors import ConfigError, HpcZeroError, launcher_rank
from hpczero.options.reading import parse_command_line
from scaling.evidence.record import Recorder, Row, path_of

if TYPE_CHECKING:
    from hpczero.job.topology import Topology

Case = TypeVar("Case")
Kind = TypeVar("Kind")
Value = TypeVar("Value")

# Order of fp32 sums; a wrong gradient moves the loss by 1e-2 within a few steps.
LOSS_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Report:
    """How the rows of one measurement are shown.

    Attributes:
        title: heading of the measurement on a page of reports.
        text: tables; markdown.
        draw: writes the figures at a path, as PNG or SVG; None: there are none.
    """

    title: str
    text: Callable[[list[Row]], str]
    draw: Callable[[list[Row], Path], None] | None = None


@dataclass(frozen=True)
class Common:
    """Options of most measurements.

    Attributes:
        seed: of the order in the rounds.
        results: folder of all machines' results; left out, scaling/results.
    """

    seed: int = 0
    results: str | None = None


@dataclass(frozen=True)
class OnNodes(Common):
    """Options of measurements between nodes.

    Attributes:
        emulated: the nodes are emulated on one machine: say so in every table.
    """

    emulated: tyro.conf.UseCounterAction[int] = 0  # a bare --emulated

    @property
    def suffix(self) -> str:
        """Of names of results."""
        return "-emulated" if self.emulated else ""


SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")


@dataclass(frozen=True)
class OnLinks(OnNodes):
    """Options of measurements that count bytes on links between nodes.

    Attributes:
        rate_mbit: what a node's link carries; then bytes are counted on its interface eth0. 0: not known.
    """

    rate_mbit: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.rate_mbit < 1e9:
            raise ConfigError(f"--rate_mbit: got {self.rate_mbit}, expected 0 or above")

    def check_links(self) -> None:
        """Raises ConfigError: a rate is given, and there is no interface to count bytes on."""
        if self.rate_mbit and not SENT.exists():
            raise ConfigError(
                f"--rate_mbit: got {self.rate_mbit:g}, but {SENT} is missing, where bytes are counted; expected a "
                "job on hosts with that interface, or leave it out"
            )


def sent_on_links(topology: Topology, options: OnLinks) -> list[float]:
    """Bytes that each node has put on its link so far; empty where the link is not known. Collective."""
    if not options.rate_mbit:
        return []
    topology.barrier()  # nobody is still sending
    counts = topology.gather(float(SENT.read_text()))
    return [counts[ranks[0]] for ranks in topology.world.nodes]


def options_of(kind: type[Kind], program: str, *, start: str = "") -> Kind:
    """The options of this process's command line; as ``parse_command_line``, with the defaults of ``kind``.

    The help begins with the first paragraph of the module of ``kind``, and says how to ``start`` the program.
    """
    prog = f"python -m scaling.{program}"
    said = f"{sys.modules[kind.__module__].__doc__}".partition("\n\n")[0]
    return parse_command_line(
        kind, sys.argv[1:], prog=prog, description=f"{said}{start}", default=kind()
    )


def at_least(options: object, **least: int) -> None:
    """Refuse options below the least value of each, and options of several values without any.

    Raises:
        ConfigError: names the option, its value, and the least.
    """
    for name, smallest in least.items():
        value = getattr(options, name)
        values = value if isinstance(value, tuple) else (value,)
        if value is not None and min(values, default=-math.inf) < smallest:
            raise ConfigError(f"--{name}: got {value}, expected at least {smallest}")


def one_of(options: object, **known: Collection[object]) -> None:
    """Refuse options that have no known value. Raises ConfigError: names the option, its value, and all known ones."""
    for name, values in known.items():
        value = getattr(options, name)
        if value not in values:
            names = ", ".join(map(str, values))
            raise ConfigError(f"--{name}: got {value!r}, expected one of {names}")


def say(program: str, line: str) -> None:
    """Progress, by rank 0 alone, on stderr, so that stdout is the table alone."""
    if launcher_rank() == 0:
        sys.stderr.write(f"{program}: {line}\n")
        sys.stderr.flush()


def in_turns(
    cases: Sequence[Case], rounds: int, order: random.Random, *, warm_up: int = 0, program: str = ""
) -> Iterator[tuple[int, list[Case]]]:
    """Number of each round, and all cases in an order drawn anew; rounds of the warm-up have numbers below 0.

    Args:
        cases: each runs once in a round.
        rounds: that count.
        order: draws.
        warm_up: rounds before.
        program: whose progress is told; empty: nothing is.
    """
    for number in range(-warm_up, rounds):
        yield number, order.sample(cases, len(cases))
        if program and number >= 0:
            say(program, f"round {number + 1} of {rounds} done")


def timed(topology: Topology, call: Callable[[], Value]) -> tuple[float, Value]:
    """Seconds of the slowest rank, from a common start to its own return; what ``call`` returns here. Collective."""
    topology.barrier()
    start = time.perf_counter()
    value = call()
    return max(topology.gather(time.perf_counter() - start)), value


def seconds(topology: Topology, call: Callable[[], object]) -> float:
    """As of ``timed``, the same on every rank. Collective."""
    return timed(topology, call)[0]


def placement(topology: Topology) -> str:
    """``4x2-block``, ``4x2-cyclic``, ``1x2``, or the sizes of uneven nodes: how ranks lie on nodes."""
    nodes = topology.world.nodes
    if not topology.is_rectangular:
        return "+".join(str(len(ranks)) for ranks in nodes)
    shape = f"{len(nodes)}x{len(nodes[0])}"
    if len(nodes) == 1 or len(nodes[0]) == 1:
        return shape
    if all(ranks == tuple(range(ranks[0], ranks[0] + len(ranks))) for ranks in nodes):
        return f"{shape}-block"
    if all(ranks == tuple(range(ranks[0], topology.size, len(nodes))) for ranks in nodes):
        return f"{shape}-cyclic"
    return f"{shape}-mixed"


def nodes_of(topology: Topology, options: OnNodes) -> Row:
    """For the first row of a record: the ranks, how they lie on nodes, and whether these are emulated."""
    emulated = bool(options.emulated)
    return {"ranks": topology.size, "placement": placement(topology), "emulated": emulated}


def on_ranks(
    kind: type[Kind],
    program: str,
    name: Callable[[Topology, Kind], str],
    measure: Callable[[Topology, Kind], Iterator[Row]],
    report: Report,
) -> int:
    """Measure on all ranks; rank 0 writes the rows, prints the table, draws the plot. Collective over MPI's world.

    Args:
        kind: of options, with ``results``.
        program: its name in ``scaling``.
        name: of the file of results, without suffix.
        measure: the rows, the same on every rank. Collective.
        report: of the rows.
    """
    options = options_of(kind, program, start=" Start it under mpirun or srun.")
    # Here and not at the top: these start MPI and torch, which --help and bad options must not do.
    import torch

    from hpczero.job.launch import start_topology

    topology = start_topology(None)
    torch.set_num_threads(1)
    rows = measure(topology, options)
    # What is refused before the first row leaves no file.
    rows = itertools.chain([next(rows)], rows)
    if topology.is_root:
        record(name(topology, options), options.results, rows, report)  # type: ignore[attr-defined]
    else:
        for _ in rows:
            pass
    topology.free()
    return 0


def record(name: str, results: str | None, rows: Iterator[Row], report: Report) -> list[Row]:
    """Measure, which is to use up ``rows``; write them, print the table, draw the plot. Returns the rows.

    ``name`` and ``results`` are as of ``path_of``.
    """
    path = path_of(name, results)
    with Recorder(path) as recorder:
        for row in rows:
            recorder.write(row.pop("kind"), row)
    sys.stdout.write(f"{report.text(recorder.rows)}\n")
    if report.draw is not None:
        report.draw(recorder.rows, path.with_suffix(".png"))
    sys.stderr.write(f"rows in {path}{', plot beside them' if report.draw else ''}\n")
    return recorder.rows


def check_same_losses(
    name: str,
    values: Sequence[float],
    reference: str,
    expected: Sequence[float],
    tolerance: float = LOSS_TOLERANCE,
) -> float:
    """Compare losses step by step, as far as both go: ways that do not train the same cannot be compared.

    Args:
        name: whose losses ``values`` are.
        values: of each step.
        reference: whose losses ``expected`` are.
        expected: of each step.
        tolerance: how far two losses of a step may be apart.

    Returns:
        How far they are apart at most.

    Raises:
        HpcZeroError: they are farther apart, or one is NaN; it names the step and both losses.
    """
    digits = max(6, 2 - math.floor(math.log10(tolerance)))
    found = 0.0
    for step, (mine, other) in enumerate(zip(values, expected, strict=False)):
        if not abs(mine - other) <= tolerance:
            raise HpcZeroError(
                f"{name}: loss {mine:.{digits}f} at step {step}, {reference} has {other:.{digits}f}, expected the same "
                f"within {tolerance:g}: they do not train the same, so their times cannot be compared"
            )
        found = max(found, abs(mine - other))
    return found
