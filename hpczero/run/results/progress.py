"""Progress on the screen, of steps and of phases of long work: a bar on a terminal, plain lines in a log.

Only rank 0 shows anything.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Literal, TextIO

from typing_extensions import Self

from hpczero.job import log
from hpczero.job.long_work import Moment
from hpczero.run.results.metrics import Interval, StepMetrics

SHORT = {"token": "tok"}  # in the line of a step
EVERY_S = 10.0  # between two lines about a phase
REDRAW_S = 0.25

Style = Literal["auto", "bar", "lines"]


class Display:
    """Context manager around a bar on a terminal. Without a terminal there is no bar, and subclasses write lines.

    ``auto`` is a bar only on a terminal that has a width. Open MPI gives its ranks a pseudo-terminal of width 0, even
    if its own output goes to a file.
    """

    def __init__(self, style: Style, *, to_stderr: bool = False, stays: bool = False) -> None:
        """The bar is on standard output, or ``to_stderr``. It ``stays`` on the screen after the end, or goes."""
        stream = sys.stderr if to_stderr else sys.stdout
        columns = terminal_columns(stream)
        self.is_bar = style == "bar" or (style == "auto" and columns > 0)
        self._due = 0.0
        if not self.is_bar:
            return
        # Here and not at the top: --help of a command must not wait for it.
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        # It draws when it is told to, not from a thread: a thread's processor time would be a sign of life of the work.
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[figures]}"),
            console=Console(force_terminal=True, width=columns or 100, stderr=to_stderr),
            auto_refresh=False,
            transient=not stays,
        )
        self._task = self._progress.add_task("", figures="", visible=False)

    def __enter__(self) -> Self:
        if self.is_bar:
            self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.is_bar:
            self._progress.stop()

    def draw(
        self, title: str, done: int, total: int | None, figures: str, *, last: bool = False
    ) -> None:
        """Draw the bar, at most four times a second but for the last time. Without a total it shows no share."""
        if not last and time.monotonic() < self._due:
            return
        self._due = time.monotonic() + REDRAW_S
        # Fields of the task that rich keeps for the columns above.
        fields: dict[str, Any] = {"description": title, "figures": figures, "visible": True}
        self._progress.update(self._task, completed=done, total=total, refresh=True, **fields)


class StepProgress(Display):
    """Progress of the steps of a run. As lines: one every ``every`` steps, and one for each evaluation."""

    def __init__(
        self, style: Style, *, num_steps: int, every: int, start: int = 0, unit: str = "token"
    ) -> None:
        super().__init__(style, stays=True)
        self._unit = SHORT.get(unit, f"{unit}s")
        self._num_steps, self._every, self._steps_before = num_steps, every, start
        self._interval = Interval()
        self._start = time.monotonic()

    def show(self, metrics: StepMetrics) -> None:
        """Show one finished step, if it is due."""
        self._interval.add(metrics)
        step, last = metrics.step, metrics.step == self._num_steps
        evaluated = metrics.held_out_loss is not None
        per_step_s = (time.monotonic() - self._start) / (step - self._steps_before)
        left = clock(per_step_s * (self._num_steps - step))
        if self.is_bar:
            if evaluated:
                log.info("step %d  held-out loss %.4f", step, metrics.held_out_loss)
            rate = f"{self._interval.mean('tokens_per_s'):,.0f} {self._unit}/s"
            figures = f"{left}  loss {self._interval.mean('loss'):.3f}  {rate}"
            self.draw(f"step {step}/{self._num_steps}", step, self._num_steps, figures, last=last)
            if len(self._interval.steps) == self._every:
                self._interval = Interval()
        elif last or evaluated or step % self._every == 0 or step == self._steps_before + 1:
            width, figures = len(str(self._num_steps)), summary(self._interval, self._unit)
            log.info("step %*d/%d  %s  left %s", width, step, self._num_steps, figures, left)
            self._interval = Interval()


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
    times = (f"{short} {interval.mean(f'{name}_ms'):.0f}" for short, name in phases.items())
    parts.append(f"{' '.join(times)} ms")
    state, process = last.state_peak_nbytes / 2**20, last.process_peak_nbytes / 2**20
    parts.append(f"mem {state:,.0f} of {process:,.0f} MiB")
    if last.skipped_steps:
        parts.append(f"skipped {last.skipped_steps} scale {last.loss_scale:g}")
    return "  ".join(parts)


class PhaseProgress(Display):
    """Progress of long work by phases. As lines: one every ten seconds, and one at the end of a phase that had a line.

    Args:
        style: as of the option ``log.progress``.
        say: called with each line.
        to_stderr: whether the bar is on standard error, which is then what must be a terminal.
        every_s: seconds between two lines.
    """

    def __init__(
        self,
        style: Style,
        say: Callable[[str], None],
        *,
        to_stderr: bool = False,
        every_s: float = EVERY_S,
    ) -> None:
        super().__init__(style, to_stderr=to_stderr)
        self._say, self._every_s = say, every_s
        self._before = Moment()
        self._told = ""  # phase of the last line
        self._line_due = time.monotonic() + every_s

    def show(self, moment: Moment) -> None:
        """Show how far the work is, if that is due."""
        if self.is_bar:
            if moment.what:
                self.draw(moment.what, moment.done_nbytes, moment.total_nbytes, figures(moment))
            return
        before, self._before = self._before, moment
        if before.what != moment.what and self._told == before.what != "":
            self._say(f"{before.what}: took {clock(before.elapsed_s)}")
        if moment.what and time.monotonic() >= self._line_due:
            self._say(f"{moment.what}: {figures(moment)}")
            self._told = moment.what
            self._line_due = time.monotonic() + self._every_s


def terminal_columns(stream: TextIO) -> int:
    """Width of ``stream`` in columns; 0 if it is no terminal or states no width."""
    try:
        return os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    except OSError:
        return 0


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
