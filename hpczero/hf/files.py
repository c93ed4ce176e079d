"""The weight files of a Hugging Face folder, and which of their tensors is which parameter of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hpczero.checkpoint.disk.format import some
from hpczero.checkpoint.foreign.safe_file import INDEX_FILE, SINGLE
from hpczero.checkpoint.foreign.weight_files import FileTensor, RangeFile, files_of, joined
from hpczero.errors import CheckpointError, CheckpointMismatch, ConfigError
from hpczero.hf.converting import TensorGroup
from hpczero.hf.hub import conversion

ADAPTER_CONFIG = "adapter_config.json"
HIDDEN = ".weights"  # in a folder into which a new save is brought, until all of it is there


class WeightFolder:
    """Tensors of a folder, by their keys in the files. Not collective: each rank opens the files itself.

    Attributes:
        path: of the folder.
        entries: dtype and shape by key.
    """

    def __init__(self, path: Path) -> None:
        """Open the files; no values are read.

        Raises:
            ConfigError: there are no safetensors files, or those of an adapter.
            CheckpointError: a file is missing, damaged or torn; two files have one key.
        """
        self.path = path
        names, expected = self._found()
        self._files = [RangeFile(name) for name in names]
        held = {file.path: dict.fromkeys(file.entries, file) for file in self._files}
        self._homes = joined(held, path / INDEX_FILE, expected)
        self.entries: dict[str, FileTensor] = {
            key: file.entries[key] for key, file in self._homes.items()
        }

    def pieces(self, key: str, start: int, stop: int) -> Iterator[Tensor]:
        """Elements [start, stop) of a tensor, flat, in the dtype of the file; each piece is valid until the next."""
        return self._homes[key].pieces(key, start, stop)

    def box(self, key: str, box: Sequence[slice] = ()) -> Tensor:
        """As of ``RangeFile``."""
        return self._homes[key].box(key, box)

    def label(self, key: str) -> str:
        """File and key, for messages."""
        return f"{self._homes[key].path}: {key!r}"

    @property
    def nbytes_read(self) -> int:
        """Bytes of values that this rank has read so far, samples left out."""
        return sum(file.nbytes_read for file in self._files)

    def fingerprint(self) -> list[str]:
        """One line for each file, equal where the files are."""
        return [file.fingerprint() for file in self._files]

    def check(self, part: int, parts: int) -> None:
        """As ``RangeFile.check``, of all files."""
        for file in self._files:
            file.check(part, parts)

    def _found(self) -> tuple[list[Path], list[str]]:
        """The files, and the keys that must be in them if there is an index."""
        single, index = self.path / SINGLE, self.path / INDEX_FILE
        if (self.path / ADAPTER_CONFIG).exists():
            raise ConfigError(
                f"{self.path}: has {ADAPTER_CONFIG}, by which from_pretrained loads the base model that it names and "
                "puts the adapter on it; load the base, and the adapter by peft, or take that file away"
            )
        if single.exists() or index.exists():
            return files_of(single if single.exists() else index)
        if (self.path / HIDDEN).is_dir():
            raise CheckpointError(
                f"{self.path}: a save into it was cut short; save again, or move all files of "
                f"{self.path / HIDDEN} into it"
            )
        others = sorted(p.name for p in self.path.glob("*.bin"))
        found = (
            f"; it has {others[0]}, which transformers itself converts: from_pretrained, save_pretrained"
            if others
            else ""
        )
        raise ConfigError(f"{self.path}: has neither {SINGLE} nor {INDEX_FILE}{found}")


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
    converted: dict[str, tuple[TensorGroup, str]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    transforms: list[Any] = field(default_factory=list)

    def has(self, owner: str) -> bool:
        """Whether the files have it."""
        return owner in self.plain or owner in self.converted


def match(model: Any, entries: Mapping[str, FileTensor]) -> Matched:
    """Compare a model of transformers, on the meta device, with the tensors of a folder. Not collective.

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
            f"the files have nothing of {type(model).__name__}: their tensors are {some(list(entries))}; give the "
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
    model: Any, entries: Mapping[str, FileTensor], found: Matched, transforms: Sequence[Any]
) -> list[TensorGroup]:
    """Put each tensor to its parameter, or into a group that is converted."""
    kinds = conversion("WeightRenaming"), conversion("WeightConverter")
    renamings, converters = ([t for t in transforms if isinstance(t, kind)] for kind in kinds)
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    rename, order = conversion("rename_source_key"), conversion("dot_natural_key")
    state = model.state_dict()
    groups: dict[str, TensorGroup] = {}
    for key in sorted(entries, key=order):
        prefix = model.base_model_prefix
        name, pattern = rename(key, renamings, converters, prefix, state)
        if name not in state and key in state:  # it has its name already
            name, pattern = rename(key, [], [], prefix, state)
        if pattern is not None and name in state:
            group = groups.setdefault(name, TensorGroup(name, by_pattern[pattern]))
            group.sources.append((key, pattern))
        elif name in state and name in found.owners:
            found.plain.setdefault(found.owners[name], []).append(key)
        else:
            found.unexpected.append(name)
    return list(groups.values())


def _compare_shapes(
    found: Matched, shapes: Mapping[str, tuple[int, ...]], entries: Mapping[str, FileTensor]
) -> None:
    there = {owner: entries[keys[0]].shape for owner, keys in found.plain.items()}
    there |= {owner: group.shapes[name] for owner, (group, name) in found.converted.items()}
    for owner, shape in there.items():
        if shape != shapes[owner]:
            found.mismatched[owner] = (shape, shapes[owner])
            found.plain.pop(owner, None)
            found.converted.pop(owner, None)
