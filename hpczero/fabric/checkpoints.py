"""FabricCheckpoint: the dictionary that a program of Fabric saves, as a checkpoint of hpczero's.

Owns: which entry is the model, and what becomes of the others. Must not know: Fabric, what a checkpoint is on disk.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import hpczero
from hpczero.checkpoint.disk.folder import Folder, is_checkpoint, read_manifest
from hpczero.checkpoint.disk.json_keys import extra_of
from hpczero.checkpoint.disk.lines import step_of
from hpczero.errors import ConfigError, HpcZeroError
from hpczero.job.messages import Exchange

KEY = "fabric"  # in ``extra``


class FabricCheckpoint:
    """One path that a program saves to and loads from. Methods are collective over the world."""

    def __init__(self, path: Path, exchange: Exchange) -> None:
        """Not collective."""
        self._path = path
        self._exchange = exchange

    def save(self, state: dict[str, Any]) -> None:
        """Write it.

        Args:
            state: one model, its optimizers, and other entries.

        Raises:
            ConfigError: as of ``_model``; or an entry cannot be kept.
            CheckpointError: as of ``hpczero.checkpoint.save``.
        """
        model = self._model(state)
        step = state.get("step", 0)
        extra: dict[str, Any] = {
            "held": [name for name, each in state.items() if _is_models(each)],
            "values": {
                name: _state_of(each) for name, each in state.items() if not _is_models(each)
            },
        }
        before = self._exchange.of_root(self._newest_step(), "look for the checkpoint before")
        step = step if type(step) is int and step > 0 else 0
        hpczero.checkpoint.save(
            self._path,
            model,
            # A step that begins anew is no way back: what was before goes, and is not set aside.
            step=step if step >= before else before + 1,
            extra={KEY: extra},
            keep=1,
        )

    def load(self, state: Any, *, strict: bool) -> dict[str, Any]:
        """Restore it, and return what ``state`` does not ask for.

        Raises:
            ConfigError: as of ``_model``; or another program has written it.
            KeyError: ``state`` has what the checkpoint has not; nothing is changed then.
            CheckpointError: as of ``hpczero.checkpoint.load``.
        """
        model = self._model(state)
        if strict:
            self._check_names(state, self._exchange.of_root(self._written(), "look at its names"))
        found = hpczero.checkpoint.load(self._path, model).extra.get(KEY)
        if not isinstance(found, dict):
            raise ConfigError(
                f"{self._path}: was not saved by fabric.save; load it with hpczero.checkpoint.load(path, model)"
            )
        values: dict[str, Any] = dict(found["values"])
        if strict:
            self._check_names(state, [*found["held"], *values])
        for name, each in list(state.items()):
            if _is_models(each) or name not in values:
                continue
            value = values.pop(name)
            if _is_stateful(each):
                each.load_state_dict(value)
            elif isinstance(each, torch.Generator):
                each.set_state(value)
            else:
                state[name] = value
        return values

    def _newest_step(self) -> int:
        """Of what is in the folder; 0 where nothing is. Not collective."""
        with suppress(HpcZeroError):
            return max(
                (step_of(each.name) or 0 for each in Folder(self._path).candidates()), default=0
            )
        return 0  # the save says what is wrong

    def _written(self) -> list[str] | None:
        """Names of what the newest checkpoint has; None where only a load can tell. Not collective."""
        with suppress(HpcZeroError):
            folder = Folder(self._path)
            manifest = (
                read_manifest(self._path)
                if is_checkpoint(self._path)
                else next((manifest for _, manifest in folder.valid()), None)
            )
            found = extra_of(manifest.meta).get(KEY) if manifest else None
            if isinstance(found, dict):
                return [*found["held"], *found["values"]]
        return None

    def _check_names(self, state: Any, written: list[str] | None) -> None:
        missing = [name for name in state if written is not None and name not in written]
        if missing and written is not None:
            raise KeyError(
                f"{self._path}: holds no {missing[0]!r}, but {', '.join(written)}; pass strict=False"
            )

    def _model(self, state: Any) -> nn.Module:
        """The model among the entries.

        Raises:
            ConfigError: there is none, or there are several, or an optimizer of another; on every rank.
        """
        with self._exchange.topology.agreed("look at what is in the checkpoint"):
            entries = state if isinstance(state, dict) else {}
            models = {name: each for name, each in entries.items() if isinstance(each, nn.Module)}
            if len(models) != 1:
                raise ConfigError(
                    f"state: got {len(models)} model(s) ({', '.join(models) or type(state).__name__}), expected one "
                    "that fabric.setup returned: {'model': model, 'optimizer': optimizer, ...}"
                )
            model = next(iter(models.values()))
            own = list(hpczero.sharding(model).optimizers)
            for name, each in entries.items():
                if isinstance(each, Optimizer) and all(each is not known for known in own):
                    raise ConfigError(
                        f"state: {name!r} is an optimizer of another model than {next(iter(models))!r}; save each "
                        "model to a path of its own"
                    )
        return model


def _is_models(each: Any) -> bool:
    """Whether it is part of the model's own checkpoint."""
    return isinstance(each, nn.Module | Optimizer)


def _state_of(each: Any) -> Any:
    if isinstance(each, torch.Generator):
        return each.get_state()
    return each.state_dict() if _is_stateful(each) else each


def _is_stateful(each: Any) -> bool:
    return callable(getattr(each, "state_dict", None)) and callable(
        getattr(each, "load_state_dict", None)
    )
