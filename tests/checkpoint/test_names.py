"""Checkpoints under names that are links, or not theirs; and sizes that a message shows."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import pytest

from hpczero.checkpoint.disk.folder import Folder, in_one_unit
from hpczero.checkpoint.disk.format import step_folder
from hpczero.checkpoint.disk.lines import homes
from hpczero.errors import CheckpointNotWritten
from tests.checkpoint.folders import commit, kept, there


@pytest.mark.parametrize(
    ("free", "needed", "said"),
    [
        (0, 5 * 2**30, ("0 MiB", "5,120")),
        (300 * 2**20, 2**60, ("300 MiB", "1,099,511,627,776")),
        (200 * 2**10, 300 * 2**10, ("200 KiB", "300")),
        (10 * 2**20 + 1, 10 * 2**20 + 5, ("10 MiB", "11")),
        (0, 700, ("0 bytes", "700")),
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
    for path in (own, elsewhere):
        path.mkdir()
    commit(Folder(elsewhere), 8, "line")
    (own / step_folder(8)).symlink_to(elsewhere / step_folder(8))
    (tmp_path / "best").symlink_to(own / step_folder(8))
    (tmp_path / "way").symlink_to(own)
    assert own in homes(own / step_folder(8))
    assert own in homes(tmp_path / "way" / step_folder(8))
    commit(Folder(own), 9, "line")
    (tmp_path / "last").symlink_to(own / step_folder(9))
    assert homes(tmp_path / "last") == {own}, "a name of no step says nothing"


def test_links_that_are_set_aside_lead_where_they_led(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own, elsewhere = tmp_path / "own", tmp_path / "elsewhere"
    own.mkdir()
    for step in (6, 7):
        elsewhere.mkdir(exist_ok=True)
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
    for path in (own, elsewhere):
        path.mkdir()
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
