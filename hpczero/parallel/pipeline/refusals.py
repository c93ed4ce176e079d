"""Models that cannot be cut into stages, found before anything is changed.

Owns: what is refused by looking at modules, each with a remedy. Must not know: stages, ranks.
"""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import is_lazy

from hpczero.errors import PlanError
from hpczero.plan.placement import part_of
from hpczero.zero.sharding import KEY as SHARDING

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def check_model(model: object) -> None:
    """Refuse what a stage would not do as the whole model does.

    Raises:
        PlanError: the message names the module or parameter, and what to do instead.
    """
    if not isinstance(model, nn.Module):
        raise PlanError(f"cut: got {type(model).__name__}, expected a torch.nn.Module")
    if part_of(model) is not None:
        raise PlanError("cut: the model is a part of one already; cut the whole model, once")
    for name, module in model.named_modules():
        title = f"module {name or 'model'!r} ({type(module).__name__})"
        if SHARDING in module.__dict__:
            raise PlanError(f"cut: {title} was zeroified; cut the model before zeroify")
        if "forward" in module.__dict__ and not name:
            raise PlanError(
                "cut: model.forward was replaced, and a stage has a forward of its own; cut before whatever replaces it"
            )
        if any(not _is_of_torch(h) for kind in HOOKS for h in getattr(module, kind).values()):
            raise PlanError(
                f"cut: {title} has a hook, which would see one stage's part of the model, or nothing where the module "
                "is taken out; register hooks after the cut, on the stages that have the module"
            )
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise PlanError(
                f"cut: parameter {name!r} is uninitialized: a lazy module takes its shape from its first input. Call "
                "the model once before the cut"
            )


def _is_of_torch(hook: object) -> bool:
    """Whether torch's own hook makes the module's weight, as weight_norm and spectral_norm do."""
    return type(hook).__module__.startswith("torch.nn.utils.")
