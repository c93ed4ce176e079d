"""Replay: the programs of all ranks as events in time, on links that they share.

    work      takes its seconds; on shared processors, their part of them
    call      begins when the last of its ranks comes; over when its bytes are there, and this rank's own work is done
    message   leaves at once if it is short, else when it is expected; the sender goes on meanwhile

A call's bytes go to all ranks alike: what leaves a rank for other nodes is one stream through its node's links, what it
reads inside its node one through its own port. Calls without bytes cost latencies of a tree over nodes and inside them.

A flow is made of equal streams that go on together, such as those of a collective call: one on each of its ranks. A
part is shared equally among the streams on it, and a flow is as fast as the slowest of its streams. What a slow flow
leaves of a part is not given to others.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpczero.predict.machine import Machine
from scaling.simulate.programs import (
    MAIN,
    Await,
    Call,
    Entry,
    OrderError,
    Places,
    Post,
    Program,
    Receive,
    Send,
    Signal,
    Work,
)

# What a lane does or waits for. Waiting of the main lane for another one counts as what that one does meanwhile.
COMPUTE, PEERS, BETWEEN, INSIDE, HOST, STAGES, LANE = (
    "compute",
    "other ranks",
    "links between nodes",
    "links inside nodes",
    "sums and messages of the host",
    "other stages",
    "another lane",
)
WAITS = (PEERS, BETWEEN, INSIDE, HOST, STAGES)


@dataclass(frozen=True)
class Outcome:
    """One step of all ranks.

    Attributes:
        step_s: from the first event to the last.
        spent: of each rank, seconds of its main lane by what it did or waited for.
        between_nbytes: of each rank, sent to other nodes.
        messages: of each rank, to other nodes, as far as its own code sends them.
        links: share of the step in which a node's links between nodes carry anything, the most of all nodes.
        used: bytes that these links carried, of those they could have carried in the step.
    """

    step_s: float
    spent: list[dict[str, float]]
    between_nbytes: list[int]
    messages: list[int]
    links: float
    used: float

    @property
    def idle_s(self) -> list[float]:
        """Of each rank, seconds in which it computes nothing."""
        return [self.step_s - spent.get(COMPUTE, 0.0) for spent in self.spent]

    def mean(self, what: str) -> float:
        """Seconds over all ranks."""
        return sum(spent.get(what, 0.0) for spent in self.spent) / len(self.spent)

    def as_row(self) -> dict[str, Any]:  # Any: JSON
        """The means of all ranks, and what they spend most of the step with."""
        spent = {what: self.mean(what) for what in (COMPUTE, *WAITS)}
        binds = max(spent, key=lambda what: spent[what])
        return {"step_s": self.step_s, "spent": spent, "links": self.links, "binds": binds}


@dataclass(frozen=True)
class Network:
    """Rates of a cluster; bytes per second one way, seconds.

    Attributes:
        node_rate, node_latency: between ranks of a node, for one rank.
        nics, nic_rate, nic_latency: between nodes; all ranks of a node share its ``nics``, one stream takes one.
        message_s: of the host, for each message to another node.
        byte_s: of the host, for each byte to or from another node.
        small_s: of a call that all ranks of several nodes agree by; 0: latencies of a tree.
        cores: processors that share the work of ranks; 0: each rank has its own.
        one_host: whether all nodes share them, as emulated ones do.
        eager_nbytes: messages up to here leave before they are expected.
    """

    node_rate: float
    node_latency: float
    nics: int
    nic_rate: float
    nic_latency: float
    message_s: float = 0.0
    byte_s: float = 0.0
    small_s: float = 0.0
    cores: int = 0
    one_host: bool = False
    eager_nbytes: int = 2**16

    @classmethod
    def of(cls, machine: Machine, *, message_s: float) -> Network:
        """Of a described machine."""
        names = ("node_rate", "node_latency", "nics", "nic_rate", "nic_latency")
        return cls(**{name: getattr(machine, name) for name in names}, message_s=message_s)

    @classmethod
    def none(cls) -> Network:
        """Without limits: bytes take no time."""
        return cls(math.inf, 0.0, 1, math.inf, 0.0)


class Part:
    """What streams share: the links of a node one way, the port of a rank, the cores of a host.

    Attributes:
        capacity: what all its streams do per second.
        streams: how many are on it now.
        flows: those on it, in the order in which they began.
        busy: seconds in which any stream was on it.
        carried: work done on it.
    """

    def __init__(self, capacity: float) -> None:
        self.capacity, self.streams = capacity, 0
        self.flows: dict[Flow, None] = {}
        self.busy = self.carried = 0.0
        self.begun = 0.0  # when the first of the streams came


class Flow:
    """Streams that go on together.

    Attributes:
        streams: how many are on each part.
        left: of the work of one stream.
    """

    __slots__ = ("_since", "done", "left", "most", "rate", "streams", "version")

    def __init__(
        self, streams: Mapping[Part, int], size: float, most: float, done: Callable[[], None]
    ) -> None:
        self.streams, self.left, self.most, self.done = streams, size, most, done
        self.rate, self._since, self.version = 0.0, 0.0, 0

    def settle(self, now: float) -> None:
        """Take off what was done at the rate so far."""
        if self.rate < math.inf:
            self.left = max(self.left - self.rate * (now - self._since), 0.0)
        self._since = now


class Links:
    """Flows over parts, and the events of a replay in the order of their time.

    Attributes:
        now: seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None] | Flow, int]] = []
        self._numbers = itertools.count()

    def later(self, seconds: float, event: Callable[[], None] | Flow, version: int = 0) -> None:
        """Run ``event`` in so many seconds; a flow ends, if it still has this version."""
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), event, version))

    def start(
        self,
        streams: Mapping[Part, int],
        size: float,
        done: Callable[[], None],
        *,
        most: float = math.inf,
    ) -> None:
        """Begin a flow.

        Args:
            streams: how many are on each part.
            size: of the work of one stream.
            done: is called at the end.
            most: work of one stream per second, at most.
        """
        flow = Flow(streams, size, most, done)
        flow.settle(self.now)
        for part, number in streams.items():
            if not part.streams:
                part.begun = self.now
            part.streams += number
            part.flows[flow] = None
            part.carried += number * size
        self._share(streams, flow)

    def _end(self, flow: Flow) -> None:
        for part, number in flow.streams.items():
            part.streams -= number
            del part.flows[flow]
            if not part.streams:
                part.busy += self.now - part.begun
        self._share(flow.streams, None)
        flow.done()

    def _share(self, parts: Mapping[Part, int], new: Flow | None) -> None:
        """Rates of all flows on these parts, and when they will end."""
        changed = dict.fromkeys(flow for part in parts for flow in part.flows)
        if new is not None:
            changed[new] = None
        for flow in changed:
            rate = min((part.capacity / part.streams for part in flow.streams), default=math.inf)
            rate = min(rate, flow.most)
            if rate == flow.rate and flow is not new:
                continue
            flow.settle(self.now)
            flow.rate = rate
            flow.version += 1
            self.later(flow.left / rate if rate < math.inf else 0.0, flow, flow.version)

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._events:
            time, _, event, version = heapq.heappop(self._events)
            if not isinstance(event, Flow):
                self.now = time
                event()
            elif event.version == version:
                self.now = time
                self._end(event)


MOST_NAMED = 4


def replay(programs: Sequence[Program], places: Places, network: Network) -> Outcome:
    """Run the programs against each other.

    Args:
        programs: of all ranks, in rank order; checked by ``matching.check``.
        places: where the ranks are.
        network: what they run on.

    Raises:
        OrderError: ranks wait for each other for ever; names what some of them wait for.
    """
    return _Replay(programs, places, network).run()


@dataclass(eq=False)
class _Lane:
    """A lane on its way."""

    rank: int
    name: str
    entries: Sequence[Entry]
    place: int = 0
    phase: str = LANE
    since: float = 0.0
    spent: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    of_other: dict[str, float] = field(default_factory=dict)  # what that one had spent before

    def go(self, phase: str, now: float) -> None:
        """From now on it does ``phase``."""
        self.spent[self.phase] += now - self.since
        self.phase, self.since = phase, now


@dataclass(eq=False)
class _Meeting:
    """One call of all ranks of a communicator."""

    ranks: tuple[int, ...]
    came: list[tuple[_Lane, Call]] = field(default_factory=list)
    working: set[int] = field(default_factory=set)  # ranks whose own work goes on
    going: int = 1  # flows, and the wait for all ranks; 0: all bytes are there


@dataclass(eq=False)
class _Mail:
    """Messages of one way: communicator, source, target, tag."""

    sent: deque[Send] = field(default_factory=deque)  # not begun
    posted: int = 0  # receives that wait for one to begin
    there: int = 0  # arrived, not taken
    waiting: _Lane | None = None


class _Replay:
    def __init__(self, programs: Sequence[Program], places: Places, network: Network) -> None:
        self._programs, self._places, self._network = programs, places, network
        self._links = Links()
        self._lanes = [
            {name: _Lane(program.rank, name, entries) for name, entries in program.lanes.items()}
            for program in programs
        ]
        self._tokens: set[tuple[int, str]] = set()
        self._sleepers: dict[tuple[int, str], list[_Lane]] = defaultdict(list)
        self._counts: dict[tuple[int, str], int] = defaultdict(int)
        self._meetings: dict[tuple[str, tuple[int, ...], int], _Meeting] = {}
        self._mail: dict[tuple[str, int, int, int], _Mail] = defaultdict(_Mail)
        self._between, self._messages = [0] * len(programs), [0] * len(programs)
        nodes = range(places.node(len(programs) - 1) + 1)
        rate = network.nics * network.nic_rate
        self._out, self._in = ([Part(rate) for _ in nodes] for _ in range(2))
        self._cores = [Part(network.cores) for _ in nodes]
        self._ports = [Part(network.node_rate) for _ in programs]
        self._on: dict[tuple[int, ...], tuple[dict[Part, int], int, int]] = {}

    def run(self) -> Outcome:
        lanes = [lane for each in self._lanes for lane in each.values()]
        for lane in lanes:
            self._advance(lane)
        self._links.run()
        stuck = [lane for lane in lanes if lane.place < len(lane.entries)]
        if stuck:
            raise self._standstill(stuck)
        step_s = self._links.now
        busy, carried = max(p.busy for p in self._out), max(p.carried for p in self._out)
        room = self._network.nics * self._network.nic_rate * step_s
        return Outcome(
            step_s=step_s,
            spent=[dict(each[MAIN].spent) for each in self._lanes],
            between_nbytes=self._between,
            messages=self._messages,
            links=busy / step_s if step_s else 0.0,
            used=carried / room if step_s and room < math.inf else 0.0,
        )

    def _standstill(self, stuck: Sequence[_Lane]) -> OrderError:
        waits = [lane for lane in stuck if not isinstance(lane.entries[lane.place], Await)] or stuck
        said = [
            f"rank {lane.rank} ({lane.name}, entry {lane.place + 1}) waits in {lane.entries[lane.place]}"
            for lane in waits[:MOST_NAMED]
        ]
        more = f"; and {len(waits) - MOST_NAMED} more" if len(waits) > MOST_NAMED else ""
        return OrderError(
            f"{len({lane.rank for lane in stuck})} ranks wait for each other for ever: {'; '.join(said)}{more}; "
            "expected an order of calls and messages in which one of them comes first everywhere"
        )

    # --- lanes

    def _advance(self, lane: _Lane) -> None:
        """Go on until something is to be waited for."""
        while lane.place < len(lane.entries):
            if not self._enter(lane, lane.entries[lane.place]):
                return
            lane.place += 1
        lane.go(LANE, self._links.now)

    def _resume(self, lane: _Lane) -> None:
        """What the lane has waited for is there."""
        lane.place += 1
        self._advance(lane)

    def _enter(self, lane: _Lane, entry: Entry) -> bool:
        """Begin an entry; whether the lane may go on at once."""
        if isinstance(entry, Work):
            lane.go(COMPUTE if lane.name == MAIN else HOST, self._links.now)
            self._work(lane.rank, entry.seconds, lambda: self._resume(lane))
            return False
        if isinstance(entry, Call):
            self._call(lane, entry)
            return False
        if isinstance(entry, Signal):
            token = lane.rank, entry.token
            self._tokens.add(token)
            for sleeper in self._sleepers.pop(token, ()):
                self._links.later(0.0, lambda lane=sleeper: self._wake(lane))  # type: ignore[misc]
            return True
        if isinstance(entry, Await):
            return self._await(lane, entry)
        if isinstance(entry, Receive):
            return self._receive(lane, entry)
        if isinstance(entry, Send):
            return self._send(lane, entry)
        self._post(lane, entry)
        return True

    def _work(self, rank: int, seconds: float, done: Callable[[], None]) -> None:
        if not self._network.cores:
            self._links.later(seconds, done)
            return
        node = 0 if self._network.one_host else self._places.node(rank)
        self._links.start({self._cores[node]: 1}, seconds, done, most=1.0)

    def _await(self, lane: _Lane, entry: Await) -> bool:
        token = lane.rank, entry.token
        if token in self._tokens:
            return True
        now = self._links.now
        lane.go(LANE, now)
        other = self._lanes[lane.rank][entry.lane]
        other.go(other.phase, now)
        lane.of_other = dict(other.spent)
        self._sleepers[token].append(lane)
        return False

    def _wake(self, lane: _Lane) -> None:
        """The other lane has given the token: what it did meanwhile is what this one has waited for."""
        now, entry = self._links.now, lane.entries[lane.place]
        assert isinstance(entry, Await), "it slept there"
        other = self._lanes[lane.rank][entry.lane]
        other.go(other.phase, now)
        for phase, seconds in other.spent.items() if lane.name == MAIN else ():
            if phase != LANE:
                lane.spent[phase] += seconds - lane.of_other.get(phase, 0.0)
        lane.since = now
        self._resume(lane)

    # --- calls

    def _call(self, lane: _Lane, call: Call) -> None:
        rank, network = lane.rank, self._network
        number = self._counts[rank, call.comm]
        self._counts[rank, call.comm] += 1
        ranks = self._programs[rank].comms[call.comm]
        meeting = self._meetings.setdefault((call.comm, ranks, number), _Meeting(ranks))
        meeting.came.append((lane, call))
        lane.go(PEERS, self._links.now)
        _, between, _ = self._parts(ranks)
        self._between[rank] += call.sent * between
        self._messages[rank] += call.messages
        own = call.work.seconds + call.messages * network.message_s
        own += 2 * call.sent * between * network.byte_s
        if own:
            meeting.working.add(rank)
            self._work(rank, own, lambda: self._worked(meeting, lane))
        if len(meeting.came) == len(ranks):
            del self._meetings[call.comm, ranks, number]
            self._move(meeting, call)

    def _worked(self, meeting: _Meeting, lane: _Lane) -> None:
        meeting.working.discard(lane.rank)
        if not meeting.going:
            self._resume(lane)

    def _move(self, meeting: _Meeting, call: Call) -> None:
        """All ranks are there: bytes begin to move."""
        network, ranks = self._network, meeting.ranks
        parts, between, inside = self._parts(ranks)
        phase = BETWEEN if between else INSIDE
        for lane, _ in meeting.came:
            lane.go(phase, self._links.now)
        done = lambda: self._moved(meeting)  # noqa: E731  (of each of the flows)
        if not call.sent:
            self._links.later(self._agreeing_s(ranks), done)
            return
        latency = network.nic_latency if between else network.node_latency
        if between:
            size = call.sent * between
            most = network.nic_rate
            if call.batches > 1 and latency:
                most = min(most, size / (call.batches * latency))
            meeting.going += 1
            self._links.start(parts, size, done, most=most)
        if inside:
            meeting.going += 1
            ports = {self._ports[rank]: 1 for rank in ranks}
            self._links.start(ports, call.sent * inside, done)
        for lane, mine in meeting.came if call.beside else ():
            peers = len(self._programs[lane.rank].comms[mine.beside]) - 1
            meeting.going += 1
            self._links.start({self._ports[lane.rank]: 1}, mine.beside_sent * peers, done)
        self._links.later(latency, done)

    def _moved(self, meeting: _Meeting) -> None:
        meeting.going -= 1
        if meeting.going:
            return
        for lane, _ in meeting.came:
            if lane.rank in meeting.working:
                lane.go(HOST, self._links.now)
            else:
                self._resume(lane)

    def _parts(self, ranks: tuple[int, ...]) -> tuple[dict[Part, int], int, int]:
        """Streams on links between nodes; peers of a rank on other nodes, and on its own, the most of all ranks."""
        if ranks not in self._on:
            here: dict[int, int] = defaultdict(int)
            for rank in ranks:
                here[self._places.node(rank)] += 1
            streams: dict[Part, int] = {}
            if len(here) > 1:
                for node, number in here.items():
                    streams[self._out[node]] = streams[self._in[node]] = number
            self._on[ranks] = streams, len(ranks) - min(here.values()), max(here.values()) - 1
        return self._on[ranks]

    def _agreeing_s(self, ranks: tuple[int, ...]) -> float:
        """Of a call without bytes."""
        network = self._network
        nodes = len({self._places.node(rank) for rank in ranks})
        local = -(-len(ranks) // nodes)
        if nodes > 1 and network.small_s:
            return network.small_s
        inside = math.ceil(math.log2(local)) * network.node_latency
        return inside + math.ceil(math.log2(nodes)) * network.nic_latency

    # --- messages

    def _way(
        self, lane: _Lane, entry: Send | Post | Receive
    ) -> tuple[tuple[str, int, int, int], _Mail]:
        peer = self._programs[lane.rank].comms[entry.comm][entry.peer]
        ends = (lane.rank, peer) if isinstance(entry, Send) else (peer, lane.rank)
        way = (entry.comm, *ends, entry.tag)
        return way, self._mail[way]

    def _send(self, lane: _Lane, entry: Send) -> bool:
        way, mail = self._way(lane, entry)
        mail.sent.append(entry)
        if self._places.node(way[1]) != self._places.node(way[2]):
            self._between[lane.rank] += entry.nbytes
        if entry.nbytes <= self._network.eager_nbytes or mail.posted > 0:
            mail.posted -= 1
            self._leave(way, mail)
        return True

    def _post(self, lane: _Lane, entry: Post) -> None:
        way, mail = self._way(lane, entry)
        mail.posted += 1
        if mail.sent:
            mail.posted -= 1
            self._leave(way, mail)

    def _leave(self, way: tuple[str, int, int, int], mail: _Mail) -> None:
        message = mail.sent.popleft()
        _, source, target, _ = way
        nodes = self._places.node(source), self._places.node(target)
        if nodes[0] == nodes[1]:
            latency, most = self._network.node_latency, math.inf
            ends = self._ports[source], self._ports[target]
        else:
            latency, most = self._network.nic_latency, self._network.nic_rate
            ends = self._out[nodes[0]], self._in[nodes[1]]
        arrive = lambda: self._links.later(latency, lambda: self._arrive(mail))  # noqa: E731
        self._links.start(dict.fromkeys(ends, 1), message.nbytes, arrive, most=most)

    def _arrive(self, mail: _Mail) -> None:
        mail.there += 1
        lane, mail.waiting = mail.waiting, None
        if lane is not None:
            mail.there -= 1
            self._resume(lane)

    def _receive(self, lane: _Lane, entry: Receive) -> bool:
        _, mail = self._way(lane, entry)
        if mail.there:
            mail.there -= 1
            return True
        lane.go(STAGES, self._links.now)
        mail.waiting = lane
        return False
