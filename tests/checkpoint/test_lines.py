"""Setting aside: what a run does not go on from is kept and does not count; a kill leaves one of two lines, whole."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import tempfile
from pathlib import Path

import pytest

from hpczero.checkpoint.disk import lines
from hpczero.checkpoint.disk.folder import LATEST, Folder
from hpczero.checkpoint.disk.format import MANIFEST_FILE, step_folder
from hpczero.checkpoint.disk.lines import homes
from hpczero.errors import CheckpointNotWritten, ConfigError, CorruptCheckpoint
from hpczero.files.regular import read_bytes
from tests.checkpoint.folders import OLD, commit, kept, latest_is_there, old_line, there
from tests.helpers.mpirun import run_alone

UNREADABLE = pytest.raises(CorruptCheckpoint, match=r"\.setting-aside: does not say any more which")

# One process after the other, each in a folder of its own, ends before its n-th call that changes the disk, for n from
# 0 on until one comes to its end. Forked, so that Python starts once for all of them; each exit code is a line.
DIES = """
import os, signal, sys, traceback
from pathlib import Path
from hpczero.checkpoint.disk.folder import Folder
from tests.checkpoint.folders import commit, old_line

def counted(call, left):
    def run(*args, **named):
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        return call(*args, **named)
    return run

def change(folder, how, number):
    left = [number]
    for name in ("rename", "replace", "unlink", "mkdir", "rmdir"):
        setattr(Path, name, counted(getattr(Path, name), left))
    os.fsync = counted(os.fsync, left)
    newer = folder.candidates()[:2]
    if how == "at once":
        folder.set_aside(newer)
    elif how == "earlier step":
        commit(folder, 12, "new", *newer)
    else:
        commit(folder, 20, "new", *newer)

for number in range(100):
    path = Path(sys.argv[1], str(number))
    old_line(path)
    process = os.fork()
    if not process:
        try:
            change(Folder(path), sys.argv[2], number)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    print(code, flush=True)
    if code == 0:
        break
"""


@pytest.mark.limit(240)
@pytest.mark.parametrize("how", ["at once", "earlier step", "same step"])
def test_kill_at_any_moment_of_setting_aside_leaves_one_of_two_lines(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = dict.fromkeys(reversed(OLD), "old")
    new_step = {"earlier step": {12: "new"}, "same step": {20: "new"}}.get(how, {})
    second = {**new_step, 10: "old", 5: "old"}
    decided: list[bool] = []
    job = run_alone(["-c", DIES, tmp_path, how], timeout=200)
    assert job.returncode == 0, job
    codes = [int(line) for line in job.stdout.splitlines()]
    assert codes[-1] == 0, "it never came to its end"
    assert set(codes[:-1]) == {-signal.SIGKILL}, job
    for number, code in enumerate(codes):
        path = tmp_path / str(number)
        assert latest_is_there(path), number
        line = there(path)
        assert line in (first, second), (number, line)
        caplog.clear()
        Folder(path).sweep()  # the next job
        assert there(path) == line, number
        assert {**first, **line, **kept(path)}.keys() == {*first, *line}
        assert sorted([*kept(path).values(), *line.values()]).count("old") == len(OLD), number
        assert (path / LATEST).read_text() == f"{Folder(path).candidates()[0].name}\n"
        assert not [p for p in path.iterdir() if p.name.startswith((".tmp", ".setting"))]
        moved_now = code != 0 and line == second and "set aside in" in caplog.text
        decided.append(line == second)
        assert not code or line == first or moved_now or not caplog.text
    assert decided[0] is False
    assert decided[-1] is True
    assert decided == sorted(decided), "once decided, it stays so"


@pytest.mark.parametrize(
    "content", [b"{", b"\xff", b"[" * 100_000, b'{"folder": "..", "names": {}}']
)
def test_note_that_cannot_be_read_is_named_and_nothing_is_guessed(
    tmp_path: Path, content: bytes
) -> None:
    folder = old_line(tmp_path / "ckpt")
    (folder.path / lines.NOTE).write_bytes(content)
    with UNREADABLE:
        folder.candidates()
    (folder.path / lines.NOTE).unlink()
    assert list(there(folder.path)) == [30, 20, 10, 5]


def test_decision_stands_while_what_decides_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = old_line(tmp_path / "ckpt")
    saved = commit(folder, 12, "new")
    text = (saved / MANIFEST_FILE).read_text()
    place = lines.new_aside(folder.path)
    note = lines.note_text(place, folder.candidates()[:2], target=saved.name, manifest=text)
    (folder.path / lines.NOTE).write_text(note)
    assert list(there(folder.path)) == [12, 10, 5]

    def fails(path: Path, *limit: int) -> bytes:
        if path == saved / MANIFEST_FILE:
            raise OSError(5, "Input/output error", str(path))
        return read_bytes(path, *limit)

    monkeypatch.setattr(lines, "read_bytes", fails)
    with pytest.raises(ConfigError, match=r"ckpt: cannot be read \(Input/output error\)"):
        folder.candidates()
    with pytest.raises(CheckpointNotWritten, match=r"cannot be moved .*Input/output error"):
        folder.sweep()
    monkeypatch.undo()
    assert list(there(folder.path)) == [12, 10, 5]


def test_note_with_any_letter_changed_is_not_believed(tmp_path: Path) -> None:
    """Another step in it would hide a checkpoint that counts, and show one that does not."""
    path = tmp_path / "ckpt"
    folder, note = old_line(path), path / ".setting-aside"
    place = lines.new_aside(path)
    text = lines.note_text(place, folder.candidates()[:2])
    note.write_text(text)
    assert list(there(path)) == [10, 5]
    for at in range(len(text)):
        note.write_text(text[:at] + chr(ord(text[at]) ^ 1) + text[at + 1 :])
        with UNREADABLE:
            folder.candidates()


def test_results_go_aside_to_another_file_system_too(tmp_path: Path) -> None:
    """As where the folder of checkpoints is a link to a larger one."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as elsewhere:
        if os.stat(elsewhere).st_dev == os.stat(tmp_path).st_dev:
            pytest.skip("one file system")
        folder = old_line(Path(elsewhere, "ckpt"))
        moved, copied = tmp_path / "model.safetensors", tmp_path / "config.toml"
        for file in (moved, copied):
            file.write_text(file.name)
            os.utime(file, (1e9, 1e9))
        place = folder.set_aside(folder.candidates(), moved=[moved], copied=[copied])
        for file in (moved, copied):
            assert (place / file.name).read_text() == file.name
            assert (place / file.name).stat().st_mtime == 1e9
        assert not moved.exists()
        assert copied.exists()
        assert there(folder.path) == {}


def test_what_was_set_aside_is_on_the_disk_before_it_does_not_count_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, synced, fsync = old_line(tmp_path / "ckpt"), [""], os.fsync

    def fsync_and_note(descriptor: int) -> None:
        fsync(descriptor)
        name = Path(f"/proc/self/fd/{descriptor}").readlink().relative_to(tmp_path)
        synced.append(re.sub(r"aside-[^/]*", "ASIDE", re.sub(r"\.[0-9a-f]{8}$", "", str(name))))

    for name in ("config.toml", "model.safetensors"):
        (tmp_path / name).write_text("what it held")
    monkeypatch.setattr(os, "fsync", fsync_and_note)
    moved, copied = [tmp_path / "model.safetensors"], [tmp_path / "config.toml"]
    folder.set_aside(folder.candidates()[:1], moved=moved, copied=copied)
    before = synced[: synced.index("ckpt/..setting-aside")]
    assert before[-3:] == ["ckpt/ASIDE/.config.toml", "ckpt/ASIDE", "ckpt"]


def test_what_was_set_aside_is_listed_but_neither_counted_nor_deleted(tmp_path: Path) -> None:
    folder = old_line(tmp_path / "ckpt")
    place = folder.set_aside(folder.candidates()[:2])
    for step in (11, 12, 13):
        saved = commit(folder, step, "new")
        folder.retain(1, saved)
    assert there(folder.path) == {13: "new"}
    assert kept(folder.path) == {30: "old", 20: "old"}
    job = run_alone(["-m", "hpczero.checkpoint", "ls", folder.path], timeout=60)
    assert job.returncode == 0, job
    assert job.stdout.index("step-000000013") < job.stdout.index("set aside")
    assert str(place / "step-000000030") in job.stdout
    assert "step-000000010" not in job.stdout


def test_retention_never_takes_what_was_just_saved(tmp_path: Path) -> None:
    folder = old_line(tmp_path / "ckpt")
    saved = commit(folder, 7, "new")  # by whoever knows nothing of lines
    folder.retain(1, saved)
    assert sorted(there(folder.path)) == [7, 30]


# --- a name that says another step


def test_copy_under_another_steps_name_is_no_checkpoint_of_that_step_and_stays(
    tmp_path: Path,
) -> None:
    folder = Folder(tmp_path)
    for step in (5, 8):
        commit(folder, step, "line")
    copy = tmp_path / step_folder(20)
    shutil.copytree(tmp_path / step_folder(5), copy)
    assert there(tmp_path) == {8: "line", 5: "line"}
    for step in (9, 21):
        folder.retain(1, commit(folder, step, "line"))
    assert there(tmp_path) == {21: "line"}
    assert copy.is_dir(), "nobody can make it again"


# --- names that are links


def test_checkpoint_is_of_the_folder_its_name_is_in_wherever_its_data_lie(tmp_path: Path) -> None:
    own, elsewhere = tmp_path / "own", tmp_path / "elsewhere"
    commit(Folder(elsewhere), 8, "line")
    commit(Folder(own), 9, "line")
    (own / step_folder(8)).symlink_to(elsewhere / step_folder(8))
    (tmp_path / "best").symlink_to(own / step_folder(8))
    (tmp_path / "way").symlink_to(own)
    assert own in homes(own / step_folder(8))
    assert own in homes(tmp_path / "way" / step_folder(8))
    (tmp_path / "last").symlink_to(own / step_folder(9))
    assert homes(tmp_path / "last") == {own}, "a name of no step says nothing"


def test_links_that_are_set_aside_lead_where_they_led(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own, elsewhere = tmp_path / "own", tmp_path / "elsewhere"
    for step in (6, 7):
        commit(Folder(elsewhere), step, f"away {step}")
    commit(Folder(own), 5, "own")
    (own / step_folder(6)).symlink_to(f"../elsewhere/{step_folder(6)}")
    (own / step_folder(7)).symlink_to(elsewhere / step_folder(7))
    folder = Folder(own)
    with caplog.at_level(logging.WARNING):
        place = folder.set_aside(folder.candidates())
    assert there(own) == {}
    assert kept(own) == {5: "own", 6: "away 6", 7: "away 7"}
    assert (place / step_folder(6)).is_symlink()
    assert there(elsewhere) == {6: "away 6", 7: "away 7"}


def test_links_among_those_that_are_set_aside_together_still_lead_to_each_other(
    tmp_path: Path,
) -> None:
    commit(Folder(tmp_path), 5, "own")
    (tmp_path / step_folder(6)).symlink_to(step_folder(5))
    (tmp_path / step_folder(7)).symlink_to(tmp_path / step_folder(5))
    folder = Folder(tmp_path)
    place = folder.set_aside(folder.candidates())
    for step in (6, 7):
        assert (place / step_folder(step)).resolve() == (place / step_folder(5)).resolve()
        assert (place / step_folder(step)).is_dir()


def test_link_whose_move_was_killed_half_way_is_moved_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, elsewhere = tmp_path / "own", tmp_path / "elsewhere"
    own.mkdir()
    commit(Folder(elsewhere), 6, "away")
    link = own / step_folder(6)
    link.symlink_to(f"../elsewhere/{step_folder(6)}")
    real = os.unlink

    def killed(path: str | Path, **options: int | None) -> None:
        if Path(path) == link:
            raise KeyboardInterrupt
        real(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            Folder(own).set_aside([link])
    assert there(own) == {}
    Folder(own).sweep()
    assert not os.path.lexists(link)
    assert kept(own) == {6: "away"}
