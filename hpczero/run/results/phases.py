"""Progress of long work before the first step: a bar on a terminal, some lines in a log.

Owns: how a phase of such work is shown. Must not know: torch, MPI, what the work is. Only rank 0 makes one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Literal

from hpczero.job.long_work import Moment
from hpczero.run.results.progress import terminal_columns

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
