"""The way back: from parameters of a model to the names and layouts that its files have.

Owns: which tensors of a model make which tensors of files, by the transforms that it was loaded with, or else those of
its kind. Must not know: values, shards, formats of files.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hpczero.errors import ConfigError
from hpczero.hf.converting import Group
from hpczero.hf.library import conversion


@dataclass(frozen=True)
class Outcome:
    """What some tensors of the model become.

    Attributes:
        group: the tensors, and how they are converted; None for one that stays as it is.
        names: key in the files, by the name among the group's results.
        shapes: shapes in the files, by key.
        sources: names in the model.
    """

    group: Group | None
    names: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    sources: tuple[str, ...]

    def convert(self, model: Any, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Values by key in the files, from those by name in the model."""
        if self.group is None:
            return {key: values[name] for name, key in self.names.items()}
        found = self.group.convert(model, values.__getitem__)
        return {self.names[name]: value for name, value in found.items()}


def way_back(model: Any, tensors: Mapping[str, Tensor]) -> list[Outcome]:
    """What the tensors of a model become in its files. Not collective.

    Args:
        model: of transformers.
        tensors: parameters and buffers by name; only shapes matter.

    Raises:
        ConfigError: a transform cannot be undone, or two tensors get one key.
    """
    renaming, converter = conversion("WeightRenaming"), conversion("WeightConverter")
    renamed, converted = conversion("apply_renamings"), conversion("apply_converters")
    back = [transform.reverse_transform() for transform in reversed(_transforms(model))]
    renamings = [each for each in back if isinstance(each, renaming)]
    converters = [each for each in back if isinstance(each, converter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    found: list[Outcome] = []
    groups: dict[str, Group] = {}
    for name in sorted(tensors, key=conversion("dot_natural_key")):
        first, pattern = converted(name, converters)
        if pattern is None:
            key = renamed(name, renamings)
            found.append(Outcome(None, {name: key}, {key: shapes[name]}, (name,)))
            continue
        group = groups.setdefault(first, Group(first, copy.deepcopy(by_pattern[pattern])))
        group.sources.append((name, pattern))
    for group in groups.values():
        try:
            group.plan(model, shapes)
        except Exception as error:  # of the library, of any kind
            raise ConfigError(
                f"{group.first}: transformers cannot convert {[name for name, _ in group.sources][:3]} back to the "
                f"names of its files: {error}"
            ) from error
        names = {name: renamed(name, renamings) for name in group.shapes}
        there = {names[name]: shape for name, shape in group.shapes.items()}
        found.append(Outcome(group, names, there, tuple(name for name, _ in group.sources)))
    _refuse_twice(found)
    return found


def _transforms(model: Any) -> list[Any]:
    """Those that the model was loaded with, or else those of its kind without what only old files need."""
    known = getattr(model, "_weight_conversions", None)
    if known is not None:
        return list(known)
    prefixes = conversion("PrefixChange")  # without a load nobody knows whether files had one
    every = conversion("get_model_conversion_mapping")(model, add_legacy=False)
    return [each for each in every if not isinstance(each, prefixes)]


def _refuse_twice(outcomes: list[Outcome]) -> None:
    seen: set[str] = set()
    for outcome in outcomes:
        for key in outcome.shapes:
            if key in seen:
                raise ConfigError(f"two tensors of the model would be {key!r} in the files")
            seen.add(key)


def meta(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What stands for a tensor whose values are not there."""
    return torch.empty(shape, dtype=dtype, device="meta")
