"""The wheel: what is in it, and that measurements and commands work where there is no checkout."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.helpers.mpirun import ROOT, run_command
from tests.helpers.transcripts import Tree

SHARE = "share/hpczero"
RECORD = ROOT / "scaling" / "results" / "amd-epyc-2-cores" / "predict-host.jsonl"

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


def test_wheel_holds_package_measurements_machines_and_scripts(wheel: zipfile.Path) -> None:
    names = set(wheel.root.namelist())
    data = f"{next(n for n in names if '.dist-info/' in n).partition('.dist-info')[0]}.data/data"
    in_tree = {
        os.fspath(path.relative_to(ROOT))
        for folder in ("hpczero", "scaling")
        for pattern in ("*.py", "machines/*.toml")
        for path in (ROOT / folder).rglob(pattern)
    }
    assert any(name.endswith(".toml") for name in in_tree)
    assert in_tree | {"hpczero/py.typed"} <= names
    scripts = {
        os.fspath(path.relative_to(ROOT))
        for path in [*(ROOT / "slurm").rglob("*.sh"), ROOT / "install" / "launch.sh"]
    }
    assert {f"{data}/{SHARE}/{name}" for name in scripts} <= names
    for name in scripts - {"slurm/lib.sh", "slurm/local_env.sh"}:
        info = wheel.root.getinfo(f"{data}/{SHARE}/{name}")
        mode = (ROOT / name).stat().st_mode
        assert bool(info.external_attr >> 16 & stat.S_IXUSR) == bool(mode & stat.S_IXUSR), name
    assert {name.split("/")[0] for name in names if ".d" not in name} == {"hpczero", "scaling"}


def test_installed_commands_and_studies_write_where_the_user_is(site: Path, tmp_path: Path) -> None:
    shutil.copy(RECORD, tmp_path)
    before = sorted(site.rglob("*.jsonl"))

    def typed(*words: str | Path) -> str:
        done = run_command([*words], 100, {"PYTHONPATH": os.fspath(site)}, tmp_path).ended()
        return done.stdout

    sizes = ("--model", "gpt2", "--ranks", "8", "--memory", "8GB")
    plan = typed(site / "bin" / "hpczero-plan", *sizes)
    assert "parameters" in plan
    assert "predicted" in typed(sys.executable, "-m", "scaling.report", RECORD.name)
    assert (tmp_path / RECORD.name).with_suffix(".png").is_file()
    assert "MFU" in typed(sys.executable, "-m", "scaling.predict", "--machine", "dgx-h100")
    measured = ("-m", "scaling.gpu", "--twin", "--checks", "kernels", "--results", "here")
    typed(sys.executable, *measured)
    assert len(list(tmp_path.glob("here/*/gpu-twin-all.jsonl"))) == 1
    assert sorted(site.rglob("*.jsonl")) == before


def test_installed_code_has_no_commit_of_a_repository_around_it(site: Path, tmp_path: Path) -> None:
    code = (
        "import scaling.evidence.record, hpczero.doctor.record as doctor\n"
        "print(scaling.evidence.record.__file__, scaling.evidence.record.commit(), repr(doctor.commit()))"
    )
    env = {"PYTHONPATH": os.fspath(site)}
    said = run_command([sys.executable, "-c", code], 60, env, tmp_path)
    assert said.stdout.split() == [f"{site}/scaling/evidence/record.py", "unknown", "''"], said
