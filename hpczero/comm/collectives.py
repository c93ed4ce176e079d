"""The contract of a transport, and the flat transport.

Every rank makes the same calls in the same order (``Order``). Buffers are flat and contiguous. The caller does not read
an output, and does not write or free an input, before ``Work.wait`` returns. A REDUCE buffer of the transport is an
exception: it may be released at once and taken again later, because the transport knows who still reads it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import numpy as np
import numpy.typing as npt
import torch
from mpi4py import MPI
from torch import Tensor
from typing_extensions import override

from hpczero.comm.algorithms import (
    CHUNK_BYTES,
    BlockMessages,
    Blocks,
    Exchange,
    Gather,
    LibraryExchange,
    LibraryGather,
)
from hpczero.comm.calls import Calls, CommStats, Work
from hpczero.comm.codes import SentCodes
from hpczero.comm.devices import HostReach, Reach
from hpczero.errors import CommError
from hpczero.job.group import Group, digits_of, values_of
from hpczero.job.topology import Topology
from hpczero.kernels.codes import BLOCK
from hpczero.kernels.tree_sum import ShardSum, tree_sum
from hpczero.memory.buffers import CPU, Buffer, Memory, Scratch, Use
from hpczero.plan.footprint import Footprint, exchange_chunk
from hpczero.plan.layout import Coding

# The secondary copy: what this rank's node needs to gather whole parameters again without the other nodes.
#
# At stage 3 parameters are gathered for forward and again for backward. A node keeps one copy of them between the two,
# a part on each of its ranks, so that backward asks nobody outside: of 8Ψ bytes between nodes in a step of half
# precision 6Ψ are left, for Ψ parameters' bytes more per node.
#
# Source: Wang et al., ZeRO++, arXiv 2306.10209, sec. 3.3 (hpZ); Zhang et al., MiCS, arXiv 2205.00119.


class SecondaryCopy:
    """Parts of units, by name. Nothing here is collective; every rank makes the same calls."""

    def __init__(self, memory: Memory, *, device: torch.device = CPU) -> None:
        """Empty; parts are counted in ``memory`` as ``secondary``."""
        self._memory, self._device = memory, device
        self._parts: dict[str, Buffer] = {}
        self._valid: set[str] = set()

    def has(self, name: str) -> bool:
        """Whether the part of unit ``name`` is of its values of today."""
        return name in self._valid

    def part(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        """The part of unit ``name``; made where there is none, with ``numel`` elements."""
        if name not in self._parts:
            self._parts[name] = Buffer(
                numel,
                dtype,
                memory=self._memory,
                category="secondary",
                device=self._device,
            )
        return self._parts[name].tensor

    def keep(self, name: str) -> None:
        """The part of unit ``name`` is about to be filled with the values of today."""
        self._valid.add(name)

    def forget(self, name: str) -> None:
        """Unit ``name`` has other values from now on."""
        self._valid.discard(name)

    def drop(self, name: str) -> None:
        """There is no unit ``name`` any more: give its memory back."""
        self.forget(name)
        if name in self._parts:
            self._parts.pop(name).release()

    def close(self) -> None:
        """Give the memory back."""
        for name in list(self._parts):
            self.drop(name)


# MPI moves bytes; which dtypes may be summed is decided by our own kernels, not by the MPI library.
MOVABLE = (torch.float32, torch.bfloat16, torch.float16)


CodedShard = tuple[SentCodes, Callable[[Tensor], None]]  # and what reads this rank's shard


class Collectives(ABC):
    """One way to move flat buffers over ``group.ordered``, and where their memory comes from.

    Subclasses implement the underscored verbs. Checks are here, order and accounts in ``calls``. ``everybody`` are the
    ranks whose gradients are summed: the ranks of ``group``, unless there are replicas (see Hybrid).

    Attributes:
        sends_codes: whether the verbs take codes for what goes between nodes; without, ``zeroify`` refuses them.
    """

    sends_codes = False

    def __init__(
        self,
        topology: Topology | Group,
        *,
        strict: bool = False,
        memory: Memory | None = None,
        node_dtype: torch.dtype = torch.float32,
        reach: Reach | None = None,
    ) -> None:
        """Not collective.

        Args:
            topology: a topology, whose shard group the transport serves, or any group. It must outlive the transport.
                Its watchdog looks at every call.
            strict: whether ranks compare every call before they make it, not only those that are new (``Order``).
            memory: ledger to count buffers in; None makes a new one.
            node_dtype: dtype that each node's partial sum is rounded to (``Precision.reduce``), for every transport.
            reach: where the buffers are, and how MPI gets at them; None for the host's memory.
        """
        self.topology = topology if isinstance(topology, Topology) else None
        self.group = group = shard_group(topology)
        self.everybody = topology.data_sequence if isinstance(topology, Topology) else group
        self.rank = topology.rank  # of the job, for messages
        self.reach = reach or HostReach()
        self.node_dtype = node_dtype
        self.secondary: SecondaryCopy | None = None
        self.memory = memory or Memory()
        self.calls = Calls(self.everybody, self.reach.accelerator, strict=strict)

    def allocate(
        self,
        numel: int,
        dtype: torch.dtype,
        *,
        category: str,
        use: Use = Use.PRIVATE,
        keep: bool = False,
    ) -> Buffer:
        """A flat buffer that this transport can send from and receive into.

        Collective over the group for other uses than PRIVATE: every rank makes the same calls in the same order, and
        calls ``settle`` after the last of them.

        Args:
            numel: elements; for GATHER and REDUCE a multiple of the number of shards.
            dtype: one that can be sent.
            category: the ledger counts the buffer under it.
            use: what the buffer is for. A transport may share the memory of GATHER and REDUCE buffers between ranks.
            keep: whether ``release`` keeps the memory.

        Raises:
            CommError: there is not enough memory to share; on every rank.
        """
        return Buffer(
            numel, dtype, memory=self.memory, category=category, keep=keep, device=self.device
        )

    @property
    def stats(self) -> CommStats:
        """Accounts of what this rank has called."""
        return self.calls.stats

    @property
    def device(self) -> torch.device:
        """Device of the buffers."""
        return self.reach.accelerator.device

    @property
    def alone(self) -> bool:
        """Whether no other rank adds to what this one reduces."""
        return self.group.size == self.everybody.size == 1

    @abstractmethod
    def describe(self) -> str:
        """One line for a run header."""

    def measured(self) -> list[str]:
        """Lines of the measurements that the choice of algorithms rests on; none if nothing was measured."""
        return []

    def settle(self) -> None:
        """Say that all buffers with a use have been asked for. Collective over the group."""
        return

    def all_gather(
        self,
        full: Tensor,
        *,
        name: str,
        again: bool = False,
        read: Callable[[Tensor], None] | None = None,
        codes: SentCodes | None = None,
    ) -> Work:
        """Fill ``full`` from every rank's shard, in place. Collective over the group.

        Args:
            full: (num_shards * shard_numel,), this rank's shard in its slice.
            name: name of the unit, for messages.
            again: the same values may be gathered once more, until ``secondary.forget(name)``. Where there is a
                secondary copy, it then serves the next gather, which counts as ``regather``.
            read: puts this rank's shard into (shard_numel,) in the dtype of ``full``; None: it is in its slice.
            codes: between nodes shards travel as these, and every rank, their owner too, gets what they say; needs
                ``read``, which may be called later then. None: the bits of the shards.

        Raises:
            CommError: the buffer cannot be sent, or ranks are about to make different calls.
        """
        shard = self._check(full, name)
        if self.group.num_nodes == 1:
            codes = None
        sent = self._sent_nbytes(full, shard, Use.GATHER, None if codes is None else codes.coding)
        copy = self.secondary if again else None
        operation = "all_gather"
        if copy is not None and copy.has(name):
            nbytes = shard * full.element_size() if codes is None else 4 * codes.words
            operation, sent = "regather", sent - (self.group.num_nodes - 1) * nbytes
        with self.calls.issue(operation, name, sent, key=full.numel() * full.element_size()):
            if not full.numel():
                return Work(name)
            coded = None
            if codes is not None and read is not None:
                coded = codes, read
            elif read is not None:
                read(full[self.group.index * shard :][:shard])
            if copy is not None:
                return self._all_gather_again(full, shard, name, copy, coded)
            if coded is None:
                return self._all_gather(full, shard, name)
            return self._all_gather(full, shard, name, coded)

    def reduce_scatter(
        self,
        full: Tensor,
        out: Tensor | ShardSum,
        *,
        scale: float = 1.0,
        accumulate: bool = False,
        name: str,
        codes: SentCodes | None = None,
    ) -> Work:
        """Set ``out (+)= scale *`` this rank's shard of the fp32 sum of every rank's ``full``.

        Collective over the group. Every transport sums in one order (`kernels.tree_sum`, ``group.reduction_groups``).

        Args:
            full: (num_shards * shard_numel,) fp32, bf16 or fp16; not changed.
            out: (shard_numel,) fp32, no overlap with ``full``; where this rank is ``alone`` it may be ``full`` itself.
                Or a ``ShardSum``, which has the next two.
            scale: multiplies the sum, e.g. 1 / world size.
            accumulate: whether to add to ``out`` instead of replacing it.
            name: name of the unit, for messages.
            codes: between nodes the sum of each node travels as these; None: in ``node_dtype``.

        Raises:
            CommError: the buffer cannot be sent, or ranks are about to make different calls.
        """
        shard = self._check(full, name)
        into = out if isinstance(out, ShardSum) else ShardSum(out, scale, accumulate=accumulate)
        out = into.out
        if out.dtype != torch.float32 or out.numel() != shard or not out.is_contiguous():
            raise CommError(
                f"rank {self.rank}: reduce_scatter of {name!r} into {out.numel()} x {out.dtype}, "
                f"expected {shard} contiguous float32"
            )
        if self.group.num_nodes == 1:
            codes = None
        sent = self._sent_nbytes(full, shard, Use.REDUCE, None if codes is None else codes.coding)
        with self.calls.issue("reduce_scatter", name, sent, key=full.numel() * full.element_size()):
            in_place = self.alone and full.data_ptr() == out.data_ptr()
            if in_place and into.scale != 1.0:
                out.mul_(into.scale)
            if in_place or not full.numel():
                return Work(name)
            return self._reduce_scatter(full, into, name, codes)

    def broadcast(self, full: Tensor, *, root: int, name: str) -> Work:
        """Give every rank ``root``'s content of ``full``. Collective over ``everybody``; ``root`` is a rank of it.

        Bytes are moved as they are, so any dtype will do.
        """
        nbytes = full.numel() * full.element_size()
        sent = nbytes if self.everybody.rank == root else 0
        with self.calls.issue("broadcast", name, sent, key=nbytes):
            return self._broadcast(full, root, name) if full.numel() else Work(name)

    def agree(self, flags: npt.NDArray[np.uint8], *, name: str) -> npt.NDArray[np.uint8]:
        """Bitwise OR of ``flags`` over all ranks. Blocking. Collective over ``everybody``."""
        with self.calls.issue("agree", name, len(flags)):
            found = np.empty_like(flags)
            self.everybody.comm.Allreduce(np.ascontiguousarray(flags), found, op=MPI.BOR)
            return found

    def share(
        self, values: npt.NDArray[np.float64], *, name: str, replicas: bool = False
    ) -> npt.NDArray[np.float64]:
        """``values`` of every rank in rank order, as (ranks, len(values)). Blocking. Collective.

        It is for the few numbers of a step. Every rank gets the same bits, which an MPI sum does not promise. Ranks are
        those of ``group``, or with ``replicas`` of ``everybody``, who hold the same things several times.
        """
        ranks = self.everybody if replicas else self.group
        sent = values.nbytes * (ranks.size - 1)
        with self.calls.issue("share", name, sent, key=values.nbytes):
            found = np.empty((ranks.size, len(values)), dtype=np.float64)
            ranks.comm.Allgather(np.ascontiguousarray(values), found)
            return found

    def total(self, *values: float, name: str) -> float:
        """Sum of every rank's ``values``, rounded once: ``math.fsum`` of what ``share`` brings, on every rank.

        Blocking. Collective over ``group``. No rank makes a list of all ranks' numbers.
        """
        mine = digits_of(values).sum(axis=0, keepdims=True)
        with self.calls.issue("total", name, mine.nbytes):
            found = np.empty_like(mine)
            self.group.comm.Allreduce(mine, found, op=MPI.SUM)
            return values_of(found)[0]

    def barrier(self, *, name: str = "barrier") -> None:
        """Wait for every rank. Collective over ``everybody``."""
        with self.calls.issue("barrier", name, 0):
            self.everybody.comm.Barrier()

    @property
    def footprint(self) -> Footprint:
        """What ranks of a node hold together in GATHER and REDUCE buffers."""
        return Footprint()

    @property
    def exchange_nbytes(self) -> int:
        """Bytes that this rank holds to receive peers' blocks."""
        return self.memory.current.get("exchange", 0)

    def drain(self) -> None:
        """Finish what this rank has put off, which its peers may wait for. Not collective."""
        return

    def close(self) -> None:
        """Free communicators and datatypes. Collective."""
        return

    def _sent_nbytes(
        self, full: Tensor, shard_numel: int, use: Use, coding: Coding | None = None
    ) -> int:
        """Bytes that leave this rank, by the algorithm's own arithmetic."""
        return (full.numel() - shard_numel) * full.element_size()

    def waiting(self) -> AbstractContextManager[object]:
        """Context around a wait for other ranks that is no call of its own; it is time in calls. Not collective."""
        return self.calls.timed(None)

    def _all_gather_again(
        self,
        full: Tensor,
        shard_numel: int,
        name: str,
        copy: SecondaryCopy,
        coded: CodedShard | None,
    ) -> Work:
        """``_all_gather`` from ``copy`` if that has the unit, else with what is needed to keep it there."""
        raise NotImplementedError("of transports with a secondary copy")

    @abstractmethod
    def _all_gather(
        self, full: Tensor, shard_numel: int, name: str, coded: CodedShard | None = None
    ) -> Work: ...

    @abstractmethod
    def _reduce_scatter(
        self, full: Tensor, into: ShardSum, name: str, codes: SentCodes | None = None
    ) -> Work: ...

    def _broadcast(self, full: Tensor, root: int, name: str) -> Work:
        whole = Blocks.of(full, 0, full.numel(), full.numel(), 1)
        self.reach.broadcast(self.everybody.comm, whole, root)
        return Work(name)

    def _check(self, full: Tensor, name: str) -> int:
        """Shard size of ``full`` in elements; refuses a buffer that cannot be sent."""
        if full.dtype not in MOVABLE or full.dim() != 1 or not full.is_contiguous():
            raise CommError(
                f"rank {self.rank}: buffer of {name!r} is {tuple(full.shape)} {full.dtype} "
                f"(contiguous: {full.is_contiguous()}), expected flat contiguous "
                f"{', '.join(str(d) for d in MOVABLE)}"
            )
        shards = self.group.size
        if full.numel() % shards:
            raise CommError(
                f"rank {self.rank}: buffer of {name!r} has {full.numel()} elements, expected a "
                f"multiple of {shards} shards"
            )
        return full.numel() // shards


def shard_group(ranks: Topology | Group) -> Group:
    """The ranks that a transport serves: the shard group of a topology, or the group itself."""
    return ranks.shard if isinstance(ranks, Topology) else ranks


# The flat transport is the reference: every other transport must equal it bit for bit.


class Flat(Collectives):
    """One communicator of all ranks, on any nodes: gathers in place, and sums what an exchange brings.

    Calls block, and the Work they return is done. Overlap gains nothing on a CPU whose cores the ranks fill.
    """

    sends_codes = True

    def __init__(
        self,
        topology: Topology | Group,
        *,
        strict: bool = False,
        memory: Memory | None = None,
        node_dtype: torch.dtype = torch.float32,
        gather: type[Gather] = LibraryGather,
        exchange: type[Exchange] = LibraryExchange,
        chunk_nbytes: int = CHUNK_BYTES,
        reach: Reach | None = None,
    ) -> None:
        """Not collective. Arguments as of Collectives.

        ``gather`` and ``exchange`` are the algorithms of all-gathers and of reduce-scatters. A single MPI call moves at
        most ``chunk_nbytes`` of one shard.
        """
        super().__init__(topology, strict=strict, memory=memory, node_dtype=node_dtype, reach=reach)
        ranks = self.group.ordered
        self._messages = BlockMessages(
            self.reach.gather(gather, ranks, chunk_nbytes=chunk_nbytes),
            self.reach.exchange(exchange, ranks, chunk_nbytes=chunk_nbytes),
            Scratch(self.memory, category="exchange", device=self.device),
        )
        self._groups = self.group.reduction_groups

    @override
    def describe(self) -> str:
        gather, exchange = self._messages.gather.name, self._messages.exchange.name
        return f"flat, all-gather {gather}, exchange {exchange}"

    def _all_gather(
        self, full: Tensor, shard_numel: int, name: str, coded: CodedShard | None = None
    ) -> Work:
        if coded is not None:
            coded[1](full[self.group.index * shard_numel :][:shard_numel])
        self._messages.spread(full)
        if coded is not None:
            coded[0].round(full)
        return Work(name)

    def _reduce_scatter(
        self, full: Tensor, into: ShardSum, name: str, codes: SentCodes | None = None
    ) -> Work:
        shards, item, shard_numel = self.group.size, full.element_size(), into.out.numel()
        if shards == 1:  # nothing to exchange, and nothing to wait for
            into.take([full], 0, groups=[[0]])
            return Work(name)
        most = max(self._messages.exchange.chunk_nbytes // item, 1)
        chunk = min(exchange_chunk(shard_numel, shards, item), most)
        if codes is not None:
            chunk = max(chunk // BLOCK * BLOCK, BLOCK)
        first = self.group.index * shard_numel
        for start in range(0, shard_numel, chunk):
            count = min(chunk, shard_numel - start)
            blocks: Sequence[Tensor] = self._messages.parts(full, first + start, count)
            groups: Sequence[Sequence[int]] = self._groups
            if codes is not None:
                blocks = self._decoded(blocks, codes, start)
                groups = [[node] for node in range(len(blocks))]
            into.take(blocks, start, groups=groups, node_dtype=self.node_dtype)
        return Work(name)

    def _decoded(self, blocks: Sequence[Tensor], codes: SentCodes, start: int) -> Sequence[Tensor]:
        """The sum of each node as its codes say, although nothing was sent in codes here."""
        shard, count = self.group.index, blocks[0].numel()
        words = codes.coding.words(start, count)
        rows = torch.empty(len(self._groups), words, dtype=torch.float32, device=self.device)
        sums = torch.empty(len(self._groups), count, dtype=torch.float32, device=self.device)
        for node, ranks in enumerate(self._groups):
            of_node = [blocks[rank] for rank in ranks]
            tree_sum(of_node, sums[node], groups=[range(len(ranks))], scale=1.0)
            codes.encode(sums[node], rows[node], shard=shard, start=start, node=node)
        codes.decode(rows, sums, shard=shard, start=start)
        return sums.unbind()

    @override
    def close(self) -> None:
        self._messages.free()
        super().close()


# Trade: each rank gives each other one tensors of any length, and gets some from each.
#
# Counts go first, so that a rank which brings another length than its peer expects is seen by the peer and not by MPI.

CHUNK = 2**28  # elements of one message: MPI counts bytes in 32 bits


def trade(
    collectives: Collectives,
    outgoing: Sequence[Sequence[Tensor]],
    *,
    name: str,
    operation: str = "trade",
    comm: MPI.Intracomm | None = None,
) -> list[list[Tensor]]:
    """Send the tensors ``outgoing[index]`` to each rank, and get (ranks,) what each has sent to this one.

    Blocking. Collective over ``collectives.group``, in the order of ``group.ordered``. ``outgoing`` has any number of
    flat fp32 tensors for each rank, of any length and in memory of the host. Bits are moved, not numbers. ``name`` and
    ``operation`` are for messages and accounts; ``comm`` is another communicator of the same ranks in the same order.
    """
    group = collectives.group
    packed = [_packed(tensors) for tensors in outgoing]
    sent = sum(each.nbytes for place, each in enumerate(packed) if place != group.index)
    with collectives.calls.issue(operation, name, sent, key=-1):
        return [_unpacked(each) for each in _traded(comm or group.ordered, packed)]


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    """One flat tensor: how many, the length of each, each; nothing for none."""
    if not tensors:
        return torch.empty(0, dtype=torch.float32, device="cpu")
    lengths = torch.tensor([len(tensors), *map(len, tensors)], dtype=torch.int64, device="cpu")
    return torch.cat([lengths.view(torch.float32), *tensors])


def _unpacked(flat: Tensor) -> list[Tensor]:
    if not len(flat):
        return []
    count = int(flat[:2].view(torch.int64))
    lengths = flat[2 : 2 + 2 * count].clone().view(torch.int64).tolist()
    return list(flat[2 + 2 * count :].split_with_sizes(lengths))


def _traded(comm: MPI.Intracomm, outgoing: Sequence[Tensor]) -> list[Tensor]:
    counts = np.array([len(each) for each in outgoing], dtype=np.int64)
    theirs = np.empty_like(counts)
    comm.Alltoall(counts, theirs)
    incoming = [
        outgoing[rank]
        if rank == comm.rank
        else torch.empty(count, dtype=torch.float32, device="cpu")
        for rank, count in enumerate(theirs.tolist())
    ]
    requests: list[MPI.Request] = []
    for rank in range(comm.size):
        if rank != comm.rank:
            for part in _chunks(incoming[rank]):
                requests.append(comm.Irecv([part, MPI.FLOAT], source=rank))
            for part in _chunks(outgoing[rank]):
                requests.append(comm.Isend([part, MPI.FLOAT], dest=rank))
    MPI.Request.Waitall(requests)
    return incoming


def _chunks(flat: Tensor) -> list[npt.NDArray[np.float32]]:
    return [flat[start : start + CHUNK].numpy() for start in range(0, len(flat), CHUNK)]
