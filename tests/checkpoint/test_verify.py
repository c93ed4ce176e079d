"""``python -m hpczero.checkpoint verify`` and ``ls``: what they find, say and exit with."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hpczero.checkpoint import __main__ as module
from hpczero.checkpoint.__main__ import Verdict, verify
from hpczero.checkpoint.disk.folder import Folder, read_manifest
from hpczero.checkpoint.disk.format import MANIFEST_FILE, STATE_FILE
from hpczero.errors import ConfigError, HpcZeroError
from tests.checkpoint.damage import DAMAGES, datasets, flip, flip_in, golden_copy, later_version
from tests.checkpoint.programs import command

Command = Callable[..., tuple[int, str]]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs the command in this process; gives its exit code and output."""

    def run(*args: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["checkpoint", *map(str, args)])
        code = module.main()
        return code, capsys.readouterr().out

    return run


def test_the_command_exits_with_the_verdict_and_starts_neither_mpi_nor_torch(
    tmp_path: Path,
) -> None:
    path = golden_copy(tmp_path)
    for code in (Verdict.SOUND, Verdict.CORRUPT):
        done, imported = command("verify", tmp_path)
        assert done.returncode == code
        assert done.stdout.endswith("bytes read\n")
        assert "hpczero.checkpoint.disk.stored" in imported
        assert not {"torch", "mpi4py", "h5py"} & imported
        flip_in(path, datasets(path)[0], 0)


def test_damage_is_named_by_dataset_parameter_and_range(tmp_path: Path, said: Command) -> None:
    path = golden_copy(tmp_path)
    flip_in(path, datasets(path)[0], 17)  # scale, embed.weight (15), hidden.weight ...
    code, text = said("verify", path)
    assert code == Verdict.CORRUPT
    assert text.count("corrupt: elements") == 1  # nothing else is
    found = re.search(r"elements 0 to 32 of /state/master \(([^)]*)\) do not have", text)
    assert found, text
    table = read_manifest(path).table
    assert found[1].split(", ") == table.overlapping(0, 32)
    assert f"{path}: corrupt, {read_manifest(path).file_nbytes:,} bytes read" in text


def test_every_damaged_slab_is_listed(tmp_path: Path) -> None:
    path = golden_copy(tmp_path)
    for dataset in datasets(path):
        flip_in(path, dataset, dataset.numel - 1)
    problems = verify(path).problems
    assert len(problems) == len(datasets(path))
    for dataset, problem in zip(datasets(path), problems, strict=True):
        assert f"to {dataset.numel:,} of {dataset.name}" in problem


@pytest.mark.parametrize("damage", DAMAGES)
def test_any_harm_has_its_exit_code(tmp_path: Path, said: Command, damage: str) -> None:
    path = golden_copy(tmp_path)
    DAMAGES[damage](path)
    code, text = said("verify", tmp_path)
    incomplete = damage in ("no manifest", "no state", "nothing")
    assert code == (Verdict.INCOMPLETE if incomplete else Verdict.CORRUPT), text
    assert str(path) in text


def test_later_version_is_not_called_corrupt(tmp_path: Path, said: Command) -> None:
    path = golden_copy(tmp_path)
    later_version(path)
    code, text = said("verify", path)
    assert code == Verdict.UNSUPPORTED
    assert "upgrade hpczero" in text


def test_a_folder_is_as_bad_as_the_worst_in_it(tmp_path: Path, said: Command) -> None:
    golden_copy(tmp_path, 3)
    assert said("verify", tmp_path)[0] == Verdict.SOUND
    shortened = golden_copy(tmp_path, 4)
    DAMAGES["half"](shortened)
    DAMAGES["no manifest"](golden_copy(tmp_path, 5))
    code, text = said("verify", tmp_path)
    assert code == Verdict.INCOMPLETE
    ends = re.findall(r"step-0*(\d): (sound|corrupt|incomplete), ", text)
    assert ends == [("5", "incomplete"), ("4", "corrupt"), ("3", "sound")]


def test_quick_looks_at_size_manifest_and_headers_only(tmp_path: Path, said: Command) -> None:
    path = golden_copy(tmp_path)
    master = datasets(path)[0]
    flip_in(path, master, 3)
    assert said("verify", "--quick", path)[0] == Verdict.SOUND
    assert said("verify", path)[0] == Verdict.CORRUPT
    flip_in(path, master, 3)
    flip(path / STATE_FILE, 20, 3)  # HDF5's superblock
    code, text = said("verify", "--quick", path)
    assert code == Verdict.CORRUPT
    assert "HDF5's own part" in text
    assert "hpczero can still load the checkpoint" in text


def test_ls_shows_the_newest_first_and_what_is_broken(tmp_path: Path, said: Command) -> None:
    golden_copy(tmp_path, 3)
    DAMAGES["half"](golden_copy(tmp_path, 12))
    later_version(golden_copy(tmp_path, 7))
    code, text = said("ls", tmp_path)
    assert code == 0
    heading, *lines = text.splitlines()
    assert heading.split() == ["step", "MiB", "parameters", "ranks", "saved", "(UTC)", "path"]
    assert [line.split()[0] for line in lines] == ["-", "-", "3"]
    assert "CorruptCheckpoint" in lines[0]
    assert lines[0].endswith("step-000000012")
    assert "CheckpointMismatch" in lines[1]
    manifest = read_manifest(tmp_path / "step-000000003")
    assert lines[2].split()[1:4] == ["0.0", str(manifest.table.numel), "2"]
    assert json.loads((tmp_path / "step-000000003" / MANIFEST_FILE).read_text())["step"] == 3


@pytest.mark.parametrize("name", ["verify", "ls"])
def test_no_checkpoint_there(tmp_path: Path, said: Command, name: str) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ConfigError, match="no checkpoint there"):
            said(name, path)


@pytest.mark.parametrize(
    "words",
    [
        *(("ls", "AWAY"), ("verify", "AWAY")),
        *(("export", "AWAY", "out"), ("export", "SOUND", "AWAY")),
        *(("import", "AWAY", "out"), ("import", "WEIGHTS", "AWAY")),
    ],
    ids=" ".join,
)
def test_place_that_nobody_can_look_at_is_named(
    tmp_path: Path, said: Command, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    """As one on a file system that has gone: a link to a name that is too long for any."""
    (tmp_path / "away").symlink_to("a" * 300)
    sound, weights = golden_copy(tmp_path), tmp_path / "weights"
    said("export", sound, weights)
    places = {"AWAY": tmp_path / "away", "SOUND": sound, "WEIGHTS": weights}
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HpcZeroError, match=r"(away|aaa).*File name too long"):
        said(*(places.get(word, word) for word in words))


def test_checkpoint_that_nobody_can_look_into_is_not_taken_for_gone(tmp_path: Path) -> None:
    """A run would go on without it."""
    golden_copy(tmp_path)
    (tmp_path / "step-000000099").symlink_to("a" * 300)
    with pytest.raises(ConfigError, match=r"File name too long"):
        Folder(tmp_path).candidates()
