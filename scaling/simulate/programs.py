"""Programs: what each rank does in a step, lane by lane, as data; whether they fit together.

A lane is a thread: ``main`` computes, and each queue of the transport has one that moves bytes. Entries of a lane come
one after the other. Lanes wait for each other by tokens.

On a communicator all ranks make the same calls in the same order: operation, name, dtype, bytes. Each message meets a
receive of the same rank, tag, dtype and size, in the same order. What fits pairwise and still stands still as a whole
is found by the replay.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import zip_longest

from hpczero.errors import HpcZeroError
from hpczero.job.log import spans
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
class Post:
    """From now on a message may come: communicator, place of the other rank in it, tag; those of one tag keep order."""

    comm: str
    peer: int
    tag: int


@dataclass(frozen=True)
class _Message(Post):
    nbytes: int
    dtype: str
    name: str


@dataclass(frozen=True)
class Send(_Message):
    """A message to one rank is started, and goes on by itself."""


@dataclass(frozen=True)
class Receive(_Message):
    """Wait for a message."""


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
    """One rank's step."""

    rank: int  # of the world
    lanes: Lanes  # entries of each lane. Ranks that do the same share one object
    comms: Mapping[str, tuple[int, ...]]  # world ranks of each communicator, in its order

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
    """Where a communicator comes from, so that another rank's with the same place in the job can be told."""

    degrees: tuple[str, ...]  # of the mesh, that its group shares
    kind: str  # ``comm``, ``ordered``, ``node`` or ``rail`` of that group


@dataclass(frozen=True)
class Places:
    """Where the ranks of a job are."""

    mesh: Mesh  # degrees
    per_node: int  # ranks of a node; nodes are filled one after the other

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
        # With its own neighbours.
        comms = {name: places.comm(rank, origins[name]) for name in program.comms}
        found.append(Program(rank, program.lanes, comms))
    return found


Way = tuple[str, int, int, int]  # communicator, source, target, tag


class OrderError(HpcZeroError):
    """Ranks of a job would not meet: names the first rank that differs, the position, and what each calls."""


def check(programs: Sequence[Program]) -> None:
    """Refuse programs that do not fit together.

    Args:
        programs: of all ranks, in rank order.

    Raises:
        OrderError: the first difference; the program of most ranks is taken to be right.
    """
    _check_calls(programs)
    _check_messages(programs)


def _check_calls(programs: Sequence[Program]) -> None:
    by_comm: dict[int, dict[str, list[Call]]] = {}  # of lanes, which ranks may share
    for program in programs:
        if id(program.lanes) not in by_comm:
            found = by_comm[id(program.lanes)] = defaultdict[str, list[Call]](list)
            for call in program.calls:
                found[call.comm].append(call)
    groups = dict.fromkeys(group for program in programs for group in program.comms.items())
    for name, ranks in groups:
        calls = [by_comm[id(programs[rank].lanes)][name] for rank in ranks]
        distinct = {id(each): [call.signature for call in each] for each in calls}
        first, *others = distinct.values()
        if any(other != first for other in others):
            raise _difference(name, ranks, calls)
    _check_members(programs)


def _difference(name: str, ranks: Sequence[int], calls: Sequence[Sequence[Call]]) -> OrderError:
    """The first position at which not all are alike."""
    for position, there in enumerate(zip_longest(*calls)):
        said = [None if call is None else call.signature for call in there]
        usual, _ = Counter(said).most_common(1)[0]
        odd = [place for place, signature in enumerate(said) if signature != usual]
        if odd:
            mine, others = there[odd[0]], there[said.index(usual)]
            alike = [ranks[place] for place in odd if said[place] == said[odd[0]]]
            return OrderError(
                f"rank {ranks[odd[0]]}: call {position + 1} over {name} (ranks {spans(ranks)}) is "
                f"{mine or 'missing'}, expected {others or 'none'} as on {len(ranks) - len(odd)} of {len(ranks)} "
                f"ranks; differing alike: {spans(alike)}. Make the same calls in the same order on all of them"
            )
    raise AssertionError("sequences of different kinds differ somewhere")


def _check_members(programs: Sequence[Program]) -> None:
    """Every rank of a communicator must know it with the same ranks."""
    for program in programs:
        for name, ranks in program.comms.items():
            for rank in ranks:
                theirs = programs[rank].comms.get(name)
                if theirs != ranks:
                    raise OrderError(
                        f"rank {rank}: communicator {name} has the ranks {theirs and spans(theirs)}, expected "
                        f"{spans(ranks)} as on rank {program.rank}; give all ranks the same mesh and nodes"
                    )


def _check_messages(programs: Sequence[Program]) -> None:
    sent: dict[Way, list[Send]] = defaultdict(list)
    taken: dict[Way, list[Receive]] = defaultdict(list)
    for program in programs:
        for entry, way in _ways(program):
            if isinstance(entry, Send):
                sent[way].append(entry)
            else:
                taken[way].append(entry)
    for way in [*sent, *(way for way in taken if way not in sent)]:
        comm, source, target, _ = way
        for position, (one, other) in enumerate(zip_longest(sent[way], taken[way])):
            mine = one and (one.nbytes, one.dtype)
            theirs = other and (other.nbytes, other.dtype)
            if mine != theirs:
                raise OrderError(
                    f"rank {source}: message {position + 1} over {comm} to rank {target} is {_said(one)}, and rank "
                    f"{target} expects {_said(other)}; send and receive the same in the same order"
                )


def _ways(program: Program) -> Iterator[tuple[Send | Receive, Way]]:
    """Each message with its communicator, source, target and tag."""
    for entry in program.entries():
        if isinstance(entry, (Send, Receive)):
            peer = program.comms[entry.comm][entry.peer]
            ends = (program.rank, peer) if isinstance(entry, Send) else (peer, program.rank)
            yield entry, (entry.comm, ends[0], ends[1], entry.tag)


def _said(message: Send | Receive | None) -> str:
    if message is None:
        return "none"
    return f"{message.name} ({message.nbytes:,} bytes of {message.dtype})"
