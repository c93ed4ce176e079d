"""Damaged files of every kind the project reads, each read once: what came of it.

    python -m tests.damaged --cases 1000

A case is a subject, a harm and a seed. It is done in a process of its own kind, many in one; where that process is
killed by a signal, or does not answer, the case is counted so and the next process goes on with the one after it.
"""

from __future__ import annotations

import json
import logging
import os
import random
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.files.test_regular import WaitedError, at_once
from tests.helpers.mpirun import ROOT
from tests.helpers.processes import launch_environment

CASE_S = 20  # a read is done in a tenth of a second
PATH: list[str] = []  # before the project, for the test of the campaign itself
GONE = ("nothing", "a link to nothing")
SILENCE_S = 120.0  # in which a process says nothing: it hangs where no signal gets in
MEMORY_NBYTES = 8 * 2**30  # of addresses; a file without end then ends in MemoryError

UNCHANGED, ERROR, WARNED, TAKEN, UNSEEN = "unchanged", "error", "warned", "taken", "unseen"
SILENT, TRACEBACK, HANG, SIGNAL = "silent", "traceback", "hang", "signal"
GOOD = (UNCHANGED, ERROR, WARNED, TAKEN, UNSEEN)
BAD = (SILENT, TRACEBACK, HANG, SIGNAL)


@dataclass(frozen=True)
class Case:
    """One damaged file."""

    subject: str
    harm: str
    seed: int

    def __str__(self) -> str:
        return f"{self.subject}: {self.harm} ({self.seed})"


@dataclass(frozen=True)
class Outcome:
    """What came of a case, and the words it was told in."""

    case: Case
    kind: str
    said: str = ""


def plan(num_cases: int, seed: int, subjects: Sequence[str] | None = None) -> list[Case]:
    """As many cases for each subject, every harm as often as any other; the same for the same seed."""
    from tests.damaged.harms import HARMS, HARMS_OF_TEXT, PLACES
    from tests.damaged.signed import SIGNED
    from tests.damaged.subjects import SUBJECTS

    known = SUBJECTS | SIGNED
    draw = random.Random(seed)
    chosen = list(subjects or SUBJECTS)
    cases = []
    for place, name in enumerate(chosen):
        subject = known[name]
        spared = {*(PLACES if subject.signed else ()), *(GONE if subject.may_be_gone else ())}
        harms = [h for h in (HARMS_OF_TEXT if subject.is_text else HARMS) if h not in spared]
        share = num_cases * (place + 1) // len(chosen) - num_cases * place // len(chosen)
        order = draw.sample(harms, len(harms))
        rounds = max(share // len(harms), 1)
        # A bit flipped is the harm that looks least like one: what is left over goes to it.
        listed = order * rounds + ["a bit flipped"] * len(harms)
        cases += [Case(name, harm, draw.randrange(2**31)) for harm in listed[:share]]
    return cases


# --- in the process that reads ---------------------------------------------------------------------------------------


class Told(logging.Handler):
    """Warnings of the project."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


class Reader:
    """Does cases in this process; sound files are made once for each subject."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # The file, what a reader makes of it, and of what it warns although nothing is wrong.
        self._sound: dict[str, tuple[Path, object, frozenset[str]]] = {}
        self._told = Told()
        logger = logging.getLogger("hpczero")
        logger.addHandler(self._told)
        logger.propagate = False

    def do(self, case: Case) -> Outcome:
        """Harm a copy, read it, and judge."""
        from hpczero.errors import HpcZeroError
        from tests.damaged.harms import HARMS_OF_TEXT
        from tests.damaged.signed import SIGNED
        from tests.damaged.subjects import SUBJECTS

        subject = (SUBJECTS | SIGNED)[case.subject]
        if case.subject not in self._sound:
            sound = self._folder / f"sound-{len(self._sound)}"
            sound.mkdir()
            file = subject.make(sound).relative_to(sound)
            self._sound[case.subject] = file, None, frozenset()
            self._told.said.clear()
            expected = subject.read(self._copy(case.subject))
            assert subject.read(self._copy(case.subject)) == expected, (
                f"{case.subject}: reads differ"
            )
            self._sound[case.subject] = file, expected, frozenset(self._told.said)
        file, expected, always = self._sound[case.subject]
        copy = self._copy(case.subject)
        HARMS_OF_TEXT[case.harm](copy / file, random.Random(case.seed))
        self._told.said.clear()
        kind, said = UNCHANGED, ""
        try:
            with at_once(CASE_S):
                found = subject.read(copy)
            if found != expected:
                kind = TAKEN if subject.signed else SILENT if subject.has_digest else UNSEEN
                said = repr(found)[:300]
        except HpcZeroError as error:
            return Outcome(case, ERROR, f"{type(error).__name__}: {error}")
        except WaitedError:
            return Outcome(case, HANG)
        except Exception as error:  # what a command would end with
            return Outcome(case, TRACEBACK, f"{type(error).__name__}: {error}"[:300])
        warnings = [text for text in self._told.said if text not in always]
        if warnings:
            return Outcome(case, WARNED, warnings[0])
        return Outcome(case, kind, said)

    def _copy(self, subject: str) -> Path:
        """Always of one name: it is part of what is read and said."""
        copy = self._folder / "case"
        if copy.exists():
            shutil.rmtree(copy)
        place = list(self._sound).index(subject)
        shutil.copytree(self._folder / f"sound-{place}", copy, copy_function=shutil.copyfile)
        return copy


def serve() -> None:
    """Cases come in on stdin, one line of JSON each; outcomes go to stdout."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_NBYTES, MEMORY_NBYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed
    with tempfile.TemporaryDirectory(prefix="hpczero-damaged-") as name:
        reader = Reader(Path(name))
        for line in sys.stdin:
            outcome = reader.do(Case(**json.loads(line)))
            out.write(json.dumps([outcome.kind, outcome.said]) + "\n")
            out.flush()


# --- in the process that counts --------------------------------------------------------------------------------------


def run(cases: Sequence[Case]) -> list[Outcome]:
    """Do all cases, with as many processes as die, one after the other."""
    outcomes: list[Outcome] = []
    while len(outcomes) < len(cases):
        outcomes += _run_until_it_ends(cases[len(outcomes) :])
    return outcomes


def _run_until_it_ends(cases: Sequence[Case]) -> list[Outcome]:
    outcomes: list[Outcome] = []
    command = [sys.executable, "-m", "tests.damaged", "serve"]
    path = os.pathsep.join([*PATH, str(ROOT)])
    options: Any = {"cwd": ROOT, "env": launch_environment(OMP_NUM_THREADS="1", PYTHONPATH=path)}
    options |= {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        tempfile.TemporaryFile() as noise,
        subprocess.Popen(command, stderr=noise, **options) as process,
    ):
        assert process.stdin
        assert process.stdout
        try:
            for case in cases:
                process.stdin.write(json.dumps(vars(case)) + "\n")
                process.stdin.flush()
                line = _line_within(process, SILENCE_S)
                if line is None:
                    outcomes.append(Outcome(case, HANG, "no signal got in"))
                    break
                if not line:
                    code = process.wait(SILENCE_S)
                    noise.seek(0)
                    tail = noise.read()[-2000:].decode(errors="replace")
                    if code >= 0:
                        raise RuntimeError(f"{case}: the campaign itself failed: {tail}")
                    outcomes.append(Outcome(case, SIGNAL, signal.Signals(-code).name))
                    break
                kind, said = json.loads(line)
                outcomes.append(Outcome(case, kind, said))
        finally:
            process.kill()
    return outcomes


def _line_within(process: subprocess.Popen[str], limit_s: float) -> str | None:
    """The next line; empty where the process has ended, None where it says nothing."""
    assert process.stdout
    ready, _, _ = select.select([process.stdout], [], [], limit_s)
    return process.stdout.readline() if ready else None


def table(outcomes: Sequence[Outcome]) -> str:
    """Counts by subject, and what was bad.

    ``taken``: of a signed file, what it says now. ``unseen``: of a format without a digest, a change that leaves a file
    of that format; nobody can tell.
    """
    kinds = (*GOOD, *BAD)
    lines = [
        "| kind of file | cases | " + " | ".join(kinds) + " |",
        "|---" * (len(kinds) + 2) + "|",
    ]
    subjects = list(dict.fromkeys(outcome.case.subject for outcome in outcomes))
    for name in [*subjects, "all"]:
        mine = [o for o in outcomes if name in ("all", o.case.subject)]
        counts = [sum(o.kind == kind for o in mine) for kind in kinds]
        lines.append(f"| {name} | {len(mine)} | " + " | ".join(map(str, counts)) + " |")
    unseen = sorted({o.case.subject for o in outcomes if o.kind == UNSEEN})
    if unseen:
        lines.append(f"unseen: changes of files that carry no digest ({'; '.join(unseen)})")
    lines += [f"{o.kind}: {o.case}: {o.said}" for o in outcomes if o.kind in BAD]
    return "\n".join(lines)
