"""Pieces: what the optimizer's parameters and their ``.grad`` are between steps.

Owns: which operations give each rank its part of what whole parameters or gradients would give, and the refusal of all
others. Must not know: units, ranks.

After ``zeroify`` the optimizer's groups hold this rank's pieces. A norm over them, or torch's GradScaler looking for
infinities in them, would come out differently on every rank, without a word. Inside ``optimizer.step()`` they are
ordinary parameters with ordinary gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import GetSetDescriptorType
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from hpczero.errors import StepError
from hpczero.zero.units.away import check_at_hand
from hpczero.zero.units.guard import (
    LateParameter,
    ShardedParameter,
    own_gradient,
    set_own_gradient,
    watched_data,
)

# Each element of the result depends on the same element of each piece, and on numbers. Names without the underscore of
# those in place and without the prefix of those on lists.
_ELEMENTWISE_NAMES = (
    "add sub subtract rsub mul multiply div divide true_divide floor_divide remainder fmod pow float_power "
    "neg negative positive abs absolute sign sgn signbit reciprocal square sqrt rsqrt "
    "exp exp2 expm1 log log2 log10 log1p logaddexp logaddexp2 xlogy logit sigmoid special_expit "
    "sin cos tan asin acos atan atan2 arcsin arccos arctan arctan2 sinh cosh tanh asinh acosh atanh arcsinh "
    "arccosh arctanh sinc erf erfc erfinv lgamma digamma i0 hypot copysign heaviside ldexp nextafter "
    "floor ceil round trunc fix frac maximum minimum fmax fmin clamp clamp_min clamp_max clip nan_to_num "
    "isnan isfinite isinf isposinf isneginf isclose eq ne not_equal lt less le less_equal gt greater ge "
    "greater_equal logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not "
    "where lerp addcmul addcdiv masked_fill copy fill zero "
    "normal uniform bernoulli exponential cauchy geometric log_normal random dropout "
    "relu relu6 leaky_relu elu celu selu gelu silu mish softplus softsign softshrink hardshrink tanhshrink "
    "hardtanh hardsigmoid hardswish logsigmoid threshold _threshold "
    "to float double half bfloat16 int long short char byte bool type type_as cpu cuda "
    "__neg__ __pos__ __abs__ __invert__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__"
)
_OPERATORS = "add sub mul div truediv floordiv mod pow and or xor"
_ELEMENTWISE = frozenset(
    _ELEMENTWISE_NAMES.split()
    + [f"__{side}{name}__" for name in _OPERATORS.split() for side in ("", "r", "i")]
)
# Nothing is computed: metadata, the same elements in another shape, new tensors of the same shape.
_METADATA_NAMES = (
    "size dim ndimension numel nelement stride storage_offset is_contiguous element_size get_device data_ptr "
    "untyped_storage is_floating_point is_complex is_signed is_same_size is_set_to is_shared is_pinned "
    "is_inference is_conj is_neg result_type _has_compatible_shallow_copy_type requires_grad_ retain_grad "
    "__hash__ __len__ __dir__ __dlpack_device__ "
)
_METADATA = frozenset([*_METADATA_NAMES.split(), "__get__", "detach"])  # no element is looked at
_HARMLESS_NAMES = (
    _METADATA_NAMES + "__repr__ __format__ __reduce_ex__ __deepcopy__ "
    "view view_as reshape reshape_as flatten unflatten ravel squeeze squeeze_ unsqueeze unsqueeze_ expand "
    "expand_as broadcast_to broadcast_tensors t transpose permute contiguous "
    "cat concat stack alias detach detach_ clone as_subclass resolve_conj resolve_neg "
    "zeros_like ones_like empty_like full_like rand_like randn_like randint_like "
    "new_empty new_zeros new_ones new_full new_tensor"
)
_HARMLESS = frozenset(_HARMLESS_NAMES.split())


def _refuse_rank_local(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> None:
    """Raise if the result could be this rank's own: if it may depend on more than one element.

    Raises:
        StepError: says what to call instead.
    """
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        attribute = getattr(func, "__self__", None)
        if isinstance(attribute, GetSetDescriptorType):  # shape, data, grad: torch's own fields
            return
        name = getattr(attribute, "__name__", "__cuda_array_interface__")
    elif name in ("__getitem__", "__setitem__"):
        if _takes_all(args[0], args[1], may_mask=name == "__setitem__"):
            return
    elif name in ("register_hook", "register_post_accumulate_grad_hook"):
        raise StepError(
            f"{name!r} of a parameter in optimizer.param_groups: no backward comes to this rank's pieces, so it would "
            "never be called. Register it on the model's own parameter"
        )
    elif name in _HARMLESS:
        return
    else:
        in_place = name.endswith("_") and not name.endswith("__")
        operation = name.removeprefix("_foreach_").removesuffix("_" if in_place else "")
        given = (*args, *kwargs.values())
        positions = operation == "where" and len(given) == 1  # then it is nonzero
        if operation in _ELEMENTWISE and not positions and _fit(name, given):
            return
    raise StepError(
        f"{name!r} of a parameter or a gradient in optimizer.param_groups: after zeroify these are this rank's "
        "pieces of the gradients and the parameters, so every rank would get another result; what is known "
        "to take each element by itself works. Use hpczero.clip_grad_norm_(model, ...), or torch's own over "
        "model.parameters(); values are whole inside `with hpczero.gathered(model):`; instead of "
        "torch.amp.GradScaler, zeroify(precision='fp16')"
    )


def _takes_all(piece: Tensor, index: Any, *, may_mask: bool) -> bool:
    """Whether ``index`` means the same of a piece as of the whole: all elements, or a mask of each for itself."""
    if may_mask and isinstance(index, ShardPiece):
        with torch._C.DisableTorchFunctionSubclass():
            return index.dtype is torch.bool and index.shape == piece.shape
    parts = index if isinstance(index, tuple) else (index,)
    return all(
        part is Ellipsis or part is None or (isinstance(part, slice) and part == slice(None))
        for part in parts
    )


def _fit(name: str, given: Sequence[Any]) -> bool:
    """Whether the pieces among the arguments have one shape; else one element would come to many others."""
    if not name.startswith("_foreach_"):
        return _alike(given)
    lists = [value for value in given if isinstance(value, (list, tuple))]
    singles = [value for value in given if not isinstance(value, (list, tuple))]
    return all(_alike((*column, *singles)) for column in zip(*lists, strict=False))


def _alike(values: Iterable[Any]) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return len({v.shape for v in values if isinstance(v, (ShardPiece, _Shard))}) < 2


def _guarded(result: Any) -> Any:
    """As it came, every ordinary tensor in it a piece."""
    if type(result) is Tensor:
        return result.as_subclass(ShardPiece)
    if type(result) in (list, tuple):
        return type(result)(map(_guarded, result))
    return result


def _on_pieces(
    func: Callable[..., Any], types: tuple[type, ...], args: Any, kwargs: dict[str, Any] | None
) -> Any:
    """As for ordinary tensors; what comes of a piece is a piece. Raises as ``_refuse_rank_local``."""
    if any(issubclass(kind, (ShardedParameter, LateParameter)) for kind in types):
        return NotImplemented  # the parameter is asked then, whose values may not be there
    kwargs = kwargs or {}
    _refuse_rank_local(func, args, kwargs)
    if getattr(func, "__name__", "") not in _METADATA:
        for value in (*args, *kwargs.values()):
            for each in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(each, (ShardPiece, _Shard)):
                    check_at_hand(each)
    with torch._C.DisableTorchFunctionSubclass():
        return _guarded(func(*args, **kwargs))


def _assign_data(piece: Tensor, value: Tensor) -> None:
    """``p.grad.data = value``: every ``p.grad`` is made for who reads it, so elements go into the gradient itself."""
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        if not isinstance(value, Tensor) or value.shape != piece.shape:
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise StepError(
                f".data of a gradient in optimizer.param_groups was assigned: got {got}, expected a tensor of shape "
                f"{tuple(piece.shape)}, that of this rank's piece"
            )
        beside = torch._C._is_alias_of(value, piece)  # type: ignore[attr-defined]
        if beside and value.data_ptr() != piece.data_ptr():
            raise StepError(
                ".data of a gradient in optimizer.param_groups was assigned that of another one; exchange copies: "
                "p.grad.data = other.grad.clone()"
            )
        piece.copy_(value.detach())


class ShardPiece(Tensor):
    """A piece of a parameter or of the mean gradient; elementwise operations work, those over all elements raise."""

    data = property(lambda piece: piece.detach(), _assign_data)

    def set_(self, *arguments: Any, **options: Any) -> Any:
        """Refused: torch does not show it to ``__torch_function__``."""
        raise StepError(
            "'set_' of a gradient in optimizer.param_groups would give other memory to what was made for who reads "
            "it; change it in place: p.grad.copy_(...)"
        )

    @classmethod
    @override
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return _on_pieces(func, types, args, kwargs)


class _Shard(nn.Parameter):
    """The optimizer's parameter between steps."""

    @classmethod
    @override
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return _on_pieces(func, types, args, kwargs)

    data = watched_data  # see shards.[Note: Changes of values between steps]

    @property
    def grad(self) -> Tensor | None:
        """What is assigned goes into the gradient that is there, which norms are taken of."""
        own = own_gradient(self)
        # Detached: torch refuses to make a view of what was cut without a graph a part of one, in place.
        return None if own is None else own.detach().as_subclass(ShardPiece)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        own = own_gradient(self)
        if own is not None:
            check_at_hand(own)
        if value is None:
            if own is not None:
                own.zero_()
            set_own_gradient(self, None)
        elif not isinstance(value, Tensor):
            raise TypeError(
                f"a gradient in optimizer.param_groups was assigned: got {type(value).__name__}, expected a Tensor or "
                "None"
            )
        elif own is None:
            raise StepError(
                "a parameter in optimizer.param_groups was assigned a gradient and had none; gradients of a zeroified "
                "model come from backward alone, which takes their mean over ranks"
            )
        elif value.shape != own.shape:
            raise StepError(
                f"a gradient in optimizer.param_groups was assigned: got shape {tuple(value.shape)}, expected "
                f"{tuple(own.shape)}, that of this rank's piece"
            )
        else:
            with torch.no_grad():  # the buffer of all gradients must not become part of a graph
                own.copy_(value.detach())

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    _grad = grad  # torch's other name for it


def guard_shards(shards: Iterable[nn.Parameter]) -> None:
    """From now on they and their gradients are guarded."""
    for shard in shards:
        shard.__class__ = _Shard


def open_shards(shards: Iterable[nn.Parameter]) -> None:
    """Ordinary parameters again: torch's optimizers choose their kernels by the class."""
    for shard in shards:
        shard.__class__ = nn.Parameter
