"""Log lines of a parallel program.

A thin layer over the standard ``logging`` module. Rooms call ``info`` and ``debug``; only a command decides, by
``configure``, what is shown.
"""

from __future__ import annotations

import errno
import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal

_LOGGER = logging.getLogger("hpczero")


def configure(*, rank: int, node_index: int, level: Literal["info", "debug"]) -> None:
    """Show log lines of this process on standard output. Not collective; replaces an earlier call.

    ``info`` lines come from rank 0 and stand alone; ``debug`` lines and warnings come from every rank, behind
    ``[r3 node01]``.
    """
    _LOGGER.handlers[:] = [_StandardOutput(rank, f"[r{rank} node{node_index:02d}]")]
    _LOGGER.setLevel(logging.DEBUG if level == "debug" else logging.INFO)
    _LOGGER.propagate = False


@contextmanager
def muted() -> Iterator[None]:
    """Context: nothing is shown. What is looked at inside is looked at again later, and told then."""
    level = _LOGGER.level
    _LOGGER.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        _LOGGER.setLevel(level)


def info(message: str, *args: object) -> None:
    """A line for the user, shown by rank 0. ``args`` are formatted into it only if it is shown."""
    _LOGGER.info(message, *args)


def debug(message: str, *args: object) -> None:
    """A line about this rank, shown by every rank where the level is debug."""
    _LOGGER.debug(message, *args)


def runs_of(numbers: Iterable[int]) -> list[list[int]]:
    """First and last of each run of numbers that follow one another."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return found


def spans(numbers: Iterable[int], between: str = ", ") -> str:
    """Ascending numbers as a user reads them: 0-3, 5."""
    return between.join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs_of(numbers))


class _StandardOutput(logging.Handler):
    """Writes to the ``sys.stdout`` of the moment, which a progress bar may have replaced."""

    def __init__(self, rank: int, origin: str) -> None:
        super().__init__()
        self._is_root, self._origin = rank == 0, origin

    def filter(self, record: logging.LogRecord) -> bool:
        return self._is_root or record.levelno != logging.INFO

    def emit(self, record: logging.LogRecord) -> None:
        # Any rank may say all but what is for the user, so the rank stands in front.
        origin = "" if record.levelno == logging.INFO else f"{self._origin} "
        # One write per record: a launcher interleaves the output of ranks between writes.
        try:
            sys.stdout.write(f"{origin}{self.format(record)}\n")
            sys.stdout.flush()
        except OSError as error:
            # Of a log on a full disk; training goes on. Python keeps what it can and writes it when there is room.
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
