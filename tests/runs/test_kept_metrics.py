"""Metrics of starts that saved nothing, and of files that somebody takes away: every line is kept, or told of."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tensorboard.summary.writer.event_file_writer import _AsyncWriterThread
from tensorboard.summary.writer.record_writer import RecordWriter

from hpczero.options.config import LogOptions, RunConfig, RunOptions
from hpczero.run.results.folder import RunFolder
from hpczero.run.results.metrics import MetricsFile, read_metrics
from hpczero.run.results.records import Records
from tests.runs.test_metrics import metrics


def begun(folder: Path, name: str, *, overwrite: bool = False) -> tuple[RunConfig, RunFolder]:
    config = RunConfig(run=RunOptions(name=name, folder=str(folder), overwrite=overwrite))
    return config, RunFolder.of(config.run)


def test_metrics_of_a_start_that_saved_nothing_are_kept_and_told_when_a_run_begins_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, run = begun(tmp_path, "r", overwrite=True)  # as a restart of a series has it
    caplog.set_level(logging.WARNING)
    for number, line in enumerate(("first\n", "second\n", ""), 1):
        run.create(config)
        assert len(caplog.records) == number - 1
        run.metrics.write_text(line)
    run.create(config)
    assert len(caplog.records) == 2, "an empty file is not worth a line"
    assert not run.metrics.exists()
    kept = list(run.path.glob("metrics.jsonl.unsaved-*"))
    assert sorted(file.read_text() for file in kept) == ["first\n", "second\n"]
    for file in kept:
        assert f"saved nothing; kept in {file.name}" in caplog.text


def test_run_called_default_that_has_metrics_alone_holds_results(tmp_path: Path) -> None:
    """Whatever does is moved aside before another one begins; see ``RunLock.make_room``."""
    config, run = begun(tmp_path, "default")
    run.create(config)
    assert not run.holds_results
    run.metrics.touch()
    assert not run.holds_results
    run.metrics.write_text("{}\n")
    assert run.holds_results


# --- while the run goes on


def away(path: Path) -> Path | None:
    path.unlink()
    return None


def moved(path: Path) -> Path | None:
    return path.rename(path.with_name("moved.jsonl"))


def replaced(path: Path) -> Path | None:
    """As an editor, or ``sed -i``, leaves it."""
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes())
    copy.replace(path)
    return path


def replaced_without_an_end(path: Path) -> Path | None:
    replaced(path)
    path.write_bytes(path.read_bytes()[:-1])
    return path


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("harm", [away, moved, replaced, replaced_without_an_end])
def test_file_that_is_taken_away_is_told_of_once_and_every_later_line_kept(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    harm: Callable[[Path], Path | None],
    durable: bool,
) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    for step in (1, 2):
        file.write(metrics(step))
    kept = harm(path)
    for step in (3, 4):
        file.write(metrics(step), durable=durable)
        file.write(metrics(step, checkpoint_ms=9.0))
    file.close()
    earlier = [1, 2] if kept == path else []
    assert [(m.step, m.checkpoint_ms) for m in read_metrics(path)] == [
        *((step, metrics(step).checkpoint_ms) for step in earlier),
        (3, 9.0),
        (4, 9.0),
    ]
    if kept is not None and kept != path:
        assert [m.step for m in read_metrics(kept)] == [1, 2]
    (told,) = (record.getMessage() for record in caplog.records)
    assert f"{path}: was taken away or replaced while the run goes on" in told


@pytest.mark.parametrize("harm", [away, replaced])
def test_line_whose_file_is_taken_away_before_it_is_complete_is_there_once(
    tmp_path: Path, harm: Callable[[Path], Path | None]
) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.write(metrics(1))
    harm(path)
    file.write(metrics(1, checkpoint_ms=9.0))
    file.close()
    assert [(m.step, m.checkpoint_ms) for m in read_metrics(path)] == [(1, 9.0)]


def test_place_of_a_file_that_is_no_file_now_is_told_of_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    path.parent.mkdir()
    file = MetricsFile(path)
    file.write(metrics(1))
    path.unlink()
    os.mkfifo(path)
    file.write(metrics(2))
    path.unlink()
    path.parent.rename(tmp_path / "moved")
    file.write(metrics(3))
    path.parent.mkdir()
    file.write(metrics(4))
    file.close()
    assert [m.step for m in read_metrics(path)] == [2, 3, 4]
    assert "cannot be written (is a FIFO, expected a regular file); trying again" in caplog.text
    assert caplog.text.count("trying again") == 1


# --- TensorBoard


def fails(*_: object) -> None:
    raise OSError(28, "No space left on device")


def writers_end() -> None:
    """Wait for TensorBoard's threads, which write, and end when they cannot; the next call of them tells."""
    for thread in threading.enumerate():
        if isinstance(thread, _AsyncWriterThread):
            thread.join(60)


@pytest.mark.parametrize("full_from", ["the start", "a step"])
def test_tensorboard_that_cannot_be_written_is_warned_of_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    full_from: str,
) -> None:
    tracebacks: list[object] = []
    monkeypatch.setattr(threading, "excepthook", tracebacks.append)
    if full_from == "the start":
        monkeypatch.setattr(RecordWriter, "write", fails)
    folder = RunFolder(tmp_path)
    with Records(folder, LogOptions(), num_steps=3) as records:
        writers_end()  # at the header, if ever
        monkeypatch.setattr(RecordWriter, "write", fails)
        for step in (1, 2, 3):
            records.write(metrics(step))
            writers_end()
    assert not tracebacks
    assert len(read_metrics(folder.metrics)) == 3
    assert caplog.text.count("tensorboard: cannot be written (No space left on device)") == 1
