"""Recorder: what one rank does, written down as its stand-ins are called, with the work between calls.

Small work is measured by the thread's clock. On the meta device nothing is computed; every operation of torch is then
charged: a product by the roofline of the machine, attention as one kernel, everything else by the bytes that it reads
and writes, and each a launch.

[Note: Between the reductions and the update]
What a step gathers after its update the next forward waits for, and its loss is told after the update too. A step from
one ``TrainingStep.take`` to the next would wait for what it has not started. Once gradients are clipped all reductions
are over, and no gather of the update has begun. From there to the same place in the next step everything that is
started is waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from hpczero.errors import HpcZeroError
from hpczero.predict.machine import Kernels
from scaling.simulate.programs import MAIN, Await, Call, Entry, Lanes, Origin, Signal, Work


class Clock(Protocol):
    """Measures or counts the work of this rank."""

    def take(self) -> Work:
        """Work since the last call, or since the clock was started."""

    def start(self) -> None:
        """Forget what was done since the last call of ``take``."""


class Recorder:
    """Of one rank.

    Attributes:
        lanes: entries of each lane, while ``on``.
        comms: world ranks of every communicator, by its name.
        origins: where each comes from.
        on: whether entries are kept.
        begun: how often that was begun; a token is of one of these times.
        clock: of the work.
        operation, name, dtype: what is going on, for calls.
        reads: communicator of a node, and bytes that this rank is about to read from each peer beside the next call.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.lanes: dict[str, list[Entry]] = {MAIN: []}
        self.comms: dict[str, tuple[int, ...]] = {}
        self.origins: dict[str, Origin] = {}
        self.on, self.begun = False, 0
        self.operation, self.name, self.dtype = "", "", ""
        self.reads: tuple[str, int] = ("", 0)
        self._lane = MAIN
        self._meanwhile: list[Work] = []
        self._tokens = 0

    def begin(self) -> None:
        """Keep entries from now on, and forget those of before."""
        self.lanes = {MAIN: []}
        self._tokens = 0
        self.begun += 1
        self.on = True
        self.clock.start()

    def end(self) -> dict[str, list[Entry]]:
        """Keep no more entries; those of each lane."""
        self.flush()
        self.on = False
        return self.lanes

    def new_name(self, wished: str, ranks: tuple[int, ...], origin: Origin) -> str:
        """A name for one more communicator: ranks make them in the same order, so names are alike."""
        name, number = wished, 1
        while name in self.comms:
            number += 1
            name = f"{wished} ({number})"
        self.comms[name] = ranks
        self.origins[name] = origin
        return name

    def flush(self) -> None:
        """Note the work since the last entry."""
        work = self.clock.take()
        if not (self.on and work):
            return
        if self._meanwhile:
            self._meanwhile[-1] += work
        else:
            lane = self.lanes.setdefault(self._lane, [])
            if lane and isinstance(lane[-1], Work):
                lane[-1] += work
            else:
                lane.append(work)

    def record(self, entry: Entry) -> None:
        """One more entry of the lane that is recorded now."""
        self.flush()
        if self.on:
            self.lanes.setdefault(self._lane, []).append(entry)
        self.clock.start()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context whose work is not counted."""
        self.flush()
        yield
        self.clock.start()

    # --- calls

    @contextmanager
    def labelled(self, operation: str, name: str, dtype: str) -> Iterator[None]:
        """Context in which calls are for ``operation`` of ``name``."""
        before = self.operation, self.name, self.dtype
        self.operation, self.name, self.dtype = operation, name, dtype
        try:
            yield
        finally:
            self.operation, self.name, self.dtype = before

    def open(self) -> None:
        """From now to ``close`` work goes on while a call does."""
        self.flush()
        self._meanwhile.append(Work())

    def close(self) -> Work:
        """The work since ``open``."""
        self.flush()
        return self._meanwhile.pop()

    def call(
        self,
        comm: str,
        nbytes: int,
        *,
        operation: str = "",
        dtype: str = "",
        sent: int = 0,
        messages: int = 0,
        batches: int = 1,
        work: Work | None = None,
    ) -> None:
        """A call over ``comm``; it takes over what is read from peers. ``Call`` says what the arguments are."""
        if len(self.comms[comm]) == 1:
            return
        beside, beside_sent = self.reads if sent else ("", 0)
        if sent:
            self.reads = "", 0
        # Work that went on while an inner call of this lane did is before it.
        entry = Call(
            comm,
            self.operation or operation,
            self.name,
            self.dtype or dtype,
            nbytes,
            sent,
            messages,
            batches,
            beside if beside_sent else "",
            beside_sent,
            work or Work(),
        )
        self.record(entry)

    # --- lanes

    def started(self, lane: str) -> Starting:
        """Context around what ``lane`` does, started by the lane that is recorded now."""
        self._tokens += 1
        return Starting(self, lane, self._tokens)

    def enter(self, lane: str) -> str:
        """Record ``lane`` from now on; the one of before."""
        self.flush()
        before, self._lane = self._lane, lane
        return before


class Starting:
    """Context: entries are those of a lane that was handed something to do. ``wait`` waits for its end."""

    def __init__(self, recorder: Recorder, lane: str, number: int) -> None:
        self._recorder, self._lane = recorder, lane
        self._number, self._begun = number, recorder.begun
        self._begin, self._end = f"begin {number}", f"end {number}"
        self._before = MAIN

    def __enter__(self) -> Starting:
        recorder = self._recorder
        recorder.record(Signal(self._begin))
        self._before = recorder.enter(self._lane)
        recorder.record(Await(self._begin, self._before))
        return self

    def __exit__(self, *exception: object) -> None:
        self._recorder.record(Signal(self._end))
        self._recorder.enter(self._before)

    def wait(self) -> None:
        """The lane that is recorded now waits for the end.

        Raises:
            HpcZeroError: it was started before what is recorded now, in which nobody gives its token.
        """
        recorder = self._recorder
        if recorder.on and recorder.begun != self._begun:
            raise HpcZeroError(
                f"lane {self._lane!r}: the step that is recorded waits for operation {self._number} of the one before, "
                "which it does not have, expected one of its own; cut steps where nothing is on its way"
            )
        recorder.record(Await(self._end, self._lane))


aten = torch.ops.aten
FREE = ("empty", "new_empty", "resize", "set_", "_unsafe_view", "is_same_size", "record_stream")


class ThreadClock:
    """Processor time of the thread that records."""

    def __init__(self) -> None:
        self._begin = time.thread_time()

    def take(self) -> Work:
        """Since the last call, or since ``start``."""
        now = time.thread_time()
        work, self._begin = Work(host_s=max(now - self._begin, 0.0)), now
        return work

    def start(self) -> None:
        """Begin to count."""
        self._begin = time.thread_time()


class CountingClock:
    """Work of operations on the meta device.

    Attributes:
        kernels: of the device.
        memory_rate: bytes per second of it.
        flops: of products so far.
    """

    def __init__(self, kernels: Kernels, memory_rate: float) -> None:
        self.kernels, self.memory_rate = kernels, memory_rate
        self.flops = 0.0
        self._work = Work()

    def take(self) -> Work:
        """Since the last call."""
        work, self._work = self._work, Work()
        return work

    def start(self) -> None:
        """Forget what was counted."""
        self._work = Work()

    def product(self, m: int, k: int, n: int, times: int = 1) -> None:
        """Count ``times`` products of (m, k) and (k, n)."""
        self.flops += 2.0 * m * k * n * times
        self._add(times * self.kernels.matmul_s(m, k, n))

    def attention(self, tokens: int, sequence: int, width: int, *, backward: bool) -> None:
        """Count both products of attention."""
        self.flops += (2 if backward else 1) * 4.0 * tokens * sequence * width
        self._add(self.kernels.attention_s(tokens, sequence, width, backward=backward))

    def moved(self, nbytes: float) -> None:
        """Count an operation that reads and writes so many bytes."""
        self._add(nbytes / self.memory_rate)

    def _add(self, device_s: float) -> None:
        self._work += Work(device_s, self.kernels.dispatch_s)


class Operations(TorchDispatchMode):
    """Counts operations on the meta device, and answers where somebody asks for values that are not there.

    Numbers are 1, comparisons are true, tensors that come to the host are full of ones.
    """

    def __init__(self, clock: CountingClock) -> None:
        super().__init__()
        self._clock = clock

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        found, answered = _answer(func, args, kwargs)
        if answered:
            return found
        out = func(*args, **kwargs)
        if _is_free(func):
            return out
        into = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(tensor.is_meta for tensor in (*into, *given)):
            self._count(func, args, given, into)
        return out

    def _count(
        self, func: Any, args: Sequence[Any], given: Sequence[Tensor], into: Sequence[Tensor]
    ) -> None:
        clock = self._clock
        name = func.overloadpacket
        if name in (aten.mm, aten.addmm):
            left, right = args[-2:] if name is aten.mm else args[1:3]
            clock.product(left.shape[0], left.shape[1], right.shape[1])
        elif name in (aten.bmm, aten.baddbmm):
            left, right = args[-2:] if name is aten.bmm else args[1:3]
            clock.product(left.shape[1], left.shape[2], right.shape[2], left.shape[0])
        else:
            clock.moved(sum(tensor.numel() * tensor.element_size() for tensor in (*given, *into)))


def _answer(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, bool]:
    """(what is answered, whether) to a question after values that are not there."""
    first = args[0] if args and isinstance(args[0], Tensor) else None
    if first is None:
        return None, False
    name = func.overloadpacket
    if name is aten._local_scalar_dense and first.is_meta:
        return (
            True if first.dtype is torch.bool else 1.0 if first.is_floating_point() else 1
        ), True
    if name is aten.equal and first.is_meta:
        return True, True
    device = kwargs.get("device")
    if name is aten._to_copy and first.is_meta and device is not None and device.type == "cpu":
        return torch.ones(first.shape, dtype=kwargs.get("dtype") or first.dtype), True
    if name is aten.copy_ and not first.is_meta and args[1].is_meta:
        return first.fill_(1), True
    return None, False


def _is_free(func: Any) -> bool:
    """Whether an operation makes a view, or memory without content."""
    returns = func._schema.returns
    if any(value.alias_info is not None and not value.alias_info.is_write for value in returns):
        return True
    return any(func.overloadpacket.__name__.startswith(name) for name in FREE)


class _Attention(torch.autograd.Function):
    """Shapes of attention; what it costs is counted as one kernel."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, clock: CountingClock) -> Tensor:
        """(B, H, T, D) like ``q``."""
        ctx.save_for_backward(q, k, v)
        ctx.clock = clock
        _count_attention(clock, q, backward=False)
        return torch.empty_like(q)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Of q, k, v."""
        q, k, v = ctx.saved_tensors
        _count_attention(ctx.clock, q, backward=True)
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None


def _count_attention(clock: CountingClock, q: Tensor, *, backward: bool) -> None:
    batch, heads, sequence, features = q.shape
    clock.attention(batch * sequence, sequence, heads * features, backward=backward)


class Fused(TorchFunctionMode):
    """Attention on the meta device as one kernel, as devices have it."""

    def __init__(self, clock: CountingClock) -> None:
        super().__init__()
        self._clock = clock

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.scaled_dot_product_attention and args[0].is_meta:
            return _Attention.apply(*args[:3], self._clock)
        return func(*args, **(kwargs or {}))


class Cuts:
    """A hook before each update: the last record ends there, and the next one begins.

    Attributes:
        most: steps to record; each has the end of one ``take`` and the beginning of the next.
        lanes: of each that is recorded.
        flops: of all of them; 0 where work is measured.
    """

    def __init__(self, recorder: Recorder, clock: CountingClock | ThreadClock, most: int) -> None:
        self.most = most
        self.lanes: list[Lanes] = []
        self._recorder, self._clock = recorder, clock
        self._from = self._to = 0.0

    def __call__(self, *_: object) -> None:
        """As ``Optimizer.register_step_pre_hook`` wants it."""
        if self._recorder.on:
            self.lanes.append(self._recorder.end())
        self._to = getattr(self._clock, "flops", 0.0)
        if not self.lanes:
            self._from = self._to
        if len(self.lanes) < self.most:
            self._recorder.begin()

    @property
    def flops(self) -> float:
        """Of all steps that are recorded."""
        return self._to - self._from
