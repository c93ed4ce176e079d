"""save_pretrained: a zeroified model of transformers as a folder that transformers loads.

Owns: the order of it, which name of a tied parameter is kept, and what lies beside the weights. Must not know: how
values are gathered, formats of files.

    unit by unit: shards -> rank 0 -> names and layouts of the files -> dtype -> files under a hidden name -> rename
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hpczero.checkpoint.foreign.weight_files import cast
from hpczero.errors import ConfigError
from hpczero.finetune.peft_names import first_adapter
from hpczero.hf.folder_writer import FolderWriter
from hpczero.hf.library import model_kind
from hpczero.hf.way_back import Outcome, meta, way_back
from hpczero.memory.buffers import DTYPES
from hpczero.zero.full_state import StateByUnit
from hpczero.zero.zeroify import sharding

NAMES = ("fp32", "bf16", "fp16")


def save_pretrained(
    model: nn.Module,
    folder: str | Path,
    *,
    tokenizer: Any = None,
    dtype: str = "fp32",
    shard_mib: int = 5120,
) -> None:
    """Write a zeroified model as a folder for ``from_pretrained``, at any stage. Collective over the topology's world.

    Rank 0 writes, and holds one unit at a time. The folder appears under its name once all of it is on the disk.

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
        if dtype not in NAMES:
            raise ConfigError(f"dtype: got {dtype!r}, expected one of {', '.join(NAMES)}")
        if shard_mib < 1:
            raise ConfigError(f"shard_mib: got {shard_mib}, expected at least 1")
    state = StateByUnit(model)
    with ExitStack() as stack:
        stream: Stream | None = None
        with topology.agreed("begin the folder"):
            if state.tensors is not None:
                stream = Stream(model, state.tensors, DTYPES[dtype])
                stack.enter_context(stream.begin(Path(folder), shard_mib * 2**20))
        for found in state.units():
            with topology.agreed("write the weights"):
                if stream is not None:
                    stream.put(found)
        with topology.agreed("write what lies beside the weights"):
            if stream is not None:
                stream.commit(lambda path: write_beside(model, path, DTYPES[dtype], tokenizer))


class Stream:
    """The tensors of a model on their way into a folder, in any order. One rank has it."""

    def __init__(self, model: nn.Module, tensors: Mapping[str, Any], dtype: torch.dtype) -> None:
        """Not collective.

        Args:
            model: of transformers.
            tensors: by name: parameters on the meta device, one object under all names of a tied one, and buffers.
            dtype: of the parameters in the files.

        Raises:
            ConfigError: names cannot be converted back.
        """
        self._model, self._dtype = model, dtype
        kept = _once(model, {n: t for n, t in tensors.items() if isinstance(t, Tensor)})
        self._names = {id(tensor): name for name, tensor in kept.items()}
        self._kept = kept  # so that ids stay theirs
        self._outcomes = {
            name: outcome for outcome in way_back(model, kept) for name in outcome.sources
        }
        self._waiting: dict[str, Tensor] = {}
        self._writer: FolderWriter | None = None

    def begin(self, folder: Path, shard_nbytes: int) -> FolderWriter:
        """The folder, to be entered; buffers are written by the first ``put``."""
        tensors: dict[str, Tensor] = {}
        for name in self._kept:
            outcome = self._outcomes[name]
            own = self._dtype_of(outcome)
            tensors |= {key: meta(shape, own) for key, shape in outcome.shapes.items()}
        self._writer = FolderWriter(folder, tensors, shard_nbytes)
        return self._writer

    def put(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Write parameters: what stands for each, and its whole fp32 value.

        Raises:
            CheckpointMismatch: a value is beyond the dtype.
            CheckpointError: they cannot be written.
        """
        for tensor, values in pairs:
            self._take(self._names.get(id(tensor)), values)

    def commit(self, beside: Any) -> None:
        """All parameters are there: write buffers, and what ``beside`` writes into the folder that it is given."""
        assert self._writer is not None, "begun"
        for name, tensor in self._kept.items():
            if not tensor.is_meta:
                self._take(name, tensor)
        assert not self._waiting, f"never put: {sorted(self._waiting)}"
        self._writer.commit(beside)

    def _take(self, name: str | None, values: Tensor) -> None:
        if name is None:  # the model does not save it
            return
        outcome = self._outcomes[name]
        self._waiting[name] = values.detach().cpu()
        if any(source not in self._waiting for source in outcome.sources):
            return
        there = {source: self._waiting.pop(source) for source in outcome.sources}
        dtype = self._dtype_of(outcome)
        assert self._writer is not None, "begun"
        for key, value in outcome.convert(self._model, there).items():
            self._writer.put(key, cast(value, dtype, key))

    def _dtype_of(self, outcome: Outcome) -> torch.dtype:
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
    """Write config.json, generation_config.json and the tokenizer's files. Not collective.

    Args:
        model: of transformers.
        folder: where to.
        dtype: of the parameters in the files.
        tokenizer: whatever has ``save_pretrained``; None writes none.
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
