"""The wheel: what is in it, and that commands and job scripts work where there is no checkout."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.helpers.mpirun import ROOT, run_command
from tests.helpers.transcripts import Tree

SHARE = "share/hpczero"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.Path:
    """Built from a copy of the tree, by the setuptools that is there: no network."""
    tree = Tree(tmp_path_factory.mktemp("tree"))
    build = (
        "python -m pip wheel --quiet --no-index --no-build-isolation --no-deps --wheel-dir wheels ."
    )
    tree.type(build, env={}, limit_s=100).ended()
    (path,) = (tree.folder / "wheels").iterdir()
    return zipfile.Path(path)


@pytest.fixture(scope="module")
def site(wheel: zipfile.Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What pip makes of it, in a folder that lies in somebody else's repository."""
    home = tmp_path_factory.mktemp("home")
    archive = wheel.root.filename
    assert archive is not None
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    run_command([*install, "--target", home / "site", archive], timeout=100).ended()
    somebody = "-c user.name=a -c user.email=a@b"
    for words in ("init --quiet", f"{somebody} commit --quiet --allow-empty -m another's"):
        subprocess.run(["git", *words.split()], cwd=home, check=True)
    return home / "site"


def test_wheel_holds_the_package_its_machines_and_the_job_scripts(wheel: zipfile.Path) -> None:
    names = set(wheel.root.namelist())
    data = f"{next(n for n in names if '.dist-info/' in n).partition('.dist-info')[0]}.data/data"
    in_tree = {
        os.fspath(path.relative_to(ROOT))
        for pattern in ("*.py", "machines/*.toml")
        for path in (ROOT / "hpczero").rglob(pattern)
    }
    assert any(name.endswith(".toml") for name in in_tree)
    assert in_tree | {"hpczero/py.typed"} <= names
    scripts = {os.fspath(path.relative_to(ROOT)) for path in (ROOT / "slurm").rglob("*.sh")}
    assert {f"{data}/{SHARE}/{name}" for name in scripts} <= names
    for name in scripts - {"slurm/lib.sh", "slurm/local_env.sh"}:
        info = wheel.root.getinfo(f"{data}/{SHARE}/{name}")
        mode = (ROOT / name).stat().st_mode
        assert bool(info.external_attr >> 16 & stat.S_IXUSR) == bool(mode & stat.S_IXUSR), name
    assert {name.split("/")[0] for name in names if ".d" not in name} == {"hpczero"}


def test_installed_commands_need_no_checkout(site: Path, tmp_path: Path) -> None:
    env = {"PYTHONPATH": os.fspath(site)}
    sizes = ["--model", "gpt2", "--ranks", "8", "--memory", "8GB"]
    plan = run_command([site / "bin" / "hpczero-plan", *sizes], 100, env, tmp_path).ended()
    assert "parameters" in plan.stdout
    # Else git would answer for whatever repository lies around the environment.
    code = "import hpczero.doctor.record as r; print(r.__file__, repr(r.commit()))"
    said = run_command([sys.executable, "-c", code], 60, env, tmp_path)
    assert said.stdout.split() == [f"{site}/hpczero/doctor/record.py", "''"], said


def test_installed_study_says_that_it_needs_the_checkout(site: Path, tmp_path: Path) -> None:
    """The scripts of a study start ``scaling``, which no wheel has."""
    study = site / SHARE / "slurm" / "weak_scaling.sh"
    env = {"PYTHON": sys.executable, "DRY_RUN": "1"}
    refused = run_command([study], 60, env, tmp_path).ended(78)
    assert "has no folder scaling" in refused.stderr
    assert "CHECKOUT=/path/to/checkout" in refused.stderr
    known = run_command([study], 60, {**env, "CHECKOUT": os.fspath(ROOT)}, tmp_path).ended()
    assert "-m scaling.sweep weak --by sbatch" in known.stdout
