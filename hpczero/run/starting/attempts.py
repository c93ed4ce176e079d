"""The starts of a run, what each warned of and how it ended: ``attempts.jsonl`` in the run folder.

Rank 0 writes the file, and a rank that fails alone. A series is a job with its requeues, an array of one run's parts,
or a chain of jobs. HPCZERO_SERIES names it; the scripts in ``slurm/`` set it. Outside of a series a person decides
every start: the lines are for people then, and no start is refused for them.

    start    before anything else, with the newest checkpoint; outside of a series just before ``begin``
    begin    the run folder is this run's: a later start of the series goes on from here, whatever the options say
    note     a warning of rank 0, or a rank that is slow
    end      with steps done and exit code, and with the error if there was one
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

from hpczero.errors import EXIT_FAILURE, EXIT_REQUEUE, ConfigError
from hpczero.files.regular import read_bytes
from hpczero.options.config import ResumeOptions, RunConfig
from hpczero.options.environment import Environment
from hpczero.options.reading import load_toml
from hpczero.run.results.folder import RunFolder

logger = logging.getLogger("hpczero.stops")

FRUITLESS_RESTARTS = 3
_NUMBERS = {"start": ("committed",), "begin": ("step",), "note": (), "end": ("step", "code")}
FEW_STEPS = 3  # fewer in a start that was asked to stop: its job is too short, or warned too early
MOST_NOTES = 1000  # of one start
SLOW = "slow ranks"  # kind of a note
SAID = 1000  # characters of a note or an error


class Attempts:
    """The record of one run folder, as a start of one series sees it.

    Attributes:
        step: steps done, as far as they were told.
    """

    def __init__(
        self, folder: RunFolder, environment: Environment, *, is_root: bool = True
    ) -> None:
        """Read what earlier starts of the series have written. Only ``is_root`` writes more than its own failure."""
        self._folder = folder
        self._environment = environment
        self._is_root = is_root
        self._earlier = [
            event
            for event in (read_attempts(folder.attempts) if environment.series else [])
            if event.get("series") == environment.series and event["event"] != "note"
        ]
        self._start: dict[str, Any] = {}  # until it is written
        self._notes: set[str] = set()
        self.step = 0

    def start(self, *, ranks: int, host: str, in_memory: int = 0, held_nbytes: int = 0) -> None:
        """Record that the run starts.

        ``in_memory`` is the step of copies in memory of the nodes, 0 if there are none. ``held_nbytes`` is what this
        process holds before the run has allocated anything.

        Raises:
            ConfigError: three restarts in a row have committed no checkpoint, or were stopped within two steps each.
                More of them would not do better.
        """
        facts = {"ranks": ranks, "host": host, "held_nbytes": held_nbytes}
        if not self._environment.series:
            # Nobody's folder yet: what cannot work is refused before anything is written there.
            self._start = facts
            return
        committed = self._folder.newest_step()
        restarts = by_start(self._earlier)[1:]
        short = _at_end(restarts, _stopped_at_once)
        if short >= FRUITLESS_RESTARTS:
            raise ConfigError(
                f"too little time: {short} restarts in a row were asked to stop before they had done {FEW_STEPS} steps "
                f"({self._folder.attempts}). Ask for more time (TIME=... or sbatch --time=...), and for the warning "
                "less early (SIGNAL_S=... or sbatch --signal=B:USR1@...); large text is tokenized beforehand by "
                "`python -m hpczero.data prepare`. Then submit it anew; it goes on from step "
                f"{committed}"
            )
        here = (committed, in_memory)
        fruitless = _at_end(
            restarts, lambda events: (events[0]["committed"], events[0].get("in_memory", 0)) == here
        )
        if fruitless >= FRUITLESS_RESTARTS:
            raise ConfigError(
                f"crash loop: {fruitless} restarts in a row committed no checkpoint after step {committed} "
                f"({self._folder.attempts}). Look for the cause in the job's log; save more often "
                "(--checkpoint.every) if the job's time is too short for it. Then submit it anew"
            )
        copied = {"in_memory": in_memory} if in_memory else {}
        self._write("start", committed=committed, **facts, **copied)

    def finished(self, steps: int) -> bool:
        """Whether an earlier start of the series has done these ``steps``, or ended early: nothing is left to do.

        A start that was killed between its results and its line "end" has finished, too: a start that begins removes
        earlier results.
        """
        ends = [event for event in self._earlier if event["event"] == "end"]
        if ends and ends[-1]["code"] == 0 and (ends[-1]["step"] == steps or "why" in ends[-1]):
            return True
        begun = any(event["event"] == "begin" for event in self._earlier)
        if not (begun and self._folder.weights.exists() and self._folder.config.exists()):
            return False
        with suppress(ConfigError):  # whoever chooses where to begin says so
            return load_toml(self._folder.config, RunConfig).train.steps == steps
        return False

    def settle(self, config: RunConfig, *, in_memory: int = 0) -> RunConfig:
        """``config``, changed to go on where the series is. Only its first start begins where the options say.

        ``in_memory`` is that of ``start``.

        Raises:
            ConfigError: it cannot be read where the series began, and it has saved nothing since; or what it has saved
                is gone.
        """
        if not any(event["event"] == "begin" for event in self._earlier):
            return config
        if in_memory or self._folder.has_checkpoints:
            overwrite, resume = False, ResumeOptions()
        elif self._folder.weights.exists():
            overwrite, resume = False, config.resume
        else:
            # The folder is ours: what is in it without a checkpoint is what the start before has left.
            origin = self._origin()
            lost = self._saved_since(origin)
            if lost:
                record = self._folder.attempts
                raise ConfigError(
                    f"{self._folder.checkpoints}: earlier starts of this series had saved step {lost}, as "
                    f"{record} says, and nothing is there now. Mount it or move it back, and submit the same "
                    f"command anew; to begin without it, move {record} away and give --run.overwrite true"
                )
            overwrite = not origin
            resume = ResumeOptions(from_=origin) if origin else config.resume
        run = dataclasses.replace(config.run, overwrite=overwrite)
        return dataclasses.replace(config, run=run, resume=resume)

    def _origin(self) -> str:
        """The checkpoint of another run at which the series began; empty if it began anew."""
        if not self._folder.config.exists():
            return ""
        source = load_toml(self._folder.config, RunConfig).resume.from_
        return "" if source in ("auto", "never") else source

    def _saved_since(self, origin: str) -> int:
        """Step of the newest recorded save since a start has begun anew or at ``origin``; 0 if there is none."""
        steps = [0]
        for event in self._earlier:
            if event["event"] == "begin":  # at a checkpoint of its own, or with an empty folder
                steps = [0 if origin or event.get("in_memory") else event["step"]]
            elif event["event"] == "start":
                steps.append(event["committed"])
            elif event["code"] in (0, EXIT_REQUEUE):
                steps.append(event["step"])
        return max(steps)

    def begin(self, step: int, *, in_memory: bool = False, **facts: Any) -> None:
        """Record that the run folder is ready, with ``step`` steps done; whether it has them from copies in memory.

        ``facts`` are more for people.
        """
        self.step = step
        if self._start:
            self._write("start", committed=self._folder.newest_step(), **self._start)
        self._write("begin", step=step, **({"in_memory": True} if in_memory else {}), **facts)

    def note(self, kind: str, text: str) -> None:
        """Record what people should see, once. A full disk does not matter: it stands in the log of the job, too."""
        if self._is_root and text not in self._notes and len(self._notes) < MOST_NOTES:
            self._notes.add(text)
            if len(self._notes) == MOST_NOTES:
                kind, text = "warning", "later warnings and slow ranks stand in the job's log alone"
            with suppress(ConfigError):
                self._write("note", kind=kind, step=self.step, text=text[:SAID])

    def end(self, step: int, code: int, why: str = "") -> None:
        """Record how the run ended, if it came to a regular end; ``why``, if it ended early with its results."""
        self._write("end", step=step, code=code, **({"why": why} if why else {}))

    @contextmanager
    def told(self, rank: int) -> Iterator[None]:
        """Context around the steps of a run: warnings become notes, an error the end of this start.

        Of an error that all ranks raise together rank 0 tells.
        """
        notes = _Notes(self)
        logging.getLogger("hpczero").addHandler(notes)
        try:
            yield
        except BaseException as error:
            if self._is_root or not getattr(error, "agreed", False):
                other = 130 if isinstance(error, KeyboardInterrupt) else EXIT_FAILURE
                code = getattr(error, "exit_code", other)
                text = f"{type(error).__name__}: {error}"[:SAID]
                with suppress(ConfigError):  # the first error tells
                    self._append("end", step=self.step, code=code, rank=rank, error=text)
            raise
        finally:
            logging.getLogger("hpczero").removeHandler(notes)

    def _write(self, event: str, **facts: Any) -> None:
        if not self._is_root:
            return
        # Outside of a series nothing depends on it.
        with nullcontext() if self._environment.series else suppress(ConfigError):
            self._append(event, **facts)

    def _append(self, event: str, **facts: Any) -> None:
        line = {
            "event": event,
            "time": round(time.time(), 1),
            "series": self._environment.series,
            "job": self._environment.job,
            "restart": self._environment.restart,
            **facts,
        }
        with self._folder.writing():
            if event == "start":  # later a folder that is gone was deleted, and stays so
                self._folder.path.mkdir(parents=True, exist_ok=True)
            path = self._folder.attempts
            whole = not path.exists() or path.read_bytes()[-1:] in (b"", b"\n")
            with path.open("a", encoding="utf-8") as file:
                file.write(f"{'' if whole else chr(10)}{json.dumps(line)}\n")


class _Notes(logging.Handler):
    """Warnings of this process as notes."""

    def __init__(self, attempts: Attempts) -> None:
        super().__init__(logging.WARNING)
        self._attempts = attempts

    def emit(self, record: logging.LogRecord) -> None:
        self._attempts.note(record.levelname.lower(), record.getMessage())


def by_start(events: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """What every start has written, its start first."""
    starts: list[list[dict[str, Any]]] = []
    for event in events:
        if event["event"] == "start":
            starts.append([])
        if starts:
            starts[-1].append(event)
    return starts


def _at_end(
    starts: Sequence[list[dict[str, Any]]], holds: Callable[[list[dict[str, Any]]], bool]
) -> int:
    """Number of the last starts in a row for which ``holds`` is true."""
    return len(list(takewhile(holds, reversed(starts))))


def _stopped_at_once(events: list[dict[str, Any]]) -> bool:
    """Whether this start was asked to stop, and stopped in order, before it had done two steps."""
    begun = [event["step"] for event in events if event["event"] == "begin"]
    ends = [event for event in events if event["event"] == "end"]
    ended = [event["step"] for event in ends if event["code"] == EXIT_REQUEUE]
    # A start without a beginning had to tokenize its text, or to wait for it.
    return bool(ended) and (not begun or ended[-1] - begun[-1] < FEW_STEPS)


def read_attempts(path: Path, *, warns: bool = True) -> list[dict[str, Any]]:
    """Every whole line. A line that a killed job has half written is left out, and so is a damaged one, with a warning.

    Raises:
        ConfigError: the file cannot be read.
    """
    events: list[dict[str, Any]] = []
    wrong = []
    try:
        lines = read_bytes(path).split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read as the record of earlier starts: {error.strerror}; move it away to go on without"
        ) from error
    for number, line in enumerate(lines, 1):
        event: Any = None
        with suppress(ValueError, RecursionError):
            event = json.loads(line.strip(b"\0 \t\r") or b"null")
        if isinstance(event, dict) and _is_event(event):
            events.append(event)
        elif line.strip(b"\0 \t\r") and number < len(lines):
            wrong.append(number)
    if wrong and warns:
        logger.warning(
            "%s: %d line(s) cannot be read, the first is %d; left out", path, len(wrong), wrong[0]
        )
    return events


def _is_event(event: Mapping[str, Any]) -> bool:
    numbers = _NUMBERS.get(str(event.get("event")))
    return numbers is not None and all(type(event.get(name)) is int for name in numbers)
