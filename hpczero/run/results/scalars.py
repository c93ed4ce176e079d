"""Scalars for TensorBoard, as events with a simple value.

Owns: the form of an event. ``tensorboard.summary.Writer`` writes tensors; TensorBoard shows these, but its reader
``EventAccumulator.Scalars`` does not know them. Must not know: which figures there are.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from hpczero.files.regular import reason

logger = logging.getLogger("hpczero.metrics")


class ScalarWriter:
    """One event file in ``folder``. A thread writes it; the next call finds the thread's error.

    A failed write is warned of once, and nothing more is written. The figures of a run are in metrics.jsonl, too.
    """

    def __init__(self, folder: Path) -> None:
        """Open an event file in ``folder``, which is made if it does not exist."""
        self._folder = folder
        self._file: EventFileWriter | None = None
        with self._giving_up():
            self._file = EventFileWriter(str(folder))

    def add_scalar(self, name: str, value: float, step: int) -> None:
        """Append one figure of a step."""
        if self._file is not None:
            summary = Summary(value=[Summary.Value(tag=name, simple_value=value)])
            with self._giving_up():
                self._file.add_event(Event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        """Write what is left, and close the file."""
        file = self._file
        if file is not None:
            with self._giving_up():
                file.close()
            self._file = None

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            file, self._file = self._file, None
            logger.warning(
                "%s: cannot be written (%s); the figures are in metrics.jsonl alone from here on",
                self._folder,
                reason(error),
            )
            if file is not None:
                with suppress(OSError):  # the same once more
                    file.close()
