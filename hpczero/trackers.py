"""Trackers: the figures of a run in Weights & Biases or MLflow, sent by a thread that no step waits for.

A tracker that fails or does not answer ends nothing: that is said once, and the run goes on without it. Knows nothing
of runs: own training loops use it as the training command does, on one rank alone.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import queue
import re
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Protocol

from typing_extensions import Self

from hpczero.errors import ConfigError
from hpczero.files.durable import write_text
from hpczero.files.regular import read_text
from hpczero.job import log
from hpczero.lazy import library
from hpczero.options.config import LogOptions

__all__ = ["BackgroundTracker", "MlflowTracker", "Tracker", "WandbTracker"]

KNOWN = "trackers.json"  # in the run folder: under which ids trackers know the run
MOST_NBYTES = 2**20  # of that file
MOST_WAITING = 2**14  # steps that a tracker may be behind
FINISH_S = 30.0  # how long the end of a run waits for a tracker
EXPERIMENT = "hpczero"  # of MLflow, where MLFLOW_EXPERIMENT_NAME says nothing
# What one request to MLflow may hold (MLflow, REST API, "Runs Log Batch", request limits).
MOST_METRICS, MOST_PARAMS, MOST_CHARACTERS = 1000, 100, 6000
BATCH_S = 1.0  # between two requests

logger = logging.getLogger("hpczero.trackers")
_ONE = threading.Lock()  # each tracker has a thread, and they share one file


class Tracker(Protocol):
    """What keeps the figures of a run. One thread makes the calls, in this order; each may take long or raise."""

    def start(self, run: str, config: Mapping[str, Any]) -> int:
        """Begin the run, or go on with it.

        Args:
            run: its name.
            config: its options; a mapping may hold mappings.

        Returns:
            The last step that the tracker has of this run; 0 if it has none. Earlier figures up to it are not sent.
        """
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the figures of one step. Steps rise; only a run that goes on may begin below the last step known."""
        ...

    def finish(self) -> None:
        """Send what is left, and end the run."""
        ...

    def give_up(self) -> None:
        """Leave nothing that keeps the process from ending. Another thread calls it where one of the others hangs."""
        return


class BackgroundTracker:
    """Context manager: a tracker that no call waits for. Not collective; for one rank of a job."""

    def __init__(
        self,
        name: str,
        tracker: Tracker,
        *,
        run: str,
        config: Mapping[str, Any],
        earlier: Iterable[tuple[int, Mapping[str, float]]] = (),
    ) -> None:
        """Nothing is sent yet.

        Args:
            name: of the tracker, for messages.
            tracker: the thread has it for itself.
            run: of ``Tracker.start``.
            config: of ``Tracker.start``.
            earlier: steps of the run that were logged before, with their figures. The tracker gets those that it lacks.
        """
        self._name, self._tracker = name, tracker
        self._begin = run, config
        self._earlier = earlier
        self._rows: queue.Queue[tuple[int, Mapping[str, float]] | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._error: Exception | None = None
        self._failed = False

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand over the figures of one step; returns at once, and raises nothing that the tracker raises."""
        try:
            self._rows.put_nowait((step, metrics))
        except queue.Full:
            self._fail(f"it is {MOST_WAITING:,} steps behind")
        self._look()

    def __exit__(self, *_: object) -> None:
        """End the run in the tracker; waits ``FINISH_S`` seconds at most, twice that where it is far behind."""
        self._look()
        if not self._failed:
            with suppress(queue.Full):  # told below: it does not end
                self._rows.put(None, timeout=FINISH_S)
            self._thread.join(FINISH_S)
            if self._thread.is_alive():
                self._fail(f"it has not ended within {FINISH_S:.0f} s")
            self._look()
        if self._failed:
            self._tracker.give_up()

    def _work(self) -> None:
        try:
            known = self._tracker.start(*self._begin)
            lacking = (row for row in self._earlier if row[0] > known)
            for step, metrics in chain(lacking, iter(self._rows.get, None)):
                if self._failed:
                    return
                self._tracker.log(step, metrics)
            self._tracker.finish()
        except Exception as error:  # whatever their libraries raise
            self._error = error

    def _look(self) -> None:
        if self._error is not None:
            said = f"{self._error}".strip().partition("\n")[0]
            self._fail(f"{type(self._error).__name__}{f': {said}' if said else ''}")

    def _fail(self, why: str) -> None:
        if not self._failed:
            logger.warning("%s failed (%s); the run goes on without it", self._name, why)
        self._failed = True


def asked(options: LogOptions, folder: Path) -> dict[str, Tracker]:
    """The trackers of a run, by their names. Not collective.

    Raises:
        ConfigError: one cannot be used here.
    """
    found: dict[str, Tracker] = {}
    if options.wandb != "off":
        found["wandb"] = WandbTracker(folder, mode=options.wandb)
    if options.mlflow is not None:
        found["mlflow"] = MlflowTracker(folder, uri=options.mlflow)
    return found


def known_as(folder: Path, tracker: str, make: Callable[[], str], *, anew: bool = False) -> str:
    """The id of the run in ``folder`` for a tracker; ``make`` gives one at the first start, or ``anew``.

    Not collective.
    """
    path = folder / KNOWN
    found = None if anew else _ids(path).get(tracker)
    if found is None:
        found = make()
        with _ONE:
            write_text(path, json.dumps({**_ids(path), tracker: found}, indent=1) + "\n")
    return str(found)


def _ids(path: Path) -> dict[str, str]:
    with suppress(FileNotFoundError, ValueError):  # a damaged file begins the run anew there
        return dict(json.loads(read_text(path, MOST_NBYTES)))
    return {}


class WandbTracker(Tracker):
    """Weights & Biases. WANDB_PROJECT, WANDB_ENTITY and their other variables say where the run goes.

    Offline, each start of a run leaves one folder with all its steps, under one id: ``wandb sync`` of the newest sends
    them. Online, W&B continues the run, and gets the steps that it lacks.
    """

    def __init__(
        self, folder: str | Path, *, mode: Literal["offline", "online"] = "offline"
    ) -> None:
        """Not collective. ``folder`` must exist; it gets ``wandb/`` and keeps the id of the run.

        Raises:
            ConfigError: the package is missing, or it knows no key to go online with.
        """
        self._folder, self._mode = Path(folder), mode
        self._wandb = library("wandb", "log.wandb", "wandb")
        self._run: Any = None
        if mode == "online" and not self._wandb.login(prompt=False, verify=False):
            raise ConfigError(
                "log.wandb: got online, and wandb has no key; expected one from `wandb login` or in WANDB_API_KEY, or "
                "--log.wandb offline"
            )

    def start(self, run: str, config: Mapping[str, Any]) -> int:
        """Begin the run, or go on with the one whose id the folder has."""
        self._run = self._wandb.init(
            mode=self._mode,
            dir=str(self._folder),
            id=known_as(self._folder, "wandb", lambda: secrets.token_hex(4)),
            resume="allow",
            name=run,
            config=dict(config),
            reinit="create_new",  # a program may have runs of its own
            settings=self._wandb.Settings(console="off", silent=True),
        )
        sync = f"to send the run, type: wandb sync {Path(self._run.dir).parent}"
        log.info("wandb: %s", sync if self._mode == "offline" else self._run.url)
        return max(int(self._run.step) - 1, 0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand the step to W&B's own process."""
        self._run.log(dict(metrics), step=step)

    def finish(self) -> None:
        """Wait until W&B's own process has written and sent everything."""
        self._run.finish()

    def give_up(self) -> None:
        """End W&B's own process: wandb would wait for it when Python ends, for as long as the network is away."""
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                found = re.fullmatch(r"(\d+) \((.*)\) \S (\d+) .*", stat.read_text(), re.DOTALL)
                if found and found[2] == "wandb-core" and int(found[3]) == os.getpid():
                    os.kill(int(found[1]), signal.SIGKILL)
        with suppress(Exception):  # it is gone, which wandb would be surprised by later
            self._wandb.teardown()


class MlflowTracker(Tracker):
    """MLflow: a server, or a folder. MLFLOW_EXPERIMENT_NAME names the experiment."""

    def __init__(self, folder: str | Path, *, uri: str) -> None:
        """Not collective. ``folder`` must exist; it keeps the id of the run.

        Raises:
            ConfigError: the package is missing, or does not take the URI.
        """
        self._folder, self._uri = Path(folder), uri
        mlflow = library("mlflow", "log.mlflow", "mlflow-skinny")
        self._entities = importlib.import_module("mlflow.entities")
        self._variables = importlib.import_module("mlflow.environment_variables")
        # MLflow 3 refuses folders, which are in maintenance mode, unless it is told that one is meant.
        self._variables.MLFLOW_ALLOW_FILE_STORE.set(True)
        try:
            self._client = mlflow.MlflowClient(tracking_uri=uri)
        except Exception as error:  # of many kinds
            said = f"{error}".strip().partition(". ")[0]
            raise ConfigError(
                f"log.mlflow: got {uri!r} ({said}); expected a folder or the address of a server, http(s)://...; "
                "databases take more than mlflow-skinny: pip install mlflow"
            ) from error
        self._id = ""
        self._pending: list[Any] = []
        self._sent_s = 0.0

    def start(self, run: str, config: Mapping[str, Any]) -> int:
        """Create the run with its options as parameters, or go on with the one whose id the folder has."""
        known = partial(known_as, self._folder, f"mlflow {self._uri}")
        self._id = known(lambda: self._create(run, config))
        try:
            self._client.update_run(self._id, status="RUNNING")
            return int(self._client.get_run(self._id).data.metrics.get("step", 0))
        except Exception as error:  # a kill tears the files of a run that MLflow writes
            if self._uri.startswith("http"):  # no files, so the server has a reason
                raise
            gone, self._id = self._id, known(lambda: self._create(run, config), anew=True)
            log.info("mlflow: run %s cannot go on (%s); a new one gets all steps", gone, error)
            return 0

    def _create(self, run: str, config: Mapping[str, Any]) -> str:
        name = self._variables.MLFLOW_EXPERIMENT_NAME.get() or EXPERIMENT
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        created = str(self._client.create_run(experiment, run_name=run).info.run_id)
        params = [self._entities.Param(k, v[:MOST_CHARACTERS]) for k, v in _flat("", config)]
        for start in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(created, params=params[start : start + MOST_PARAMS])
        return created

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the step, with others where steps are short."""
        now_ms = int(time.time() * 1e3)
        rows = {**metrics, "step": step}
        self._pending += [
            self._entities.Metric(key, float(value), now_ms, step) for key, value in rows.items()
        ]
        if len(self._pending) >= MOST_METRICS or time.monotonic() - self._sent_s > BATCH_S:
            self._send()

    def _send(self) -> None:
        while self._pending:
            self._client.log_batch(self._id, metrics=self._pending[:MOST_METRICS])
            del self._pending[:MOST_METRICS]
        self._sent_s = time.monotonic()

    def finish(self) -> None:
        """Send what is left, and end the run."""
        self._send()
        self._client.set_terminated(self._id)


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Values of nested mappings under dotted names."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}" if name else str(key), inner)
    else:
        yield name, str(value)
