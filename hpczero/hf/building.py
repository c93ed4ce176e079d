"""A model of transformers without its weights: parameters on the meta device, buffers with their values.

Owns: how a model is built that way. Must not know: files, shards, MPI.

Each parameter goes to the meta device as a module registers it, so that one exists at a time. Buffers (rotary
frequencies, masks) are computed by the model itself, as in any other build. What torch gives a buffer without values
is NaN here, so that one that the model leaves so is found.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from hpczero.errors import ConfigError, PlanError

# Larger ones are parameters, whose memory is not touched before they go to the meta device; filled, it would be.
FILLED_NUMEL = 2**16
_UNFILLED = (torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty)


def build(make: Callable[[], nn.Module], *, seed: int) -> nn.Module:
    """The model that ``make`` builds, without values of parameters. Not collective.

    Args:
        make: builds it on the CPU.
        seed: of what the build draws for buffers: the same on every rank.

    Raises:
        PlanError: a buffer is on the meta device, or has no values.
        ConfigError: the model computes with its parameters while it is built.
    """
    with torch.random.fork_rng(devices=[]), on_meta(), _Unfilled():
        torch.manual_seed(seed)
        try:
            model = make()
        except NotImplementedError as error:
            raise ConfigError(
                f"this model cannot be built without weights: {error}. Build it with its weights, and pass it to "
                "hpczero.zeroify as it is"
            ) from error
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise PlanError(
                f"buffer {name!r} is made of a parameter, which has no values while the model is built; compute it in "
                "forward, or make the model with its weights and pass it to hpczero.zeroify as it is"
            )
    return model


def check_buffers(model: nn.Module, *, filled: Container[str]) -> None:
    """Refuse buffers that nobody has filled.

    Args:
        model: built.
        filled: names of those that a file brings.

    Raises:
        PlanError: the message names one.
    """
    for name, buffer in model.named_buffers():
        if name not in filled and buffer.is_floating_point() and bool(buffer.isnan().any()):
            raise PlanError(
                f"buffer {name!r} {tuple(buffer.shape)} has no values: neither the model's own initialisation nor the "
                "files bring any; fill it in the module's __init__, or build the model with its weights and pass it to "
                "hpczero.zeroify as it is"
            )


@contextmanager
def on_meta() -> Iterator[None]:
    """Context: parameters that modules register become parameters of their shape on the meta device."""
    known: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def replaced(module: nn.Module, name: str, parameter: Any) -> Any:
        del module, name
        if parameter is None or parameter.is_meta:
            return None
        if parameter not in known:
            # Of one parameter under two names there must be one.
            known[parameter] = _of_shape(parameter)
        return known[parameter]

    handle = register_module_parameter_registration_hook(replaced)
    try:
        yield
    finally:
        handle.remove()


def _of_shape(parameter: nn.Parameter) -> nn.Parameter:
    with torch.no_grad():
        empty = torch.empty_strided(
            parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta"
        )
    found = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    found.__dict__.update(parameter.__dict__)
    return found


class _Unfilled(TorchFunctionMode):
    """Mode: small floating-point tensors that torch leaves without values hold NaN."""

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in _UNFILLED and isinstance(found, Tensor):
            small = found.numel() <= FILLED_NUMEL and found.device.type == "cpu"
            if small and found.is_floating_point():
                found.fill_(float("nan"))
        return found
