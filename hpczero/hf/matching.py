"""Which tensors of a folder are which parameters of a model.

Owns: names: those of the files by transformers' own mapping (old names, prefixes, converters), further names of tied
parameters, what is missing, unexpected or of another shape. Must not know: values, shards, MPI.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from hpczero.checkpoint.disk.format import NAMED
from hpczero.errors import CheckpointMismatch
from hpczero.hf.converting import Group
from hpczero.hf.files import Entry
from hpczero.hf.library import conversion


@dataclass
class Matched:
    """The tensors of a folder, by the parameters and persistent buffers of a model.

    Attributes:
        owners: the name that ``named_parameters`` gives, or ``named_buffers``, of every name of a tensor in the model.
        plain: keys of tensors that are one parameter or buffer as they are, by its owner; several where it is tied.
        converted: the group that makes a parameter or buffer, and its name among the group's results, by its owner.
        missing: parameters that no file has, by their owners.
        unexpected: keys that the model has no place for, by the names they would have there.
        mismatched: parameters of another shape than their tensors: shape in the file, shape in the model.
        transforms: those of transformers that were met, for the way back.
    """

    owners: dict[str, str]
    plain: dict[str, list[str]] = field(default_factory=dict)
    converted: dict[str, tuple[Group, str]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    transforms: list[Any] = field(default_factory=list)

    def has(self, owner: str) -> bool:
        """Whether the files have it."""
        return owner in self.plain or owner in self.converted


def match(model: Any, entries: Mapping[str, Entry]) -> Matched:
    """Compare a model with the tensors of a folder. Not collective.

    Args:
        model: of transformers, on the meta device.
        entries: of the files, by key.

    Raises:
        CheckpointMismatch: the files have nothing of the model, or two tensors mean one name.
        ConfigError: this transformers lacks what names are found with.
    """
    found = Matched(owners_of(model))
    transforms = conversion("get_model_conversion_mapping")(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in _tensors(model).items()}
    groups = _placed(model, entries, found, transforms)
    for group in groups:
        group.plan(model, {key: entries[key].shape for key, _ in group.sources})
        for name in group.shapes:
            owner = found.owners.get(name)
            if owner is None:
                found.unexpected.append(name)
            elif found.has(owner):
                raise CheckpointMismatch(f"several tensors of the files mean {name!r}")
            else:
                found.converted[owner] = (group, name)
    found.transforms = [transform for transform in transforms if transform.was_used()]
    if not (found.plain or found.converted):
        raise CheckpointMismatch(
            f"the files have nothing of {type(model).__name__}: their tensors are {_some(list(entries))}; give the "
            "folder of the model, or its model_class"
        )
    _compare_shapes(found, shapes, entries)
    parameters = [name for name, _ in model.named_parameters()]
    found.missing = [name for name in parameters if not found.has(name)]
    return found


def owners_of(model: nn.Module) -> dict[str, str]:
    """Of every name of a parameter or persistent buffer, the first name of the same tensor."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(tensor), name)
        for name, tensor in _tensors(model, duplicates=True).items()
    }


def _tensors(model: nn.Module, *, duplicates: bool = False) -> dict[str, Any]:
    found = dict(model.named_parameters(remove_duplicate=not duplicates))
    kept = model.state_dict(keep_vars=True)
    buffers = model.named_buffers(remove_duplicate=not duplicates)
    return found | {name: buffer for name, buffer in buffers if name in kept}


def _placed(
    model: Any, entries: Mapping[str, Entry], found: Matched, transforms: Sequence[Any]
) -> list[Group]:
    """Put each tensor to its parameter, or into a group that is converted."""
    kinds = conversion("WeightRenaming"), conversion("WeightConverter")
    renamings, converters = ([t for t in transforms if isinstance(t, kind)] for kind in kinds)
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    rename, order = conversion("rename_source_key"), conversion("dot_natural_key")
    state = model.state_dict()
    groups: dict[str, Group] = {}
    for key in sorted(entries, key=order):
        prefix = model.base_model_prefix
        name, pattern = rename(key, renamings, converters, prefix, state)
        if name not in state and key in state:  # it has its name already
            name, pattern = rename(key, [], [], prefix, state)
        if pattern is not None and name in state:
            group = groups.setdefault(name, Group(name, by_pattern[pattern]))
            group.sources.append((key, pattern))
        elif name in state and name in found.owners:
            found.plain.setdefault(found.owners[name], []).append(key)
        else:
            found.unexpected.append(name)
    return list(groups.values())


def _compare_shapes(
    found: Matched, shapes: Mapping[str, tuple[int, ...]], entries: Mapping[str, Entry]
) -> None:
    there = {owner: entries[keys[0]].shape for owner, keys in found.plain.items()}
    there |= {owner: group.shapes[name] for owner, (group, name) in found.converted.items()}
    for owner, shape in there.items():
        if shape != shapes[owner]:
            found.mismatched[owner] = (shape, shapes[owner])
            found.plain.pop(owner, None)
            found.converted.pop(owner, None)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
