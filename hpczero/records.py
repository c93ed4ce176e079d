"""Where the figures of a step go: metrics.jsonl, TensorBoard, the screen.

Owns: handing each step to all of them. Must not know: torch, MPI, how a step was measured. Only rank 0 makes one.
"""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from types import TracebackType

from hpczero.config import LogOptions
from hpczero.metrics import MetricsFile, StepMetrics
from hpczero.progress import progress_for
from hpczero.runfolder import RunFolder


class Records:
    """Context manager around the steps of a run; every record is complete on disk when ``write`` returns."""

    def __init__(
        self, folder: RunFolder, options: LogOptions, *, num_steps: int, start: int = 0
    ) -> None:
        """``start`` steps were done before, by an earlier job of this run."""
        self._progress = progress_for(
            options.progress, num_steps=num_steps, every=options.every, start=start
        )
        self._file = MetricsFile(folder.metrics, start=start)
        self._tensorboard = None
        if options.tensorboard:
            # Here and not at the top: a fifth of a second and 20 MB that only rank 0 should pay.
            from tensorboard.summary import Writer

            self._tensorboard = Writer(str(folder.tensorboard))
        self._open = ExitStack()

    def __enter__(self) -> Records:
        self._open.callback(self._file.close)
        if self._tensorboard is not None:
            self._open.callback(self._tensorboard.close)
        self._open.enter_context(self._progress)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.close()

    def write(self, metrics: StepMetrics) -> None:
        """Record one finished step."""
        self._file.write(metrics)
        if self._tensorboard is not None:
            for name, value in dataclasses.asdict(metrics).items():
                if value is not None and name != "step":
                    self._tensorboard.add_scalar(name, value, metrics.step)
        self._progress.show(metrics)
