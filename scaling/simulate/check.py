"""Steps of an emulated cluster beside those that a simulation of the same ranks says.

    python -m tests.cluster --hosts 4 --ranks-per-host 2 --rate 250 -- -m scaling.simulate.check --rate_mbit 250

Each layout is trained in turns, as ``scaling.layouts`` does. Each rank then records a step of its own against
stand-ins, with small real tensors and thread time. All are replayed on links of the given rate and the processors that
are there.
"""

from __future__ import annotations

import itertools
import os
import pickle
import random
import time
import timeit
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hpczero.errors import ConfigError, run
from scaling.evidence import harness
from scaling.evidence.record import Row, emulated, head_of, of_kind, run_row, where_and_when
from scaling.evidence.spread import table_of
from scaling.layouts.cases import Case, TurnsOfLayouts, cases_on
from scaling.simulate import __main__ as simulate

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

    from hpczero.job.topology import Topology
    from scaling.simulate.replay import Network

MTU = 9000  # of the links of tests.cluster
# Of what a link carries: without headers of TCP with time stamps, IP and Ethernet.
PAYLOAD = (MTU - 52) / (MTU + 14)
PROBE_NUMEL = 2**20
NEAR = 0.2


@dataclass(frozen=True)
class Options(TurnsOfLayouts):
    """What to compare."""

    rounds: int = 3
    rate_mbit: float = 250.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.rate_mbit:
            raise ConfigError(f"--rate_mbit: got {self.rate_mbit}, expected a number above 0")


def main() -> int:
    """Compare, write the rows, print the table. Collective over MPI's world."""
    return harness.on_ranks(Options, "simulate.check", _name, compare, REPORT)


def _name(topology: Topology, options: Options) -> str:
    return f"simulate-{harness.placement(topology)}{options.suffix}-{options.rate_mbit:g}mbit"


def compare(topology: Topology, options: Options) -> Iterator[Row]:
    """All rows, the same on every rank. Collective.

    Raises:
        ConfigError: layouts that there are not, or ranks that do not lie node after node.
    """
    from scaling.simulate.replay import Network

    with topology.agreed("choose the layouts"):
        cases = _cases(topology, options)
    yield run_row(
        options,
        "rate_mbit rounds",
        **harness.nodes_of(topology, options),
        description=options.describe(),
    )
    seen = _seen(topology, cases, options)
    small_s, latency_s, byte_s, inside = _probe(topology)
    network = Network(
        node_rate=inside,
        node_latency=latency_s,
        nics=1,
        nic_rate=PAYLOAD * options.rate_mbit * 1e6 / 8,
        nic_latency=latency_s,
        byte_s=byte_s,
        small_s=small_s,
        cores=len(os.sched_getaffinity(0)),
        one_host=bool(options.emulated),
    )
    yield {"kind": "network", **vars(network)}
    for case in cases:
        yield {
            "kind": "layout",
            "layout": case.name,
            "seconds": seen[case.name],
            **_simulated(topology, case, network),
        }


def _cases(topology: Topology, options: Options) -> list[Case]:
    if topology.num_nodes < 2:
        raise ConfigError(
            f"ranks lie on {topology.num_nodes} node; expected several: links between nodes are what is compared "
            "(python -m tests.cluster emulates them)"
        )
    return cases_on(topology.world.nodes, options, options.only)


def _seen(topology: Topology, cases: Sequence[Case], options: Options) -> dict[str, list[float]]:
    """Seconds of a step of each layout, of each round."""
    from scaling.layouts.training import Training

    trainings = {case.name: Training(topology, case, algorithms="default") for case in cases}
    for training in trainings.values():
        training.steps(options.warm_up)
    found: dict[str, list[float]] = {name: [] for name in trainings}
    order = random.Random(options.seed)
    turns = harness.in_turns([*trainings], options.rounds, order, program="simulate.check")
    for name in itertools.chain.from_iterable(turn for _, turn in turns):
        took = harness.seconds(topology, lambda t=trainings[name]: t.steps(options.steps))  # type: ignore[misc]
        found[name].append(took / options.steps)
    for training in trainings.values():
        training.close()
    return found


def _probe(topology: Topology) -> tuple[float, float, float, float]:
    """(seconds of a small call of all ranks, of a message, of the host for a byte, bytes per second in a node)."""
    import torch

    from hpczero.comm import choose

    small = median(timeit.repeat(lambda: topology.gather(0.0), number=1, repeat=50))
    inside = choose(topology.world, "hierarchical", algorithms="default", overlap=False)
    full = torch.zeros(PROBE_NUMEL * topology.size)
    inside.all_gather(full, name="probe").wait()
    topology.barrier()
    before = time.process_time()
    inside.all_gather(full, name="probe").wait()
    spent = time.process_time() - before
    topology.barrier()
    inside.close()
    between = (topology.num_nodes - 1) * 4 * PROBE_NUMEL
    node = topology.world.node
    block = np.zeros(2**20, dtype=np.float32)
    rings = timeit.repeat(lambda: _ring(node, block), number=1, repeat=5 if node.size > 1 else 0)
    found = [
        small,
        small / 4,
        spent / (2 * between),
        block.nbytes / (median(rings) if rings else 1.0),
    ]
    rows = [topology.gather(value) for value in found]
    return tuple(median(row) for row in rows)  # type: ignore[return-value]


def _ring(node: Intracomm, block: npt.NDArray[np.float32]) -> None:
    """Every rank of a node sends to the next."""
    right, left = (node.rank + 1) % node.size, (node.rank - 1) % node.size
    node.Sendrecv(block, right, recvbuf=np.empty_like(block), source=left)


def _simulated(topology: Topology, case: Case, network: Network) -> Row:
    """What a replay of all ranks' own recordings says. Collective; the same on every rank."""
    from scaling.simulate.engine import Subject, record
    from scaling.simulate.programs import check
    from scaling.simulate.replay import replay

    subject = Subject(case.spread, case.options)
    mine = record(subject, topology.rank).program
    topology.barrier()
    programs = [pickle.loads(each) for each in topology.world.comm.allgather(pickle.dumps(mine))]
    check(programs)
    outcome = replay(programs, subject.places, network)
    return {**outcome.as_row(), "between_nbytes": outcome.between_nbytes}


def text(rows: list[Row]) -> str:
    """Simulated steps beside those of emulated hosts, or those of a job; markdown."""
    if not any(of_kind(rows, "layout")):
        return simulate.text(rows)
    head = head_of(rows)
    title = (
        f"{emulated(head)}{head['description']}, {head['ranks']} ranks as {head['placement']}, links of "
        f"{head['rate_mbit']:g} Mbit/s; {head['rounds']} rounds. {where_and_when(head)}"
    )
    layouts = list(of_kind(rows, "layout"))

    def ratio(row: Row) -> float:
        return float(row["step_s"] / median(row["seconds"]))

    def seen(row: Row) -> str:
        took = row["seconds"]
        return f"{median(took):.3f} ({min(took):.3f} to {max(took):.3f})"

    shown = table_of(
        layouts,
        {
            "layout": lambda row: row["layout"],
            "seen, s": seen,
            "simulated, s": lambda row: f"{row['step_s']:.3f}",
            "simulated / seen": lambda row: f"{ratio(row):.2f}",
            "links carry, %": lambda row: f"{100 * row['links']:.0f}",
            "binds": lambda row: row["binds"],
        },
    )
    near = sum(abs(ratio(row) - 1) <= NEAR for row in layouts)
    return "\n".join([title, "", shown, "", f"{near} of {len(layouts)} within {NEAR:.0%}."])


REPORT = harness.Report(simulate.REPORT.title, text)

if __name__ == "__main__":
    run(main)
