"""Crew: all ranks of one contender, seen from the command that measures, and turns of several crews.

Orders go to all ranks at once and are answered by all; an order is one JSON line and so is the answer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from hpczero.errors import ConfigError, HpcZeroError
from scaling.contenders import RANK_PROGRAM, Entry
from scaling.contenders.workload import Workload
from scaling.evidence.harness import Common, at_least, in_turns
from scaling.evidence.host import machine_seconds, process_seconds
from scaling.evidence.record import LAUNCH, ROOT, Row

PEERS_PYTHON = ROOT / ".venv" / "peers" / "bin" / "python"
START_TIMEOUT_S = 180.0  # importing, connecting
ANSWER_TIMEOUT_S = 600.0
END_TIMEOUT_S = 30.0
# One session for all ranks, as mpirun makes it: the kernel shares a busy machine between sessions, not processes
# (sched_autogroup), so ranks with a session each would get several times what the ranks of an MPI job get.
ALL_RANKS = """
size=$1
shift
for ((rank = 0; rank < size; rank++)); do RANK=$rank LOCAL_RANK=$rank "$@" & done
for ((rank = 0; rank < size; rank++)); do wait -n || exit; done
"""

Answer = dict[str, Any]  # Any: JSON


class Crew:
    """Context manager: the ranks live inside it.

    Attributes:
        entry: the contender.
        pids: of the ranks, in rank order.
        baseline_nbytes: PSS of each rank when its libraries are loaded and the ranks connected.
    """

    def __init__(
        self, entry: Entry, workload: Workload, *, size: int, program: str = RANK_PROGRAM
    ) -> None:
        self.entry, self._workload, self._size = entry, workload, size
        self._program = program if entry.tree is None else RANK_PROGRAM
        self._lines: list[Any] = []  # Any: typeshed has no public name for what makefile returns
        self.pids: list[int] = []
        self.baseline_nbytes: list[int] = []

    def __enter__(self) -> Crew:
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="scaling-")))
            self._log = stack.enter_context((folder / "log").open("w+b"))
            address = str(folder / "socket")
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(address)
                listener.listen(self._size)
                self._process = self._start(address)
                stack.callback(self._kill)
                hellos = [self._accept(listener, stack) for _ in range(self._size)]
            hellos.sort(key=lambda hello: hello[0]["rank"])
            self._lines = [lines for _, lines in hellos]
            self.pids = [hello["pid"] for hello, _ in hellos]
            self.baseline_nbytes = [hello["baseline_nbytes"] for hello, _ in hellos]
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.ask("end")
                for lines in self._lines:
                    lines.close()
                # By themselves; exit codes do not matter once all has been answered.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(END_TIMEOUT_S)
        finally:
            self._stack.close()

    def ask(self, do: str, **arguments: int | str) -> list[Answer]:
        """Give an order to every rank and return the answers, in rank order.

        Raises:
            HpcZeroError: a rank ended or did not answer.
        """
        order = json.dumps({"do": do, **arguments}) + "\n"
        try:
            for lines in self._lines:
                lines.write(order)
                lines.flush()
            answers = [lines.readline() for lines in self._lines]
        except (BrokenPipeError, ConnectionResetError, TimeoutError):
            answers = [""]
        if not all(answers):
            raise self._failure(f"did not answer {do!r}")
        return [json.loads(answer) for answer in answers]

    def _start(self, address: str) -> subprocess.Popen[bytes]:
        """The launcher of all ranks."""
        entry, size = self.entry, str(self._size)
        order = {
            "module": entry.module,
            "kind": entry.kind,
            "arguments": dict(entry.arguments),
            "workload": dataclasses.asdict(self._workload),
            "address": address,
        }
        python, environment = sys.executable, {**os.environ, "OMP_NUM_THREADS": "1"}
        launcher = [str(LAUNCH), size]
        if entry.start == "gloo":
            launcher = ["bash", "-c", ALL_RANKS, "ranks", size]
            environment |= {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(_free_port()),
                "GLOO_SOCKET_IFNAME": "lo",
                "WORLD_SIZE": size,
            }
        if entry.python == "peers":
            python = str(PEERS_PYTHON)
            environment |= peers_environment()
        return subprocess.Popen(
            [*launcher, python, "-m", self._program, json.dumps(order)],
            cwd=entry.tree or ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _accept(
        self, listener: socket.socket, stack: contextlib.ExitStack
    ) -> tuple[Answer, Any]:  # Any: as in __init__
        """One rank's hello and the lines to and from it."""
        deadline = time.monotonic() + START_TIMEOUT_S
        listener.settimeout(0.2)
        while True:
            try:
                connection, _ = listener.accept()
                break
            except TimeoutError:
                if self._process.poll() not in (None, 0) or time.monotonic() > deadline:
                    raise self._failure("did not start") from None
        stack.enter_context(connection)
        connection.settimeout(ANSWER_TIMEOUT_S)
        lines = stack.enter_context(connection.makefile("rw", encoding="utf-8"))
        return json.loads(lines.readline()), lines

    def _failure(self, what: str) -> HpcZeroError:
        self._log.seek(0)
        said = self._log.read().decode(errors="replace").splitlines()[-30:]
        return HpcZeroError(
            f"{self.entry.name}: {what}; the last it said was\n" + "\n".join(said or ["(nothing)"])
        )

    def _kill(self) -> None:
        """End whatever is left, the launcher's children included."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@dataclass(frozen=True)
class TurnOptions(Common):
    """Options of measurements whose contenders take turns.

    Attributes:
        rounds: measured turns of each contender; from 6 on there is a 95 % interval of the median.
        turn_s: shortest time a turn should take; the steps of a turn follow from it, equal for all.
        warm_up: steps before the first round, whose losses are compared too.
        quick: a tiny model and two short rounds, to see that everything runs; the times mean nothing. Without
            --results the rows go to runs/scaling.
    """

    rounds: int = 7
    turn_s: float = 2.0
    warm_up: int = 3
    quick: tyro.conf.UseCounterAction[int] = 0  # a bare --quick; a bool would be --quick true

    def __post_init__(self) -> None:
        at_least(self, rounds=1, warm_up=1)
        if not 0 < self.turn_s < math.inf:
            raise ConfigError(f"--turn_s: got {self.turn_s}, expected seconds above 0")

    @property
    def timing(self) -> tuple[int, float]:
        """(rounds, shortest turn in seconds) that are meant."""
        return (2, 0.05) if self.quick else (self.rounds, self.turn_s)

    @property
    def folder(self) -> str | None:
        """Of the results."""
        return self.results or ("runs/scaling" if self.quick else None)


@dataclass(frozen=True)
class Ready:
    """Crews that are built and warm."""

    losses: dict[str, list[float]]  # of each contender every step so far
    settings: dict[str, Answer]  # of each contender
    steps: int  # of a turn


def warm_up(crews: Sequence[Crew], steps: int, turn_s: float) -> Ready:
    """Build, take a first step and ``steps`` more; turns of the quickest contender then take ``turn_s`` or longer."""
    losses, settings, fastest = {}, {}, math.inf
    for crew in crews:
        name = crew.entry.name
        settings[name] = crew.ask("build")[0]["settings"]
        first, rest = crew.ask("turn", steps=1), crew.ask("turn", steps=steps)
        losses[name] = _mean_losses(first) + _mean_losses(rest)
        fastest = min(fastest, max(answer["seconds"] for answer in rest) / steps)
    return Ready(losses, settings, max(1, math.ceil(turn_s / fastest)))


def turns(
    crews: Sequence[Crew],
    ready: Ready,
    rounds: int,
    order: random.Random,
    check: Callable[[dict[str, list[float]]], object],
    *,
    program: str = "",
) -> Iterator[Row]:
    """A row of each turn; ``check`` sees all losses after each round. ``program``: whose progress is told."""
    for number, turn in in_turns(crews, rounds, order, program=program):
        for crew in turn:
            row = _take_turn(crew, crews, ready.steps)
            ready.losses[crew.entry.name] += row.pop("losses")
            yield {"kind": "turn", "round": number, **row}
        check(ready.losses)


def _take_turn(crew: Crew, crews: Sequence[Crew], steps: int) -> Row:
    """Wake one contender; watch that the others sleep and how much the rest of the machine works."""
    sleepers = [pid for other in crews if other is not crew for pid in other.pids]

    def counters() -> tuple[float, float, float]:
        return process_seconds(crew.pids), process_seconds(sleepers), machine_seconds()

    before, begin = counters(), time.perf_counter()
    answers = crew.ask("turn", steps=steps)
    window_s = time.perf_counter() - begin
    own, sleeping, machine = (now - then for now, then in zip(counters(), before, strict=True))
    return {
        "contender": crew.entry.name,
        "steps": steps,
        **{name: [a[name] for a in answers] for name in ("seconds", "cpu_s", "page_faults")},
        "window_s": window_s,
        "sleeping_cpu_s": sleeping,
        "foreign_cpu_s": max(machine - own - sleeping, 0.0),
        "losses": _mean_losses(answers),
    }


def _mean_losses(answers: Sequence[Answer]) -> list[float]:
    """Loss of each step, the mean over ranks."""
    of_steps = zip(*(answer["losses"] for answer in answers), strict=True)
    return [math.fsum(ranks) / len(ranks) for ranks in of_steps]


def end_on_sigterm() -> None:
    """Let SIGTERM end this process through the ends of its crews."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def peers_environment() -> dict[str, str]:
    """What DeepSpeed needs to find in its environment: no device, and its operators compiled beforehand.

    Raises:
        ConfigError: install/peers.sh has not been run.
    """
    if not PEERS_PYTHON.exists():
        raise ConfigError("DeepSpeed is not set up; type: install/peers.sh")
    folder = PEERS_PYTHON.parents[1]
    return {
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": str(folder / "extensions"),
        # its loader asks the ninja of this environment whether an operator is up to date
        "PATH": f"{PEERS_PYTHON.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
