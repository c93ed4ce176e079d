"""The first seconds beside another checkout, and files that are looked for: rows and lines by hand, real jobs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from hpczero.errors import ConfigError
from scaling.evidence.record import Row
from scaling.start import HELP, OTHER, THIS, Calls, counted, text, traced
from tests.commands.test_help import WITH_SUBCOMMANDS, commands, subcommands
from tests.scaling.studies import cells, head, measured

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


def rows() -> list[Row]:
    found = [head(rounds=3, against="elsewhere")]
    case = {"kind": "start", "group": "mistakes", "case": "no text", "ranks": 2, "code": 78}
    for number, slower in enumerate((1.0, 2.0, 10.0)):
        for tree, told in ((THIS, 0.5), (OTHER, 3.0)):
            times = {"told_s": told * slower, "ended_s": told * slower + 1}
            found.append({**case, **times, "tree": tree, "round": number, "errors": 1})
    return found


def test_text_compares_both_checkouts_within_rounds() -> None:
    assert cells(text(rows()), "no text: told")[1:] == [
        "2",
        "1.00 [0.50, 5.00]",
        "6.00 [3.00, 30.00]",
        "6.00 [6.00, 6.00]",
    ]


@pytest.mark.tool
def test_help_of_every_command_is_measured() -> None:
    assert sorted(HELP) == commands()
    for module in WITH_SUBCOMMANDS:
        assert list(HELP[module]) == ["", *subcommands(module)]


@pytest.mark.tool
def test_a_run_and_its_mistakes_are_timed(tmp_path: Path) -> None:
    words = "start --cases run mistakes --ranks 1 --rounds 1"
    found, said = measured(0, words, tmp_path, "start", timeout=100)
    by_case = {row["case"]: row for row in found if row["kind"] == "start"}
    ran = by_case.pop("run")
    assert 0 < ran["first_s"] < ran["header_s"] < ran["ended_s"]
    assert len(by_case) == 4
    for row in by_case.values():
        assert (row["code"], row["errors"]) == (78, 1)
        assert 0 < row["told_s"] < row["ended_s"]
    assert "| run: header" in said


# --- files


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
    # its ranks have loaded nothing yet
    found, said = measured(0, "start --cases files --ranks 2", tmp_path, "start", fresh=True)
    ranks = [row for row in found if row["kind"] == "files"]
    assert len(ranks) == 2
    for row in ranks:
        assert row["shared"] < row["opened"] + row["looked"]
        assert 1000 < row["shared_names"] < row["shared"]  # torch alone has more modules
    assert "Files that one rank of hpczero.train opens" in said
