"""Jobs of the tests from a process that has imported torch already: most of a short job is that import.

Owns: the server, which forks for each job, and which jobs may be forked. Must not know: pytest, MPI, what jobs do, how
a process becomes one (``forked.py``).

A job is a process of its own as it would be without: with its arguments, environment, folder, files, cores and signals,
its own ``__main__``, in the namespaces that it was started in, and neither mpi4py nor h5py imported. Of hpczero it has
what needs neither; where that is of another checkout it is forgotten. A launcher knows the shim (``shim.py``), which
lives as long. At its end a job takes apart what it has made and imported itself, and nothing that it has from the
server: that took longer than a short job. Jobs that look at imports, memory or threads, or that set what is read when a
process starts, start anew: see ``forked`` and the marker ``fresh``.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import marshal
import os
import resource
import selectors
import shlex
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tests.helpers.forked import End, become, enter, others
from tests.helpers.shim import standing

ROOT = Path(__file__).resolve().parents[2]
SHIM = Path(__file__).with_name("shim.py")
LAUNCHER = os.fspath(ROOT / "install" / "launch.sh")
IMPORTED = (
    "torch",
    "torch._dynamo",
    "torch.profiler._cupti_monitor",
    "numpy.ctypeslib",
    "numpy.typing",
    "tyro",
    "rich.progress",
    "tokenizers",
    "safetensors.torch",
    "xxhash",
    "matplotlib.backends.backend_agg",
    "tomllib",
    "tyro._backends._tyro_backend",
    "tyro._backends._tyro_help_formatting",
    "tyro.constructors._struct_spec_attrs",
    "tyro.constructors._struct_spec_dataclass",
    "tyro.constructors._struct_spec_flax",
    "tyro.constructors._struct_spec_ml_collections",
    "tyro.constructors._struct_spec_msgspec",
    "tyro.constructors._struct_spec_pydantic",
)
# Rooms of hpczero that few jobs use, or that import what takes long.
FEW = ("bridge", "doctor", "fabric", "finetune", "hf", "preflight")
# Read by the C library, Python or torch when a process starts, or of what it has open then: by PMI_FD a rank talks to
# the launcher of MPICH.
FIXED = (
    "PMI_FD",
    "PYTHON",
    "MALLOC",
    "GLIBC",
    "LD_",
    "OMP_",
    "MKL_",
    "KMP_",
    "GOMP_",
    "TORCH",
    "PYTORCH",
    "CUDA",
)
# Not read then, or done by what is forked. torch sets the last itself, when it makes its first optimizer.
NOT_FIXED = ("PYTHON", "PYTHONPATH", "CUDA_VISIBLE_DEVICES", "TORCHINDUCTOR_CACHE_DIR")
TOLD = ("PYTHONFAULTHANDLER", "PYTHONUNBUFFERED")
BASE = {"PYTHONPATH": os.fspath(ROOT), "OMP_NUM_THREADS": "1"}
REFUSED = "refused"  # a file beside the socket, a byte for each
LIBRARIES = "LD_LIBRARY_PATH"
PYTHON = "STANDS_FOR_PYTHON"  # what a job is to take for its interpreter
LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_DATA, resource.RLIMIT_NOFILE, resource.RLIMIT_STACK)
POPEN = subprocess.Popen  # a test may put Forked in its place
LIBC = ctypes.CDLL(None)
WITHOUT = ("mpi4py", "h5py")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
LIMITS_AT_START = [resource.getrlimit(limit) for limit in LIMITS]


class ForkServer:
    """The server of this process, started when it is first needed; it ends with this process."""

    def __init__(self) -> None:
        self.off = os.environ.get("HPCZERO_TEST_FORK") == "0"
        self._server: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._path = ""
        self._anew = 0
        self._starting = threading.Lock()  # a test may start its first jobs from several threads

    def forked(self, command: tuple[str, ...], environment: Mapping[str, str]) -> tuple[str, ...]:
        """``command`` by way of the server if it starts Python in the plain way, else as it is."""
        after = 1
        if LAUNCHER in command[:2] and "HPCZERO_LAUNCH" not in environment:
            after = command.index(LAUNCHER) + 3  # other words before may change what a process is
        if self.off or len(command) < after + 1 or command[after - 1] != sys.executable:
            return command
        plain = command[after] in ("-m", "-c") or command[after].endswith(".py")
        limits = [resource.getrlimit(limit) for limit in LIMITS]
        if not plain or not _fits(environment, limits, _environment()):
            self._anew += 1
            return command
        return (*command[:after], *self._shim(), *command[after:])

    def cpu_seconds(self) -> float:
        """Processor time of the server and of the jobs that have ended, with what those waited for."""
        if self._server is None:
            return 0.0
        fields = Path(f"/proc/{self._server.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / TICKS_PER_S

    def anew(self) -> int:
        """How many Python jobs could not be forked so far: those refused here and those that the server refused."""
        refused = Path(self._path).with_name(REFUSED) if self._path else None
        return self._anew + (refused.stat().st_size if refused and refused.exists() else 0)

    def write_python(self, path: Path) -> None:
        """Make ``path`` a program that is ``python``, and starts by way of the server where it is called plainly."""
        _write_python(path, () if self.off else self._shim())

    def _shim(self) -> tuple[str, ...]:
        with self._starting:
            return ("-I", "-S", os.fspath(SHIM), self._started())

    def _started(self) -> str:
        if self._server is None:
            self._folder = tempfile.TemporaryDirectory(prefix="hpczero-fork-")
            self._path = os.path.join(self._folder.name, "socket")
            ready, said = os.pipe()
            own = os.path.join(self._folder.name, os.path.basename(sys.executable))
            _write_python(Path(own), ("-I", "-S", os.fspath(SHIM), self._path))
            self._server = POPEN(
                [_interpreter(), "-m", "tests.helpers.forkserver", self._path, str(said), own],
                stdin=subprocess.PIPE,
                env=_environment(),
                pass_fds=[said],
                cwd=ROOT,
            )
            os.close(said)
            if not os.read(ready, 1):
                raise RuntimeError("the fork server of the tests has not started")
            os.close(ready)
        return self._path


def _interpreter() -> str:
    """Python itself, also in a job of a server: what stands for it there hands on no files but the first three."""
    own = os.path.join(sys.exec_prefix, "bin", os.path.basename(sys.executable))
    return own if os.path.exists(own) else sys.executable


def _write_python(path: Path, shim: Sequence[str]) -> None:
    python = shlex.quote(_interpreter())
    served = f"{PYTHON}={shlex.quote(os.fspath(path))} exec {python} {shlex.join(shim)}"
    plain = f'case "$1" in -m | -c | *.py) {served} "$@" ;; esac\n' if shim else ""
    path.write_text(f'#!/bin/sh\n{plain}exec {python} "$@"\n')
    path.chmod(0o755)


def _fits(environment: Mapping[str, str | None], limits: object, base: Mapping[str, str]) -> bool:
    """Whether a process with these is as one that the server, which has those of ``base``, forks."""
    names = {name for name in {*environment, *base} if name.startswith(FIXED)}
    names -= {*NOT_FIXED, *(name for name in TOLD if not base.get(name))}
    same = all(environment.get(name) == base.get(name) for name in names)
    return same and limits == LIMITS_AT_START


def _environment() -> dict[str, str]:
    return {**os.environ, **BASE}


server = ForkServer()


class Forked(subprocess.Popen[Any]):
    """In place of ``subprocess.Popen`` where the code under test starts jobs itself."""

    def __init__(self, args: Sequence[str], **how: Any) -> None:
        environment = how.get("env")
        command = server.forked(tuple(args), os.environ if environment is None else environment)
        super().__init__(command, **how)


# --- in the server


def serve(path: str, said: int, python: str) -> None:
    """Fork a process for each connection, until stdin ends. In the processes that are forked this does not return."""
    base = dict(os.environ)  # imports add to it
    ends: list[End] = []
    atexit.register(lambda: ends[0]())  # the first, so the last that a job calls
    for name in IMPORTED:
        with contextlib.suppress(ImportError):  # a job that needs it says so better
            __import__(name)
    _import_own()
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]  # jobs have their own
    own = standing()
    ends.append(End())
    for made in gc.get_objects():
        if type(made) is weakref.finalize:  # isinstance would ask each object, and some warn
            made.atexit = False  # the server's, not a job's
    # C calls these last to first: what the job's own libraries have registered, fflush(NULL), and then no destructors
    # of torch, which are half of a short job's time.
    LIBC.on_exit(LIBC._exit, None)
    LIBC.__cxa_atexit(LIBC.fflush, None, None)
    gc.collect()
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    woken, wake = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    selector = selectors.DefaultSelector()
    for ready in (listener, woken, sys.stdin.fileno()):
        selector.register(ready, selectors.EVENT_READ)
    jobs: dict[int, socket.socket] = {}
    os.write(said, b"1")
    os.close(said)
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                connection, _ = listener.accept()
                job, files = _receive(connection)
                # A launcher may say where its libraries lie: to ranks that have theirs it is nothing new.
                fits = job is not None and _fits(
                    {**job["env"], LIBRARIES: base.get(LIBRARIES)}, job["limits"], base
                )
                away = others(job["namespaces"]) if job is not None else None
                if job is None or not fits or job["standing"] != own or away is None:
                    if job is not None:
                        _tell(connection, 0)  # the shim starts it anew
                        with Path(path).with_name(REFUSED).open("a") as refused:
                            refused.write("x")
                    for file in files:
                        os.close(file)
                    connection.close()
                    continue
                pid = os.fork()
                if not pid:
                    # By their objects: these would close the numbers again at the end, which are others' by then.
                    selector.close()
                    for mine in (listener, *jobs.values()):
                        mine.close()
                    _begin(job, files, away, connection, job["env"].pop(PYTHON, python))
                for file in files:
                    os.close(file)
                jobs[pid] = connection
                selector.register(connection, selectors.EVENT_READ, pid)
            elif key.fileobj == woken:
                while True:
                    with contextlib.suppress(BlockingIOError):
                        os.read(woken, 1024)
                    with contextlib.suppress(ChildProcessError):
                        pid, status = os.waitpid(-1, os.WNOHANG)
                        if pid:
                            connection = jobs.pop(pid)
                            with contextlib.suppress(KeyError):
                                selector.unregister(connection)
                            _tell(connection, status)
                            connection.close()
                            continue
                    break
            elif key.data is not None:  # the shim is gone: its job was killed
                selector.unregister(key.fileobj)
                if key.data in jobs:
                    os.kill(key.data, signal.SIGKILL)
            else:  # stdin: who started us is gone
                for pid in jobs:
                    os.kill(pid, signal.SIGKILL)
                os._exit(0)


def _import_own() -> None:
    """What of hpczero needs neither MPI, which must start in each job, nor HDF5."""
    for name in WITHOUT:
        sys.modules[name] = None  # type: ignore[assignment]  # importing it fails, and so does what needs it
    for path in sorted((ROOT / "hpczero").rglob("*.py")):
        words = path.relative_to(ROOT).with_suffix("").parts
        if words[1] not in FEW and words[-1] not in ("__init__", "__main__"):
            with contextlib.suppress(ImportError):
                __import__(".".join(words))
    for name in WITHOUT:
        del sys.modules[name]


def _begin(
    job: dict[str, Any], files: list[int], away: list[str], connection: socket.socket, python: str
) -> NoReturn:
    """Go into the namespaces of the shim, tell it our number there, and become the job."""
    process, _, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    try:
        enter(away, process)
    except OSError:
        _tell(connection, 0)  # the shim starts it anew
        os._exit(0)
    _tell(connection, os.getpid())
    connection.close()
    become(job, files, python)


def _receive(connection: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    head, files, _, _ = socket.recv_fds(connection, 8, 3)
    if len(head) < 8 or len(files) < 3:
        return None, []
    left, found = int.from_bytes(head, "little"), b""
    while len(found) < left:
        more = connection.recv(left - len(found))
        if not more:
            return None, []
        found += more
    return marshal.loads(found), files


def _tell(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(number.to_bytes(8, "little"))


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), sys.argv[3])
