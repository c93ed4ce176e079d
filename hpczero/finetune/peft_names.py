"""Models of peft, and how they are saved: by names alone, since no parameter has its value where it is saved.

Owns: which models these are, and what peft asks of modules at a save. Must not know: how values are gathered, files.
peft itself is never imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from hpczero.finetune.lowrank import LowRank
from hpczero.zero.buffers import persistent_buffers


def is_peft(model: nn.Module) -> bool:
    """Whether it is a model that peft wraps."""
    return any(kind.__module__.startswith("peft.") for kind in type(model).__mro__)


def saves_adapters(model: nn.Module) -> bool:
    """Whether ``save_pretrained`` of the model writes its adapter alone: one of peft, or one given by add_adapter."""
    return is_peft(model) or bool(getattr(model, "_hf_peft_config_loaded", False))


def first_adapter(model: nn.Module) -> str | None:
    """The first module that belongs to an adapter, of peft's or of ``hpczero.finetune``, inside of the model."""
    for name, module in model.named_modules():
        if isinstance(module, LowRank) or type(module).__module__.startswith("peft."):
            return str(name)
    return None


@contextmanager
def saved_by_peft(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Context: ``save_pretrained`` of a model of peft looks at no parameter. Not collective.

    For a module that trains whole (``modules_to_save``) peft asks the module for its names, by ``state_dict()``.

    Args:
        model: of peft; nothing is done for others.
        values: whole parameters by name.

    Yields:
        What to give it as ``state_dict``: ``values``, and buffers.
    """
    given, asked = dict(values), []
    if type(model).__module__.startswith("peft."):  # which takes out what belongs to the adapter
        given |= {name: each for name, each in _all_buffers(model) if name not in given}
    for name, module in model.named_modules():
        whole = getattr(module, "modules_to_save", None)
        if not (type(module).__module__.startswith("peft.") and isinstance(whole, nn.ModuleDict)):
            continue
        for adapter, inner in whole.items():
            prefix = f"{name}.modules_to_save.{adapter}."
            given |= {f"{prefix}{key}": each for key, each in persistent_buffers(inner).items()}
            own = {k.removeprefix(prefix): v for k, v in given.items() if k.startswith(prefix)}
            inner.__dict__["state_dict"] = own.copy
            asked.append(inner)
    try:
        yield given
    finally:
        for inner in asked:
            inner.__dict__.pop("state_dict", None)


def _all_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Persistent buffers under each of their names: layers share some, and peft asks for one by a certain name."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer
