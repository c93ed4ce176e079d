"""MPIProcessGroup: a process group of torch over one MPI communicator.

torch finds the methods by their names, from Python and from C++. Releases before 2.13 have other names for the calls
with one tensor for all ranks; the class has these names too. A method checks its tensors at once, on the caller's
thread. Then it hands a call on flat tensors to the line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
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
    all_apart,
    apart,
    check,
    check_apart,
    check_equal,
    check_whole,
    cut,
    fill,
    flat,
)
from hpczero.errors import CommError

Tensors = Sequence[Tensor]
# The tensors that a part of a call fills, and what fills them, given flat memory for each.
Part = tuple[Tensors, Callable[..., None]]

# Torch's methods have overloads for one tensor, which nothing calls; a subclass need not repeat them.
_ProcessGroup: Any = dist.ProcessGroup


class _Named(_ProcessGroup):  # type: ignore[misc]
    """What a process group is called. torch's own keeps names in its backend, which a group in Python has not."""

    _name, _desc = "", ""

    def name(self) -> str:
        return "hpczero"

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._desc

    def setGroupDesc(self, desc: str) -> None:
        self._desc = desc

    getBackendName = name
    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)
    _device_types = property(lambda _: [torch.device(kind) for kind in DEVICES])

    def _get_backend(self, device: torch.device) -> _Named:
        """Itself: torch asks for a backend to see whether NCCL or gloo has a limit of time to be changed."""
        return self


class MPIProcessGroup(_Named):
    """A process group over one communicator. All methods but messages are collective over the group.

    Attributes:
        exchange: the collectives.
        line: makes the calls.
        messages: from rank to rank.
        calls: how often each method was called, by its name.
    """

    def __init__(self, exchange: BridgeExchange, line: Line, messages: GroupMessages) -> None:
        """Not collective. ``hpczero.bridge.start`` makes groups."""
        super().__init__(exchange.rank, exchange.size)
        self.exchange, self.line, self.messages = exchange, line, messages
        self.calls: dict[str, int] = {}

    def start(
        self, verb: str, parts: Sequence[Part], opts: Any, result: Any, read: Tensors = ()
    ) -> Started:
        """Hand a call to the line.

        Args:
            verb: of torch.
            parts: what the line does, one part after the other.
            opts: torch's options, of which ``asyncOp`` says whether the caller goes on meanwhile.
            result: what torch's caller gets.
            read: tensors that the call reads and does not fill.

        Raises:
            CommError: a tensor that cannot be sent or filled, or a root that is no rank of the group.
        """
        what = f"{verb} over process group {self._name or self.exchange.size}"
        filled = [tensor for tensors, _ in parts for tensor in tensors]
        check(what, [*filled, *read])
        check_apart(what, filled)
        root = getattr(opts, "rootRank", 0)
        if not 0 <= root < self.exchange.size:
            raise CommError(
                f"{what}: got rank {root} of the group as its root, expected 0 to {self.exchange.size - 1}"
            )
        self.calls[verb] = self.calls.get(verb, 0) + 1
        later = bool(getattr(opts, "asyncOp", True))
        timeout = getattr(opts, "timeout", None) if verb == "barrier" else None
        limit_s = timeout.total_seconds() if timeout is not None else 0.0

        def call() -> None:
            for tensors, act in parts:
                values = [flat(tensor) for tensor in tensors]
                act(*values)
                for tensor, value in zip(tensors, values, strict=True):
                    fill(tensor, value)

        return self.line.start(
            what, call, result, later=later, limit_s=limit_s if limit_s > 0 else None
        )

    # --- calls that reduce

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Started:
        """Reduce each tensor over all ranks, in place."""
        tensors = _several(tensors)
        act = partial(self.exchange.all_reduce, reduction=_reduction(opts, tensors))
        return self.start("allreduce", [([each], act) for each in tensors], opts, tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> Started:
        """Reduce over all ranks into the tensor of one."""
        reduction = _reduction(opts, tensors)
        act = partial(self.exchange.reduce, reduction=reduction, root=opts.rootRank)
        return self.start("reduce", [(tensors[:1], act)], opts, tensors)

    def reduce_scatter(self, outs: Tensors, inps: Sequence[Tensors], opts: Any = None) -> Started:
        """Reduce lists of tensors, one for each rank, into that of this rank.

        Tensors of a list may have other sizes, as with gloo; all ranks bring the same sizes.
        """
        size, rank = self.exchange.size, self.exchange.rank
        for out, rows in zip(outs, inps, strict=True):
            check_equal("reduce_scatter", rows, out, count=size, only=rank)
        parts = _reduced(self.exchange, outs, inps, _reduction(opts, outs))
        return self.start(
            "reduce_scatter", parts, opts, outs, [row for rows in inps for row in rows]
        )

    def reduce_scatter_single(self, outs: Any, inps: Any, opts: Any = None) -> Started:
        """Reduce a tensor over all ranks, of which each keeps a part; or several tensors."""
        outs, inps = _several(outs), _several(inps)
        for out, inp in zip(outs, inps, strict=True):
            check_whole("reduce_scatter_single", inp, out, self.exchange.size)
        parts = _reduced(self.exchange, outs, inps, _reduction(opts, outs))
        return self.start("reduce_scatter_single", parts, opts, outs, inps)

    reduce_scatter_single_coalesced = _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single

    # --- calls that bring tensors to all ranks, or to one

    def allgather(self, outs: Sequence[Tensors], inps: Tensors, opts: Any = None) -> Started:
        """Every rank's tensor, into lists of tensors."""
        for rows, inp in zip(outs, inps, strict=True):
            check_equal("all_gather", rows, inp, count=self.exchange.size)
        return self.start("allgather", _gathered(self.exchange, outs, inps), opts, outs, inps)

    def allgather_coalesced(
        self, outs: Sequence[Tensors], inps: Tensors, opts: Any = None
    ) -> Started:
        """``allgather`` of several tensors, of which ``outs`` has one list for each rank."""
        return self.allgather(list(zip(*outs, strict=True)), inps, opts)

    def all_gather_single(self, outs: Any, inps: Any, opts: Any = None) -> Started:
        """Every rank's tensor, one behind the other; or those of several tensors."""
        outs, inps = _several(outs), _several(inps)
        for out, inp in zip(outs, inps, strict=True):
            check_whole("all_gather_single", out, inp, self.exchange.size)
        parts = _gathered(self.exchange, [[out] for out in outs], inps)
        return self.start("all_gather_single", parts, opts, outs, inps)

    all_gather_single_coalesced = _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single

    def broadcast(self, tensors: Any, opts: Any = None) -> Started:
        """One rank's tensor to all."""
        act = partial(self.exchange.broadcast, root=opts.rootRank)
        return self.start("broadcast", [([each], act) for each in tensors], opts, list(tensors))

    def gather(self, outs: Sequence[Tensors], inps: Tensors, opts: Any) -> Started:
        """Every rank's tensor to one rank."""
        root, rows = opts.rootRank, list(outs[0]) if outs else []
        if self.exchange.rank == root:
            check_equal("gather", rows, inps[0], count=self.exchange.size)

        def act(*found: Tensor) -> None:
            own = apart(flat(inps[0]), found, same=found[root] if found else None)
            self.exchange.gather(own, found or None, root)

        return self.start("gather", [(rows, act)], opts, outs, inps)

    def scatter(self, outs: Tensors, inps: Sequence[Tensors], opts: Any) -> Started:
        """One of a rank's tensors to each rank."""
        root = opts.rootRank
        given = list(inps[0]) if self.exchange.rank == root else []
        if self.exchange.rank == root:
            check_equal("scatter", given, outs[0], count=self.exchange.size)

        def act(target: Tensor) -> None:
            sent = all_apart([flat(each) for each in given], [target])
            self.exchange.scatter(sent or None, target, root)

        return self.start("scatter", [(outs[:1], act)], opts, outs, given)

    def alltoall(self, outs: Tensors, inps: Tensors, opts: Any = None) -> Started:
        """One tensor of each rank to each rank, of any sizes."""
        for name, given in (("output", outs), ("input", inps)):
            if len(given) != self.exchange.size:
                raise CommError(
                    f"all_to_all: got {len(given)} {name} tensors, expected {self.exchange.size}, one for each rank"
                )

        def act(*into: Tensor) -> None:
            self.exchange.all_to_all(all_apart([flat(each) for each in inps], into), into)

        return self.start("alltoall", [(outs, act)], opts, list(outs), inps)

    def all_to_all_single(
        self,
        out: Tensor,
        inp: Tensor,
        out_splits: Sequence[int] | None = None,
        in_splits: Sequence[int] | None = None,
        opts: Any = None,
    ) -> Started:
        """A part of each rank's tensor to each rank, cut along the first dimension."""
        size = self.exchange.size
        ours = cut("all_to_all_single: input", inp, in_splits, size)
        theirs = cut("all_to_all_single: output", out, out_splits, size)

        def act(target: Tensor) -> None:
            given = apart(flat(inp), [target])
            self.exchange.all_to_all(torch.split(given, ours), torch.split(target, theirs))

        return self.start("all_to_all_single", [([out], act)], opts, out, [inp])

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> Started:
        """Wait for all ranks."""
        return self.start("barrier", [([], self.exchange.barrier)], opts, [])

    # --- messages

    def send(self, tensors: Tensors, rank: int, tag: int = 0) -> MessageWork:
        """Start to send a tensor to ``rank`` of the group."""
        self.calls["send"] = self.calls.get("send", 0) + 1
        return self.messages.send(tensors[0], rank, tag)

    def recv(self, tensors: Tensors, rank: int | None, tag: int = 0) -> MessageWork:
        """Start to receive a tensor from ``rank`` of the group, or from any rank."""
        self.calls["recv"] = self.calls.get("recv", 0) + 1
        return self.messages.receive(tensors[0], rank, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> MessageWork:
        """Start to receive a tensor from the rank that sends first."""
        return self.recv(tensors, None, tag)


def _reduced(
    exchange: BridgeExchange, outs: Tensors, inps: Sequence[Tensor | Tensors], reduction: Reduction
) -> list[Part]:
    """Each of ``outs``, and how it is reduced from a tensor for all ranks, or from one for each."""

    def act(given: Tensor | Tensors, target: Tensor) -> None:
        rows = [
            apart(row, [target], same=target if rank == exchange.rank else None)
            for rank, row in enumerate(_rows(given, exchange.size))
        ]
        exchange.reduce_scatter(rows, target, reduction)

    return [([out], partial(act, inp)) for out, inp in zip(outs, inps, strict=True)]


def _gathered(exchange: BridgeExchange, outs: Sequence[Tensors], inps: Tensors) -> list[Part]:
    """Each of ``outs``, a tensor for all ranks or one for each, and how it is gathered."""

    def act(inp: Tensor, *values: Tensor) -> None:
        rows = values if len(values) == exchange.size else _rows(values[0], exchange.size)
        own = apart(flat(inp), rows, same=rows[exchange.rank])
        exchange.all_gather(own, rows)

    return [(rows, partial(act, inp)) for rows, inp in zip(outs, inps, strict=True)]


def _rows(given: Tensor | Tensors, size: int) -> list[Tensor]:
    """The parts of ``size`` ranks, flat: given each by itself, or one behind the other in a tensor."""
    if not isinstance(given, Tensor):
        return [flat(each) for each in given]
    return list(flat(given).view(size, given.numel() // size).unbind())


def _several(given: Any) -> list[Tensor]:
    return [given] if isinstance(given, Tensor) else list(given)


def _reduction(opts: Any, tensors: Tensors) -> Reduction:
    """What ``opts`` ask for, of the dtypes of ``tensors``."""
    reduction = Reduction("SUM") if opts is None else Reduction.of(getattr(opts, "reduceOp", opts))
    for tensor in tensors:
        reduction.check(tensor.dtype)
    return reduction
