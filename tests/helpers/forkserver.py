"""Jobs of the tests from a process that has imported torch already: most of a short job is that import.

Owns: the server, which forks for each job, and which jobs may be forked. Must not know: pytest, MPI, what jobs do.

A job is a process of its own as it would be without: with its arguments, environment, folder, files, cores and signals,
its own ``__main__``, and neither hpczero nor mpi4py nor h5py imported. A launcher knows the shim (``shim.py``), which
lives as long. At its end a job takes apart what it has made and imported itself, and nothing that it has from the
server: that took longer than a short job. Jobs that look at imports, memory or threads, or that set what is read when a
process starts, start anew: see ``forked`` and the marker ``fresh``.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import gc
import marshal
import os
import random
import resource
import runpy
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

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
# Read by the C library, Python or torch when a process starts.
FIXED = (
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
BASE = {"PYTHONPATH": os.fspath(ROOT), "OMP_NUM_THREADS": "1"}
LIBRARIES = "LD_LIBRARY_PATH"
PYTHON = "STANDS_FOR_PYTHON"  # what a job is to take for its interpreter
LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_DATA, resource.RLIMIT_NOFILE, resource.RLIMIT_STACK)
POPEN = subprocess.Popen  # a test may put Forked in its place
LIBC = ctypes.CDLL(None)
KEPT = ("sys", "builtins", "__main__")  # Python itself ends with these
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
LIMITS_AT_START = [resource.getrlimit(limit) for limit in LIMITS]


class ForkServer:
    """The server of this process, started when it is first needed; it ends with this process."""

    def __init__(self) -> None:
        self.off = os.environ.get("HPCZERO_TEST_FORK") == "0"
        self._server: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._path = ""

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
            return command
        return (*command[:after], *self._shim(), *command[after:])

    def cpu_seconds(self) -> float:
        """Processor time of the server and of the jobs that have ended, with what those waited for."""
        if self._server is None:
            return 0.0
        fields = Path(f"/proc/{self._server.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / TICKS_PER_S

    def write_python(self, path: Path) -> None:
        """Make ``path`` a program that is ``python``, and starts by way of the server where it is called plainly."""
        _write_python(path, () if self.off else self._shim())

    def _shim(self) -> tuple[str, ...]:
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
    names = {name for name in {*environment, *base} if name.startswith(FIXED)} - {"PYTHONPATH"}
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
    shared: list[ModuleType] = []
    atexit.register(_spare, shared)  # the first, so the last that a job calls
    for name in IMPORTED:
        with contextlib.suppress(ImportError):  # a job that needs it says so better
            __import__(name)
    own = standing()
    shared += [module for name, module in sys.modules.items() if name not in KEPT]
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
                if job is None or not fits or job["standing"] != own:
                    if job is not None:
                        _tell(connection, 0)  # the shim starts it anew
                    for file in files:
                        os.close(file)
                    connection.close()
                    continue
                pid = os.fork()
                if not pid:
                    # By their objects: these would close the numbers again at the end, which are others' by then.
                    selector.close()
                    for mine in (listener, connection, *jobs.values()):
                        mine.close()
                    _become(job, files, job["env"].pop(PYTHON, python))
                for file in files:
                    os.close(file)
                jobs[pid] = connection
                _tell(connection, pid)
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


# --- in a job


def _spare(shared: list[ModuleType]) -> None:
    """Keep modules that the server imported from being taken apart at the end, which copies their every page.

    What the job itself has made and imported is taken apart as ever.
    """
    found = {id(module) for module in shared}
    for name, module in list(sys.modules.items()):
        if id(module) in found:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))
            del sys.modules[name]


def _become(job: dict[str, Any], files: list[int], python: str) -> NoReturn:
    """Be the process that ``python ARGS`` would have been, from here to its end; what it starts comes here too."""
    sys.executable = python
    os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.closerange(3, 1024)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in job["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    os.chdir(job["cwd"])
    os.umask(job["umask"])
    os.sched_setaffinity(0, job["cores"])
    os.environ.clear()
    os.environ.update(job["env"])
    random.seed()
    if "numpy" in sys.modules:
        sys.modules[
            "numpy"
        ].random.seed()  # as in a process of its own: ranks must not be alike by chance
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    kind, *args = job["args"]
    sys.orig_argv = [sys.executable, *job["args"]]
    own = {os.fspath(ROOT), "", os.getcwd()}
    paths = [path for path in job["env"].get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = paths + [path for path in sys.path if path not in own]
    try:
        if kind == "-m":
            sys.argv = args
            sys.path.insert(0, job["cwd"])
            runpy._run_module_as_main(args[0])  # type: ignore[attr-defined]  # what `python -m` itself calls
        elif kind == "-c":
            sys.argv = ["-c", *args[1:]]
            sys.path.insert(0, "")
            exec(compile(args[0], "<string>", "exec"), main.__dict__)
        else:
            sys.argv = [kind, *args]
            sys.path.insert(0, os.path.dirname(os.path.realpath(kind)))
            main.__dict__["__file__"] = kind
            exec(compile(Path(kind).read_bytes(), kind, "exec"), main.__dict__)
    except SystemExit:
        raise
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        error.__traceback__ = trace
        sys.last_value = error  # as Python does
        sys.excepthook(type(error), error, trace)
        sys.exit(1)
    sys.exit(0)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), sys.argv[3])
