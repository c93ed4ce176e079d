"""A file or folder appears whole or not at all, under its name alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpczero.files.durable import Hidden, is_free


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


@pytest.mark.parametrize("empty", [False, True])
def test_a_folder_appears_at_commit_also_over_an_empty_one(tmp_path: Path, empty: bool) -> None:
    target = tmp_path / "deep" / "model"
    if empty:
        target.mkdir(parents=True)
    with Hidden(target) as hidden:
        hidden.path.mkdir()
        (hidden.path / "inner").mkdir()
        (hidden.path / "weights").write_text("1")
        assert not target.exists() or not names(target)
        hidden.commit()
    assert names(target.parent) == ["model"]
    assert names(target) == ["inner", "weights"]


def test_a_file_replaces_another(tmp_path: Path) -> None:
    target = tmp_path / "model.pt"
    target.write_text("old")
    with Hidden(target) as hidden:
        hidden.path.write_text("new")
        hidden.commit()
    assert names(tmp_path) == ["model.pt"]
    assert target.read_text() == "new"


@pytest.mark.parametrize("folder", [False, True])
def test_nothing_stays_without_commit_or_after_an_error(tmp_path: Path, folder: bool) -> None:
    def make(path: Path) -> None:
        if folder:
            path.mkdir()
            (path / "weights").write_text("1")
        else:
            path.write_text("1")

    with Hidden(tmp_path / "model") as hidden:
        make(hidden.path)

    def fail() -> None:
        with Hidden(tmp_path / "model") as hidden:
            make(hidden.path)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    with Hidden(tmp_path / "model"):
        pass  # never made
    assert names(tmp_path) == []


def test_a_folder_with_something_in_it_is_not_replaced(tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    assert is_free(target)
    (target / "mine").write_text("kept")
    assert not is_free(target)
    with Hidden(target) as hidden:
        hidden.path.mkdir()
        with pytest.raises(OSError, match="not empty"):
            hidden.commit()
    assert names(tmp_path) == ["model"]
    assert (target / "mine").read_text() == "kept"
