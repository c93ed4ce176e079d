"""The command for checkpoints on disk: ``python -m hpczero.checkpoint ls|verify|export|import PATH``.

Owns: the command line and what it prints. Must not know: how anything is done. One process; no MPI is started.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from hpczero.checkpoint.folder import Folder, read_manifest
from hpczero.checkpoint.format import MANIFEST_FILE, STATE_FILE
from hpczero.checkpoint.verify import Verdict, verify
from hpczero.errors import CheckpointError, ConfigError, run


@dataclass(frozen=True)
class Ls:
    """List the checkpoints in a folder, newest first.

    Attributes:
        path: folder of checkpoints, or one of them.
    """

    path: tyro.conf.Positional[Path]


@dataclass(frozen=True)
class Verify:
    """Read checkpoints and say whether every byte is what was written.

    Exits with 0: all are sound; 2: corrupt; 3: incomplete; 4: written by a later version.

    Attributes:
        path: one checkpoint, or a folder of them: then all.
        quick: look at manifest, size and headers only.
    """

    path: tyro.conf.Positional[Path]
    quick: tyro.conf.UseCounterAction[int] = 0


Command = (
    Annotated[Ls, tyro.conf.subcommand("ls")] | Annotated[Verify, tyro.conf.subcommand("verify")]
)


def main() -> int:
    """Do what the command line says."""
    command = tyro.cli(Command, prog="python -m hpczero.checkpoint", description=__doc__)
    if isinstance(command, Ls):
        return _ls(command)
    return _verify(command)


def _checkpoints(path: Path) -> list[Path]:
    if (path / MANIFEST_FILE).exists() or (path / STATE_FILE).exists():
        return [path]
    found = Folder(path).candidates()
    if not found:
        raise ConfigError(
            f"{path}: no checkpoint there; give a folder that holds step-..., or one of those"
        )
    return found


def _ls(command: Ls) -> int:
    lines = [f"{'step':>12} {'MiB':>10} {'parameters':>14} {'ranks':>6}  {'saved (UTC)':<20} path"]
    for path in _checkpoints(command.path):
        try:
            m = read_manifest(path)
        except CheckpointError as error:
            lines.append(
                f"{'-':>12} {'-':>10} {'-':>14} {'-':>6}  {type(error).__name__:<20} {path}"
            )
            continue
        lines.append(
            f"{m.step:>12,} {m.file_nbytes / 2**20:>10,.1f} {m.table.numel:>14,} {m.world_size:>6}  "
            f"{m.created[:19]:<20} {path}"
        )
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _verify(command: Verify) -> int:
    worst = Verdict.SOUND
    for path in _checkpoints(command.path):
        report = verify(path, deep=not command.quick)
        worst = max(worst, report.verdict)
        for problem in report.problems:
            sys.stdout.write(f"{problem}\n")
        sys.stdout.write(
            f"{path}: {report.verdict.name.lower()}, {report.read_nbytes:,} bytes read\n"
        )
    return int(worst)


if __name__ == "__main__":
    run(main)
