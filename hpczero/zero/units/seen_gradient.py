"""SeenGradient: what a training loop finds at ``parameter.grad``.

After backward the mean gradient lies in shards, so ``parameter.grad`` cannot be a tensor of values. It is a stand-in of
the right shape. Elementwise changes by numbers go to the shards, norms are those of the whole gradient over all ranks,
None drops the gradient. torch's own ``clip_grad_norm_``, ``clip_grad_value_`` and ``zero_grad`` therefore work on the
parameters of a zeroified model. Whatever else is asked raises.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import GetSetDescriptorType
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
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
from hpczero.zero.units.unit import Unit

# Each element of the result depends on the same element and on numbers alone. In-place versions; lists go by theirs.
_ELEMENTWISE_NAMES = (
    "mul_ div_ clamp_ clamp_min_ clamp_max_ nan_to_num_ neg_ sign_ zero_ fill_ abs_ tanh_"
)
_ELEMENTWISE = frozenset(_ELEMENTWISE_NAMES.split())
_LISTS = {"clamp_min_": "maximum_", "clamp_max_": "minimum_"}  # other names of the same, for lists
_SAME = frozenset(["detach", "alias"])
_NORMS = frozenset(["linalg_vector_norm", "norm"])


class GradientSide(Protocol):
    """What gradients ask of the model that they belong to, and tell it; ``Sharding`` is one."""

    @property
    def in_backward(self) -> bool:
        """Whether a backward runs, or was interrupted."""

    @property
    def differentiable(self) -> bool:
        """Whether the last backward kept its own graph (``create_graph=True``)."""

    def norm_of_slot(self, unit: Unit, position: int, order: float) -> float:
        """As ``GradientNorms.of_slot``."""

    def note_change(self, name: str, what: str) -> None:
        """``what`` was done to the gradient of the parameter ``name``; ranks compare that."""

    def note_drop(self) -> None:
        """A gradient is gone."""

    def forget_interrupted(self) -> None:
        """Forget an interrupted backward, whose other gradients are incomplete."""


@dataclass(frozen=True)
class SlotGradient:
    """The gradient of one parameter, wherever its pieces are; what ``parameter.grad`` is, as of ``GradientSight``.

    Attributes:
        unit, position: whose, and which of its slots.
        model: what the gradient belongs to.
    """

    unit: Unit
    position: int
    model: GradientSide

    @property
    def name(self) -> str:
        """Of the parameter."""
        return self.unit.spec.layout.slots[self.position].name

    @property
    def is_there(self) -> bool:
        """Whether a gradient came in since it was dropped, on any rank if it is reduced, else on this one."""
        return self.unit.gradients.is_at(self.position)

    @property
    def drops(self) -> int:
        """How often the gradient was dropped; whoever keeps it sees by this that it is gone."""
        return int(self.unit.gradients.drops[self.position])

    def look(self, parameter: Tensor) -> Tensor | None:
        """What ``parameter.grad`` is: None, or a stand-in for the gradient in shards."""
        return SeenGradient(self, parameter) if self.is_there else None

    def assign(self, value: Tensor | None) -> None:
        """See ``GradientSight``.

        Raises:
            StepError: a tensor; hpczero would not know whether it is a mean over ranks.
        """
        if value is None:
            self.drop()
        elif isinstance(value, SeenGradient) and value._slot is self:
            _check_kept(value)
        else:
            raise StepError(
                f"parameter.grad of {self.name!r} was assigned a tensor; gradients of a zeroified model come "
                "from backward alone, which takes their mean over ranks. Put the values into the loss, or change this "
                "rank's own gradient by parameter.register_hook; None drops a gradient"
            )

    def drop(self) -> None:
        """As ``parameter.grad = None``."""
        if self.model.in_backward:
            self.model.forget_interrupted()
        if self.unit.gradients.present:
            self.model.note_change(self.name, "gradients set to None one by one")
        self.unit.gradients.drop_slots([self.position])
        self.model.note_drop()

    def change(self, what: str, operation: Callable[..., Any], numbers: Sequence[float]) -> None:
        """Apply an elementwise operation in place; ``what`` names it.

        Raises:
            StepError: the gradient is not reduced over ranks yet.
        """
        if self.model.in_backward or self.unit.gradients.waiting:
            raise StepError(
                f"the gradient of {self.name!r} is not reduced over ranks yet (no_sync, or a backward that did not "
                "finish); change it after the last backward of the step"
            )
        self.model.note_change(self.name, f"gradients changed by {what}{tuple(numbers)}")
        if what == "mul_" and list(numbers) == [1.0]:
            return
        gradients = self.unit.gradients
        with gradients.rest.at_hand(changes=True) if gradients.present else nullcontext():
            for piece in gradients.pieces_at(self.position):
                operation(piece, *numbers)


class SeenGradient(Tensor):
    """Stand-in for a parameter's gradient: shape, dtype and device, and no elements. See the module.

    Its memory is one NaN, seen at every place: what gets at it past all refusals finds no number, and does not crash.
    """

    _slot: SlotGradient
    _drops: int

    @staticmethod
    def __new__(cls, slot: SlotGradient, parameter: Tensor) -> SeenGradient:  # noqa: D102  (see the class)
        nothing = torch.full((), math.nan, dtype=parameter.dtype, device=parameter.device)
        made: SeenGradient = Tensor._make_subclass(cls, nothing.expand(parameter.shape))
        made._slot, made._drops = slot, slot.drops
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"SeenGradient({self._slot.name!r}, shape={tuple(self.shape)}, in shards)"

    @property
    def data(self) -> Tensor:
        """Another stand-in for the same gradient; a tensor put here would reach no shard, and is refused."""
        return SeenGradient(self._slot, self)

    @data.setter
    def data(self, value: Tensor) -> None:
        _check_kept(self)
        if not isinstance(value, SeenGradient) or value._slot is not self._slot:
            raise _refusal(self, "p.grad.data = ...")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Do what can be done in shards, refuse the rest. Collective for norms."""
        name = func.overloadpacket.__name__
        first = args[0] if args else None
        for seen in _all_seen((*args, *(kwargs or {}).values())):
            _check_kept(seen)
        if name.startswith("_foreach_"):
            return _on_list(name.removeprefix("_foreach_"), func, args, kwargs or {})
        if not isinstance(first, SeenGradient):
            raise _refusal(_first_seen(args), name)
        if name in _SAME:
            return SeenGradient(first._slot, first)
        if name in _NORMS:
            return _norm(first, _order(args[1:], kwargs or {}, first, name), args[1:], kwargs)
        options = dict(kwargs or {})
        if id(options.get("out")) == id(first):  # torch.clamp(p.grad, ..., out=p.grad)
            del options["out"]
            name += "_"
        return _change(first, name, args[1:], options)


def _refused(name: str, said: str) -> Callable[..., NoReturn]:
    def refuse(seen: SeenGradient, *args: Any, **kwargs: Any) -> NoReturn:
        raise _refusal(seen, said)

    refuse.__name__ = name
    return refuse


# Methods that torch shows to nobody, by what is said of them.
_BY_NAME = (
    "set_ numpy __dlpack__ apply_ map_ map2_ tolist data_ptr untyped_storage storage share_memory_"
)
_SAID = {name: name for name in _BY_NAME.split()} | {
    "__array__": "numpy.asarray",
    "__reduce_ex__": "a copy",
    "__deepcopy__": "a copy",
}
for _name, _said in _SAID.items():
    setattr(SeenGradient, _name, _refused(_name, _said))


def _on_list(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One of torch's operations on a list of tensors, some of which may be ordinary ones."""
    items = list(args[0])
    seen = [item for item in items if isinstance(item, SeenGradient)]
    if not seen:
        raise _refusal(_first_seen(args), f"_foreach_{name}")
    if name == "norm":
        order = _order(args[1:], kwargs, seen[0], name)
        dtype = kwargs.get("dtype", args[2] if len(args) > 2 else None)
        return [
            _norm(item, order, (), {"dtype": dtype})
            if isinstance(item, SeenGradient)
            else torch.linalg.vector_norm(item, order, dtype=dtype)
            for item in items
        ]
    name = next((short for short, long in _LISTS.items() if long == name), name)
    for index, item in enumerate(items):
        rest = [each[index] if isinstance(each, (list, tuple)) else each for each in args[1:]]
        if isinstance(item, SeenGradient):
            _change(item, name, rest, kwargs)
        else:
            getattr(item, name)(*rest, **kwargs)
    return None


def _change(
    seen: SeenGradient, name: str, args: Sequence[Any], kwargs: dict[str, Any]
) -> SeenGradient:
    if name not in _ELEMENTWISE or kwargs:
        raise _refusal(seen, name)
    numbers = [_number(seen, name, value) for value in args]
    seen._slot.change(name, getattr(Tensor, name), numbers)
    return seen


def _number(seen: SeenGradient, name: str, value: Any) -> Any:
    if isinstance(value, (int, float)) or value is None:
        return value
    if isinstance(value, Tensor) and not isinstance(value, SeenGradient) and value.dim() == 0:
        return value.item()
    raise _refusal(seen, name)


def _order(args: Sequence[Any], kwargs: dict[str, Any], seen: SeenGradient, name: str) -> float:
    """Which norm of the whole tensor is wanted."""
    order = kwargs.get("ord", kwargs.get("p", args[0] if args else 2))
    of_parts = [
        value
        for value in (*args[1:], kwargs.get("dim"))
        if isinstance(value, (list, tuple)) and value
    ]
    if of_parts or not isinstance(order, (int, float)) or not order > 0:
        raise _refusal(seen, name)
    return float(order)


def _norm(
    seen: SeenGradient, order: float, args: Sequence[Any], kwargs: dict[str, Any] | None
) -> Tensor:
    """0-dimensional fp32 tensor unless ``keepdim`` and ``dtype`` say otherwise, the same on every rank. Collective.

    Args:
        seen: whose.
        order: of the norm.
        args: order, dim, keepdim, as far as given.
        kwargs: of the same operation.
    """
    slot, options = seen._slot, kwargs or {}
    if torch.is_grad_enabled() and slot.model.differentiable:
        raise StepError(
            f"the norm of parameter.grad of {slot.name!r} after backward(create_graph=True) would be a constant: "
            "derivatives of gradients with respect to parameters are not available through p.grad; take a norm that is "
            "only looked at under torch.no_grad()"
        )
    keepdim = options.get("keepdim", args[2] if len(args) > 2 else False)
    value = slot.model.norm_of_slot(slot.unit, slot.position, order)
    shape = (1,) * seen.dim() if keepdim else ()
    return torch.full(shape, value, dtype=options.get("dtype") or torch.float32, device=seen.device)


def _all_seen(args: Sequence[Any]) -> Iterator[SeenGradient]:
    for value in args:
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, SeenGradient):
                yield item


def _first_seen(args: Sequence[Any]) -> SeenGradient:
    return next(_all_seen(args))


def _check_kept(seen: SeenGradient) -> None:
    """Raise where the gradient it stood for is gone; another may be in its place."""
    if seen._drops != seen._slot.drops:
        raise StepError(
            f"this gradient of {seen._slot.name!r} was kept over a zero_grad, and its elements, which lay in shards "
            "over the ranks, are gone; take norms before zero_grad, or keep hpczero.full_gradients(model)"
        )


def _refusal(seen: SeenGradient, what: str) -> StepError:
    return StepError(
        f"parameter.grad of {seen._slot.name!r} lies in shards over the ranks, and {what!r} needs its elements. To "
        "look at it: hpczero.full_gradients(model). To change this rank's own gradient before it is reduced: "
        "parameter.register_hook. "
        "p.grad.mul_, clamp_, norm, torch.nn.utils.clip_grad_norm_ and clip_grad_value_, zero_grad work; pieces of the "
        "gradient are at p.grad of optimizer.param_groups"
    )


# Pieces: what the optimizer's parameters and their ``.grad`` are between steps.
#
# After ``zeroify`` the optimizer's groups hold this rank's pieces. A norm over them, or torch's GradScaler looking for
# infinities in them, would come out differently on every rank, without a word. Inside ``optimizer.step()`` they are
# ordinary parameters with ordinary gradients.

# Nothing is computed: metadata, and what becomes of the object.
_METADATA_NAMES = (
    "__get__ size dim ndimension numel nelement stride storage_offset is_contiguous element_size get_device data_ptr "
    "untyped_storage is_floating_point is_complex is_signed is_same_size is_set_to is_shared is_pinned is_inference "
    "is_conj is_neg result_type _has_compatible_shallow_copy_type requires_grad_ retain_grad __hash__ __len__ __dir__ "
    "__dlpack_device__ detach"
)
_METADATA = frozenset(_METADATA_NAMES.split())
_HARMLESS = _METADATA | {"__repr__", "__format__", "__reduce_ex__", "__deepcopy__"}
# Operators of aten that torch does not mark as pointwise, and that take or make each element by itself all the same.
_EACH_ALONE_NAMES = (
    "copy fill zero _to_copy hardswish log_sigmoid_forward floor_divide masked_fill scalar_tensor native_dropout "
    "normal uniform bernoulli exponential cauchy geometric log_normal random lift_fresh new_empty new_zeros new_ones "
    "new_full cat stack view _unsafe_view _reshape_alias squeeze unsqueeze expand permute transpose t alias detach"
)
_EACH_ALONE = frozenset(_EACH_ALONE_NAMES.split())


@functools.cache
def _takes_each_alone(operator: torch._ops.OpOverload) -> bool:
    """Whether each element of what ``operator`` of aten gives depends on the same element of each tensor alone."""
    name, form = operator.overloadpacket.__name__, operator._overloadname
    base = name.removeprefix("_foreach_").removesuffix("_")
    if base in _EACH_ALONE or base.endswith("_like"):
        return True
    # Forms in place and on lists have no mark of their own; those on lists have other names than those on tensors.
    forms = getattr(torch.ops.aten, base, None)
    if forms is None:
        return False
    names = forms.overloads()
    if name.startswith("_foreach_"):
        # ``default`` of ``max`` is the largest of all, and of ``add`` is of Python's lists
        form = next(each for each in ("Tensor", "default", names[0]) if each in names)
    return form in names and torch.Tag.pointwise in getattr(forms, form).tags


class _EachAlone(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises at the first operator that takes elements together."""

    def __init__(self, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._name = name

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if not _takes_each_alone(func):
            raise _rank_local(self._name)
        return func(*args, **(kwargs or {}))


def _rank_local(name: str) -> StepError:
    return StepError(
        f"{name!r} of a parameter or a gradient in optimizer.param_groups: after zeroify these are this rank's "
        "pieces of the gradients and the parameters, so every rank would get another result; what is known "
        "to take each element by itself works. Use hpczero.clip_grad_norm_(model, ...), or torch's own over "
        "model.parameters(); values are whole inside `with hpczero.gathered(model):`; instead of "
        "torch.amp.GradScaler, zeroify(precision='fp16')"
    )


def _called(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``func`` of ordinary tensors, unless the result could be this rank's own: of more than one element.

    Raises:
        StepError: says what to call instead.
    """
    name = getattr(func, "__name__", str(func))
    is_plain = name in _HARMLESS
    if name in ("__get__", "__set__"):
        attribute = getattr(func, "__self__", None)
        # shape, data, grad: torch's own fields.
        is_plain = isinstance(attribute, GetSetDescriptorType)
        name = name if is_plain else getattr(attribute, "__name__", "__cuda_array_interface__")
    elif name in ("__getitem__", "__setitem__"):
        is_plain = _takes_all(args[0], args[1], may_mask=name == "__setitem__")
        if not is_plain:
            raise _rank_local(name)
    elif name in ("register_hook", "register_post_accumulate_grad_hook"):
        raise StepError(
            f"{name!r} of a parameter in optimizer.param_groups: no backward comes to this rank's pieces, so it would "
            "never be called. Register it on the model's own parameter"
        )
    elif not is_plain and not _fit(name, (*args, *kwargs.values())):
        raise _rank_local(name)
    with torch._C.DisableTorchFunctionSubclass():
        if is_plain:
            return func(*args, **kwargs)
        with _EachAlone(name):
            result = func(*args, **kwargs)
    for each in result if isinstance(result, (list, tuple)) else [result]:
        if not (each is None or isinstance(each, Tensor)):  # values, as of ``tolist`` and ``numpy``
            raise _rank_local(name)
    return result


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
        return len({v.shape for v in values if isinstance(v, _OnPieces)}) < 2


def _guarded(result: Any) -> Any:
    """As it came, every ordinary tensor in it a piece."""
    if type(result) is Tensor:
        return result.as_subclass(ShardPiece)
    if type(result) in (list, tuple):
        return type(result)(map(_guarded, result))
    return result


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


class _OnPieces(Tensor):
    """What may be done to one of these, ``_called`` decides."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """As for ordinary tensors; what comes of a piece is a piece. Raises as ``_called``."""
        if any(issubclass(kind, (ShardedParameter, LateParameter)) for kind in types):
            return NotImplemented  # the parameter is asked then, whose values may not be there
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") not in _METADATA:
            for value in (*args, *kwargs.values()):
                for each in value if isinstance(value, (list, tuple)) else (value,):
                    if isinstance(each, _OnPieces):
                        check_at_hand(each)
        result = _called(func, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return _guarded(result)


class ShardPiece(_OnPieces):
    """A piece of a parameter or of the mean gradient; elementwise operations work, those over all elements raise."""

    data = property(lambda piece: piece.detach(), _assign_data)

    def set_(self, *arguments: Any, **options: Any) -> Any:
        """Refused: torch does not show it to ``__torch_function__``."""
        raise StepError(
            "'set_' of a gradient in optimizer.param_groups would give other memory to what was made for who reads "
            "it; change it in place: p.grad.copy_(...)"
        )


class _ShardParameter(_OnPieces, nn.Parameter):
    """The optimizer's parameter between steps."""

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
        shard.__class__ = _ShardParameter


def open_shards(shards: Iterable[nn.Parameter]) -> None:
    """Ordinary parameters again: torch's optimizers choose their kernels by the class."""
    for shard in shards:
        shard.__class__ = nn.Parameter
