"""The folder of a run: what its files are called, and when an older run may be replaced.

Owns: names and the guard against overwriting. Must not know: MPI, torch, what the files hold. Only rank 0 writes.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from hpczero.config import DEFAULT_RUN, RunOptions
from hpczero.errors import ConfigError


@dataclass(frozen=True)
class RunFolder:
    """``<folder>/<name>`` and the files in it."""

    path: Path

    @classmethod
    def of(cls, options: RunOptions) -> RunFolder:
        """The folder that a run writes to; it need not exist."""
        return cls(Path(options.folder, options.name))

    @property
    def config(self) -> Path:
        """Resolved options; can be given to the train command again."""
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        """One JSON line per step."""
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """Folder of TensorBoard event files."""
        return self.path / "tensorboard"

    @property
    def plot(self) -> Path:
        """The loss curves."""
        return self.path / "loss.png"

    @property
    def weights(self) -> Path:
        """Final weights."""
        return self.path / "model.safetensors"

    def create(self, options: RunOptions, config: str) -> None:
        """Make the folder with ``config`` in it, clear of an older run's results. On one rank only.

        Raises:
            ConfigError: an older run is there and may not be replaced, or the folder cannot be written.
        """
        if self.config.exists() and not (options.overwrite or options.name == DEFAULT_RUN):
            raise ConfigError(
                f"{self.path}: holds an earlier run; choose another --run.name, or replace it with "
                "--run.overwrite true"
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # Only what a run writes: the user may keep other things here.
            for file in (self.metrics, self.plot, self.weights):
                file.unlink(missing_ok=True)
            shutil.rmtree(self.tensorboard, ignore_errors=True)
            self.config.write_text(config, encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"{self.path}: cannot be written as a run folder: {os.strerror(error.errno or 0)}; "
                "choose another --run.folder"
            ) from error
