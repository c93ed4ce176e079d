"""What measurements inside one MPI job share: a common clock, and the name of the placement.

Owns: the start of a timing on all ranks, whose time counts, and that one rank writes. Must not know: what is measured.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hpczero.job.topology import Topology
from scaling.evidence.record import Recorder, Row, path_of


def seconds(topology: Topology, call: Callable[[], object]) -> float:
    """Of the slowest rank, from a common start to its own return. Collective; the same on every rank."""
    topology.barrier()
    start = time.perf_counter()
    call()
    return max(topology.gather(time.perf_counter() - start))


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


def record(
    topology: Topology,
    rows: Iterator[Row],
    name: str,
    *,
    results: str | None,
    text: Callable[[list[Row]], str],
    draw: Callable[[list[Row], Path], None],
) -> None:
    """Measure, which is to use up ``rows``; rank 0 writes them, prints the table, draws the plot. Collective.

    Args:
        topology: the ranks.
        rows: the same on every rank.
        name: of the files, without suffix.
        results: folder of all machines' results; None: scaling/results.
        text: the report.
        draw: the plot.
    """
    if not topology.is_root:
        for _ in rows:
            pass
        return
    path = path_of(name, results)
    with Recorder(path) as recorder:
        for row in rows:
            recorder.write(row.pop("kind"), row)
    sys.stdout.write(f"\n{text(recorder.rows)}\n")
    draw(recorder.rows, path.with_suffix(".png"))
    sys.stderr.write(f"rows in {path}, plot beside them\n")
