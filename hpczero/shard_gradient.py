"""ShardGradient: what is found at ``.grad`` of the optimizer's parameters, between steps.

Owns: the refusal of operations that take one rank's shards for whole gradients. Must not know: units, ranks.

After ``zeroify`` the optimizer's groups hold this rank's pieces. A norm over them, or torch's GradScaler looking for
infinities in them, would come out differently on every rank, without a word. Inside ``optimizer.step()`` they are
ordinary parameters with ordinary gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hpczero.errors import StepError

_descriptor: Any = Tensor.grad


def own_gradient(shard: nn.Parameter) -> Tensor | None:
    """The gradient as it is, whatever ``shard.grad`` shows."""
    found: Tensor | None = _descriptor.__get__(shard)
    return found


def set_own_gradient(shard: nn.Parameter, value: Tensor | None) -> None:
    """As ``shard.grad = value``, cheaper."""
    _descriptor.__set__(shard, value)


_OVER_ALL_ELEMENTS = ("norm", "_amp_", "dot", "isnan", "isfinite", "isinf", "nonzero", "equal")
_REDUCTIONS = frozenset(
    [
        "sum",
        "mean",
        "max",
        "min",
        "amax",
        "amin",
        "any",
        "all",
        "std",
        "var",
        "median",
        "argmax",
        "argmin",
        "item",
    ]
)


class ShardGradient(Tensor):
    """A piece of the mean gradient; elementwise operations work, those over all elements raise."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """As for an ordinary tensor, unless it depends on more than one element.

        Raises:
            StepError: the result would be this rank's own.
        """
        name = getattr(func, "__name__", "")
        if name in _REDUCTIONS or any(part in name for part in _OVER_ALL_ELEMENTS):
            raise StepError(
                f"{name!r} of a gradient in optimizer.param_groups: after zeroify these are this rank's pieces of the "
                "gradients, so every rank would get another result. Use hpczero.clip_grad_norm_(model, ...), or "
                "torch's own over model.parameters(); instead of torch.amp.GradScaler, zeroify(precision='fp16')"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class _Shard(nn.Parameter):
    """The optimizer's parameter between steps."""

    @property
    def grad(self) -> Tensor | None:
        """See ShardGradient."""
        own: Tensor | None = _descriptor.__get__(self)
        return None if own is None else own.as_subclass(ShardGradient)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        plain = value.as_subclass(Tensor) if isinstance(value, ShardGradient) else value
        _descriptor.__set__(self, plain)

    @grad.deleter
    def grad(self) -> None:
        _descriptor.__set__(self, None)


def guard_shards(shards: Iterable[nn.Parameter]) -> None:
    """From now on their gradients are ShardGradients."""
    for shard in shards:
        shard.__class__ = _Shard


def open_shards(shards: Iterable[nn.Parameter]) -> None:
    """Ordinary parameters again: torch's optimizers choose their kernels by the class."""
    for shard in shards:
        shard.__class__ = nn.Parameter
