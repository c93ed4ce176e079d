"""Where the figures of a step go: metrics.jsonl, TensorBoard, the screen.

Owns: giving each step to all of them. Must not know: torch, MPI, how a step was measured. Only rank 0 makes one.
"""

from __future__ import annotations

import dataclasses
import threading
from contextlib import ExitStack, nullcontext, suppress
from types import TracebackType
from typing import TYPE_CHECKING

from hpczero.errors import EXHAUSTED
from hpczero.options.config import LogOptions
from hpczero.run.results.folder import RunFolder
from hpczero.run.results.metrics import MetricsFile, StepMetrics
from hpczero.run.results.progress import progress_for

if TYPE_CHECKING:
    from hpczero.run.results.scalars import ScalarWriter


GROUPS = (
    *(("loss", "loss"), ("held_out_metric", "loss")),
    *((end, "time") for end in ("_ms", "tokens_per_s", "tflops", "mfu")),
    *((end, "memory") for end in ("_nbytes", "device_fragmented")),
    *(
        (name, "optimizer")
        for name in ("learning_rate", "grad_norm", "loss_scale", "skipped_steps")
    ),
)


class Records:
    """Context manager around the steps of a run. A line that ``write`` was given survives a kill of this process."""

    def __init__(
        self,
        folder: RunFolder,
        options: LogOptions,
        *,
        num_steps: int,
        start: int = 0,
        own: bool = True,
        unit: str = "token",
    ) -> None:
        """Open the files.

        ``start`` steps were done before, by an earlier job of this run (``own``) or by another run. ``unit`` is what
        rates count.
        """
        self._progress = progress_for(
            options.progress, num_steps=num_steps, every=options.every, start=start, unit=unit
        )
        self._folder = folder
        self._file = MetricsFile(folder.metrics, start=start if own else 0)
        self._wants_tensorboard = options.tensorboard
        self._tensorboard: ScalarWriter | None = None
        self._open = ExitStack()

    def __enter__(self) -> Records:
        self._open.callback(self._file.close)
        if self._wants_tensorboard:
            # Here and not at the top: a fifth of a second and 20 MB that only rank 0 should pay.
            from hpczero.run.results.scalars import ScalarWriter

            # First: the writer's thread starts at once, and may fail at once.
            self._open.callback(setattr, threading, "excepthook", threading.excepthook)
            threading.excepthook = _in_one_line
            self._tensorboard = ScalarWriter(self._folder.tensorboard)
            self._open.callback(self._tensorboard.close)
        self._open.enter_context(self._progress)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with suppress(OSError) if error is not None else nullcontext():  # the first one tells
            self._open.close()

    def note(self, metrics: StepMetrics, *, durable: bool = False) -> None:
        """Put the line of a step on file before its save, so that no checkpoint has a step without a line.

        Args:
            metrics: figures that are known by now; ``write`` of the same step replaces them.
            durable: whether the line is to survive a failure of the machine too.
        """
        self._file.write(metrics, durable=durable)

    def write(self, metrics: StepMetrics) -> None:
        """Record one finished step.

        Raises:
            OSError: the message names the folder.
        """
        try:
            self._write(metrics)
        except OSError as error:
            if error.filename is None:
                error.filename = str(self._folder.path)
            raise

    def _write(self, metrics: StepMetrics) -> None:
        self._file.write(metrics)
        if self._tensorboard is not None:
            for name, value in dataclasses.asdict(metrics).items():
                if value is not None and name != "step":
                    self._tensorboard.add_scalar(tag(name), value, metrics.step)
        self._progress.show(metrics)


def tag(name: str) -> str:
    """Of a field of the metrics in TensorBoard, which draws what is before the slash as one group."""
    if name.startswith(("tier_", "activations_")):
        return f"offload/{name}"
    group = next((group for end, group in GROUPS if name.endswith(end)), "progress")
    return f"{group}/{name}"


def _in_one_line(failed: threading.ExceptHookArgs) -> None:
    """Keep TensorBoard's traceback off the screen. Its thread's error is raised by the next ``write`` anyway."""
    exhausted = isinstance(failed.exc_value, OSError) and failed.exc_value.errno in EXHAUSTED
    if not exhausted:
        threading.__excepthook__(failed)
