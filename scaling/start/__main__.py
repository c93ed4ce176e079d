"""The first seconds of the commands, if asked for beside those of another checkout, in turns.

    python -m scaling.start --against FOLDER
    python -m scaling.start --cases files        # how many files a rank looks for and opens

Owns: the cases and the order of a run. Must not know: what a command does with its time, the arithmetic of the report.
Every case is a process or an MPI job of its own, whose output is read line by line as it comes. In each round each
case runs once for each checkout, in an order drawn anew.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpczero.errors import ConfigError, HpcZeroError, run
from hpczero.options.reading import parse_command_line
from scaling.evidence.record import ROOT, Recorder, Row, circumstances, commit, machine_name
from scaling.start.files import counted, traced
from scaling.start.report import OTHER, THIS, text

LIMIT_S = 600.0
HELP = {
    "hpczero.checkpoint": ("", "ls", "verify", "export", "import"),
    "hpczero.data": ("", "prepare", "show", "verify", "seal"),
    "hpczero.doctor": ("",),
    "hpczero.doctor.record": ("",),
    "hpczero.plan": ("",),
    "hpczero.preflight": ("",),
    "hpczero.sample": ("",),
    "hpczero.train": ("",),
    "scaling.bridge": ("",),
    "scaling.checkpoint": ("",),
    "scaling.collectives": ("",),
    "scaling.gpu": ("",),
    "scaling.hostcost": ("",),
    "scaling.layouts": ("",),
    "scaling.overhead": ("",),
    "scaling.parallel": ("",),
    "scaling.peers": ("",),
    "scaling.sweep.point": ("",),
    "scaling.planner": ("",),
    "scaling.predict": ("",),
    "scaling.report": ("",),
    "scaling.simulate": ("",),
    "scaling.simulate.check": ("",),
    "scaling.start": ("",),
    "scaling.sweep": ("",),
    "scaling.tiers": ("",),
    "scaling.transports": ("",),
}
# Of hpczero.train, in a folder that has a text of this name and nothing else.
TINY = (
    "--model.preset gpt-micro --model.context 16 --train.steps 1 --evaluation.batches 0 --log.plot false "
    "--log.tensorboard false --run.name {name} --data.path text.txt"
)
MISTAKES = {
    "wrong data path": "--data.path missing",
    "batch that does not divide": "--train.global_batch 13 --train.micro_batch 4",
    "wrong path to resume from": "--resume.from missing",
    "unknown option": "--train.step 3",
}


@dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
        cases: help: ``--help`` of every command; mistakes: until one is told; run: until the header of a run; files:
            files that each rank of a run of one step looks for and opens, once, by ``strace``.
        ranks: of the jobs.
        rounds: times that each case runs; from 6 on there is a 95 % interval of the median.
        against: folder of another checkout; its code runs in turns with this one.
        seed: of the order in the rounds.
        results: folder of all machines' results; left out, scaling/results.
        shared: for files: folders that stand for a shared file system; left out, the checkout, the environment and the
            installation of its interpreter.
    """

    cases: tuple[Literal["help", "mistakes", "run", "files"], ...] = ("help", "mistakes", "run")
    ranks: tuple[int, ...] = (2, 4)
    rounds: int = 5
    against: str | None = None
    seed: int = 0
    results: str | None = None
    shared: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ConfigError(f"--rounds: got {self.rounds}, expected at least 1")
        if not self.ranks or min(self.ranks) < 1:
            raise ConfigError(f"--ranks: got {self.ranks}, expected numbers of at least 1")
        if self.against is not None and not Path(self.against, "hpczero").is_dir():
            raise ConfigError(f"--against: got {self.against}, expected a checkout of hpczero")


@dataclass(frozen=True)
class Case:
    """One command line.

    Attributes:
        kind: as in ``Options.cases``.
        name: in the table.
        words: behind ``python -m``; ``{name}`` stands for a name that no other run has.
        ranks: of its job; 0: a plain process.
    """

    kind: str
    name: str
    words: str
    ranks: int = 0

    def is_in(self, tree: Path) -> bool:
        """Whether a checkout has the command: another one may be older."""
        path = tree / self.words.split()[0].replace(".", "/")
        return path.with_suffix(".py").exists() or (path / "__main__.py").exists()


def cases_of(options: Options) -> Iterator[Case]:
    """All cases that are asked for."""
    train = f"hpczero.train {TINY}"
    for ranks in options.ranks:
        if "run" in options.cases:
            yield Case("run", "run", train, ranks)
        if "mistakes" in options.cases:
            for name, words in MISTAKES.items():
                yield Case("mistakes", name, f"{train} {words}", ranks)
    if "help" in options.cases:
        for module, subcommands in HELP.items():
            for subcommand in subcommands:
                words = " ".join(filter(None, (module, subcommand)))
                yield Case("help", words, f"{words} --help")


def main() -> int:
    """Measure, write the rows, print the table."""
    options = parse_command_line(
        Options,
        sys.argv[1:],
        prog="python -m scaling.start",
        description="Seconds until a command says something, tells a mistake, shows its help, begins to train.",
        default=Options(),
    )
    folder = ROOT / (options.results or "scaling/results") / machine_name()
    with Recorder(folder / "start.jsonl") as recorder:
        measure(options, recorder)
    sys.stdout.write(f"{text(recorder.rows)}\nrows in {recorder.path}\n")
    return 0


def measure(options: Options, recorder: Recorder) -> None:
    """The whole run."""
    trees = {THIS: ROOT}
    if options.against is not None:
        trees[OTHER] = Path(options.against).resolve()
    load = os.getloadavg()[0]
    head = {**circumstances(), "rounds": options.rounds, "seed": options.seed, "load": load}
    other = commit(trees[OTHER]) if OTHER in trees else None
    recorder.write("run", {**head, "against": other})
    order = random.Random(options.seed)
    cases = list(cases_of(options))
    with tempfile.TemporaryDirectory(prefix="hpczero-start-") as place:
        Path(place, "text.txt").write_text("the rank owns its shard\n" * 1000, encoding="utf-8")
        if "files" in options.cases:
            for ranks in options.ranks:
                for tree, folder in trees.items():
                    for row in files_of(
                        ranks, folder, Path(place), f"{tree}-files-{ranks}", options
                    ):
                        recorder.write("files", {**row, "tree": tree, "ranks": ranks})
        for number in range(options.rounds if cases else 0):
            for case in order.sample(cases, len(cases)):
                there = [tree for tree, folder in trees.items() if case.is_in(folder)]
                for tree in order.sample(there, len(there)):
                    name = f"{tree}-{number}-{case.ranks}"
                    row = timed(case, trees[tree], Path(place), name)
                    recorder.write("start", {**row, "tree": tree, "round": number})
            sys.stderr.write(f"start: round {number + 1} of {options.rounds} done\n")


def files_of(ranks: int, tree: Path, place: Path, name: str, options: Options) -> Iterator[Row]:
    """Calls of each rank of a run of one step that name a file, in no order.

    Args:
        ranks: of the job.
        tree: of a checkout.
        place: folder to run in.
        name: of the run.
        options: which folders count as shared.

    Raises:
        ConfigError: there is no ``strace``.
        HpcZeroError: the run failed, or another number of processes than ranks has left a log.
    """
    log = place / f"{name}.calls"
    words = f"hpczero.train {TINY}".format(name=name).split()
    launch = [os.fspath(ROOT / "install/launch.sh"), str(ranks)]
    environment = {**os.environ, "PYTHONPATH": os.fspath(tree), "HPCZERO_TIMEOUT": str(LIMIT_S)}
    done = subprocess.run(
        [*launch, *traced(log), sys.executable, "-m", *words],
        cwd=place,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    shared = [Path(folder).resolve() for folder in options.shared]
    shared = shared or [tree, Path(sys.prefix), Path(sys.base_prefix)]
    found = counted(place.glob(f"{log.name}.*"), shared)
    if done.returncode or len(found) != ranks:
        raise HpcZeroError(
            f"{ranks} rank(s) under strace ended with {done.returncode} and left {len(found)} log(s), expected "
            f"0 and {ranks}; it said: {done.stderr[-2000:]}"
        )
    for calls in found:
        yield calls.as_row()


def timed(case: Case, tree: Path, place: Path, name: str) -> Row:
    """Run a case with the code of ``tree``, and note when it says what.

    Args:
        case: what to run.
        tree: of a checkout.
        place: folder to run in.
        name: of the run, if it trains.

    Returns:
        Seconds from the start of the launcher: ``first_s`` first line, ``told_s`` first error, ``header_s`` header of
        the run, ``ended_s``; None for what did not come. ``code`` of exit; ``errors``, lines that begin with a rank.

    Raises:
        HpcZeroError: it did not end in time, or with another code than is right.
    """
    launch = [os.fspath(ROOT / "install/launch.sh"), str(case.ranks)] if case.ranks else []
    words = case.words.format(name=name).split()
    command = [*launch, sys.executable, "-m", *words]
    environment = {**os.environ, "PYTHONPATH": os.fspath(tree), "PYTHONUNBUFFERED": "1"}
    environment["HPCZERO_TIMEOUT"] = str(LIMIT_S)  # a job that hangs ends itself
    when: dict[str, float] = {}
    errors, said = 0, ""
    began = time.monotonic()
    with subprocess.Popen(
        command,
        cwd=place,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None, "asked for"
        for line in process.stdout:
            now = time.monotonic() - began
            when.setdefault("first_s", now)
            errors += line.startswith("[rank ")
            for mark, key in (("[rank ", "told_s"), ("topology: ", "header_s")):
                if line.startswith(mark):
                    when.setdefault(key, now)
            said += line
    ended = time.monotonic() - began
    right = ConfigError.exit_code if case.kind == "mistakes" else 0
    if process.returncode != right:
        raise HpcZeroError(
            f"{' '.join(command)} of {tree} ended with {process.returncode}, expected {right}; it said: {said[-2000:]}"
        )
    times = {key: when.get(key) for key in ("first_s", "told_s", "header_s")}
    return {
        "case": case.name,
        "group": case.kind,
        "ranks": case.ranks,
        **times,
        "ended_s": ended,
        "code": process.returncode,
        "errors": errors,
    }


if __name__ == "__main__":
    run(main)
