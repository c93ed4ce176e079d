"""save: the public call, and the checkpoints of one run, with saves in the background under one lock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from hpczero.checkpoint.disk.folder import Folder, given_path, read_manifest
from hpczero.checkpoint.disk.format import SLAB_NBYTES, step_folder
from hpczero.checkpoint.disk.lines import strangers
from hpczero.checkpoint.disk.lock import Lock
from hpczero.checkpoint.inventory import Inventory
from hpczero.checkpoint.reading import Given, Loaded, given_sharding, load_newest_at
from hpczero.checkpoint.snapshot import META, Snapshot, take
from hpczero.checkpoint.writing import BackgroundWrite, Milestone, wait_for_left, write
from hpczero.comm.background import can_run_in_background
from hpczero.errors import CheckpointMismatch, CheckpointNotWritten, ConfigError, CorruptCheckpoint
from hpczero.files.regular import shown
from hpczero.job.topology import Topology


def check_replaced(path: Path, snapshot: Snapshot) -> None:
    """Refuse to replace the checkpoint ``path`` by weights alone, or by trained parameters alone, if it holds more.

    Raises:
        ConfigError: it does.
    """
    with suppress(CorruptCheckpoint, CheckpointMismatch):  # which nobody can go on from, or none
        saved = read_manifest(path)
        if META in snapshot.meta and any(row.frozen for row in saved.table.rows):
            raise ConfigError(
                f"{path}: holds frozen parameters too, and a checkpoint of the trained ones alone would take its "
                "place; save to another directory or another step"
            )
        optimizer = saved.meta.get("optimizer")
        if snapshot.meta["optimizer"] is None and optimizer is not None:
            raise ConfigError(
                f"{path}: holds the state of {optimizer['class']}, and this model was zeroified without an optimizer: "
                "a checkpoint of weights alone would take its place; save to another directory or another step"
            )


def save(
    directory: str | Path,
    model: nn.Module,
    optimizer: Given = None,
    *,
    step: int,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
    writer: str = "auto",
    parameters: str = "all",
) -> Path:
    """Write ``directory/step-...``: a whole checkpoint, or none. Collective over the topology's world.

    A checkpoint in ``directory`` that is not of the model's line is set aside by the same rename that brings in the new
    one. If the model was loaded or saved in ``directory``, these are the checkpoints newer than the last such one.
    Otherwise they are those of this step and later, and all of them with ``keep``. They are kept in
    ``directory/aside-...``, and a line is logged.

    Args:
        directory: of all checkpoints of a run; made if it does not exist.
        model: zeroified, between two steps.
        optimizer: the one it was zeroified with, or a tuple or list of them; None takes those too.
        step: optimizer steps done.
        extra: what ``load`` gives back, equal on all ranks: ``{"scheduler": scheduler.state_dict(), "loader":
            loader.state_dict(), "generator": generator.get_state()}``. It may hold numbers, texts, tensors of up to 1
            MiB, lists, tuples and dictionaries. Keys may be numbers, None and texts.
        keep: newest checkpoints that stay, counted among those of the model's line; None removes none.
        writer: ``mpio`` (parallel HDF5), ``posix`` (the same file without MPI-IO), or ``auto``: ``mpio`` on parallel
            file systems where it is safe.
        parameters: ``all``, or ``trained``, without frozen ones. ``load`` then leaves these as they are, and refuses a
            model in which they have other values than at the save.

    Returns:
        The folder of the checkpoint.

    Raises:
        ConfigError: ``step`` or ``extra`` cannot be saved, or differs between ranks; or the checkpoint of this step in
            ``directory`` holds the state of an optimizer, or frozen parameters, and this one would not.
        CheckpointBusy: another job writes to ``directory``.
        CheckpointError: it could not be written; on every rank, and older checkpoints are as they were.
    """
    with Checkpoints(
        directory, model, optimizer, keep=keep, writer=writer, parameters=parameters
    ) as checkpoints:
        return checkpoints.save(step, extra)


class Checkpoints:
    """The checkpoints of one run. Use it as a context manager. Methods are collective over the topology's world.

    Attributes:
        folder: of all checkpoints; rank 0 alone changes it, between a save and ``close``.
    """

    def __init__(
        self,
        directory: str | Path,
        model: nn.Module,
        optimizer: Given = None,
        *,
        keep: int | None = None,
        background: bool = False,
        writer: str = "auto",
        parameters: str = "all",
        slab_nbytes: int = SLAB_NBYTES,
        at: Milestone = lambda name: None,
        lock: Lock | None = None,
    ) -> None:
        """Not collective.

        Args:
            directory: as in ``save``.
            model: as in ``save``.
            optimizer: as in ``save``.
            keep: as in ``save``.
            background: whether to write while training goes on. It needs memory for a copy of this rank's shards, and
                an MPI that lets two threads call it.
            writer: as in ``save``; in the background always ``posix``.
            parameters: as in ``save``.
            slab_nbytes: bytes that one digest covers.
            at: told of every milestone of a save, on every rank.
            lock: of ``directory``, which the caller holds on rank 0 all the while. None takes one at the first save.

        Raises:
            ConfigError: there is no such writer, ``keep`` is below 1, or ``parameters`` is neither word.
        """
        if parameters not in ("all", "trained"):
            raise ConfigError(f"parameters: got {parameters!r}, expected all or trained")
        if writer not in ("auto", "mpio", "posix"):
            raise ConfigError(f"writer: got {writer!r}, expected auto, mpio or posix")
        if keep is not None and not (type(keep) is int and keep >= 1):
            raise ConfigError(
                f"keep: got {shown(keep)}, expected a whole number, at least 1, or None"
            )
        self.folder = Folder(given_path(directory))
        self._sharding = given_sharding(model, optimizer)
        self._keep = keep
        self._writer = writer
        self._slab_nbytes = slab_nbytes
        self._at = at
        self._only_trained = parameters == "trained"
        self._inventory: Inventory | None = None  # the same for every save with this plan
        self._lock = lock or Lock(self.folder.path)
        self._lent = lock is not None
        self._locked = False
        self._background = (
            BackgroundWrite(self._sharding.topology)
            if background and can_run_in_background()
            else None
        )

    def save(self, step: int, extra: Mapping[str, Any] | None = None) -> Path:
        """Save as ``hpczero.checkpoint.save`` does. Collective over world.

        With ``background`` it returns the folder of all checkpoints, once the shards are copied. An earlier save that
        is still being written is waited for, and its error raised.
        """
        with (topology := self._sharding.topology).watchdog.operation("a save of a checkpoint"):
            self.wait()
            self._sharding.unfreezing.settle()
            self._take()
            if self._inventory is None or self._inventory.plan is not self._sharding.plan:
                self._inventory = Inventory.create(self._sharding, only_trained=self._only_trained)
            snapshot = take(
                self._sharding,
                step=step,
                extra=extra or {},
                slab_nbytes=self._slab_nbytes,
                inventory=self._inventory,
            )
            with topology.agreed("see which checkpoint it takes the place of"):
                if topology.is_root:
                    check_replaced(self.folder.path / step_folder(step), snapshot)
            if self._background is None:
                return self._writing(snapshot, self._writer)(topology)
            with topology.agreed("copy the shards"):
                snapshot = snapshot.copied()
            self._background.start(self._writing(snapshot, "posix"))
            return self.folder.path

    def _take(self) -> None:
        """Take the lock of the folder, and finish what a killed job has left there. Collective."""
        if self._locked:
            return
        topology = self._sharding.topology
        wait_for_left()  # or their lock would keep us out
        with topology.agreed("lock the folder of checkpoints"):
            if topology.is_root:
                if not self._lent:
                    self._lock.acquire()
                try:
                    self.folder.sweep()
                except BaseException:
                    self._let_go()
                    raise
        self._locked = True

    def _let_go(self) -> None:
        if not self._lent and self._sharding.topology.is_root:
            self._lock.release()

    def _writing(self, snapshot: Snapshot, writer: str) -> Callable[[Topology], Path]:
        """The call that writes ``snapshot``.

        It remembers the lineage: a load in the meantime changes the model's, not the snapshot's.
        """
        lineage = self._sharding.lineage

        def run(topology: Topology) -> Path:
            path = write(
                snapshot,
                self.folder,
                topology,
                writer=writer,
                keep=self._keep,
                at=self._at,
                still_ours=self._lock.check,
                lineage=lineage,
            )
            lineage[self.folder.path.resolve()] = snapshot.step
            return path

        return run

    @property
    def busy(self) -> bool:
        """Whether a save is being written in the background. Not collective."""
        return self._background is not None and self._background.busy

    def check(self) -> Path | None:
        """The checkpoint that was finished in the background since the last call, or None. Call it between steps.

        Collective over world.

        Raises:
            CheckpointError: it could not be written; on every rank at the same step.
        """
        if self._background is None or not self._background.busy:
            return None
        writes = self._sharding.topology.world.largest(int(not self._background.done))
        return None if writes else self.wait()

    def wait(self) -> Path | None:
        """Return when nothing is being written, with the result of ``check``. Collective over world."""
        if self._background is None or not self._background.busy:
            return None
        topology = self._sharding.topology
        with topology.agreed("finish the checkpoint in the background"):
            return self._background.finish()

    def load(self, path: str | Path | None = None) -> Loaded | None:
        """Load the newest sound checkpoint; None if there is none at all. Collective over world.

        It loads as ``hpczero.checkpoint.load`` does. A save that is still being written is waited for, and its error
        raised.

        Args:
            path: another checkpoint to load, also of another folder. Newer checkpoints of this folder are then no
                longer of this run's line; the next save sets them aside, and says so.
        """
        self.wait()
        place = self.folder.path if path is None else given_path(path)
        return load_newest_at(place, self._sharding, own=path is None)

    def set_others_aside(
        self,
        *,
        moved: Sequence[Path] = (),
        copied: Sequence[Path] = (),
        even_alone: bool = False,
        before: Callable[[], None] = lambda: None,
    ) -> Path | None:
        """Set aside what is not of the model's line now, instead of at the next save. Collective over world.

        That is everything newer than the checkpoint of this folder that was loaded last; everything, if none was.

        Args:
            moved: files that are moved with them, if they exist.
            copied: files of which a copy goes with them.
            even_alone: whether the files go even if there is no checkpoint to set aside.
            before: called on rank 0 once the files are kept, and before the checkpoints cease to count.

        Returns:
            The folder they are in now, on rank 0; None if there is nothing to set aside, and on other ranks.

        Raises:
            CheckpointBusy: another job writes to the folder.
            CheckpointError: the folder cannot be written.
        """
        topology = self._sharding.topology
        self.wait()
        self._take()
        place = None
        with topology.agreed("set aside what is not of this run's line"):
            if topology.is_root:
                origin = self._sharding.lineage.get(self.folder.path.resolve())
                found = strangers(self.folder.candidates(), step=origin or 0, origin=origin, keep=1)
                files = [*moved, *copied] if even_alone else []
                if found or any(file.is_file() for file in files):
                    self._lock.check()
                    try:
                        place = self.folder.set_aside(
                            found, moved=moved, copied=copied, before=before
                        )
                    except OSError as error:
                        raise CheckpointNotWritten(
                            f"{self.folder.path}: what is not of this run's line cannot be set aside ({error}); "
                            "check space, quota and permissions"
                        ) from error
        return place

    def close(self) -> None:
        """Wait for a save that is being written, and release the lock. Collective over world."""
        try:
            self.wait()
        finally:
            if self.busy:  # an exception came while it waited; communicator and lock are in use
                self._leave()
            elif self._background is not None:
                self._background.close()
            self._give_back()

    def _leave(self) -> None:
        assert self._background is not None, "busy"
        self._lock.stay()
        self._background.leave(self._lock.leave)

    def _give_back(self) -> None:
        if self._locked:
            self._let_go()
        self._locked = False

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or getattr(error, "agreed", False):
            self.close()
            return
        # Peers may not come to a collective any more. If this exception ends the job, the lock ends with it.
        if self.busy:
            self._leave()
        self._give_back()
