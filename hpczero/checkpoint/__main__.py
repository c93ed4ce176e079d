"""The command for checkpoints on disk: ``python -m hpczero.checkpoint ls|verify|export|import PATH``.

Owns: the command line and what it prints. Must not know: how anything is done. It is one process and starts no MPI.
``hpczero.checkpoint.import_weights`` puts weights into a model that trains already, without a checkpoint.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, cast

import tyro

from hpczero.checkpoint.disk.folder import Folder, read_manifest
from hpczero.checkpoint.disk.lines import asides
from hpczero.checkpoint.foreign.exporting import Form, export
from hpczero.checkpoint.foreign.train_command import how_to_train
from hpczero.checkpoint.places import checkpoints_at, folder_at
from hpczero.checkpoint.verify import Verdict, verify
from hpczero.errors import CheckpointError, ConfigError, run
from hpczero.files.regular import shown
from hpczero.options.reading import parse_command_line

DESCRIPTION = "List, verify, export and import checkpoints. One process; no MPI is started."


@dataclass(frozen=True)
class Ls:
    """List the checkpoints in a folder, newest first, and below them those that were set aside.

    Attributes:
        path: folder of a run, folder of checkpoints, or one of them.
    """

    path: tyro.conf.Positional[Path]


@dataclass(frozen=True)
class Verify:
    """Read checkpoints and say whether every byte is what was written.

    Exits with 0: all are sound; 2: corrupt; 3: incomplete; 4: written by a later version.

    Attributes:
        path: one checkpoint, or a folder of them or of a run: then all.
        quick: look at manifest, size and headers only.
    """

    path: tyro.conf.Positional[Path]
    quick: tyro.conf.UseCounterAction[int] = 0


@dataclass(frozen=True)
class Export:
    """Write the weights of a checkpoint for other programs.

    Attributes:
        checkpoint: one checkpoint, or a folder of them or of a run: then the newest sound one.
        out: folder of safetensors files, or torch file, that is made; it must not be there yet.
    """

    checkpoint: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="CHECKPOINT")]]
    out: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="OUT")]]
    form: Annotated[Form, tyro.conf.arg(name="")] = Form()  # noqa: RUF009  (frozen)


@dataclass(frozen=True)
class Import:
    """Make a checkpoint, without an optimizer, of weights that another program wrote.

    Attributes:
        weights: safetensors file, file of torch.save, index of several, or a folder that holds one of these.
        out: folder of a run or folder of checkpoints that holds none yet, or in it step-... of the step.
        layout: names and shapes: those of the model, or Hugging Face's GPT-2 for hpczero.models.GPT; None: those of the
            model, and names of GPT-2 are refused.
        step: optimizer steps done; 0 where the name of out says it.
        tied: further names of tied parameters, each as FURTHER=NAME, where the weights do not tell.
        buffers: patterns of names of buffers, as '*.running_mean', where the weights do not tell.
    """

    weights: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="WEIGHTS")]]
    out: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="OUT")]]
    layout: Literal["hpczero", "gpt2"] | None = None
    step: int = 0
    tied: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()


Command = (
    Annotated[Ls, tyro.conf.subcommand("ls")]
    | Annotated[Verify, tyro.conf.subcommand("verify")]
    | Annotated[Export, tyro.conf.subcommand("export")]
    | Annotated[Import, tyro.conf.subcommand("import")]
)


def main() -> int:
    """Do what the command line says."""
    command = parse_command_line(
        cast("type[Ls | Verify | Export | Import]", Command),
        sys.argv[1:],
        prog="python -m hpczero.checkpoint",
        description=DESCRIPTION,
    )
    if isinstance(command, Ls):
        return _ls(command)
    if isinstance(command, Verify):
        return _verify(command)
    return _export(command) if isinstance(command, Export) else _import(command)


def _ls(command: Ls) -> int:
    lines = [f"{'step':>12} {'MiB':>10} {'parameters':>14} {'ranks':>6}  {'saved (UTC)':<20} path"]
    aside = asides(folder_at(command.path))
    try:
        found = checkpoints_at(command.path)
    except ConfigError:
        if not aside:
            raise
        found = []
    lines += map(_row, found)
    for place in aside:
        lines.append(f"{'set aside':>12}: what a run did not go on from; it counts no more")
        lines += map(_row, Folder(place).candidates())
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _row(path: Path) -> str:
    try:
        m = read_manifest(path)
    except CheckpointError as error:
        return f"{'-':>12} {'-':>10} {'-':>14} {'-':>6}  {type(error).__name__:<20} {path}"
    return (
        f"{m.step:>12,} {m.file_nbytes / 2**20:>10,.1f} {m.table.numel:>14,} {m.world_size:>6}  "
        f"{m.created[:19]:<20} {path}"
    )


def _verify(command: Verify) -> int:
    worst = Verdict.SOUND
    for path in checkpoints_at(command.path):
        report = verify(path, deep=not command.quick)
        worst = max(worst, report.verdict)
        for problem in report.problems:
            sys.stdout.write(f"{problem}\n")
        sys.stdout.write(
            f"{path}: {report.verdict.name.lower()}, {report.read_nbytes:,} bytes read\n"
        )
    return int(worst)


def _export(command: Export) -> int:
    found = export(command.checkpoint, command.out, command.form)
    sys.stdout.write(
        f"{command.out}: {found.num_tensors:,} tensors, {found.nbytes:,} bytes, of step {found.step:,} in "
        f"{found.checkpoint}\n"
    )
    return 0


def _import(command: Import) -> int:
    tied = dict(entry.partition("=")[::2] for entry in command.tied)
    if not all(tied.values()):
        raise ConfigError(
            f"tied: got {shown(' '.join(command.tied))}, expected FURTHER=NAME for each"
        )
    # Not at the top: torch and HDF5 are of no use to the other commands.
    from hpczero.checkpoint.foreign.converting import convert

    path = convert(
        command.weights,
        command.out,
        layout=command.layout,
        step=command.step,
        tied=tied,
        buffers=command.buffers,
    )
    sys.stdout.write(f"{path}: imported from {command.weights}\n{how_to_train(path)}\n")
    return 0


if __name__ == "__main__":
    run(main)
