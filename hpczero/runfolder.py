"""The folder of a run: what its files are called, and when an older run may be replaced.

Owns: names and the guard against overwriting. Must not know: MPI, torch, what the files hold. Only rank 0 writes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hpczero.checkpoint.folder import Folder
from hpczero.checkpoint.format import step_of_folder
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

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def has_checkpoints(self) -> bool:
        """Whether there is something that may be a checkpoint."""
        return any(self.checkpoints.glob("step-*")) or any(self.checkpoints.glob(".replaced-*"))

    @property
    def attempts(self) -> Path:
        """One JSON line per start and end, of jobs that follow one another."""
        return self.path / "attempts.jsonl"

    def newest_step(self) -> int:
        """Step of the newest checkpoint, 0 if there is none; nothing is read."""
        for path in Folder(self.checkpoints).candidates():
            step = step_of_folder(path.name)
            if step is not None:
                return step
        return 0

    def go_on(self, config: str) -> None:
        """Write ``config`` into the folder of a run that is taken up again. On one rank only.

        Raises:
            ConfigError: the folder cannot be written.
        """
        with self.writing():
            self.path.mkdir(parents=True, exist_ok=True)
            self.weights.unlink(missing_ok=True)
            self._write_config(config)

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
        with self.writing():
            self.path.mkdir(parents=True, exist_ok=True)
            # Only what a run writes: the user may keep other things here.
            for file in (self.metrics, self.plot, self.weights):
                file.unlink(missing_ok=True)
            shutil.rmtree(self.tensorboard, ignore_errors=True)
            for pattern in ("step-*", ".replaced-step-*", ".tmp-step-*", "LATEST"):
                for entry in self.checkpoints.glob(pattern):
                    if entry.is_dir():
                        shutil.rmtree(entry)
                    else:
                        entry.unlink()
            self._write_config(config)

    def _write_config(self, config: str) -> None:
        temporary = self.config.with_suffix(".toml.new")
        temporary.write_text(config, encoding="utf-8")
        temporary.replace(self.config)  # a run that is killed here must still have its options

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Around what writes here: the system's errors become a ConfigError."""
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"{self.path}: cannot be written as a run folder: {os.strerror(error.errno or 0)}; "
                "choose another --run.folder"
            ) from error
