"""Progress of a run on the screen: a bar on a terminal, plain lines in a log.

Owns: how a step is shown. Must not know: torch, MPI, how it was measured. Only rank 0 makes one.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Literal, TextIO

from hpczero.job import log
from hpczero.job.long_work import Moment
from hpczero.run.results.metrics import Interval, StepMetrics

SHORT = {"token": "tok"}  # in the line of a step


class Lines:
    """One plain line every ``every`` steps, and one for each evaluation."""

    def __init__(self, *, num_steps: int, every: int, start: int = 0, unit: str = "token") -> None:
        self._unit = SHORT.get(unit, f"{unit}s")
        self._num_steps = num_steps
        self._every = every
        self._steps_before = start
        self._interval = Interval()
        self._start = time.monotonic()

    def __enter__(self) -> Lines:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    def show(self, metrics: StepMetrics) -> None:
        """Show one finished step, if a line is due."""
        self._interval.add(metrics)
        last = metrics.step == self._num_steps
        if (
            metrics.step % self._every
            and metrics.step != self._steps_before + 1
            and not last
            and metrics.held_out_loss is None
        ):
            return
        elapsed = time.monotonic() - self._start
        done = metrics.step - self._steps_before
        left = elapsed / done * (self._num_steps - metrics.step)
        log.info(
            "step %*d/%d  %s  left %s",
            len(str(self._num_steps)),
            metrics.step,
            self._num_steps,
            summary(self._interval, self._unit),
            f"{int(left) // 3600}:{int(left) // 60 % 60:02d}:{int(left) % 60:02d}",
        )
        self._interval = Interval()


class Bar:
    """A bar with the latest figures. Evaluations are lines above it."""

    def __init__(self, *, num_steps: int, every: int, start: int = 0, unit: str = "token") -> None:
        self._unit = SHORT.get(unit, f"{unit}s")
        self._every = every
        self._interval = Interval()
        # The launcher's pseudo-terminal hides the width of the real one.
        width = terminal_columns() or 100
        # Here and not at the top: what only wants to know about terminals must not wait for it.
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=Console(force_terminal=True, width=width),
        )
        self._task = self._progress.add_task("", total=num_steps, completed=start)

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def show(self, metrics: StepMetrics) -> None:
        """Show one finished step."""
        self._interval.add(metrics)
        if metrics.held_out_loss is not None:
            log.info("step %d  held-out loss %.4f", metrics.step, metrics.held_out_loss)
        self._progress.update(
            self._task, completed=metrics.step, description=_short(self._interval, self._unit)
        )
        if len(self._interval.steps) == self._every:
            self._interval = Interval()


def progress_for(
    style: Literal["auto", "bar", "lines"],
    *,
    num_steps: int,
    every: int,
    start: int = 0,
    unit: str = "token",
) -> Bar | Lines:
    """The display for standard output.

    ``auto`` is a bar only on a terminal that has a width. Open MPI gives its ranks a pseudo-terminal of width 0, even
    if its own output goes to a file.
    """
    bar = style == "bar" or (style == "auto" and terminal_columns() > 0)
    return (Bar if bar else Lines)(num_steps=num_steps, every=every, start=start, unit=unit)


def summary(interval: Interval, unit: str = "tok") -> str:
    """The figures of some steps in one line: means, or the last figure where a mean makes no sense."""
    last = interval.steps[-1]
    parts = [f"loss {interval.mean('loss'):.4f}"]
    if last.held_out_loss is not None:
        parts.append(f"held-out {last.held_out_loss:.4f}")
    if last.held_out_metric is not None:
        parts.append(f"metric {last.held_out_metric:.4f}")
    parts += [f"lr {last.learning_rate:.2e}", f"norm {interval.mean('grad_norm'):.2f}"]
    rate = f"{interval.mean('tokens_per_s'):,.0f} {unit}/s"
    if math.isfinite(last.tflops):
        rate += f" {interval.mean('tflops'):.3g} TFLOP/s/rank"
    if last.mfu is not None:
        rate += f" MFU {interval.mean('mfu'):.1%}"
    parts.append(rate)
    phases = {"fwd": "forward", "bwd": "backward", "comm": "communication", "opt": "optimizer"}
    parts.append(
        " ".join(f"{short} {interval.mean(f'{name}_ms'):.0f}" for short, name in phases.items())
        + " ms"
    )
    parts.append(
        f"mem {last.state_peak_nbytes / 2**20:,.0f} of {last.process_peak_nbytes / 2**20:,.0f} MiB"
    )
    if last.skipped_steps:
        parts.append(f"skipped {last.skipped_steps} scale {last.loss_scale:g}")
    return "  ".join(parts)


def _short(interval: Interval, unit: str) -> str:
    return f"loss {interval.mean('loss'):.3f}  {interval.mean('tokens_per_s'):,.0f} {unit}/s"


def terminal_columns(stream: TextIO | None = None) -> int:
    """Width of ``stream`` (None: standard output) in columns; 0 if it is no terminal or states no width."""
    stream = sys.stdout if stream is None else stream
    try:
        return os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    except OSError:
        return 0


EVERY_S = 10.0
REDRAW_S = 0.25


class PhaseLines:
    """One line every ten seconds, and one at the end of a phase that has had a line."""

    def __init__(self, say: Callable[[str], None], every_s: float = EVERY_S) -> None:
        self._say = say
        self._every_s = every_s
        self._before = Moment()
        self._told = ""  # phase of the last line
        self._due = time.monotonic() + self._every_s

    def __enter__(self) -> PhaseLines:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    def show(self, moment: Moment) -> None:
        """Show how far the work is, if a line is due."""
        before, self._before = self._before, moment
        if before.what != moment.what and self._told == before.what != "":
            self._say(f"{before.what}: took {clock(before.elapsed_s)}")
        if moment.what and time.monotonic() >= self._due:
            self._say(f"{moment.what}: {figures(moment)}")
            self._told = moment.what
            self._due = time.monotonic() + self._every_s


class PhaseBar:
    """A bar for the current phase."""

    def __init__(self, *, to_stderr: bool = False) -> None:
        # Here and not at the top: --help of the data command must not wait for it.
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        stream = sys.stderr if to_stderr else sys.stdout
        # It draws when it is told, not from a thread of its own: the time of such a thread would be a sign of life.
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[figures]}"),
            console=Console(
                force_terminal=True, width=terminal_columns(stream) or 100, stderr=to_stderr
            ),
            auto_refresh=False,
            transient=True,
        )
        self._task = self._progress.add_task("", figures="", visible=False)
        self._due = 0.0

    def __enter__(self) -> PhaseBar:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def show(self, moment: Moment) -> None:
        """Show how far the work is, if it is due."""
        if not moment.what or time.monotonic() < self._due:
            return
        self._due = time.monotonic() + REDRAW_S
        self._progress.update(
            self._task,
            description=moment.what,
            completed=moment.done_nbytes,
            total=moment.total_nbytes,  # None: it only says that something goes on
            figures=figures(moment),
            visible=True,
            refresh=True,
        )


def phases_for(
    style: Literal["auto", "bar", "lines"],
    say: Callable[[str], None],
    *,
    to_stderr: bool = False,
) -> PhaseBar | PhaseLines:
    """The display for this output; ``auto`` as in ``progress.progress_for``.

    Args:
        style: style of the display.
        say: called with each line, for the display that is lines.
        to_stderr: whether the display is on standard error, which is then what must be a terminal.
    """
    stream = sys.stderr if to_stderr else sys.stdout
    if style == "bar" or (style == "auto" and terminal_columns(stream) > 0):
        return PhaseBar(to_stderr=to_stderr)
    return PhaseLines(say)


def figures(moment: Moment) -> str:
    """How far the work is, how fast it is, and how long it may still take. MB are 10^6 bytes."""
    if moment.total_nbytes is None:
        return f"for {clock(moment.elapsed_s)}"
    done, total = moment.done_nbytes / 1e6, moment.total_nbytes / 1e6
    said = f"{done:,.1f} of {total:,.1f} MB"
    if moment.done_nbytes and moment.elapsed_s:
        rate = done / moment.elapsed_s
        said += f"  {rate:,.1f} MB/s  left {clock(max(total - done, 0.0) / rate)}"
    return said


def clock(seconds: float) -> str:
    """A time as ``1:02:03``."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
