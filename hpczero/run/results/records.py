"""Where the figures of a step go: metrics.jsonl, TensorBoard, trackers, the screen. Only rank 0 makes a ``Records``."""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from hpczero.errors import EXHAUSTED
from hpczero.files.regular import reason
from hpczero.options.config import LogOptions
from hpczero.run.results.folder import RunFolder
from hpczero.run.results.metrics import MetricsFile, StepMetrics, read_records
from hpczero.run.results.progress import StepProgress
from hpczero.trackers import BackgroundTracker

SPANS = 40  # a curve is smoothed over one part in so many
TOKEN_TICKS = 5  # at most so many: 1,000,000,000 is wide
LEAST_SPAN = 0.01  # nats on the vertical axis
TRAINING, HELD_OUT = "tab:blue", "tab:red"


def plot_losses(
    steps: Sequence[StepMetrics], path: Path, *, title: str, unit: str = "nats per token"
) -> None:
    """Write training and held-out loss over the steps to ``path`` (PNG), tokens on a second axis.

    ``unit`` is that of the loss, or empty. Without a unit samples are counted, not tokens.
    """
    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display
    axes = figure.add_subplot()
    numbers, losses = [m.step for m in steps], [m.loss for m in steps]
    span = max(1, len(steps) // SPANS)
    if span == 1:
        axes.plot(numbers, losses, color=TRAINING, linewidth=1.5, label="training")
    else:
        axes.plot(numbers, losses, color=TRAINING, alpha=0.3, linewidth=0.8)
        said = f"training, mean over about {span:,} steps"
        axes.plot(numbers, smoothed(losses, span), color=TRAINING, linewidth=1.5, label=said)
    held_out = [(m.step, m.held_out_loss) for m in steps if m.held_out_loss is not None]
    if held_out:
        axes.plot(
            *zip(*held_out, strict=True),
            "o-",
            color=HELD_OUT,
            label=f"held out ({held_out[-1][1]:.3f} at the end)",
        )
    axes.set_title(title, fontsize="medium")
    axes.set(xlabel="step", ylabel=f"loss ({unit})" if unit else "loss")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.ticklabel_format(axis="y", useOffset=False)
    axes.grid(alpha=0.3)
    axes.legend()
    low, high = axes.get_ylim()
    if high - low < LEAST_SPAN:  # rounding is not worth a curve
        axes.set_ylim((low + high - LEAST_SPAN) / 2, (low + high + LEAST_SPAN) / 2)
    if steps:
        per_step = steps[-1].tokens / steps[-1].step
        to_tokens, to_steps = partial(np.multiply, per_step), partial(np.multiply, 1 / per_step)
        above = axes.secondary_xaxis("top", functions=(to_tokens, to_steps))
        above.set_xlabel("tokens" if unit else "samples")
        above.xaxis.set_major_locator(MaxNLocator(nbins=TOKEN_TICKS, integer=True))
        above.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    # Whoever looks at a run that goes on sees a whole picture.
    unfinished = path.with_name(f".{path.name}")
    figure.savefig(unfinished, format="png")
    unfinished.replace(path)


def smoothed(values: Sequence[float], span: int) -> list[float]:
    """Exponential mean of the values so far. The centre of its weights is ``span`` / 2 values back.

    The first values have their proper weight (Kingma and Ba, Adam, 2015, sec. 3). A value that is not finite is left
    out; the mean before it stands in its place.
    """
    keep = (span - 1) / (span + 1)
    mean, weight, found = 0.0, 0.0, []
    for value in values:
        if math.isfinite(value):
            mean, weight = keep * mean + (1 - keep) * value, keep * weight + (1 - keep)
        found.append(mean / weight if weight else math.nan)
    return found


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
        trackers: Sequence[BackgroundTracker] = (),
    ) -> None:
        """Open the files.

        ``start`` steps were done before, by an earlier job of this run (``own``) or by another run. ``unit`` is what
        rates count. ``trackers`` are not entered yet.
        """
        self._progress = StepProgress(
            options.progress, num_steps=num_steps, every=options.every, start=start, unit=unit
        )
        self._folder = folder
        self._file = MetricsFile(folder.metrics, start=start if own else 0)
        self._wants_tensorboard = options.tensorboard
        self._tensorboard: ScalarWriter | None = None
        self._trackers = trackers
        self._open = ExitStack()

    def __enter__(self) -> Records:
        self._open.callback(self._file.close)
        if self._wants_tensorboard:
            # First: the writer's thread starts at once, and may fail at once.
            self._open.callback(setattr, threading, "excepthook", threading.excepthook)
            threading.excepthook = _in_one_line
            self._tensorboard = ScalarWriter(self._folder.tensorboard)
            self._open.callback(self._tensorboard.close)
        for tracker in self._trackers:
            self._open.enter_context(tracker)
        self._open.enter_context(self._progress)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with suppress(OSError) if error is not None else nullcontext():  # the first one tells
            self._open.close()

    def note(self, metrics: StepMetrics, *, durable: bool = False) -> None:
        """Put the line of a step on file before its save, so that no checkpoint has a step without a line.

        ``write`` of the same step replaces the line. If ``durable``, it survives a failure of the machine too.
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
        figures = figures_of(metrics)
        if self._tensorboard is not None:
            for name, value in figures.items():
                self._tensorboard.add_scalar(tag(name), value, metrics.step)
        for tracker in self._trackers:
            tracker.log(metrics.step, figures)
        self._progress.show(metrics)


def figures_of(metrics: StepMetrics) -> dict[str, float]:
    """What a step was measured by, but for what was not measured."""
    found = dataclasses.asdict(metrics)
    tasks = found.pop("lm_eval") or {}
    found |= {f"lm_eval/{name}": value for name, value in tasks.items()}
    return {name: v for name, v in found.items() if v is not None and name != "step"}


def earlier_figures(folder: RunFolder, start: int) -> Iterator[tuple[int, dict[str, float]]]:
    """Step and figures of the first ``start`` steps, as far as metrics.jsonl has them."""
    for metrics in read_records(folder.metrics)[0] if start else []:
        if metrics.step <= start:  # the others are of the steps that go on meanwhile
            yield metrics.step, figures_of(metrics)


def tag(name: str) -> str:
    """Of a field of the metrics in TensorBoard, which draws what is before the slash as one group."""
    if name.startswith("lm_eval/"):
        return name
    if name.startswith(("tier_", "activations_")):
        return f"offload/{name}"
    group = next((group for end, group in GROUPS if name.endswith(end)), "progress")
    return f"{group}/{name}"


def _in_one_line(failed: threading.ExceptHookArgs) -> None:
    """Keep TensorBoard's traceback off the screen. Its thread's error is raised by the next ``write`` anyway."""
    exhausted = isinstance(failed.exc_value, OSError) and failed.exc_value.errno in EXHAUSTED
    if not exhausted:
        threading.__excepthook__(failed)
