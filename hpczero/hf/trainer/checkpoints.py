"""TrainerCheckpoints: the checkpoints of a ``HpczeroTrainer``, each one whole with the state of its trainer.

transformers writes weights, optimizer, scheduler, random streams and ``trainer_state.json`` as files of their own, one
after the other. Here the state of the trainer is part of hpczero's checkpoint (``extra``), which is whole or not there.
"""

from __future__ import annotations

import importlib
import logging
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from transformers.trainer_utils import sort_checkpoints

import hpczero
from hpczero.checkpoint import Checkpoints, states
from hpczero.checkpoint.disk.folder import CHECKPOINTS, GIVE, read_manifest, what_is_there
from hpczero.checkpoint.disk.format import step_folder
from hpczero.checkpoint.disk.json_keys import extra_of
from hpczero.checkpoint.foreign.safe_file import INDEX_FILE, SINGLE
from hpczero.checkpoint.reading import find, load_one
from hpczero.errors import CheckpointMismatch, ConfigError
from hpczero.files.durable import Hidden, sync
from hpczero.hf.files import ADAPTER_CONFIG, HIDDEN
from hpczero.job.messages import ChunkedExchange

# Weights: folders of whole weights as they take the place of earlier ones.
#
# [Note: Killed between two files]
# Programs find weights by one file: the single one, the index of several, or the file of an adapter. The earlier one
# goes before anything else changes, and the new one comes last. In between nobody can load the folder, so nobody loads
# files of two saves as one. What has not come yet lies in the hidden folder, which was whole before the first file was
# moved.

ADAPTER = "adapter_model.safetensors"
DOORS = (INDEX_FILE, SINGLE, ADAPTER, "adapter_model.bin")  # see [Note: Killed between two files]
CARD = "README.md"  # to which peft adds
_PART = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")

logger = logging.getLogger("hpczero.hf")


def make_room(place: Path) -> None:
    """Remove what killed saves have left in ``place``."""
    for left in (place / HIDDEN, *place.glob(f".{HIDDEN}.*")):
        shutil.rmtree(left, ignore_errors=True)


def write_hidden(place: Path, write: Callable[[str], None]) -> None:
    """Have ``write`` fill the hidden folder of ``place``, given its path; it is there whole or not at all."""
    with Hidden(place / HIDDEN) as hidden:
        hidden.path.mkdir()
        if (place / CARD).is_file():
            shutil.copy2(place / CARD, hidden.path)
        write(str(hidden.path))
        hidden.commit()


def bring_in(place: Path) -> None:
    """Move what the hidden folder of ``place`` holds to where an earlier save may be, and checkpoints beside it.

    A job that is killed meanwhile leaves the earlier save, the new one, or a folder that nobody can load.
    """
    hidden = place / HIDDEN
    new = sorted(
        each.relative_to(hidden)
        for each in hidden.rglob("*")
        if each.is_symlink() or not each.is_dir()
    )
    doors = [each for each in new if each.name in DOORS]
    is_model = any(str(each) in (SINGLE, INDEX_FILE) for each in new)
    for door in (*doors, *(map(Path, (INDEX_FILE, SINGLE)) if is_model else ())):
        (place / door).unlink(missing_ok=True)
    sync(place)  # before a new file is there
    if is_model:
        for old in list(place.iterdir()):
            if _PART.fullmatch(old.name):
                old.unlink()
    for each in sorted(new, key=lambda name: name in doors):
        if each in doors:
            sync(place)
        (place / each).parent.mkdir(parents=True, exist_ok=True)
        (hidden / each).replace(place / each)
    shutil.rmtree(hidden)
    sync(place)
    if is_model and (place / ADAPTER_CONFIG).exists():
        logger.warning(
            "%s: holds %s of an earlier save, by which from_pretrained loads that adapter and its base instead of "
            "these weights; take it away",
            place,
            ADAPTER_CONFIG,
        )


def put_in_place(hidden: Path, target: Path) -> None:
    """Give a ``checkpoint-...`` its name, in place of an earlier one.

    What killed saves have left beside it goes too.
    """
    for left in target.parent.glob(".checkpoint-*"):
        if left != hidden:
            shutil.rmtree(left, ignore_errors=True)
    remove_whole(target)
    hidden.rename(target)


def rotate(folder: Path, limit: int | None, best: str | None) -> None:
    """Remove the oldest ``checkpoint-...`` in ``folder`` as transformers does, each at once.

    ``limit``: how many stay, at least the newest and the best; None and 0 remove none.
    """
    if limit is None or limit <= 0:
        return
    found = [Path(each) for each in sort_checkpoints(str(folder), use_mtime=True)]
    kept = {*found[-1:], *([] if best is None else [Path(best)])}
    number = max(0, len(found) - max(limit, len(kept)))
    for each in [each for each in found if each not in kept][:number]:
        remove_whole(each)


def remove_whole(folder: Path) -> None:
    """Remove a folder, which is not there under its name while files of it are."""
    aside = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    if folder.exists():
        folder.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def load_adapter(folder: Path, model: Any, exchange: ChunkedExchange) -> None:
    """Read the values of the active adapter of ``model``, of peft and zeroified, on rank 0. Collective over the world.

    The model is whole meanwhile.
    """
    topology, name = exchange.topology, model.active_adapter
    with hpczero.gathered(model, modifier_rank=0), topology.agreed("load the adapter"):
        if topology.is_root:
            peft: Any = importlib.import_module("peft")
            files: Any = importlib.import_module("safetensors.torch")
            place = folder if name == "default" else folder / name
            peft.set_peft_model_state_dict(model, files.load_file(place / ADAPTER), name)


KEY = "trainer"  # in ``extra``
STATE_FILE = "trainer_state.json"  # transformers' name for it


class TrainerCheckpoints:
    """The checkpoints of one trainer, in the folder ``checkpoints`` of its output.

    Methods are collective over the world.
    """

    def __init__(self, output_dir: str, exchange: ChunkedExchange) -> None:
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
            raise ConfigError(f"resume_from_checkpoint: {text}").on_all_ranks()
        return found

    @contextmanager
    def unpacked(self, path: Path) -> Iterator[str]:
        """A folder of this rank's own with the file that transformers reads the state of the trainer from.

        Raises:
            CorruptCheckpoint: the checkpoint is not sound.
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
        text = self._topology.broadcast_text(text)
        with tempfile.TemporaryDirectory(prefix="hpczero-trainer-") as folder:
            (Path(folder) / STATE_FILE).write_text(text, encoding="utf-8")
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
        """Write the checkpoint of ``step``, remove old ones, and return its folder.

        Args:
            model: zeroified.
            step: optimizer steps done.
            trainer: what ``load`` returns.
            limit: newest checkpoints that stay, ``best`` among them; None removes none.
            best: stays in any case.

        Raises:
            CheckpointError: as of ``hpczero.checkpoint.save``.
        """
        if self._open is None:
            self._open = Checkpoints(self.folder, model)
            if self.folder.resolve() not in hpczero.sharding(model).lineage:
                self._open.set_others_aside()
        path = self._open.save(step, {KEY: dict(trainer)})
        if limit is not None and limit > 0 and self._topology.is_root:
            newest = [path for path, _ in self._open.folder.valid()][:limit]
            outside = best is not None and best.is_dir() and best not in newest
            self._open.folder.retain(limit - 1 if outside else limit, best)
        return path

    def __enter__(self) -> TrainerCheckpoints:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._open is not None:
            self._open.__exit__(*error)
            self._open = None
