"""``metrics.jsonl`` as a run writes it.

Owns: that every line of a step is on file, whatever happens to the disk, the file or this process. Must not know:
torch, MPI, where the figures come from.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from itertools import pairwise
from pathlib import Path

from hpczero.files.durable import keep_as, sync, write_text
from hpczero.files.regular import kind_of
from hpczero.run.results.metrics import StepMetrics, read_records, shown_spans, spans

logger = logging.getLogger("hpczero.metrics")


class MetricsFile:
    """``metrics.jsonl``: one line per step. It is written before the step is saved and before the next one starts."""

    def __init__(self, path: Path, *, start: int = 0) -> None:
        """Open the file. Lines of steps after ``start`` are removed, and an incomplete last line with them.

        Lines that cannot be read do not stop a run. They are named, and the old file is kept beside the new one.
        """
        found: dict[int, StepMetrics] = {}
        if start and path.exists():
            records, damage = read_records(path)
            found = {record.step: record for record in records if record.step <= start}
            if damage:
                date = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
                old = path.with_name(f"{path.name}.damaged-{date}")
                keep_as(path, old)  # and not a rename: until the new file is there, this is it
                logger.warning("%s: %s; left out here, and kept in %s", path, damage, old.name)
            if found and len(found) <= start - min(found):
                steps = [
                    *sorted(found),
                    start + 1,
                ]  # from what a line says nobody counts: it may say anything
                lost = [[a + 1, b - 1] for a, b in pairwise(steps) if b > a + 1]
                logger.warning("%s: has no lines of steps %s", path, shown_spans(lost))
        if start and not found:
            logger.warning("%s: has no line of the %d steps before; it begins anew", path, start)
        text = "".join(f"{found[step].to_json()}\n" for step in sorted(found))
        write_text(path, text)
        sync(path.parent)
        self._path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        self._final = len(text.encode())  # bytes that never change again
        self._tail: list[
            tuple[int, bytes]
        ] = []  # what follows: the last line, and what the disk refused
        self._told = False

    def write(self, metrics: StepMetrics, *, durable: bool = False) -> None:
        """Append a line and hand it to the operating system. A line of the same step as the last one replaces that.

        If it cannot be written, a warning is logged, and it is tried again with the next line. If somebody has moved
        the file or put another one in its place, a warning is logged, and this line and all later ones go to the file
        of that name.

        Args:
            metrics: of a step.
            durable: whether it is on the disk on return.
        """
        refused: OSError | None = None
        try:
            self._follow_name()
        except OSError as error:
            refused = error
        line = metrics.to_json().encode()
        if self._tail and self._tail[-1][0] == metrics.step:
            # In place, by one write, so that the line is there whenever this process is killed.
            line = line.ljust(len(self._tail.pop()[1]) - 1)
        elif not self._told:
            self._final += sum(len(old) for _, old in self._tail)
            self._tail.clear()
        self._tail.append((metrics.step, line + b"\n"))
        try:
            if refused is not None:
                raise refused
            data, offset = b"".join(line for _, line in self._tail), self._final
            while data:
                done = os.pwrite(self._descriptor, data, offset)
                data, offset = data[done:], offset + done
            if durable:
                os.fsync(self._descriptor)
            self._told = False
        except OSError as error:
            if not self._told:
                logger.warning(
                    "%s: cannot be written (%s); trying again", self._path, error.strerror
                )
            self._told = True

    def _follow_name(self) -> None:
        """Go on in the file that has the name now, if that is not the open one: the open one has no name to find it by.

        Raises:
            OSError: no file can be written there.
        """
        kind = kind_of(self._path)
        if kind == "a file" and os.path.samestat(os.stat(self._path), os.fstat(self._descriptor)):
            return
        if kind not in ("", "a file", "a link to nothing"):
            raise OSError(errno.EINVAL, f"is {kind}, expected a regular file")
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        os.close(self._descriptor)
        self._descriptor = descriptor
        self._final = os.fstat(descriptor).st_size
        written = b"".join(line for _, line in self._tail)
        begin = self._final - len(written)
        if not self._told and begin >= 0 and os.pread(descriptor, len(written), begin) == written:
            self._final = begin  # a copy
        else:
            if self._final and os.pread(descriptor, 1, self._final - 1) != b"\n":
                self._final += os.pwrite(descriptor, b"\n", self._final)
            if not self._told:  # the last line is in the file that went
                self._tail.clear()
        sync(self._path.parent)
        logger.warning(
            "%s: was taken away or replaced while the run goes on; later lines are in the file of that name now",
            self._path,
        )

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)
        if self._told:
            steps = spans([step for step, _ in self._tail])
            logger.warning("%s: lines of steps %s could not be written", self._path, steps)
