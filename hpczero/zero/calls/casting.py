"""Casts at the model's boundary.

Users call ``loss.backward()`` as always. At the model's outputs the gradient that enters is multiplied by the loss
scale, in fp32, before it becomes fp16. The gradient of an input is divided by the scale. Nothing outside of the model
is therefore scaled.

[Note: Whose containers]
A batch in a dictionary, a list or an object stays that object. Its tensors are replaced by cast ones while the model
runs, and put back afterwards. What the model adds to it stays there, in fp32.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hpczero.errors import StepError
from hpczero.plan.placement import ModelPart
from hpczero.zero.calls.tensors import Attributes, Replacement, TooMany
from hpczero.zero.calls.ways import current_task, next_node_number, untraced

WHOLE = ModelPart(())


class Casting:
    """Hooks on the root module; none in fp32.

    Attributes:
        part: what of a whole model a call is. Where one stage has several chunks of it, each chunk's call has its own.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        scale: Callable[[], float],
        *,
        scaled: bool,
        units: Iterable[nn.Module] = (),
        about_hooks: Callable[[], None] = lambda: None,
        part: ModelPart = WHOLE,
    ) -> None:
        """Register the hooks.

        Args:
            model: the model whose calls are cast.
            dtype: dtype of parameters and activations.
            scale: gives the current loss scale.
            scaled: whether there is one.
            units: modules of units. Under a loss scale they must not be called by themselves.
            about_hooks: called if forward hooks see tensors that carry no loss scale.
            part: what of a whole model this is. What goes from one stage of a pipeline to the next stays in ``dtype``,
                and the loss scale enters once, at the outputs of the last.
        """
        self.part = part
        self._dtype = dtype
        self._scale = scale
        self._scales = scaled
        self._attributes = Attributes(model)
        self._about_hooks = about_hooks
        self._inner = [m for m in model.modules() if m is not model and m not in set(units)]
        self._scaled_task: int | None = None
        self._open: list[_Cast | None] = []
        self._handles: list[RemovableHandle] = []
        if dtype is not torch.float32:
            self._handles = [
                model.register_forward_pre_hook(self._cast_inputs, with_kwargs=True),
                model.register_forward_hook(self._cast_outputs, with_kwargs=True, always_call=True),
            ]

        if scaled:
            self._handles += [
                unit.register_forward_pre_hook(self._check_unit, prepend=True)
                for unit in units
                if unit is not model
            ]

    @untraced
    def _check_unit(self, module: nn.Module, args: Any) -> None:
        self.check_inside(type(module).__name__)

    def check_inside(self, what: str) -> None:
        """Refuse a part of the model that is used by itself under a loss scale.

        Raises:
            StepError: its gradient would lack the scale, which is divided out afterwards.
        """
        alone = self._scales and not self._open and current_task() is None
        if alone and torch.is_grad_enabled():
            raise StepError(
                f"{what} was called outside of the model, so its gradients would carry no loss scale; call the model "
                "itself, or a method of it (hpczero.register_forward), when training in fp16"
            )

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """``function(*args, **kwargs)`` with the casts of a call of the model."""
        if not self._handles:
            return function(*args, **kwargs)
        args, kwargs = self._cast_inputs(None, args, dict(kwargs))
        output = None
        try:
            output = function(*args, **kwargs)
        finally:
            output = self._cast_outputs(None, args, kwargs, output)
        return output

    @untraced
    def _cast_inputs(self, module: nn.Module | None, args: Any, kwargs: Any) -> Any:
        if self._open:
            # Within a call of the model: all is cast already, and the loss scale must enter once.
            self._open.append(None)
            return args, kwargs
        unscale = self._scale if self._scales and self.part.first else None
        cast = _Cast(self._dtype, unscale)
        self._open.append(cast)
        try:
            inputs = cast.inputs.of((args, kwargs))
            if self._scales:
                self._attributes.replace(cast.state)
                if torch.is_grad_enabled() and any(m._forward_hooks for m in self._inner):
                    self._about_hooks()
        except BaseException as error:
            # Here, for no hook is told of the end of a registered method that never began.
            self._open.pop()
            cast.undo()
            if isinstance(error, TooMany):
                raise StepError(_TOO_MANY) from None
            raise
        return inputs

    @untraced
    def _cast_outputs(
        self, module: nn.Module | None, args: Any, kwargs: Any, output: Any = None
    ) -> Any:
        if not self._open:
            return None
        cast = self._open.pop()
        if cast is None:
            return output
        cast.undo()
        error, text = sys.exc_info()[1], str(sys.exc_info()[1])
        if isinstance(error, RuntimeError) and _TWO_DTYPES.search(text) and _WHY not in text:
            error.args = (f"{text}\n{_WHY}",)  # beside torch's own message
        cast.check_unchanged()
        values = (*args, *kwargs.values())
        # What a stage of a pipeline is given by the one before is nobody's afterwards.
        theirs = values if self._scales and self.part.first else ()
        if any(cast.has_changed(v) for v in theirs if isinstance(v, Tensor)):
            raise StepError(_IN_PLACE)

        def change(tensor: Tensor) -> Tensor:
            """A tensor that the model returns: the caller's own tensors unchanged, all others in fp32."""
            given = cast.given(tensor)
            if given is not None or not tensor.is_floating_point():
                return tensor if given is None else given
            if cast.is_made_here(tensor) or (tensor.requires_grad and tensor.is_leaf):
                return self._scaled_output(tensor)  # the model's own, or one of its parameters
            return tensor.float() if self.part.last else tensor

        def change_argument(tensor: Tensor) -> Tensor:
            given = cast.given(tensor)
            if given is not None:
                return given
            return self._scaled_output(tensor) if cast.is_made_here(tensor) else tensor

        def change_attribute(tensor: Tensor) -> Tensor:
            return self._scaled_output(tensor) if cast.is_made_here(tensor) else tensor

        walk = Replacement(change)  # one for all: what is found twice is changed once
        try:
            output = walk.of(output)
            walk.change = change_argument
            walk.of([value for value in values if not isinstance(value, Tensor)])
            if self._scales:
                walk.change = change_attribute
                self._attributes.replace(walk)
        except TooMany:
            raise StepError(_TOO_MANY) from None
        return output

    def _scaled_output(self, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or not self.part.last:
            return tensor
        result: Tensor = _ScaledOutput.apply(tensor, self._scale)  # type: ignore[no-untyped-call]
        if result.grad_fn is not None:
            # Before other hooks on this node, which may reduce units that nothing uses.
            result.grad_fn.register_prehook(self._enter_backward)
        return result

    def _enter_backward(self, gradients: Sequence[Tensor | None]) -> None:
        self._scaled_task = current_task()

    @property
    def scaled(self) -> bool:
        """Whether the running backward came in through the model's outputs, and so carries the loss scale.

        What a stage of a pipeline gets from the next one carries it already.
        """
        return not self.part.last or self._scaled_task == current_task()


_TOO_MANY = (
    "the model's arguments, results or attributes hold more objects, or nest them more deeply, than a search for "
    "tensors to cast may look at; pass tensors, or containers of them"
)
_IN_PLACE = (
    "the model changed a tensor among its arguments in place. In half precision it is given cast copies, so the change "
    "would be lost, or its gradient would miss the loss scale; return the result, or train in fp32"
)


_TWO_DTYPES = re.compile("(?=.*type)(?=.*(bfloat16|half))", re.IGNORECASE | re.DOTALL)
_WHY = (
    "The model was zeroified with a half precision, so its parameters and arguments are half precision; a tensor that "
    "its forward makes or keeps (torch.zeros, a floating point buffer, .float()) is not: give it x.dtype. Or train in "
    "fp32 inside torch.autocast, which casts at every operation"
)


class _Cast:
    """What one call of the model was given.

    Attributes:
        inputs: replaces tensors in arguments.
        state: replaces tensors that an earlier call left on attributes, with their graph.
    """

    def __init__(self, dtype: torch.dtype, scale: Callable[[], float] | None) -> None:
        self.inputs = Replacement(self._change)
        self.state = Replacement(self._change_state)
        self._start = next_node_number()
        self._dtype = dtype
        self._scale = scale
        self._given: dict[int, tuple[Tensor, Tensor, int, int | None]] = {}
        self._originals: dict[int, Tensor] = {}

    def _change(self, tensor: Tensor) -> Tensor:
        copy = self._cast(tensor) if tensor.is_floating_point() else tensor
        node = copy.grad_fn
        number = None if node is None else node._sequence_nr()
        self._given[id(copy)] = (copy, tensor, _version(copy), number)
        if copy is not tensor:
            self._originals[id(tensor)] = tensor
        return copy

    def _change_state(self, tensor: Tensor) -> Tensor:
        has_graph = tensor.is_floating_point() and tensor.grad_fn is not None
        return self._cast(tensor) if has_graph else tensor

    def _cast(self, tensor: Tensor) -> Tensor:
        if tensor.requires_grad and self._scale is not None and torch.is_grad_enabled():
            copy: Tensor = _UnscaledInput.apply(tensor, self._dtype, self._scale)  # type: ignore[no-untyped-call]
            return copy
        return tensor.to(self._dtype)

    def undo(self) -> None:
        """Put the caller's tensors back, and the attributes as they were."""
        self.inputs.undo()
        self.state.undo()

    def given(self, tensor: Tensor) -> Tensor | None:
        """The caller's own tensor that ``tensor`` replaced, unless the model has changed ``tensor`` since."""
        if id(tensor) in self._originals:
            return tensor
        found = self._given.get(id(tensor))
        return None if found is None or self.has_changed(tensor) else found[1]

    def has_changed(self, tensor: Tensor) -> bool:
        """Whether the model gave a tensor among its arguments another value and history."""
        found = self._given.get(id(tensor))
        if found is None:
            return False
        node = tensor.grad_fn
        return found[3] != (None if node is None else node._sequence_nr())

    def is_made_here(self, tensor: Tensor) -> bool:
        """Whether autograd made ``tensor`` since the call began, the casts of its inputs included."""
        node = tensor.grad_fn
        return node is not None and node._sequence_nr() >= self._start

    def check_unchanged(self) -> None:
        """Raise if the model wrote into a cast copy.

        Raises:
            StepError: the caller's tensor would not have what the model wrote.
        """
        for copy, tensor, version, _ in self._given.values():
            if copy is not tensor and _version(copy) != version:
                raise StepError(_IN_PLACE)


def _version(tensor: Tensor) -> int:
    """How often a tensor was changed in place. For one made under ``torch.inference_mode`` torch does not know."""
    return 0 if tensor.is_inference() else tensor._version


class _UnscaledInput(torch.autograd.Function):
    """Cast to the parameter dtype. The gradient comes back without the loss scale, in the tensor's own dtype."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dtype: torch.dtype, scale: Callable[[], float]) -> Tensor:
        ctx.dtype, ctx.scale = tensor.dtype, scale
        ctx.set_materialize_grads(False)
        return tensor.to(dtype) if tensor.dtype is not dtype else tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None, None]:
        (gradient,) = gradients
        if torch.is_grad_enabled():
            raise StepError(
                "a gradient of gradients (create_graph=True) in fp16: its own backward would carry another power of "
                "the loss scale; train with precision='bf16' or 'fp32'"
            )
        return (
            None if gradient is None else (gradient.float() / ctx.scale()).to(ctx.dtype),
            None,
            None,
        )


class _ScaledOutput(torch.autograd.Function):
    """Cast to fp32. The gradient comes back scaled, in the tensor's own dtype."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, scale: Callable[[], float]) -> Tensor:
        ctx.dtype, ctx.scale = tensor.dtype, scale
        # An output that the loss does not use gets no gradient.
        ctx.set_materialize_grads(False)
        return tensor.float() if tensor.dtype is not torch.float32 else tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None]:
        (gradient,) = gradients
        return None if gradient is None else (gradient * ctx.scale()).to(ctx.dtype), None
