"""The folder of checkpoints: what counts, what stays, what is left alone."""

from __future__ import annotations

import dataclasses
import logging
import os
from pathlib import Path

import pytest

from hpczero.checkpoint.disk.folder import Folder, in_one_unit, read_manifest
from hpczero.checkpoint.disk.format import MANIFEST_FILE, STATE_FILE, Manifest, step_folder
from hpczero.errors import CheckpointNotWritten, ConfigError, CorruptCheckpoint
from hpczero.files.durable import sync
from hpczero.options.config import RunConfig, RunOptions
from hpczero.run.results.folder import RunFolder
from tests.checkpoint.damage import put
from tests.checkpoint.folders import commit, steps
from tests.files.test_regular import at_once


def test_newest_comes_first_and_junk_does_not_count(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "ckpt")
    assert steps(folder.path) == []
    for step in (20, 3, 100):
        commit(folder, step)
    junk = {"step-xyz", "step-7", "step-0000000007", "step-000000007.bak", "notes"}
    for name in (*junk, ".tmp-step-000000200-0badcafe"):
        (folder.path / name).mkdir()
    (folder.path / "step-000000300").write_text("a file")
    (folder.path / "step-000000400").mkdir()  # no manifest
    (folder.path / "LATEST").write_text("step-000000400\n")
    assert steps(folder.path) == [100, 20, 3]
    assert not junk & {path.name for path in folder.candidates()}


@pytest.mark.parametrize("kind", ["folder", "fifo", "loop", "device"])
def test_harm_to_what_nobody_reads_costs_no_checkpoint(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder, latest = Folder(tmp_path), tmp_path / "LATEST"
    put(latest, kind)
    with at_once(), caplog.at_level(logging.WARNING):
        path = commit(folder, 7)
    assert steps(folder.path) == [7]
    assert read_manifest(path).step == 7
    if kind == "folder":  # which may be somebody's; anything else gives way
        assert f"{latest}: " in caplog.text
        assert latest.is_dir()
    else:
        assert latest.read_text() == "step-000000007\n"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["LATEST", path.name]


def test_retention_keeps_the_newest_sound_ones(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    for step in range(1, 7):
        commit(folder, step)
    (tmp_path / step_folder(6) / MANIFEST_FILE).write_text("{")  # the newest is not sound
    (tmp_path / step_folder(4) / STATE_FILE).write_bytes(b"longer than it was")
    folder.retain(2)
    assert steps(folder.path) == [5, 3]
    # newer than the newest sound one: left for whoever wants to look at it; older and not sound: gone
    assert {path.name for path in folder.candidates()} == {step_folder(s) for s in (6, 5, 3)}


def test_retention_leaves_what_it_cannot_read_now_and_what_a_later_version_wrote(
    tmp_path: Path,
) -> None:
    folder = Folder(tmp_path)
    for step in range(1, 6):
        commit(folder, step)
    away, later = (tmp_path / step_folder(step) / MANIFEST_FILE for step in (2, 3))
    text = away.read_text()
    away.unlink()
    away.symlink_to("a" * 300)  # as where a file server does not answer: it is not gone
    manifest = Manifest.from_json(later.read_text())
    later.write_text(dataclasses.replace(manifest, version=2).to_json())
    folder.retain(1)
    assert [path.name for path in folder.candidates()] == [step_folder(s) for s in (5, 3, 2)]
    away.unlink()
    away.write_text(text)
    folder.retain(1)
    assert [path.name for path in folder.candidates()] == [step_folder(s) for s in (5, 3)]


@pytest.mark.parametrize("keep", [0, 1])
def test_retention_never_takes_the_last_good_one(tmp_path: Path, keep: int) -> None:
    folder = Folder(tmp_path)
    commit(folder, 1)
    commit(folder, 2)
    (tmp_path / step_folder(2) / STATE_FILE).unlink()
    folder.retain(keep)
    assert steps(folder.path) == [1]


def test_what_is_not_ours_is_never_deleted(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    for name in ("step-7", "step-xyz", ".tmp-mine", ".trash", "data"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    for step in (1, 2, 3):
        commit(folder, step)
    folder.sweep()
    folder.retain(1)
    left = {entry.name for entry in tmp_path.iterdir()}
    assert left == {"step-7", "step-xyz", ".tmp-mine", ".trash", "data", "LATEST", step_folder(3)}


def test_unfinished_saves_go_once_they_are_old(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    commit(folder, 1)
    young, old = folder.begin(2), folder.begin(3)
    (old / STATE_FILE).write_bytes(b"x")
    for path in (old / STATE_FILE, old):
        os.utime(path, (1e9, 1e9))
    folder.retain(1)
    assert young.exists()
    assert not old.exists()
    folder.sweep()
    assert not young.exists()


def test_same_step_again_replaces_and_never_leaves_none(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    commit(folder, 5, "first")
    path = commit(folder, 5, "second time")
    assert read_manifest(path).meta["line"] == "second time"
    assert steps(folder.path) == [5]
    # a job that was killed between the two renames
    path.rename(tmp_path / ".replaced-step-000000005-0badcafe")
    assert steps(folder.path) == [5]
    commit(folder, 6)
    folder.retain(1)
    assert steps(folder.path) == [6]
    assert not list(tmp_path.glob(".replaced*"))


def test_size_of_the_file_is_checked(tmp_path: Path) -> None:
    path = commit(Folder(tmp_path), 1)
    (path / STATE_FILE).write_bytes(b"four")
    with pytest.raises(CorruptCheckpoint, match=r"state.h5 has 4 bytes, expected 3"):
        read_manifest(path)


def test_checkpoint_whose_name_may_not_be_on_the_disk_is_there_and_is_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Told as not written, the next save would take it for another line's."""
    folder, real = Folder(tmp_path), sync
    commit(folder, 1)

    def fails_for_names(path: Path) -> None:
        if path == tmp_path:
            raise OSError(5, "Input/output error")
        real(path)

    monkeypatch.setattr("hpczero.checkpoint.disk.folder.sync", fails_for_names)
    with caplog.at_level(logging.WARNING):
        path = commit(folder, 2)
    assert path == tmp_path / step_folder(2)
    assert steps(folder.path) == [2, 1]
    assert (tmp_path / "LATEST").read_text() == f"{path.name}\n"
    assert f"{path}: is there, but may be lost" in caplog.text
    # Nothing goes for its sake, until one is known to be on the disk.
    folder.retain(1, path)
    commit(folder, 2)
    folder.retain(1, path)
    assert steps(folder.path) == [2, 2, 1]
    monkeypatch.setattr("hpczero.checkpoint.disk.folder.sync", real)
    folder.retain(1, commit(folder, 3))
    assert steps(folder.path) == [3]


def test_what_kills_have_left_of_small_files_goes_once_it_is_old(tmp_path: Path) -> None:
    folder, token = Folder(tmp_path), "0123456789abcdef"
    commit(folder, 1)
    hexa = token[:8]
    left = [f".probe-{hexa}", f".aside.lock-{token}", f".LATEST.{hexa}", f"..setting-aside.{hexa}"]
    others = [f".lock-{token}", f".notes.{hexa}", ".LATEST.old", f".probe-{hexa}.txt"]
    for name in (*left, *others):
        (tmp_path / name).touch()
    folder.sweep()
    assert {*left, *others} < {entry.name for entry in tmp_path.iterdir()}, "somebody may be at it"
    for name in (*left, *others):
        os.utime(tmp_path / name, (1e9, 1e9))
    folder.sweep()
    there = {entry.name for entry in tmp_path.iterdir()}
    assert there == {*others, "LATEST", step_folder(1)}


def test_what_kills_have_left_in_a_run_folder_goes_once_it_is_old(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    old, young = tmp_path / ".config.toml.01234567", tmp_path / ".metrics.jsonl.01234567"
    for file in (old, young, run.config):
        file.touch()
    os.utime(old, (1e9, 1e9))
    run.sweep()
    assert sorted(tmp_path.iterdir()) == sorted([young, run.config])


def test_links_among_checkpoints_go_without_what_they_lead_to(tmp_path: Path) -> None:
    config = RunConfig(run=RunOptions(folder=str(tmp_path), name="r", overwrite=True))
    run = RunFolder.of(config.run)
    elsewhere = commit(Folder(tmp_path / "elsewhere"), 1)
    folder = Folder(run.checkpoints)
    commit(folder, 2)
    (run.checkpoints / step_folder(1)).symlink_to(elsewhere)
    run.create(config)
    assert run.config.exists()
    assert not list(run.checkpoints.iterdir())
    (run.checkpoints / step_folder(1)).symlink_to(elsewhere)
    folder.retain(1, commit(folder, 2))
    assert steps(folder.path) == [2]
    assert not list(run.checkpoints.glob(".trash-*"))
    assert steps(elsewhere.parent) == [1]


def test_what_the_system_says_without_a_number_is_told(tmp_path: Path) -> None:
    said = pytest.raises(ConfigError, match="as a run folder: no number;")
    with said, RunFolder(tmp_path).writing():
        raise OSError("no number")


def test_name_of_a_new_run_is_on_the_disk_when_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, fsync = set(), os.fsync

    def fsync_and_note(descriptor: int) -> None:
        synced.add(Path(f"/proc/self/fd/{descriptor}").readlink())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync_and_note)
    RunFolder(tmp_path / "runs" / "r").create(RunConfig())
    assert {tmp_path, tmp_path / "runs", tmp_path / "runs" / "r"} <= synced


@pytest.mark.parametrize("kind", ["file", "FIFO", "device"])
def test_what_is_no_folder_is_told_as_what_it_is(tmp_path: Path, kind: str) -> None:
    path = Path("/dev/null") if kind == "device" else tmp_path / "x"
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "file":
        path.touch()
    with pytest.raises(ConfigError, match=f"is a {kind}, expected a folder"):
        Folder(path).candidates()


# --- what a message says of room


@pytest.mark.parametrize(
    ("free", "needed", "said"),
    [
        (0, 5 * 2**30, ("0 MiB", "5,120")),
        (10 * 2**20 + 1, 10 * 2**20 + 5, ("10 MiB", "11")),
        (4095, 4096, ("4,095 bytes", "4,096")),
        (2**20, 2**20 + 9, ("1,024 KiB", "1,025")),
    ],
)
def test_sizes_of_a_message_differ_in_it(free: int, needed: int, said: tuple[str, str]) -> None:
    assert in_one_unit(free, needed) == said


def test_small_quota_is_told_in_numbers_that_show_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = list(os.statvfs(tmp_path))
    found[1], found[4] = 1, 90 * 2**10  # f_frsize, f_bavail
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(found))
    with pytest.raises(CheckpointNotWritten, match=r": 90 KiB are free and the checkpoint needs 1"):
        Folder(tmp_path).check_room(60 * 2**10)
    assert list(tmp_path.iterdir()) == []
