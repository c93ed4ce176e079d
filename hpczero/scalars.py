"""Scalars for TensorBoard, as events with a simple value.

Owns: the form of an event. ``tensorboard.summary.Writer`` writes tensors, which the program shows and its reader
``EventAccumulator.Scalars`` does not know. Must not know: which figures there are.
"""

from __future__ import annotations

import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter


class ScalarWriter:
    """One event file in ``folder``; it is written on a thread, whose error the next call raises."""

    def __init__(self, folder: Path) -> None:
        """Args: folder, made if need be."""
        self._file = EventFileWriter(str(folder))

    def add_scalar(self, name: str, value: float, step: int) -> None:
        """Append one figure of a step."""
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value)])
        self._file.add_event(Event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        """Write what is left."""
        self._file.close()
