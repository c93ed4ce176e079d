"""save_pretrained: a zeroified model of transformers as a folder that transformers loads.

unit by unit: shards -> every rank -> names and layouts of the files -> dtype -> files under a hidden name -> rename
"""

from __future__ import annotations

import copy
import importlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from hpczero.checkpoint.disk.folder import checkpoints_at
from hpczero.checkpoint.disk.format import MASTER, NAMED
from hpczero.checkpoint.disk.stored import Stored
from hpczero.checkpoint.foreign.exporting import buffers_of, of_newest, whole_tensor
from hpczero.checkpoint.foreign.safe_file import INDEX_FILE, SINGLE, TensorEntry
from hpczero.checkpoint.foreign.streaming import FolderWriter, Pairs, stream, with_values
from hpczero.checkpoint.foreign.weight_files import cast
from hpczero.errors import CheckpointMismatch, ConfigError
from hpczero.finetune.adapted import first_adapter
from hpczero.hf import building
from hpczero.hf.building import ModelChoice, of_folder
from hpczero.hf.converting import TensorGroup
from hpczero.hf.files import WeightFolder, match, owners_of
from hpczero.hf.hub import conversion, model_kind
from hpczero.job.team import Team
from hpczero.memory.buffers import DTYPES
from hpczero.zero.zeroify import sharding


@dataclass(frozen=True)
class SavedTensors:
    """What some tensors of the model become.

    Attributes:
        group: the tensors, and how they are converted; None for one that stays as it is.
        names: key in the files, by the name among the group's results.
        shapes: shapes in the files, by key.
        sources: names in the model.
    """

    group: TensorGroup | None
    names: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    sources: tuple[str, ...]

    def convert(self, model: Any, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Values by key in the files, from those by name in the model."""
        found = self.group.convert(model, values.__getitem__) if self.group else values
        return {self.names[name]: value for name, value in found.items()}


def way_back(model: Any, tensors: Mapping[str, Tensor]) -> list[SavedTensors]:
    """What the tensors of a model become in its files, of which only shapes matter here. Not collective.

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
    found: list[SavedTensors] = []
    groups: dict[str, TensorGroup] = {}
    for name in sorted(tensors, key=conversion("dot_natural_key")):
        first, pattern = converted(name, converters)
        if pattern is None:
            key = renamed(name, renamings)
            found.append(SavedTensors(None, {name: key}, {key: shapes[name]}, (name,)))
            continue
        group = groups.setdefault(first, TensorGroup(first, copy.deepcopy(by_pattern[pattern])))
        group.sources.append((name, pattern))
    for group in groups.values():
        sources = tuple(name for name, _ in group.sources)
        try:
            group.plan(model, shapes)
        except Exception as error:  # of the library, of any kind
            raise ConfigError(
                f"{group.first}: transformers cannot convert {list(sources[:3])} back to the names of its files: "
                f"{error}"
            ) from error
        names = {name: renamed(name, renamings) for name in group.shapes}
        there = {names[name]: shape for name, shape in group.shapes.items()}
        found.append(SavedTensors(group, names, there, sources))
    number = Counter(key for each in found for key in each.shapes)
    twice = next((key for key in number if number[key] > 1), None)
    if twice is not None:
        raise ConfigError(f"two tensors of the model would be {twice!r} in the files")
    return found


def _transforms(model: Any) -> list[Any]:
    """Those that the model was loaded with, or else those of its kind without what only old files need."""
    known = getattr(model, "_weight_conversions", None)
    if known is not None:
        return list(known)
    prefixes = conversion("PrefixChange")  # without a load nobody knows whether files had one
    every = conversion("get_model_conversion_mapping")(model, add_legacy=False)
    return [each for each in every if not isinstance(each, prefixes)]


def meta(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What stands for a tensor whose values are not there."""
    return torch.empty(shape, dtype=dtype, device="meta")


def save_pretrained(
    model: nn.Module,
    folder: str | Path,
    *,
    tokenizer: Any = None,
    dtype: str = "fp32",
    shard_mib: int = 5120,
) -> None:
    """Write a zeroified model as a folder for ``from_pretrained``, at any stage. Collective over the topology's world.

    All ranks write, each its own tensors, and hold one unit at a time; rank 0 alone does where ranks hold parts of the
    model. The folder appears under its name once all of it is on the disk.

    Args:
        model: of transformers, between two steps.
        folder: must not exist, or be empty; rank 0 must see it.
        tokenizer: written too: a tokenizer, a processor, or whatever has ``save_pretrained``.
        dtype: of the parameters, ``fp32``, ``bf16`` or ``fp16``; they are rounded from the masters. Buffers keep
            their own.
        shard_mib: most MiB of one file; a larger tensor has a file of its own.

    Raises:
        ConfigError: the model is none of transformers or has adapters, something is at ``folder``, or an option is
            unknown.
        CheckpointMismatch: a value is beyond ``dtype``.
        CheckpointError: it cannot be written. All on every rank.
    """
    topology = sharding(model).topology
    with topology.agreed("look at what is to be saved"):
        if not isinstance(model, model_kind()):
            raise ConfigError(
                f"save_pretrained: got {type(model).__name__}, expected a model of transformers; for others "
                "hpczero.full_state_dict, or hpczero.checkpoint and its export"
            )
        adapter = first_adapter(model)
        if adapter is not None:
            raise ConfigError(
                f"save_pretrained: {adapter!r} belongs to an adapter, and from_pretrained would load the model without "
                "it; write the merged weights by hpczero.finetune.save_merged, or the adapter alone by "
                "hpczero.finetune.save_adapter (of peft: of a model that peft.get_peft_model made)"
            )
        _check_form(dtype, shard_mib)
    place = Path(folder)
    stream(
        model,
        lambda found, team: FolderStream(
            model, found, DTYPES[dtype], place, shard_mib, tokenizer, team
        ),
    )


def _check_form(dtype: str, shard_mib: int) -> None:
    if dtype not in DTYPES:
        raise ConfigError(f"dtype: got {dtype!r}, expected one of {', '.join(DTYPES)}")
    if shard_mib < 1:
        raise ConfigError(f"shard_mib: got {shard_mib}, expected at least 1")


class FolderStream(FolderWriter):
    """The tensors of a model on their way into a folder, in any order."""

    def __init__(
        self,
        model: nn.Module,
        tensors: Mapping[str, Any],
        dtype: torch.dtype,
        folder: Path,
        shard_mib: int,
        tokenizer: Any,
        team: Team | None = None,
    ) -> None:
        """Not collective. Raises ConfigError where names cannot be converted back, or as of ``FolderWriter``.

        Args:
            model: of transformers.
            tensors: by name: parameters on the meta device, one object under all names of a tied one, and buffers.
            dtype: of the parameters in the files.
            folder: as of ``FolderWriter``.
            shard_mib: most MiB of one file.
            tokenizer: as of ``save_pretrained``.
            team: as of ``FolderWriter``.
        """
        self._model, self._dtype = model, dtype
        kept = _once(model, {n: t for n, t in tensors.items() if isinstance(t, Tensor)})
        self._names = {id(tensor): name for name, tensor in kept.items()}
        self._kept = kept  # so that ids stay theirs
        self._outcomes = {
            name: outcome for outcome in way_back(model, kept) for name in outcome.sources
        }
        self._waiting: dict[str, Tensor] = {}
        written: dict[str, Tensor] = {}
        for name in kept:
            outcome = self._outcomes[name]
            own = self._dtype_of(outcome)
            written |= {key: meta(shape, own) for key, shape in outcome.shapes.items()}
        beside = partial(write_beside, model, dtype=dtype, tokenizer=tokenizer)
        super().__init__(folder, written, shard_mib * 2**20, beside, team)

    @override
    def put(self, pairs: Pairs) -> None:
        """Write whole fp32 parameters, and buffers.

        Raises:
            CheckpointMismatch: a value is beyond the dtype.
            CheckpointError: they cannot be written.
        """
        for tensor, values in pairs:
            if id(tensor) in self._names:  # else the model does not save it
                self._take(self._names[id(tensor)], values)

    @override
    def commit(self) -> None:
        assert not self._waiting, f"never put: {sorted(self._waiting)}"
        super().commit()

    def _take(self, name: str, values: Tensor) -> None:
        outcome = self._outcomes[name]
        if not self.is_mine(next(iter(outcome.shapes))):
            return
        self._waiting[name] = values.detach().cpu()
        if any(source not in self._waiting for source in outcome.sources):
            return
        there = {source: self._waiting.pop(source) for source in outcome.sources}
        dtype = self._dtype_of(outcome)
        for key, value in outcome.convert(self._model, there).items():
            self.write(key, cast(value, dtype, key))

    def _dtype_of(self, outcome: SavedTensors) -> torch.dtype:
        parts = [self._kept[source] for source in outcome.sources]
        return self._dtype if any(part.is_meta for part in parts) else parts[0].dtype


def _once(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor under one name, of a tied one that which the model takes for the source; none that it never saves."""
    targets = set(getattr(model, "all_tied_weights_keys", None) or {})
    unsaved = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    names: dict[int, str] = {}
    for name, tensor in tensors.items():
        before = names.get(id(tensor))
        if before is None or (before in targets and name not in targets):
            names[id(tensor)] = name
    chosen = set(names.values()) - unsaved
    return {name: tensor for name, tensor in tensors.items() if name in chosen}


def write_beside(model: Any, folder: Path, dtype: torch.dtype, tokenizer: Any) -> None:
    """Write config.json, generation_config.json and the files of ``tokenizer``. Not collective.

    ``dtype`` is that of the parameters in the files.
    """
    config = copy.deepcopy(model.config)
    config.dtype = dtype
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None:
            part.dtype = dtype
    config.architectures = [type(model).__name__]
    if model.is_remote_code():
        dynamic = importlib.import_module("transformers.dynamic_module_utils")
        dynamic.custom_object_save(model, folder, config=config)
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def export(
    checkpoint: str | Path,
    folder: str | Path,
    *,
    like: str | Path,
    model_class: Any = None,
    tokenizer: Any = None,
    dtype: str = "fp32",
    shard_mib: int = 5120,
    trust_remote_code: bool = False,
    **changes: Any,
) -> None:
    """Write the weights of a checkpoint as a folder for ``from_pretrained``. Not collective: one process does it.

    Args:
        checkpoint: one, or the folder of checkpoints or of a run, of which the newest sound one is read.
        folder: must not exist, or be empty.
        like: the folder that the trained model was loaded from: its config.json, and the names in its files.
        model_class: as it was given to ``load``.
        tokenizer: as of ``save_pretrained``.
        dtype: of the parameters, ``fp32``, ``bf16`` or ``fp16``; they are rounded from the masters.
        shard_mib: most MiB of one file.
        trust_remote_code: as it was given to ``load``.
        changes: of the configuration, as they were given to ``load``.

    Raises:
        ConfigError: there is no checkpoint, something is at ``folder``, or an option is unknown.
        CheckpointMismatch: the checkpoint is of another model, or a value is beyond ``dtype``.
        CorruptCheckpoint: none is sound.
        CheckpointError: the folder cannot be written.
    """
    _check_form(dtype, shard_mib)
    path, source = Path(checkpoint), Path(like)
    candidates = checkpoints_at(path)
    choice = ModelChoice(model_class, changes, trust_remote_code)
    model: Any = building.build(lambda: of_folder(source, choice), seed=0)
    if (source / SINGLE).exists() or (source / INDEX_FILE).exists():
        model._weight_conversions = match(model, WeightFolder(source).entries).transforms

    def write(stored: Stored) -> None:
        tensors = _tensors(stored, model)
        place = Path(folder)
        with FolderStream(model, tensors, DTYPES[dtype], place, shard_mib, tokenizer) as writer:
            writer.put(with_values(tensors))
            writer.put(_parameters(stored, tensors))
            writer.commit()

    of_newest(path, candidates, write)


def _tensors(stored: Stored, model: Any) -> dict[str, Tensor]:
    """What stands for each parameter under all names of it, and persistent buffers with their values.

    Raises CheckpointMismatch where the checkpoint is of another model.
    """
    rows = stored.manifest.table.rows
    found: dict[str, Tensor] = {}
    for row in rows:
        if row.tied_to is None:
            found[row.name] = meta(row.shape, torch.float32)
    found |= {row.name: found[rows[row.tied_to].name] for row in rows if row.tied_to is not None}
    found |= {name: whole_tensor(entry) for name, entry in buffers_of(stored)}
    known = owners_of(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
    state = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    wrong = [name for name in shapes if shapes[name] != state.get(name)]
    wrong += [name for name, owner in known.items() if owner not in found and name not in found]
    if wrong:
        raise CheckpointMismatch(
            f"{stored.path}: not of the model that config.json describes: {', '.join(wrong[:NAMED])} differ; give "
            "like=, model_class= and fields of the configuration as they were when it was trained"
        )
    return found


def _parameters(stored: Stored, tensors: dict[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """What stands for each parameter, and its whole fp32 value."""
    for row in stored.manifest.table.owners:
        read = partial(stored.read, MASTER, row.offset, row.offset + row.numel)
        yield tensors[row.name], whole_tensor(TensorEntry("float32", row.shape, read))
