"""The first seconds of the commands, if asked for beside those of another checkout, in turns.

    python -m scaling.start --against FOLDER
    python -m scaling.start --cases files        # how many files a rank looks for and opens

Every case is a process or an MPI job of its own, whose output is read line by line as it comes. In each round each case
runs once for each checkout, in an order drawn anew. Files are counted by ``strace``: exactly, whatever else the machine
does; the command takes several times as long meanwhile.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from hpczero.errors import ConfigError, HpcZeroError, run
from scaling.evidence.harness import Common, Report, at_least, in_turns, options_of, record
from scaling.evidence.record import ROOT, Row, checkouts, commit, head_of, of_kind, run_row
from scaling.evidence.spread import Spread, paired, table, with_spread

LIMIT_S = 600.0
COMMANDS = "doctor doctor.record plan preflight replay sample train watch"
MEASUREMENTS = (
    "balance bridge checkpoint codes collectives exact gpu hostcost layouts losses overhead parallel peers planner "
    "predict report simulate simulate.check start sweep sweep.point tiers transports"
)
HELP = {
    "hpczero.checkpoint": ("", "ls", "verify", "export", "import"),
    "hpczero.data": ("", "prepare", "show", "verify"),
    **{f"hpczero.{name}": ("",) for name in COMMANDS.split()},
    **{f"scaling.{name}": ("",) for name in MEASUREMENTS.split()},
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
THIS, OTHER = "this", "against"
COUNTS = ("opened", "looked", "missed", "shared", "shared_names")
# What is looked at of each kind of case, and what it is called.
LOOKED_AT = {
    "run": (("first_s", "first line"), ("header_s", "header")),
    "mistakes": (("told_s", "told"), ("ended_s", "job ended")),
    "help": (("ended_s", "help"),),
}
# Calls that name a file, by what a server has to do for them.
OPENS = frozenset({"open", "openat", "openat2", "creat"})
LOOKED = "stat lstat newfstatat fstatat64 statx access faccessat faccessat2 readlink readlinkat "
LOOKS = frozenset(f"{LOOKED}execve statfs getxattr".split())
# Of a line such as: 123 openat(AT_FDCWD, "/a/b", O_RDONLY) = -1 ENOENT (No such file or directory)
_LINE = re.compile(r'^(?:\d+ +)?(\w+)\((?:\w+(?:<[^>]*>)?, )?"((?:[^"\\]|\\.)*)"')
_MISSED = re.compile(r" = -1 E\w+")
# Of one that a call of another thread came between.
_LATER = re.compile(r"^(?:\d+ +)?<\.\.\. (\w+) resumed>")


@dataclass(frozen=True)
class Options(Common):
    """What to measure.

    Attributes:
        cases: help: ``--help`` of every command; mistakes: until one is told; run: until the header of a run; files:
            files that each rank of a run of one step looks for and opens, once, by ``strace``.
        ranks: of the jobs.
        rounds: times that each case runs; from 6 on there is a 95 % interval of the median.
        against: folder of another checkout; its code runs in turns with this one.
        shared: for files: folders that stand for a shared file system; left out, the checkout, the environment and the
            installation of its interpreter.
    """

    cases: tuple[Literal["help", "mistakes", "run", "files"], ...] = ("help", "mistakes", "run")
    ranks: tuple[int, ...] = (2, 4)
    rounds: int = 5
    against: str | None = None
    shared: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        at_least(self, rounds=1, ranks=1)
        checkouts(self.against)


@dataclass(frozen=True)
class Case:
    """One command line."""

    kind: str  # as in ``Options.cases``
    name: str  # in the table
    words: str  # behind ``python -m``; ``{name}`` stands for a name that no other run has
    ranks: int = 0  # of its job; 0: a plain process

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
    options = options_of(Options, "start")
    record("start", options.results, measure(options), REPORT)
    return 0


def measure(options: Options) -> Iterator[Row]:
    """The whole run."""
    trees = checkouts(options.against)
    against = commit(trees[OTHER]) if OTHER in trees else None
    yield run_row(options, "rounds seed", load=os.getloadavg()[0], against=against)
    order = random.Random(options.seed)
    cases = list(cases_of(options))
    with tempfile.TemporaryDirectory(prefix="hpczero-start-") as folder:
        place = Path(folder)
        (place / "text.txt").write_text("the rank owns its shard\n" * 1000, encoding="utf-8")
        if "files" in options.cases:
            for ranks in options.ranks:
                for tree, code in trees.items():
                    name = f"{tree}-files-{ranks}"
                    for row in files_of(ranks, code, place, name, options.shared):
                        yield {"kind": "files", **row, "tree": tree, "ranks": ranks}
        rounds = options.rounds if cases else 0
        for number, turn in in_turns(cases, rounds, order, program="start"):
            for case in turn:
                there = [tree for tree, code in trees.items() if case.is_in(code)]
                for tree in order.sample(there, len(there)):
                    row = timed(case, trees[tree], place, f"{tree}-{number}-{case.ranks}")
                    yield {"kind": "start", **row, "tree": tree, "round": number}


def files_of(
    ranks: int, tree: Path, place: Path, name: str, shared: Sequence[str]
) -> Iterator[Row]:
    """Calls of each rank of a run of one step that name a file, in no order.

    Args:
        ranks: of the job.
        tree: of a checkout.
        place: folder to run in.
        name: of the run.
        shared: folders that stand for a shared file system; empty: those of the code and of Python.

    Raises:
        ConfigError: there is no ``strace``.
        HpcZeroError: the run failed, or another number of processes than ranks has left a log.
    """
    log = place / f"{name}.calls"
    words = f"hpczero.train {TINY}".format(name=name).split()
    done = subprocess.run(
        [*_launched(ranks), *traced(log), sys.executable, "-m", *words],
        capture_output=True,
        check=False,
        timeout=LIMIT_S,
        **_words(tree, place),
    )
    folders = [Path(folder).resolve() for folder in shared]
    folders = folders or [tree, Path(sys.prefix), Path(sys.base_prefix)]
    found = counted(place.glob(f"{log.name}.*"), folders)
    if done.returncode or len(found) != ranks:
        raise HpcZeroError(
            f"{ranks} rank(s) under strace ended with {done.returncode} and left {len(found)} log(s), expected "
            f"0 and {ranks}; it said: {done.stderr[-2000:]}"
        )
    for calls in found:
        yield {**asdict(calls), "shared_names": len(calls.shared_names)}


def _launched(ranks: int) -> list[str]:
    return [os.fspath(ROOT / "install/launch.sh"), str(ranks)] if ranks else []


def _words(tree: Path, place: Path) -> dict[str, Any]:  # Any: of subprocess
    """Of a process in ``place`` with the code of ``tree``; a job that hangs ends itself."""
    given = {"PYTHONPATH": os.fspath(tree), "PYTHONUNBUFFERED": "1"}
    environment = {**os.environ, **given, "HPCZERO_TIMEOUT": str(LIMIT_S)}
    return {"cwd": place, "env": environment, "stdin": subprocess.DEVNULL, "text": True}


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
    words = case.words.format(name=name).split()
    command = [*_launched(case.ranks), sys.executable, "-m", *words]
    when: dict[str, float] = {}
    errors, said = 0, ""
    began = time.monotonic()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **_words(tree, place)
    ) as process:
        assert process.stdout is not None, "asked for"
        for line in process.stdout:
            now = time.monotonic() - began
            errors += line.startswith("[rank ")
            for mark, key in (("", "first_s"), ("[rank ", "told_s"), ("topology: ", "header_s")):
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


@dataclass
class Calls:
    """Calls of one process and its children that named a file."""

    opened: int = 0  # files opened
    looked: int = 0  # files looked at without opening them
    missed: int = 0  # of both, those that found nothing
    shared: int = 0  # of both, those below a folder that stands for a shared file system
    shared_names: set[str] = field(default_factory=set)  # different names among the last

    def note(self, line: str, shared: Sequence[str]) -> None:
        """Count one line of ``strace``; lines of no call that names a file are left out.

        Args:
            line: of its output.
            shared: folders, each with a slash at its end.
        """
        later = _LATER.match(line)
        if later is not None:
            self.missed += later[1] in OPENS | LOOKS and bool(_MISSED.search(line))
        found = _LINE.match(line)
        if found is None or found[1] not in OPENS | LOOKS or not found[2]:
            return  # no name: of a file that is open already
        self.opened += found[1] in OPENS
        self.looked += found[1] in LOOKS
        self.missed += bool(_MISSED.search(line))
        name = os.path.normpath(found[2])
        if any(f"{name}/".startswith(folder) for folder in shared):
            self.shared += 1
            self.shared_names.add(name)


def traced(log: Path) -> list[str]:
    """Words to set before a command, so that its calls go to ``log``, with the number of the process at its end.

    Raises:
        ConfigError: there is no ``strace``.
    """
    tool = shutil.which("strace")
    if tool is None:
        raise ConfigError(
            "--cases files: no strace on this host; install it (Debian: apt-get install strace), or leave the case out"
        )
    names = ",".join(sorted(f"?{name}" for name in OPENS | LOOKS))
    line = f'exec {tool} -f -qq -s 4096 -e trace={names} -e signal=none -o "$0.$$" "$@"'
    return ["bash", "-c", line, os.fspath(log)]


def counted(logs: Iterable[Path], shared: Sequence[Path]) -> list[Calls]:
    """The calls of each process that has left a log, in the order of the logs' names.

    Args:
        logs: that ``traced`` has written.
        shared: folders that stand for a shared file system.
    """
    folders = [f"{os.path.normpath(folder)}/" for folder in shared]
    found = []
    for log in sorted(logs):
        calls = Calls()
        with log.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                calls.note(line, folders)
        found.append(calls)
    return found


def _seconds(rows: list[Row]) -> dict[tuple[str, str], dict[str, dict[int, float]]]:
    """Seconds by round, of each (what, ranks) and tree."""
    found: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    groups = list(LOOKED_AT)
    for row in sorted(
        of_kind(rows, "start"), key=lambda r: (groups.index(r["group"]), r["case"], r["ranks"])
    ):
        for key, called in LOOKED_AT[row["group"]]:
            if row[key] is not None:
                what = (f"{row['case']}: {called}", str(row["ranks"] or "–"))
                found.setdefault(what, {}).setdefault(row["tree"], {})[row["round"]] = row[key]
    return found


def text(rows: list[Row]) -> str:
    """Heading and table; markdown."""
    head, found = head_of(rows), _seconds(rows)
    header = ["what", "ranks", "s"]
    header += ["s, the other checkout", "other / this"] if head["against"] else []
    cells = []
    for (what, ranks), trees in found.items():
        mine, other = trees.get(THIS), trees.get(OTHER)
        spreads = [Spread.of(times.values()) if times else None for times in (mine, other)]
        shown = [with_spread(spread, 2) for spread in (*spreads, paired(other, mine))]
        cells.append([what, ranks, *(shown if head["against"] else shown[:1])])
    against = f" beside {head['against']}" if head["against"] else ""
    title = (
        f"Seconds from the start of the launcher, median of {head['rounds']} [least, most, or 95 % interval], in "
        f"turns; {head['cores']} cores of {head['cpu']}, load {head['load']:.1f} before the first. "
        f"Commit {head['commit']}{against}, {head['date']}."
    )
    timed_ = [title, "", table(header, cells)] if cells else []
    return "\n".join([*timed_, *_files(rows, head)])


def _files(rows: list[Row], head: Row) -> list[str]:
    """Heading and table of the files that a rank looks for; nothing where none were counted."""
    found = list(of_kind(rows, "files"))
    if not found:
        return []
    header = ["ranks", "commit", "opened", "looked at", "of these missing", "shared", "names"]
    cells = []
    for ranks, tree in dict.fromkeys((row["ranks"], row["tree"]) for row in found):
        mine = [row for row in found if (row["ranks"], row["tree"]) == (ranks, tree)]
        counts = [_range([row[key] for row in mine]) for key in COUNTS]
        cells.append([str(ranks), head["commit" if tree == THIS else "against"], *counts])
    title = (
        "Files that one rank of hpczero.train opens and looks at until a run of one step is over, least to most of its "
        "ranks; shared: below the checkout, the environment and its interpreter, calls and different names. "
        f"Commit {head['commit']}, {head['date']}."
    )
    return [title, "", table(header, cells)]


def _range(values: list[int]) -> str:
    least, most = min(values), max(values)
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


REPORT = Report("The start of a job", text)

if __name__ == "__main__":
    run(main)
