"""Counting files: lines of strace by hand, a process whose files are known, and a run of two ranks."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpczero.errors import ConfigError
from scaling.evidence.record import read_rows
from scaling.start import Calls, counted, text, traced
from tests.helpers.mpirun import ROOT, run_command
from tests.scaling.test_start import rows

HAS_STRACE = pytest.mark.skipif(shutil.which("strace") is None, reason="no strace")

LINES = """\
71 execve("/env/bin/python", ["python"], 0x7ffc /* 3 vars */) = 0
71 openat(AT_FDCWD, "/env/lib/a.py", O_RDONLY|O_CLOEXEC) = 3
71 openat(AT_FDCWD, "/env/lib/b.py", O_RDONLY|O_CLOEXEC) = -1 ENOENT (No such file or directory)
72 newfstatat(AT_FDCWD, "/env/lib/../lib/a.py", {st_mode=S_IFREG|0644, st_size=9, ...}, 0) = 0
72 newfstatat(3, "", {st_mode=S_IFREG|0644, st_size=9, ...}, AT_EMPTY_PATH) = 0
72 access("/environment/x", R_OK) = -1 EACCES (Permission denied)
72 read(3, "openat(\\"/env/c\\")", 99) = 9
71 openat(AT_FDCWD, "/usr/x", O_RDONLY <unfinished ...>
72 <... read resumed>"", 9) = -1 EINTR (Interrupted system call)
71 <... openat resumed>) = -1 ENOENT (No such file or directory)
72 +++ exited with 0 +++
"""


def test_lines_are_counted_by_what_they_name() -> None:
    calls = Calls()
    for line in LINES.splitlines():
        calls.note(line, ["/env/"])
    assert (calls.opened, calls.looked, calls.missed) == (3, 3, 3)
    assert calls.shared == 4
    assert calls.shared_names == {"/env/bin/python", "/env/lib/a.py", "/env/lib/b.py"}


@HAS_STRACE
def test_files_of_a_process_and_its_child_are_those_that_it_opens(tmp_path: Path) -> None:
    here = tmp_path / "shared"
    here.mkdir()
    for name in ("a", "b", "c"):
        (here / name).write_text(name)
    program = (
        f"cat {here}/a {here}/b {here}/a >/dev/null; (cat {here}/c; cat {here}/gone) >/dev/null"
    )
    line = [*traced(tmp_path / "log"), "bash", "-c", f"{program} 2>/dev/null; true"]
    subprocess.run(line, check=True)
    (calls,) = counted(tmp_path.glob("log.*"), [here])
    assert calls.shared == 5
    assert {Path(name).name for name in calls.shared_names} == {"a", "b", "c", "gone"}
    assert calls.opened > 5  # of the C library


def test_no_strace_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="--cases files: no strace on this host; install it"):
        traced(tmp_path / "log")


def test_report_gives_the_least_and_the_most_of_all_ranks_of_each_checkout() -> None:
    head = rows()[:1]
    counts = {"opened": 1000, "looked": 20, "missed": 3, "shared": 4, "shared_names": 5}
    found = [
        {"kind": "files", "tree": tree, "ranks": 2, **counts, "opened": opened}
        for tree, opened in (("this", 1000), ("this", 1007), ("against", 2000))
    ]
    said = text([*head, *found]).splitlines()
    assert "| 2     | abc       | 1,000 to 1,007 |" in said[-2] or "1,000 to 1,007" in said[-2]
    assert "elsewhere" in said[-1]
    assert "2,000" in said[-1]


@pytest.mark.tool
@HAS_STRACE
@pytest.mark.limit(300)
def test_a_run_of_two_ranks_is_counted_rank_by_rank(tmp_path: Path) -> None:
    words = ["--cases", "files", "--ranks", "2", "--results", str(tmp_path)]
    line = [sys.executable, "-m", "scaling.start", *words]
    done = run_command(line, 280, cwd=ROOT, fresh=True)  # its ranks have loaded nothing yet
    assert done.returncode == 0, done
    (file,) = tmp_path.rglob("*.jsonl")
    found = read_rows(file)
    ranks = [row for row in found if row["kind"] == "files"]
    assert len(ranks) == 2
    for row in ranks:
        assert row["shared"] < row["opened"] + row["looked"]
        assert 1000 < row["shared_names"] < row["shared"]  # torch alone has more modules
    assert "Files that one rank of hpczero.train opens" in done.stdout
