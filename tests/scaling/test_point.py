"""One point as a real MPI job: where its ranks lie, on which device, by which commit."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from hpczero.errors import ConfigError
from scaling.evidence.record import UNKNOWN, read_rows
from scaling.sweep.study import Grid
from tests.helpers.mpirun import ROOT, Finished, run_command, run_ranks
from tests.helpers.short_probe import SHORT_PROBE

POINT = Grid("weak", False, ["tiny"], [3], [1], [2]).points(steps=2, warm_up=1)[0]

# A twin of a device: what it has not finished when a clock is read would not be in that part's time.
TWIN = """
import json, time
from hpczero import Topology
from scaling.sweep.point import measure
from scaling.sweep.study import Point
from tests.helpers.late import LateAccelerator

class Slow(LateAccelerator):
    def finish(self):
        time.sleep(0.03)
    def usage(self):
        return {"allocated_peak": 7}

row = measure(Topology.of_world(), Point.of_json(json.loads(%r)), Slow())
print(json.dumps(row))
"""


def order(path: Path, **changes: Any) -> list[str]:
    point = {**POINT.as_json(), **changes}
    text = json.dumps({"key": "k", "commit": "abc", "setting": {"x": "y"}, "point": point})
    return ["-m", "scaling.sweep.point", text, str(path)]


def one(path: Path) -> dict[str, Any]:
    (row,) = read_rows(path)
    return row


def measured(path: Path, *, env: dict[str, str] | None = None, **changes: Any) -> dict[str, Any]:
    words = ["-c", SHORT_PROBE, *order(path, **changes)]
    run_ranks(changes.get("ranks", 1), words, 120, env).ended()
    return one(path)


@pytest.mark.tool
@pytest.mark.slow
def test_ranks_bound_to_one_core_each_are_not_more_ranks_than_cores(tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("one core: two ranks outnumber it")
    launcher = tmp_path / "bound"
    launcher.write_text(
        "#!/bin/bash\nunset HPCZERO_LAUNCH\nranks=$1\nshift\n"
        f"bind='cores=({cores[0]} {cores[1]}); exec taskset -c "
        '${cores[${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-0}}]} "$@"\'\n'
        f'exec {ROOT}/install/launch.sh "$ranks" bash -c "$bind" bound "$@"\n'
    )
    launcher.chmod(0o755)
    row = measured(tmp_path / "row", env={"HPCZERO_LAUNCH": str(launcher)}, ranks=2)
    assert row["oversubscribed"] is False
    assert row["hosts"] == [0, 0]
    assert row["emulated"] is False


@pytest.mark.tool
@pytest.mark.slow
def test_parts_of_a_step_end_when_the_device_is_through_with_them(tmp_path: Path) -> None:
    program = tmp_path / "twin.py"
    program.write_text(TWIN % json.dumps(POINT.as_json()))
    done = run_ranks(1, [program], 120).ended()
    row = json.loads(done.stdout.splitlines()[-1])
    for part in ("compute", "optimizer"):
        assert all(ms >= 30 for step in row["samples_ms"][part] for ms in step), part
    assert (row["device_name"], row["device_peak_nbytes"]) == ("a late twin", [7])
    assert row["probe"] == []  # the host's kernels say nothing of a device


@pytest.mark.tool
@pytest.mark.slow
def test_the_row_says_where_it_was_computed_and_what_the_sweep_knew(tmp_path: Path) -> None:
    row = measured(tmp_path / "row", device="cpu")
    assert (row["device"], row["device_name"], row["point"]["device"]) == ("cpu", "cpu", "cpu")
    assert row["setting"] == {"x": "y"}
    assert row["commit"] != "abc"  # of the tree that ran, wherever that can be asked


@pytest.mark.tool
@pytest.mark.slow
def test_without_git_the_row_has_the_commit_of_whoever_submitted(tmp_path: Path) -> None:
    row = measured(tmp_path / "row", env={"GIT_DIR": str(tmp_path / "nowhere")})
    assert row["commit"] == "abc" != UNKNOWN


def refused(path: Path, **changes: Any) -> Finished:
    done = run_command([sys.executable, *order(path, **changes)], 60).ended(ConfigError.exit_code)
    assert not path.exists()
    return done


@pytest.mark.tool
def test_a_device_that_is_not_there_is_refused_and_not_replaced(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    assert "cuda was asked for, and torch sees none" in str(
        refused(tmp_path / "row", device="cuda")
    )
    assert "expected one of auto, cpu, cuda" in str(refused(tmp_path / "row", device="tpu"))


@pytest.mark.gpu
def test_a_point_is_measured_on_the_gpu(tmp_path: Path) -> None:
    import torch

    row = measured(tmp_path / "row", device="auto", precision="bf16")
    assert row["device"] == "cuda"
    assert torch.cuda.get_device_name() in row["device_name"]
    assert min(row["device_peak_nbytes"]) > 0
