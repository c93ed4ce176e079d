"""What a study asks of SLURM: here of a made-up sbatch and squeue; tests/slurm asks real ones."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hpczero.errors import ConfigError, HpcZeroError
from scaling.sweep import __main__ as module
from scaling.sweep import jobs as launchers
from scaling.sweep.jobs import Slurm, StudyFolder
from scaling.sweep.study import Point

pytestmark = pytest.mark.machine

FAKE = """#!/bin/bash
n=$(ls {jobs} | wc -l)
if [ -e {refusing} ] && [ "$n" -ge "$(cat {refusing})" ] && [[ "$*" != *--collect* ]]; then
    echo "no more of you" >&2
    exit 1
fi
printf "%s\\n" "$@" > {jobs}/$((n + 101))
echo "$((n + 101));cluster"
"""


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An sbatch that writes down its arguments and counts jobs; returns the folder of what it wrote."""
    folder = tmp_path / "jobs"
    folder.mkdir()
    script = tmp_path / "bin" / "sbatch"
    script.parent.mkdir()
    script.write_text(FAKE.format(jobs=folder, refusing=tmp_path / "refusing"))
    script.chmod(0o755)
    point = tmp_path / "point.sh"
    point.write_text("#!/bin/bash\n")
    monkeypatch.setattr(launchers, "POINT_SCRIPT", point)
    monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{os.environ['PATH']}")
    return folder


def test_points_become_jobs_and_one_more_collects(
    sbatch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert first[script + 1 : script + 4] == ["python", "-m", "scaling.sweep.point"]
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


Study = Callable[..., dict[str, list[str]]]


@pytest.fixture
def study(sbatch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
    """Types the command of a study of two points; returns the arguments of the jobs that it has submitted."""

    def type_it(*options: str, queued: tuple[str, ...] | None = ()) -> dict[str, list[str]]:
        squeue = tmp_path / "bin" / "squeue"
        away = "echo slurmctld is away >&2; exit 1"
        answer = away if queued is None else f"echo {' '.join(queued)}"
        squeue.write_text(f"#!/bin/bash\n{answer}\n")
        squeue.chmod(0o755)
        before = {path.name for path in sbatch.iterdir()}
        words = ["strong", "--by", "sbatch", "--models", "tiny", "--ranks", "1", "2"]
        words += ["--folder", str(tmp_path / "study"), "--", *options]
        monkeypatch.setattr(sys, "argv", ["sweep", *words])
        module.main()
        new = [path for path in sorted(sbatch.iterdir()) if path.name not in before]
        return {path.name: path.read_text().splitlines() for path in new}

    return type_it


def test_the_same_command_twice_submits_nothing_twice(study: Study) -> None:
    assert list(study()) == ["101", "102", "103"]
    assert study(queued=("101", "102", "103")) == {}
    # one has ended without a row: it is submitted again, and collected with the one that still waits
    again = study(queued=("102", "103"))
    assert list(again) == ["104", "105"]
    assert "--dependency=afterany:102:104" in again["105"]
    # all wait, and nobody would collect them
    (collector,) = study(queued=("102", "104")).values()
    assert {"--collect", "--dependency=afterany:104:102"} <= set(collector)


def test_another_partition_is_another_study(study: Study) -> None:
    first = study("--partition=a100")
    second = study("--partition=h100", queued=tuple(first))
    assert len(first) == len(second) == 3
    assert study("--partition=h100", "--time=9", queued=tuple({**first, **second})) == {}


def test_nothing_is_submitted_while_nobody_knows_what_is_queued(
    study: Study, tmp_path: Path
) -> None:
    study()
    with pytest.raises(
        HpcZeroError, match=r"jobs 101, 102, 103 .* \(slurmctld is away\); type the"
    ):
        study(queued=None)
    assert len(list((tmp_path / "jobs").iterdir())) == 3


def test_what_was_submitted_before_a_refusal_is_collected(
    study: Study, sbatch: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "refusing").write_text("1")
    with pytest.raises(HpcZeroError, match="sbatch refused"):
        study()
    first, last = (path.read_text().splitlines() for path in sorted(sbatch.iterdir()))
    assert "scaling.sweep.point" in first
    assert {"--collect", "--dependency=afterany:101"} <= set(last)
    assert (
        "1 of 2 points are in the queue; the same command submits the rest"
        in capsys.readouterr().err
    )
    (tmp_path / "refusing").unlink()
    rest = study(queued=("101", "102"))
    assert len(rest) == 2
    assert "--dependency=afterany:101:103" in rest["104"]


def test_a_job_that_fails_leaves_no_row_of_an_earlier_tree(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "commit", lambda: "abc+changes")
    orders = [json.loads(job[-2]) for job in study().values() if "scaling.sweep.point" in job]
    for order in orders:
        path = tmp_path / "study" / "points" / f"{order['key']}.json"
        row = {"kind": "point", "point": order["point"], "samples_ms": {}, "commit": "abc+changes"}
        path.write_text(json.dumps(row) + "\n")
    study()  # these jobs fail: they write nothing
    with pytest.raises(ConfigError, match="none of the 2 points"):
        module.collect(StudyFolder(tmp_path / "study", "strong"))


def test_jobs_are_told_what_the_submitter_knows(
    study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "commit", lambda: "abc")
    for job in list(study("--partition=a100").values())[:2]:
        order = json.loads(job[-2])
        assert order["commit"] == "abc"
        assert order["setting"]["partition"] == "a100"
        assert order["key"] == Point.of_json(order["point"]).key("abc", order["setting"])


def test_an_empty_answer_of_squeue_is_a_failure_if_it_says_so(sbatch: Path, tmp_path: Path) -> None:
    squeue = tmp_path / "bin" / "squeue"
    squeue.write_text("#!/bin/bash\nexit 3\n")
    squeue.chmod(0o755)
    with pytest.raises(HpcZeroError, match=r"\(exit code 3\)"):
        Slurm([], tmp_path / "logs", in_turn=False).queued(["101"])
