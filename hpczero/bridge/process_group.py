"""MPIProcessGroup: a process group of torch over one MPI communicator.

Owns: torch's names and arguments of the calls. Must not know: how bytes travel, who makes the calls.

torch finds the methods by their names, from Python and from C++. Releases before 2.13 have other names for the calls
with one tensor for all ranks; these are there too. A method checks what it is given, at once and on the caller's
thread, and hands a call on flat tensors to the line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpczero.bridge.exchange import BridgeExchange
from hpczero.bridge.line import Line, Started
from hpczero.bridge.messages import GroupMessages, MessageWork
from hpczero.bridge.tensors import (
    DEVICES,
    Reduction,
    Target,
    all_apart,
    apart,
    check,
    check_apart,
    check_equal,
    check_parts,
    check_whole,
    cut,
    flat,
)
from hpczero.errors import CommError

Tensors = Sequence[Tensor]


# Torch's methods have overloads for one tensor, which nothing calls; a subclass need not repeat them.
_ProcessGroup: Any = dist.ProcessGroup


class Named(_ProcessGroup):  # type: ignore[misc]
    """What a process group is called. torch's own keeps names in its backend, which a group in Python has not."""

    _name, _desc = "", ""

    def getBackendName(self) -> str:
        """Name of the backend."""
        return "hpczero"

    def name(self) -> str:
        """Name of the backend."""
        return "hpczero"

    def getGroupName(self) -> str:
        """Name that torch has given."""
        return self._name

    def setGroupName(self, name: str) -> None:
        """Take the name that torch gives."""
        self._name = name

    def getGroupDesc(self) -> str:
        """What the group is for."""
        return self._desc

    def setGroupDesc(self, desc: str) -> None:
        """Take what torch says the group is for."""
        self._desc = desc

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)
    _device_types = property(lambda _: [torch.device(kind) for kind in DEVICES])

    def _get_backend(self, device: torch.device) -> Named:
        """Itself: torch asks for a backend to see whether NCCL or gloo has a limit of time to be changed."""
        return self


class LineCalls(Named):
    """A group that hands calls to its line.

    Attributes:
        exchange: the collectives.
        line: makes the calls.
        calls: how often each method was called, by its name.
    """

    def __init__(self, exchange: BridgeExchange, line: Line) -> None:
        super().__init__(exchange.rank, exchange.size)
        self.exchange, self.line = exchange, line
        self.calls: dict[str, int] = {}

    def start(
        self,
        verb: str,
        tensors: Tensors,
        call: Callable[[], None],
        result: Any,
        opts: Any,
    ) -> Started:
        """Hand ``call`` to the line.

        Args:
            verb: of torch.
            tensors: all that the call reads or writes; they are checked.
            call: what the line makes.
            result: what it fills.
            opts: torch's options, of which ``asyncOp`` says whether the caller goes on meanwhile.

        Raises:
            CommError: a tensor that cannot be sent or filled, or a root that is no rank of the group.
        """
        what = f"{verb} over process group {self._name or self.exchange.size}"
        check(what, tensors)
        check_apart(what, result if isinstance(result, (list, tuple)) else [result])
        root = getattr(opts, "rootRank", 0)
        if not 0 <= root < self.exchange.size:
            raise CommError(
                f"{what}: got rank {root} of the group as its root, expected 0 to {self.exchange.size - 1}"
            )
        self.calls[verb] = self.calls.get(verb, 0) + 1
        later = bool(getattr(opts, "asyncOp", True))
        timeout = getattr(opts, "timeout", None) if verb == "barrier" else None
        limit_s = timeout.total_seconds() if timeout is not None else 0.0
        return self.line.start(
            what, call, result, later=later, limit_s=limit_s if limit_s > 0 else None
        )


class Reducing(LineCalls):
    """Calls that reduce."""

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Started:
        """Reduce each tensor over all ranks, in place. Collective over the group."""
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        reduction = _reduction(opts, tensors)

        def call() -> None:
            for tensor in tensors:
                target = Target(tensor)
                self.exchange.all_reduce(target.flat, reduction)
                target.done()

        return self.start("allreduce", tensors, call, tensors, opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> Started:
        """Reduce over all ranks into the tensor of one. Collective over the group."""
        reduction, root = _reduction(opts, tensors), opts.rootRank

        def call() -> None:
            target = Target(tensors[0])
            self.exchange.reduce(target.flat, reduction, root)
            target.done()

        return self.start("reduce", tensors, call, tensors, opts)

    def reduce_scatter(self, outs: Tensors, inps: Sequence[Tensors], opts: Any = None) -> Started:
        """Reduce lists of tensors, one for each rank, into that of this rank. Collective over the group.

        Tensors of a list may have other sizes, as with gloo; all ranks bring the same sizes.
        """
        reduction = _reduction(opts, outs)
        for out, parts in zip(outs, inps, strict=True):
            check_parts("reduce_scatter", parts, out, self.exchange.size, self.exchange.rank)

        def call() -> None:
            for out, parts in zip(outs, inps, strict=True):
                self._scatter_sum(out, [flat(part) for part in parts], reduction)

        used = [*outs, *(part for parts in inps for part in parts)]
        return self.start("reduce_scatter", used, call, outs, opts)

    def reduce_scatter_single(self, out: Tensor, inp: Tensor, opts: Any = None) -> Started:
        """Reduce a tensor over all ranks, of which each keeps a part. Collective over the group."""
        return self.reduce_scatter_single_coalesced([out], [inp], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outs: Tensors, inps: Tensors, opts: Any = None
    ) -> Started:
        """``reduce_scatter_single`` of several tensors. Collective over the group."""
        reduction, size = _reduction(opts, outs), self.exchange.size
        for out, inp in zip(outs, inps, strict=True):
            check_whole("reduce_scatter_single", inp, out, size)

        def call() -> None:
            for out, inp in zip(outs, inps, strict=True):
                parts = flat(inp).view(size, out.numel()).unbind()
                self._scatter_sum(out, parts, reduction)

        return self.start("reduce_scatter_single", [*outs, *inps], call, list(outs), opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _scatter_sum(self, out: Tensor, parts: Tensors, reduction: Reduction) -> None:
        target, rank = Target(out), self.exchange.rank
        given = [
            apart(part, [target.flat], same=target.flat if number == rank else None)
            for number, part in enumerate(parts)
        ]
        self.exchange.reduce_scatter(given, target.flat, reduction)
        target.done()


class Moving(Reducing):
    """Calls that bring tensors to all ranks, or to one."""

    def allgather(self, outs: Sequence[Tensors], inps: Tensors, opts: Any = None) -> Started:
        """Every rank's tensor, into lists of tensors. Collective over the group."""
        for rows, inp in zip(outs, inps, strict=True):
            check_equal("all_gather", rows, inp, count=self.exchange.size)

        def call() -> None:
            for rows, inp in zip(outs, inps, strict=True):
                targets = [Target(row) for row in rows]
                self._gather_all(inp, [target.flat for target in targets])
                for target in targets:
                    target.done()

        used = [*inps, *(row for rows in outs for row in rows)]
        return self.start("allgather", used, call, outs, opts)

    def allgather_coalesced(
        self, outs: Sequence[Tensors], inps: Tensors, opts: Any = None
    ) -> Started:
        """``allgather`` of several tensors, of which ``outs`` has one list for each rank. Collective over the group."""
        return self.allgather(list(zip(*outs, strict=True)), inps, opts)

    def all_gather_single(self, out: Tensor, inp: Tensor, opts: Any = None) -> Started:
        """Every rank's tensor, one behind the other. Collective over the group."""
        return self.all_gather_single_coalesced([out], [inp], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outs: Tensors, inps: Tensors, opts: Any = None
    ) -> Started:
        """``all_gather_single`` of several tensors. Collective over the group."""
        size = self.exchange.size
        for out, inp in zip(outs, inps, strict=True):
            check_whole("all_gather_single", out, inp, size)

        def call() -> None:
            for out, inp in zip(outs, inps, strict=True):
                target = Target(out)
                rows = target.flat.view(size, inp.numel()).unbind()
                self._gather_all(inp, rows)
                target.done()

        return self.start("all_gather_single", [*outs, *inps], call, list(outs), opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _gather_all(self, inp: Tensor, rows: Tensors) -> None:
        own = apart(flat(inp), rows, same=rows[self.exchange.rank])
        self.exchange.all_gather(own, rows)

    def broadcast(self, tensors: Any, opts: Any = None) -> Started:
        """One rank's tensor to all. Collective over the group."""
        tensors, root = list(tensors), opts.rootRank

        def call() -> None:
            for tensor in tensors:
                target = Target(tensor)
                self.exchange.broadcast(target.flat, root)
                target.done()

        return self.start("broadcast", tensors, call, tensors, opts)

    def gather(self, outs: Sequence[Tensors], inps: Tensors, opts: Any) -> Started:
        """Every rank's tensor to one rank. Collective over the group."""
        root, rows = opts.rootRank, list(outs[0]) if outs else []
        if self.exchange.rank == root:
            check_equal("gather", rows, inps[0], count=self.exchange.size)

        def call() -> None:
            targets = [Target(row) for row in rows]
            found = [target.flat for target in targets]
            own = apart(flat(inps[0]), found, same=found[root] if rows else None)
            self.exchange.gather(own, found or None, root)
            for target in targets:
                target.done()

        return self.start("gather", [*inps, *rows], call, outs, opts)

    def scatter(self, outs: Tensors, inps: Sequence[Tensors], opts: Any) -> Started:
        """One of a rank's tensors to each rank. Collective over the group."""
        root = opts.rootRank
        parts = list(inps[0]) if self.exchange.rank == root else []
        if self.exchange.rank == root:
            check_equal("scatter", parts, outs[0], count=self.exchange.size)

        def call() -> None:
            target = Target(outs[0])
            given = all_apart([flat(part) for part in parts], [target.flat])
            self.exchange.scatter(given or None, target.flat, root)
            target.done()

        return self.start("scatter", [*outs, *parts], call, outs, opts)


class MPIProcessGroup(Moving):
    """A process group over one communicator.

    Attributes:
        messages: from rank to rank.
    """

    def __init__(self, exchange: BridgeExchange, line: Line, messages: GroupMessages) -> None:
        """Not collective. ``hpczero.bridge.start`` makes groups."""
        super().__init__(exchange, line)
        self.messages = messages

    def alltoall(self, outs: Tensors, inps: Tensors, opts: Any = None) -> Started:
        """One tensor of each rank to each rank, of any sizes. Collective over the group."""
        for name, given in (("output", outs), ("input", inps)):
            if len(given) != self.exchange.size:
                raise CommError(
                    f"all_to_all: got {len(given)} {name} tensors, expected {self.exchange.size}, one for each rank"
                )

        def call() -> None:
            targets = [Target(out) for out in outs]
            into = [target.flat for target in targets]
            self.exchange.all_to_all(all_apart([flat(each) for each in inps], into), into)
            for target in targets:
                target.done()

        return self.start("alltoall", [*outs, *inps], call, list(outs), opts)

    def all_to_all_single(
        self,
        out: Tensor,
        inp: Tensor,
        out_splits: Sequence[int] | None = None,
        in_splits: Sequence[int] | None = None,
        opts: Any = None,
    ) -> Started:
        """A part of each rank's tensor to each rank, cut along the first dimension. Collective over the group."""
        size = self.exchange.size
        ours = cut("all_to_all_single: input", inp, in_splits, size)
        theirs = cut("all_to_all_single: output", out, out_splits, size)

        def call() -> None:
            target = Target(out)
            given = apart(flat(inp), [target.flat])
            self.exchange.all_to_all(torch.split(given, ours), torch.split(target.flat, theirs))
            target.done()

        return self.start("all_to_all_single", [out, inp], call, out, opts)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> Started:
        """Wait for all ranks. Collective over the group."""
        return self.start("barrier", [], self.exchange.barrier, [], opts)

    def send(self, tensors: Tensors, rank: int, tag: int = 0) -> MessageWork:
        """Start to send a tensor to ``rank`` of the group."""
        self.calls["send"] = self.calls.get("send", 0) + 1
        return self.messages.send(tensors[0], rank, tag)

    def recv(self, tensors: Tensors, rank: int, tag: int = 0) -> MessageWork:
        """Start to receive a tensor from ``rank`` of the group."""
        self.calls["recv"] = self.calls.get("recv", 0) + 1
        return self.messages.receive(tensors[0], rank, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> MessageWork:
        """Start to receive a tensor from whoever sends one first."""
        self.calls["recv"] = self.calls.get("recv", 0) + 1
        return self.messages.receive(tensors[0], None, tag)


def _reduction(opts: Any, tensors: Tensors) -> Reduction:
    """What ``opts`` ask for, of the dtypes of ``tensors``."""
    reduction = Reduction("SUM") if opts is None else Reduction.of(getattr(opts, "reduceOp", opts))
    for tensor in tensors:
        reduction.check(tensor.dtype)
    return reduction
