"""Trackers: what W&B and MLflow hold, read back by their own packages' formats, and trackers that fail."""

from __future__ import annotations

import json
import os
import struct
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from hpczero import trackers
from hpczero.errors import ConfigError
from hpczero.options.config import LogOptions
from hpczero.run.results.folder import RunFolder
from hpczero.run.results.metrics import read_metrics
from hpczero.run.results.records import Records, earlier_figures, figures_of
from hpczero.trackers import BackgroundTracker, MlflowTracker, Tracker, WandbTracker
from tests.helpers.killed import Job
from tests.helpers.runs import options, train
from tests.runs.test_metrics import metrics

BLOCK, HEADER = 32768, 7  # of LevelDB's log format, which .wandb files have


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The real ones, which know nothing of this machine's user."""
    wandb = pytest.importorskip("wandb", reason="needs the extra trackers: pip install wandb")
    pytest.importorskip("mlflow", reason="needs the extra trackers: pip install mlflow-skinny")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for name in ("WANDB_PROJECT", "WANDB_MODE", "WANDB_DIR", "WANDB_RUN_ID", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    yield
    wandb.teardown()  # ends its process, which jobs that this one starts would use
    os.environ.pop("WANDB_SERVICE", None)


def logged(path: Path) -> Iterator[bytes]:
    """Records of a .wandb file (google/leveldb, doc/log_format.md; wandb puts seven bytes before the first one)."""
    data, at, whole = path.read_bytes(), HEADER, b""
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:  # too short for a header
            at += BLOCK - at % BLOCK
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        whole += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (1, 4):  # whole, or the last part
            yield whole
            whole = b""


def in_wandb(folder: Path) -> tuple[str, dict[int, dict[str, float]]]:
    """Id of the run, and the figures of each step, from the newest start."""
    import wandb
    from wandb.proto import wandb_internal_pb2

    protocol: Any = wandb_internal_pb2  # made when it is imported
    wandb.teardown()  # as at the end of a process: its own process writes the last records then
    (path,) = (folder / "wandb" / "latest-run").glob("*.wandb")
    found: dict[int, dict[str, float]] = {}
    for data in logged(path):
        record = protocol.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            named = {item.key or item.nested_key[0]: item for item in record.history.item}
            values = {name: json.loads(item.value_json) for name, item in named.items()}
            found[record.history.step.num] = {k: v for k, v in values.items() if k[0] != "_"}
    return path.stem.removeprefix("run-"), found


def in_mlflow(folder: Path, uri: Path) -> tuple[Any, dict[int, dict[str, float]]]:
    """The run, and the newest figures of each step."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=str(uri))
    run = client.get_run(json.loads((folder / trackers.KNOWN).read_text())[f"mlflow {uri}"])
    found: dict[int, dict[str, float]] = {}
    for name in run.data.metrics:
        history = client.get_metric_history(run.info.run_id, name)
        for entry in sorted(history, key=lambda entry: entry.timestamp):
            found.setdefault(entry.step, {})[name] = entry.value
    for step, figures in found.items():
        assert figures.pop("step") == step
    return run, found


@pytest.mark.filterwarnings("ignore")  # their own
def test_run_that_was_killed_and_goes_on_is_one_run_with_all_figures_in_both(
    packages: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, uri = RunFolder(tmp_path), tmp_path / "mlruns"

    def opened(start: int) -> list[BackgroundTracker]:
        asked = trackers.asked(LogOptions(wandb="offline", mlflow=str(uri)), tmp_path)
        config = {"train": {"steps": 6, "clip": 1.0}}
        return [
            BackgroundTracker(
                name, each, run="mine", config=config, earlier=earlier_figures(folder, start)
            )
            for name, each in asked.items()
        ]

    records = Records(folder, LogOptions(tensorboard=False), num_steps=6, trackers=opened(0))
    with records:
        for step in range(1, 5):
            records.write(metrics(step, loss=1 / step, held_out_loss=2.0 if step == 2 else None))
    first, seen = in_wandb(tmp_path)
    assert sorted(seen) == [1, 2, 3, 4]
    # From the checkpoint of step 2: what came after it comes again, and differs by its times.
    records = Records(
        folder, LogOptions(tensorboard=False), num_steps=6, start=2, trackers=opened(2)
    )
    with records:
        for step in range(3, 7):
            records.write(metrics(step, loss=1 / step, step_ms=7.0))
    expected = {m.step: figures_of(m) for m in read_metrics(folder.metrics)}
    again, found = in_wandb(tmp_path)
    assert again == first
    assert found == expected
    run, found = in_mlflow(tmp_path, uri)
    assert found == expected
    assert (run.info.run_name, run.info.status) == ("mine", "FINISHED")
    assert run.data.params == {"train.steps": "6", "train.clip": "1.0"}
    assert not [said for said in caplog.messages if "the run goes on without it" in said]


@pytest.mark.filterwarnings("ignore")  # their own
def test_run_of_mlflow_that_a_kill_has_torn_begins_anew_with_all_steps(
    packages: None, tmp_path: Path
) -> None:
    uri = tmp_path / "mlruns"
    figures = {1: {"loss": 2.0}, 2: {"loss": 1.0}}

    def sent(steps: list[int]) -> int:
        tracker = MlflowTracker(tmp_path, uri=str(uri))
        known = tracker.start("mine", {})
        for step in steps:
            tracker.log(step, figures[step])
        tracker.finish()
        return known

    sent([1])
    (torn,) = uri.glob("*/*/meta.yaml")
    torn.write_text("")
    assert sent([1, 2]) == 0
    assert in_mlflow(tmp_path, uri)[1] == figures


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # their own
def test_training_that_is_killed_leaves_its_metrics_in_both(packages: None, tmp_path: Path) -> None:
    uri = tmp_path / "mlruns"
    named: dict[str, Any] = {"log__wandb": "offline", "log__mlflow": uri, "train__steps": 40}
    with Job.start(tmp_path / "log", options(tmp_path, **named)[2:], ranks=2) as job:
        job.wait_for_step(tmp_path / "r" / "metrics.jsonl", 12)
    done = train(tmp_path, **named).ended()
    assert "failed" not in done.stdout, done
    expected = {m.step: figures_of(m) for m in read_metrics(tmp_path / "r" / "metrics.jsonl")}
    assert sorted(expected) == list(range(1, 41))
    assert in_wandb(tmp_path / "r")[1] == expected
    run, found = in_mlflow(tmp_path / "r", uri)
    assert found == expected
    assert run.data.params["train.steps"] == "40"


class Broken(Tracker):
    """Raises, or hangs, in one of its calls."""

    def __init__(self, call: str, *, hangs: bool) -> None:
        self._call, self._hangs = call, hangs
        self.end = threading.Event()
        self.given_up = False

    def _breaks(self, call: str) -> None:
        if call == self._call:
            if not self._hangs:
                raise RuntimeError(f"no {call} today\nand more")
            self.end.wait(30)

    def start(self, run: str, config: Mapping[str, Any]) -> int:
        self._breaks("start")
        return 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._breaks("log")

    def finish(self) -> None:
        self._breaks("finish")

    def give_up(self) -> None:
        self.given_up = True
        self.end.set()


@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.parametrize("call", ["start", "log", "finish"])
def test_run_goes_on_without_a_tracker_that_raises_or_hangs_and_says_so_once(
    call: str,
    hangs: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trackers, "FINISH_S", 0.05 if hangs else 5.0)
    waiting = {
        "log": 8,
        "start": 20,
    }  # which is all steps, so there is no room to say that they end
    monkeypatch.setattr(trackers, "MOST_WAITING", waiting.get(call, 100) if hangs else 100)
    folder, broken = RunFolder(tmp_path), Broken(call, hangs=hangs)
    tracker = BackgroundTracker("mine", broken, run="r", config={})
    records = Records(folder, LogOptions(tensorboard=False), num_steps=20, trackers=[tracker])
    with caplog.at_level("WARNING", "hpczero.trackers"), records:
        for step in range(1, 21):
            records.write(metrics(step))
    assert [m.step for m in read_metrics(folder.metrics)] == list(range(1, 21))
    why = f"RuntimeError: no {call} today"
    if hangs:
        why = "it is 8 steps behind" if call == "log" else "it has not ended within 0 s"
    (said,) = [record.getMessage() for record in caplog.records]
    assert said == f"mine failed ({why}); the run goes on without it"
    assert broken.given_up


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_missing_package_is_refused_with_what_to_install(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    chosen = {"wandb": LogOptions(wandb="offline"), "mlflow": LogOptions(mlflow="runs/mlruns")}
    package = {"wandb": "wandb", "mlflow": "mlflow-skinny"}[name]
    said = f"log.{name} needs {name}, which is not installed; type: pip install {package}"
    with pytest.raises(ConfigError, match=said):
        trackers.asked(chosen[name], tmp_path)


@pytest.mark.filterwarnings("ignore")  # their own
def test_what_cannot_be_reached_at_all_is_refused_before_the_run(
    packages: None, tmp_path: Path
) -> None:
    with pytest.raises(
        ConfigError, match=r"log.mlflow: got 'sqlite:///x.db' .*; expected a folder or"
    ):
        MlflowTracker(tmp_path, uri="sqlite:///x.db")
    with pytest.raises(ConfigError, match=r"log.wandb: got online, and wandb has no key; expected"):
        WandbTracker(tmp_path, mode="online")
