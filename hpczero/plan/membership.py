"""Membership: which unit each parameter belongs to.

Owns: the refusal of rules that name no module, one twice, or nested ones. Must not know: torch (modules are walked by
their public names only), layouts, dtypes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from hpczero.errors import PlanError

if TYPE_CHECKING:
    from torch import nn


def owners(model: nn.Module, rule: Iterable[tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Unit of each parameter, by the parameter's first qualified name. A unit is given by its modules' names."""
    unit_of_module: dict[str, tuple[str, ...]] = {}
    known = {name for name, _ in model.named_modules(remove_duplicate=False)}
    for modules in rule:
        for module in modules:
            if module not in known or module == "":
                raise PlanError(
                    f"unit rule names module {module!r}, which is not a submodule of the model; "
                    "use names as listed by model.named_modules()"
                )
            if module in unit_of_module:
                raise PlanError(
                    f"unit rule lists module {module!r} twice; each module is in one unit"
                )
            unit_of_module[module] = modules

    def unit_of(parameter_name: str) -> tuple[str, ...]:
        path = parameter_name.split(".")[:-1]
        found = [
            unit_of_module[".".join(path[:depth])]
            for depth in range(1, len(path) + 1)
            if ".".join(path[:depth]) in unit_of_module
        ]
        if len(found) > 1:
            raise PlanError(
                f"unit rule nests units: {parameter_name!r} lies in {found[0][0]!r} and "
                f"{found[1][0]!r}; list the inner or the outer module, not both"
            )
        return found[0] if found else ("",)

    users: dict[int, set[tuple[str, ...]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        users.setdefault(id(parameter), set()).add(unit_of(name))
    owner = {}
    for name, parameter in model.named_parameters():
        units = users[id(parameter)]
        owner[name] = next(iter(units)) if len(units) == 1 else ("",)
    return owner
