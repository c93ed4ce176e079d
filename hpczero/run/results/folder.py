"""The folder of a run: what its files are called, and what becomes of an older run.

No checkpoint or model of an older run is deleted unasked. Only rank 0 writes, under the lock of the run.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from hpczero.checkpoint.disk.folder import CHECKPOINTS, STALE_S, Folder
from hpczero.checkpoint.disk.format import step_of_folder
from hpczero.errors import ConfigError
from hpczero.files.durable import remove, remove_left_over, sync, write_text
from hpczero.files.regular import WHY, Explained, kind_of, read_bytes
from hpczero.options.config import DEFAULT_RUN, RunConfig, RunOptions
from hpczero.options.reading import to_toml
from hpczero.trackers import KNOWN

logger = logging.getLogger("hpczero.runs")


class RunFolder:
    """``<folder>/<name>`` and the files in it.

    Attributes:
        path: the folder; it need not exist.
        config: file of the resolved options; the train command takes it as a configuration.
        metrics: file of the metrics, one JSON line per step.
        digests: file of what ``python -m hpczero.replay`` compares, one JSON line per digested step.
        attempts: file with one JSON line per start of the run, per warning, and per end.
        weights: file of the final weights.
        plot: file of the loss curves.
        page: file that a browser shows while the run goes on.
        trackers: file of the ids under which trackers know the run.
        tensorboard: folder of TensorBoard event files.
        profile: folder of profiles of steps.
        checkpoints: folder of checkpoints.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.metrics = path / "metrics.jsonl"
        self.digests = path / "digests.jsonl"
        self.attempts = path / "attempts.jsonl"
        self.weights = path / "model.safetensors"
        self.plot = path / "loss.png"
        self.page = path / "watch.html"
        self.trackers = path / KNOWN
        self.tensorboard = path / "tensorboard"
        self.profile = path / "profile"
        self.checkpoints = path / CHECKPOINTS

    @classmethod
    def of(cls, options: RunOptions) -> RunFolder:
        """The folder that a run writes to; it need not exist."""
        return cls(options.path)

    @property
    def has_checkpoints(self) -> bool:
        """Whether the folder has anything that may be a checkpoint."""
        return bool(Folder(self.checkpoints).candidates())

    @property
    def holds_results(self) -> bool:
        """Whether the folder has anything that took a run to make: checkpoints, final weights or metrics."""
        return self._holds_saves or self._holds_metrics

    @property
    def holds_other_results(self) -> bool:
        """Whether the folder has anything that took a run to make and is not a checkpoint that counts."""
        aside = any(self.checkpoints.glob("aside-*"))
        return aside or self.weights.exists() or self._holds_metrics

    @property
    def _holds_saves(self) -> bool:
        return (
            self.weights.exists() or self.has_checkpoints or any(self.checkpoints.glob("aside-*"))
        )

    @property
    def _holds_metrics(self) -> bool:
        return self.metrics.is_file() and self.metrics.stat().st_size > 0

    def newest_step(self) -> int:
        """Step of the newest checkpoint by its name, 0 if there is none."""
        steps = (step_of_folder(path.name) for path in Folder(self.checkpoints).candidates())
        return next((step for step in steps if step is not None), 0)

    def check(self) -> None:
        """Refuse a folder in which something else is where we read and write.

        A FIFO, for one, makes its reader wait for ever. A folder that has checkpoints directly in it and no run is
        refused too: the run would not see them, and would begin with random weights.

        Raises:
            ConfigError: the message says what is there.
            CorruptCheckpoint: as ``Folder.candidates``.
        """
        files = [self.config, self.metrics, self.digests, self.attempts, self.weights]
        files += [self.plot, self.page, self.trackers]
        folders = [self.path, self.checkpoints, self.tensorboard, self.profile]
        with self.writing():
            for path in (*folders, *files):
                kind, expected = kind_of(path), "a directory" if path in folders else "a file"
                if kind not in ("", "a link to nothing", expected):
                    raise ConfigError(
                        f"{path}: is {kind}, expected {expected}; move it away, or choose another --run.name"
                    )
            beside = Folder(self.path).candidates()
            if beside and not self._holds_saves:
                raise ConfigError(
                    f"{self.path}: holds {beside[0].name} itself, as an import or a program of your own has put it "
                    f"there, and a run looks in {self.checkpoints} alone. To begin with it, give --resume.from "
                    f"{beside[0]} and another --run.name; to begin without it, another --run.name"
                )

    def go_on(self, config: RunConfig) -> None:
        """Write ``config`` into the folder of a run that is resumed. Not collective: rank 0 calls it."""
        with self.writing():
            self._make()
            self.weights.unlink(missing_ok=True)
            self.write_config(config)

    def _make(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        # The lock may have made them a moment ago.
        for parent in (self.path.parent, self.path.parent.parent):
            with suppress(OSError):  # of one that may not be read, the system takes care
                sync(parent)

    def create(self, config: RunConfig) -> None:
        """Make the folder with ``config`` in it, without what an older run has left. Not collective: rank 0 calls it.

        Raises:
            ConfigError: it holds an older run that may not be replaced, or it cannot be written.
        """
        with self.writing():
            self._make()
        self.refuse_older(config.run)
        with self.writing():
            # First: without it, what a kill leaves here is taken for nobody's, and not gone on with.
            self.config.unlink(missing_ok=True)
            if self._holds_metrics and not self._holds_saves:
                # Nobody asked for that: a job that was killed before its first save is begun anew by itself.
                kept = _free_name(self.path, f"{self.metrics.name}.unsaved-{_date()}")
                self.metrics.rename(kept)
                said = "%s: of an earlier start that saved nothing; kept in %s"
                logger.warning(said, self.metrics, kept.name)
            # Only what a run writes: the user may keep other things here.
            drawn = (self.plot, self.page)
            for file in (self.metrics, self.digests, *drawn, self.weights, self.trackers):
                file.unlink(missing_ok=True)
            if config.run.overwrite and self.attempts.exists():
                _keep_series(self.attempts, self.attempts)
            for written in (self.tensorboard, self.profile):
                shutil.rmtree(written, ignore_errors=True)
            found = Folder(self.checkpoints).candidates()
            if found:
                logger.info("%s: deleting %d checkpoint(s), as asked", self.path, len(found))
            (self.checkpoints / "LATEST").unlink(missing_ok=True)
            for entry in found:
                remove(entry)
            self.write_config(config)

    def refuse_older(self, options: RunOptions) -> None:
        """Refuse to begin a run where an older one is, unless that may be replaced. Nothing is changed.

        Raises:
            ConfigError: the message says what is there.
        """
        earlier = self.config.exists()
        holds = self.holds_results or (earlier and options.name != DEFAULT_RUN)
        if holds and not options.overwrite:
            what = "checkpoints, a model or metrics, and no config.toml"
            if earlier:
                what = "an earlier run and no checkpoint to go on from"
            raise ConfigError(
                f"{self.path}: holds {what}; choose another --run.name, or replace it with --run.overwrite true"
            )

    def move_aside(self) -> RunFolder:
        """Rename the folder, with all that is in it, to a name with the date. Not collective: rank 0 calls it."""
        name = _free_name(self.path.parent, f"{self.path.name}-{_date()}")
        with self.writing():
            return RunFolder(self.path.rename(name))

    def inherit_attempts(self, old: RunFolder) -> None:
        """Copy the record of earlier starts out of a folder that was moved. Not collective: rank 0 calls it."""
        if old.attempts.exists():
            with self.writing():
                self.path.mkdir(parents=True, exist_ok=True)
                _keep_series(old.attempts, self.attempts)

    def write_config(self, config: RunConfig) -> None:
        """Replace the options. A run that is killed meanwhile still has the old ones or the new ones.

        They are kept without ``run.overwrite``, which was meant for an older run. Given to the command again, they go
        on with this run.

        Raises:
            OSError: the folder cannot be written.
        """
        kept = replace(config, run=replace(config.run, overwrite=False))
        write_text(self.config, to_toml(kept))
        sync(self.path)

    def sweep(self) -> None:
        """Remove what a killed job has left of writing small files, if it is old. Not collective: rank 0 calls it."""
        names = (self.config.name, self.metrics.name, self.page.name)
        remove_left_over(self.path, names, age_s=STALE_S)

    def writing(self) -> Explained:
        """Context around writes to the folder: an error of the system becomes a ConfigError."""
        text = f"{self.path}: cannot be written as a run folder: {WHY}; choose another --run.folder"
        return Explained(ConfigError, text)


def _keep_series(record: Path, to: Path) -> None:
    """Write to ``to`` what ``record`` says of starts in a series: other starts were of the run that is replaced."""
    lines = read_bytes(record).splitlines(keepends=True)
    kept = [line for line in lines if b'"series": ""' not in line]
    write_text(to, b"".join(kept).decode("utf-8", "replace"))


def _date() -> str:
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())


def _free_name(folder: Path, name: str) -> Path:
    """A name in ``folder`` that does not exist: ``name``, or that with a number."""
    found, number = folder / name, 1
    while os.path.lexists(found):
        number += 1
        found = folder / f"{name}-{number}"
    return found
