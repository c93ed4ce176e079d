"""Commands that pages show: found in their text, and made ready to be typed in a copy of the tree.

Owns: what on a page is a command, and the copy. Must not know: which command may be shortened, and why.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from docs.rooms import without_map
from tests.helpers.forkserver import server as forkserver
from tests.helpers.mpirun import ROOT, Finished, run_command

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
AFTER_PROMPT = re.compile(r"^    \$ (.*)$", re.MULTILINE)
SPAN = re.compile(r"`([^`\n]+)`")
PROGRAM = r"make|mpirun|srun|sbatch|scancel|scontrol|touch|pip|(?:\.venv/bin/)?python|hpczero-\w+|[\w./]*\w\.sh"
# A command in running text has variables before it or something behind it. A lone `make` or `lib.sh` is a
# name, and `srun --mpi=...` the form of an option.
TYPED = re.compile(rf"(?:[A-Z][A-Z0-9_]*=(?:\"[^\"]*\"|\S+) )*(?:{PROGRAM}) \S(?!.*=\.\.\.$)")
SCRIPT_MARK = "#SBATCH"  # a block with such a line is a job script, not lines to type
PATIENCE = (
    "OMPI_MCA_odls_base_sigkill_timeout"  # with it a job that is refused ends two minutes later
)
VARIABLE = re.compile(r"\b((?:OMPI|PRTE)_[A-Za-z_]+)=([^\s`,;]+)")


@dataclass(frozen=True)
class Shown:
    """One command as a page shows it, without its comment."""

    page: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"


def blocks(page: Path, language: str) -> list[str]:
    """Fenced blocks of one language."""
    return [text for found, text in BLOCK.findall(page.read_text()) if found == language]


def commands_of(page: Path) -> list[Shown]:
    """Every command of a page once: lines of bash blocks, indented lines after ``$``, and commands in running text."""
    name = os.fspath(page.relative_to(ROOT))
    found: dict[str, None] = {}
    for block in blocks(page, "bash"):
        if SCRIPT_MARK not in block:
            lines = block.replace("\\\n", " ").splitlines()
            found.update({bare: None for line in lines if (bare := without_comment(line))})
    prose = BLOCK.sub("", without_map(page.read_text()))
    found.update(dict.fromkeys(AFTER_PROMPT.findall(prose)))
    found.update({span: None for span in SPAN.findall(prose) if TYPED.match(span)})
    return [Shown(name, text) for text in found]


def scripts_of(page: Path) -> list[str]:
    """Blocks that are whole job scripts."""
    return [block for block in blocks(page, "bash") if SCRIPT_MARK in block]


def without_comment(line: str) -> str:
    """A line of bash up to a ``#`` that begins a word."""
    return re.sub(r"(?:^|\s)#.*$", "", line).strip()


def named_variables(page: Path) -> dict[str, str]:
    """Open MPI's variables that a page gives values, without ``PATIENCE``: what it says root and full machines want."""
    found = dict(VARIABLE.findall(page.read_text()))
    return {name: value for name, value in found.items() if name != PATIENCE}


SETUP = "install/setup.sh"


class Tree:
    """A copy of the project's files, in which commands are typed; its `.venv` is the one that the tests run in.

    Nothing that is typed may change that environment: set-up in the copy does nothing, and pip installs into a folder
    of the copy. Without both a page with a new ``make`` target would point the tests' own hpczero at the copy.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for path in self._listed():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # of a test beside this one, and gone by now
                shutil.copy2(ROOT / path, target)
        self._make_environment(folder / ".venv")
        (folder / SETUP).write_text("#!/bin/sh\necho setup: nothing to do\n")

    @staticmethod
    def _make_environment(folder: Path) -> None:
        """What the tests run in, with a ``python`` that starts its programs from the tests' fork server."""
        (folder / "bin").mkdir(parents=True)
        for own in (Path(sys.prefix), Path(sys.prefix) / "bin"):
            for path in own.iterdir():
                if path.name not in ("bin", "python"):
                    (folder / path.relative_to(sys.prefix)).symlink_to(path)
        forkserver.write_python(folder / "bin" / "python")

    def type(self, line: str, *, env: dict[str, str], limit_s: float) -> Finished:
        """What bash makes of ``line`` here, with ``.venv`` activated."""
        path = f"{self.folder / '.venv' / 'bin'}:{os.environ.get('PATH', '')}"
        own = {
            "PYTHONPATH": os.fspath(self.folder),
            "PATH": path,
            "XDG_CACHE_HOME": f"{self.folder}/cache",
            "PIP_TARGET": f"{self.folder}/installed",
        }
        return run_command(["bash", "-c", line], limit_s, {**env, **own}, self.folder)

    @staticmethod
    def _listed() -> list[str]:
        """The project's files: what git has, or will have."""
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
