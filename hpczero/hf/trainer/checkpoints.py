"""TrainerCheckpoints: the checkpoints of a ``HpczeroTrainer``, each one whole with the state of its trainer.

Owns: where they lie, which one a resume takes, which ones stay. Must not know: the training loop, callbacks.

transformers writes weights, optimizer, scheduler, random streams and ``trainer_state.json`` as files of their own, one
after the other. Here the state of the trainer is part of hpczero's checkpoint (``extra``), which is whole or not there.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn

import hpczero
from hpczero.checkpoint import Checkpoints, states
from hpczero.checkpoint.disk.folder import is_checkpoint, read_manifest
from hpczero.checkpoint.disk.format import step_folder
from hpczero.checkpoint.disk.json_keys import extra_of
from hpczero.checkpoint.places import CHECKPOINTS, GIVE, what_is_there
from hpczero.checkpoint.reading import find, load_one
from hpczero.errors import CheckpointMismatch, ConfigError
from hpczero.job.messages import Exchange

KEY = "trainer"  # in ``extra``
STATE_FILE = "trainer_state.json"  # transformers' name for it


class TrainerCheckpoints:
    """The checkpoints of one trainer. Methods are collective over the world."""

    def __init__(self, output_dir: str, exchange: Exchange) -> None:
        """Not collective.

        Args:
            output_dir: of the trainer; checkpoints lie in its folder ``checkpoints``.
            exchange: of the ranks.
        """
        self.folder = Path(output_dir).absolute() / CHECKPOINTS
        self._exchange = exchange
        self._topology = exchange.topology
        self._open: Checkpoints | None = None
        self._streams: dict[str, Any] = {}

    # --- which one

    def path(self, step: int) -> Path:
        """Of the checkpoint of ``step``, which need not exist. Not collective."""
        return self.folder / step_folder(step)

    def exists(self, step: int) -> bool:
        """Whether rank 0 sees it, on every rank."""
        seen = self._topology.is_root and self.path(step).is_dir()
        return bool(self._exchange.of_root(seen, "look for a checkpoint"))

    def to_resume(self, asked: str | Path | bool) -> list[Path]:
        """Checkpoints that ``resume_from_checkpoint`` may mean, best first, as rank 0 sees them.

        Args:
            asked: True for those of the output folder; or a folder of checkpoints, one of them, or an output folder.

        Raises:
            ConfigError: there is none; the message says what is there.
        """
        place = self.folder if asked is True else Path(str(asked))
        found, _ = find(place, self._topology, own=asked is True)
        text = ""
        if not found and self._topology.is_root:
            plain = next(place.parent.glob("checkpoint-*"), None) if asked is True else None
            own = " (a checkpoint-... of plain Trainer has no shards: load its weights with from_pretrained)"
            said = own if plain or (place / STATE_FILE).exists() else ""
            text = f"{place}: no checkpoint there: {what_is_there(place)}{said}; {GIVE}"
        text = self._topology.broadcast_text(text)
        if text:
            error = ConfigError(f"resume_from_checkpoint: {text}")
            error.agreed = True
            raise error
        return found

    def state_of(self, path: Path) -> str:
        """The state of trainer and callbacks, as ``save`` was given it, read by rank 0 without the model.

        Raises:
            CorruptCheckpoint: it is not sound.
            CheckpointMismatch: it is no trainer's, or a later version wrote it.
        """
        text = ""
        with self._topology.agreed("read the state of the trainer"):
            if self._topology.is_root:
                found = extra_of(read_manifest(path).meta).get(KEY)
                if not isinstance(found, Mapping) or not {"state", "scheduler"} <= set(found):
                    raise CheckpointMismatch(
                        f"{path}: holds no state of a trainer, so another program has written it; build the model, "
                        "and give its weights to the trainer"
                    )
                text = str(found["state"])
        return self._topology.broadcast_text(text)

    @contextmanager
    def unpacked(self, path: Path) -> Iterator[str]:
        """A folder of this rank's own with the file that transformers reads the state of the trainer from.

        Raises:
            CorruptCheckpoint, CheckpointMismatch: as of ``state_of``.
        """
        state = self.state_of(path)
        with tempfile.TemporaryDirectory(prefix="hpczero-trainer-") as folder:
            (Path(folder) / STATE_FILE).write_text(state, encoding="utf-8")
            yield folder

    # --- in and out

    def load(self, path: Path, model: nn.Module) -> dict[str, Any]:
        """Make ``model``, its optimizer and the random streams what they were, and return ``trainer``.

        Raises:
            CorruptCheckpoint: it is not sound.
            CheckpointMismatch: it is of another model or optimizer.
        """
        found = load_one(path, hpczero.sharding(model), asked_for=True)
        self._streams = states.capture()
        state: dict[str, Any] = found.extra[KEY]
        return state

    def restore_streams(self) -> None:
        """Continue the random streams from where ``load`` left them: skipping data draws from them. Not collective."""
        if self._streams:
            states.restore(self._streams)

    def load_weights(self, path: Path, model: nn.Module) -> None:
        """As ``load``, with the random streams left as they are."""
        before = states.capture()
        load_one(path, hpczero.sharding(model), asked_for=True)
        states.restore(before)

    def begin(self, model: nn.Module) -> None:
        """A training that does not go on from a checkpoint of this folder; the next save sets aside what is there."""
        hpczero.sharding(model).lineage.pop(self.folder.resolve(), None)

    def save(
        self,
        model: nn.Module,
        step: int,
        trainer: Mapping[str, Any],
        *,
        limit: int | None,
        best: Path | None,
    ) -> Path:
        """Write the checkpoint of ``step``, and remove old ones.

        Args:
            model: zeroified.
            step: optimizer steps done.
            trainer: what ``load`` returns.
            limit: newest checkpoints that stay, ``best`` among them; None removes none.
            best: stays in any case.

        Returns:
            Its folder.

        Raises:
            CheckpointError: as of ``hpczero.checkpoint.save``.
        """
        if self._open is None:
            self._open = Checkpoints(self.folder, model)
            if self.folder.resolve() not in hpczero.sharding(model).lineage:
                self._open.set_others_aside()
        path = self._open.save(step, {KEY: dict(trainer)})
        if limit is not None and limit > 0 and self._topology.is_root:
            self._retain(self._open, limit, best)
        return path

    @staticmethod
    def _retain(checkpoints: Checkpoints, limit: int, best: Path | None) -> None:
        newest = [path for path, _ in checkpoints.folder.valid()][:limit]
        outside = best is not None and best.is_dir() and best not in newest
        checkpoints.folder.retain(limit - 1 if outside else limit, best)

    def __enter__(self) -> TrainerCheckpoints:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._open is not None:
            self._open.__exit__(kind, error, trace)
            self._open = None


def is_ours(path: str | Path) -> bool:
    """Whether a folder holds a checkpoint of hpczero's. Not collective."""
    return is_checkpoint(Path(path))
