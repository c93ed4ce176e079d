"""What moves data in `scaling.collectives`: the MPI library's own calls, and hpczero's transports and algorithms.

Movers of one kind share their buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass

import torch
from mpi4py import MPI

from hpczero.comm import Collectives, Flat, Hierarchical
from hpczero.comm.algorithms import EXCHANGES, GATHERS
from hpczero.comm.rails import DEFAULT, AlgorithmChoice, Selection
from hpczero.comm.tuning import tune
from hpczero.job.topology import Topology
from hpczero.memory.buffers import Use

LIBRARY = "MPI library"
LONGER = (2**18, 2**21)  # rounds beside the usual one


@dataclass(frozen=True)
class Mover:
    """One way to do one operation."""

    name: str  # in tables
    operation: str  # all_gather or reduce_scatter
    call: Callable[[], object]  # does it once, on buffers of its own. Collective


def tuned(topology: Topology) -> Selection:
    """What hpczero chooses between these nodes, measured now. Collective."""
    two_level = topology.is_rectangular and topology.num_nodes > 1
    return tune(topology.shard, torch.float32, fresh=True) if two_level else DEFAULT


@contextmanager
def candidates(topology: Topology, shard_nbytes: int, auto: Selection) -> Iterator[list[Mover]]:
    """All that work on this topology, for fp32 shards of ``shard_nbytes``. Collective."""
    numel = shard_nbytes // 4
    with ExitStack() as stack:
        whole, out = torch.ones(numel * topology.size), torch.empty(numel)
        found = [*_library(topology, whole, out)]
        for gather in GATHERS:
            if gather.fits(topology.size):
                flat = stack.enter_context(closing(Flat(topology, gather=gather)))
                found.append(_gather(f"flat, {gather.name}", flat, whole))
        for exchange in EXCHANGES:
            flat = stack.enter_context(closing(Flat(topology, exchange=exchange)))
            found.append(_reduce(f"flat, {exchange.name}", flat, whole, out))
        if topology.is_rectangular:
            messages = stack.enter_context(closing(Hierarchical(topology, inside="messages")))
            found.append(_gather("hierarchical", messages, whole))
            found.append(_reduce("hierarchical", messages, whole, out))
        if topology.is_rectangular and topology.world.node.size > 1:
            found += _window(topology, stack, numel, out, auto)
        yield found


def _library(topology: Topology, whole: torch.Tensor, out: torch.Tensor) -> Iterator[Mover]:
    """In the order of world ranks, which suits it best."""
    world, nbytes = topology.world.comm, out.numel() * 4
    gathered = MPI.buffer.fromaddress(whole.data_ptr(), whole.numel() * 4)
    summed = MPI.buffer.fromaddress(out.data_ptr(), nbytes)
    yield Mover(
        LIBRARY, "all_gather", lambda: world.Allgather(MPI.IN_PLACE, [gathered, nbytes, MPI.BYTE])
    )
    yield Mover(
        LIBRARY,
        "reduce_scatter",
        lambda: world.Reduce_scatter_block([gathered, MPI.FLOAT], [summed, MPI.FLOAT], MPI.SUM),
    )


def _window(
    topology: Topology, stack: ExitStack, numel: int, out: torch.Tensor, auto: Selection
) -> Iterator[Mover]:
    window = Hierarchical(topology)
    stack.enter_context(closing(window))
    size = numel * topology.size
    whole = window.allocate(size, torch.float32, category="whole", use=Use.GATHER, keep=True)
    gradient = window.allocate(size, torch.float32, category="gradient", use=Use.REDUCE, keep=True)
    window.settle()
    for buffer in (whole, gradient):
        buffer.take()
    whole.tensor.view(topology.size, -1)[topology.shard_index] = 1.0
    gradient.tensor.fill_(1.0)

    gathers, exchanges = {"auto": auto}, {"auto": auto}
    if topology.num_nodes > 1:  # else there is nothing to choose
        fitting = [AlgorithmChoice(kind.name) for kind in GATHERS if kind.fits(topology.num_nodes)]
        rounds = [AlgorithmChoice("pairwise", chunk) for chunk in LONGER]
        for choice in (*fitting, *rounds):
            gathers[choice.name] = Selection((choice,), DEFAULT.exchanges)
        for choice in (DEFAULT.exchanges[0], *rounds, AlgorithmChoice("library", LONGER[-1])):
            exchanges[choice.name] = Selection(DEFAULT.gathers, (choice,))

    def selected(mover: Mover, selection: Selection) -> Mover:
        def call() -> None:
            window.select(selection)
            mover.call()

        return Mover(mover.name, mover.operation, call)

    for name, selection in gathers.items():
        yield selected(_gather(f"window, {name}", window, whole.tensor), selection)
    for name, selection in exchanges.items():
        yield selected(_reduce(f"window, {name}", window, gradient.tensor, out), selection)


def _gather(name: str, transport: Collectives, whole: torch.Tensor) -> Mover:
    return Mover(name, "all_gather", lambda: transport.all_gather(whole, name="u").wait())


def _reduce(name: str, transport: Collectives, whole: torch.Tensor, out: torch.Tensor) -> Mover:
    def call() -> None:
        transport.reduce_scatter(whole, out, scale=1.0, name="u").wait()

    return Mover(name, "reduce_scatter", call)
