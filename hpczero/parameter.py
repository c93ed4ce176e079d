"""The guard on parameters whose memory is given back.

Owns: the error a user gets for touching a sharded parameter. Must not know: units, MPI. Without it torch would read
freed memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hpczero.errors import StepError

# What may be asked of a sharded parameter: everything that does not read or write its elements.
_METADATA_METHODS = (
    "size dim ndimension numel nelement stride is_contiguous element_size is_floating_point is_complex get_device "
    "requires_grad_ register_hook register_post_accumulate_grad_hook __hash__ __len__"
)
_METADATA_FIELDS = (
    "shape dtype device layout ndim requires_grad is_leaf grad_fn is_cuda is_cpu is_meta is_sparse is_quantized "
    "is_nested itemsize nbytes _version grad"
)
_METADATA: frozenset[Any] = frozenset(
    [getattr(torch.Tensor, name) for name in _METADATA_METHODS.split()]
    + [getattr(torch.Tensor, name).__get__ for name in _METADATA_FIELDS.split()]
    + [getattr(torch.Tensor, name).__set__ for name in ("grad", "requires_grad")]
    + [torch.is_floating_point, torch.is_complex]
)


class ShardedParameter(nn.Parameter):
    """A parameter while its whole value is not on this rank: metadata only, anything else raises StepError."""

    qualified_name = ""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer metadata, refuse everything that touches elements."""
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        name = next((a.qualified_name for a in args if isinstance(a, ShardedParameter)), "")
        name = name or cls.qualified_name
        what = getattr(func, "__name__", str(func))
        if what in ("__get__", "__set__"):  # of a property such as data
            what = getattr(getattr(func, "__self__", None), "__name__", what)
        raise StepError(
            f"parameter {name!r} is sharded and its memory given back (stage 3), but {what!r} needs its "
            "value. Inside the model: a module other than its own uses it; make the module that uses it "
            "the unit (rule=...) or call through that module. Outside: wrap the access in "
            "`with hpczero.gathered(model):`, or use hpczero.full_state_dict(model)"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return f"ShardedParameter({self.qualified_name!r}, shape={tuple(self.shape)}, {self.dtype})"


class Guard:
    """Turns the guard of one parameter on and off; switches the class only, never the object."""

    def __init__(self, parameter: nn.Parameter, qualified_name: str) -> None:
        self._parameter = parameter
        self._open_class = type(parameter)
        self._closed_class = type(
            "ShardedParameter", (ShardedParameter,), {"qualified_name": qualified_name}
        )

    def close(self) -> None:
        """From now on only metadata may be read."""
        self._parameter.__class__ = self._closed_class

    def open(self) -> None:
        """The value is there again."""
        self._parameter.__class__ = self._open_class
