"""The doctor command under a real launcher, and what it does when a probe or the MPI library misbehaves."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from hpczero.files.direct import filesystem_of
from hpczero.tier.disk import IN_MEMORY
from tests.helpers.mpirun import ROOT, Finished, run_command, run_ranks

TITLES = (
    "MPI",
    "world size",
    "thread level",
    "nodes",
    "cores",
    "binding",
    "threads",
    "environment",
    "move (Allgather)",
    "sum (Allreduce)",
    "bandwidth",
    "packages",
    "torch",
    "GPU",
    "shared memory",
    "MPI-IO",
    "MPI libraries",
    "HDF5",
)


def doctor(*words: object) -> Finished:
    return run_ranks(2, ["-m", "hpczero.doctor", *map(str, words)], timeout=100)


def doctor_alone(**variables: str) -> Finished:
    return run_command([sys.executable, "-m", "hpczero.doctor"], 60, variables)


def test_two_ranks_are_examined_and_reported_once(tmp_path: Path) -> None:
    done = doctor("--json", "--directory", tmp_path)
    assert done.returncode == 0, done
    report = json.loads(done.stdout)  # fails if two ranks print
    assert report["usable"] is True
    found = {finding["title"]: finding for finding in report["findings"]}
    assert tuple(found) == TITLES
    assert found["world size"]["value"].startswith("2 ranks, confirmed by")
    for title in ("move (Allgather)", "sum (Allreduce)", "HDF5", "MPI libraries", "torch"):
        assert found[title]["status"] != "fail", found[title]
    assert "trial write works" in found["HDF5"]["value"]
    assert float(found["bandwidth"]["value"].split()[0]) > 0.01
    assert list(tmp_path.iterdir()) == []  # the trial file is gone


def test_disk_is_measured_by_all_ranks_and_left_empty(tmp_path: Path) -> None:
    if filesystem_of(tmp_path) in IN_MEMORY:
        pytest.skip(f"{tmp_path} lies in memory: give pytest a --basetemp on a disk")
    done = doctor("--json", "--directory", tmp_path, "--disk", tmp_path)
    assert done.returncode == 0, done
    found = {f["title"]: f["value"] for f in json.loads(done.stdout)["findings"]}
    assert tuple(found) == (*TITLES, "disk tier", "step from disk")
    speeds = [float(speed) for speed in re.findall(r"([\d.]+) GB/s", found["disk tier"])]
    assert len(speeds) == 2
    assert 0.001 < min(speeds) <= max(speeds) < 1000
    assert "2 rank(s) at once" in found["disk tier"]
    seconds = re.findall(r"([\d.]+) s (?:of|with)", found["step from disk"])
    everything, optimizer = map(float, seconds)
    assert everything > optimizer > 0
    assert list(tmp_path.iterdir()) == []


def test_disk_that_is_memory_blocks_and_names_the_file_system(tmp_path: Path) -> None:
    memory = Path("/dev/shm")
    if filesystem_of(memory) != "tmpfs":
        pytest.skip("/dev/shm is no tmpfs here")
    done = doctor("--directory", tmp_path, "--disk", memory)
    assert done.returncode == 78, done
    said = "fail  disk tier           rank 0: disk tier: /dev/shm lies in memory (tmpfs)"
    assert said in done.stdout


def test_unwritable_directory_blocks_on_every_rank_with_78(tmp_path: Path) -> None:
    done = doctor("--directory", tmp_path / "missing")
    assert done.returncode == 78, done
    lines = done.stdout.splitlines()
    (problem,) = (i for i, line in enumerate(lines) if line.startswith("fail"))
    assert "HDF5" in lines[problem]
    assert "missing" in lines[problem]
    assert lines[problem + 1].lstrip().startswith("-> ")
    assert lines[-1].startswith("not usable: 1 blocking")


def test_lonely_rank_of_a_slurm_job_ends_with_78_and_the_remedy() -> None:
    done = doctor_alone(SLURM_NTASKS="4")
    assert done.returncode == 78, done
    assert "the ranks do not see each other" in done.stdout
    assert "--mpi=pmix" in done.stdout
    other = doctor_alone(SLURM_NTASKS="4", SLURM_PROCID="2")
    assert (other.returncode, other.stdout) == (78, ""), other  # one of the four speaks


def test_without_an_mpi_library_the_doctor_says_what_to_install(tmp_path: Path) -> None:
    package = tmp_path / "mpi4py"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "MPI.py").write_text("raise RuntimeError('cannot load MPI library')\n")
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    done = run_command(
        [sys.executable, "-m", "hpczero.doctor"], timeout=60, env={"PYTHONPATH": path}, cwd=tmp_path
    )
    assert done.returncode == 78, done
    assert "cannot load MPI library" in done.stdout
    assert "-> load the site's MPI module" in done.stdout


@pytest.mark.parametrize("args", [("--help",), ("--time-limit", "0"), ("--no-such-option",)])
def test_options_are_checked_before_mpi_or_torch_start(args: tuple[str, ...]) -> None:
    done = run_command(
        [sys.executable, "-X", "importtime", "-m", "hpczero.doctor", *args], timeout=60
    )
    assert done.returncode == (0 if args == ("--help",) else 78), done
    loaded = {line.split("|")[-1].strip() for line in done.stderr.splitlines() if "|" in line}
    assert "hpczero.doctor.finding" in loaded  # the list is that of this command
    assert not {"torch", "mpi4py", "mpi4py.MPI"} & loaded


LYING_LIBRARY = """
import json
from mpi4py import MPI
from hpczero.doctor import probes

class Lying:
    def __init__(self, comm):
        self.rank, self.size, self.allgather = comm.rank, comm.size, comm.allgather

    def Allreduce(self, sent, received, op):
        MPI.COMM_WORLD.Allreduce(sent, received, op)
        if self.rank == 1 and received.dtype == "float32":
            received[-1] += 1

    def Allgather(self, sent, received):
        MPI.COMM_WORLD.Allgather(sent, received)
        if self.rank == 0 and sent[0].size == 4 * 257:  # a half type
            received[0][-1] ^= 1

lying = Lying(MPI.COMM_WORLD)
found = [probes.try_sums(lying), probes.try_moves(lying)]
if lying.rank == 0:
    print(json.dumps(found))
"""
HANG = """
from mpi4py import MPI
from hpczero.doctor.finding import TimeLimit
if MPI.COMM_WORLD.rank == 0:
    with TimeLimit("the barrier", 1.0):
        MPI.COMM_WORLD.Barrier()
else:
    MPI.COMM_WORLD.recv(source=0)
"""
HOLD_THE_INTERPRETER = """
import ctypes
from hpczero.doctor import finding as limit
limit.GRACE_S = 0.5
with limit.TimeLimit("a library call", 0.2):
    ctypes.PyDLL(None).sleep(600)  # PyDLL keeps the interpreter lock, as HDF5 does
"""


def test_probes_find_a_library_that_sums_or_moves_wrongly_on_one_rank() -> None:
    done = run_ranks(2, ["-c", LYING_LIBRARY], timeout=60)
    assert done.returncode == 0, done
    sums, moves = json.loads(done.stdout)
    assert sums == {"float64": "", "int64": "", "float32": "wrong values on rank 1"}
    half = "wrong values on rank 0"
    assert moves == {"fp32": "", "bf16": half, "fp16": half}


def test_probe_that_hangs_ends_the_whole_job_with_86_and_its_name() -> None:
    done = run_ranks(2, ["-c", HANG], timeout=60)
    assert done.returncode == 86, done
    assert "[rank 0] doctor: the barrier did not end within 1 s" in done.stderr


def test_probe_that_holds_the_interpreter_ends_with_its_stack() -> None:
    done = run_command([sys.executable, "-c", HOLD_THE_INTERPRETER], timeout=60)
    assert done.returncode != 0
    assert "Timeout" in done.stderr
    assert 'File "<string>", line 6' in done.stderr


def test_probe_in_time_leaves_no_alarm_behind() -> None:
    program = (
        "import time; from hpczero.doctor import finding as limit; limit.GRACE_S = 0.1\n"
        "with limit.TimeLimit('quick', 0.5): pass\n"
        "time.sleep(1.0)\n"
    )
    done = run_command([sys.executable, "-c", program], timeout=60)
    assert (done.returncode, done.stderr) == (0, ""), done
