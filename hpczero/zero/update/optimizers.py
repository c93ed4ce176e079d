"""Optimizers: which ones can work on shards, and how a stock one is pointed at them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from hpczero.errors import PlanError
from hpczero.plan.placement import ModelPart
from hpczero.zero.units.unit import Unit

# Torch's own update rules in which a parameter depends on its own value, gradient and state, on nothing else.
WHOLE: tuple[type[Optimizer], ...] = (
    torch.optim.Adafactor,
    *([torch.optim.Muon] if hasattr(torch.optim, "Muon") else []),  # from torch 2.9
)
ATTRIBUTE = "hpczero_whole_parameters"


def needs_whole(optimizer: Optimizer, group: Mapping[str, Any] | None = None) -> bool:
    """Whether the optimizer is one that steps on whole parameters; with ``group``, whether that group of its does.

    Torch's own do, and classes that say so with ``hpczero_whole_parameters``: True, or a static method that says of a
    group whether it does. The other groups are then stepped on in pieces, element by element.
    """
    kind = type(optimizer)
    said = getattr(kind, ATTRIBUTE, None)
    if said is None:
        return isinstance(optimizer, WHOLE) and kind.step.__module__.startswith("torch.optim.")
    if callable(said) and group is not None:
        return bool(said(group))
    return bool(said)


def check_uncut(optimizers: Iterable[Optimizer], model: nn.Module, part: ModelPart | None) -> None:
    """Raise PlanError for parameters that no rank can have whole, because tensor parallel ranks hold parts of them."""
    if part is None:
        return
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"] if needs_whole(optimizer, group) else ():
                name = names.get(id(parameter), "")
                placement = part.placements.get(name)
                if placement is not None and placement.dim is not None and placement.parts > 1:
                    raise PlanError(
                        f"optimizer {type(optimizer).__name__} needs whole parameters, and {name!r} of shape "
                        f"{placement.shape} is cut over {placement.parts} tensor parallel ranks; use an elementwise "
                        "optimizer for it, or tensor degree 1"
                    )


# Update rules in which every element depends on its own gradient and state only.
ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.AdamW,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
REFUSED = {
    "LBFGS": "couples the elements of all parameters through a history of inner products, and calls a closure",
    "SparseAdam": "works on sparse gradients",
}


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose update is neither elementwise nor one of whole parameters.

    A class of your own passes if it says so with ``hpczero_elementwise = True`` or ``hpczero_whole_parameters = True``.

    Raises:
        PlanError: names the optimizer and the reason.
    """
    kind, name = type(optimizer), type(optimizer).__name__
    if name in REFUSED:
        raise PlanError(
            f"optimizer {name} {REFUSED[name]}; a rank does not hold those. "
            f"Use an elementwise one: {', '.join(c.__name__ for c in ELEMENTWISE)}"
        )
    # A subclass with a step of its own is another update rule. torch wraps ``step``, and keeps the module's name.
    known = isinstance(optimizer, ELEMENTWISE) and kind.step.__module__.startswith("torch.optim.")
    known = known or getattr(kind, "hpczero_elementwise", False) or needs_whole(optimizer)
    if not known:
        raise PlanError(
            f"optimizer {name} is not known to be elementwise; expected one of "
            f"{', '.join(c.__name__ for c in (*ELEMENTWISE, *WHOLE))}. If each element of its update depends on that "
            "element's gradient and state alone, set the class attribute hpczero_elementwise = True. If each "
            "parameter's depends on that whole parameter, its gradient and state alone (Shampoo, SOAP, LAMB, LARS), "
            "set hpczero_whole_parameters = True"
        )
    if any(state and float(state.get("step", 1)) > 0 for state in optimizer.state.values()):
        raise PlanError(
            f"optimizer {name} has taken steps already; call zeroify before the first step"
        )


def rounds_by_place(optimizer: Optimizer) -> bool:
    """Whether its step may round an element by where a piece ends: one of the program's own, unless it says otherwise.

    Operations of torch that are approximated (pow, exp, sigmoid) round what fills no vector in another way (torch
    2.13). A class that has sums, products, quotients and roots alone says so with ``hpczero_exact = True``.
    """
    kind = type(optimizer)
    ours = kind.step.__module__.startswith(("torch.optim.", "hpczero."))
    said = getattr(kind, "hpczero_exact", False)
    return getattr(kind, "hpczero_elementwise", False) and not (ours or said)


def describe_options(optimizer: Optimizer) -> list[str]:
    """Class and plain options of each group, for a comparison over ranks; what has no portable text is left out."""
    return [type(optimizer).__name__] + [
        f"{name}={text} in group {index}"
        for index, group in enumerate(optimizer.param_groups)
        for name, value in sorted(group.items())
        if name not in _OF_THIS_RANK and (text := _portable(value)) is not None
    ]


_OF_THIS_RANK = ("params", "param_names")


def _portable(value: Any) -> str | None:
    """A text that is equal on two ranks where the values are; None where there is no such text."""
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        return repr(value.tolist())
    if isinstance(value, (list, tuple)):
        parts = [_portable(part) for part in value]
        return None if None in parts else f"({', '.join(map(str, parts))})"
    if isinstance(value, Mapping):
        return _portable([part for item in value.items() for part in item])
    return repr(value) if isinstance(value, (bool, int, float, str, type(None))) else None


def put_into_group(
    optimizer: Optimizer,
    group: dict[str, Any],
    pieces: Sequence[tuple[str, nn.Parameter, nn.Parameter]],
    *,
    anew: bool,
) -> None:
    """Put shards into one group of ``optimizer``; the group and its options stay the same objects.

    Args:
        optimizer: whose group it is.
        group: one of its groups.
        pieces: each shard after the qualified name and the model's parameter that it is a piece of.
        anew: the group holds parameters of the model, which leave it. Otherwise what it holds stays.
    """
    names = {id(parameter): name for name, parameter, _ in pieces}
    if anew:
        if "param_names" in group:
            held = zip(group["params"], group["param_names"], strict=True)
            names |= {id(parameter): name for parameter, name in held}
            group["param_names"] = []
        group["params"] = []
    if not pieces:
        return
    group["params"] = [*group["params"], *(shard for _, _, shard in pieces)]
    if "param_names" in group:
        own = [names[id(parameter)] for _, parameter, _ in pieces]
        group["param_names"] = [*group["param_names"], *own]
    for _, parameter, shard in pieces:  # what an optimizer or a loop looks for: p.lr_scale
        vars(shard).update(vars(parameter))
    if isinstance(optimizer, torch.optim.Adagrad):  # it alone makes its state when it is built
        # Without names, which torch takes beside the parameters alone.
        alone = {key: value for key, value in group.items() if key != "param_names"}
        alone["params"] = [shard for _, _, shard in pieces]
        optimizer.state.update(torch.optim.Adagrad([alone], **optimizer.defaults).state)


class OptimizerSet:
    """The optimizers of one model in the order in which the program gave them; none for inference.

    Their groups are numbered one after the other. A parameter that is trained is in one group of one optimizer.
    """

    def __init__(self, optimizers: tuple[Optimizer, ...]) -> None:
        """As they are now; groups that are added later have no number before ``recount``. Not collective."""
        self._optimizers = optimizers
        self._ranges = self._ranges_now()

    def _ranges_now(self) -> list[range]:
        counts = (len(optimizer.param_groups) for optimizer in self._optimizers)
        return [range(*ends) for ends in pairwise(accumulate(counts, initial=0))]

    def recount(self) -> dict[int, int]:
        """Number the groups anew, where optimizers have got more; new number of each that had one. Not collective."""
        before, self._ranges = self._ranges, self._ranges_now()
        pairs = zip(before, self._ranges, strict=True)
        return {n: now.start + n - past.start for past, now in pairs for n in past}

    @classmethod
    def of(cls, given: object) -> OptimizerSet:
        """What a program gives to ``zeroify``: None, an optimizer, or a tuple or list of them.

        Raises:
            PlanError: something else, none at all, or one of them twice.
        """
        if given is None:
            return cls(())
        found = tuple(given) if isinstance(given, (tuple, list)) else (given,)
        odd = [type(each).__name__ for each in found if not isinstance(each, Optimizer)]
        if odd:
            raise PlanError(
                f"optimizer: got {odd[0]}, expected a torch.optim.Optimizer, a tuple or list of them, or None for a "
                "model that is not trained"
            )
        if not found:
            raise PlanError(
                f"optimizer: got an empty {type(given).__name__}, expected at least one optimizer, or None for a model "
                "that is not trained"
            )
        if len({id(each) for each in found}) < len(found):
            raise PlanError("optimizer: got the same optimizer twice, expected each once")
        return cls(found)

    def __len__(self) -> int:
        return len(self._optimizers)

    def __iter__(self) -> Iterator[Optimizer]:
        return iter(self._optimizers)

    @property
    def alone(self) -> Optimizer | None:
        """The optimizer where there is one; PlanError where there are several."""
        if len(self) > 1:
            raise PlanError(
                f"the model has {len(self)} optimizers ({', '.join(self.classes)}), and one was asked for; go through "
                "hpczero.sharding(model).optimizers"
            )
        return self._optimizers[0] if self._optimizers else None

    @property
    def classes(self) -> list[str]:
        """The name of each one's class."""
        return [type(optimizer).__name__ for optimizer in self]

    @property
    def groups(self) -> list[dict[str, Any]]:
        """All groups as they are now, by their numbers."""
        return [group for optimizer in self for group in optimizer.param_groups]

    def groups_of(self, index: int) -> range:
        """The numbers of the groups of optimizer ``index``."""
        return self._ranges[index]

    def of_group(self, number: int) -> Optimizer:
        """Which optimizer the group of this number belongs to."""
        pairs = zip(self._optimizers, self._ranges, strict=True)
        return next(optimizer for optimizer, numbers in pairs if number in numbers)

    def name(self, index: int) -> str:
        """What a message calls optimizer ``index``."""
        return "the optimizer" if len(self) == 1 else f"optimizer {index} ({self.classes[index]})"

    def describe(self) -> list[str]:
        """As ``describe_options``, of all."""
        return [text for optimizer in self for text in describe_options(optimizer)]

    def number_parameters(self, model: nn.Module) -> dict[str, int]:
        """Number of the group of each trainable parameter of ``model`` by qualified name.

        Raises:
            PlanError: a parameter is in two optimizers, an optimizer holds parameters that are not the model's, or
                trainable ones are in none.
        """
        held = Counter(
            each
            for optimizer in self
            for each in {id(p) for group in optimizer.param_groups for p in group["params"]}
        )
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and held[id(parameter)] > 1:
                raise PlanError(
                    f"parameter {name!r} is in {held[id(parameter)]} optimizers, expected one: two updates of one "
                    "shard would work on each other's values; give each parameter to one of them"
                )
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        found: dict[str, int] = {}
        foreign = 0
        for number, group in enumerate(self.groups):
            for parameter in group["params"]:
                if id(parameter) not in names:
                    foreign += 1
                elif parameter.requires_grad:
                    found[names[id(parameter)]] = number
        if foreign:
            raise PlanError(
                f"the optimizer holds {foreign} tensor(s) that are not parameters of this model; build it from "
                "model.parameters() of the very model you pass, after any .to() or copy and before zeroify. For one "
                "optimizer over several models: zeroify(torch.nn.ModuleList([a, b]), optimizer, "
                "rule=hpczero.plan.rules.by_class(A, B))"
            )
        missing = [n for n, p in model.named_parameters() if p.requires_grad and n not in found]
        if missing:
            raise PlanError(
                f"{len(missing)} trainable parameter(s) are in no optimizer group, first {missing[0]!r}; "
                "give them to the optimizer, in a group of their own if need be, or freeze them with "
                "requires_grad_(False). Parts with optimizers of their own are zeroified one by one, or together: "
                "zeroify(model, (optimizer, other_optimizer))"
            )
        return found


def point_at_shards(optimizers: OptimizerSet, units: Sequence[Unit], kept: Sequence[int]) -> None:
    """Put the shards of ``units`` into the groups that the units' specs give; not collective.

    Args:
        optimizers: of the model.
        units: whose shards are in no group yet.
        kept: of each optimizer, how many groups hold shards already; the others hold parameters of the model.
    """
    pieces: dict[int, list[tuple[str, nn.Parameter, nn.Parameter]]] = {}
    for unit in units:
        for shard, place in zip(unit.shards, unit.optimized.slots, strict=True):
            piece = (unit.spec.layout.slots[place].name, unit.parameters[place], shard)
            pieces.setdefault(unit.spec.groups[place], []).append(piece)
    for index, optimizer in enumerate(optimizers):
        for place, number in enumerate(optimizers.groups_of(index)):
            group, found = optimizer.param_groups[place], pieces.get(number, ())
            put_into_group(optimizer, group, found, anew=place >= kept[index])
