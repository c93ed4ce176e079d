"""Sweeps: a real one on two numbers of ranks, what is skipped, what is damaged, and what goes to SLURM."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from hpczero.errors import ConfigError, HpcZeroError
from scaling import launchers
from scaling.launchers import Slurm
from scaling.point import foreign_share, oversubscribed
from scaling.record import parse_rows, read_rows
from scaling.study import Grid
from scaling.sweep import StudyFolder, collect
from tests.helpers.mpirun import Finished, run_command

POINTS = Grid("strong", False, ["tiny"], [0, 3], [1, 2], [4]).points(steps=3, warm_up=1)


def sweep(*arguments: str, timeout: float = 180) -> Finished:
    return run_command([sys.executable, "-m", "scaling.sweep", *arguments], timeout)


def planned(folder: Path, *, done: Sequence[int] = (), commit: str = "abc") -> StudyFolder:
    """A study whose points ``done`` are finished."""
    study = StudyFolder(folder, "strong")
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
        path = study.point(POINTS[number].key("abc"))
        path.parent.mkdir(exist_ok=True)
        row = {"kind": "point", "point": POINTS[number].as_json(), "samples_ms": {}}
        path.write_text(json.dumps({**row, "commit": commit}) + "\n")
    return study


@pytest.mark.slow
@pytest.mark.limit(300)
def test_a_study_is_measured_reported_and_not_measured_twice(tmp_path: Path) -> None:
    folder, page = tmp_path / "study", tmp_path / "page.html"
    command = ["strong", "--models", "tiny", "--ranks", "1", "2", "--batches", "4", "--steps", "6"]
    command += ["--warm_up", "1", "--checkpoint_every", "3", "--folder", str(folder)]
    first = sweep(*command)
    assert first.returncode == 0, first
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
    again = sweep(*command, "--any_commit")
    assert "2 points, 2 done already" in again.stderr
    report = [sys.executable, "-m", "scaling.report", str(folder / "sweep-strong.jsonl")]
    shown = run_command([*report, "--page", str(page)], 60)
    assert shown.returncode == 0, shown
    assert "Losses of tiny, global batch 4, fp32: 2 points" in shown.stdout
    drawn = {path.name for path in folder.glob("sweep-strong*.*")}
    for figure in ("scaling", "breakdown", "memory", "losses"):
        assert {f"sweep-strong-{figure}.png", f"sweep-strong-{figure}.svg"} <= drawn
    assert {"sweep-strong.csv", "sweep-strong.md"} <= drawn
    assert page.stat().st_size > 50_000


@pytest.mark.slow
@pytest.mark.limit(200)
def test_nodes_that_are_one_machine_are_called_emulated(tmp_path: Path) -> None:
    command = ["weak", "--models", "tiny", "--ranks", "2", "--ranks_per_node", "1", "--batches"]
    done = sweep(*command, "2", "--steps", "2", "--warm_up", "1", "--folder", str(tmp_path))
    assert done.returncode == 0, done
    row = read_rows(tmp_path / "sweep-weak.jsonl")[1]
    assert (row["placement"], row["emulated"]) == ("2x1", True)
    from scaling.sweep_report import text

    assert text(read_rows(tmp_path / "sweep-weak.jsonl")).startswith("**Emulated nodes on one")


def test_damaged_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    study = planned(tmp_path, done=(0, 1, 2))
    study.point(POINTS[1].key("abc")).write_text('{"kind": "point", "poi\n')  # killed while writing
    study.point(POINTS[2].key("abc")).write_text('[1]\n{"kind": "point"}\n')
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
    assert study.finished(POINTS[0], "abc", any_commit=False)[0] is None
    assert study.finished(POINTS[0], "abc", any_commit=True)[0] is not None
    assert study.finished(POINTS[1], "abc", any_commit=True)[0] is None
    with pytest.raises(ConfigError, match="points that ran with other code than abc: 1"):
        collect(study)


def test_rows_of_a_killed_job_leave_the_others(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"kind": "run"}\n{"kind": "po\xff\n\n"text"\n{"kind": "point", "x": 1}\n')
    assert parse_rows(path) == ([{"kind": "run"}, {"kind": "point", "x": 1}], 2)
    assert parse_rows(path, needs=("x",)) == ([{"kind": "point", "x": 1}], 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["strong", "--ranks", "3", "--batches", "4"], "global batch of 4, which 3 ranks"),
        (["strong", "--grow"], "--grow: strong scaling keeps the model"),
        (["weak", "--models", "nothing"], "--models: got 'nothing'"),
        (["weak", "--steps", "0"], "--steps: got 0, expected at least 1"),
        (["weak", "--", "--partition=gpu"], "after --, which only --by sbatch takes"),
        (["sideways"], "invalid choice|expected|weak"),
    ],
)
def test_wrong_use_is_refused_before_anything_runs(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    kind, *others = arguments
    done = sweep(kind, "--folder", str(tmp_path / "study"), *others, timeout=30)
    assert done.returncode == ConfigError.exit_code, done
    assert any(part in done.stderr for part in message.split("|")), done
    assert not (tmp_path / "study").exists()


@pytest.mark.parametrize("order", ["{}", "[1]", "no json", '{"key": "a", "point": {"model": 1}}'])
def test_a_point_that_is_none_is_refused_before_mpi_starts(order: str, tmp_path: Path) -> None:
    done = run_command([sys.executable, "-m", "scaling.point", order, str(tmp_path / "row")], 30)
    assert done.returncode == ConfigError.exit_code, done
    assert "expected the JSON that" in done.stderr or "not a point of a sweep" in done.stderr
    assert not (tmp_path / "row").exists()


def test_a_failing_point_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    # a launcher that cannot start anything
    command = [sys.executable, "-m", "scaling.sweep", "weak", "--models", "tiny", "--ranks", "1"]
    done = run_command([*command, "--folder", tmp_path], 60, env={"HPCZERO_LAUNCH": "false"})
    assert done.returncode == ConfigError.exit_code, done
    assert "failed: tiny, stage 3, 1 rank(s)" in done.stderr
    assert "none of the 1 points" in done.stderr


# --- SLURM: here what is asked of sbatch; tests/slurm asks a real one


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An sbatch that writes down its arguments and counts jobs; returns the folder of what it wrote."""
    folder = tmp_path / "jobs"
    folder.mkdir()
    script = tmp_path / "bin" / "sbatch"
    script.parent.mkdir()
    script.write_text(
        f'#!/bin/bash\nn=$(ls {folder} | wc -l)\nprintf "%s\\n" "$@" > {folder}/$((n + 101))\n'
        'echo "$((n + 101));cluster"\n'
    )
    script.chmod(0o755)
    point = tmp_path / "point.sh"
    point.write_text("#!/bin/bash\n")
    monkeypatch.setattr(launchers, "POINT_SCRIPT", point)
    monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{os.environ['PATH']}")
    return folder


def test_points_become_jobs_and_one_more_collects(
    sbatch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from scaling import sweep as module

    arguments = ["strong", "--by", "sbatch", "--models", "tiny", "--ranks", "2", "4"]
    arguments += ["--batches", "4", "--ranks_per_node", "2", "--in_turn"]
    arguments += ["--folder", str(tmp_path / "study"), "--", "--partition=gpu", "--time=30:00"]
    monkeypatch.setattr(sys, "argv", ["sweep", *arguments])
    assert module.main() == 0
    first, second, last = (
        (sbatch / number).read_text().splitlines() for number in ("101", "102", "103")
    )
    assert {"--parsable", "--nodes=1", "--ntasks-per-node=2", "--partition=gpu"} <= set(first)
    assert {"--nodes=2", "--ntasks-per-node=2", "--dependency=afterany:101"} <= set(second)
    assert {"--nodes=1", "--ntasks-per-node=1", "--dependency=afterany:101:102"} <= set(last)
    assert "--collect" in last
    assert f"--output={tmp_path / 'study' / 'logs'}/%x-%j.log" in first
    script = first.index(str(tmp_path / "point.sh"))
    assert first[script + 1 : script + 4] == ["python", "-m", "scaling.point"]
    assert json.loads(first[script + 4])["point"]["ranks"] == 2


def test_a_refusal_of_sbatch_is_passed_on(sbatch: Path, tmp_path: Path) -> None:
    (tmp_path / "bin" / "sbatch").write_text("#!/bin/bash\necho invalid partition >&2\nexit 1\n")
    with pytest.raises(HpcZeroError, match=r"sbatch refused \(1\): invalid partition; the command"):
        Slurm([], tmp_path / "logs", in_turn=False).submit(
            ["-c", "0"], nodes=1, ranks_per_node=1, name="x"
        )


def test_without_sbatch_the_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="there is no sbatch here"):
        Slurm([], tmp_path / "logs", in_turn=False).submit([], nodes=1, ranks_per_node=1, name="x")


# --- what a row says of its conditions


def test_ranks_beyond_the_cores_of_a_machine_are_told() -> None:
    assert not oversubscribed([("a", 2), ("a", 2), ("b", 2)])
    assert oversubscribed([("a", 2), ("a", 2), ("a", 2), ("b", 2)])


def test_time_of_other_programs_is_what_ranks_did_not_take() -> None:
    cores = os.cpu_count() or 1

    def rank(host: str, own: float, busy: float) -> dict[str, object]:
        return {"host": (host, 2), "cpu_s": own, "machine_s": busy, "window_s": 10.0}

    quiet = [rank("a", 9.0, 18.5), rank("a", 9.5, 18.4)]
    assert foreign_share(quiet) == 0.0
    assert foreign_share([*quiet, rank("b", 5.0, 9.0)]) == pytest.approx(4.0 / (10.0 * cores))
