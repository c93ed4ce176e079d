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
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from hpczero.checkpoint.disk.folder import Folder
from hpczero.checkpoint.disk.format import step_of_folder
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
PARTS = ("forward", "backward", "optimizer", "data")  # of a step
GOOD = ("starting", "training", "saving", "finished")  # states
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
        when: of this look, in seconds since the epoch.
        state: one word or two: training, saving, stalled, killed, finished ...
        said: what that means here, in a sentence.
        figures: names and texts, in the order in which they are shown.
        curves: title of a plot, names of its curves, their points.
        starts: when, who, where it began, how it ended.
        notes: the newest warnings, the last one last.
        job: number of the SLURM job of the last start; empty outside of SLURM.
    """

    path: Path
    when: float
    state: str
    said: str
    figures: dict[str, str] = field(default_factory=dict)
    curves: dict[str, dict[str, list[tuple[float, float]]]] = field(default_factory=dict)
    starts: list[tuple[str, str, str, str]] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)
    job: str = ""

    @property
    def goes_on(self) -> bool:
        """Whether a later look may find more without another start."""
        return self.state in GOOD[:-1] or self.state in ("stalled", "no run", "not begun")


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
            return Picture(path, when, "no run", "there is no such folder yet")
        config = self._kept(self._folder.config, lambda p: load_toml(p, RunConfig))
        quietly = partial(read_attempts, warns=False)
        events: list[Event] = self._kept(self._folder.attempts, quietly) or []
        with suppress(OSError):  # none yet
            self._follow()
        starts = by_start(events)
        now = starts[-1] if starts else []
        state, said = self._state(now, config, when)
        facts = {key: value for event in now for key, value in event.items()}
        figures = self._of_steps(now, config, facts) if self._recent else {}
        if state not in GOOD[:-1]:
            figures.pop("time left", None)
        figures["checkpoints"] = self._checkpoints(when)
        if config is not None:
            of, batch = config.parallel, f"global batch {config.train.global_batch}"
            figures["settings"] = f"{config.model.title}, stage {of.stage}, {of.precision}, {batch}"
        if now:
            figures["ranks"] = _who(facts)
        unit = facts.get("unit", "token")
        curves = {
            title.format(unit=unit): {n: c.points for n, c in named.items() if c.points}
            for title, named in self._curves.items()
        }
        rows = [_row(group, "killed: it did not say how it ended") for group in starts[:-1]]
        rows += [_row(now, state)] if now else []
        notes = [
            (_at(event.get("time")), f"{event.get('kind')}: {event.get('text')}")
            for event in events
            if event["event"] == "note" and event.get("kind") != SLOW
        ]
        job = str(facts.get("job", ""))
        return Picture(path, when, state, said, figures, curves, rows, notes[-NOTES:], job)

    def _kept(self, path: Path, read: Callable[[Path], Any]) -> Any:
        """What ``read`` makes of a file, as long as the file stays the same; None if it cannot be read."""
        try:
            found = path.stat()
            key = (found.st_ino, found.st_mtime_ns, found.st_size)
            if path not in self._read or self._read[path][0] != key:
                self._read[path] = (key, read(path))
        except (OSError, ConfigError):
            return None
        return self._read[path][1]

    def _follow(self) -> None:
        anew, records = self._tail.read()
        if anew:
            self._recent.clear()
            self._held_out.clear()
            self._curves = {t: {name: Curve() for name in named} for t, named in CURVES.items()}
        for record in records:
            if self._recent and record.step <= self._recent[-1].step:
                self._recent[-1] = record  # written once more, after its save
                continue
            self._recent.append(record)
            if record.held_out_loss is not None and math.isfinite(record.held_out_loss):
                found = (record.step, record.held_out_loss)
                self._held_out = [min([*self._held_out[:1], found], key=itemgetter(1)), found]
            for title, curves in self._curves.items():
                for name, curve in curves.items():
                    curve.add(record.step, CURVES[title][name](record))

    def _state(self, now: list[Event], config: RunConfig | None, when: float) -> tuple[str, str]:
        """Word and sentence."""
        last = self._recent[-1] if self._recent else None
        done = f"step {last.step:,}, {_ago(self._tail.written, when)}" if last else "its first step"
        begins = [event for event in now if event["event"] == "begin"]
        ends = [event for event in now if event["event"] == "end"]
        holder = living_holder(self._folder.checkpoints)
        if ends and not (holder and when - ends[-1].get("time", when) > QUIET_S):
            return _ended(ends)
        if holder is None and self._folder.weights.exists():
            return "finished", f"the final weights are there; the last line is of {done}"
        if holder is None and last is None and not begins:
            return "not begun", "no metrics yet, and no process has the folder"
        if holder is None:
            said = "no process of this run lives, and none has said how it ended"
            return "killed", f"{said}; it came to {done}"
        if ends or not begins or last is None or last.step <= begins[-1]["step"]:
            return "starting", f"no metrics of this start yet; the folder is held by {holder}"
        temporary = [entry.name for entry in self._folder.checkpoints.glob(".tmp-step-[0-9]*-*")]
        numbers = [name.split("-")[2] for name in temporary]
        steps = [f"{int(number):,}" for number in numbers if number.isdecimal()]
        saving = f"checkpoint of step {steps[0]} is being written" if steps else ""
        if config is not None and last.step >= config.train.steps:
            return "saving", saving or "all steps are done; the results are being written"
        if saving and not (config is not None and config.checkpoint.background):
            return "saving", f"{saving}; the last line is of {done}"
        step_s, longest_ms = (
            self._step_s(now),
            max(m.step_ms + m.checkpoint_ms for m in self._recent),
        )
        limit_s = max(QUIET_S, QUIET_MEANS * step_s, QUIET_STEPS * longest_ms / 1e3)
        if when - self._tail.written > limit_s:
            took = f"a step takes {step_s:.2f} s"
            return "stalled", f"no line since {done}; {took}, and the run lives: {holder}"
        return "training", "; ".join(filter(None, (done, saving)))

    def _step_s(self, now: list[Event]) -> float:
        """Seconds from line to line in this start, all that is done between included; else of steps and saves alone."""
        begin = next((event for event in now if event["event"] == "begin"), {})
        steps = self._recent[-1].step - begin.get("step", math.inf)
        taken_s: float = self._tail.written - begin.get("time", math.inf)
        if steps > 0 and taken_s > 0:
            return taken_s / float(steps)
        return sum(m.step_ms + m.checkpoint_ms for m in self._recent) / len(self._recent) / 1e3

    def _of_steps(self, now: list[Event], config: RunConfig | None, facts: Event) -> dict[str, str]:
        last, recent = self._recent[-1], Interval()
        recent.steps = list(self._recent)
        mean, of_many = recent.mean, f"mean of {len(self._recent)} steps"
        steps = config.train.steps if config is not None else last.step
        rows = {"step": f"{last.step:,} of {steps:,} ({last.step / steps:.0%})"}
        rows["time left"] = f"{clock(self._step_s(now) * (steps - last.step))} of training"
        rows["loss"] = f"{last.loss:.4f}, {of_many} {mean('loss'):.4f}"
        if self._held_out:
            (at, lowest), (newest, loss) = self._held_out
            best = f"lowest {lowest:.4f} after step {at:,}"
            rows["held-out loss"] = f"{loss:.4f} after step {newest:,}, {best}"
        rows["learning rate"] = f"{last.learning_rate:.2e}, norm {last.grad_norm:.3g}"
        if last.skipped_steps:
            rows["skipped steps"] = f"{last.skipped_steps:,}, loss scale {last.loss_scale:g}"
        unit = f"{facts.get('unit', 'token')}s/s"
        rows["speed"] = f"{last.tokens_per_s:,.0f} {unit}, {of_many} {mean('tokens_per_s'):,.0f}"
        if last.mfu is not None:
            rows["MFU"] = f"{mean('mfu'):.1%}, {mean('tflops'):.3g} TFLOP/s a rank"
        elif math.isfinite(last.tflops):
            rows["TFLOP/s"] = f"{mean('tflops'):.3g} a rank; give --log.peak_tflops for MFU"
        parts = (f"{name} {mean(f'{name}_ms'):.1f}" for name in PARTS)
        rows["step time"] = f"{mean('step_ms'):.1f} ms: {', '.join(parts)}"
        waits = sum(map(waits_of, recent.steps)) / len(recent.steps)
        ms = f"{waits * mean('step_ms'):.1f} ms"
        rows["communication"] = f"{waits:.1%} of a step waits for other ranks, {ms} (rank 0)"
        rows["memory"] = _memory(last, facts)
        every = config.log.stragglers_every if config is not None else 0
        rows["slow ranks"] = _slow(now, last.step // every * every if every else 0)
        return rows

    def _checkpoints(self, when: float) -> str:
        try:
            found = Folder(self._folder.checkpoints).candidates()
            newest = found[0].stat().st_mtime if found else 0.0
        except (OSError, ConfigError, CheckpointError) as error:
            return str(error)
        if not found:
            return "none yet"
        return f"{len(found)}, the newest of step {step_of_folder(found[0].name):,}, {_ago(newest, when)}"


def _slow(now: list[Event], looked: int) -> str:
    """Ranks that the last search found slow; that was after step ``looked``."""
    told = [event for event in now if event.get("kind") == SLOW]
    if not told:
        return f"none up to step {looked:,}" if looked else "no search yet (--log.stragglers_every)"
    *before, step = [event.get("step", 0) for event in told]
    none = f"none at step {looked:,}; " if looked > step else ""
    earlier = f"; before at step {', '.join(f'{s:,}' for s in before[-3:])}" if before else ""
    return f"{none}at step {step:,}: {told[-1].get('text')}{earlier}"


def _ended(ends: list[Event]) -> tuple[str, str]:
    """State of a run that said so itself: its first error, else its last word."""
    end = next((event for event in ends if event.get("error")), ends[-1])
    at = f"step {end['step']:,}, {_at(end.get('time'))}"
    if end["code"] == 0:
        return "finished", f"{end.get('why') or 'all steps are done'}: {at}"
    if end["code"] == EXIT_REQUEUE:
        return "stopped", f"as asked, after {at}; the same command goes on"
    who = f"rank {end['rank']}: " if "rank" in end else ""
    return "ended with error", f"exit code {end['code']} after {at}: {who}{end.get('error', '')}"


def _row(group: list[Event], otherwise: str) -> tuple[str, str, str, str]:
    """One start: when, who, where it began, how it ended."""
    begins = [f"step {event['step']:,}" for event in group if event["event"] == "begin"]
    ends = [event for event in group if event["event"] == "end"]
    how = ": ".join(_ended(ends)) if ends else otherwise
    began = begins[-1] if begins else "did not begin"
    return _at(group[0].get("time")), _who(group[0]), began, how


def _who(facts: Event) -> str:
    job = f", job {facts['job']}" if facts.get("job") else ""
    return f"{facts.get('ranks', '?')} ranks, rank 0 on {facts.get('host', '?')}{job}"


def _memory(last: StepMetrics, facts: Event) -> str:
    """What rank 0 holds, beside what the plan says of it."""
    states, most = facts.get("planned", (0, 0))
    of_plan = f" of {_mib(states)} planned" if states else ""
    plan = f" (planned: up to {_mib(most)}, and what torch and MPI grow by)" if most else ""
    rows = [f"states and buffers {_mib(last.state_peak_nbytes)}{of_plan}"]
    if last.device_peak_nbytes is not None:
        rows.append(f"device {_mib(last.device_peak_nbytes)}{plan}")
        plan = ""
    process = last.process_peak_nbytes
    more = f"{_mib(process - facts.get('held_nbytes', 0))} more than before the run{plan}"
    return "; ".join([*rows, f"process {_mib(process)}, {more}"])


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:,.0f} MiB"


def _at(seconds: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds else "?"


def _ago(seconds: float, when: float) -> str:
    return f"{_at(seconds)} ({clock(max(when - seconds, 0.0))} ago)"
