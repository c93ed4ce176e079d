"""The two-level transport: rails between nodes, a node level inside.

With G nodes of L ranks, rank (node g, local l) owns shard l*G + g. Rail l joins the ranks with local rank l.

    all_gather       rail: shards l*G .. l*G+G-1, contiguous | node: parts l = 0 .. L-1, contiguous
    reduce_scatter   node: partial sums of part l, slice by slice | rail: slice g goes to node g, summed there

Part l: the shards of local rank l on all nodes, neighbours in the buffer. Slice g of part l: the shard of node g.
Each byte crosses the network once. All ranks use their own connections at once, and no buffer is reordered. The bounds
stand in docs/performance.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Literal

import torch
from mpi4py import MPI
from torch import Tensor
from typing_extensions import override

from hpczero.comm.algorithms import CHUNK_BYTES
from hpczero.comm.background import Background
from hpczero.comm.calls import Work
from hpczero.comm.codes import SentCodes
from hpczero.comm.collectives import CodedShard, Collectives, SecondaryCopy, shard_group
from hpczero.comm.devices import Reach
from hpczero.comm.inside import MessageLevel, NodeLevel, Parts
from hpczero.comm.peers import IN_TURN, Ipc
from hpczero.comm.rails import DEFAULT, Rails, Selection
from hpczero.comm.window import Window
from hpczero.errors import TopologyError
from hpczero.job.group import Group
from hpczero.job.topology import Topology
from hpczero.kernels.tree_sum import ShardSum
from hpczero.memory.buffers import Buffer, Memory, Use
from hpczero.plan.footprint import DEVICE_ROUND_BYTES, Footprint, node_chunk
from hpczero.plan.layout import Coding

# Units whose gradients may wait while the next one's are filled; ``Plan.memory`` counts them.
MOST_LENT = 1


class LentBuffer(Buffer):
    """A buffer whose owner may release it at once. Its memory is given back when the reduction has read it."""

    _reader: Callable[[], None] | None = None
    _wanted = True

    def lend(self, wait: Callable[[], None]) -> None:
        """Lend the buffer to a reader until ``wait`` returns."""
        self._reader = wait

    def get_back(self) -> None:
        """Return when nobody reads the buffer. Gives the memory back if the owner has released it."""
        if self._reader is not None:
            self._reader()
            self._reader = None
        if not self._wanted:
            super().release()

    def take(self) -> None:
        """Take the memory. Waits for the reader."""
        self._wanted = True
        self.get_back()
        super().take()

    @override
    def release(self) -> None:
        self._wanted = False
        if self._reader is None:
            super().release()


# Sums in shared memory that a rank may put off: it need not wait for peers that are this many units behind.
PUT_OFF = IN_TURN - 1

Inside = Literal["window", "ipc", "messages"]


class Hierarchical(Collectives):
    """All-gather between nodes first, reduce-scatter inside nodes first. One node, or one rank per node, works too."""

    sends_codes = True

    def __init__(
        self,
        topology: Topology | Group,
        *,
        strict: bool = False,
        memory: Memory | None = None,
        node_dtype: torch.dtype = torch.float32,
        selection: Selection = DEFAULT,
        inside: Inside = "window",
        overlap: bool = False,
        secondary: bool = False,
        chunk_nbytes: int = CHUNK_BYTES,
        reach: Reach | None = None,
    ) -> None:
        """Collective.

        Args:
            topology: as in Collectives; every node has the same number of ranks.
            strict: as in Collectives. With ``window`` each rank also gets whole parameters of its own.
            memory: as in Collectives.
            node_dtype: as in Collectives.
            selection: algorithms between nodes; equal on all ranks.
            inside: how ranks of a node exchange data. ``window`` shares memory of the host, ``ipc`` lets them read each
                other's device memory, ``messages`` does neither.
            overlap: whether a thread moves bytes while the caller computes, between nodes and on devices. The MPI must
                let two threads call it (``background.can_run_in_background``).
            secondary: whether each node keeps a copy of what it has gathered, see SecondaryCopy.
            chunk_nbytes: most bytes of one shard that a single MPI call moves.
            reach: as in Collectives.

        Raises:
            TopologyError: nodes have different numbers of ranks.
            ConfigError: an algorithm does not work on this number of nodes; on every rank.
            CommError: ranks of a node cannot share memory; on every rank.
        """
        group = shard_group(topology)
        self._check_nodes(group, inside, secondary=secondary)
        super().__init__(topology, strict=strict, memory=memory, node_dtype=node_dtype, reach=reach)
        self._nodes = group.num_nodes
        self._chunk_nbytes = chunk_nbytes
        accelerator = self.reach.accelerator
        # On one host nothing is gained by overlap: the ranks fill the cores. A device computes by itself.
        runs_beside = overlap and (self._nodes > 1 or not accelerator.is_host)
        # The threads of two models would mix up their messages on one communicator.
        between = self._comm_between(group)
        self._own = [_own(between), _own(group.node)] if runs_beside else []
        between, node = self._own or (between, group.node)
        self._rails = self._level_between(between, self._fitted(selection))
        messages = self._messages_inside(node)
        self._put_off: deque[Work] = deque()
        self._background = Background(group.watchdog, accelerator) if runs_beside else None
        self._lendable: dict[int, LentBuffer] = {}  # by the identity of their tensor
        self._lent: deque[LentBuffer] = deque()
        self._node = self._level(inside, group, messages, shares_wholes=not strict)
        if secondary and self._nodes > 1:
            self.secondary = SecondaryCopy(self.memory, device=self.device)

    def _check_nodes(self, group: Group, inside: Inside, *, secondary: bool) -> None:
        """Refuse nodes that this transport does not serve, before anything is made. Not collective."""
        if group.rail is None:
            raise TopologyError(
                "nodes have different numbers of ranks, so there are no rails; use Uneven or the flat transport, or "
                "start the same number of ranks on every node"
            ).on_all_ranks()

    def _comm_between(self, group: Group) -> MPI.Intracomm:
        """Which communicator of the group carries what goes between nodes. Not collective."""
        assert group.rail is not None, "checked"
        return group.rail

    def _level_between(self, comm: MPI.Intracomm, selection: Selection) -> Rails:
        return Rails(
            comm,
            self.memory,
            local_size=self.group.node.size,
            local_rank=self.group.local_rank,
            node_dtype=self.node_dtype,
            selection=selection,
            chunk_nbytes=self._chunk_nbytes,
            reach=self.reach,
        )

    def _messages_inside(self, node: MPI.Intracomm) -> NodeLevel:
        return MessageLevel(node, self.memory, chunk_nbytes=self._chunk_nbytes, reach=self.reach)

    def _level(
        self, inside: Inside, group: Group, messages: NodeLevel, *, shares_wholes: bool
    ) -> NodeLevel:
        """How ranks of this node exchange data. Collective over the group."""
        if group.node.size == 1 or inside == "messages":
            return messages
        overlap = self._background is not None
        if inside == "ipc":
            return Ipc(self, messages, overlap=overlap)
        return Window(self, messages, overlap=overlap, shares_wholes=shares_wholes)

    @override
    def allocate(
        self,
        numel: int,
        dtype: torch.dtype,
        *,
        category: str,
        use: Use = Use.PRIVATE,
        keep: bool = False,
    ) -> Buffer:
        if self._background is not None and use is Use.REDUCE and not self._node.reads_peers:
            lent = LentBuffer(
                numel, dtype, memory=self.memory, category=category, keep=keep, device=self.device
            )
            self._lendable[id(lent.tensor)] = lent
            return lent
        return self._node.allocate(numel, dtype, category=category, use=use, keep=keep)

    @property
    @override
    def footprint(self) -> Footprint:
        local = self._node.comm.size if self._node.reads_peers else 1
        shares_wholes = self._node.shares_wholes
        return Footprint(
            local,
            lasting=shares_wholes and self._nodes == 1,
            nodes=self._nodes,
            round_nbytes=max(choice.chunk_nbytes for choice in self.selection.exchanges),
            overlap=self._background is not None,
            pulls=local > 1 and not shares_wholes,
        )

    @override
    def describe(self) -> str:
        inside = self._node.title
        if not self.reach.accelerator.is_host:
            inside += f" ({self.reach.name})" if not self._node.reads_peers else " of devices"
        when = ", while the model computes" if self._background is not None else ""
        if self._nodes == 1:
            return f"{inside} on one node{when}"
        return f"{inside} inside nodes; {self._rails.describe()}{when}"

    @override
    def measured(self) -> list[str]:
        return self.selection.table()

    @property
    def selection(self) -> Selection:
        """Algorithms between nodes, by size."""
        return self._rails.selection

    def select(self, selection: Selection) -> None:
        """Use other algorithms between nodes from the next call on. Equal on all ranks; not collective.

        Raises ConfigError on an algorithm that does not work on this number of nodes.
        """
        if self._background is not None:
            self._background.drain()
        self._rails.select(self._fitted(selection))

    def _fitted(self, selection: Selection) -> Selection:
        is_host = self.reach.accelerator.is_host
        return selection if is_host else selection.in_rounds_of(DEVICE_ROUND_BYTES)

    @override
    def settle(self) -> None:
        self._node.settle()

    def _sent_nbytes(
        self, full: Tensor, shard_numel: int, use: Use, coding: Coding | None = None
    ) -> int:
        nodes, local = self._nodes, self.group.node.size
        inside = 0 if self._node.shares(full, use) else (local - 1) * nodes * full.element_size()
        if coding is not None:
            # A gather's rows are of whole shards; a reduction goes in rounds.
            chunk = shard_numel if use is Use.GATHER else self._rails.coded_chunk(coding)
            row = coding.nbytes(chunk)
            return (nodes - 1) * row + inside * shard_numel
        between = self._rails.wire(full.dtype) if use is Use.REDUCE else full.dtype
        return ((nodes - 1) * between.itemsize + inside) * shard_numel

    def _all_gather(
        self, full: Tensor, shard_numel: int, name: str, coded: CodedShard | None = None
    ) -> Work:
        def bring() -> None:
            if coded is not None:
                codes, read = coded
                rows = self._rails.gather_rows(read, full.dtype, codes)
                self._rails.decode_rows(rows, _part_of(full, self.group), codes)
            elif self._nodes > 1:
                self._rails.gather(full, shard_numel)

        return self._gather(full, name, bring)

    @override
    def _all_gather_again(
        self,
        full: Tensor,
        shard_numel: int,
        name: str,
        copy: SecondaryCopy,
        coded: CodedShard | None,
    ) -> Work:
        part, known = _part_of(full, self.group), copy.has(name)
        if coded is None:
            kept = copy.part(name, part.numel(), part.dtype)
        else:
            kept = copy.part(name, self._nodes * coded[0].words, torch.float32)
        copy.keep(name)

        def bring() -> None:
            if coded is not None:
                codes, read = coded
                if not known:
                    kept.copy_(self._rails.gather_rows(read, full.dtype, codes).view(-1))
                self._rails.decode_rows(kept.view(self._nodes, -1), part, codes)
            elif known:
                part.copy_(kept)
            else:
                self._rails.gather(full, shard_numel)
                kept.copy_(part)

        return self._gather(full, name, bring)

    def _gather(self, full: Tensor, name: str, bring: Callable[[], None]) -> Work:
        """Give the node all parts of ``full``, once ``bring`` has filled this rank's."""
        if self._background is not None:

            def gather() -> None:
                bring()
                rest = self._node.spread(full)
                if rest is not None:
                    rest()

            wait = self._background.start(
                f"all_gather of {name!r} (step {self.calls.step})", gather
            )
            return self.calls.elsewhere(name, wait)
        bring()
        rest = self._node.spread(full)
        return Work(name) if rest is None else self.calls.later("all_gather", name, rest)

    def _reduce_scatter(
        self, full: Tensor, into: ShardSum, name: str, codes: SentCodes | None = None
    ) -> Work:
        reading = self._node.reading(full)
        dtype, spans = full.dtype, self._node.comm.size == 1 or self._node.shares(full, Use.REDUCE)

        def finish() -> None:
            with reading as parts:
                if self._nodes == 1:
                    self._sum_in_node(parts, into, dtype.itemsize)
                elif codes is not None:
                    self._rails.reduce_coded(parts, into, codes, spans=spans)
                else:
                    self._rails.reduce(parts, into, dtype, spans=spans)

        if self._background is not None:
            wait = self._background.start(
                f"reduce_scatter of {name!r} (step {self.calls.step})", finish
            )
            return Work(name, self._lend(full, self.calls.elsewhere(name, wait).wait))
        if self._nodes > 1 or not self._node.shares(full, Use.REDUCE):
            finish()
            return Work(name)
        work = self.calls.later("reduce_scatter", name, finish)
        self._put_off.append(work)
        while len(self._put_off) > PUT_OFF:
            self._put_off.popleft().wait()
        return Work(name, lambda: self.drain(work))

    def _lend(self, full: Tensor, wait: Callable[[], None]) -> Callable[[], None]:
        """Lend ``full`` until ``wait`` returns; wait here if too much is lent already.

        Returns a function to call instead of ``wait``.
        """
        buffer = self._lendable.get(id(full))
        if buffer is None:
            return wait  # its owner keeps it until then
        buffer.lend(wait)
        self._lent.append(buffer)
        while len(self._lent) > MOST_LENT:
            self._lent.popleft().get_back()

        def finish() -> None:
            wait()
            buffer.get_back()

        return finish

    @override
    def drain(self, until: Work | None = None) -> None:
        """Finish what was put off, oldest first, up to ``until``; None finishes everything."""
        while self._put_off and (until is None or until in self._put_off):
            self._put_off.popleft().wait()

    def _sum_in_node(self, parts: Parts, into: ShardSum, itemsize: int) -> None:
        local, numel = range(self.group.node.size), into.out.numel()
        chunk = node_chunk(len(local), itemsize, self._node.most_nbytes, self._chunk_nbytes)
        begin = self.group.local_rank * numel
        for start in range(0, numel, chunk):
            into.take(parts(begin + start, min(chunk, numel - start)), start, groups=[local])

    def close(self) -> None:
        """Free counters, datatypes and scratch. Collective."""
        self.drain()
        if self._background is not None:
            self._background.close()
        self._rails.close()
        self._node.close()
        if self.secondary is not None:
            self.secondary.close()
        for comm in self._own:
            comm.Free()
        self._own.clear()
        super().close()


def _own(comm: MPI.Intracomm) -> MPI.Intracomm:
    """A duplicate of ``comm`` for one transport, which frees it. Collective over ``comm``."""
    duplicate = comm.Dup()
    duplicate.Set_name(f"{comm.Get_name()}, of one transport")
    return duplicate


def _part_of(full: Tensor, group: Group) -> Tensor:
    """What this rank brings to its node: the shards of its rail."""
    numel = full.numel() // group.node.size
    return full[group.local_rank * numel :][:numel]
