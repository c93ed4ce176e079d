"""What the nodes of a job have shown, and which of them are bad."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

PAIR_SHARE = 0.8  # of the typical node's bandwidth, below which a node is bad
FILE_SHARE = 0.25  # the same of a shared file system, which varies more


@dataclass(frozen=True)
class NodeReport:
    """Results of one node. Rates are in MB/s, 1e6 bytes; None if nothing was measured.

    Attributes:
        name: as SLURM and ``--exclude`` know it.
        ranks: number of ranks on this node.
        gpus: number of GPUs that the driver shows.
        write_mbyte_s: rate of writing a file of its own, synced to the file system.
        read_mbyte_s: rate of reading the file that the next node has written.
        file_error: what went wrong with either, or empty.
        pairs: rate to other nodes by name, in both directions at once, each direction counted.
    """

    name: str
    ranks: int
    gpus: int
    write_mbyte_s: float | None = None
    read_mbyte_s: float | None = None
    file_error: str = ""
    pairs: dict[str, float] = field(default_factory=dict)

    @property
    def best_pair(self) -> float | None:
        """Rate of its fastest pair: a slow partner must not count against a node."""
        return max(self.pairs.values(), default=None)


@dataclass(frozen=True)
class NodeReading:
    """Node ``reader`` reads the file that node ``writer`` wrote; both are numbers.

    Attributes:
        reader: the node that reads the file.
        writer: the node that wrote it.
        error: what is wrong with the file as the reader sees it, or empty.
    """

    reader: int
    writer: int
    error: str = ""


@dataclass(frozen=True)
class Fault:
    """Why a node is bad."""

    node: str
    what: str


def faults(reports: Sequence[NodeReport], *, gpus: int | None) -> list[Fault]:
    """Everything that is wrong, node by node.

    Args:
        reports: reports of all nodes.
        gpus: number of GPUs that every node must have; None takes that of the best node.
    """
    wanted = max(report.gpus for report in reports) if gpus is None else gpus
    # Of two nodes nobody can tell which one is slow.
    pairs = _typical([report.best_pair for report in reports]) if len(reports) > 2 else None
    writes = _typical([report.write_mbyte_s for report in reports])
    reads = _typical([report.read_mbyte_s for report in reports])
    found = []
    for report in reports:
        if report.gpus < wanted:
            found.append(Fault(report.name, f"{report.gpus} GPU(s), expected {wanted}"))
        if report.file_error:
            found.append(Fault(report.name, f"files: {report.file_error}"))
        for what, value, typical, share in (
            ("bandwidth to other nodes", report.best_pair, pairs, PAIR_SHARE),
            ("writing a file", report.write_mbyte_s, writes, FILE_SHARE),
            ("reading another node's file", report.read_mbyte_s, reads, FILE_SHARE),
        ):
            if value is not None and typical is not None and value < share * typical:
                text = f"{what}: {value:,.0f} MB/s, the typical node has {typical:,.0f}"
                found.append(Fault(report.name, text))
    return found


def _typical(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median_high(known) if known else None


def rounds(nodes: int, most: int) -> list[list[tuple[int, int]]]:
    """Pairs of nodes, disjoint within a round, each pair once in all: every node meets every other.

    Args:
        nodes: number of nodes.
        most: rounds at most, spread evenly over all of them.

    Source: the circle method of round-robin tournaments.
    """
    seats = nodes + nodes % 2  # an odd one out sits opposite an empty seat
    found = []
    for turn in range(seats - 1):
        order = [0, *((seat + turn) % (seats - 1) + 1 for seat in range(seats - 1))]
        pairs = [(order[i], order[seats - 1 - i]) for i in range(seats // 2)]
        found.append([(min(p), max(p)) for p in pairs if max(p) < nodes])
    stride = max(1, -(-len(found) // most))
    return found[::stride]


def who_reads_what(wrote: Sequence[bool]) -> list[NodeReading]:
    """Each node that has written a file reads that of the next one that has. A node by itself reads its own.

    A node that cannot write is bad already. Whether it can read would tell nothing more of it, and less of the writer.

    Args:
        wrote: for each node, whether its file exists.
    """
    writers = [node for node, done in enumerate(wrote) if done]
    if len(writers) == 1 < len(wrote):
        return []
    return [
        NodeReading(reader, writer)
        for reader, writer in zip(writers, writers[1:] + writers[:1], strict=True)
    ]


def who_reads_again(readings: Sequence[NodeReading]) -> list[NodeReading]:
    """Readings to repeat: each wrongly read file, by a node that did not write it and has read none wrongly, if any."""
    found = []
    for bad in filter(lambda reading: reading.error, readings):
        sound = (
            r.reader for r in readings if not r.error and r.reader not in (bad.reader, bad.writer)
        )
        reader = next(sound, None)
        if reader is not None:
            found.append(NodeReading(reader, bad.writer))
    return found


def blame(
    readings: Sequence[NodeReading], again: Sequence[NodeReading], names: Sequence[str]
) -> dict[int, str]:
    """What is wrong, by the number of the node that is to blame for it.

    Args:
        readings: the first readings.
        again: the readings of ``who_reads_again``.
        names: names of the nodes.
    """
    second = {reading.writer: reading for reading in again}
    texts: dict[int, list[str]] = {}
    for bad in filter(lambda reading: reading.error, readings):
        witness = second.get(bad.writer)
        if bad.writer == bad.reader:
            text, guilty = f"what it wrote {bad.error}", {bad.writer}
        elif witness is None:  # as of two nodes: nobody can tell
            text = f"what {names[bad.writer]} wrote {bad.error} on {names[bad.reader]}: one of the two is bad"
            guilty = {bad.writer, bad.reader}
        elif witness.error:
            text = f"what it wrote {bad.error} on {names[bad.reader]} and {names[witness.reader]}"
            guilty = {bad.writer}
        else:
            text = f"what {names[bad.writer]} wrote {bad.error} here, and is right on {names[witness.reader]}"
            guilty = {bad.reader}
        for node in guilty:
            texts.setdefault(node, []).append(text)
    return {node: "; ".join(found) for node, found in texts.items()}
