"""Records of steps: their JSON lines, rates, the plot, what the screen shows, and which rank speaks."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hpczero.errors import ConfigError
from hpczero.job import log
from hpczero.job.long_work import Moment
from hpczero.options.config import LogOptions, RunConfig, RunOptions, TrainOptions
from hpczero.run import loop
from hpczero.run.results.folder import RunFolder
from hpczero.run.results.metrics import (
    Interval,
    MetricsFile,
    StepMetrics,
    StepSplit,
    Stopwatch,
    achieved_tflops,
    read_metrics,
)
from hpczero.run.results.progress import PhaseProgress, StepProgress, clock, figures
from hpczero.run.results.records import Records, plot_losses


def metrics(step: int = 1, **changes: object) -> StepMetrics:
    values: dict[str, object] = {f.name: 1.0 for f in dataclasses.fields(StepMetrics)}
    values |= {"step": step, "tokens": step * 100, "skipped_steps": 0, "held_out_loss": None}
    values |= {"lm_eval": {"mine/acc": 0.5}}
    values |= {"mfu": None, "state_peak_nbytes": 2**20, "process_peak_nbytes": 2**21, **changes}
    return StepMetrics(**values)  # type: ignore[arg-type]


@pytest.fixture
def first_rank_logs() -> Iterator[None]:
    log.configure(rank=0, node_index=0, level="info")
    yield
    log.configure(rank=0, node_index=0, level="info")


def test_record_survives_its_json_line() -> None:
    record = metrics(3, loss=2.5, held_out_loss=2.75, mfu=0.5)
    assert StepMetrics.from_json(record.to_json()) == record
    assert json.loads(record.to_json())["held_out_loss"] == 2.75


def test_nan_and_infinity_become_valid_json() -> None:
    line = metrics(loss=math.nan, grad_norm=math.inf).to_json()
    found = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert found["loss"] is None
    assert found["grad_norm"] is None
    back = StepMetrics.from_json(line)
    assert math.isnan(back.loss)
    assert math.isnan(back.grad_norm)
    assert back.held_out_loss is None


def test_line_of_a_step_is_replaced_in_place_and_stays_one_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    for step in (1, 2, 3):
        for checkpoint_ms in (0.0, 1234.5678, 1.0):  # longer, and shorter again
            file.write(metrics(step, checkpoint_ms=checkpoint_ms), durable=step == 2)
            found = read_metrics(path)
            assert [m.step for m in found] == list(range(1, step + 1))
            assert found[-1].checkpoint_ms == checkpoint_ms
    file.close()


def test_lines_that_the_disk_refuses_come_with_the_next_that_it_takes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.write(metrics(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, hard))
    try:
        for step in (2, 3):
            file.write(metrics(step))
            assert [m.step for m in read_metrics(path)] == [1]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caplog.text.count("cannot be written (File too large); trying again") == 1
    for step in (4, 5):
        file.write(metrics(step))
    file.close()
    assert [m.step for m in read_metrics(path)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("step", [0, -1, -(2**63) + 1, 2**63 - 1])
def test_step_that_cannot_be_costs_its_line_alone(
    tmp_path: Path, step: int, caplog: pytest.LogCaptureFixture
) -> None:
    """All numbers between it and the others do not fit into memory."""
    path = tmp_path / "metrics.jsonl"
    values = json.loads(metrics(3).to_json()) | {"step": step}
    del values["crc32"]
    path.write_text(f"{metrics(3).to_json()}\n{json.dumps(values)}\n")
    MetricsFile(path, start=5).close()
    assert [m.step for m in read_metrics(path)] == [3]
    assert "has no lines of steps 4-5" in caplog.text


def test_letter_that_has_changed_costs_its_line_and_a_line_without_a_checksum_is_read() -> None:
    line = metrics(12, loss=3.25).to_json()
    for at in range(len(line)):
        for bit in (1, 2, 4, 8):
            with pytest.raises(ValueError, match=r"."):
                StepMetrics.from_json(line[:at] + chr(ord(line[at]) ^ bit) + line[at + 1 :])
    older = json.loads(line)
    del older["crc32"]
    assert StepMetrics.from_json(json.dumps(older)) == metrics(12, loss=3.25)
    assert StepMetrics.from_json(json.dumps(older | {"loss": 3.5})).loss == 3.5


DAMAGE = [b"\0" * 9, b"\xff{}", b"[" * 10**6, b"[]", b'{"step": "1"}', b'{"step": 1}', b"9" * 5001]


def test_metrics_are_there_whatever_happens_while_damaged_lines_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    text = "".join(f"{metrics(step).to_json()}\n" for step in (1, 2)) + "damaged\n"
    path.write_text(text)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            MetricsFile(path, start=2)
    assert path.read_text() == text
    MetricsFile(path, start=2).close()
    assert [record.step for record in read_metrics(path)] == [1, 2]
    for old in tmp_path.glob("metrics.jsonl.damaged-*"):
        assert old.read_text() == text


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_line_costs_that_line_and_is_told(
    tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    one, two, four = (metrics(step).to_json().encode() for step in (1, 2, 4))
    path.write_bytes(b"\n".join([one, damage, b"\0\0" + two, four, b'{"torn": ']))
    before = path.read_bytes()
    assert [m.step for m in read_metrics(path)] == [1, 2, 4]
    assert "line(s) 2 cannot be read" in caplog.text
    caplog.clear()
    MetricsFile(path, start=5).close()
    assert [m.step for m in read_metrics(path)] == [1, 2, 4]
    assert "has no lines of steps 3, 5" in caplog.text
    (old,) = tmp_path.glob("metrics.jsonl.damaged-*")
    assert old.read_bytes() == before
    assert f"kept in {old.name}" in caplog.text


def test_rates_are_averaged_over_time_and_losses_over_steps() -> None:
    interval = Interval()
    interval.add(metrics(1, loss=4.0, tokens_per_s=100.0, step_ms=1000.0))
    interval.add(metrics(2, loss=2.0, tokens_per_s=10.0, step_ms=3000.0))
    assert interval.mean("loss") == 3.0
    assert interval.mean("tokens_per_s") == (100 * 1 + 10 * 3) / 4


def test_flops_are_counted_per_rank() -> None:
    # 1,000 tokens per second of a model of 1e9 FLOPs per token are 1e12 FLOP/s: 0.25 TFLOP/s on each of 4 ranks.
    assert achieved_tflops(1000.0, 1e9, 4) == 0.25


def test_plot_is_a_png_of_both_losses(tmp_path: Path) -> None:
    steps = [
        metrics(s, loss=5 / s, held_out_loss=5 / s if s % 5 == 0 else None) for s in range(1, 21)
    ]
    plot_losses(steps, tmp_path / "both.png", title="run")
    plot_losses(
        [dataclasses.replace(s, held_out_loss=None) for s in steps],
        tmp_path / "one.png",
        title="run",
    )
    both, one = ((tmp_path / name).read_bytes() for name in ("both.png", "one.png"))
    assert both.startswith(b"\x89PNG")
    assert one.startswith(b"\x89PNG")
    assert both != one


def test_one_line_per_interval_first_last_and_evaluation(
    capsys: pytest.CaptureFixture[str], first_rank_logs: None
) -> None:
    with StepProgress("auto", num_steps=12, every=5) as progress:
        for step in range(1, 13):
            progress.show(metrics(step, loss=float(step), held_out_loss=9.5 if step == 7 else None))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["1/12", "5/12", "7/12", "10/12", "12/12"]
    assert "loss 3.5000" in lines[1]  # steps 2 to 5
    assert "held-out 9.5000" in lines[2]
    assert all("\x1b" not in line and "tok/s" in line and "MiB" in line for line in lines)


def test_skipped_steps_and_mfu_are_shown_where_there_are_any(
    capsys: pytest.CaptureFixture[str], first_rank_logs: None
) -> None:
    with StepProgress("lines", num_steps=2, every=1) as progress:
        progress.show(metrics(1))
        progress.show(metrics(2, mfu=0.5, skipped_steps=3, loss_scale=512.0))
    plain, full = capsys.readouterr().out.splitlines()
    assert "skipped" not in plain
    assert "MFU" not in plain
    assert "skipped 3 scale 512" in full
    assert "MFU 50.0%" in full


def test_bar_counts_to_the_end(capsys: pytest.CaptureFixture[str], first_rank_logs: None) -> None:
    with StepProgress("bar", num_steps=3, every=2) as progress:
        for step in (1, 2, 3):
            progress.show(metrics(step, held_out_loss=8.25 if step == 2 else None))
    text = capsys.readouterr().out
    assert "3/3" in text
    assert "held-out loss 8.2500" in text


def test_records_go_to_file_tensorboard_and_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], first_rank_logs: None
) -> None:
    folder = RunFolder(tmp_path)
    with Records(folder, LogOptions(every=1), num_steps=1) as records:
        records.write(metrics(1, loss=1.5))
    assert [m.loss for m in read_metrics(folder.metrics)] == [1.5]
    events = EventAccumulator(str(folder.tensorboard))
    events.Reload()
    (loss,) = events.Scalars("loss/loss")
    assert (loss.step, loss.value) == (1, 1.5)
    tags = {each: name for name, _, each in (t.partition("/") for t in events.Tags()["scalars"])}
    assert tags.pop("mine/acc") == "lm_eval"
    assert tags.keys() == {
        n for n, v in dataclasses.asdict(metrics(1)).items() if v is not None
    } - {"step", "lm_eval"}
    assert (tags["grad_norm"], tags["forward_ms"], tags["tokens"]) == (
        "optimizer",
        "time",
        "progress",
    )
    assert tags["process_peak_nbytes"] == "memory"
    assert "loss 1.5000" in capsys.readouterr().out


def test_a_steps_parts_add_up_and_waits_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now, waited = [0.0], [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def work(seconds: float, *, waits: bool = False) -> None:
        now[0] += seconds
        waited[0] += seconds if waits else 0.0

    watch = Stopwatch(lambda: waited[0])
    with watch.phase("data"):
        work(0.01)
    for _ in range(2):  # micro steps
        with watch.phase("forward"):
            work(0.02)
        with watch.phase("backward"):
            work(0.01)
            work(0.03, waits=True)
    with watch.phase("optimizer"):
        work(0.02)
        work(0.01, waits=True)
    with watch.phase("communication"):
        work(0.01)
    work(0.02)  # in no phase
    step_s = watch.elapsed_s()
    with watch.phase("checkpoint"):
        work(0.05)
    assert watch.ms("evaluation") == 0.0
    split = StepSplit.of(watch, step_s)
    expected = {"compute": 60, "communication": 80, "optimizer": 20, "data": 10, "other": 20}
    for name, ms in (expected | {"checkpoint": 50}).items():
        assert getattr(split, f"{name}_ms") == pytest.approx(ms), split
    assert split.step_ms == pytest.approx(step_s * 1e3)


def test_run_folder_of_another_run_is_kept(tmp_path: Path) -> None:
    config = RunConfig(run=RunOptions(name="mine", folder=str(tmp_path)))
    folder = RunFolder.of(config.run)
    folder.create(config)
    before = folder.config.read_text()
    said = r"mine: holds an earlier run and no checkpoint to go on from; .*--run.overwrite true"
    with pytest.raises(ConfigError, match=said):
        folder.create(dataclasses.replace(config, train=TrainOptions(steps=7)))
    assert folder.config.read_text() == before


@pytest.mark.parametrize("name", ["default", "mine"])
def test_replacing_a_run_when_asked_clears_its_results_and_nothing_else(
    name: str, tmp_path: Path
) -> None:
    config = RunConfig(run=RunOptions(name=name, overwrite=True, folder=str(tmp_path)))
    folder = RunFolder.of(config.run)
    folder.create(config)
    for file in (folder.metrics, folder.plot, folder.weights, folder.path / "notes.txt"):
        file.write_text("old")
    folder.tensorboard.mkdir()
    folder.create(dataclasses.replace(config, train=TrainOptions(steps=7)))
    assert sorted(file.name for file in folder.path.iterdir()) == ["config.toml", "notes.txt"]
    assert "steps = 7" in folder.config.read_text()


def test_run_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = RunConfig(run=RunOptions(folder=str(tmp_path / "file")))
    with pytest.raises(ConfigError, match="file/default: cannot be written as a run folder"):
        RunFolder.of(config.run).create(config)


class Expensive:
    """Counts how often it is formatted."""

    count = 0

    def __str__(self) -> str:
        self.count += 1
        return "expensive"


@pytest.mark.parametrize(
    ("rank", "level", "expected"),
    [
        (0, "info", "hello 1\n"),
        (3, "info", ""),
        (0, "debug", "hello 1\n[r0 node01] detail expensive\n"),
        (3, "debug", "[r3 node01] detail expensive\n"),
    ],
)
def test_info_comes_from_root_and_debug_from_every_rank(
    rank: int, level: str, expected: str, capsys: pytest.CaptureFixture[str], first_rank_logs: None
) -> None:
    log.configure(rank=rank, node_index=1, level=level)  # type: ignore[arg-type]
    expensive = Expensive()
    log.info("hello %d", 1)
    log.debug("detail %s", expensive)
    assert capsys.readouterr().out == expected
    assert expensive.count == (level == "debug")


def test_losses_are_drawn_while_a_run_goes_on_but_not_at_every_step(tmp_path: Path) -> None:
    config = RunConfig()
    run: Any = SimpleNamespace(config=config, folder=RunFolder(tmp_path))
    with Records(run.folder, config.log, num_steps=1) as records:
        records.write(metrics(1))
    now_s = time.monotonic()
    assert loop.draw_meanwhile(run, now_s) == now_s
    assert not run.folder.plot.exists()
    assert loop.draw_meanwhile(run, now_s - loop.PICTURE_S - 1) >= now_s
    assert run.folder.plot.read_bytes().startswith(b"\x89PNG")
    run.folder.metrics.unlink()
    loop.draw_meanwhile(run, now_s - loop.PICTURE_S - 1)  # is told, and ends nothing


# --- what is told of long work: in lines that are due, with figures that add up


def test_figures_are_done_total_rate_and_time_left() -> None:
    assert figures(Moment("hash", 50_000_000, 200_000_000, 25.0)) == (
        "50.0 of 200.0 MB  2.0 MB/s  left 0:01:15"
    )
    assert figures(Moment("hash", 0, 3_000_000, 1.0)) == "0.0 of 3.0 MB"
    assert figures(Moment("learn", 0, None, 61.5)) == "for 0:01:01"
    assert clock(3723.9) == "1:02:03"


def test_lines_that_are_due_tell_of_a_phase_and_one_tells_that_it_has_ended() -> None:
    said: list[str] = []
    with PhaseProgress("lines", said.append, every_s=0.0) as lines:
        lines.show(Moment())
        lines.show(Moment("hash", 10**6, 3 * 10**6, 1.0))
        lines.show(Moment("hash", 3 * 10**6, 3 * 10**6, 3.0))
        lines.show(Moment("learn", 0, None, 2.0))
    assert said == [
        "hash: 1.0 of 3.0 MB  1.0 MB/s  left 0:00:02",
        "hash: 3.0 of 3.0 MB  1.0 MB/s  left 0:00:00",
        "hash: took 0:00:03",
        "learn: for 0:00:02",
    ]


def test_short_work_is_not_told_of() -> None:
    said: list[str] = []
    with PhaseProgress("lines", said.append) as lines:
        lines.show(Moment("hash", 10**6, 3 * 10**6, 1.0))
        lines.show(Moment("learn", 0, None, 2.0))
    assert not said


def test_a_log_gets_lines_and_a_terminal_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    assert not PhaseProgress("auto", lambda line: None).is_bar
    with PhaseProgress("bar", lambda line: None) as bar:
        bar.show(Moment())
        bar.show(Moment("tokenize", 5 * 10**6, 10 * 10**6, 5.0))
    assert "5.0 of 10.0 MB  1.0 MB/s  left 0:00:05" in capsys.readouterr().out
    with PhaseProgress("bar", lambda line: None, to_stderr=True) as bar:
        bar.show(Moment("learn", 0, None, 5.0))
    assert "for 0:00:05" in capsys.readouterr().err
