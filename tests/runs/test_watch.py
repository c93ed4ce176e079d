"""The live page of a run: what it says of each state, that its numbers are those of the metrics, and what it costs."""

from __future__ import annotations

import dataclasses
import io
import os
import re
import sys
import time
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from hpczero.checkpoint.disk.lock import Lock
from hpczero.errors import StepError
from hpczero.options.config import LogOptions, RunConfig, TrainOptions
from hpczero.options.environment import Environment
from hpczero.run.page import PageWriter, page_of
from hpczero.run.results.folder import RunFolder
from hpczero.run.results.metrics import MetricsFile, StepMetrics
from hpczero.run.starting.attempts import SLOW, Attempts
from hpczero.run.view import POINTS, Picture, RunView
from hpczero.watch import Slurm, shown
from tests.helpers.mpirun import run_command
from tests.runs.test_metrics import metrics

STEPS = 40
VOID = {"meta", "path", "circle", "polyline"}


def record(step: int) -> StepMetrics:
    return metrics(
        step,
        loss=5 - step / 16,
        held_out_loss=5.25 - step / 16 if step % 10 == 0 else None,
        tokens_per_s=1000.0 + step,
        step_ms=100.0,
        communication_ms=12.5,
        device_peak_nbytes=None,
        device_exposed_ms=None,
    )


def begun(folder: RunFolder, *, steps: int = STEPS) -> tuple[Attempts, MetricsFile]:
    """A run that rank 0 of two has begun and taken all steps of."""
    config = RunConfig(
        train=TrainOptions(steps=2 * STEPS, global_batch=4), log=LogOptions(stragglers_every=10)
    )
    attempts = Attempts(folder, Environment(job="77"))
    attempts.start(ranks=2, host="node1", held_nbytes=2**20)
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.write_config(config)
    attempts.begin(0, unit="token", planned=[2**20, 3 * 2**20])
    file = MetricsFile(folder.metrics)
    for step in range(1, steps + 1):
        file.write(record(step))
        attempts.step = step
    return attempts, file


def text_of(*pictures: Picture) -> str:
    """What a terminal of 200 columns shows, in one line."""
    console = Console(file=io.StringIO(), width=200)
    console.print(shown(pictures, Slurm()))
    found = console.file
    assert isinstance(found, io.StringIO)
    return re.sub(r"[\s│]+", " ", found.getvalue())


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "r")


def training(folder: RunFolder) -> str:
    begun(folder)
    return f"training: step {STEPS},"


def no_lines(folder: RunFolder) -> str:
    begun(folder, steps=0)
    return "starting: no metrics of this start yet"


def saving(folder: RunFolder) -> str:
    begun(folder)
    (folder.checkpoints / ".tmp-step-000000040-0123abcd").mkdir()
    return "saving: checkpoint of step 40 is being written"


def stalled(folder: RunFolder) -> str:
    begun(folder)
    os.utime(folder.metrics, times=(time.time() - 3000, time.time() - 3000))
    return f"stalled: no line since step {STEPS},"


def finished(folder: RunFolder) -> str:
    begun(folder)[0].end(STEPS, 0)
    return f"finished: all steps are done: step {STEPS},"


def stopped(folder: RunFolder) -> str:
    begun(folder)[0].end(STEPS, 75)
    return f"stopped: as asked, after step {STEPS},"


def failed(folder: RunFolder) -> str:
    with pytest.raises(StepError), begun(folder)[0].told(0):
        raise StepError("loss is <nan>")
    return "exit code 1 after step 40, "


STATES: list[Callable[[RunFolder], str]]
STATES = [training, no_lines, saving, stalled, finished, stopped, failed]


@pytest.mark.parametrize("state", STATES)
def test_state_of_a_run_that_has_the_folder_is_said_on_top(
    folder: RunFolder, state: Callable[[RunFolder], str]
) -> None:
    lock = Lock(folder.checkpoints)
    lock.acquire()
    try:
        said = state(folder)
        picture = RunView(folder).look()
    finally:
        lock.release()
    text = text_of(picture)
    assert said in text, text
    assert text.index(said) < text.index("checkpoints")
    if state is failed:
        assert "rank 0: StepError: loss is <nan>" in text


def test_run_without_a_living_process_was_killed_and_its_newest_checkpoint_is_named(
    folder: RunFolder,
) -> None:
    assert "no run: there is no such folder" in text_of(RunView(folder).look())
    folder.path.mkdir()
    assert "not begun: no metrics yet" in text_of(RunView(folder).look())
    begun(folder)
    (folder.checkpoints / "step-000000030").mkdir(parents=True)
    with folder.metrics.open("a") as file:
        file.write('{"step": 41, "tok')  # half a line
    view = RunView(folder)
    text = text_of(view.look())
    assert (
        f"killed: no process of this run lives, and none has said how it ended; it came to step {STEPS},"
        in text
    )
    assert "1, the newest of step 30" in text
    attempts = Attempts(folder, Environment(job="78"))  # the same command once more
    attempts.start(ranks=3, host="node2")
    attempts.begin(30)
    MetricsFile(folder.metrics, start=30).write(record(31))
    text = text_of(view.look(), view.look())
    assert "killed: it did not say how it ended" in text
    assert text.count("31 of 80 (39%)") == 2, "side by side"
    assert "3 ranks, rank 0 on node2, job 78 step 30 killed" in text


def test_slow_ranks_are_those_of_the_last_search(folder: RunFolder) -> None:
    attempts, file = begun(folder, steps=20)
    attempts.step = 10
    attempts.note(SLOW, "rank 0 on node1 works 8.0 ms per step")
    attempts.step = 20
    attempts.note(SLOW, "rank 1 on node1 works 9.0 ms per step")
    view = RunView(folder)
    assert (
        "slow ranks at step 20: rank 1 on node1 works 9.0 ms per step; before at step 10"
        in text_of(view.look())
    )
    file.write(record(31))
    assert "slow ranks none at step 30; at step 20: rank 1 on node1" in text_of(view.look())


def test_terminal_asks_slurm_for_the_job_of_the_last_start(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(folder)
    picture = RunView(folder).look()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "SLURM" not in text_of(picture), "no such command"
    squeue = tmp_path / "squeue"
    for command, said in (
        ("exit 1", "squeue does not answer"),
        ("echo slurm_load_jobs error: Invalid job id specified >&2; exit 1", "not in the queue"),
    ):
        squeue.write_text(f"#!/bin/sh\n{command}\n")
        squeue.chmod(0o755)
        assert f"SLURM job 77: {said}" in text_of(picture)
    squeue.write_text("#!/bin/sh\necho 78 PENDING, 5:00 left\necho 77 RUNNING, $3 $5\n")
    squeue.chmod(0o755)
    assert "SLURM job 77: RUNNING, 77 %A %T, %L left of its time" in text_of(picture)


class Page(HTMLParser):
    """Fails on what is not closed, and keeps what a test asks for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1] += data


def test_page_is_whole_needs_no_network_and_has_the_numbers_of_the_metrics(
    folder: RunFolder,
) -> None:
    attempts, _ = begun(folder)
    attempts.note("warning", "a < b & c")
    text = page_of(RunView(folder).look(), 10.0)
    page = Page(text)
    assert not {name for name, _ in page.attributes} & {"src", "href", "srcset", "data"}
    assert not re.search(r"https?:|//\w|url\(|@import", text)
    figures = dict(zip(page.cells, page.cells[1:], strict=False))
    last, mean = record(STEPS), sum(record(s).loss for s in range(1, STEPS + 1)) / STEPS
    assert figures["step"] == "40 of 80 (50%)"
    assert figures["loss"] == f"{last.loss:.4f}, mean of 40 steps {mean:.4f}"
    assert figures["held-out loss"] == "2.7500 after step 40, lowest 2.7500 after step 40"
    assert figures["speed"].startswith("1,040 tokens/s, mean of 40 steps 1,020")
    assert figures["communication"].startswith("12.5% of a step waits for other ranks, 12.5 ms")
    assert figures["memory"] == (
        "states and buffers 1 MiB of 1 MiB planned; process 2 MiB, 1 MiB more than before the run "
        "(planned: up to 3 MiB, and what torch and MPI grow by)"
    )
    assert "warning: a < b & c" in page.cells
    # The plots: the ends of the axis, and the place of each point between them.
    labels = [re.findall(r">([-\d.,]+)</text>", svg) for svg in text.split("<svg")[1:]]
    assert labels[0][:3] == ["2.5", "3.72", "4.94"]
    places = re.findall(r'points="([^"]+)"', text)[0].split()
    heights = [float(place.split(",")[1]) for place in places]
    assert len(places) == STEPS
    share = [(h - heights[-1]) / (heights[0] - heights[-1]) for h in heights]
    assert share == pytest.approx(
        [(STEPS - s) / (STEPS - 1) for s in range(1, STEPS + 1)], abs=0.01
    )


def test_long_run_has_few_points_and_nothing_is_read_twice(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, file = begun(folder, steps=0)
    lines = [dataclasses.replace(record(1), step=step, loss=float(step)) for step in range(1, 1501)]
    folder.metrics.write_text("".join(f"{line.to_json()}\n" for line in lines))
    view, read, taken = RunView(folder), os.pread, []

    def counted(descriptor: int, nbytes: int, offset: int) -> bytes:
        data = read(descriptor, nbytes, offset)
        taken.append(len(data))
        return data

    monkeypatch.setattr(os, "pread", counted)
    points = view.look().curves["loss"]["training"]
    assert POINTS <= len(points) <= 2 * POINTS + 1
    assert all(step == pytest.approx(loss) for step, loss in points)
    assert (points[0][0], points[-1][0]) == pytest.approx((1, 1500), abs=16)
    assert sum(taken) == folder.metrics.stat().st_size
    taken.clear()
    with folder.metrics.open("a") as grown:
        grown.write(f"{record(1501).to_json()}\n")
    assert dict(view.look().figures)["step"].startswith("1,501")
    assert sum(taken) < 2500, "two lines"
    file.close()


def test_run_goes_on_where_its_page_cannot_be_written(
    folder: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    begun(folder)
    with PageWriter(folder, 0.01):
        pass
    assert "killed" in folder.page.read_text()
    folder.page.unlink()
    folder.page.mkdir()
    with PageWriter(folder, 0.01):
        pass
    assert [r.getMessage() for r in caplog.records] == [
        f"{folder.page}: cannot be written (Is a directory); the run goes on without"
    ]


@pytest.mark.fresh
def test_command_shows_runs_and_writes_pages_without_torch_and_mpi(tmp_path: Path) -> None:
    code = (
        "import runpy, sys; sys.argv = ['w', *sys.argv[1:]]\n"
        "try: runpy.run_module('hpczero.watch', run_name='__main__', alter_sys=True)\n"
        "finally: print('LOADED', *(set(sys.modules) & {'torch', 'mpi4py', 'h5py'}))"
    )
    for name in ("r", "o"):
        begun(RunFolder(tmp_path / name))
    runs = [str(tmp_path / name) for name in ("r", "o", "none")]
    command = [sys.executable, "-c", code, *runs, "--once", "--page"]
    job = run_command(command, 60, fresh=True).ended()
    assert job.stdout.splitlines()[-1] == "LOADED"
    assert job.stdout.count("killed:") == 2
    for name in ("r", "o"):
        text = (tmp_path / name / "watch.html").read_text()
        Page(text)
        assert "<b>killed</b>: no process of this run lives" in text
        assert "refresh" not in text
