"""The environment of a job on each node's own disk: packed, sent by a real sbcast, used, and gone afterwards."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import pytest

from tests.helpers.mpirun import ROOT, Finished, run_command
from tests.slurm.cluster import SlurmCluster
from tests.slurm.jobs import Job, Submitter

pytestmark = [pytest.mark.machine, pytest.mark.limit(180)]

WHERE = "import os, sys, small; print(os.environ['SLURMD_NODENAME'], sys.prefix, os.__file__, small.__file__)"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small environment, and a checkout beside it: the job scripts and a package of one line."""
    folder = tmp_path_factory.mktemp("site")
    venv.create(folder / "env", symlinks=True, with_pip=False)
    (site,) = (folder / "env" / "lib").glob("python*/site-packages")
    (site / "small.py").write_text("VALUE = 1\n")
    # Jobs note what they ran with.
    packages = [path for path in sys.path if path.endswith("site-packages")]
    (site / "mpi4py.pth").write_text("\n".join([*packages, ""]))
    checkout = folder / "checkout"
    checkout.mkdir()
    parts = [ROOT / part for part in ("slurm", "install", "hpczero", "scaling")]
    subprocess.run(["cp", "-a", *parts, checkout], check=True)
    return folder / "env" / "bin" / "python"


@pytest.fixture
def archive(python: Path, tmp_path: Path) -> Path:
    """Packed anew, as each test may damage it."""
    packed = pack(python, tmp_path / "env.tar")
    assert packed.returncode == 0, packed
    return tmp_path / "env.tar"


def checkout_of(python: Path) -> Path:
    return python.parents[2] / "checkout"


def pack(python: Path, archive: Path) -> Finished:
    line = [checkout_of(python) / "slurm" / "pack.sh", archive]
    return run_command(line, 60, {"PYTHON": os.fspath(python)}, archive.parent)


class Point:
    """``point.sh`` with an archive: how a user runs any program on all ranks."""

    def __init__(self, slurm: SlurmCluster, folder: Path, python: Path, archive: Path) -> None:
        self.slurm, self.folder = slurm, folder
        self.python = python
        self.variables = {
            "ENV_ARCHIVE": os.fspath(archive),
            "NODE_LOCAL": os.fspath(slurm.disk),
            "PYTHON": os.fspath(python),
        }

    def __call__(self, *command: str, **variables: str) -> Job:
        submitter = Submitter(self.slurm, self.folder)
        given = {**self.variables, **variables}
        given["SBATCH_OPTIONS"] = f"--parsable --mem=100 {variables.get('SBATCH_OPTIONS', '')}"
        script = checkout_of(self.python) / "slurm" / "point.sh"
        return submitter.submitted(submitter.at(script, *command, **given))

    def on_disks(self, nodes: int = 3) -> list[str]:
        """What lies on the disks of the nodes."""
        step = ["srun", "--mpi=none", f"--nodes={nodes}", "--ntasks-per-node=1", "--mem=100"]
        look = f'cd {self.slurm.disk} && for f in *; do echo "$SLURMD_NODENAME:$f"; done'
        shown = self.slurm.run([*step, "bash", "-c", look])
        return sorted(line for line in shown.stdout.split() if not line.endswith(":*"))


@pytest.fixture
def point(slurm: SlurmCluster, tmp_path: Path, python: Path, archive: Path) -> Point:
    return Point(slurm, tmp_path, python, archive)


def test_ranks_of_two_nodes_run_from_their_own_disks_and_leave_nothing(
    point: Point, slurm: SlurmCluster
) -> None:
    job = point("python", "-c", WHERE, RANKS_PER_NODE="2", GPUS_PER_NODE="2")
    job.ends_with(0)
    said = [line.split() for line in job.log.splitlines() if line.startswith("host")]
    assert sorted(line[0] for line in said) == ["host1", "host1", "host2", "host2"]
    here = slurm.disk / f"hpczero-env-{job.number}-0"
    for _, prefix, library, small in said:
        assert prefix == f"{here}/env"
        assert Path(small).is_relative_to(here / "env")
        # The standard library too, where the interpreter is no part of the node's system.
        own = not Path(sys.base_prefix).is_relative_to("/usr")
        assert Path(library).is_relative_to(here / "base") == own
    assert f"{here}/checkout/slurm/bind.sh" in job.log
    assert "MB on each node, in" in job.log
    job.wait_for_the_end()
    assert point.on_disks() == []


def test_without_an_archive_nothing_is_sent(point: Point) -> None:
    job = point("python", "-c", WHERE, ENV_ARCHIVE="")
    job.ends_with(0)
    assert f" {point.python.parents[1]} " in job.log, job.log
    assert "environment:" not in job.log


def test_two_jobs_on_one_node_have_one_each_and_the_end_of_one_leaves_the_others(
    point: Point, tmp_path: Path
) -> None:
    here = {"NODES": "1", "RANKS_PER_NODE": "1", "SBATCH_OPTIONS": "--nodelist=host3"}
    waits = (
        f"import pathlib, time; pathlib.Path('{tmp_path}/begun').touch()\n"
        f"while not pathlib.Path('{tmp_path}/go').exists(): time.sleep(0.1)\n"
        "import csv; print('from', csv.__file__, flush=True)"
    )
    first = point("python", "-c", waits, **here)
    first.wait((tmp_path / "begun").exists, "its start")
    second = point("python", "-c", "print('second')", **here)
    second.ends_with(0)
    assert point.on_disks() == [f"host3:hpczero-env-{first.number}-0"]
    (tmp_path / "go").touch()
    first.ends_with(0)
    assert point.on_disks() == []


def refused(job: Job, *messages: str) -> None:
    job.ends_with(78)
    for message in messages:
        assert message in job.log, job.log
    assert "slurm: type: " in job.log
    assert "ran" not in job.log.split()


def test_missing_archive_is_refused_with_the_line_to_type(point: Point) -> None:
    gone = f"{point.folder}/gone.tar"
    job = point("echo", "ran", ENV_ARCHIVE=gone)
    refused(job, f"ENV_ARCHIVE is {gone}: no such file", f"slurm/pack.sh {gone}")


def test_archive_without_its_info_is_refused(point: Point, archive: Path) -> None:
    archive.with_name("env.tar.info").unlink()
    refused(point("echo", "ran"), "env.tar.info does not say its sha256")


def test_archive_that_is_cut_off_is_refused(point: Point, archive: Path) -> None:
    os.truncate(archive, archive.stat().st_size - 1)
    refused(point("echo", "ran"), "not whole, or another one")


def test_archive_with_a_wrong_bit_is_found_by_the_nodes(point: Point, archive: Path) -> None:
    content = bytearray(archive.read_bytes())
    content[len(content) // 2] ^= 1
    archive.write_bytes(content)
    job = point("echo", "ran")
    refused(job, "node host1: the archive arrived with another checksum", "could not be unpacked")
    assert point.on_disks() == []


def test_stale_archive_is_refused_after_a_change_of_the_code_or_of_the_environment(
    point: Point, python: Path
) -> None:
    for path in (
        checkout_of(python) / "hpczero" / "errors.py",
        next(python.parents[1].rglob("small.py")),
    ):
        times = path.stat()
        path.touch()
        refused(point("echo", "ran"), "env.tar is stale: files of")
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    point("echo", "ran").ends_with(0)  # and is none once they are what they were


def test_full_disk_of_a_node_is_named_and_left_as_it_was(point: Point, slurm: SlurmCluster) -> None:
    filler = slurm.disk / "others"
    on = ["srun", "--mpi=none", "--nodelist=host2", "--nodes=1", "--ntasks=1", "--mem=100"]
    slurm.run([*on, "bash", "-c", f"head -c 450M /dev/zero >{filler}"])
    try:
        job = point("echo", "ran")
        refused(job, "node host2: ", " MB free, expected ", "the disks are not ready")
        assert "node host1: " not in job.log
        assert point.on_disks() == ["host2:others"]
    finally:
        slurm.run([*on, "rm", filler])


def test_disk_that_nodes_share_is_refused(point: Point, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    refused(point("echo", "ran", NODE_LOCAL=f"{tmp_path}/shared"), "a disk of each node's own?")
    refused(point("echo", "ran", NODE_LOCAL="/nowhere"), "NODE_LOCAL is /nowhere: no such folder")


def test_what_a_job_that_is_gone_has_left_is_removed_and_nothing_else(
    point: Point, slurm: SlurmCluster
) -> None:
    names = ("999999-0", "999998-0", "x")
    folders = [f"{slurm.disk}/hpczero-env-{name}" for name in names]
    mine = f"mkdir {' '.join(folders)}; touch -d '2 hours ago' {folders[0]} {folders[2]}; ln -s /etc {folders[0]}1"
    on = ["srun", "--mpi=none", "--nodelist=host1", "--nodes=1", "--ntasks=1", "--mem=100"]
    slurm.run([*on, "bash", "-c", mine])
    try:
        job = point("echo", "done")
        job.ends_with(0)
        assert f"node host1: removing {folders[0]}, left by a job that is gone" in job.log
        left = {f"host1:{Path(f).name}" for f in (*folders[1:], f"{folders[0]}1")}
        assert set(point.on_disks()) == left
    finally:
        slurm.run([*on, "bash", "-c", f"rm -rf {slurm.disk}/hpczero-env-*"])


def test_archive_has_no_results_no_tests_of_python_and_no_link_to_the_checkout(
    archive: Path,
) -> None:
    with tarfile.open(archive) as packed:
        names = [os.path.normpath(member.name) for member in packed.getmembers()]
        links = [m.linkname for m in packed.getmembers() if m.issym()]
    assert any(name.startswith("checkout/hpczero/train.py") for name in names)
    assert not [name for name in names if name.startswith("checkout/scaling/results/")]
    assert not [name for name in names if re.match(r"base/lib/[^/]+/(test|site-packages)/", name)]
    assert not [link for link in links if "checkout" in link]


def test_python_of_the_system_is_not_packed(tmp_path: Path) -> None:
    if not Path("/usr/bin/python3").exists():
        pytest.skip("no Python in /usr/bin")
    line = [ROOT / "slurm" / "pack.sh", tmp_path / "env.tar"]
    done = run_command(line, 30, {"PYTHON": "/usr/bin/python3"}, tmp_path)
    assert done.returncode == 78
    assert "of the node's own system" in done.stderr
    assert list(tmp_path.iterdir()) == []
