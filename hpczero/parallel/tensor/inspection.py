"""Which layers of a model a rule cuts, found and checked before anything is changed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy

from hpczero.errors import PlanError
from hpczero.job.group import Group
from hpczero.parallel.tensor.functions import Kept, Rule, Split, matches
from hpczero.plan.placement import ModelPart, Placement, part_of
from hpczero.zero.sharding import KEY as ZEROIFIED

Word = Split | Kept
HEADS = re.compile(r"_?(n|num|number_of)?_?([a-z_]+_)?heads?")


class FoundLayer(NamedTuple):
    """One module with parameters of its own, by its first name, and what the rule says of it."""

    name: str
    module: nn.Module
    word: Word


@dataclass(frozen=True)
class Inspection:
    """What is to be done with a model.

    Attributes:
        layers: every module with parameters of its own.
        dropouts: modules that drop elements, by name.
        counts: module, attribute and its new value.
        entries: modules whose first argument is entered, with its name.
        cuts: modules whose first argument is cut along time.
        joins: modules whose output is gathered along time.
        names: of each parameter in this model, by its id.
        part: the placements of all parameters.
    """

    layers: list[FoundLayer]
    dropouts: dict[str, nn.Module]
    counts: list[tuple[nn.Module, str, int]]
    entries: list[tuple[nn.Module, str]]
    cuts: list[nn.Module]
    joins: list[nn.Module]
    names: dict[int, str]
    part: ModelPart


def inspect(model: nn.Module, group: Group, rule: Rule, *, sequence: bool) -> Inspection:
    """Look at ``model`` and decide. Not collective; changes nothing.

    Args:
        model: whole, or a pipeline stage.
        group: the tensor parallel ranks.
        rule: of this kind of model.
        sequence: whether activations between cut layers are cut along time.

    Raises:
        PlanError: it cannot be split by this rule; the message names the module or parameter.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, module in modules.items():
        if ZEROIFIED in module.__dict__:
            raise PlanError(
                f"module {name or 'model'!r} was zeroified already; split a model first"
            )
    layers = _layers(modules, rule)
    before = part_of(model)
    if before is not None and any(p.parts > 1 for p in before.placements.values()):
        raise PlanError("the model was split already; split it once")
    is_stage = before is not None and not (before.first and before.last)
    if is_stage and sequence and (rule.cut_before or rule.join_after):
        raise PlanError(
            "sequence=True with a rule that cuts tokens between modules (Rule.cut_before, join_after), on a pipeline "
            "stage: positions and masks that a stage makes of what comes in would be those of own tokens; take "
            "sequence=False, or no pipeline"
        )
    _check_patterns(modules, rule, before)
    if rule.check is not None:
        rule.check(model)
    names, aliases = names_of(model)
    part = before or ModelPart(tuple(names.values()), aliases)
    return Inspection(
        layers,
        _dropouts(modules, rule),
        _counts(modules, rule, group.size),
        [(modules[n], a) for p, a in rule.entries.items() for n in modules if matches(p, n)],
        [modules[n] for p in rule.cut_before for n in modules if sequence and matches(p, n)],
        [modules[n] for p in rule.join_after for n in modules if sequence and matches(p, n)],
        names,
        _placed(part, names, layers, group, sequence=sequence),
    )


def _layers(modules: dict[str, nn.Module], rule: Rule) -> list[FoundLayer]:
    found: dict[int, FoundLayer] = {}
    for name, module in modules.items():
        if not any(p is not None for p in module._parameters.values()):
            continue
        patterns = rule.found(name)
        if len(patterns) != 1:
            said = (
                f"matches {', '.join(patterns)}" if patterns else "matches no pattern of the rule"
            )
            raise PlanError(
                f"module {name or 'model'!r} ({type(module).__name__}) {said}, expected one; the rule must name every "
                f"module with parameters of its own: as a Split, or as Kept where every rank holds it whole"
            )
        word = rule.layers[patterns[0]]
        if found.setdefault(id(module), FoundLayer(name, module, word)).word != word:
            raise PlanError(
                f"module {name!r} is module {found[id(module)].name!r} too, and the rule says different things of them"
            )
    layers = list(found.values())
    for layer in layers:
        _check_layer(layer)
    return layers


def _check_layer(layer: FoundLayer) -> None:
    """Refuse modules that do something else than the layers that would replace them."""
    name, module, word = layer
    title = f"module {name!r} ({type(module).__name__})"
    if word in (Kept.STREAM, Kept.INSIDE, Kept.ALL_TOKENS):
        return
    kind = type(module)
    linear = isinstance(module, nn.Linear) and kind.forward is nn.Linear.forward
    embedding = isinstance(module, nn.Embedding) and kind.forward is nn.Embedding.forward
    own = kind.__module__.startswith("torch.") and kind not in (nn.Linear, nn.Embedding)
    if own or not (linear or embedding) or (word is Kept.POSITIONS and not embedding):
        raise PlanError(
            f"{title} cannot be split, expected torch.nn.Linear or torch.nn.Embedding, without quantization or "
            "parametrizations; have the rule keep it whole (Kept), or build the model with plain layers"
        )
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(module, kind) for kind in hooks) or "forward" in module.__dict__:
        raise PlanError(
            f"{title} has hooks or a forward of its own, which the layer that replaces it would not have; register "
            "them after split"
        )
    for key, parameter in module._parameters.items():
        if parameter is not None:
            _check_parameter(f"{name}.{key}", parameter)
    extra = (
        set(module._parameters) - {"weight", "bias"} or set(module._modules) or set(module._buffers)
    )
    if extra:
        raise PlanError(
            f"{title} has {', '.join(sorted(extra))} beside weight and bias; keep it whole"
        )
    if isinstance(module, nn.Embedding):
        odd = [k for k in ("max_norm", "scale_grad_by_freq", "sparse") if getattr(module, k)]
        if odd:
            raise PlanError(
                f"{title} has {', '.join(odd)}, which needs the whole table; build it without"
            )
        if isinstance(word, Split) and (word.dim, word.strips, word.joined) != (0, 1, False):
            raise PlanError(
                f"{title} is an embedding, expected Split(dim=0) with one strip, got {word}"
            )
    elif isinstance(word, Split) and (word.dim not in (0, 1) or (word.dim and word.joined)):
        raise PlanError(f"{title}: got {word}, expected dim 0, or dim 1 without joined")
    elif isinstance(word, Split) and word.joined and word.strips != 1:
        raise PlanError(f"{title}: outputs of {word.strips} strips cannot be joined; expected one")


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if type(parameter) is not nn.Parameter or is_lazy(parameter):
        raise PlanError(
            f"parameter {name!r} is a {type(parameter).__name__}, expected a plain torch.nn.Parameter"
        )
    if not parameter.is_floating_point():
        raise PlanError(f"parameter {name!r} is {parameter.dtype}, expected a floating point dtype")
    if parameter.grad is not None:
        raise PlanError(
            f"parameter {name!r} has a gradient, which split would drop; zero_grad() first"
        )
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        raise PlanError(f"parameter {name!r} has hooks; register them after split")


def _check_patterns(modules: dict[str, nn.Module], rule: Rule, before: ModelPart | None) -> None:
    """Refuse patterns that name nothing, in this stage or in the whole model."""
    names = set(modules)
    if before is not None:
        for parameter in (*before.names, *before.aliases):
            names.add(parameter.rpartition(".")[0])
    for pattern in rule.layers:
        if not any(matches(pattern, name) for name in names):
            raise PlanError(
                f"the rule names {pattern!r}, which is no module with parameters of this model; take the rule of this "
                "kind of model, or leave the pattern out"
            )
    if before is None:
        for pattern in (*rule.dropouts, *rule.entries, *rule.cut_before, *rule.join_after):
            if not any(matches(pattern, name) for name in names):
                raise PlanError(f"the rule names {pattern!r}, which is no module of this model")


def _dropouts(modules: dict[str, nn.Module], rule: Rule) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    for name, module in modules.items():
        if isinstance(module, _DropoutNd) and module.p > 0.0:
            if type(module) is not nn.Dropout or not any(matches(p, name) for p in rule.dropouts):
                raise PlanError(
                    f"module {name!r} ({type(module).__name__}) drops elements, and the rule does not say whether "
                    "ranks have parts there, so that masks would be wrong; name it in Rule.dropouts if it stands "
                    "between cut layers, or build the model without dropout"
                )
            found[name] = module
    return found


def _counts(
    modules: dict[str, nn.Module], rule: Rule, parts: int
) -> list[tuple[nn.Module, str, int]]:
    found, seen = [], set()
    for pattern in rule.counts:
        place, _, attribute = pattern.rpartition(".")
        for name, module in modules.items():
            if not matches(place, name) or (id(module), attribute) in seen:
                continue
            value = getattr(module, attribute, None)
            if not isinstance(value, int) or isinstance(value, bool):
                raise PlanError(
                    f"the rule counts {attribute!r} of module {name!r}, which is {value!r}, expected an integer"
                )
            seen.add((id(module), attribute))
            found.append((module, attribute, -(-value // parts)))
    return found


def uncounted(model: nn.Module, found: Inspection) -> list[str]:
    """Numbers of heads beside cut layers that the rule does not count, by name.

    Nobody knows what a module makes of its attributes. A view by a number of heads that fits by accident mixes heads.
    """
    counted = {(id(module), attribute) for module, attribute, _ in found.counts}
    cut = {layer.name.rpartition(".")[0] for layer in found.layers if isinstance(layer.word, Split)}
    modules = dict(model.named_modules(remove_duplicate=False))
    return [
        f"{name}.{attribute} = {value}".lstrip(".")
        for name in sorted(cut)
        for attribute, value in vars(modules[name]).items()
        if HEADS.fullmatch(attribute)
        and type(value) is int
        and value > 1
        and (id(modules[name]), attribute) not in counted
    ]


# --- where parameters go


def names_of(model: nn.Module) -> tuple[dict[int, str], dict[str, str]]:
    """The first name of each parameter, by its id; and further names, with the first."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            aliases[name] = first[id(parameter)]
    return first, aliases


def _placed(
    part: ModelPart,
    names: dict[int, str],
    layers: list[FoundLayer],
    group: Group,
    *,
    sequence: bool,
) -> ModelPart:
    """The part of the whole model that this rank will have."""
    placements: dict[str, Placement] = {}
    for user, parameter, word, own_tokens in _uses(layers):
        name = names[id(parameter)]
        before = part.placement(name, tuple(parameter.shape))
        placement = _placement(before, user, word, group, sequence=sequence and own_tokens)
        if placements.setdefault(name, placement) != placement:
            raise PlanError(
                f"parameter {name!r} is {user!r} too, and the rule cuts them in different ways; tied parameters must "
                "be cut alike"
            )
    return replace(part, placements={**part.placements, **placements})


def _uses(layers: list[FoundLayer]) -> Iterator[tuple[str, Tensor, Word, bool]]:
    """Each parameter of each layer, with what happens to it, and whether it may see own tokens alone."""
    for name, module, word in layers:
        for key, parameter in module._parameters.items():
            if parameter is not None:
                whole = isinstance(word, Split) and word.dim == 1 and key == "bias"
                own_tokens = not (isinstance(word, Split) and word.all_tokens)
                yield f"{name}.{key}", parameter, Kept.STREAM if whole else word, own_tokens


def _placement(
    before: Placement, user: str, word: Word, group: Group, *, sequence: bool
) -> Placement:
    if isinstance(word, Kept):
        partial = word is Kept.INSIDE or (sequence and word is Kept.STREAM)
        return replace(before, partial=partial, counted=before.counted and group.rank == 0)
    try:
        found = replace(
            before,
            dim=word.dim,
            strips=word.strips,
            grain=word.grain,
            part=group.rank,
            parts=group.size,
        )
    except ValueError as error:
        raise PlanError(f"parameter {user!r} cannot be split: {error}") from error
    grains = found.strip // found.grain
    if grains < group.size:
        raise PlanError(
            f"parameter {user!r} has {grains} head(s) or rows of {found.grain} element(s) that stay together, fewer "
            f"than the {group.size} tensor parallel ranks; take a smaller degree"
        )
    return found
