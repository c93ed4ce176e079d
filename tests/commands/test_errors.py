"""How a command ends."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from tests.helpers.mpirun import run_ranks


def program(code: str, **how: Any) -> subprocess.CompletedProcess[str]:
    given = {"stderr": subprocess.PIPE, "text": True, "timeout": 60, **how}
    return subprocess.run([sys.executable, "-c", code], check=False, **given)


@pytest.mark.parametrize("lines", [1, 100_000])  # fits into the pipe's buffers; does not
def test_command_piped_into_a_reader_that_leaves_says_nothing(lines: int) -> None:
    code = (
        "import sys; sys.stdin.read(); from hpczero import errors\n"
        f"def main():\n    for number in range({lines}):\n        print(number)\n"
        "errors.run(main)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as command:
        assert command.stdin
        assert command.stdout
        assert command.stderr
        command.stdout.close()  # the reader has left before the first line
        command.stdin.close()
        said = command.stderr.read().decode()
        assert (command.wait(60), said) == (141, "")


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        ("OSError(28, 'No space left on device', 'runs/m.jsonl')", "runs/m.jsonl: No space left"),
        ("OSError(122, 'Disk quota exceeded')", "a file, or the output: Disk quota exceeded"),
        ("MemoryError('Unable to allocate 3 TiB')", "Unable to allocate 3 TiB. Out of memory"),
        ('RuntimeError("DefaultCPUAllocator: can\'t allocate memory")', "Out of memory"),
        ("BrokenPipeError('the loader died')", "BrokenPipeError: the loader died"),
    ],
)
def test_machine_that_has_no_more_to_give_is_told_in_one_line(raised: str, said: str) -> None:
    code = f"from hpczero import errors\ndef main():\n    raise {raised}\nerrors.run(main)"
    command = program(code)
    assert command.returncode == 1
    assert said in command.stderr
    # A pipe that is not our output is an error as any other
    assert command.stderr.count("\n") == 1 or "BrokenPipe" in raised


def test_output_on_a_full_disk_is_one_line_and_exit_code_1() -> None:
    record = "import runpy; runpy.run_module('hpczero.doctor.record', run_name='__main__')"
    with open("/dev/full", "w") as full:
        command = program(record, stdout=full)
    assert command.returncode == 1
    assert "No space left on device" in command.stderr
    assert command.stderr.count("\n") == 1


def test_log_on_a_full_disk_does_not_end_a_run() -> None:
    code = "from hpczero.job import log\nlog.configure(rank=0, node_index=0, level='info')\n"
    code += "for n in range(5000): log.info('line %d of a log that nobody will read', n)\n"
    code += "import os, sys; os.write(2, b'alive'); os._exit(0)"
    with open("/dev/full", "w") as full:
        command = program(code, stdout=full)
    assert (command.returncode, command.stderr) == (0, "alive")


AGREED = """
import sys
from hpczero.errors import ConfigError, run

def main():
    from mpi4py import MPI
    rank = MPI.COMM_WORLD.rank
    how = sys.argv[1]
    if how == "one is elsewhere" and rank == 1:
        MPI.COMM_WORLD.Split(0).Barrier()  # which nobody else comes to
    error = ValueError("its own") if how == "one has another" and rank == 1 else ConfigError("told")
    error.agreed = True
    raise error

run(main)
"""


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("all", ["[rank 0] ConfigError: told (told once; 3 of 3 ranks ended with it)"]),
        (
            "one has another",
            [
                "[rank 0] ConfigError: told (told once; 2 of 3 ranks ended with it)",
                "[rank 1] ValueError: its own",
            ],
        ),
    ],
)
def test_error_of_all_ranks_is_told_once_and_another_beside_it(how: str, told: list[str]) -> None:
    done = run_ranks(3, ["-c", AGREED, how], timeout=60)
    said = [line for line in done.stderr.splitlines() if "told" in line or "its own" in line]
    assert sorted(line for line in said if "Error: " in line) == told, done
    assert done.returncode in (1, 78), done


def test_a_mistake_in_the_options_is_told_by_rank_0_alone() -> None:
    done = run_ranks(3, ["-m", "hpczero.train", "--no.such", "1"], timeout=60).ended(78)
    told = [line for line in done.stderr.splitlines() if "ConfigError" in line]
    assert [line.partition(" ConfigError")[0] for line in told] == ["[rank 0]"], done


def test_ranks_that_wait_in_vain_for_another_speak_for_themselves() -> None:
    soon = "from hpczero import errors; errors.TOLD_S = 1.0; run(main)"
    program = AGREED.replace("run(main)", soon)
    done = run_ranks(3, ["-c", program, "one is elsewhere"], timeout=60).ended(78)
    assert "ConfigError: told" in done.stderr, done


UNSPEAKABLE = """
import sys
import hpczero

class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("has no words")

def fail(kind, error, trace):
    raise RuntimeError("a hook of the program's own")

how = sys.argv[1]
if how == "hook":
    sys.excepthook = fail
topology = hpczero.Topology.of_world()
hpczero.errors.explain_exhaustion("as zeroify says")
if how == "hook in place of ours":
    sys.excepthook = lambda kind, error, trace: print("told by a library:", error, file=sys.stderr)
if how == "inside agreed":
    with topology.agreed("read"):
        if topology.rank == 1:
            raise Unspeakable
elif topology.rank == 1:
    raise Unspeakable if how == "words" else ValueError("its own")
topology.barrier()
"""


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("words", "Unspeakable: <exception str() failed>"),
        ("hook", "a hook of the program's own"),
        ("hook in place of ours", "told by a library: its own"),
        ("inside agreed", "could not read: Unspeakable: <exception str() failed>"),
    ],
)
def test_error_that_cannot_be_told_ends_the_job_too(how: str, said: str) -> None:
    done = run_ranks(2, ["-c", UNSPEAKABLE, how], timeout=100, env={"HPCZERO_TIMEOUT": "60"})
    done.ended(1)  # 86 where rank 0 has waited for rank 1
    assert said in done.stderr, done
    assert "has no words" not in done.stderr, done
