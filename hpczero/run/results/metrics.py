"""What a training step is measured by: its record, the file of all records, and the time of phases."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import math
import os
import resource
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from hpczero.errors import DataError
from hpczero.files.durable import keep_as, sync, write_text
from hpczero.files.regular import kind_of, opened, read_bytes
from hpczero.job.log import runs_of

LIMIT_NBYTES = 2**36  # of a metrics file
OPTIONAL = ("held_out_", "device_", "tier_", "activations_")  # fields that only some runs have
NAMED_SPANS = 5  # of many in a message
TAIL_NBYTES = 2**23  # about 12,000 lines
NOT_HELD_OUT = b'"held_out_loss": null'

logger = logging.getLogger("hpczero.metrics")


@dataclass(frozen=True)
class StepMetrics:
    """One step as rank 0 sees it. Losses are global means, of text in nats per token; rates and sizes name their unit.

    Attributes:
        step: steps done, this one included.
        tokens: tokens trained on so far, over all ranks; samples where a model counts samples.
        loss: over the global batch, before the update.
        held_out_loss: after the update; None if it was not measured.
        learning_rate: of this update.
        grad_norm: 2-norm of the mean gradient before clipping.
        loss_scale: after the update; 1 without loss scaling.
        skipped_steps: updates skipped so far because a gradient was not finite.
        tokens_per_s: over all ranks; samples as above.
        tflops: model FLOPs per rank and second, in 1e12.
        mfu: tflops as a share of the hardware's peak; None if the peak is unknown.
        step_ms: the whole step, evaluation excluded.
        data_ms, forward_ms, backward_ms, optimizer_ms: its parts; waits for communication are inside them.
        communication_ms: time inside collectives, summed over these parts.
        checkpoint_ms: saving after the step; not part of ``step_ms``. It is 0 in the line that is written before the
            save.
        state_peak_nbytes: parameters, masters, gradients, optimizer state and exchange buffers of this rank.
        process_peak_nbytes: resident memory of this rank's process.
        device_peak_nbytes: most that torch had allocated on the device during the step. This field and the next are
            None on the CPU.
        device_reserved_nbytes: bytes that torch has reserved on the device.
        device_fragmented: share of the reserved bytes that is free in pieces between allocations.
        device_used_nbytes: bytes of all processes that use the device.
        device_exposed_ms: how long the device's computation stood still for collectives, by the device's clock.
        tier_read_nbytes, tier_written_nbytes: what this rank's memory tier moved in the step. These and the next are
            None without offload.
        tier_waited_ms: how long a computation stood still for it.
        activations_read_nbytes, activations_written_nbytes, activations_waited_ms: the same of inputs of checkpointed
            blocks; None where they rest on the device.
        held_out_metric: the metric of the model's adapter over the held-out samples, such as an accuracy; None where it
            was not measured.
        held_out_since: evaluations in a row that have not found a lower held-out loss; None without
            ``evaluation.patience``, which ends the run at so many.
        lm_eval: of the tasks of ``evaluation.lm_eval``, by ``task/metric``; None where they were not run.
    """

    step: int
    tokens: int
    loss: float
    held_out_loss: float | None
    learning_rate: float
    grad_norm: float
    loss_scale: float
    skipped_steps: int
    tokens_per_s: float
    tflops: float
    mfu: float | None
    step_ms: float
    data_ms: float
    forward_ms: float
    backward_ms: float
    optimizer_ms: float
    communication_ms: float
    checkpoint_ms: float
    state_peak_nbytes: int
    process_peak_nbytes: int
    device_peak_nbytes: int | None = None
    device_reserved_nbytes: int | None = None
    device_fragmented: float | None = None
    device_used_nbytes: int | None = None
    device_exposed_ms: float | None = None
    tier_read_nbytes: int | None = None
    tier_written_nbytes: int | None = None
    tier_waited_ms: float | None = None
    activations_read_nbytes: int | None = None
    activations_written_nbytes: int | None = None
    activations_waited_ms: float | None = None
    held_out_metric: float | None = None
    held_out_since: int | None = None
    lm_eval: Mapping[str, float] | None = None

    def to_json(self) -> str:
        """One line of JSON. NaN and infinity, which JSON does not have, become null.

        The last field is the CRC-32 of the text before it, because a changed digit is not visible otherwise.
        """
        values = dataclasses.asdict(self)
        tasks = values.pop("lm_eval")
        finite: dict[str, Any] = {k: _finite(v) for k, v in values.items()}
        finite["lm_eval"] = tasks and {k: _finite(v) for k, v in tasks.items()}
        text = json.dumps(finite, allow_nan=False).removesuffix("}")
        return f'{text}, "crc32": "{zlib.crc32(text.encode()):08x}"}}'

    @classmethod
    def from_json(cls, line: str | bytes) -> StepMetrics:
        """The record of a line. Null becomes NaN where a value is expected. A line may have no checksum.

        Raises:
            ValueError: it is no such record.
        """
        data = line.encode() if isinstance(line, str) else line
        try:
            values = json.loads(data)
        except RecursionError as error:
            raise ValueError("nested too deep") from error
        if not isinstance(values, dict):
            raise ValueError("not an object")
        if "crc32" in values:
            text, _, stated = data.rpartition(b', "crc32": ')
            if stated != f'"{zlib.crc32(text):08x}"}}'.encode():
                raise ValueError("not what was written")
            del values["crc32"]
        tasks = values.pop("lm_eval", None)
        if tasks is not None:
            if not isinstance(tasks, dict) or {*map(type, tasks.values())} - {
                int,
                float,
                type(None),
            }:
                raise ValueError("lm_eval is no such mapping")
            tasks = {name: math.nan if each is None else each for name, each in tasks.items()}
        for name, value in values.items():
            optional = name == "mfu" or name.startswith(OPTIONAL)
            if value is None and not optional:
                values[name] = math.nan
            elif value is not None and (type(value) not in (int, float) or abs(value) >= 2**63):
                raise ValueError(f"{name} is no such number")
        if type(values.get("step")) is not int or values["step"] < 1:
            raise ValueError("no step")
        try:
            return cls(**values, lm_eval=tasks)
        except TypeError as error:
            raise ValueError(str(error)) from error


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def read_metrics(path: Path) -> list[StepMetrics]:
    """Every complete line of a metrics file.

    The last line of a killed run may be incomplete; it is left out. Damaged lines are left out with a warning.

    Raises:
        FileNotFoundError: there is no file.
        DataError: it is not a file, or cannot be read.
    """
    records, damage = read_records(path)
    if damage:
        logger.warning("%s: %s; left out", path, damage)
    return records


def read_records(path: Path) -> tuple[list[StepMetrics], str]:
    """Records, and a text about the lines that are none."""
    records, wrong, reason = [], [], ""
    try:
        *lines, _ = read_bytes(path, LIMIT_NBYTES).split(b"\n")
    except FileNotFoundError:
        raise
    except OSError as error:  # a folder, a FIFO, more than such a file can be
        text = f"{path}: {error.strerror}; move it away, the run goes on without it"
        raise DataError(text) from error
    for number, line in enumerate(lines, 1):
        try:
            records.append(StepMetrics.from_json(line.strip(b"\0 \t\r")))
        except ValueError as error:
            wrong.append(number)
            reason = reason or str(error)
    return records, f"line(s) {spans(wrong)} cannot be read ({reason})" if wrong else ""


class MetricsTail:
    """The lines of a metrics file that may be growing. What was read once is not read again.

    Attributes:
        written: when the file was written last, in seconds since the epoch, by the clock that gives files their times.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: tuple[int, int] | None = None
        self._offset = 0  # of the last line
        self.written = 0.0

    def read(self) -> tuple[bool, list[StepMetrics]]:
        """Whether the file is another one than before, and its records from the last one of the read before on.

        That one may have been written once more since. Lines that cannot be read are left out. Of a long file every
        line with a held-out loss is read at first, and so many others that it takes a second.

        Raises:
            OSError: there is no file, or it cannot be read.
        """
        found: list[StepMetrics] = []
        with opened(self._path) as descriptor:
            state = os.fstat(descriptor)
            file = (state.st_dev, state.st_ino)
            anew = file != self._file or state.st_size < self._offset
            if anew:
                self._file, self._offset = file, 0
            self.written = state.st_mtime
            every = 1 + (state.st_size - self._offset) // TAIL_NBYTES
            rest, end = b"", self._offset
            while data := os.pread(descriptor, TAIL_NBYTES, end + len(rest)):
                *lines, rest = (rest + data).split(b"\n")
                for number, line in enumerate(lines, 1):
                    if number % every == 0 or line is lines[-1] or NOT_HELD_OUT not in line:
                        with suppress(ValueError):
                            found.append(StepMetrics.from_json(line.strip(b"\0 \t\r")))
                end += sum(map(len, lines)) + len(lines)
                self._offset = end - len(lines[-1]) - 1 if lines else self._offset
        return anew, found


def spans(numbers: Iterable[int]) -> str:
    """The first few runs of rising numbers, as ``1-3, 7``."""
    return shown_spans(runs_of(numbers))


def shown_spans(found: Sequence[Sequence[int]]) -> str:
    """Spans of first and last numbers in the form of ``spans``."""
    named = found[:NAMED_SPANS]
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in named)
    return text if len(found) <= NAMED_SPANS else f"{text} and others"


def device_fields(usage: Mapping[str, int], exposed_s: float) -> dict[str, Any]:
    """The fields of ``StepMetrics`` that are of a device, from ``Accelerator.usage``; none on the host."""
    if not usage:
        return {}
    return {
        "device_peak_nbytes": usage["allocated_peak"],
        "device_reserved_nbytes": usage["reserved"],
        "device_fragmented": usage["inactive_split"] / max(usage["reserved"], 1),
        "device_used_nbytes": usage["used_by_all"],
        "device_exposed_ms": exposed_s * 1e3,
    }


class Stopwatch:
    """Seconds by phase of one step, and how much of each were waits.

    A phase that is entered twice counts both times.
    """

    def __init__(self, waited_s: Callable[[], float] = lambda: 0.0) -> None:
        """Start at once.

        Args:
            waited_s: gives the seconds that this rank has spent in collectives and waits for them so far
                (``CommStats.seconds``). Without it no phase has waits.
        """
        self._start = time.perf_counter()
        self._waited_s = waited_s
        self._seconds: dict[str, float] = {}
        self._waits: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Context: time the block as ``name``."""
        start, waited = time.perf_counter(), self._waited_s()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start
            self._waits[name] = self._waits.get(name, 0.0) + self._waited_s() - waited

    def ms(self, name: str) -> float:
        """Milliseconds in phase ``name`` so far."""
        return self._seconds.get(name, 0.0) * 1e3

    def waited_ms(self, *names: str) -> float:
        """Milliseconds of these phases that went into collectives and waits for them."""
        return sum(self._waits.get(name, 0.0) for name in names) * 1e3

    def elapsed_s(self) -> float:
        """Seconds since the stopwatch was made."""
        return time.perf_counter() - self._start


@dataclass(frozen=True)
class StepSplit:
    """Where the time of one step went on one rank. ``step_ms`` is the sum of the parts but for the checkpoint.

    Attributes:
        compute_ms: forward and backward without waits.
        communication_ms: exposed communication: time in collectives and in waits for them, in any phase. The sum of
            gradients is part of a collective.
        optimizer_ms: clipping and update without waits.
        data_ms: reading the batch.
        other_ms: what no phase covers.
        checkpoint_ms: saving after the step; not part of ``step_ms``.
    """

    compute_ms: float
    communication_ms: float
    optimizer_ms: float
    data_ms: float
    other_ms: float
    checkpoint_ms: float = 0.0

    @classmethod
    def of(cls, watch: Stopwatch, step_s: float) -> StepSplit:
        """The split of one step of ``step_s`` seconds, without the checkpoint, from the phases of its stopwatch.

        The phases are ``data``, ``forward``, ``backward``, ``optimizer``, ``communication`` and ``checkpoint``.
        """
        computing = ("forward", "backward")
        waited = watch.waited_ms("data", *computing, "optimizer")
        split = cls(
            compute_ms=sum(map(watch.ms, computing)) - watch.waited_ms(*computing),
            communication_ms=waited + watch.ms("communication"),
            optimizer_ms=watch.ms("optimizer") - watch.waited_ms("optimizer"),
            data_ms=watch.ms("data") - watch.waited_ms("data"),
            other_ms=0.0,
            checkpoint_ms=watch.ms("checkpoint"),
        )
        return dataclasses.replace(split, other_ms=max(step_s * 1e3 - split.step_ms, 0.0))

    @property
    def step_ms(self) -> float:
        """The whole step, without the checkpoint."""
        computing = self.compute_ms + self.communication_ms + self.optimizer_ms
        return computing + self.data_ms + self.other_ms


class Interval:
    """The steps since the last progress line."""

    def __init__(self) -> None:
        self.steps: list[StepMetrics] = []

    def add(self, metrics: StepMetrics) -> None:
        """Add one step."""
        self.steps.append(metrics)

    def mean(self, name: str) -> float:
        """Mean of the field ``name`` over the interval.

        Rates are averaged over time, not over steps: ``tokens / seconds`` of all steps together.
        """
        values: Sequence[float] = [getattr(metrics, name) for metrics in self.steps]
        if name not in ("tokens_per_s", "tflops", "mfu"):
            return sum(values) / len(values)
        ms = [metrics.step_ms for metrics in self.steps]
        return sum(v * t for v, t in zip(values, ms, strict=True)) / sum(ms)


def achieved_tflops(tokens_per_s: float, flops_per_token: float, world_size: int) -> float:
    """Model FLOP/s per rank in units of 1e12. Work that activation checkpointing does twice counts once.

    Source: Chowdhery et al., PaLM, arXiv 2204.02311, appendix B: MFU is this over the peak of the hardware.
    """
    return tokens_per_s * flops_per_token / world_size / 1e12


def process_peak_nbytes() -> int:
    """Largest resident memory of this process so far, in bytes (Linux counts it in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


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
                # Not counted from what a line says, which may be anything.
                steps = [*sorted(found), start + 1]
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
        # What follows: the last line, and what the disk refused.
        self._tail: list[tuple[int, bytes]] = []
        self._told = False

    def write(self, metrics: StepMetrics, *, durable: bool = False) -> None:
        """Append a line and hand it to the operating system. A line of the same step as the last one replaces that.

        If the line cannot be written, a warning is logged, and it is tried again with the next line. If somebody has
        moved the file or put another one in its place, a warning is logged, and this line and all later ones go to the
        file of that name. If ``durable``, the line is on the disk on return.
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
