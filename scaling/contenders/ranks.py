"""Crew: all ranks of one contender, seen from the command that measures.

Owns: their processes and the socket to each. Must not know: what they train, torch. Orders go to all ranks at once and
are answered by all; an order is one JSON line and so is the answer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpczero.errors import ConfigError, HpcZeroError
from scaling.contenders import RANK_PROGRAM, Entry, rank_program
from scaling.contenders.workload import Workload
from scaling.evidence.record import LAUNCH, ROOT

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
        self,
        entry: Entry,
        workload: Workload,
        *,
        size: int,
        program: str = RANK_PROGRAM,
    ) -> None:
        self.entry = entry
        self._workload = workload
        self._size = size
        self._program = program if entry.tree is None else rank_program(entry.tree) or program
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lines: list[Any] = []  # Any: typeshed has no public name for what makefile returns
        self.pids: list[int] = []
        self.baseline_nbytes: list[int] = []

    def __enter__(self) -> Crew:
        with contextlib.ExitStack() as stack:
            stack.callback(self._kill)
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="scaling-")))
            self._log = stack.enter_context((folder / "log").open("w+b"))
            address = str(folder / "socket")
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(address)
                listener.listen(self._size)
                self._start(address)
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
                self._wait()
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

    def _start(self, address: str) -> None:
        order = {
            "module": self.entry.module,
            "arguments": dict(self.entry.arguments),
            "workload": dataclasses.asdict(self._workload),
            "address": address,
        }
        command = ["-m", self._program, json.dumps(order)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if self.entry.start == "mpi":
            launcher = [str(LAUNCH), str(self._size)]
            self._spawn([*launcher, sys.executable, *command], environment)
            return
        environment |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "GLOO_SOCKET_IFNAME": "lo",
            "WORLD_SIZE": str(self._size),
        }
        python = sys.executable
        if self.entry.python == "peers":
            python = str(PEERS_PYTHON)
            environment |= peers_environment()
        self._spawn(
            ["bash", "-c", ALL_RANKS, "ranks", str(self._size), python, *command], environment
        )

    def _spawn(self, command: Sequence[str], environment: dict[str, str]) -> None:
        process = subprocess.Popen(
            command,
            cwd=self.entry.tree or ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._processes.append(process)

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
                ended = any(process.poll() not in (None, 0) for process in self._processes)
                if ended or time.monotonic() > deadline:
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

    def _wait(self) -> None:
        """Let the processes end by themselves; exit codes do not matter once all has been answered."""
        deadline = time.monotonic() + END_TIMEOUT_S
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.0))

    def _kill(self) -> None:
        """End whatever is left, the launcher's children included."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


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
