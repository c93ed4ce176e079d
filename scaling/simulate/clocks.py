"""Clocks: what the work of a rank between two calls costs, measured or counted.

Owns: thread time of small work on this processor, and a count of large work on a described machine. Must not know:
communicators, the engine, what the work is for.

On the meta device nothing is computed. Every operation of torch is then charged: a product by the roofline of the
machine, attention as one kernel, everything else by the bytes that it reads and writes, and each a launch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from hpczero.predict.machine import Kernels
from scaling.simulate.programs import Work

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
        into = list(_tensors((out,)))
        given = list(_tensors((*args, *kwargs.values())))
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


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


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
