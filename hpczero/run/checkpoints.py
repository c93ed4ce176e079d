"""The checkpoints of a training run: where it begins, when it saves, what a failed save means."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

import hpczero
from hpczero.checkpoint import Checkpoints, Loaded, load
from hpczero.checkpoint.buddy import MemoryCopies
from hpczero.checkpoint.disk.lines import homes
from hpczero.checkpoint.disk.lock import Lock
from hpczero.errors import CheckpointNotWritten, CorruptCheckpoint
from hpczero.files.direct import stripe
from hpczero.options.config import ResumeOptions, RunConfig
from hpczero.run.results.folder import RunFolder
from hpczero.run.results.weights import step_of_weights
from hpczero.run.starting import resume
from hpczero.run.stopping import Wish

logger = logging.getLogger("hpczero.checkpoints")

ASSUMED_NBYTES_PER_S = 1e9  # of a file system on which this job has not saved yet
STATE_NBYTES = 12  # of a parameter, at any stage and precision: fp32 value and two moments


@dataclass(frozen=True)
class Start:
    """Where a run begins.

    Attributes:
        step: steps done. It may be all of them: the run's last checkpoint exists, and its results do not.
        config: the options. They say where a run has begun that has no checkpoint of its own yet.
        resumed: whether a checkpoint was loaded.
        own: whether that checkpoint was this run's. Its metrics are then this run's too.
        in_memory: whether it was the copies in memory of the nodes.
        extra: what the checkpoint states beside the model.
    """

    step: int
    config: RunConfig
    resumed: bool = True
    own: bool = True
    in_memory: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)


class RunCheckpoints:
    """Checkpoints of one run; a context manager around its steps. Methods are collective over the topology's world."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        model: nn.Module,
        *,
        lock: Lock,
        copies: MemoryCopies,
    ) -> None:
        """Not collective.

        Args:
            config: has the batch spelled out.
            folder: of the run.
            model: zeroified.
            lock: of the folder; rank 0 holds it.
            copies: of the state in memory; it has looked for those of earlier starts.
        """
        self._copies = copies
        self._config = config
        self._folder = folder
        self._model = model
        self._topology = hpczero.sharding(model).topology
        options = config.checkpoint
        self._checkpoints = Checkpoints(
            folder.checkpoints,
            model,
            keep=options.keep,
            background=options.background,
            writer=options.writer,
            lock=lock,
        )
        self._saving = 0  # step of the latest save, which may be in flight
        self._started = 0.0
        numel = hpczero.sharding(model).plan.numel
        self._slowest_s: float | None = None
        self._assumed_s = numel * STATE_NBYTES / ASSUMED_NBYTES_PER_S

    @property
    def save_s(self) -> float:
        """Seconds that a save takes on this rank: the slowest so far, or an estimate. Not collective."""
        return self._assumed_s if self._slowest_s is None else self._slowest_s

    def __enter__(self) -> RunCheckpoints:
        stripes = self._config.checkpoint.stripes
        if stripes:  # equal on all ranks
            with self._topology.agreed("stripe the folder of checkpoints"):
                if self._topology.is_root:
                    stripe(self._folder.checkpoints, stripes)
        self._checkpoints.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._checkpoints.__exit__(*error)

    def begin(self, source: str, identity: Mapping[str, Any]) -> Start:
        """Load the checkpoint that the run goes on from, if there is one, and set aside what is not of its line.

        Collective over world. ``source`` is of ``resume.chosen``, ``identity`` of ``resume.identity``.

        Raises:
            ConfigError: the checkpoint belongs to another run, or has more steps than are asked for.
            CheckpointError: it cannot be loaded.
        """
        topology, folder = self._topology, self._folder
        if not source:
            self._copies.keep()
            return Start(0, self._config, resumed=False)
        in_memory = self._load_copies(source)
        found = in_memory or load(source, self._model)
        said = ""
        with topology.agreed("look whose checkpoint it is"):
            if topology.is_root:
                said = (
                    "own" if in_memory or folder.checkpoints.resolve() in homes(found.path) else ""
                )
        own = bool(topology.broadcast_text(said))
        with topology.agreed("compare the checkpoint with the run"):
            resume.check(found, identity, self._config.train.steps, own=own)
        if in_memory:
            self._copies.keep_found()
            self._tell(
                f"going on from the copies in memory of {topology.num_nodes} node(s): step {found.step}, made by "
                f"{found.world_size} rank(s)"
            )
        else:
            self._copies.keep()  # or a later start would take them for newer than what follows here
        if found.imported:
            self._tell(f"beginning at step {found.step} with the imported weights of {found.path}")
        elif not in_memory:
            self._tell(
                f"going on from {found.path}: step {found.step}, saved by {found.world_size} rank(s)"
            )
        results, records = (folder.weights, folder.plot), (folder.metrics, folder.config)
        if own:
            # Of steps that no checkpoint has, the model is all that is left.
            newer = topology.is_root and _is_newer(folder.weights, found.step)
            self._checkpoints.set_others_aside(moved=results, copied=records, even_alone=newer)
            # Given to the command again, the options of this run are to go on with it, not back again.
            config = replace(self._config, resume=ResumeOptions())
            return Start(found.step, config, in_memory=in_memory is not None, extra=found.extra)
        config = replace(self._config, resume=ResumeOptions(from_=source))
        # A start of it that came to its end has results, which are kept as those of any other run.
        unfinished = topology.is_root and not folder.weights.exists()
        again = unfinished and resume.began_at(Path(source), folder)
        self._checkpoints.set_others_aside(
            moved=() if again else results,
            copied=() if again else records,
            even_alone=True,
            # First: with nothing of its own, the next start must know where this one has begun.
            before=lambda: folder.write_config(config),
        )
        return Start(found.step, config, own=False, extra=found.extra)

    def _load_copies(self, source: str) -> Loaded | None:
        """Load the copies in memory, unless there are none, or the disk has a later step. Collective over world.

        The disk is asked for names alone: no file of a checkpoint is opened.

        Raises:
            CorruptCheckpoint: they are damaged, and no checkpoint is on the disk.
            CheckpointMismatch: as ``load``.
        """
        topology, step = self._topology, self._copies.step
        if not step or Path(source) != self._folder.checkpoints:
            return None
        newest = 0
        with topology.agreed("look for checkpoints"):
            if topology.is_root:
                newest = self._folder.newest_step()
        newest = topology.world.largest(newest)
        if newest > step:
            self._tell(f"the copies in memory are of step {step}; step {newest} is on the disk")
            return None
        sharding = hpczero.sharding(self._model)
        try:
            found = self._copies.load(sharding)
        except (CorruptCheckpoint, CheckpointNotWritten) as error:
            self._copies.keep()
            if not newest:
                raise CorruptCheckpoint(
                    f"{error}; no checkpoint is on the disk, and the copies in memory are removed now. Begin anew with "
                    "--run.overwrite true, or choose another --run.name"
                ).on_all_ranks() from error
            if topology.is_root:
                logger.warning("the copies in memory of step %d are not used: %s", step, error)
            return None
        # As if it had been saved there: what comes next is of the line of the checkpoints before.
        sharding.lineage = {self._folder.checkpoints.resolve(): found.step}
        if topology.is_root and topology.num_nodes < 2:
            logger.warning("one node is left: from here on no copies are made in memory")
        return found

    def is_copied(self, done: int, wish: Wish) -> bool:
        """Whether ``after_step`` will make copies in memory. Not collective."""
        last = done == self._config.train.steps
        return self._copies.is_due(done) and not last and wish is not Wish.STOP

    def forget_copies(self) -> None:
        """Remove the copies in memory, once the results are on the disk. Not collective."""
        self._copies.keep()

    def is_due(self, done: int, wish: Wish) -> bool:
        """Whether ``after_step`` will save. Not collective."""
        every, last = self._config.checkpoint.every, done == self._config.train.steps
        return wish is not Wish.NOTHING or (every > 0 and (last or done % every == 0))

    def after_step(
        self, done: int, position: Mapping[str, Any], wish: Wish, *, final: bool = False
    ) -> None:
        """Save if it is due or wished for. Logs a save in the background that has ended. Collective over world.

        ``position`` is what ``begin`` will need, and the place in the data. ``final``: no step follows.

        Raises:
            CheckpointNotWritten: a save failed that is required, or after which the run stops.
        """
        if self.is_copied(done, wish):
            self._copy(done, position)
        last, due = final or done == self._config.train.steps, self.is_due(done, wish)
        # Here and not in ``save`` or at the end: an earlier one that fails there would take this one, or the results
        # of the run, with it; and what it has made is told under its own step.
        hear = self._checkpoints.wait if due or last else self._checkpoints.check
        self._attempt(hear, required=False)
        if not due:
            return
        self._saving, self._started = done, time.monotonic()
        self._attempt(lambda: self._checkpoints.save(done, position), required=wish is Wish.STOP)
        if wish is Wish.STOP or last:
            self._attempt(self._checkpoints.wait, required=wish is Wish.STOP)

    def _copy(self, done: int, position: Mapping[str, Any]) -> None:
        try:
            self._copies.save(hpczero.sharding(self._model), done, position)
        except CheckpointNotWritten as error:
            if self._config.checkpoint.required:
                raise
            if self._topology.is_root:
                logger.warning("step %d: no copies in memory: %s", done, error)

    def _attempt(self, act: Callable[[], Path | None], *, required: bool) -> None:
        try:
            path = act()
        except CheckpointNotWritten as error:
            if required or self._config.checkpoint.required:
                raise
            if self._topology.is_root:
                logger.warning("step %d: no checkpoint: %s", self._saving, error)
            return
        if path is not None and not self._checkpoints.busy:
            self._slowest_s = max(self._slowest_s or 0.0, time.monotonic() - self._started)
            self._tell(f"saved {path}")

    def _tell(self, what: str) -> None:
        if self._topology.is_root:
            logger.info("%s", what)


def _is_newer(weights: Path, step: int) -> bool:
    """Whether a model exists that has more than ``step`` steps, or whose steps are unknown."""
    if not weights.exists():
        return False
    found = step_of_weights(weights)
    return found is None or found > step
