"""What may not be done to a zeroified module as a whole: copied, pickled, moved, cast.

Owns: refusals that sit on the module objects themselves. Must not know: units, ranks. A call that changes nothing is
allowed, such as ``model.to(device)`` of a model that is there already: wrappers of training loops call it without
asking.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from hpczero.errors import PlanError, StepError
from hpczero.zero.units.guard import ShardedParameter, moved_or_cast

# Where copy, pickle and torch look them up before the class.
_NAMES = ("__reduce_ex__", "_apply")


class Seal:
    """Seal on the model and on every module that has hooks.

    A copy of such a module would drive the original's units.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        """Put the seal on.

        Args:
            modules: by qualified name.
        """
        self._modules = modules
        self._handles = [
            each.register_load_state_dict_pre_hook(_refuse_values)  # type: ignore[no-untyped-call]
            for each in {*modules.values()}
        ]
        for name, module in modules.items():
            module.__dict__["__reduce_ex__"] = _refuse_copies
            module.__dict__["_apply"] = partial(_pass_what_changes_nothing, name, module)

    def remove(self) -> None:
        """Take the seal off."""
        for handle in self._handles:
            handle.remove()
        for module in self._modules.values():
            for name in _NAMES:
                module.__dict__.pop(name, None)


def _refuse_values(
    module: nn.Module, state: Mapping[str, Any], prefix: str, how: Mapping[str, Any], *_: Any
) -> None:
    """Refuse ``load_state_dict`` of parameters that are sharded, once; torch tells of each.

    Raises:
        StepError: the message names the way.
    """
    if how.get("assign_to_params_buffers"):  # the next step names what came
        return
    for name, parameter in module.named_parameters(prefix.removesuffix(".")):
        if isinstance(parameter, ShardedParameter) and name in state:
            raise StepError(
                f"parameter {name!r} is sharded and its memory given back (stage 3); call load_state_dict before "
                "zeroify, or inside `with hpczero.gathered(model, modifier_rank=0):`"
            )


def _refuse_copies(protocol: Any) -> NoReturn:
    """Refuse ``copy.deepcopy``, ``pickle`` and ``torch.save``.

    Raises:
        PlanError: always; the message says what to do instead.
    """
    raise PlanError(
        "a zeroified model or one of its units cannot be copied or pickled (copy.deepcopy, AveragedModel, "
        "torch.save(model)): a copy would share units and communicators with it. Save hpczero.full_state_dict(model); "
        "for a copy build a plain model and load that into it, or copy the model before zeroify"
    )


def _pass_what_changes_nothing(
    name: str, module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module:
    """Allow ``module._apply(fn)``, which is ``.to``, ``.float``, ``.cpu`` and the like, if ``fn`` changes nothing.

    Raises:
        StepError: it would change something; the message names the first such tensor. Nothing was changed.
    """
    prefix = f"{name}." if name else ""
    kinds = chain(
        (("parameter", n, p) for n, p in module.named_parameters(recurse=recurse)),
        (("buffer", n, b) for n, b in module.named_buffers(recurse=recurse)),
    )
    with torch.no_grad():
        for kind, of_module, tensor in kinds:
            changed = fn(tensor)
            if changed is not tensor:
                raise StepError(moved_or_cast(f"{kind} {prefix + of_module!r}", tensor, changed))
    return module
