"""The starts of a run by jobs that follow one another: ``attempts.jsonl`` in the run folder.

Only rank 0 uses the file. A series is a job with its requeues, an array of one run's parts, or a chain of jobs.
HPCZERO_SERIES names it; the scripts in ``slurm/`` set it. Outside of a series a person decides every start, and nothing
is written.

    start    before anything else, with the newest checkpoint
    begin    the run folder is this run's: a later start of the series goes on from here, whatever the options say
    end      with steps done and exit code
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

from hpczero.errors import EXIT_REQUEUE, ConfigError
from hpczero.files.regular import read_bytes
from hpczero.options.config import ResumeOptions, RunConfig
from hpczero.options.environment import Environment
from hpczero.options.reading import load_toml
from hpczero.run.results.folder import RunFolder

logger = logging.getLogger("hpczero.stops")

FRUITLESS_RESTARTS = 3
_NUMBERS = {"start": ("committed",), "begin": ("step",), "end": ("step", "code")}
FEW_STEPS = 3  # fewer in a start that was asked to stop: its job is too short, or warned too early


class Attempts:
    """The record of one run folder, as a start of one series sees it."""

    def __init__(self, folder: RunFolder, environment: Environment) -> None:
        """Read what earlier starts of the series have written."""
        self._folder = folder
        self._environment = environment
        self._earlier = [
            event
            for event in _read(folder.attempts)
            if environment.series and event.get("series") == environment.series
        ]

    def start(self, *, ranks: int, host: str, in_memory: int = 0) -> None:
        """Record that the run starts. ``in_memory``: step of copies in memory of the nodes, 0 if there are none.

        Raises:
            ConfigError: three restarts in a row have committed no checkpoint, or were stopped within two steps each.
                More of them would not do better.
        """
        if not self._environment.series:
            return
        committed = self._folder.newest_step()
        restarts = self._starts()[1:]
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
        self._write("start", committed=committed, ranks=ranks, host=host, **copied)

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

    def begin(self, step: int, *, in_memory: bool = False) -> None:
        """Record that the run folder is ready, with ``step`` steps done; whether it has them from copies in memory."""
        self._write("begin", step=step, **({"in_memory": True} if in_memory else {}))

    def end(self, step: int, code: int, why: str = "") -> None:
        """Record how the run ended, if it came to a regular end; ``why``, if it ended early with its results."""
        self._write("end", step=step, code=code, **({"why": why} if why else {}))

    def _starts(self) -> list[list[dict[str, Any]]]:
        """What every earlier start of the series has written, its start first."""
        starts: list[list[dict[str, Any]]] = []
        for event in self._earlier:
            if event["event"] == "start":
                starts.append([])
            if starts:
                starts[-1].append(event)
        return starts

    def _write(self, event: str, **facts: Any) -> None:
        if not self._environment.series:
            return
        line = {
            "event": event,
            "time": round(time.time(), 1),
            "series": self._environment.series,
            "job": self._environment.job,
            "restart": self._environment.restart,
            **facts,
        }
        with self._folder.writing():
            self._folder.path.mkdir(parents=True, exist_ok=True)
            path = self._folder.attempts
            whole = not path.exists() or path.read_bytes()[-1:] in (b"", b"\n")
            with path.open("a", encoding="utf-8") as file:
                file.write(f"{'' if whole else chr(10)}{json.dumps(line)}\n")


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


def _read(path: Path) -> list[dict[str, Any]]:
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
    if wrong:
        logger.warning(
            "%s: %d line(s) cannot be read, the first is %d; left out", path, len(wrong), wrong[0]
        )
    return events


def _is_event(event: Mapping[str, Any]) -> bool:
    numbers = _NUMBERS.get(str(event.get("event")))
    return numbers is not None and all(type(event.get(name)) is int for name in numbers)
