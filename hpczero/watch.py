"""The watch command: ``python -m hpczero.watch runs/x [runs/y ...]``. It needs neither torch nor MPI."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from hpczero.errors import run
from hpczero.files.regular import answer
from hpczero.options.reading import parse_command_line
from hpczero.options.types import require_positive
from hpczero.options.values import require
from hpczero.run.page import write_page
from hpczero.run.results.folder import RunFolder
from hpczero.run.view import GOOD, Picture, RunView

if TYPE_CHECKING:
    from rich.console import Group

ASK_LIMIT_S = 2.0
ASK_AGAIN_S = 30.0
FORMAT = "%A %T, %L left of its time"


@dataclass(frozen=True)
class WatchOptions:
    """Which runs to show.

    Attributes:
        folders: of runs, side by side; they may be at work, have ended or not have begun.
        once: print the page and end.
        page: write watch.html of each run, too, as of one that was killed.
        every: seconds between two looks.
    """

    folders: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    once: tyro.conf.UseCounterAction[int] = 0
    page: tyro.conf.UseCounterAction[int] = 0
    every: float = 2.0

    def __post_init__(self) -> None:
        require(bool(self.folders), "RUN", "nothing", "the folder of a run, such as runs/default")
        require_positive("watch", self, "every")


class Slurm:
    """What SLURM says of jobs, asked every half a minute; nothing where its commands are not."""

    def __init__(self) -> None:
        self._said: dict[str, tuple[float, str]] = {}

    def of(self, job: str) -> str:
        """State and time left of a job, as a line; empty without SLURM."""
        asked, said = self._said.get(job, (-math.inf, ""))
        if job and time.monotonic() - asked >= ASK_AGAIN_S:
            # The number of an array's first element means all of them, hence %A.
            found = answer(["squeue", "--noheader", "--job", job, "--format", FORMAT], ASK_LIMIT_S)
            lines = [line.partition(" ") for line in found.stdout.splitlines()] if found else []
            gone = found is not None and (not found.returncode or "Invalid job id" in found.stderr)
            none = "not in the queue" if gone else "squeue does not answer"
            own = next((text for number, _, text in lines if number == job), none)
            said = "" if found is None else f"\nSLURM job {job}: {own}"
            self._said[job] = (time.monotonic(), said)
        return said


def shown(pictures: Sequence[Picture], slurm: Slurm) -> Group:
    """The page for a terminal: a column for each run, then starts and warnings."""
    # Here and not at the top: --help must not wait for it.
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table, states = Table("", expand=len(pictures) > 1), []
    for each in pictures:
        table.add_column(Text(str(each.path)), ratio=1)
        style = "bold green" if each.state in GOOD else "bold red"
        states.append(Text(f"{each.state}: {each.said}{slurm.of(each.job)}", style))
    table.add_row("state", *states, end_section=True)
    columns = sorted((each.figures for each in pictures), key=len, reverse=True)
    for name in dict.fromkeys(name for figures in columns for name in figures):
        table.add_row(name, *(Text(each.figures.get(name, "")) for each in pictures))
    parts: list[Table | Text] = [table]
    for each in pictures:
        starts = Table(
            "start", "ranks", "from", "how it ended", title=Text(f"starts of {each.path}")
        )
        for row in each.starts:
            starts.add_row(*map(Text, row))
        parts += [starts] if each.starts else []
        parts += [Text(f"{when}  {text}", "yellow") for when, text in each.notes]
    return Group(*parts)


def main() -> int:
    """Show runs until Ctrl-C."""
    options = parse_command_line(
        WatchOptions,
        sys.argv[1:],
        prog="python -m hpczero.watch",
        description="Show how runs are: state, loss, speed, memory, slow ranks, checkpoints, starts and warnings.",
    )
    from rich.console import Console
    from rich.live import Live

    folders = [RunFolder(Path(name)) for name in options.folders]
    views, slurm, console = [RunView(folder) for folder in folders], Slurm(), Console()

    def look() -> Group:
        pictures = [view.look() for view in views]
        for folder, picture in zip(folders, pictures, strict=True):
            if options.page and folder.path.is_dir():
                with folder.writing():
                    write_page(folder, picture, 0 if options.once else options.every)
        return shown(pictures, slurm)

    if options.once:
        console.print(look())
        return 0
    with suppress(KeyboardInterrupt), Live(look(), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(options.every)
            live.update(look(), refresh=True)
    return 0


if __name__ == "__main__":
    run(main)
