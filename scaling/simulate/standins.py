"""Stand-ins for all other ranks: communicators, algorithms between nodes, transports, and messages between stages.

Every other rank is taken to bring what this one brings: agreements then agree. What is sent goes nowhere, and where
something should arrive memory stays as it is. The order of everything, rounds and numbers of messages are those of the
real transports and algorithms; what the MPI library would do by itself is recorded as bytes. What a queue would do
later is done at once, and recorded as a lane.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor
from typing_extensions import override

from hpczero.accelerator import Accelerator
from hpczero.comm import Collectives, Flat, Hierarchical, Hybrid
from hpczero.comm.algorithms import CHUNK_BYTES, Blocks, Exchange, Gather, Meanwhile, Prepare, steps
from hpczero.comm.background import Background
from hpczero.comm.devices import Reach
from hpczero.comm.inside import NodeLevel, Parts
from hpczero.comm.stage_messages import Message, StageMessages
from hpczero.comm.sums import Path
from hpczero.comm.sums import SumCall as PathCall
from hpczero.job.group import Forwards, Group
from hpczero.job.mesh import DEGREES
from hpczero.job.topology import Topology
from hpczero.job.watchdog import Watchdog
from hpczero.memory.buffers import Buffer, Memory, Use
from hpczero.plan.footprint import IN_FLIGHT, Named
from scaling.hostcost.step import Nobody
from scaling.simulate.programs import Origin, Places, Post, Receive, Send
from scaling.simulate.recorder import Recorder

KINDS = ("comm", "ordered", "node", "rail")


class StandIn(Nobody):
    """A communicator of some world ranks, of which this process is one.

    Attributes:
        recorder: told of collective calls.
        name: of the communicator, in programs.
        ranks: of the world, in the order of the communicator.
    """

    recorder: Recorder
    name_of: str
    ranks: tuple[int, ...]

    def __new__(
        cls, recorder: Recorder, name: str, ranks: tuple[int, ...], me: int, origin: Origin
    ) -> StandIn:
        self = super().__new__(cls, MPI.COMM_SELF)
        self.recorder, self.ranks = recorder, ranks
        self._size, self._rank = len(ranks), ranks.index(me)
        self.name_of = recorder.new_name(name, ranks, origin)
        return self

    def Dup(self, info: Any = None) -> StandIn:
        origin = self.recorder.origins[self.name_of]
        return StandIn(
            self.recorder, f"{self.name_of}, again", self.ranks, self.ranks[self._rank], origin
        )

    def Free(self) -> None:
        """Nothing to free; the communicator behind it is everybody's."""

    def Set_name(self, name: str) -> None:
        """It has one."""

    def Get_name(self) -> str:
        return self.name_of

    def Iprobe(self, *args: Any, **others: Any) -> bool:
        return False

    # --- collective calls

    def _call(self, operation: str, nbytes: int) -> None:
        self.recorder.call(self.name_of, nbytes, operation=operation, dtype="bytes")

    def Barrier(self) -> None:
        self._call("Barrier", 0)

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> None:
        found = np.asarray(recvbuf)
        self._call("Allreduce", found.nbytes)
        if sendbuf is not MPI.IN_PLACE:
            found[...] = sendbuf

    def Allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        found = np.asarray(recvbuf)
        self._call("Allgather", found.nbytes // self.size)
        found[...] = sendbuf

    def Bcast(self, buf: Any, root: int = 0) -> None:
        self._call("Bcast", np.asarray(buf[0] if isinstance(buf, list) else buf).nbytes)

    def allgather(self, sendobj: Any) -> list[Any]:
        self._call("allgather", 0)
        return [sendobj] * self.size

    def bcast(self, obj: Any, root: int = 0) -> Any:
        self._call("bcast", 0)
        return obj

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        self._call("gather", 0)
        return [sendobj] * self.size if root == self.rank else None


class StandInGroup(Group):
    """A group whose ranks all say what this one says."""

    @override
    def broadcast_text(self, text: str, root: int = 0) -> str:
        super().broadcast_text(text, root)
        return text


def group_of(
    recorder: Recorder,
    places: Places,
    me: int,
    degrees: Sequence[str],
    watchdog: Watchdog,
    name: str,
) -> Group:
    """The group of world rank ``me`` that shares these degrees."""
    found = places.group(me, degrees)
    comms = {}
    for kind in KINDS[:1] if len(found) == 1 else KINDS:
        origin = Origin(tuple(degrees), kind)
        ranks = places.comm(me, origin)
        title = name if kind == "comm" else f"{name}.{kind}"
        comms[kind] = StandIn(recorder, title, ranks, me, origin)
    comm = comms["comm"]
    nodes = places.nodes(found)
    even = len({len(each) for each in nodes}) == 1
    return StandInGroup(
        comm=comm,
        ordered=comms.get("ordered", comm),
        node=comms.get("node", comm),
        rail=comms.get("rail", comm) if even else None,
        nodes=nodes,
        faked=True,
        watchdog=watchdog,
        forwards=Forwards(),  # of its own: none is begun anew in a simulated job
    )


def topology_of(recorder: Recorder, places: Places, me: int) -> Topology:
    """The topology that world rank ``me`` of the job has, of stand-ins."""
    watchdog = Watchdog(me, 0.0)
    groups: dict[tuple[int, ...], Group] = {}

    def group(name: str, *degrees: str) -> Group:
        ranks = places.group(me, degrees)
        if ranks not in groups:
            groups[ranks] = group_of(recorder, places, me, degrees, watchdog, name)
        return groups[ranks]

    return Topology.of_groups(places.mesh, group("world", *DEGREES), watchdog, group)


class RecordedGather(Gather):
    """An algorithm whose messages go nowhere; each call is an entry."""

    def __init__(self, inner: Gather, recorder: Recorder) -> None:
        super().__init__(inner.comm, chunk_nbytes=inner.chunk_nbytes)
        self.name = inner.name  # type: ignore[misc]  # of this one object
        self.in_rounds = inner.in_rounds  # type: ignore[misc]  # of this one object
        self._inner, self._recorder = inner, recorder

    @override
    def __call__(self, blocks: Blocks, *, round_nbytes: int = CHUNK_BYTES) -> None:
        if blocks.count == 1:
            return
        if blocks.tensor.device.type == "cpu":
            with self._recorder.paused():  # what was there before may be no number
                for place in range(blocks.count):
                    if place != self.comm.rank:
                        blocks.view(place).zero_()
        self._recorder.open()
        if self.name != "library":
            self._inner(blocks, round_nbytes=round_nbytes)
        _note(self, self._inner, self._recorder, blocks.nbytes)

    def _gather(self, blocks: Blocks) -> None:
        raise AssertionError("the inner one does it")

    @override
    def free(self) -> None:
        self._inner.free()


class RecordedExchange(Exchange):
    """The same of an exchange: all calls up to ``finish`` are one entry."""

    def __init__(self, inner: Exchange, recorder: Recorder) -> None:
        super().__init__(inner.comm, chunk_nbytes=inner.chunk_nbytes)
        self.name = inner.name  # type: ignore[misc]  # of this one object
        self._inner, self._recorder = inner, recorder
        self._nbytes = 0  # of the calls so far
        self._is_open = False

    def _exchange(
        self, send: Blocks, receive: Blocks, prepare: Prepare, meanwhile: Meanwhile
    ) -> None:
        if not self._is_open:
            self._recorder.open()
            self._is_open = True
        self._nbytes += send.nbytes
        if receive.tensor.device.type == "cpu":
            with self._recorder.paused():  # what was there before may be no number
                receive.tensor.zero_()
        if self.name == "library":
            meanwhile()
            prepare(0, send.count)
        else:
            self._inner(send, receive, prepare=prepare, meanwhile=meanwhile)

    @override
    def finish(self) -> None:
        if not self._is_open:
            return
        self._inner.finish()
        _note(self, self._inner, self._recorder, self._nbytes)
        self._nbytes, self._is_open = 0, False

    @override
    def free(self) -> None:
        self._inner.free()


def _note(
    algorithm: Gather | Exchange, inner: Gather | Exchange, recorder: Recorder, nbytes: int
) -> None:
    """Record what was done since ``Recorder.open`` as one call."""
    comm, work = algorithm.comm, recorder.close()
    assert isinstance(comm, StandIn), "of this study"
    batches = messages = inner.messages - algorithm.messages
    algorithm.messages = inner.messages
    if algorithm.name == "pairwise":
        each = -(-messages // max(comm.size - 1, 1))
        batches = -(-len(list(steps(comm.size))) * each // IN_FLIGHT)
    recorder.call(
        comm.name_of,
        nbytes,
        operation=recorder.operation or "exchange",
        dtype=recorder.dtype or "bytes",
        sent=nbytes,
        messages=messages,
        batches=max(batches, 1),
        work=work,
    )


class RecordedReach(Reach):
    """Makes algorithms whose messages are recorded, for memory that MPI sees."""

    name = "nobody's memory"

    def __init__(self, accelerator: Accelerator, recorder: Recorder, inner: Reach) -> None:
        super().__init__(accelerator)
        self.recorder, self._inner = recorder, inner

    @override
    def gather(
        self, kind: type[Gather], comm: MPI.Intracomm, *, chunk_nbytes: int = CHUNK_BYTES
    ) -> Gather:
        return RecordedGather(
            self._inner.gather(kind, comm, chunk_nbytes=chunk_nbytes), self.recorder
        )

    @override
    def exchange(
        self, kind: type[Exchange], comm: MPI.Intracomm, *, chunk_nbytes: int = CHUNK_BYTES
    ) -> Exchange:
        return RecordedExchange(
            self._inner.exchange(kind, comm, chunk_nbytes=chunk_nbytes), self.recorder
        )

    @override
    def broadcast(self, comm: MPI.Intracomm, blocks: Blocks, root: int) -> None:
        assert isinstance(comm, StandIn), "of this study"
        self.recorder.call(comm.name_of, blocks.nbytes, operation="broadcast", dtype="bytes")


def name_of(tensor: Tensor) -> str:
    """Of the tensor's dtype, as programs have it."""
    return str(tensor.dtype).removeprefix("torch.")


# --- inside a node


class StandInBuffer(Buffer):
    """Whole parameters that a node would share."""

    shared = True

    def __init__(self, *args: Any, lasts: bool, **others: Any) -> None:
        super().__init__(*args, **{**others, "keep": True})
        self.lasts = lasts  # of this one object
        with torch.no_grad():
            self.tensor.zero_()  # parts of peers stay so


class Peers(NodeLevel):
    """Ranks of a node that share memory, of which this one is alone."""

    most_nbytes = 2**62

    def __init__(
        self,
        node: StandIn,
        memory: Memory,
        recorder: Recorder,
        *,
        device: torch.device,
        lasts: bool,
    ) -> None:
        super().__init__(node, memory, device=device)
        self.shares_wholes = device.type == "cpu"
        self._recorder, self._lasts, self._node = recorder, lasts, node

    @override
    def allocate(
        self, numel: int, dtype: torch.dtype, *, category: str, use: Use, keep: bool
    ) -> Buffer:
        if use is not Use.GATHER or not self.shares_wholes:
            # Gradients that peers read stay where they are while a sum is put off.
            keep = keep or (use is Use.REDUCE and self.shares_wholes)
            return super().allocate(numel, dtype, category=category, use=use, keep=keep)
        return StandInBuffer(numel, dtype, memory=self.memory, category=category, lasts=self._lasts)

    @override
    def shares(self, full: Tensor, use: Use) -> bool:
        return use is Use.REDUCE or self.shares_wholes

    @override
    def spread(self, full: Tensor) -> Callable[[], None] | None:
        pulled = 0 if self.shares_wholes else full.numel() // self.comm.size * full.element_size()
        self._meet(full, pulled)
        return None

    @override
    @contextmanager
    def reading(self, full: Tensor) -> Iterator[Parts]:
        part = full.numel() // self.comm.size
        self._meet(full, 0)
        if not self.shares_wholes:
            self._recorder.reads = self._node.name_of, part * full.element_size()
        yield lambda start, count: [full.narrow(0, start, count)] * self.comm.size
        if self._recorder.reads[1]:  # no other call has gone on meanwhile
            self._recorder.reads = "", 0
            self._meet(full, part * full.element_size())

    def _meet(self, full: Tensor, sent: int) -> None:
        self._recorder.call(
            self._node.name_of, full.numel() * full.element_size(), operation="meet", sent=sent
        )

    @override
    def close(self) -> None:
        """Nothing to free."""


# --- beside the model


class Lane(Background):
    """A queue whose operations are done at once, and recorded as done by a lane of their own."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder, self._name = recorder, name

    @override
    def start(self, what: str, operation: Callable[[], None]) -> Callable[[], None]:
        with self._recorder.started(self._name) as starting, torch.no_grad():
            operation()
        return starting.wait

    @override
    def drain(self) -> None:
        """Nothing is under way."""

    @override
    def close(self) -> None:
        """No thread was started."""


def _labelled(operation: str, dtype: str = "") -> Any:
    """The call of that name, of ``dtype`` or that of its tensor; what it calls in turn is known to be for it."""

    def call(self: Labelled, given: Any, *args: Any, name: str, **others: Any) -> Any:
        with self.recorder.labelled(operation, name, dtype or name_of(given)):
            return getattr(super(Labelled, self), operation)(given, *args, name=name, **others)

    return call


class Labelled(Collectives):
    """Says of each call what it is for."""

    lane = ""  # of what goes on beside the model
    _background: Background | None = None
    all_gather, reduce_scatter = _labelled("all_gather"), _labelled("reduce_scatter")
    total, agree = _labelled("total", "digits"), _labelled("agree", "bits")
    share = _labelled("share", "float64")

    def __init__(self, recorder: Recorder, *args: Any, **others: Any) -> None:
        self.recorder = recorder
        super().__init__(*args, **others)
        if self._background is not None:
            self._background = Lane(recorder, self.lane)


class RecordedFlat(Labelled, Flat):
    """Flat over stand-ins."""


class RecordedHierarchical(Labelled, Hierarchical):
    """Hierarchical over stand-ins."""

    lane = "shards"

    @override
    def _level(
        self, inside: str, group: Group, messages: NodeLevel, *, shares_wholes: bool
    ) -> NodeLevel:
        if group.node.size == 1 or inside == "messages":
            return messages
        assert isinstance(group.node, StandIn), "of this study"
        node = self._own[1] if self._own else group.node
        assert isinstance(node, StandIn), "a duplicate of it"
        return Peers(
            node, self.memory, self.recorder, device=self.device, lasts=group.num_nodes == 1
        )


class RecordedHybrid(Labelled, Hybrid):
    """Hybrid over stand-ins."""

    lane = "replicas"


def transport_of(
    recorder: Recorder,
    topology: Topology,
    replicas: Group | None,
    reach: Reach,
    name: Callable[[int, int], Named],
    *,
    node_dtype: torch.dtype,
    secondary: bool = False,
) -> Collectives:
    """The transport that ``comm.choose`` would make.

    Args:
        recorder: of this rank.
        topology: of stand-ins.
        replicas: a group of its own with the ranks of ``topology.replicate``; None where it is one rank.
        reach: a RecordedReach.
        name: which transport serves so many ranks of a node on so many nodes.
        node_dtype: of partial sums.
        secondary: whether nodes keep what they have gathered.
    """

    def one(ranks: Topology | Group, *, second: bool, overlap: bool, memory: Memory | None) -> Any:
        group = ranks.shard if isinstance(ranks, Topology) else ranks
        chosen = name(group.local_size, group.num_nodes)
        common = {"node_dtype": node_dtype, "reach": reach, "memory": memory}
        if chosen == "flat":
            return RecordedFlat(recorder, ranks, **common)
        wanted = group.num_nodes > 1 or not reach.accelerator.is_host
        inside = chosen if chosen in ("window", "ipc") else "messages"
        return RecordedHierarchical(
            recorder, ranks, inside=inside, overlap=overlap and wanted, secondary=second, **common
        )

    if replicas is None:
        return one(topology, second=secondary, overlap=True, memory=None)
    inside = one(topology.shard, second=secondary, overlap=True, memory=None)
    outside = one(replicas, second=False, overlap=False, memory=inside.memory)
    wanted = replicas.num_nodes > 1 or not reach.accelerator.is_host
    return RecordedHybrid(recorder, topology, inside, outside, overlap=wanted)


ROOM_NBYTES = 32 * 2**20  # as of the paths that move something


class RecordedPath(Path):
    """Ranks that share each layer's products, each of which brings what this one brings."""

    def __init__(self, group: Group, recorder: Recorder) -> None:
        super().__init__(group, ROOM_NBYTES)
        self._recorder = recorder

    @override
    def _exchange(
        self,
        parts: Sequence[Tensor],
        call: PathCall,
        say: Callable[[], str],
        *,
        whole: bool,
        start: int = 0,
    ) -> tuple[list[PathCall], list[Tensor]]:
        size, comm = self.group.size, self.group.comm
        assert isinstance(comm, StandIn), "of this study"
        own = parts[0 if whole else self.group.rank].contiguous().view(-1)
        nbytes = own.numel() * own.element_size()
        verb = f"{'whole' if whole else 'parts'} of activations"
        self._recorder.call(comm.name_of, nbytes, operation=verb, dtype=name_of(own), sent=nbytes)
        return [call] * size, [own] * size

    @override
    def close(self) -> None:
        """Nothing to free."""


class RecordedStageMessages(StageMessages):
    """Messages from and to stages that are not there; those that come have the form that all have.

    The small message that tells a form goes with the first activation, and is not counted.
    """

    def __init__(self, recorder: Recorder, group: Group, *, chunks: int, form: Tensor) -> None:
        """``form``: what passes from stage to stage, of one micro-batch."""
        super().__init__(group, chunks=chunks)
        assert isinstance(group.comm, StandIn), "of this study"
        self._recorder, self._comm = recorder, group.comm.name_of
        self._form = form
        self._known: set[int] = set()  # boundaries whose form is known
        self._expected: set[Message] = set()

    @override
    def begin(self, settings: int) -> None:
        super().begin(settings)
        self._known.clear()
        self._expected.clear()

    @override
    def moving(self) -> AbstractContextManager[None]:
        return nullcontext()

    @override
    def send(self, message: Message, data: Tensor) -> None:
        self._known.add(message.boundary)
        self._record(Send, self._stage(message.piece), self._tag(message), data, _title(message))

    @override
    def progress(self) -> None:
        """Nothing is under way."""

    @override
    def finish(self) -> None:
        """Everything is delivered."""

    @override
    def expect(self, message: Message) -> None:
        if message.boundary in self._known and message not in self._expected:
            self._expected.add(message)
            self._recorder.record(Post(self._comm, self._stage(message.source), self._tag(message)))

    @override
    def receive(self, message: Message) -> Tensor:
        self._known.add(message.boundary)
        self.expect(message)
        self._expected.discard(message)
        peer, tag = self._stage(message.source), self._tag(message)
        self._record(Receive, peer, tag, self._form, _title(message))
        with self._recorder.paused():
            return torch.zeros_like(self._form)

    @override
    def swap(self, mine: Tensor, peer: int, *, name: str) -> Tensor:
        tag = 3
        self._recorder.record(Post(self._comm, peer, tag))
        self._record(Send, peer, tag, mine, name)
        self._record(Receive, peer, tag, mine, name)
        return mine.clone()

    def _record(
        self, kind: type[Send | Receive], peer: int, tag: int, data: Tensor, name: str
    ) -> None:
        nbytes = data.numel() * data.element_size()
        self._recorder.record(kind(self._comm, peer, tag, nbytes, name_of(data), name))
        if kind is Send:
            self.stats.messages += 1
            self.stats.sent_nbytes += nbytes


def _title(message: Message) -> str:
    what = "activation" if message.kind == "F" else "gradient"
    return f"{what} of micro-batch {message.micro_batch} for piece {message.piece}"
