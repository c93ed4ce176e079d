"""One training step of the same model over several layouts of ranks, side by side in one MPI job.

    python -m tests.cluster --hosts 4 --ranks-per-host 2 --rate 250 -- -m scaling.layouts --rate_mbit 250

Owns: the order of a run. Must not know: how a layout is trained or foretold, the arithmetic of the report. All layouts
stay resident; in each round each takes its steps, in an order drawn anew. What is foretold comes from a probe of all
ranks at once, before the first round, and the rate of the links. At the end pipelines whose blocks sleep show how long
stages stand still.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from hpczero.errors import ConfigError, run
from hpczero.options.reading import parse_command_line
from scaling.evidence.record import Row, circumstances
from scaling.evidence.same_losses import LOSS_TOLERANCE, check_same_losses
from scaling.layouts.cases import Case, cases_on, on_links
from scaling.layouts.sizes import Sizes

if TYPE_CHECKING:
    from hpczero.job.topology import Topology
    from scaling.layouts.training import Training

SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")


@dataclass(frozen=True)
class Options(Sizes):
    """What to measure.

    Attributes:
        only: numbers of the layouts, from 0; left out, all. -1 is none, for pipelines that sleep alone.
        rounds: measured turns of each layout; from 6 on there is a 95 % interval of the median.
        steps: of a turn.
        warm_up: steps of each layout before the first round, in which losses are compared too.
        rate_mbit: what a node's link carries; then bytes are counted on its interface eth0. 0: not known.
        nap_ms: forward of one micro-batch where blocks sleep; 0: no such pipelines.
        naps: measured steps of each of them.
        nap_kib: size of the messages of one more such pipeline; 0: none.
        algorithms: between nodes, as in --parallel.algorithms.
        emulated: the nodes are emulated on one machine: say so in every table.
        seed: of the order in the rounds.
        results: folder of all machines' results; left out, scaling/results.
    """

    only: tuple[int, ...] = ()
    rounds: int = 7
    steps: int = 2
    warm_up: int = 2
    rate_mbit: float = 0.0
    nap_ms: float = 20.0
    naps: int = 7
    nap_kib: int = 128
    algorithms: str = "auto"
    emulated: tyro.conf.UseCounterAction[int] = 0  # a bare --emulated
    seed: int = 0
    results: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_positive("rounds", "steps", "warm_up", "naps")
        for name in ("rate_mbit", "nap_ms", "nap_kib"):
            if not 0 <= getattr(self, name) < 1e9:
                raise ConfigError(f"--{name}: got {getattr(self, name)}, expected 0 or above")


def main() -> int:
    """Measure; rank 0 writes the rows, prints the tables, draws the plot. Collective over MPI's world."""
    options = parse_command_line(
        Options,
        sys.argv[1:],
        prog="python -m scaling.layouts",
        description="Step time of one model over layouts of ranks, in one run; start it under mpirun or srun.",
        default=Options(),
    )
    # Here and not at the top: this import starts MPI, which --help and bad options must not do.
    from hpczero.job.launch import start_topology
    from scaling.evidence.clock import placement, record
    from scaling.layouts.report import draw, text

    topology = start_topology(None)
    label = f"{placement(topology)}{'-emulated' if options.emulated else ''}"
    name = f"layouts-{label}{f'-{options.rate_mbit:g}mbit' if options.rate_mbit else ''}"
    rows = measure(topology, options)
    record(topology, rows, name, results=options.results, text=text, draw=draw)
    topology.free()
    return 0


def measure(topology: Topology, options: Options) -> Iterator[Row]:
    """All rows, the same on every rank. Collective.

    Raises:
        ConfigError: nodes of different sizes, a model that a layout cannot cut, or a rate without an interface.
        HpcZeroError: the layouts do not train the same.
    """
    import torch

    from scaling.evidence.clock import placement

    torch.set_num_threads(1)
    with topology.agreed("choose the layouts"):
        cases = _cases(topology, options)
    yield {
        "kind": "run",
        **circumstances(),
        "ranks": topology.size,
        "placement": placement(topology),
        "emulated": bool(options.emulated),
        "rate_mbit": options.rate_mbit,
        "rounds": options.rounds,
        "steps": options.steps,
        "tolerance": LOSS_TOLERANCE,
        "description": options.work.describe(),
    }
    if cases:
        yield from _layouts(topology, cases, options)
    if options.nap_ms and topology.num_nodes > 1:
        yield from _idle(topology, options)


def _cases(topology: Topology, options: Options) -> list[Case]:
    if options.rate_mbit and not SENT.exists():
        raise ConfigError(
            f"--rate_mbit: got {options.rate_mbit:g}, but {SENT} is missing, where bytes are counted; expected a job "
            "on hosts with that interface, or leave it out"
        )
    only = [number for number in options.only if number != -1] if options.only else None
    return cases_on(topology.world.nodes, options.work, only)


def _layouts(topology: Topology, cases: Sequence[Case], options: Options) -> Iterator[Row]:
    import torch

    from hpczero.accelerator import HostAccelerator
    from hpczero.predict.machine import machine_of
    from hpczero.probe.job import probe_job
    from scaling.evidence.clock import seconds
    from scaling.layouts.training import Training

    measured, _ = probe_job(topology, HostAccelerator(), dtype=torch.float32)
    per_node = len(topology.world.nodes[0])
    machine = machine_of(measured, ranks_per_node=per_node, memory_nbytes=1.0, title="this machine")
    machine = on_links(machine, options.rate_mbit)
    # The processors send messages too: where ranks outnumber them, computing and sending take turns.
    here = topology.size if options.emulated else per_node
    overlap = here <= len(os.sched_getaffinity(0))
    trainings: dict[str, Training] = {}
    losses: dict[str, list[float]] = {}
    for case in cases:
        training = Training(topology, _nodes(topology), case, algorithms=options.algorithms)
        trainings[case.name] = training
        losses[case.name] = training.steps(options.warm_up)
        step = case.foretold(machine, measured, overlap=overlap)
        mine = case.sent_between(training.topology.pipeline.rank)
        yield {
            "kind": "layout",
            "layout": case.name,
            "transport": training.transport,
            "foretold_s": step.step_s,
            "parts": _parts(step),
            "planned_nbytes": _by_node(topology, topology.gather(float(mine))),
        }
    _check(losses)
    order = random.Random(options.seed)
    for number in range(options.rounds):
        for name in order.sample(list(trainings), len(trainings)):
            training, found = trainings[name], losses[name]
            sent, waited = _sent(topology, options), training.waited_s
            took = seconds(
                topology,
                lambda t=training, f=found: f.extend(t.steps(options.steps)),  # type: ignore[misc]
            )
            after = _sent(topology, options)
            waits = topology.gather((training.waited_s - waited) / options.steps)
            yield {
                "kind": "turn",
                "layout": name,
                "round": number,
                "seconds": took / options.steps,
                "sent_nbytes": [(b - a) / options.steps for a, b in zip(sent, after, strict=True)],
                "waited_s": waits if training.is_pipeline else [],
            }
        _check(losses)
        if topology.is_root:
            sys.stderr.write(f"layouts: round {number + 1} of {options.rounds} done\n")
    for training in trainings.values():
        training.close()


def _idle(topology: Topology, options: Options) -> Iterator[Row]:
    """Pipelines between nodes, whose blocks sleep, in turns."""
    from scaling.layouts.idle import SleepingPipeline, orders_of

    stages = topology.num_nodes
    make = partial(SleepingPipeline, topology, _nodes(topology), stages=stages)
    nap_s = options.nap_ms / 1e3
    orders = orders_of(stages, options.micro_batches, options.nap_kib * 1024)
    pipelines = [make(order, nap_s=nap_s) for order in orders]
    # The ranks of a node send at once, and share its link.
    rank_rate = options.rate_mbit * 1e6 / 8 / len(topology.world.nodes[0])
    for pipeline in pipelines:
        pipeline.step()
    order = random.Random(options.seed)
    for number in range(options.naps):
        for pipeline in order.sample(pipelines, len(pipelines)):
            yield {
                "kind": "idle",
                "pipeline": pipeline.order.name,
                "round": number,
                "stages": stages,
                "nap_s": nap_s,
                "simulated": pipeline.simulated(rank_rate),
                "formula": pipeline.order.formula(stages),
                "ranks": pipeline.step(),
            }
    for pipeline in pipelines:
        pipeline.close()


def _nodes(topology: Topology) -> list[int]:
    """Node of each rank."""
    found = {rank: node for node, ranks in enumerate(topology.world.nodes) for rank in ranks}
    return [found[rank] for rank in range(topology.size)]


def _parts(step: object) -> dict[str, float]:
    """Foretold seconds of the parts of a step."""
    names = ("forward", "backward", "sums", "messages", "fill", "communication", "replicas")
    return {name: getattr(step, f"{name}_s") for name in (*names, "hidden", "update")}


def _by_node(topology: Topology, values: Sequence[float]) -> list[float]:
    """Sums over the ranks of each node."""
    return [sum(values[rank] for rank in ranks) for ranks in topology.world.nodes]


def _sent(topology: Topology, options: Options) -> list[float]:
    """Bytes that each node has put on its link so far; empty where the link is not known. Collective."""
    if not options.rate_mbit:
        return []
    topology.barrier()  # nobody is still sending
    counts = topology.gather(float(SENT.read_text()))
    return [counts[ranks[0]] for ranks in topology.world.nodes]


def _check(losses: dict[str, list[float]]) -> None:
    """Every layout must have the same losses; all ranks see the same numbers, so all raise."""
    reference = next(iter(losses))
    for name, values in losses.items():
        check_same_losses(name, values, reference, losses[reference])


if __name__ == "__main__":
    run(main)
