"""Sweeps: a real one on two numbers of ranks, what is skipped, what is damaged. SLURM: test_submit.py."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from hpczero.errors import ConfigError
from scaling.evidence.record import parse_rows, read_rows
from scaling.sweep import report
from scaling.sweep.__main__ import collect
from scaling.sweep.jobs import StudyFolder
from scaling.sweep.study import Grid, Point
from tests.helpers.mpirun import Finished, run_command
from tests.helpers.short_probe import write_launcher

POINTS = Grid("strong", False, ["tiny"], [0, 3], [1, 2], [4]).points(steps=3, warm_up=1)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables with which points have a short probe."""
    return write_launcher(tmp_path_factory.mktemp("quick") / "launch")


def sweep(*arguments: str, timeout: float = 180, env: Mapping[str, str] | None = None) -> Finished:
    return run_command([sys.executable, "-m", "scaling.sweep", *arguments], timeout, env)


def planned(
    folder: Path, *, done: Sequence[int] = (), commit: str = "abc", **changes: object
) -> StudyFolder:
    """A study whose points ``done`` are finished."""
    study = StudyFolder(folder, "strong", "abc")
    head = {
        "study": "strong",
        "grow": False,
        "definition": "d",
        "steps": 3,
        "warm_up": 1,
        "asked_at": "abc",
        "any_commit": False,
        "points": [point.as_json() for point in POINTS],
    }
    study.path.mkdir(exist_ok=True)
    study.plan.write_text(json.dumps(head))
    for number in done:
        path = study.row(POINTS[number])
        path.parent.mkdir(exist_ok=True)
        row = {"kind": "point", "point": POINTS[number].as_json(), "samples_ms": {}}
        path.write_text(json.dumps({**row, "commit": commit, **changes}) + "\n")
    return study


@pytest.mark.tool
@pytest.mark.slow
@pytest.mark.limit(300)
def test_a_study_is_measured_reported_and_not_measured_twice(
    tmp_path: Path, quick: dict[str, str]
) -> None:
    folder, page = tmp_path / "study", tmp_path / "page.html"
    command = ["strong", "--models", "tiny", "--ranks", "1", "2", "--batches", "4", "--steps", "6"]
    command += ["--warm_up", "1", "--checkpoint_every", "3", "--folder", str(folder)]
    sweep(*command, env=quick).ended()
    rows = read_rows(folder / "sweep-strong.jsonl")
    points = [row for row in rows if row["kind"] == "point"]
    assert rows[0]["points_done"] == rows[0]["points_asked"] == len(points) == 2
    for row, ranks in zip(points, (1, 2), strict=True):
        assert row["placement"] == f"1x{ranks}"
        assert not row["emulated"]
        assert row["commit"]
        assert {"torch", "mpi4py"} <= row["versions"].keys()
        samples = row["samples_ms"]
        assert {len(steps) for steps in samples.values()} == {6}
        assert {len(step) for steps in samples.values() for step in steps} == {ranks}
        assert sum(max(step) > 0 for step in samples["checkpoint"]) == 2
        assert min(map(min, samples["compute"])) > 0
        assert len(row["pss_peak_nbytes"]) == len(row["ledger_nbytes"]) == ranks
        # the ledger never holds more than was planned; the sums of its peaks may not coincide
        assert 0.5 < max(row["ledger_nbytes"]) / row["planned"]["total"] < 1.1
    alone, together = (row["losses"] for row in points)
    assert alone == pytest.approx(together, abs=1e-5)  # the same samples, whatever the ranks
    again = sweep(*command, "--any_commit", env=quick)
    assert "2 points, 2 done already" in again.stderr
    words = ["-m", "scaling.report", str(folder / "sweep-strong.jsonl"), "--page", str(page)]
    shown = run_command([sys.executable, *words], 60).ended()
    assert "Losses of tiny, global batch 4, fp32: 2 points" in shown.stdout
    drawn = {path.name for path in folder.glob("sweep-strong*.*")}
    for figure in ("scaling", "breakdown", "memory", "losses"):
        assert {f"sweep-strong-{figure}.png", f"sweep-strong-{figure}.svg"} <= drawn
    assert {"sweep-strong.csv", "sweep-strong.md"} <= drawn
    assert page.stat().st_size > 50_000


@pytest.mark.tool
@pytest.mark.slow
@pytest.mark.limit(200)
def test_nodes_that_are_one_machine_are_called_emulated(
    tmp_path: Path, quick: dict[str, str]
) -> None:
    command = ["weak", "--models", "tiny", "--ranks", "2", "--ranks_per_node", "1", "--batches"]
    command += ["2", "--steps", "2", "--warm_up", "1", "--folder", str(tmp_path)]
    sweep(*command, env=quick).ended()
    row = read_rows(tmp_path / "sweep-weak.jsonl")[1]
    assert (row["placement"], row["emulated"]) == ("2x1", True)
    assert report.text(read_rows(tmp_path / "sweep-weak.jsonl")).startswith("**Emulated nodes on")


def test_damaged_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    study = planned(tmp_path, done=(0, 1, 2))
    study.row(POINTS[1]).write_text('{"kind": "point", "poi\n')  # killed while writing
    study.row(POINTS[2]).write_text('[1]\n{"kind": "point"}\n')
    assert collect(study) == 0
    rows = read_rows(study.rows)
    assert [row["kind"] for row in rows] == ["run", "point"]
    assert (rows[0]["points_done"], rows[0]["points_asked"], rows[0]["malformed"]) == (1, 4, 3)


def test_a_study_without_a_finished_point_says_so(tmp_path: Path) -> None:
    study = planned(tmp_path)
    with pytest.raises(ConfigError, match="none of the 4 points of the strong scaling study is"):
        collect(study)
    with pytest.raises(ConfigError, match="run the sweep without --collect first"):
        collect(StudyFolder(tmp_path, "weak"))


def test_points_of_another_commit_do_not_count_unless_asked(tmp_path: Path) -> None:
    study = planned(tmp_path, done=(0,), commit="abd")
    assert study.finished(POINTS[0], any_commit=False)[0] is None
    assert study.finished(POINTS[0], any_commit=True)[0] is not None
    assert study.finished(POINTS[1], any_commit=True)[0] is None
    with pytest.raises(ConfigError, match="points that ran with other code than abc: 1"):
        collect(study)


def test_rows_of_a_killed_job_leave_the_others(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"kind": "run"}\n{"kind": "po\xff\n\n"text"\n{"kind": "point", "x": 1}\n')
    assert parse_rows(path) == ([{"kind": "run"}, {"kind": "point", "x": 1}], 2)
    assert parse_rows(path, needs=("x",)) == ([{"kind": "point", "x": 1}], 3)


@pytest.mark.tool
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["strong", "--ranks", "3", "--batches", "4"], "global batch of 4, which 3 ranks"),
        (["strong", "--grow"], "--grow: a study of kind strong keeps the model"),
        (["weak", "--models", "nothing"], "--models: got 'nothing'"),
        (
            ["strong", "--ranks", "16", "100", "--batches", "4"],
            ": 400 would do, as would any other multiple of 400",
        ),
        (["weak", "--steps", "0"], "--steps: got 0, expected at least 1"),
        (["weak", "--", "--partition=gpu"], "after --, which only --by sbatch takes"),
        (["sideways"], "invalid choice|expected|weak"),
    ],
)
def test_wrong_use_is_refused_before_anything_runs(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    kind, *others = arguments
    done = sweep(kind, "--folder", str(tmp_path / "study"), *others, timeout=30).ended(
        ConfigError.exit_code
    )
    assert any(part in done.stderr for part in message.split("|")), done
    assert not (tmp_path / "study").exists()


@pytest.mark.tool
@pytest.mark.parametrize("order", ["{}", "[1]", "no json", '{"key": "a", "point": {"model": 1}}'])
def test_a_point_that_is_none_is_refused_before_mpi_starts(order: str, tmp_path: Path) -> None:
    done = run_command(
        [sys.executable, "-m", "scaling.sweep.point", order, str(tmp_path / "row")], 30
    )
    assert done.returncode == ConfigError.exit_code, done
    assert "expected the JSON that" in done.stderr or "not a point of a sweep" in done.stderr
    assert not (tmp_path / "row").exists()


@pytest.mark.tool
def test_a_failing_point_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    # a launcher that cannot start anything
    command = ["weak", "--models", "tiny", "--ranks", "1", "--folder", str(tmp_path)]
    done = sweep(*command, env={"HPCZERO_LAUNCH": "false"}).ended(ConfigError.exit_code)
    assert "failed: tiny, stage 3, 1 rank(s)" in done.stderr
    assert "none of the 1 points" in done.stderr


def test_of_several_commits_the_newest_row_counts(tmp_path: Path) -> None:
    study = planned(tmp_path)
    (tmp_path / "points").mkdir()
    row = {"kind": "point", "point": POINTS[0].as_json(), "samples_ms": {}}
    # names in one order, dates in another
    for name, commit, day in (("a", "old", 1), ("b", "new", 3), ("c", "abc", 2)):
        path = tmp_path / "points" / f"{name}.json"
        date = f"2026-01-0{day}T00:00:00+00:00"
        path.write_text(json.dumps({**row, "commit": commit, "date": date}) + "\n")
    found, _ = study.finished(POINTS[0], any_commit=True)
    assert found is not None
    assert found["commit"] == "new"


def test_points_of_another_machine_do_not_count_even_if_any_commit_does(tmp_path: Path) -> None:
    def found(point: Point, any_commit: bool = True, **setting: str) -> bool:
        study = StudyFolder(tmp_path, "strong", "abc", setting)
        return study.finished(point, any_commit=any_commit)[0] is not None

    planned(tmp_path, done=(0,), setting={"machine": "there"})
    assert not found(POINTS[0], machine="here")
    assert not found(POINTS[0], any_commit=False, machine="here")
    assert found(POINTS[0], machine="there")
    planned(tmp_path, done=(1,), setting={"partition": "a100"})
    assert found(POINTS[1], partition="a100")
    assert not found(POINTS[1], partition="h100")


@pytest.mark.tool
@pytest.mark.slow
@pytest.mark.limit(200)
def test_what_no_commit_names_is_measured_again(tmp_path: Path) -> None:
    command = ["weak", "--models", "tiny", "--ranks", "1", "--steps", "2", "--warm_up", "1"]
    command += ["--folder", str(tmp_path)]
    launcher = tmp_path / "launch"
    variables = {**write_launcher(launcher), "GIT_DIR": str(tmp_path / "nowhere")}  # no checkout
    done = sweep(*command, env=variables).ended()
    assert read_rows(tmp_path / "sweep-weak.jsonl")[1]["commit"] == "unknown"
    launcher.write_text("#!/bin/sh\nexit 1\n")  # it is asked for the point: that is enough
    again = sweep(*command, env=variables)
    for each in (done, again):
        assert "1 points, 0 done already, commit unknown" in each.stderr, each
    assert "failed: tiny, stage 3, 1 rank(s)" in again.stderr, again


@pytest.mark.tool
def test_a_study_of_emulated_nodes_may_vary_them_at_the_same_ranks(tmp_path: Path) -> None:
    command = ["weak", "--models", "tiny", "--ranks", "4", "--ranks_per_node", "1", "2", "4"]
    failing = {"HPCZERO_LAUNCH": "false"}
    done = sweep(*command, "--folder", str(tmp_path), env=failing)
    for nodes in (4, 2, 1):
        assert f"4 rank(s) on {nodes} node(s)" in done.stderr, done


@pytest.mark.tool
@pytest.mark.slow
@pytest.mark.limit(300)
def test_layouts_train_the_same_and_each_is_held_against_the_first(
    tmp_path: Path, quick: dict[str, str]
) -> None:
    words = ["--ranks", "2", "--models", "tiny", "--batches", "8", "--steps", "2", "--warm_up", "1"]
    done = sweep(
        *("layouts", *words, "--layouts", "tensor=2", "pipeline=2"),
        *("--folder", str(tmp_path)),
        timeout=280,
        env=quick,
    )
    assert done.returncode == 0, done
    rows = read_rows(tmp_path / "sweep-layouts.jsonl")
    first, second = (row for row in rows if row["kind"] == "point")
    assert first["losses"] == pytest.approx(second["losses"], rel=0, abs=1e-5)
    said = report.text(rows)
    assert "| tiny, stage 3, tensor 2 " in said
    assert "speed-up over" not in said
    assert "2 points, at most" in said
