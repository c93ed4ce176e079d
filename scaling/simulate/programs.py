"""Programs: what one rank does in a step, lane by lane, as data.

Owns: the kinds of entries, and which ranks a communicator joins. Must not know: how they were recorded, how long
anything takes, MPI, torch.

A lane is a thread: ``main`` computes, and each queue of the transport has one that moves bytes. Entries of a lane come
one after the other. Lanes wait for each other by tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from hpczero.job.mesh import Mesh

MAIN = "main"


@dataclass(frozen=True)
class Work:
    """Work of this rank alone.

    Attributes:
        device_s: seconds of what computes.
        host_s: seconds in which the host starts it; what computes first waits for that, and then both go on together.
    """

    device_s: float = 0.0
    host_s: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.device_s + other.device_s, self.host_s + other.host_s)

    def __bool__(self) -> bool:
        return self.device_s > 0 or self.host_s > 0

    @property
    def seconds(self) -> float:
        """The longer of the two."""
        return max(self.device_s, self.host_s)


@dataclass(frozen=True)
class Call:
    """A call that all ranks of a communicator make together.

    Attributes:
        comm: name of the communicator; ``Program.comms`` has its ranks.
        operation: what for.
        name: of the unit, or of what ranks agree on.
        dtype: of what is moved.
        nbytes: of one rank's block. These four must be alike on all ranks.
        sent: bytes that this rank sends to each other rank of ``comm``; 0 for small ones, and where memory is shared.
        messages: that this rank sends to other nodes; 0 where the MPI library decides.
        batches: of messages, each started when the one before the last is through.
        beside: another communicator, over whose ranks as many bytes as ``beside_sent`` are read meanwhile.
        beside_sent: bytes, to each other rank of ``beside``.
        work: of this rank meanwhile.
    """

    comm: str
    operation: str
    name: str
    dtype: str
    nbytes: int
    sent: int = 0
    messages: int = 0
    batches: int = 1
    beside: str = ""
    beside_sent: int = 0
    work: Work = field(default_factory=Work)

    @property
    def signature(self) -> tuple[str, str, str, int]:
        """What must be alike on all ranks."""
        return self.operation, self.name, self.dtype, self.nbytes

    def __str__(self) -> str:
        name = f" of {self.name!r}" if self.name else ""
        return f"{self.operation}{name} ({self.nbytes:,} bytes of {self.dtype})"


@dataclass(frozen=True)
class Send:
    """A message to one rank is started, and goes on by itself.

    Attributes:
        comm: name of the communicator.
        peer: place of the other rank in it.
        tag: messages of one tag arrive in order.
        nbytes: of the message.
        dtype: of it.
        name: what it is.
    """

    comm: str
    peer: int
    tag: int
    nbytes: int
    dtype: str
    name: str


@dataclass(frozen=True)
class Post:
    """From now on a message may come; attributes as of ``Send``."""

    comm: str
    peer: int
    tag: int


@dataclass(frozen=True)
class Receive:
    """Wait for a message; attributes as of ``Send``."""

    comm: str
    peer: int
    tag: int
    nbytes: int
    dtype: str
    name: str


@dataclass(frozen=True)
class Signal:
    """Let lanes of this rank pass that wait for the token, now and later."""

    token: str


@dataclass(frozen=True)
class Await:
    """Wait for a token of this rank; ``lane`` is the one that gives it."""

    token: str
    lane: str


Entry = Work | Call | Send | Post | Receive | Signal | Await
Lanes = Mapping[str, Sequence[Entry]]


@dataclass(frozen=True)
class Program:
    """One rank's step.

    Attributes:
        rank: of the world.
        lanes: entries of each lane. Ranks that do the same share one object.
        comms: world ranks of each communicator, in its order.
    """

    rank: int
    lanes: Lanes
    comms: Mapping[str, tuple[int, ...]]

    def entries(self) -> Iterator[Entry]:
        """Of all lanes."""
        for lane in self.lanes.values():
            yield from lane

    @property
    def calls(self) -> Iterator[Call]:
        """Of all lanes."""
        return (entry for entry in self.entries() if isinstance(entry, Call))


@dataclass(frozen=True)
class Origin:
    """Where a communicator comes from, so that another rank's with the same place in the job can be told.

    Attributes:
        degrees: of the mesh, that its group shares.
        kind: ``comm``, ``ordered``, ``node`` or ``rail`` of that group.
    """

    degrees: tuple[str, ...]
    kind: str


@dataclass(frozen=True)
class Places:
    """Where the ranks of a job are.

    Attributes:
        mesh: degrees.
        per_node: ranks of a node; nodes are filled one after the other.
    """

    mesh: Mesh
    per_node: int

    def node(self, rank: int) -> int:
        """Of a world rank."""
        return rank // self.per_node

    def group(self, rank: int, degrees: Sequence[str]) -> tuple[int, ...]:
        """World ranks that differ from ``rank`` in these degrees alone."""
        return _members(self.mesh, rank, tuple(degrees))

    def nodes(self, ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Places in ``ranks`` of those of each node, nodes in the order of their first."""
        found: dict[int, list[int]] = {}
        for place, rank in enumerate(ranks):
            found.setdefault(self.node(rank), []).append(place)
        return tuple(tuple(places) for places in found.values())

    def comm(self, rank: int, origin: Origin) -> tuple[int, ...]:
        """World ranks of the communicator of ``rank`` that has this origin, in its order; as ``job.group`` makes it."""
        ranks = self.group(rank, origin.degrees)
        nodes = self.nodes(ranks)
        mine = ranks.index(rank)
        here = next(places for places in nodes if mine in places)
        local = here.index(mine)
        if origin.kind == "node":
            return tuple(ranks[place] for place in here)
        if origin.kind == "rail":
            return tuple(ranks[places[local]] for places in nodes)
        if origin.kind == "ordered" and len({len(places) for places in nodes}) == 1:
            rows = range(len(nodes[0]))
            return tuple(ranks[places[row]] for row in rows for places in nodes)
        return ranks


@cache
def _members(mesh: Mesh, rank: int, degrees: tuple[str, ...]) -> tuple[int, ...]:
    return mesh.members(rank, *degrees)


def like(program: Program, rank: int, origins: Mapping[str, Origin], places: Places) -> Program:
    """The program of ``rank``, which does what the rank of ``program`` does, with its own neighbours."""
    comms = {name: places.comm(rank, origins[name]) for name in program.comms}
    return Program(rank, program.lanes, comms)


def expanded(
    recorded: Callable[[int], tuple[Program, Mapping[str, Origin]]],
    places: Places,
    *,
    every_rank: bool = False,
) -> list[Program]:
    """Programs of all ranks.

    Ranks that differ in nothing but which samples and which shards they have do the same. One of each kind is recorded:
    of each pipeline stage the first and the second of its tensor ranks, and of those that share tokens.

    Args:
        recorded: records one rank.
        places: of the job.
        every_rank: record all ranks.
    """
    kinds: dict[tuple[int, ...], tuple[Program, Mapping[str, Origin]]] = {}
    found = []
    for rank in range(places.mesh.size):
        if every_rank:
            found.append(recorded(rank)[0])
            continue
        pipeline, _, _, sequence, tensor = places.mesh.coordinates(rank)
        kind = pipeline, min(sequence, 1), min(tensor, 1)
        if kind not in kinds:
            kinds[kind] = recorded(rank)
        program, origins = kinds[kind]
        found.append(like(program, rank, origins, places))
    return found
