"""Links: what carries bytes and who computes, and streams that share them as they come and go.

Owns: the rates of a machine's parts, and how streams that run at a time share a part. Must not know: programs, ranks'
order of work.

A flow is made of equal streams that go on together, such as those of a collective call: one on each of its ranks. A
part is shared equally among the streams on it, and a flow is as fast as the slowest of its streams. What a slow flow
leaves of a part is not given to others.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

from hpczero.predict.machine import Machine

Part = Hashable


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
        return cls(
            node_rate=machine.node_rate,
            node_latency=machine.node_latency,
            nics=machine.nics,
            nic_rate=machine.nic_rate,
            nic_latency=machine.nic_latency,
            message_s=message_s,
        )

    @classmethod
    def none(cls) -> Network:
        """Without limits: bytes take no time."""
        return cls(math.inf, 0.0, 1, math.inf, 0.0)


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
    """Parts, the flows on them, and the events of a replay in the order of their time.

    Attributes:
        now: seconds.
        busy: seconds in which any stream was on a part.
        carried: work done on it.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.busy: dict[Part, float] = {}
        self.carried: dict[Part, float] = {}
        self._capacity: dict[Part, float] = {}
        self._streams: dict[Part, int] = {}
        self._flows: dict[Part, dict[Flow, None]] = {}  # in the order in which they began
        self._begun: dict[Part, float] = {}
        self._events: list[tuple[float, int, Callable[[], None] | Flow, int]] = []
        self._numbers = itertools.count()

    def add_part(self, part: Part, capacity: float) -> None:
        """A part, and what all its streams do per second."""
        self._capacity[part] = capacity
        self._streams[part], self._flows[part] = 0, {}
        self.busy[part] = self.carried[part] = 0.0

    def later(self, seconds: float, event: Callable[[], None]) -> None:
        """Run ``event`` in so many seconds."""
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), event, 0))

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
            if not self._streams[part]:
                self._begun[part] = self.now
            self._streams[part] += number
            self._flows[part][flow] = None
            self.carried[part] += number * size
        self._share(streams, flow)

    def _end(self, flow: Flow) -> None:
        for part, number in flow.streams.items():
            self._streams[part] -= number
            del self._flows[part][flow]
            if not self._streams[part]:
                self.busy[part] += self.now - self._begun.pop(part)
        self._share(flow.streams, None)
        flow.done()

    def _share(self, parts: Mapping[Part, int], new: Flow | None) -> None:
        """Rates of all flows on these parts, and when they will end."""
        capacity, streams = self._capacity, self._streams
        changed = dict.fromkeys(flow for part in parts for flow in self._flows[part])
        if new is not None:
            changed[new] = None
        for flow in changed:
            rate = min((capacity[part] / streams[part] for part in flow.streams), default=math.inf)
            rate = min(rate, flow.most)
            if rate == flow.rate and flow is not new:
                continue
            flow.settle(self.now)
            flow.rate = rate
            flow.version += 1
            takes = flow.left / rate if rate < math.inf else 0.0
            heapq.heappush(
                self._events, (self.now + takes, next(self._numbers), flow, flow.version)
            )

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._events:
            time, _, event, version = heapq.heappop(self._events)
            if isinstance(event, Flow):
                if event.version != version:
                    continue
                self.now = time
                event.left = 0.0
                event.version += 1
                self._end(event)
            else:
                self.now = time
                event()
