"""Start: the process groups of torch, made of communicators."""

from __future__ import annotations

import atexit
import math
import sys
import threading
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from mpi4py import MPI
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]
from typing_extensions import override

from hpczero.bridge.exchange import DirectReads
from hpczero.bridge.line import Line, until
from hpczero.bridge.messages import GroupMessages
from hpczero.bridge.process_group import MPIProcessGroup
from hpczero.bridge.tensors import DEVICES
from hpczero.comm.sums import best_path
from hpczero.errors import (
    EXIT_HANG,
    CommError,
    ConfigError,
    TopologyError,
    abort_job,
    install_abort_hook,
)
from hpczero.job.topology import Topology, before_finalize, check_launch
from hpczero.options.environment import Environment

# Store: keys and values that all ranks of the default group see, kept by its first rank.
#
# torch gives each backend a store by which its ranks find each other. The bridge's own groups ask it nothing. Others
# do: gloo beside the bridge, and what torch builds on keys. Rank 0 looks for questions often while some come, and
# seldom otherwise. A rank that waits for a key asks again and again, so nobody's question waits behind it.

QUESTION, ANSWER = 1, 2  # tags
OFTEN_S, SELDOM_S = 0.5e-3, 0.2
LIVELY_S = 0.1  # how long after a question rank 0 looks often
AGAIN_S = 10e-3  # between questions for a key that is not there yet


class MPIStore(Store):
    """A store of torch over MPI."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        """Not collective. Rank 0 starts to answer. ``comm`` carries nothing else; ``close`` frees it."""
        super().__init__()
        self._comm, self._lock = comm, threading.Lock()
        self._kept = HashStore()  # the keys and values, on rank 0
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        if comm.rank == 0 and comm.size > 1:
            self._thread = threading.Thread(
                target=self._answer, name="hpczero-bridge-store", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        """Stop to answer, when no rank asks any more. Collective."""
        self._comm.Barrier()
        self.stop()
        self._comm.Free()

    def stop(self) -> None:
        """Stop to answer. Not collective."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    @override
    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", key, _as_bytes(value))

    @override
    def get(self, key: str) -> bytes:
        self.wait([key])
        return bytes(self._ask("get", key))

    @override
    def add(self, key: str, value: int) -> int:
        return int(self._ask("add", key, value))

    @override
    def compare_set(self, key: str, expected_value: Any, desired_value: Any) -> bytes:
        expected, desired = _as_bytes(expected_value), _as_bytes(desired_value)
        return bytes(self._ask("compare_set", key, expected, desired))

    @override
    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", list(keys)))

    @override
    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return when all ``keys`` are there.

        Raises CommError where they are not within ``timeout``, or that of the store.
        """
        limit_s = (timeout or self.timeout).total_seconds()  # type: ignore[attr-defined]
        if not until(lambda: self.check(keys), limit_s, nap_s=AGAIN_S):
            raise CommError(
                f"wait timeout: no rank has set all of the keys {list(keys)} within {limit_s:g} s; another rank "
                "has not come to the call that sets them"
            )

    @override
    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete_key", key))

    @override
    def num_keys(self) -> int:
        return int(self._ask("num_keys"))

    deleteKey, getNumKeys = delete_key, num_keys

    def _ask(self, verb: str, *arguments: Any) -> Any:
        if self._comm.rank == 0:
            return getattr(self._kept, verb)(*arguments)
        with self._lock:  # one question of a rank at a time
            self._comm.send((verb, arguments), 0, tag=QUESTION)
            until(lambda: self._comm.iprobe(0, tag=ANSWER), nap_s=OFTEN_S)
            return self._comm.recv(source=0, tag=ANSWER)

    def _answer(self) -> None:
        status, asked = MPI.Status(), time.monotonic()
        pending: list[tuple[MPI.Request, Any]] = []
        while not self._over.is_set():
            if not self._comm.iprobe(tag=QUESTION, status=status):
                lively = time.monotonic() - asked < LIVELY_S
                self._over.wait(OFTEN_S if lively else SELDOM_S)
                continue
            asked = time.monotonic()
            verb, arguments = self._comm.recv(source=status.Get_source(), tag=QUESTION)
            found = getattr(self._kept, verb)(*arguments)
            pending = [(request, kept) for request, kept in pending if not request.Test()]
            pending.append((self._comm.isend(found, status.Get_source(), tag=ANSWER), found))


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


BACKEND = "hpczero"
TAGS = 30000  # every MPI has more
DEFAULT = dist.constants.default_pg_timeout


@dataclass(frozen=True)
class GroupOptions:
    """What ``init`` hands to the maker of the default group, through torch. The group owns ``comm`` and ``store``."""

    comm: MPI.Intracomm
    nodes: Sequence[int] | None
    limit_s: float
    store: MPIStore | None = None


class OwnedProcessGroup(MPIProcessGroup):
    """A process group and its communicators.

    Attributes:
        given: what it is made of. Its communicator carries messages from rank to rank, and makes new groups.
        topology: nodes and watchdog of the collectives.
        by_default: whether nobody has asked for the group.
    """

    by_default = False

    def __init__(self, given: GroupOptions) -> None:
        """Collective over the communicator that is given."""
        comm = given.comm
        topology = Topology.create(comm, given.nodes, timeout_s=given.limit_s)
        name = f"of {comm.size} rank(s)"
        exchange = DirectReads(topology.world, best_path, name)
        messages = GroupMessages(comm, topology.watchdog, name)
        super().__init__(exchange, Line(topology.watchdog, name), messages)
        self.given, self.topology = given, topology
        self._members: list[tuple[tuple[int, ...], OwnedProcessGroup]] = []  # in order of making

    def part(self, ranks: Sequence[int], limit_s: float) -> OwnedProcessGroup:
        """The group of ``ranks`` of this one, in that order. Collective over those ranks alone."""
        comm, nodes = self.given.comm, self.given.nodes
        whole = comm.Get_group()
        chosen = whole.Incl(list(ranks))
        # Not torch's name of the group: that may differ between ranks.
        tag = zlib.crc32(repr(list(ranks)).encode()) % TAGS
        with self.topology.watchdog.collective(f"new_group of ranks {list(ranks)}"):
            made = comm.Create_group(chosen, tag)
        chosen.Free()
        whole.Free()
        part = OwnedProcessGroup(
            GroupOptions(made, None if nodes is None else [nodes[rank] for rank in ranks], limit_s)
        )
        self._members.append((tuple(ranks), part))
        return part

    @override
    def shutdown(self) -> None:
        """End the calls. The default group, which torch ends last, gives back what all groups of it hold.

        Collective over the default group for the default group, else not. Where an exception is on its way nothing is
        given back: the other ranks may be elsewhere, and the job ends with that exception.
        """
        if sys.exc_info()[0] is not None:
            return
        self.finish()
        if self is dist.group.WORLD:
            # One order on all ranks, whatever torch calls the groups; those with equal ranks were made in one order.
            for _, member in sorted(self._members, key=lambda entry: entry[0]):
                member.finish()
                member.free()
            self.free()

    def finish(self) -> None:
        """Wait for calls that were started; end the job if they do not end. Not collective."""
        limit_s = self.topology.watchdog.timeout_s or math.inf
        if not (self.line.drain(limit_s) and self.messages.drain(limit_s)):
            sys.stderr.write(
                f"[rank {MPI.COMM_WORLD.rank}] hang: a call over a process group of {self.exchange.size} ranks has not "
                f"ended {limit_s:g} s after the program was done with the group\n"
            )
            abort_job(EXIT_HANG)
        self.line.close()

    def free(self) -> None:
        """Give communicators and memory back. Collective over the group."""
        with self.topology.watchdog.collective("destroy_process_group"):
            self.exchange.close()
        if self.given.store is not None:
            self.given.store.close()
        self.topology.free()
        self.given.comm.Free()


def init(
    comm: MPI.Intracomm, nodes: Sequence[int] | None = None, *, timeout_s: float | None = None
) -> None:
    """Make ``comm`` the default process group of torch.distributed. Collective over ``comm``.

    ``torch.distributed.destroy_process_group()`` undoes it, collectively; ``init`` may be called again then. From here
    on an uncaught error on one rank ends the whole job. A group that ``zeroify`` has made gives way.

    Args:
        comm: the ranks, in this order. It is duplicated and never carries the bridge's traffic.
        nodes: node number of each rank; None asks MPI.
        timeout_s: seconds that one call over a group may take before the job is ended with exit 86. 0 waits for ever;
            None takes HPCZERO_TIMEOUT or half an hour.

    Raises:
        ConfigError: torch.distributed has a default group already.
        TopologyError: MPI lets one thread call it alone, the ranks that were started do not see each other, or
            ``nodes`` does not name one node for each rank; on every rank.
    """
    if getattr(dist.group.WORLD, "by_default", False):
        dist.destroy_process_group()
    if dist.is_initialized():
        raise ConfigError(
            "torch.distributed is initialised already, with backend "
            f"{dist.get_backend()}; call torch.distributed.destroy_process_group() before hpczero.bridge.init"
        )
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        raise TopologyError(
            "this MPI lets one thread call it at a time, but torch.distributed has calls of several groups under way; "
            "use an MPI with MPI_THREAD_MULTIPLE, and leave mpi4py.rc.thread_level as it is"
        )
    if comm == MPI.COMM_WORLD:
        check_launch(comm.size, Environment.read())
    if MPI.COMM_WORLD.size > 1:
        install_abort_hook()
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=[*DEVICES])
        atexit.register(_finish_all)
    before_finalize(_finish_all)
    limit_s = Environment.read().timeout_s if timeout_s is None else timeout_s
    store = MPIStore(comm.Dup())
    hook = sys.excepthook
    try:
        dist.init_process_group(
            BACKEND,
            store=store,
            rank=comm.rank,
            world_size=comm.size,
            timeout=timedelta(seconds=limit_s) if limit_s else DEFAULT,
            pg_options=GroupOptions(comm.Dup(), nodes, limit_s, store),
        )
    finally:
        # torch's own holds back what is written to stderr until the hook before returns; ours ends the job.
        sys.excepthook = hook


def init_by_default(topology: Topology) -> None:
    """Make the job's ranks the default process group, unless the program has made one. Collective over the world.

    Code that asks torch.distributed for the ranks, as SyncBatchNorm, metrics and routers do, finds one process without
    it and goes on with numbers of its own. Nothing where ``topology`` is a part of the job, or one rank, where MPI lets
    one thread call it alone, and under HPCZERO_DISTRIBUTED=0.
    """
    ready = not dist.is_initialized() and MPI.Query_thread() == MPI.THREAD_MULTIPLE
    ready = ready and Environment.read().distributed
    if topology.size > 1 and topology.world.is_job and all(topology.gather(ready)):
        init(topology.world.comm, timeout_s=topology.watchdog.timeout_s)
        whole = dist.group.WORLD
        assert isinstance(whole, OwnedProcessGroup), "made above"
        whole.by_default = True


def _create(options: Any, given: Any) -> OwnedProcessGroup:
    """Make the group that torch asks for. Collective over its ranks."""
    if isinstance(given, GroupOptions):
        return OwnedProcessGroup(given)
    whole = dist.group.WORLD
    if not isinstance(whole, OwnedProcessGroup):
        raise ConfigError(
            f"backend {BACKEND} has no communicator; call hpczero.bridge.init(comm), which makes the default group, "
            "in place of torch.distributed.init_process_group"
        )
    # torch gives its own default where the program gives none.
    asked = options.timeout != DEFAULT
    limit_s = options.timeout.total_seconds() if asked else whole.given.limit_s
    return whole.part(list(options.global_ranks_in_group), limit_s)


def _finish_all() -> None:
    """At the end of a process that has not destroyed its groups: MPI must not end before their calls."""
    whole = dist.group.WORLD
    if isinstance(whole, OwnedProcessGroup):
        whole.finish()
        for _, member in whole._members:
            member.finish()
        if whole.given.store is not None:  # its thread must not ask an MPI that has ended
            whole.given.store.stop()
