"""Universal checkpoints of DeepSpeed, read with ``weights_only``: what its ds_to_universal makes of a ZeRO checkpoint.

    latest_universal                         names the folder below
    <folder>/*model_states.pt                buffers, shapes, ties, steps
             zero/optimizer_state.pt         options of groups
             zero/<name>/fp32.pt             a parameter; exp_avg.pt, exp_avg_sq.pt, step.pt beside it

After stages 1 and 2 a file holds ``{"param": tensor}``, after stage 3 the elements alone, end to end.

Source: deepspeed/checkpoint/ds_to_universal.py and constants.py of DeepSpeed 0.19.8.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from hpczero.checkpoint.disk.format import plain_name, some
from hpczero.checkpoint.foreign.collected import STEP, Collected, Groups, State
from hpczero.checkpoint.foreign.weight_files import HeldTensor, TorchFile
from hpczero.errors import CheckpointError
from hpczero.files.regular import read_text

LATEST, ZERO, WEIGHT, PARAM = "latest_universal", "zero", "fp32", "param"
_KNOWN = {
    PARAM,
    "cat_dim",
    "vocab_tensor",
}  # beside a parameter; others say that it is not as the model has it


class UniversalFolder(Collected):
    """A universal checkpoint: weights, and the state of the optimizer."""

    def __init__(self, path: Path, *, with_state: bool = True) -> None:
        """Open all files; values are mapped into memory. ``with_state`` takes the optimizer's state too.

        Raises:
            CheckpointError: a file is missing, cannot be read, or holds what is not expected.
            CheckpointMismatch: a state of the optimizer has another shape than its parameter.
        """
        self._folder = _folder(path)
        models = sorted(self._folder.glob("*model_states.pt"))
        if not models:
            raise CheckpointError(
                f"{self._folder}: has no *model_states.pt, which states shapes and buffers; bring all that "
                "ds_to_universal wrote"
            )
        self._files: list[TorchFile] = []
        said = self._read(models[0])
        sections = [dict(part) for part in said.get("param_shapes") or ()]
        self._sections = [list(map(plain_name, part)) for part in sections]
        shapes = {name: tuple(shape) for part in sections for name, shape in part.items()}
        buffers = list(said.get("buffer_names") or ())
        shared = {
            str(name): str(owner) for name, owner in (said.get("shared_params") or {}).items()
        }
        held = [entry.parent.name for entry in sorted((self._folder / ZERO).glob(f"*/{WEIGHT}.pt"))]
        names = [
            name for name in dict.fromkeys([*shapes, *held]) if name not in (*buffers, *shared)
        ]
        steps = int(said.get("global_steps", 0)) - int(said.get("skipped_steps", 0))
        tensors: dict[str, HeldTensor] = {}
        states: dict[str, State] = {}
        for name in names:
            found = {
                file.stem: self._value(file, shapes.get(name))
                for file in sorted(
                    (self._folder / ZERO / name).glob("*.pt" if with_state else f"{WEIGHT}.pt")
                )
            }
            weight = found.pop(WEIGHT, None)
            if weight is None:
                raise CheckpointError(
                    f"{self._folder / ZERO / name / WEIGHT}.pt: is not there; bring all files"
                )
            if found:
                found.setdefault(
                    STEP,
                    _held(
                        torch.tensor(float(steps), dtype=torch.float32, device="cpu"),
                        f"{models[0]}: steps",
                    ),
                )
                states[plain_name(name)] = found
            tensors[plain_name(name)] = weight
        for name in buffers:
            tensors[plain_name(name)] = _held(said["module"][name], f"{models[0]}: {name!r}")
        super().__init__(path, tensors, states)
        self.known_tied = {plain_name(name): plain_name(owner) for name, owner in shared.items()}
        self.known_buffers = list(map(plain_name, buffers))

    def _read(self, file: Path) -> Any:
        self._files.append(opened := TorchFile(file, any_content=True))
        return opened.content

    def _value(self, file: Path, shape: tuple[int, ...] | None) -> HeldTensor:
        value = self._read(file)
        flat = not isinstance(value, Mapping)
        if not flat:
            foreign = sorted(set(value) - _KNOWN)
            if foreign or PARAM not in value:
                raise CheckpointError(
                    f"{file}: has {some(foreign)}, expected {PARAM!r} alone: DeepSpeed states there how to divide the "
                    "parameter over tensor ranks, which is not read; take the weights of zero_to_fp32 instead"
                )
            value = value[PARAM]
        if file.stem == STEP and isinstance(value, int | float):
            value = torch.tensor(float(value), dtype=torch.float32, device="cpu")
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{file}: holds a {type(value).__name__}, expected a tensor")
        if flat and file.stem != STEP:
            if shape is None or value.numel() != prod(shape):
                raise CheckpointError(
                    f"{file}: has {value.numel():,} elements, and *model_states.pt says {shape}; bring the files of "
                    "one checkpoint"
                )
            value = value.view(shape)
        return _held(value, str(file))

    @override
    def groups(self) -> Groups:
        groups = [
            dict(g)
            for g in self._read(self._folder / ZERO / "optimizer_state.pt").get("param_groups", ())
        ]
        for group in groups:
            group.pop("params", None)
        if len(groups) == 1:
            return groups, dict.fromkeys(self.states, 0)
        if len(groups) != len(self._sections):
            raise CheckpointError(
                f"{self._folder}: has {len(groups)} groups of parameters in {len(self._sections)} parts, and does not "
                "say which parameter is in which; convert a checkpoint of stage 1 or 2, or of one group"
            )
        return groups, {name: place for place, names in enumerate(self._sections) for name in names}

    @override
    def check(self, part: int, parts: int) -> None:
        for file in self._files[part::parts]:
            file.check(0, 1)


def is_universal(path: Path) -> bool:
    """Whether ``path`` is a universal checkpoint, or names one. Raises OSError: the system does not say."""
    return (path / LATEST).is_file() or any((path / ZERO).glob(f"*/{WEIGHT}.pt"))


def _folder(path: Path) -> Path:
    if not (path / LATEST).is_file() or (path / ZERO).is_dir():
        return path
    name = read_text(path / LATEST).strip()
    if not name or Path(name).name != name or not (path / name / ZERO).is_dir():
        raise CheckpointError(
            f"{path / LATEST}: names {name!r}, expected a folder beside it that ds_to_universal wrote"
        )
    return path / name


def _held(value: Tensor, label: str) -> HeldTensor:
    read = value.detach().__getitem__
    return HeldTensor(tuple(value.shape), value.dtype, False, read, label=label)
