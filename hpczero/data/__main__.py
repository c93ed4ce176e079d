"""``python -m hpczero.data prepare | show | verify | seal``: make a token file, look at one, check one.

Owns: the command line and what it prints. Must not know: formats, splits (``prepare`` and ``tokens`` do).
"""

from __future__ import annotations

import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, cast

import tyro

from hpczero.data.corpus import Corpus
from hpczero.data.prepare import VALIDATION_FRACTION, TokenizerName, prepare, seal
from hpczero.data.targets import check_target
from hpczero.data.team.base import Alone, Team
from hpczero.data.team.ranks import Ranks
from hpczero.data.tokens import VERSION, TokenFile
from hpczero.errors import run
from hpczero.job.long_work import watched
from hpczero.options.environment import Environment
from hpczero.options.reading import parse_command_line
from hpczero.run.results.phases import phases_for

EXCERPT_TOKENS = 200


@dataclass(frozen=True)
class Prepare:
    """Tokenize text files into one HDF5 token file. ``mpirun -n N`` before the command shares the work over N ranks."""

    texts: tyro.conf.Positional[tuple[Path, ...]] = ()
    """Text files, and folders taken with all they hold; none means the source text of Python's standard library."""
    out: Path = Path("tokens.h5")
    """The file to write; it appears whole or not at all. Only a token file that is there already is replaced."""
    tokenizer: TokenizerName = "bytes"
    """bytes: one token per byte. bpe: byte pairs learned from the training split."""
    vocab_size: int | None = None
    """Size of the BPE vocabulary; None: 8192."""
    validation_fraction: float = VALIDATION_FRACTION
    """Share of the text to hold out."""

    def __call__(self) -> None:
        """Write the file and say what it holds. Under a launcher of several ranks all of them share the work."""
        check_target(self.out, self.texts)  # now: reading the texts may take hours
        # By default it would end the process before what is half written is taken away.
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        with phases_for("auto", _say, to_stderr=True) as shown:
            if (Environment.read().launched_ranks or 1) == 1:
                watched(lambda progress: self._make(Alone(progress)), shown.show)
                describe(self.out)
                return
            from hpczero.job.topology import Topology

            topology = Topology.of_world()
            self._make(Ranks(topology, shown.show))
        if topology.is_root:
            describe(self.out)
        topology.free()

    def _make(self, team: Team) -> None:
        prepare(
            Corpus.of_paths(self.texts, team=team)
            if self.texts
            else Corpus.standard_library(team=team),
            self.out,
            tokenizer=self.tokenizer,
            vocab_size=self.vocab_size,
            validation_fraction=self.validation_fraction,
            team=team,
        )


@dataclass(frozen=True)
class Show:
    """Say what a token file holds."""

    file: tyro.conf.Positional[Path]
    """The token file."""

    def __call__(self) -> None:
        """Write the summary."""
        describe(self.file)


@dataclass(frozen=True)
class Verify:
    """Read all of a token file and hold it against its digests; exits with 78 where it is damaged."""

    file: tyro.conf.Positional[Path]
    """The token file."""

    def __call__(self) -> None:
        """Read, and say that it is sound."""
        with TokenFile.open(self.file) as tokens:
            for split in (tokens.train, tokens.validation):
                split.check()
            numel = len(tokens.train) + len(tokens.validation)
            verdict = "sound" if tokens.version == VERSION else "its ids are of its vocabulary"
        sys.stdout.write(f"{self.file}: {verdict}, {numel:,} tokens read\n")


@dataclass(frozen=True)
class Seal:
    """Give a token file of an earlier version its digests. Its tokens are believed as they are."""

    file: tyro.conf.Positional[Path]
    """The token file; replaced, once the new one is whole."""
    out: Path | None = None
    """Where to write the new one instead; only a token file that is there already is replaced."""

    def __call__(self) -> None:
        """Write it, and say what it holds."""
        seal(self.file, self.out)
        describe(self.out or self.file)


def describe(path: Path) -> None:
    """Write a summary of a token file to stdout."""
    with TokenFile.open(path) as tokens:
        lines = [
            f"{path}: {type(tokens.tokenizer).__name__}, vocabulary {tokens.vocab_size}, dtype {tokens.train.dtype}",
            f"source sha256 {tokens.source_sha256}",
        ]
        for name, split in (("train", tokens.train), ("validation", tokens.validation)):
            lines.append(
                f"{name:<10} {len(split):>13,} tokens  {split.text_nbytes:>13,} bytes  "
                f"{split.documents:>9,} documents  {split.bytes_per_token:.3f} bytes per token"
            )
        start = tokens.tokenizer.decode(tokens.train[:EXCERPT_TOKENS].tolist()).decode(
            errors="replace"
        )
        lines += ["the training text begins with", *(f"  | {line}" for line in start.splitlines())]
    sys.stdout.write("\n".join(lines) + "\n")


def _say(line: str) -> None:
    with suppress(OSError):  # of a log on a full disk; the file may be on another
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def main() -> None:
    """Parse the command line and act on it."""
    commands = (
        Annotated[Prepare, tyro.conf.subcommand("prepare")]
        | Annotated[Show, tyro.conf.subcommand("show")]
        | Annotated[Verify, tyro.conf.subcommand("verify")]
        | Annotated[Seal, tyro.conf.subcommand("seal")]
    )
    command = parse_command_line(
        cast("type[Prepare | Show | Verify | Seal]", commands),
        sys.argv[1:],
        prog="python -m hpczero.data",
        description="Make, inspect and check token files.",
    )
    command()


if __name__ == "__main__":
    run(main)
