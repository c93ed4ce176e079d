"""Jobs of the training command that come to their end before they would: killed, asked to stop, refused.

Must not know: what any test looks for.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.helpers.forkserver import BASE, LAUNCHER
from tests.helpers.forkserver import server as forkserver
from tests.helpers.mpirun import ROOT
from tests.helpers.processes import end_family, family, launch_environment

LIMIT_S = 120.0

# Argument 1: die before so many changes of the disk (-1: do not); argument 2: the environment of a batch system.
PROGRAM = """
import json, os, signal, sys, threading
inside = threading.local()
left = [int(sys.argv.pop(1))]
os.environ.update(json.loads(sys.argv.pop(1)))
from pathlib import Path
from hpczero.errors import launcher_rank, run
from hpczero.run.results.lock import RunLock
def counted(call):
    def change(*args, **named):
        if getattr(inside, "a_change", False):  # Path calls os
            return call(*args, **named)
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        inside.a_change = True
        try:
            return call(*args, **named)
        finally:
            inside.a_change = False
    return change
enter = RunLock.__enter__
def entering(self):
    if left[0] >= 0 and launcher_rank() == 0:
        for name in ("rename", "replace", "unlink", "mkdir", "rmdir"):
            setattr(Path, name, counted(getattr(Path, name)))
        for name in ("fsync", "pwrite", "link", "unlink", "rmdir"):  # the last two: of shutil.rmtree
            setattr(os, name, counted(getattr(os, name)))
    return enter(self)
RunLock.__enter__ = entering
from hpczero.train import main
run(main)
"""


@dataclass
class Job:
    """One start of the training command.

    Attributes:
        process: its launcher.
        log: what it says.
        began: when.
    """

    process: subprocess.Popen[bytes]
    log: Path
    began: float = field(default_factory=time.monotonic)

    @property
    def said(self) -> str:
        """So far."""
        return self.log.read_text(errors="replace")

    @classmethod
    def start(
        cls,
        log: Path,
        words: Sequence[str],
        *,
        ranks: int,
        die_at: int = -1,
        environment: Mapping[str, str] | None = None,
    ) -> Job:
        """Start one; ``words`` are its options, ``die_at``: see ``PROGRAM``."""
        program = ["-c", PROGRAM, str(die_at), json.dumps(dict(environment or {}))]
        return cls.launch(log, [*program, *words], ranks=ranks)

    @classmethod
    def launch(cls, log: Path, words: Sequence[str | Path], *, ranks: int) -> Job:
        """Start ``python words...``, whatever it is, on so many ranks."""
        command = (LAUNCHER, str(ranks), sys.executable, *map(str, words))
        given = launch_environment(**BASE)
        with log.open("w") as output:
            process = subprocess.Popen(
                forkserver.forked(command, given),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=given,
                cwd=ROOT,
                start_new_session=True,
            )
        return cls(process, log)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        end_family(self.process.pid, grace_s=0.5)

    def wait_for_step(self, metrics: Path, step: int) -> None:
        """Until ``metrics`` has lines of so many steps; an AssertionError where it ends before."""
        while self.process.poll() is None and time.monotonic() - self.began < LIMIT_S:
            with contextlib.suppress(OSError):
                if metrics.read_text().count("\n") >= step:
                    return
            time.sleep(0.01)
        raise AssertionError(self.said)

    def wait_for(self, what: str) -> bool:
        """Whether it comes to say ``what`` before it ends."""
        while self.process.poll() is None and time.monotonic() - self.began < LIMIT_S:
            if what in self.said:
                return True
            time.sleep(0.02)
        return what in self.said

    def wait(self) -> int:
        """Its exit code."""
        try:
            return self.process.wait(LIMIT_S)
        finally:
            end_family(self.process.pid, grace_s=0.5)

    @property
    def ranks(self) -> list[int]:
        """Processes of its ranks, if it has any yet."""
        found = []
        for member in family(self.process.pid):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{member.pid}/cmdline").read_bytes().split(b"\0")
                if words[0] == os.fsencode(sys.executable):
                    found.append(member.pid)
        return found

    def signal(self, number: signal.Signals, dice: random.Random) -> None:
        """To one of its ranks, if it has any yet."""
        ranks = self.ranks
        with contextlib.suppress(ProcessLookupError):
            os.kill(dice.choice(ranks) if ranks else self.process.pid, number)
