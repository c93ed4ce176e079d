"""The command for checkpoints: ``python -m hpczero.checkpoint ls|verify|export|import PATH``.

One process starts no MPI. ``mpirun -n N`` before ``export`` and ``import``: all ranks read and write.
"""

from __future__ import annotations

import logging
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import tyro

from hpczero.adapters import gpt2
from hpczero.checkpoint.disk import folder
from hpczero.checkpoint.disk.format import MANIFEST_FILE, STATE_FILE, Manifest, digest
from hpczero.checkpoint.disk.lines import asides
from hpczero.checkpoint.disk.rawfile import rest_digest
from hpczero.checkpoint.disk.stored import check_content
from hpczero.checkpoint.foreign.exporting import Exported, WeightsForm, export
from hpczero.errors import CheckpointError, CheckpointMismatch, ConfigError, CorruptCheckpoint, run
from hpczero.files.direct import read_at
from hpczero.files.regular import is_there, opened, reason, shown
from hpczero.job.team import Alone, Ranks, Team
from hpczero.options.config import TrainOptions
from hpczero.options.environment import Environment
from hpczero.options.reading import parse_command_line

BYTE_VOCAB = 257  # of the text that a run takes where none is named
FFN_MULTIPLE = 4  # of all presets; it is no option

_UNTOLD = {
    "HEADS": "HEADS, its number of attention heads",
    "CONTEXT": "CONTEXT, the tokens in a sequence",
    "TOKENS.h5": "TOKENS.h5, a token file",
}


def how_to_train(path: Path) -> str:
    """A line for people: the command that begins at the imported checkpoint ``path``, or why there is none.

    The run that it begins is written to another folder.
    """
    manifest = folder.read_manifest(path)
    model = manifest.meta["extra"].get("model", {})
    fault = _fault(manifest)
    if fault:
        return (
            f"hpczero.train has no such preset: {fault}; --model.factory hpczero.hf.adapter:causal_lm trains models of "
            "Hugging Face folders, and hpczero.checkpoint.load brings it into a model of your own that has these names "
            "and shapes"
        )
    place = path.parent.parent if path.parent.name == folder.CHECKPOINTS else path.parent
    words = ["python", "-m", "hpczero.train", "--run.name", f"{place.resolve().name}-trained"]
    shapes = {row.name: row.shape for row in manifest.table.owners}
    for name, value in _sizes(shapes, model).items():
        words += [f"--model.{name}", str(value)]
    vocab_size = shapes[gpt2.TABLE][0]
    if vocab_size != BYTE_VOCAB:
        words += ["--data.path", "TOKENS.h5"]
    if manifest.step >= TrainOptions().steps:
        words += ["--train.steps", str(manifest.step + TrainOptions().steps)]
    typed = shlex.join([*words, "--resume.from", os.fspath(path)])
    untold = [text for word, text in _UNTOLD.items() if word in words]
    if not untold:
        return f"to train from it: {typed}"
    more = f" of its vocabulary of {vocab_size:,} ids" if "TOKENS.h5" in words else ""
    return f"to train from it, put in what it does not tell ({'; '.join(untold)}{more}): {typed}"


def _fault(manifest: Manifest) -> str:
    """Why hpczero.train has no such model; empty if it has one."""
    shapes = {row.name: row.shape for row in manifest.table.owners}
    rows = manifest.table.rows
    tied = {row.name: rows[row.tied_to].name for row in rows if row.tied_to is not None}
    expected = gpt2.expected_shapes(shapes)
    head = expected.pop(gpt2.HEAD)
    if "wpe.weight" not in shapes:
        del expected["wpe.weight"]
    if shapes == {**expected, gpt2.HEAD: head} and shapes[gpt2.TABLE] == head:
        return (
            f"{gpt2.HEAD} is a parameter of its own, and there it is tied to {gpt2.TABLE} (where the two are equal, "
            f"import with --tied {gpt2.HEAD}={gpt2.TABLE})"
        )
    buffers = manifest.meta["buffers"]
    sized = "blocks.0.mlp.expansion.weight" in shapes and all(map(all, shapes.values()))
    if shapes != expected or tied != {gpt2.HEAD: gpt2.TABLE} or buffers or not sized:
        return "its parameters are not those of the GPT there"
    hidden, ffn = shapes[gpt2.TABLE][1], shapes["blocks.0.mlp.expansion.weight"][0]
    if ffn != FFN_MULTIPLE * hidden:
        return f"its MLP is {ffn} wide, and there it is {FFN_MULTIPLE * hidden}"
    return ""


def _sizes(shapes: Mapping[str, tuple[int, ...]], model: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the model. Words in capitals stand for those that neither shapes nor ``model`` tell."""
    learned = shapes.get("wpe.weight")
    return {
        "layers": sum(name.endswith(".attention.qkv.weight") for name in shapes),
        "hidden": shapes[gpt2.TABLE][1],
        "heads": model.get("heads", "HEADS"),
        "context": learned[0] if learned else model.get("context", "CONTEXT"),
        "positions": "learned" if learned else "rotary",
    }


class Verdict(IntEnum):
    """What ``verify`` exits with."""

    SOUND = 0
    CORRUPT = 2
    INCOMPLETE = 3
    UNSUPPORTED = 4


@dataclass(frozen=True)
class Report:
    """Result for one checkpoint.

    Attributes:
        path: its folder.
        verdict: the result of all checks.
        problems: one line each; the first is the worst.
        manifest: None if it cannot be read.
        read_nbytes: bytes that were checked against their digests.
    """

    path: Path
    verdict: Verdict
    problems: tuple[str, ...] = ()
    manifest: Manifest | None = None
    read_nbytes: int = 0


def verify(path: Path, *, deep: bool = True) -> Report:
    """Examine the checkpoint ``path``. Not collective.

    Args:
        path: folder of one checkpoint.
        deep: whether to read every byte. Otherwise manifest, size and what HDF5 itself needs are checked.
    """
    try:
        missing = [n for n in (MANIFEST_FILE, STATE_FILE) if not is_there(path / n)]
    except OSError as error:
        return Report(path, Verdict.CORRUPT, (f"{path}: cannot be read: {reason(error)}",))
    if missing:
        return Report(path, Verdict.INCOMPLETE, (f"{path}: {' and '.join(missing)} missing",))
    try:
        manifest = folder.read_manifest(path)
        check_content(manifest, path)
    except CheckpointMismatch as error:
        return Report(path, Verdict.UNSUPPORTED, (str(error),))
    except CorruptCheckpoint as error:
        return Report(path, Verdict.CORRUPT, (str(error),))
    wrong = folder.misnamed(path, manifest)
    problems = [wrong] if wrong else []
    try:
        problems += _damaged_slabs(path, manifest) if deep else []
        if rest_digest(path / STATE_FILE, manifest.datasets) != manifest.rest:
            problems.append(
                f"{path}: corrupt: HDF5's own part of {STATE_FILE} (headers, tables, attributes) is not what was "
                "written; hpczero can still load the checkpoint, other readers may fail"
            )
    except (OSError, EOFError) as error:
        why = reason(error) if isinstance(error, OSError) else str(error)
        problems.append(f"{path}: {STATE_FILE} cannot be read: {why}")
    data = sum(dataset.nbytes for dataset in manifest.datasets)
    read = manifest.file_nbytes - (0 if deep else data)
    verdict = Verdict.CORRUPT if problems else Verdict.SOUND
    return Report(path, verdict, tuple(problems), manifest, read)


def _damaged_slabs(path: Path, manifest: Manifest) -> Iterator[str]:
    with opened(path / STATE_FILE) as descriptor:
        for dataset in manifest.datasets:
            for index, expected in enumerate(dataset.digests):
                slab = dataset.slab(index)
                offset = dataset.offset + slab.start * dataset.itemsize
                try:
                    found = digest(read_at(descriptor, offset, len(slab) * dataset.itemsize))
                except (OSError, EOFError) as error:
                    yield f"{path}: {dataset.name} cannot be read: {error}"
                    break
                if found != expected:
                    yield manifest.damage(path, dataset, slab)


@dataclass(frozen=True)
class Ls:
    """List the checkpoints in a folder, newest first, and below them those that were set aside.

    Attributes:
        path: folder of a run, folder of checkpoints, or one of them.
    """

    path: tyro.conf.Positional[Path]

    def __call__(self) -> int:
        """Print one line for each."""
        title = (
            f"{'step':>12} {'MiB':>10} {'parameters':>14} {'ranks':>6}  {'saved (UTC)':<20} path"
        )
        aside = asides(folder.folder_at(self.path))
        try:
            found = folder.checkpoints_at(self.path)
        except ConfigError:
            if not aside:
                raise
            found = []
        lines = [title, *map(_row, found)]
        for place in aside:
            lines.append(f"{'set aside':>12}: what a run did not go on from; it counts no more")
            lines += map(_row, folder.Folder(place).candidates())
        sys.stdout.write("\n".join(lines) + "\n")
        return 0


@dataclass(frozen=True)
class VerifyCheckpoint:
    """Read checkpoints and say whether every byte is what was written.

    Exits with 0: all are sound; 2: corrupt; 3: incomplete; 4: written by a later version.

    Attributes:
        path: one checkpoint, or a folder of them or of a run: then all.
        quick: look at manifest, size and headers only.
    """

    path: tyro.conf.Positional[Path]
    quick: tyro.conf.UseCounterAction[int] = 0

    def __call__(self) -> int:
        """Print what is wrong, and return the worst verdict."""
        worst = Verdict.SOUND
        for path in folder.checkpoints_at(self.path):
            report = verify(path, deep=not self.quick)
            worst = max(worst, report.verdict)
            for problem in report.problems:
                sys.stdout.write(f"{problem}\n")
            said = f"{report.verdict.name.lower()}, {report.read_nbytes:,} bytes read"
            sys.stdout.write(f"{path}: {said}\n")
        return int(worst)


@dataclass(frozen=True)
class Export:
    """Write the weights of a checkpoint for other programs. ``mpirun -n N`` before it: by N ranks.

    Attributes:
        checkpoint: one checkpoint, or a folder of them or of a run: then the newest sound one.
        out: folder of safetensors files, or torch file, that is made; it must not be there yet.
    """

    checkpoint: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="CHECKPOINT")]]
    out: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="OUT")]]
    form: Annotated[WeightsForm, tyro.conf.arg(name="")] = WeightsForm()  # noqa: RUF009  (frozen)

    def __call__(self) -> int:
        """Write them, and print what was written. Under a launcher of several ranks all of them share the work."""
        with _team() as team:
            found = export(self.checkpoint, self.out, self.form, team=team)
            return self._report(found) if team.rank == 0 else 0

    def _report(self, found: Exported) -> int:
        sys.stdout.write(
            f"{self.out}: {found.num_tensors:,} tensors, {found.nbytes:,} bytes, of step {found.step:,} in "
            f"{found.checkpoint}\n"
        )
        if self.form.of_transformers and not (self.out / "tokenizer.json").exists():
            sys.stdout.write(
                "the checkpoint knows no tokenizer of text: AutoTokenizer would make an empty one\n"
            )
        return 0


@dataclass(frozen=True)
class Import:
    """Make a checkpoint of what another program wrote. ``mpirun -n N`` before it: by N ranks.

    Of weights it has no optimizer. Of a folder of torch.distributed.checkpoint (FSDP2, torchtitan), or of a universal
    checkpoint of DeepSpeed, it has the state of the optimizer too.

    Attributes:
        weights: safetensors file, file of torch.save, index of several, a folder that holds one of these, or one of
            torch.distributed.checkpoint or DeepSpeed's ds_to_universal.
        out: folder of a run or folder of checkpoints that holds none yet, or in it step-... of the step.
        layout: names and shapes: those of the model, or Hugging Face's GPT-2 for hpczero.models.GPT; None: those of the
            model, and names of GPT-2 are refused.
        step: optimizer steps done; 0 where the name of out or the state of the optimizer says it.
        tied: further names of tied parameters, each as FURTHER=NAME, where the weights do not tell; NAME=NAME: none.
        buffers: patterns of names of buffers, as '*.running_mean', where the weights do not tell.
        optimizer: name of the class whose state it is; None: take the weights alone.
    """

    weights: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="WEIGHTS")]]
    out: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="OUT")]]
    layout: Literal["hpczero", "gpt2"] | None = None
    step: int = 0
    tied: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    optimizer: str | None = "AdamW"

    def __call__(self) -> int:
        """Make it, and print how to train from it."""
        tied = dict(entry.partition("=")[::2] for entry in self.tied)
        if not all(tied.values()):
            raise ConfigError(
                f"tied: got {shown(' '.join(self.tied))}, expected FURTHER=NAME for each"
            )
        # Not at the top: torch and HDF5 are of no use to the other commands.
        from hpczero.checkpoint.foreign.converting import convert

        named: dict[str, Any] = {"layout": self.layout, "step": self.step, "buffers": self.buffers}
        named["optimizer"] = self.optimizer
        with _team() as team:
            path = convert(self.weights, self.out, tied=tied, team=team, **named)
            if team.rank == 0:
                said = f"{path}: imported from {self.weights}\n{how_to_train(path)}\n"
                sys.stdout.write(said)
        return 0


@contextmanager
def _team() -> Iterator[Team]:
    """The ranks of this launch; this process alone, without MPI, where it is the only one."""
    if (Environment.read().launched_ranks or 1) == 1:
        yield Alone()
        return
    # Not at the top: one process starts no MPI.
    from hpczero.job.topology import Topology

    topology = Topology.of_world()
    if not topology.is_root:
        logging.getLogger("hpczero.checkpoint").setLevel(logging.ERROR)  # rank 0 warns for all
    yield Ranks(topology)
    topology.free()


Command = (
    Annotated[Ls, tyro.conf.subcommand("ls")]
    | Annotated[VerifyCheckpoint, tyro.conf.subcommand("verify")]
    | Annotated[Export, tyro.conf.subcommand("export")]
    | Annotated[Import, tyro.conf.subcommand("import")]
)


def main() -> int:
    """Do what the command line says."""
    command = parse_command_line(
        cast("type[Ls | VerifyCheckpoint | Export | Import]", Command),
        sys.argv[1:],
        prog="python -m hpczero.checkpoint",
        description="List, verify, export and import checkpoints. Alone without MPI; mpirun -n N: all ranks work.",
    )
    return command()


def _row(path: Path) -> str:
    try:
        m = folder.read_manifest(path)
    except CheckpointError as error:
        return f"{'-':>12} {'-':>10} {'-':>14} {'-':>6}  {type(error).__name__:<20} {path}"
    return (
        f"{m.step:>12,} {m.file_nbytes / 2**20:>10,.1f} {m.table.numel:>14,} {m.world_size:>6}  "
        f"{m.created[:19]:<20} {path}"
    )


if __name__ == "__main__":
    run(main)
