"""The guard on parameters whose memory is given back, and who answers for ``parameter.grad``.

A user who touches a sharded parameter gets an error. Without it torch would read freed memory.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from functools import cache
from itertools import repeat
from operator import is_not
from typing import Any, NoReturn, Protocol
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import override

from hpczero.errors import StepError
from hpczero.plan.layout import ShardLayout, Slot

# ``parameter.data = value``, whoever answers for ``parameter.data``; see watched_data.
set_own_data: Callable[[Tensor, Tensor], None] = torch.Tensor.data.__set__  # type: ignore[attr-defined]

# What may be asked of a sharded parameter: everything that does not read or write its elements.
_METADATA_METHODS = (
    "size dim ndimension numel nelement stride is_contiguous element_size is_floating_point is_complex get_device "
    "requires_grad_ retain_grad is_inference register_hook register_post_accumulate_grad_hook __hash__ __len__"
)
_METADATA_FIELDS = (
    "shape dtype device layout ndim requires_grad is_leaf grad_fn is_cuda is_cpu is_meta is_sparse is_quantized "
    "is_nested itemsize nbytes retains_grad _version grad"
)
METADATA: frozenset[Any] = frozenset(
    [getattr(torch.Tensor, name) for name in _METADATA_METHODS.split()]
    + [getattr(torch.Tensor, name).__get__ for name in _METADATA_FIELDS.split()]
    + [getattr(torch.Tensor, name).__set__ for name in ("grad", "requires_grad")]
    + [torch.is_floating_point, torch.is_complex, torch._has_compatible_shallow_copy_type]
)
# New tensors, for which a parameter gives shape, dtype and device alone.
_FACTORIES: frozenset[Any] = frozenset(
    [getattr(torch.Tensor, f"new_{kind}") for kind in ("empty", "zeros", "ones", "full", "tensor")]
    + [getattr(torch, f"{kind}_like") for kind in ("empty", "zeros", "ones", "full")]
    + [torch.rand_like, torch.randn_like]
)
# Lookups, each with the places of the table and of the indices among its arguments.
LOOKUPS: dict[Any, tuple[int, int]] = {
    F.embedding: (1, 0),
    F.embedding_bag: (1, 0),
    torch.embedding: (0, 1),  # what F.embedding calls where it does not ask itself
}
# What module.to and its kin call; they return the very tensor where nothing is to be changed.
_CONVERSION_METHODS = "to float double half bfloat16 type cpu cuda"
_CONVERSIONS: frozenset[Any] = frozenset(
    getattr(torch.Tensor, name) for name in _CONVERSION_METHODS.split()
)


def moved_or_cast(title: str, before: Tensor, after: Tensor) -> str:
    """What to say where ``before`` would become ``after``."""
    same = (before.dtype, before.device) == (after.dtype, after.device)
    become = "get other memory" if same else f"become {after.dtype} on {after.device}"
    return (
        f"{title} is {before.dtype} on {before.device} and would {become}, but a zeroified model cannot be moved or "
        "cast: its shards would stay behind. Do it before zeroify, and leave the model out of accelerator.prepare; for "
        "half precision pass precision='bf16' or 'fp16' to zeroify, for a device device='cuda'"
    )


class ShardedParameter(nn.Parameter):
    """A parameter while its whole value is not on this rank: metadata only, anything else raises StepError."""

    qualified_name = ""
    released = False  # the model was, and nobody brings the value back
    # Of a table: what torch.embedding and F.embedding_bag, their arguments and keywords, become.
    look_up: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any] | None = None

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer metadata, refuse everything that touches elements."""
        kwargs = kwargs or {}
        given = (*args, *kwargs.values())
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if cls.look_up is not None and func in LOOKUPS and kwargs.get("max_norm") is None:
            return cls.look_up(func, args, kwargs)
        if func in _FACTORIES and sum(isinstance(a, ShardedParameter) for a in given) == 1:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is torch.Tensor.view_as and args[0] is args[-1]:
            return _seen(args[0])
        if func in _CONVERSIONS and isinstance(args[0], ShardedParameter):
            return _unchanged(func, args[0], args[1:], kwargs)
        if func == set_own_data and args[0] is args[1]:
            return None  # the end of a conversion that changed nothing
        if func is torch.autograd.backward:
            return _backward_to(args, kwargs)
        name = next((a.qualified_name for a in given if isinstance(a, ShardedParameter)), "")
        name = name or cls.qualified_name
        what = getattr(func, "__name__", str(func))
        if what in ("__get__", "__set__"):  # of a property such as data
            what = getattr(getattr(func, "__self__", None), "__name__", what)
        if any(isinstance(a, ShardedParameter) and a.released for a in given):
            raise StepError(
                f"parameter {name!r} was sharded when the model was released, and {what!r} needs its value, which is "
                "gone; hpczero.release(model, whole=True) keeps it. Values that were saved come back by "
                "model.load_state_dict(state, assign=True)"
            )
        if cls.look_up is not None:
            raise StepError(
                f"parameter {name!r} is sharded, and rows of it alone travel (stage 3, sparse_gradients=True or a "
                f"module with sparse=True), but {what!r} needs all of it. In forward only F.embedding and "
                "F.embedding_bag may read it, without max_norm; for anything else leave sparse_gradients out and "
                "build the module with sparse=False. Outside of the model: `with hpczero.gathered(model):`"
            )
        raise StepError(
            f"parameter {name!r} is sharded and its memory given back (stage 3), but {what!r} needs its "
            "value. Outside of the model (state_dict, printing): hpczero.full_state_dict(model), or use it inside "
            "`with hpczero.gathered(model):`. In a method other than forward (generate, encode): "
            "hpczero.register_forward(model, 'encode') once makes it work. Inside forward: a module other than its own "
            "uses it; make the module that uses it the unit (rule=...) or call through that module"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse ``pickle``, ``torch.save`` and ``copy.deepcopy`` of the parameter or of a module that holds it."""
        raise StepError(
            f"parameter {self.qualified_name!r} is sharded and its memory given back (stage 3), so neither it nor a "
            "module that holds it can be copied or pickled; do that inside `with hpczero.gathered(model):`, or use "
            "hpczero.full_state_dict(model)"
        )

    def __deepcopy__(self, memo: Any) -> NoReturn:
        """As ``__reduce_ex__``."""
        self.__reduce_ex__(4)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return f"ShardedParameter({self.qualified_name!r}, shape={tuple(self.shape)}, {self.dtype})"


def refuse_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Before an optimizer of torch steps: refuse one that has guarded parameters with gradients.

    Raises:
        StepError: zeroify was not given that optimizer.
    """
    if torch.compiler.is_compiling():
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            seen = getattr(type(parameter), "grad", None) is seen_gradient
            if seen and parameter.grad is not None:
                raise StepError(
                    f"the {type(optimizer).__name__} that steps is not the one that zeroify was given; make the "
                    "optimizer before zeroify, pass it there, and step with that one"
                )


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(refuse_step)


class GradientSight(Protocol):
    """What stands at ``parameter.grad`` while autograd has put nothing there."""

    def look(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The value of ``parameter.grad``."""

    def assign(self, value: torch.Tensor | None) -> None:
        """``parameter.grad = value`` outside of backward."""


def _unchanged(
    func: Callable[..., Any], parameter: ShardedParameter, args: Any, kwargs: dict[str, Any]
) -> Any:
    """``parameter`` itself, if ``func`` would change nothing; what ``func`` says, if it only asks (``type()``).

    Raises:
        StepError: says what it would become.
    """
    empty = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    options = dict(kwargs)
    memory_format = options.pop("memory_format", None) or torch.preserve_format
    changed = func(empty, *args, **options)
    with torch._C.DisableTorchFunctionSubclass():
        kept = memory_format is torch.preserve_format or parameter.is_contiguous(
            memory_format=memory_format
        )
    if changed is empty and kept:
        return parameter
    if not isinstance(changed, Tensor):
        return changed
    title = f"parameter {parameter.qualified_name!r}"
    raise StepError(
        f"{moved_or_cast(title, parameter, changed)}. To read the parameter alone, sharded at stage 3, do so inside "
        "`with hpczero.gathered(model):`"
    )


def _seen(parameter: ShardedParameter) -> Tensor:
    """A view that is guarded as ``parameter`` is, for its ``grad_fn``: hooks on several gradients look for it so."""
    with torch._C.DisableTorchFunctionSubclass():
        view = parameter.view_as(parameter)
    view.__class__ = _closed_class(parameter.qualified_name)
    return view


def _closed_class(qualified_name: str, **names: Any) -> type:
    """``ShardedParameter`` for one parameter."""
    members = {"qualified_name": qualified_name, **names}
    return type("ShardedParameter", (ShardedParameter,), members)


def _backward_to(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """``backward(inputs=...)`` of sharded parameters: where their gradients arrive is known without their values."""
    inputs = kwargs.get("inputs") or ()
    with torch._C.DisableTorchFunctionSubclass():
        edges = [get_gradient_edge(x) if isinstance(x, ShardedParameter) else x for x in inputs]
    torch.autograd.backward(*args, **{**kwargs, "inputs": edges})


# Not a mark on the parameters, which would be copied and pickled with them. Guards hold their parameter, so weakly.
_guarded: MutableMapping[Tensor, ReferenceType[Guard]] = WeakIdKeyDictionary()


def is_guarded(parameter: Tensor) -> bool:
    """Whether ``parameter`` belongs to a zeroified model."""
    return parameter in _guarded


class Guard:
    """Stands before one parameter by its class alone, which it switches; the object never changes.

    Attributes:
        sight: answers for ``parameter.grad``; None: autograd's own gradient and nothing else.
    """

    def __init__(self, parameter: nn.Parameter, qualified_name: str) -> None:
        self._parameter = parameter
        self._name = qualified_name
        self._shows: dict[str, Any] = {}  # what the closed class has beside the name
        self.sight: GradientSight | None = None
        _watch_optimizers()
        self._own_class = self._open_class = type(parameter)
        self._closed_class = _closed_class(qualified_name)
        # While its values are on their way; made when first needed.
        self._late_class: type | None = None
        self._shown = self._open_class  # which of them it has now
        self._swapped = False
        _guarded[parameter] = ref(self)

    def leave(self) -> None:
        """The parameter is no longer a zeroified model's; a closed one stays closed."""
        self.show_gradient(None)
        if self._shown is self._closed_class:
            self._closed_class.released = True  # type: ignore[attr-defined]
        _guarded.pop(self._parameter, None)

    @property
    def is_swapped(self) -> bool:
        """Whether ``torch.utils.swap_tensors`` took the class away, and with it every hook; stays so."""
        return self._swapped or type(self._parameter) is not self._shown

    def fill(self, real: nn.Parameter) -> None:
        """Give a parameter on the meta device the content of ``real``; the object stays."""
        real.__class__ = type(self._parameter)
        _guarded.pop(self._parameter)  # torch swaps nothing that has a weak reference
        torch.utils.swap_tensors(self._parameter, real)  # type: ignore[no-untyped-call]
        _guarded[self._parameter] = ref(self)

    def allow_lookups(self, look_up: Callable[..., Any]) -> None:
        """While the parameter is closed, ``look_up`` answers for ``LOOKUPS`` in it; see ``ShardedParameter``."""
        self._shows = {"look_up": look_up}
        self._closed_class = _closed_class(self._name, **self._shows)

    def close(self) -> None:
        """From now on only metadata may be read."""
        self._show(self._closed_class)

    def put_off(self, kind: type, settle: Callable[[], None]) -> None:
        """From now on, until it is opened, the parameter is one of ``kind``, whose class has ``settle``."""
        if self._late_class is None:
            shown = {n: v for n, v in vars(self._open_class).items() if n in ("grad", "_grad")}
            names = {**shown, "settle": staticmethod(settle)}
            # Behind it the parameter's own class, with what a program has put there.
            self._late_class = type(kind.__name__, (kind, self._own_class), names)
        self._show(self._late_class)

    def open(self) -> None:
        """The value is there again."""
        self._show(self._open_class)

    def _show(self, kind: type) -> None:
        if type(self._parameter) is not self._shown:
            self._swapped = True
        self._parameter.__class__ = self._shown = kind

    def show_gradient(self, sight: GradientSight | None) -> None:
        """Let ``sight`` answer for ``parameter.grad``; None: autograd's own gradient and nothing else."""
        closed_now = self._shown is self._closed_class
        self.sight, self._late_class = sight, None
        shown = {} if sight is None else {"grad": seen_gradient, "_grad": seen_gradient}
        self._open_class = self._own_class if sight is None else _with_sight(self._own_class)
        self._closed_class = _closed_class(self._name, **self._shows, **shown)
        self._shown = self._closed_class if closed_now else self._open_class
        self._parameter.__class__ = self._shown


@cache
def _with_sight(own: type) -> type:
    """``own``, where the guard's sight answers for ``parameter.grad``.

    One class for all parameters: torch.compile compiles code for the classes that it finds, and blocks share theirs.
    """
    names = {"grad": seen_gradient, "_grad": seen_gradient, "data": watched_data}
    # deepcopy and the like: a copy is an ordinary parameter
    made = {"__new__": lambda cls, *args, **kwargs: own(*args, **kwargs)}
    return type(own.__name__, (own,), {**names, **made, "__module__": own.__module__})


def is_at(parameter: Tensor, flat: Tensor, slot: Slot) -> bool:
    """Whether ``parameter`` is the view of ``flat`` that ``slot`` says; also while both have no memory."""
    if not slot.numel:
        return True
    same: bool = torch._C._is_alias_of(parameter, flat)  # type: ignore[attr-defined]
    begins = same and parameter.storage_offset() == flat.storage_offset() + slot.offset
    return begins and parameter.shape == slot.shape and parameter.is_contiguous()


_descriptor: Any = torch.Tensor.grad


# A change through .data tells autograd nothing. A detached view has the parameter's version counter, so that the next
# step refuses such a change as it does any other; in memory that ranks share each of them would have made it.
watched_data = property(
    lambda parameter: parameter.detach(), lambda parameter, value: set_own_data(parameter, value)
)


def _sight_of(parameter: torch.Tensor) -> GradientSight | None:
    found = _guarded.get(parameter)
    guard = None if found is None else found()
    return None if guard is None else guard.sight


def _look(parameter: torch.Tensor) -> torch.Tensor | None:
    own = own_gradient(parameter)
    if own is not None:
        return own
    sight = _sight_of(parameter)
    seen = None if sight is None else sight.look(parameter)
    # torch.compile describes a parameter that it found, and its gradient with it.
    return None if seen is None or TracingContext.try_get() is not None else seen


def _assign(parameter: torch.Tensor, value: torch.Tensor | None) -> None:
    # In backward autograd's own gradient is there until a hook of ours takes it.
    sight, own = _sight_of(parameter), own_gradient(parameter) is not None
    if own or sight is None:
        set_own_gradient(parameter, value)
    if sight is not None and torch._C._current_graph_task_id() == -1:
        if value is None or not own:  # own: left by a backward that did not finish
            sight.assign(value)
    elif sight is not None and not own and sight.look(parameter) is not value:
        raise StepError(
            "parameter.grad was assigned in backward, after this rank's gradient was taken from it. Set the "
            "post-accumulate hook that does so before zeroify, or use parameter.register_hook"
        )


seen_gradient = property(_look, _assign, lambda parameter: _assign(parameter, None))


def own_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """The gradient that lies on ``parameter``, whatever ``parameter.grad`` shows."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient: torch.Tensor | None = _descriptor.__get__(parameter)
    return gradient


def have_gradients(parameters: Iterable[torch.Tensor]) -> list[bool]:
    """Whether a gradient lies on each."""
    get = _descriptor.__get__
    with torch._C.DisableTorchFunctionSubclass():
        return [get(parameter) is not None for parameter in parameters]


def all_have_gradients(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether a gradient lies on every one."""
    with torch._C.DisableTorchFunctionSubclass():
        return all(map(is_not, map(_descriptor.__get__, parameters), repeat(None)))


def set_own_gradients(
    parameters: Iterable[torch.Tensor], values: Iterable[torch.Tensor | None]
) -> None:
    """As ``set_own_gradient``, of many."""
    put = _descriptor.__set__
    with torch._C.DisableTorchFunctionSubclass():
        for parameter, value in zip(parameters, values, strict=False):
            put(parameter, value)


def set_own_gradient(parameter: torch.Tensor, value: torch.Tensor | None) -> None:
    """Put a gradient on ``parameter``, whoever answers for ``parameter.grad``."""
    with torch._C.DisableTorchFunctionSubclass():
        _descriptor.__set__(parameter, value)


def take_own_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """The gradient that autograd has left on ``parameter``, which has none afterwards."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient: torch.Tensor | None = _descriptor.__get__(parameter)
        if gradient is not None:
            _descriptor.__set__(parameter, None)
    return gradient


# LateUpdate: whole parameters whose new values are still on their way when ``optimizer.step()`` returns.
#
# At stages 1 and 2 every unit is gathered after the update. Where that goes on beside the program, nobody needs to wait
# before a unit is used: its call in the next forward waits for it alone.
#
# [Note: Who waits]
# Until then the parameters are of a class that waits for whatever asks for their values, and is gone afterwards. They
# lie elsewhere meanwhile: what gets at them without asking (``torch.tensor(weight)``, say) finds NaN, not values of
# before.
#
# Views that were made before do not ask. Each holds the storage, which counts who holds it: where somebody does beside
# the unit itself, the step waits as it used to. An address alone, from ``data_ptr()``, is held by nobody and is not
# seen.

# The strides are those of where they lie meanwhile.
_TOLD = METADATA - {Tensor.stride, Tensor.is_contiguous}


class LateParameter(nn.Parameter):
    """A parameter whose values are on their way."""

    # Returns when they are there; the parameter is of its own class then.
    settle: Callable[[], None]

    @classmethod
    @override
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer metadata at once, and everything else when the values are there."""
        if func in _TOLD:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        for kind in types:
            if issubclass(kind, LateParameter):
                kind.settle()
        return func(*args, **(kwargs or {}))

    # What torch does in Python, by the class that it finds.

    @override
    def __deepcopy__(self, memo: Any) -> Any:
        type(self).settle()
        return copy.deepcopy(self, memo)

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        type(self).settle()
        return self.__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        type(self).settle()
        return repr(self)


class LateUpdate:
    """Of one unit; nothing here is collective."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        guards: Sequence[Guard],
        layout: ShardLayout,
        *,
        allowed: bool,
    ) -> None:
        """Not pending. ``allowed``: whether values may be on their way after a step at all."""
        self._parameters, self._guards = list(parameters), list(guards)
        self._slots = layout.slots
        self._allowed = allowed
        self._views: list[Tensor] = []  # of the buffer that was last put off
        self._nothing: Tensor | None = None  # one NaN
        self._wait: Callable[[], None] | None = None
        self._lock = threading.RLock()  # several threads may ask

    @torch.inference_mode(False)  # what parameters become views of lasts
    def put_off(self, flat: Tensor, wait: Callable[[], None]) -> bool:
        """Whether whoever asks for values will ``wait``, so that nobody else has to.

        Args:
            flat: what the parameters are views of, and nothing else of the unit is.
            wait: returns when the values are there; it may raise, and is called again then.
        """
        if not self._allowed or not self._parameters:
            return False
        if not (self._views and _is_alias(self._views[0], flat)):
            self._views = [flat[s.offset : s.stop].view(s.shape) for s in self._slots]
        if _holders(flat) != 1 + len(self._parameters) + len(self._views):
            return False
        self._wait = wait
        if self._nothing is None:
            self._nothing = torch.full((), math.nan, dtype=flat.dtype, device=flat.device)
        nothing = self._nothing
        with torch._C.DisableTorchFunctionSubclass():
            for guard, parameter in zip(self._guards, self._parameters, strict=True):
                set_own_data(parameter, nothing.expand(parameter.shape))
                guard.put_off(LateParameter, self.settle)
        return True

    @property
    def pending(self) -> bool:
        """Whether values are on their way, which nobody can have changed then."""
        return self._wait is not None

    def settle(self) -> None:
        """Return when the values are there; at once where none are on their way.

        Raises:
            CommError: they did not come, and never will; at every call from then on.
        """
        if not self.pending:
            return
        with self._lock:
            if self._wait is None:
                return
            self._wait()
            self._bring_back()
            self._wait = None

    @torch.inference_mode(False)
    def _bring_back(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for guard, parameter, view in zip(
                self._guards, self._parameters, self._views, strict=True
            ):
                set_own_data(parameter, view)
                guard.open()


_is_alias = torch._C._is_alias_of  # type: ignore[attr-defined]


def _holders(flat: Tensor) -> int:
    """How many tensors lie in the storage of ``flat``, itself among them."""
    storage = flat.untyped_storage()
    held: int = torch._C._storage_Use_Count(storage._cdata)
    return held - 1  # without ``storage``
