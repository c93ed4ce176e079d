"""Models of peft as they are saved: by names alone, since no parameter has its value where it is saved.

Owns: what peft asks of modules then. Must not know: how values are gathered, files. peft itself is never imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from hpczero.zero.units.module_buffers import persistent_buffers


@contextmanager
def saved_by_peft(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Context: ``save_pretrained`` of a model of peft looks at no parameter. Not collective.

    For a module that trains whole (``modules_to_save``) peft asks the module for its names, by ``state_dict()``.

    Args:
        model: of peft; nothing is done for others.
        values: whole parameters by name.

    Yields:
        What to give it as ``state_dict``: ``values``, and the buffers of such modules.
    """
    given, asked = dict(values), []
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
