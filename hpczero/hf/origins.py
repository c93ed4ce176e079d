"""Origins: which parameter of a loaded model each parameter is, after a program has changed the model.

Owns: names at the load, followed by the objects themselves. Must not know: files, shards, MPI. Between ``load`` and
``zeroify`` a program may drop, reorder, wrap or copy modules: values go with the object, as they do in plain torch.
What it puts there itself, or resizes, has no values in any file.

[Note: Copies]
A copy has other parameters, of which torch keeps nothing. A copied module keeps what is in its dictionary. So each
module has there the names that its parameters had, and whether it is a copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from hpczero.errors import PlanError

KEY = "_hpczero_origin"
_WAYS = (
    "change the model by transformers in one process (from_pretrained, the change, save_pretrained) and load that "
    "folder, or pass initialize=f(name, tensor) that fills such parameters itself and calls weights(name, tensor) for "
    "the others"
)
_PRODUCTS = (
    "it is of finetune.lora: pass zeroify(..., initialize=hpczero.finetune.first_values(weights))"
)


@dataclass(frozen=True)
class _Mark:
    """On one module: what its own parameters were. See [Note: Copies].

    Attributes:
        load: equal for all modules of one load, and for no other.
        names: at the load, by those in the module.
        is_copy: whether the module is a copy of the one that was loaded.
    """

    load: object
    names: Mapping[str, str]
    is_copy: bool = False

    def __deepcopy__(self, memo: Any) -> _Mark:
        return replace(self, is_copy=True)


class Origins:
    """Names of the parameters of one model as they were when it was loaded. Nothing here is collective."""

    def __init__(self, model: nn.Module) -> None:
        """``model``: as it was loaded; its modules are marked."""
        self._load = object()
        self._shapes: dict[str, tuple[int, ...]] = {}
        # Not weakly: torch gives no parameter of the meta device memory that a weak reference knows of.
        self._objects = list(model.parameters())
        self._names: dict[int, str] = {}
        self._moved: dict[str, str] = {}
        self._renamed = False
        for name, parameter in model.named_parameters():
            self._shapes[name], self._names[id(parameter)] = tuple(parameter.shape), name
        for module in model.modules():
            names = {key: self._names[id(own)] for key, own in _own(module)}
            if names:
                module.__dict__[KEY] = _Mark(self._load, names)

    def bind(self, parameters: Mapping[str, nn.Parameter], model: nn.Module) -> None:
        """Find the origin of every parameter.

        Args:
            parameters: of the model that is about to get values, by name.
            model: that has them, or some of them.

        Raises:
            PlanError: one has none, or two; the message names it.
        """
        known = {n: self._names[id(p)] for n, p in parameters.items() if id(p) in self._names}
        marked = self._marked(model, copies=bool(known))
        empty = any(each.is_meta for each in parameters.values())
        self._moved = dict(known)
        for name, parameter in parameters.items():
            if name in known:
                continue
            found = marked.get(id(parameter), set())
            # Of a model that was built anew nothing is known, and all names are.
            strange = not found and bool(known or marked)
            if strange or len(found) > 1 or (empty and not parameter.is_meta):
                raise PlanError(
                    f"parameter {name!r} {tuple(parameter.shape)} was put into the model after hpczero.hf.load, which "
                    f"has no values of it; {_PRODUCTS if '.lora.' in name else _WAYS}"
                )
            if found:
                (self._moved[name],) = found
        self._renamed = any(now != then for now, then in self._moved.items())
        for name, parameter in parameters.items():
            self.origin(name, tuple(parameter.shape))

    def _marked(self, model: nn.Module, *, copies: bool) -> dict[int, set[str]]:
        """By the ids of parameters, the names that marked modules have for them; with ``copies`` those alone."""
        found: dict[int, set[str]] = {}
        for module in model.modules():
            mark = module.__dict__.get(KEY)
            if not isinstance(mark, _Mark) or mark.load is not self._load:
                continue
            for key, parameter in _own(module):
                if key in mark.names and (mark.is_copy or not copies):
                    found.setdefault(id(parameter), set()).add(mark.names[key])
        return found

    def origin(self, name: str, shape: tuple[int, ...] | None = None) -> str:
        """The name at the load.

        Args:
            name: now.
            shape: whole, now; None is not compared.

        Raises:
            PlanError: there was no such parameter, or it had another shape.
        """
        before = self._moved.get(name)
        if before is None and self._renamed:
            raise PlanError(
                f"parameter {name!r} is held in parts, in a model whose modules have other names than when "
                f"hpczero.hf.load gave it; {_WAYS}"
            )
        before = before or name
        known = self._shapes.get(before)
        if known is None:
            raise PlanError(
                f"parameter {name!r} was not in the model that hpczero.hf.load gave; {_WAYS}"
            )
        if shape is not None and known != tuple(shape):
            raise PlanError(
                f"parameter {name!r} is {tuple(shape)}, and was {known} when hpczero.hf.load gave the model; {_WAYS}"
            )
        return before


def _own(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that a module has itself, by their names there."""
    for key, parameter in module._parameters.items():
        if parameter is not None:
            yield key, parameter
