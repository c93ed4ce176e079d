"""``--help`` of every command is there at once: nothing is imported for it that takes long.

What is counted is modules, not seconds: those depend on the machine.
"""

from __future__ import annotations

import json
import re
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.mpirun import ROOT, run_command

# Each takes a tenth of a second to seconds, and more on a file system that many nodes read from.
HEAVY = {
    "cupy",
    "h5py",
    "matplotlib",
    "mpi4py.MPI",
    "pandas",
    "rich.console",
    "safetensors",
    "scipy",
    "tensorboard",
    "tokenizers",
    "torch",
    "transformers",
}
# Started by commands, not by people.
NO_COMMANDS = {
    "hpczero.comm.trial",
    "scaling.gpu.checks",
    "scaling.gpu.contact",
    "scaling.contenders.rank",
    "scaling.checkpoint.ways",
}
WITH_SUBCOMMANDS = ("hpczero.checkpoint", "hpczero.data")

HELP = """
import atexit, json, runpy, sys
heavy, module, *words = json.loads(sys.argv[1])
atexit.register(lambda: print(json.dumps(sorted(set(heavy) & set(sys.modules)))))
sys.argv = [module, *words, "--help"]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def commands() -> list[str]:
    """Modules of hpczero and scaling that are started by name."""
    found = set()
    for path in [*(ROOT / "hpczero").rglob("*.py"), *(ROOT / "scaling").rglob("*.py")]:
        if '__name__ == "__main__"' in path.read_text(encoding="utf-8"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found.add(".".join(parts[:-1] if parts[-1] == "__main__" else parts))
    return sorted(found - NO_COMMANDS)


@cache
def help_of(*words: str) -> tuple[str, list[str]]:
    """What ``--help`` after these words writes, and which heavy modules are loaded by then."""
    given = json.dumps([sorted(HEAVY), *words])
    command = [sys.executable, "-c", HELP, given]
    done = run_command(
        command, 60, cwd=Path.cwd(), fresh=True
    ).ended()  # imports are what is looked at
    text, _, loaded = done.stdout.rstrip().rpartition("\n")
    return text, json.loads(loaded)


def subcommands(module: str) -> list[str]:
    found = re.search(r"usage: .*\{([\w,-]+)\}", help_of(module)[0])
    assert found, help_of(module)[0]
    return found[1].split(",")


def test_commands_are_found() -> None:
    assert {"hpczero.train", "hpczero.checkpoint", "scaling.report"} <= set(commands())


@pytest.mark.parametrize("module", commands())
def test_help_imports_nothing_heavy(module: str) -> None:
    text, loaded = help_of(module)
    assert "usage: " in text
    assert loaded == []


@pytest.mark.parametrize("module", WITH_SUBCOMMANDS)
def test_help_of_subcommands_imports_nothing_heavy(module: str) -> None:
    names = subcommands(module)
    assert len(names) >= 3
    loaded = {name: help_of(module, name)[1] for name in names}
    assert loaded == {name: [] for name in names}


def test_probe_sees_what_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "drawing.py").write_text("import matplotlib\n")
    monkeypatch.chdir(tmp_path)
    assert help_of("drawing")[1] == ["matplotlib"]
