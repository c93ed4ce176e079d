"""Which mpirun install/launch.sh takes: that of the command's own interpreter before that of the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def program(path: Path, says: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] || echo {says} "$@"\n')
    path.chmod(0o755)
    return path


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout that was set up with an mpirun of its own, and another in PATH."""
    monkeypatch.delenv("HPCZERO_LAUNCH", raising=False)
    script = tmp_path / "checkout" / "install" / "launch.sh"
    script.parent.mkdir(parents=True)
    shutil.copy(ROOT / "install" / "launch.sh", script)
    chosen = program(tmp_path / "site" / "mpirun", "of the checkout")
    kept = tmp_path / "checkout" / ".venv" / "hpczero-mpirun"
    kept.parent.mkdir()
    kept.write_text(f"{chosen}\n")
    path = program(tmp_path / "path" / "mpirun", "of PATH").parent
    monkeypatch.setenv("PATH", f"{path}:{os.environ['PATH']}")
    return script


def said(launch: Path, command: str) -> str:
    done = subprocess.run(
        [launch, "2", command, "-c", "1"], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_the_mpirun_beside_the_interpreter_wins(launch: Path, tmp_path: Path) -> None:
    python = program(tmp_path / "other" / "bin" / "python", "never run")
    assert said(launch, str(python)) == f"of the checkout -n 2 {python} -c 1"
    program(python.parent / "mpirun", "of the interpreter")
    assert said(launch, str(python)) == f"of the interpreter -n 2 {python} -c 1"
    assert said(launch, "python") == "of the checkout -n 2 python -c 1"


def test_without_either_it_is_that_of_the_path(launch: Path, tmp_path: Path) -> None:
    (tmp_path / "checkout" / ".venv" / "hpczero-mpirun").unlink()
    assert said(launch, "hostname") == "of PATH -n 2 hostname -c 1"
