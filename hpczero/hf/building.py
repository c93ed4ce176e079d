"""A model of transformers without its weights: parameters on the meta device, buffers with their values.

Each parameter goes to the meta device as a module registers it, so that one exists at a time. Buffers (rotary
frequencies, masks) are computed by the model itself, as in any other build. What torch gives a buffer without values
is NaN here, so that one that the model leaves so is found.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from hpczero.errors import ConfigError, PlanError
from hpczero.hf.hub import transformers

_BUILT = ("attn_implementation",)  # for the model, not for its configuration


@dataclass(frozen=True)
class ModelChoice:
    """What a caller says of a model beside its folder.

    Attributes:
        model_class: of transformers; None takes the one that config.json names.
        changes: of the configuration, and ``attn_implementation``.
        trust_remote_code: whether Python files of the folder are run, where config.json names classes in them.
    """

    model_class: Any = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False


def of_folder(path: Path, choice: ModelChoice) -> Any:
    """The model of a folder with a config.json, in fp32, initialised by itself. Not collective.

    Raises:
        ConfigError: config.json cannot be used, or says that weights are quantised.
    """
    library: Any = transformers()
    config, kind = config_and_class(path, choice)
    built = {key: choice.changes[key] for key in _BUILT if key in choice.changes}
    model = _of_class(kind, path, config, built, trusted=choice.trust_remote_code)
    stated = path / "generation_config.json"
    if stated.exists() and model.can_generate():
        try:
            found = library.GenerationConfig.from_pretrained(path, local_files_only=True)
        except Exception as error:  # of the library, of any kind
            raise ConfigError(
                f"{path}: its generation_config.json cannot be used: {_said(error)}; fetch it again, or take it away"
            ) from error
        model.generation_config = found
    return model


def config_and_class(path: Path, choice: ModelChoice) -> tuple[Any, Any]:
    """The configuration and the class of a folder's model. Not collective.

    Where the folder's own code is run, transformers copies it into its cache: one rank of a node comes first.

    Raises:
        ConfigError: config.json cannot be used, or says that weights are quantised.
    """
    library: Any = transformers()
    if not (path / "config.json").exists():
        raise ConfigError(
            f"{path}: has no config.json; expected a folder as save_pretrained of transformers writes it, or a name "
            "of the hub"
        )
    changes = {key: value for key, value in choice.changes.items() if key not in _BUILT}
    try:
        config, unused = library.AutoConfig.from_pretrained(
            path,
            local_files_only=True,
            return_unused_kwargs=True,
            trust_remote_code=choice.trust_remote_code,  # never None: that asks at the terminal
            **changes,
        )
    except Exception as error:  # of the library, of any kind
        raise ConfigError(f"{path}: its config.json cannot be used: {_said(error)}") from error
    if unused:
        raise ConfigError(
            f"{path}: {type(config).__name__} has no {', '.join(sorted(map(str, unused)))}; expected fields of "
            "config.json"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            f"{path}: its weights are quantised (quantization_config in config.json), expected floating point; take "
            "the model's original weights"
        )
    return config, choice.model_class or _named_class(library, path, config, choice)


def _named_class(library: Any, path: Path, config: Any, choice: ModelChoice) -> Any:
    listed = config.architectures
    named = listed[0] if isinstance(listed, list) and listed else listed
    own = (getattr(config, "auto_map", None) or {}) if choice.trust_remote_code else {}
    places = [place for key, place in own.items() if key.startswith("AutoModel")]
    places = [place for place in places if str(place).endswith(f".{named}")] or places
    if places:
        dynamic = importlib.import_module("transformers.dynamic_module_utils")
        return dynamic.get_class_from_dynamic_module(places[0], path, local_files_only=True)
    found = getattr(library, named, None) if named and isinstance(named, str) else None
    if not (hasattr(found, "_from_config") or hasattr(found, "from_config")):
        raise ConfigError(
            f"{path}: config.json names {named or 'no architecture'}, which is no model of transformers "
            f"{library.__version__}; give model_class=, such as transformers.AutoModelForCausalLM"
        )
    return found


def _of_class(kind: Any, path: Path, config: Any, options: dict[str, Any], *, trusted: bool) -> Any:
    expected = getattr(kind, "config_class", None)
    if expected is not None and not isinstance(config, expected):
        raise ConfigError(
            f"{path}: config.json is a {type(config).__name__}, and {kind.__name__} needs a {expected.__name__}; give "
            "the model_class of this model"
        )
    make = getattr(kind, "_from_config", None)
    if make is None:  # an Auto class
        make, options = (
            getattr(kind, "from_config", None),
            {**options, "trust_remote_code": trusted},
        )
    if make is None:
        raise ConfigError(
            f"model_class: got {kind!r}, expected a class of transformers, such as AutoModelForCausalLM"
        )
    try:
        return make(config, dtype=torch.float32, **options)
    except NotImplementedError:  # of a meta tensor: whoever builds it says what that means
        raise
    except Exception as error:  # of the model, of any kind
        raise ConfigError(
            f"{path}: {kind.__name__} cannot be built from its config.json: {_said(error)}"
        ) from error


def _said(error: Exception) -> str:
    """The first line of an error of the library; that of a KeyError is a key alone."""
    line = (str(error).strip().splitlines() or [""])[0]
    return (
        line
        if line and isinstance(error, OSError | ValueError | ImportError)
        else f"{type(error).__name__}: {line}"
    )


# Larger ones are parameters, whose memory is not touched before they go to the meta device; filled, it would be.
FILLED_NUMEL = 2**16
_UNFILLED = (torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty)


def build(make: Callable[[], nn.Module], *, seed: int) -> nn.Module:
    """The model that ``make`` builds on the CPU, without values of parameters. Not collective.

    ``seed``: of what the build draws for buffers, the same on every rank.

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
    """Raise PlanError for a buffer that nobody has filled; ``filled`` are the names of those that a file brings."""
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
