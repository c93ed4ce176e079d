"""Rules: which modules form a unit.

A rule is a function from a model to groups of module names. Parameters in no group belong to the root unit and stay
whole during the whole forward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from torch import nn

from hpczero.errors import PlanError
from hpczero.plan.layout import owners
from hpczero.plan.placement import part_of
from hpczero.plan.plan import UnitRule

# Small layers share a unit up to this size: below it, the start-up cost of a collective exceeds its transfer time.
PACK_BYTES = 16 * 2**20


def default_rule(model: nn.Module) -> list[tuple[str, ...]]:
    """One unit per transformer block; layers of a plain ``nn.Sequential`` packed up to 16 MiB.

    The children of every outermost ``ModuleList``, ``ModuleDict`` or ``Sequential`` are taken. A child with submodules
    of its own (a block) is a unit; neighbouring leaf layers share one. Embeddings, final norm and head, which the model
    calls itself, stay in the root unit, because a parent may use such weights without calling their module. Of a model
    that was cut into stages, a weight that two stages hold is a unit of its own, through its module: on both it is then
    divided over ranks alike.

    Raises:
        PlanError: the module of such a weight has other parameters.
    """
    units: list[tuple[str, ...]] = _tied_between_stages(model)

    def visit(prefix: str, module: nn.Module) -> None:
        for name, child in module.named_children():
            path = f"{prefix}{name}"
            if isinstance(child, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
                units.extend(_pack_container(path, child))
            else:
                visit(f"{path}.", child)

    if isinstance(model, nn.Sequential):
        return [*units, *_pack_container("", model)]
    visit("", model)
    return units


def _tied_between_stages(model: nn.Module) -> list[tuple[str, ...]]:
    part = part_of(model)
    tied = [name for name, each in (part.placements if part else {}).items() if each.tied]
    for name in tied:
        module = model.get_submodule(name.rpartition(".")[0])
        others = [
            other for other, _ in module.named_parameters() if other != name.rpartition(".")[2]
        ]
        if others or module is model:
            raise PlanError(
                f"parameter {name!r} lies on two stages of a pipeline, and its module {type(module).__name__} has "
                f"other parameters too ({', '.join(others[:3])}), expected a module of its own, which is a unit on "
                "both stages; put it into one (nn.Embedding, nn.Linear without bias), or do not share it"
            )
    return [(name.rpartition(".")[0],) for name in tied]


def _pack_container(path: str, container: nn.Module) -> list[tuple[str, ...]]:
    units: list[tuple[str, ...]] = []
    packed: list[str] = []
    packed_nbytes = 0
    for name, child in container.named_children():
        child_path = f"{path}.{name}" if path else name
        nbytes = sum(p.numel() * p.element_size() for p in child.parameters())
        if any(True for _ in child.children()):
            if packed:
                units.append(tuple(packed))
                packed, packed_nbytes = [], 0
            if isinstance(child, (nn.ModuleList, nn.ModuleDict)):  # never called itself
                units.extend(_pack_container(child_path, child))
            elif nbytes:
                units.append((child_path,))
        elif nbytes:
            if packed and packed_nbytes + nbytes > PACK_BYTES:
                units.append(tuple(packed))
                packed, packed_nbytes = [], 0
            packed.append(child_path)
            packed_nbytes += nbytes
    if packed:
        units.append(tuple(packed))
    return units


def tables_of(model: nn.Module, rule: UnitRule, *, every: bool) -> dict[str, int]:
    """Weights of embeddings of which only the rows that a batch touches travel: qualified name, elements of a row.

    They are those of ``nn.Embedding`` and ``nn.EmbeddingBag`` that train, that no other module has, and that ``rule``
    leaves to the root unit or to a unit of small layers.

    Args:
        model: any module.
        rule: which modules form units.
        every: all of them; else those of modules with ``sparse=True``.
    """
    users: Counter[int] = Counter()
    for module in model.modules():
        users.update(id(p) for p in module.parameters(recurse=False))
    owner = owners(model, rule(model))
    found: dict[str, int] = {}
    for name, module in model.named_modules():
        if not name or not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        if [key for key, _ in module.named_parameters()] != ["weight"]:
            continue  # another kind of table; one that is parametrized changes by being asked for its weight
        weight, unit = module.weight, owner.get(f"{name}.weight")
        is_table = weight.dim() == 2 and weight.numel() > 0 and weight.requires_grad
        free = unit == ("",) or (unit is not None and name in unit)
        if is_table and users[id(weight)] == 1 and free and (every or module.sparse):
            found[f"{name}.weight"] = weight.shape[1]
    return found


def with_tables(rule: UnitRule, tables: Collection[str]) -> UnitRule:
    """``rule``, where each of ``tables``, weights by qualified name, is a unit of its own."""
    apart = [name.rpartition(".")[0] for name in tables]

    def ruled(model: nn.Module) -> list[tuple[str, ...]]:
        rest = [tuple(each for each in unit if each not in apart) for unit in rule(model)]
        return [*((name,) for name in apart), *filter(None, rest)]

    return ruled if apart else rule


def by_class(*classes: type[nn.Module]) -> UnitRule:
    """Every outermost module of the given classes is a unit: ``rule=by_class(Block)``."""

    def rule(model: nn.Module) -> list[tuple[str, ...]]:
        units: list[tuple[str, ...]] = []
        for name, module in model.named_modules():
            inside = any(name.startswith(f"{unit[0]}.") for unit in units)
            if name and isinstance(module, classes) and not inside:
                units.append((name,))
        return units

    return rule


def whole_model(model: nn.Module) -> list[tuple[str, ...]]:
    """One unit, the root: the simplest plan, for small models."""
    return []
