"""One job at a time in a run folder, from before its first write there to after its last.

The lock is that of the run's checkpoints, so a program that writes checkpoints there keeps out of the rest too.
"""

from __future__ import annotations

import logging

from hpczero.checkpoint.disk.folder import Folder
from hpczero.checkpoint.disk.lock import BEAT_S, DEAD_S, Lock
from hpczero.errors import CheckpointNotWritten
from hpczero.job.topology import Topology
from hpczero.options.config import DEFAULT_RUN, RunOptions
from hpczero.options.environment import Environment
from hpczero.run.results.folder import RunFolder

logger = logging.getLogger("hpczero.runs")


class RunLock:
    """Context manager around all that a job does in a run folder. Held on rank 0; entering it is collective.

    Attributes:
        lock: lock of the folder of checkpoints.
    """

    def __init__(self, folder: RunFolder, topology: Topology) -> None:
        self._folder = folder
        self._topology = topology
        self.lock = Lock(folder.checkpoints)

    def __enter__(self) -> RunLock:
        """Take the lock, and finish what a killed job was doing.

        Raises:
            CheckpointBusy: another job is at work in the folder; the message says which.
            ConfigError: something else is where a file or a folder is expected, or the folder cannot be written.
        """
        # Whoever waits for rank 0 does so under the watchdog.
        limit_s = Environment.read().timeout_s / 2
        patience_s = min(DEAD_S + BEAT_S, limit_s) if limit_s else DEAD_S + BEAT_S
        with self._topology.agreed("take the run folder"):
            if self._topology.is_root:
                self._folder.check()
                try:
                    self.lock.acquire(patience_s)
                except CheckpointNotWritten as error:
                    with self._folder.writing():
                        raise error.__cause__ or error from error
                try:
                    Folder(self._folder.checkpoints).sweep()
                    self._folder.sweep()
                except BaseException:
                    self.lock.release()
                    raise
        return self

    def __exit__(self, *error: object) -> None:
        self.lock.release()

    def make_room(self, options: RunOptions) -> None:
        """Move a run with results aside if a new one of the name "default" would replace it.

        Not collective: rank 0 calls it. ``RunFolder.create`` refuses to replace a run of any other name, unless
        ``overwrite`` is set.

        Raises:
            CheckpointBusy: another job was faster.
            ConfigError: it cannot be moved.
        """
        if options.overwrite or options.name != DEFAULT_RUN or not self._folder.holds_results:
            return
        self.lock.check()
        old = self._folder.move_aside()
        logger.warning(
            "%s: held an earlier run, which is now %s; nothing deletes it but you",
            self._folder.path,
            old.path,
        )
        self.lock.follow(old.checkpoints)
        self._folder.inherit_attempts(old)
