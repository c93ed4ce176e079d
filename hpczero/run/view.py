"""What the files of a run folder tell of a run: its state, its figures, its starts and what it warned of.

It is read without torch and MPI, by a process beside the run or by a thread of it. Nothing is written, no lock is
taken. What ``metrics.jsonl`` had at the last look is not read again, so the length of a run costs nothing.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpczero.checkpoint.disk.folder import Folder
from hpczero.checkpoint.disk.format import step_of_folder
from hpczero.checkpoint.disk.lines import TEMPORARY
from hpczero.checkpoint.disk.lock import living_holder
from hpczero.errors import EXIT_REQUEUE, CheckpointError, ConfigError
from hpczero.options.config import RunConfig
from hpczero.options.reading import load_toml
from hpczero.run.results.folder import RunFolder
from hpczero.run.results.metrics import Interval, MetricsTail, StepMetrics
from hpczero.run.results.progress import clock
from hpczero.run.starting.attempts import SLOW, by_start, read_attempts

RECENT = 50  # steps that rates are a mean of
POINTS = 256  # of a curve, at least, once it has had so many steps
QUIET_S = 60.0  # without a new line, before a run is called stalled; and of its mean step and its longest one:
QUIET_MEANS, QUIET_STEPS = 10, 3
NOTES = 8  # newest ones that are shown
PLANNED = ("planned_state_nbytes", "planned_nbytes", "held_nbytes")  # in the record of a start
Event = dict[str, Any]


class Curve:
    """A figure over the steps: few points, however many steps. Each is the mean of equally many values."""

    def __init__(self) -> None:
        self._points: list[tuple[float, float]] = []
        self._each = 1
        self._open: list[tuple[float, float]] = []

    def add(self, step: int, value: float | None) -> None:
        """Add one value; one that is missing or not finite is left out."""
        if value is None or not math.isfinite(value):
            return
        self._open.append((step, value))
        if len(self._open) == self._each:
            self._points.append(_mean(self._open))
            self._open.clear()
        if len(self._points) == 2 * POINTS:
            self._points = [_mean(self._points[i : i + 2]) for i in range(0, 2 * POINTS, 2)]
            self._each *= 2

    @property
    def points(self) -> list[tuple[float, float]]:
        """Step and value of each point."""
        return [*self._points, _mean(self._open)] if self._open else self._points


def _mean(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    steps, values = zip(*points, strict=True)
    return sum(steps) / len(points), sum(values) / len(points)


# Title of a plot -> its curves -> their values in a record.
CURVES: dict[str, dict[str, Callable[[StepMetrics], float | None]]] = {
    "loss": {"training": lambda m: m.loss, "held out": lambda m: m.held_out_loss},
    "{unit}s per second": {"speed": lambda m: m.tokens_per_s},
    "% of a step that waits for other ranks": {"rank 0": lambda m: 100 * waits_of(m)},
    "MiB of memory, rank 0": {
        "process": lambda m: m.process_peak_nbytes / 2**20,
        "device": lambda m: m.device_peak_nbytes and m.device_peak_nbytes / 2**20,
    },
}


def waits_of(metrics: StepMetrics) -> float:
    """Share of a step that waited for collectives: by the device's clock if there is one."""
    exposed = metrics.device_exposed_ms
    return (metrics.communication_ms if exposed is None else exposed) / metrics.step_ms


@dataclass(frozen=True)
class Picture:
    """A run as it was at one look.

    Attributes:
        path: folder of the run.
        state: one word or two: training, saving, stalled, killed, finished ...
        said: what that means here, in a sentence.
        goes_on: whether a later look may find more.
        figures: names and texts, in the order in which they are shown.
        curves: title of a plot, names of its curves, their points.
        starts: when, who, where it began, how it ended.
        notes: the newest warnings, the last one last.
        job: number of the SLURM job of the last start; empty outside of SLURM.
        when: of this look, in seconds since the epoch.
    """

    path: Path
    state: str
    said: str
    goes_on: bool = True
    figures: list[tuple[str, str]] = field(default_factory=list)
    curves: dict[str, dict[str, list[tuple[float, float]]]] = field(default_factory=dict)
    starts: list[tuple[str, str, str, str]] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)
    job: str = ""
    when: float = 0.0


class RunView:
    """One run folder, looked at again and again."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._tail = MetricsTail(folder.metrics)
        self._recent: deque[StepMetrics] = deque(maxlen=RECENT)
        self._held_out: list[tuple[int, float]] = []  # the lowest and the last
        self._curves: dict[str, dict[str, Curve]] = {}
        self._read: dict[Path, tuple[object, Any]] = {}

    def look(self) -> Picture:
        """The run as it is now."""
        when = time.time()
        path = self._folder.path
        if not path.is_dir():
            return Picture(path, "no run", "there is no such folder yet", when=when)
        config = self._kept(self._folder.config, lambda p: load_toml(p, RunConfig))
        events: list[Event] = self._kept(self._folder.attempts, read_attempts) or []
        with suppress(OSError):  # none yet
            self._follow()
        starts = by_start(events)
        now = starts[-1] if starts else []
        state, said, goes_on = self._state(now, config, when)
        begun = {key: value for event in now for key, value in event.items()}
        unit = str(begun.get("unit", "token"))
        return Picture(
            path,
            state,
            said,
            goes_on,
            self._figures(now, config, begun, when, goes_on=goes_on),
            {
                title.format(unit=unit): {n: c.points for n, c in curves.items() if c.points}
                for title, curves in self._curves.items()
            },
            [_row(group, is_last=group is now, state=state) for group in starts],
            [
                (_clock_time(event), f"{event.get('kind')}: {event.get('text')}")
                for event in events
                if event["event"] == "note" and event.get("kind") != SLOW
            ][-NOTES:],
            str(begun.get("job", "")),
            when,
        )

    def _kept(self, path: Path, read: Callable[[Path], Any]) -> Any:
        """What ``read`` makes of a file, as long as the file stays the same; None if it cannot be read."""
        try:
            found = path.stat()
            key = (found.st_ino, found.st_mtime_ns, found.st_size)
            if self._read.get(path, (None, None))[0] != key:
                self._read[path] = (key, read(path))
        except (OSError, ConfigError):
            return None
        return self._read[path][1]

    def _follow(self) -> None:
        anew, records = self._tail.read()
        if anew:
            self._recent.clear()
            self._held_out.clear()
            self._curves = {t: {name: Curve() for name in curves} for t, curves in CURVES.items()}
        for record in records:
            if self._recent and record.step <= self._recent[-1].step:
                self._recent[-1] = record  # written once more, after its save
                continue
            self._recent.append(record)
            if record.held_out_loss is not None and math.isfinite(record.held_out_loss):
                found = (record.step, record.held_out_loss)
                lowest = min([*self._held_out[:1], found], key=lambda each: each[1])
                self._held_out = [lowest, found]
            for title, curves in CURVES.items():
                for name, value in curves.items():
                    self._curves[title][name].add(record.step, value(record))

    def _state(
        self, now: list[Event], config: RunConfig | None, when: float
    ) -> tuple[str, str, bool]:
        """Word, sentence, and whether the run goes on."""
        last = self._recent[-1] if self._recent else None
        done = f"step {last.step:,}" if last else "its first step"
        quiet_s = max(when - self._tail.written, 0.0)
        begins = [event for event in now if event["event"] == "begin"]
        ends = [event for event in now if event["event"] == "end"]
        holder = living_holder(self._folder.checkpoints)
        if ends and not (holder and when - ends[-1].get("time", when) > QUIET_S):
            return _ended(ends)
        if holder is None:
            if self._folder.weights.exists():
                return "finished", f"the final weights are there; the last line is of {done}", False
            if last is None and not begins:
                return "not begun", "no metrics yet, and no process has the folder", True
            since = "" if last is None else f", {_ago(self._tail.written, when)}"
            return (
                "killed",
                f"no process of this run lives, and none has said how it ended; it came to {done}{since}. The same "
                "command goes on from the newest checkpoint",
                False,
            )
        if ends or not begins or last is None or last.step <= begins[-1]["step"]:
            return "starting", f"no metrics of this start yet; the folder is held by {holder}", True
        saved = [
            e.name for e in self._folder.checkpoints.glob(".tmp-*") if TEMPORARY.fullmatch(e.name)
        ]
        saving = (
            f"checkpoint of step {int(saved[0].split('-')[2]):,} is being written" if saved else ""
        )
        if config is not None and last.step >= config.train.steps:
            return "saving", saving or "all steps are done; the results are being written", True
        limit_s = max(
            QUIET_S,
            QUIET_MEANS * self._step_s(now),
            QUIET_STEPS * max(m.step_ms + m.checkpoint_ms for m in self._recent) / 1e3,
        )
        if saving and not (config is not None and config.checkpoint.background):
            return (
                "saving",
                f"{saving}; the last line, of {done}, is {_ago(self._tail.written, when)}",
                True,
            )
        if quiet_s > limit_s:
            return (
                "stalled",
                f"no line since {done}, {_ago(self._tail.written, when)}, and a step takes {self._step_s(now):.2f} s; "
                f"the process lives: {holder}",
                True,
            )
        return (
            "training",
            f"{done}, {_ago(self._tail.written, when)}{f'; {saving}' if saving else ''}",
            True,
        )

    def _step_s(self, now: list[Event]) -> float:
        """Seconds from line to line in this start, all that is done between included; else of steps and saves alone."""
        begin = next((event for event in now if event["event"] == "begin"), None)
        last = self._recent[-1]
        if begin and last.step > begin["step"] and self._tail.written > begin.get("time", math.inf):
            return float(self._tail.written - begin["time"]) / (last.step - begin["step"])
        return sum(m.step_ms + m.checkpoint_ms for m in self._recent) / len(self._recent) / 1e3

    def _figures(
        self,
        now: list[Event],
        config: RunConfig | None,
        begun: Event,
        when: float,
        *,
        goes_on: bool,
    ) -> list[tuple[str, str]]:
        rows: list[tuple[str, str]] = []
        if self._recent:
            rows += self._of_steps(now, config, begun, goes_on=goes_on)
            slow = self._slow_ranks(now, config)
            rows.append(("slow ranks", slow))
        rows.append(("checkpoints", self._checkpoints(when)))
        if config is not None:
            parallel, train = config.parallel, config.train
            rows.append(
                (
                    "settings",
                    f"{config.model.title}, stage {parallel.stage}, {parallel.precision}, global batch "
                    f"{train.global_batch}",
                )
            )
        if begun:
            job = f", SLURM job {begun['job']}" if begun.get("job") else ""
            rows.append(
                ("ranks", f"{begun.get('ranks', '?')}, rank 0 on {begun.get('host', '?')}{job}")
            )
        return rows

    def _of_steps(
        self, now: list[Event], config: RunConfig | None, begun: Event, *, goes_on: bool
    ) -> list[tuple[str, str]]:
        last, recent, unit = self._recent[-1], Interval(), begun.get("unit", "token")
        recent.steps = list(self._recent)
        mean, many = recent.mean, len(recent.steps)
        steps = config.train.steps if config is not None else 0
        rows = [
            (
                "step",
                f"{last.step:,}" + (f" of {steps:,} ({last.step / steps:.0%})" if steps else ""),
            )
        ]
        if goes_on and steps > last.step:
            rows.append(
                ("time left", f"{clock(self._step_s(now) * (steps - last.step))} of training")
            )
        rows.append(("loss", f"{last.loss:.4f}, mean of {many} steps {mean('loss'):.4f}"))
        if self._held_out:
            lowest, newest = self._held_out
            rows.append(
                (
                    "held-out loss",
                    f"{newest[1]:.4f} after step {newest[0]:,}, lowest {lowest[1]:.4f} after step {lowest[0]:,}",
                )
            )
        skipped = (
            f", {last.skipped_steps} skipped, scale {last.loss_scale:g}"
            if last.skipped_steps
            else ""
        )
        rows.append(
            ("learning rate", f"{last.learning_rate:.2e}, norm {last.grad_norm:.3g}{skipped}")
        )
        rows.append(
            (
                "speed",
                f"{last.tokens_per_s:,.0f} {unit}s/s, mean of {many} steps {mean('tokens_per_s'):,.0f}",
            )
        )
        if last.mfu is not None:
            rows.append(("MFU", f"{mean('mfu'):.1%}, {mean('tflops'):.3g} TFLOP/s a rank"))
        elif math.isfinite(last.tflops):
            said = "a rank; give --log.peak_tflops for MFU"
            rows.append(("TFLOP/s", f"{mean('tflops'):.3g} {said}"))
        parts = ", ".join(
            f"{name} {mean(f'{name}_ms'):.1f}"
            for name in ("forward", "backward", "optimizer", "data")
        )
        rows.append(("step time", f"{mean('step_ms'):.1f} ms: {parts}"))
        waits = sum(map(waits_of, recent.steps)) / many
        rows.append(
            (
                "communication",
                f"{waits:.1%} of a step waits for other ranks, {waits * mean('step_ms'):.1f} ms (rank 0)",
            )
        )
        rows.append(("memory", _memory(last, begun)))
        return rows

    def _slow_ranks(self, now: list[Event], config: RunConfig | None) -> str:
        every = config.log.stragglers_every if config is not None else 0
        if not every:
            return "nobody looks for them (--log.stragglers_every)"
        looked = self._recent[-1].step // every * every
        told = [event for event in now if event.get("kind") == SLOW]
        if not told:
            return f"none up to step {looked:,}" if looked else f"first search after step {every:,}"
        *before, step = [event.get("step", 0) for event in told]
        none = f"none at step {looked:,}; " if looked > step else ""
        earlier = f"; before at step {', '.join(f'{s:,}' for s in before[-3:])}" if before else ""
        return f"{none}at step {step:,}: {told[-1]['text']}{earlier}"

    def _checkpoints(self, when: float) -> str:
        try:
            found = Folder(self._folder.checkpoints).candidates()
            if not found:
                return "none yet"
            step = step_of_folder(found[0].name)
            return (
                f"{len(found)}, the newest of step {step:,}, {_ago(found[0].stat().st_mtime, when)}"
            )
        except (OSError, ConfigError, CheckpointError) as error:
            return str(error)


def _ended(ends: list[Event]) -> tuple[str, str, bool]:
    """State of a run that said so itself: its first error, else its last word."""
    end = next((event for event in ends if event.get("error")), ends[-1])
    at = f"step {end['step']:,}, {_clock_time(end)}"
    if end["code"] == 0:
        return "finished", f"all steps are done: {at}", False
    if end["code"] == EXIT_REQUEUE:
        return "stopped", f"as asked, after {at}; the same command goes on", False
    rank = f"Rank {end['rank']}: " if "rank" in end else ""
    return (
        "ended with error",
        f"exit code {end['code']} after {at}. {rank}{end.get('error', '')}",
        False,
    )


def _row(group: list[Event], *, is_last: bool, state: str) -> tuple[str, str, str, str]:
    """One start: when, who, where it began, how it ended."""
    first = group[0]
    begins = [event["step"] for event in group if event["event"] == "begin"]
    ends = [event for event in group if event["event"] == "end"]
    job = f", job {first['job']}" if first.get("job") else ""
    how = state if is_last else "killed: it did not say how it ended"
    if ends:
        state, said, _ = _ended(ends)
        how = f"{state}: {said}"
    return (
        _clock_time(first),
        f"{first.get('ranks', '?')} ranks, {first.get('host', '?')}{job}",
        f"step {begins[-1]:,}" if begins else "did not come so far",
        how,
    )


def _memory(last: StepMetrics, begun: Event) -> str:
    """What rank 0 holds, beside what the plan says of it."""
    states, most, held = (begun.get(name, 0) for name in PLANNED)
    process = last.process_peak_nbytes
    rows = [
        f"states and buffers {_mib(last.state_peak_nbytes)}{f' of {_mib(states)} planned' if states else ''}"
    ]
    plan = f" (planned: up to {_mib(most)}, and what torch and MPI grow by)" if most else ""
    if last.device_peak_nbytes is not None:
        rows.append(f"device {_mib(last.device_peak_nbytes)}{plan}")
        plan = ""
    grown = f", {_mib(process - held)} more than before the run{plan}" if held else ""
    return "; ".join([*rows, f"process {_mib(process)}{grown}"])


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:,.0f} MiB"


def _clock_time(event: Event) -> str:
    seconds = event.get("time")
    known = isinstance(seconds, int | float)
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if known else "?"


def _ago(seconds: float, when: float) -> str:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    return f"{at} ({clock(max(when - seconds, 0.0))} ago)"
