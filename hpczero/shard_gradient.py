"""Pieces: what the optimizer's parameters and their ``.grad`` are between steps.

Owns: the refusal of operations that take one rank's shards for whole parameters or gradients. Must not know: units,
ranks.

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
from hpczero.parameter import own_gradient, set_own_gradient, watched_data

# Parts of names, and whole ones.
_OVER_ALL_ELEMENTS = (
    *(
        "norm",
        "_amp_",
        "dot",
        "isnan",
        "isfinite",
        "isinf",
        "nonzero",
        "equal",
        "std",
        "var",
        "sum",
        "sort",
        "arg",
    ),
    *("mean", "median", "quantile", "cum", "hist", "unique", "allclose", "is_nonzero"),
)
_MORE = (
    *(
        "max",
        "min",
        "amax",
        "amin",
        "aminmax",
        "any",
        "all",
        "prod",
        "item",
        "tolist",
        "numpy",
        "dist",
        "topk",
    ),
    *(
        "kthvalue",
        "mode",
        "cdist",
        "matmul",
        "mm",
        "inner",
        "outer",
        "__array__",
        "__bool__",
        "__float__",
        "__int__",
    ),
    *("__index__", "__contains__", "__iter__"),
)


def _refuse_rank_local(func: Callable[..., Any]) -> None:
    """Raise if the result would be this rank's own: it depends on more than one element.

    Raises:
        StepError: says what to call instead.
    """
    name = getattr(func, "__name__", "")
    if name in _MORE or any(part in name for part in _OVER_ALL_ELEMENTS):
        raise StepError(
            f"{name!r} of a parameter or a gradient in optimizer.param_groups: after zeroify these are this rank's "
            "pieces of the gradients and the parameters, so every rank would get another result. Use "
            "hpczero.clip_grad_norm_(model, ...), or torch's own over model.parameters(); values are whole inside "
            "`with hpczero.gathered(model):`; instead of torch.amp.GradScaler, zeroify(precision='fp16')"
        )


class ShardPiece(Tensor):
    """A piece of a parameter or of the mean gradient; elementwise operations work, those over all elements raise."""

    data = watched_data  # see shards.[Note: Changes of values between steps]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """As for an ordinary tensor; what comes of a piece is a piece. Raises as ``_refuse_rank_local``."""
        _refuse_rank_local(func)
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


class _Shard(nn.Parameter):
    """The optimizer's parameter between steps."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """As for an ordinary parameter; what comes of it is a piece. Raises as ``_refuse_rank_local``."""
        _refuse_rank_local(func)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result.as_subclass(ShardPiece) if type(result) is Tensor else result

    data = watched_data  # see shards.[Note: Changes of values between steps]

    @property
    def grad(self) -> Tensor | None:
        """See ShardPiece. What is assigned goes into the gradient that is there, which norms are taken of."""
        own = own_gradient(self)
        return None if own is None else own.as_subclass(ShardPiece)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        own = own_gradient(self)
        if value is None:
            if own is not None:
                own.zero_()
            set_own_gradient(self, None)
        elif own is None:
            raise StepError(
                "a parameter in optimizer.param_groups was assigned a gradient and had none; gradients of a zeroified "
                "model come from backward alone, which takes their mean over ranks"
            )
        else:
            own.copy_(value.as_subclass(Tensor))

    @grad.deleter
    def grad(self) -> None:
        self.grad = None


def guard_shards(shards: Iterable[nn.Parameter]) -> None:
    """From now on they and their gradients are guarded."""
    for shard in shards:
        shard.__class__ = _Shard


def open_shards(shards: Iterable[nn.Parameter]) -> None:
    """Ordinary parameters again: torch's optimizers choose their kernels by the class."""
    for shard in shards:
        shard.__class__ = nn.Parameter
