"""Stand-ins for MPI's communicators, of any size, and a topology made of them.

Owns: what a call of MPI gives where there is nobody else. Must not know: transports, units, what a call is for.

Every other rank is taken to bring what this one brings: agreements then agree. What is sent goes nowhere, and where
something should arrive memory stays as it is. Each collective call is recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI
from typing_extensions import override

from hpczero.job.group import Forwards, Group
from hpczero.job.mesh import DATA, DATA_SEQUENCE, DEGREES, MODEL, SHARD
from hpczero.job.topology import Topology
from hpczero.job.watchdog import Watchdog
from scaling.simulate.programs import Origin, Places
from scaling.simulate.recorder import Recorder

KINDS = ("comm", "ordered", "node", "rail")


class StandIn(MPI.Intracomm):
    """A communicator of some world ranks, of which this process is one.

    Attributes:
        recorder: told of collective calls.
        name: of the communicator, in programs.
        ranks: of the world, in the order of the communicator.
    """

    recorder: Recorder
    name_of: str
    ranks: tuple[int, ...]
    _rank: int

    def __new__(
        cls, recorder: Recorder, name: str, ranks: tuple[int, ...], me: int, origin: Origin
    ) -> StandIn:
        self = super().__new__(cls, MPI.COMM_SELF)
        self.recorder, self.ranks, self._rank = recorder, ranks, ranks.index(me)
        self.name_of = recorder.new_name(name, ranks, origin)
        return self

    @property
    def size(self) -> int:  # type: ignore[override]  # MPI's is one to read too
        return len(self.ranks)

    @property
    def rank(self) -> int:  # type: ignore[override]
        return self._rank

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

    # --- messages

    def Isend(self, buf: Any, dest: int, tag: int = 0) -> MPI.Request:
        return super().Isend(buf, MPI.PROC_NULL, tag)

    def Irecv(self, buf: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG) -> MPI.Request:
        return super().Irecv(buf, MPI.PROC_NULL, tag)

    def Send_init(self, buf: Any, dest: int, tag: int = 0) -> MPI.Prequest:
        return super().Send_init(buf, MPI.PROC_NULL, tag)

    def Recv_init(
        self, buf: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG
    ) -> MPI.Prequest:
        return super().Recv_init(buf, MPI.PROC_NULL, tag)

    def Sendrecv(self, *args: Any, **others: Any) -> None:
        """Nothing leaves and nothing comes."""

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
        if not _in_place(sendbuf):
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

    return Topology(
        mesh=places.mesh,
        world=group("world", *DEGREES),
        data=group("data", *DATA),
        shard=group("shard", *SHARD),
        replicate=group("replicate", "replicate"),
        data_sequence=group("data and sequence", *DATA_SEQUENCE),
        model_parallel=group("model parallel", *MODEL),
        tensor=group("tensor", "tensor"),
        sequence=group("sequence", "sequence"),
        pipeline=group("pipeline", "pipeline"),
        watchdog=watchdog,
    )


def _in_place(buffer: Any) -> bool:
    return buffer is MPI.IN_PLACE or (isinstance(buffer, int) and buffer == MPI.IN_PLACE)
