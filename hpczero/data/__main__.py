"""``python -m hpczero.data prepare | show | verify``: make a token file, look at one, check one."""

from __future__ import annotations

import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, cast

import tyro

from hpczero.data.corpus import Corpus
from hpczero.data.prepare import VALIDATION_FRACTION, TokenizerName, check_target, prepare
from hpczero.data.rows import corpus_of
from hpczero.data.tokenize import LibraryTokenizer
from hpczero.data.tokens import TokenFile
from hpczero.errors import ConfigError, run
from hpczero.job.long_work import watched
from hpczero.job.team import Alone, Ranks, Team
from hpczero.options.environment import Environment
from hpczero.options.reading import parse_command_line
from hpczero.run.results.progress import PhaseProgress

EXCERPT_TOKENS = 200


@dataclass(frozen=True)
class Prepare:
    """Tokenize text files, or rows of data sets, into one HDF5 token file. ``mpirun -n N`` before it: on N ranks."""

    texts: tyro.conf.Positional[tuple[Path, ...]] = ()
    """Text files, and folders taken with all they hold; none means the source text of Python's standard library. With a
    column: folders that save_to_disk of ``datasets`` wrote, .arrow and .parquet files."""
    out: Path = Path("tokens.h5")
    """The file to write; it appears whole or not at all. Only a token file that is there already is replaced."""
    tokenizer: TokenizerName = "bytes"
    """bytes: one token per byte. bpe: byte pairs learned from the training split."""
    vocab_size: int | None = None
    """Size of the BPE vocabulary; None: 8192."""
    vocab_text_mib: int | None = None
    """MiB of the training split to learn the BPE vocabulary from, taken at even distances; None: 256."""
    validation_fraction: float = VALIDATION_FRACTION
    """Share of the text to hold out."""
    column: str | None = None
    """Column of data sets that has the text; each row is a document."""
    split: str | None = None
    """Of a folder with several splits, the one to take."""
    tokenizer_file: Path | None = None
    """A tokenizer.json of the ``tokenizers`` library, in place of tokenizer; for rows, which are tokenized whole."""
    separator: str | None = None
    """Token of that file that ends a document, such as <|endoftext|>."""

    def __call__(self) -> None:
        """Write the file and say what it holds. Under a launcher of several ranks all of them share the work."""
        self._check()
        check_target(self.out)  # now: reading the texts may take hours
        # By default it would end the process before what is half written is taken away.
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        with PhaseProgress("auto", _say, to_stderr=True) as shown:
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

    def _check(self) -> None:
        """Refuse options that contradict each other, with a ConfigError."""
        if self.column is None:
            for name in ("split", "tokenizer_file"):
                if getattr(self, name) is not None:
                    raise ConfigError(
                        f"--{name.replace('_', '-')}: is for rows of data sets; give --column too"
                    )
        elif not self.texts:
            raise ConfigError("--column: got no data set, expected folders or files of some")
        if (self.tokenizer_file is None) != (self.separator is None):
            raise ConfigError("--tokenizer-file and --separator: expected both or neither")
        if self.tokenizer_file is not None and self.tokenizer != "bytes":
            raise ConfigError("--tokenizer and --tokenizer-file: expected one of the two")

    def _make(self, team: Team) -> None:
        tokenizer: TokenizerName | LibraryTokenizer = self.tokenizer
        if self.tokenizer_file is not None:
            path, separator = str(self.tokenizer_file), str(self.separator)
            with team.agreed("read the tokenizer"):
                tokenizer = LibraryTokenizer.of_file(path, separator)
        prepare(
            self._corpus(team),
            self.out,
            tokenizer=tokenizer,
            vocab_size=self.vocab_size,
            vocab_text_mib=self.vocab_text_mib,
            validation_fraction=self.validation_fraction,
            team=team,
        )

    def _corpus(self, team: Team) -> Corpus:
        if self.column is not None:
            return corpus_of(self.texts, self.column, self.split, team)
        if self.texts:
            return Corpus.of_paths(self.texts, team=team)
        return Corpus.standard_library(team=team)


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
    """Read all tokens of a token file and hold them against their digests; exits with 78 where one is damaged."""

    file: tyro.conf.Positional[Path]
    """The token file."""

    def __call__(self) -> None:
        """Read, and say that it is sound."""
        with TokenFile.open(self.file) as tokens:
            for split in (tokens.train, tokens.validation):
                split.check()
            numel = len(tokens.train) + len(tokens.validation)
        sys.stdout.write(f"{self.file}: sound, {numel:,} tokens read\n")


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
    )
    command = parse_command_line(
        cast("type[Prepare | Show | Verify]", commands),
        sys.argv[1:],
        prog="python -m hpczero.data",
        description="Make, inspect and check token files.",
    )
    # A path of it would be the folder one is in.
    if isinstance(command, Prepare) and "" in sys.argv[1:]:
        raise ConfigError("got an empty argument, expected a path; is a shell variable not set?")
    command()


if __name__ == "__main__":
    run(main)
