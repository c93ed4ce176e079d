"""What a process that the fork server has forked does: it becomes the job.

Owns: the namespaces that it goes into, what it has from the job's start, and its end. Must not know: pytest, MPI, how
jobs come to the server.
"""

from __future__ import annotations

import builtins
import ctypes
import faulthandler
import gc
import io
import os
import random
import resource
import runpy
import signal
import sys
import threading
import weakref
from collections.abc import Iterable
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
OWN = os.fspath(ROOT / "hpczero" / "__init__.py")  # what the server has imported
ENTERED = ("cgroup", "ipc", "mnt", "net", "pid", "uts")
LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG = 1
KEPT = ("sys", "builtins", "__main__")  # Python itself ends with these
EXIT_FLUSH = 120  # Python's own, where its output cannot be written


def others(namespaces: dict[str, str]) -> list[str] | None:
    """Which of a job's namespaces are not ours; None if a process cannot go into all that are not.

    Args:
        namespaces: as of ``shim.namespaces``.
    """
    found = [name for name, link in namespaces.items() if link != _namespace(name)]
    if namespaces["pid"] != namespaces["pid_for_children"]:
        return None
    names = [name for name in found if name != "pid_for_children"]
    return names if set(names) <= set(ENTERED) else None


def _namespace(name: str) -> str:
    return os.readlink(f"/proc/self/ns/{name}")


def enter(names: Iterable[str], process: int) -> None:
    """Go into these namespaces of another process; where there are other numbers of processes, as a child of ours.

    Raises:
        OSError: the process is gone, or the kernel refuses.
    """
    files = {name: os.open(f"/proc/{process}/ns/{name}", os.O_RDONLY) for name in names}
    if "pid" in files:
        _set_namespace(files.pop("pid"))  # of children: the caller keeps its number
        child = os.fork()
        if child:
            _stand_for(child)
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for file in files.values():
        _set_namespace(file)


def _set_namespace(file: int) -> None:
    if LIBC.setns(file, 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    os.close(file)


def _stand_for(child: int) -> NoReturn:
    """End as ``child`` ends; the server cannot wait for it."""
    signal.set_wakeup_fd(-1)
    os.closerange(0, 1024)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


class End:
    """How a job ends, from the moment at which Python has called all that was to be called then.

    Python would go through all modules that the server has imported, which copies their every page and takes longer
    than a short job. What the job itself has made and imported is taken apart as Python does it.
    """

    code: int | None = None
    """Of the process; None until the job has come to its end."""

    def __init__(self) -> None:
        """In the server, when it has imported all that it shares."""
        self._shared = [module for name, module in sys.modules.items() if name not in KEPT]
        # To look at the modules would copy their pages
        self._known = frozenset(map(id, self._shared))

    def __call__(self) -> None:
        """End the process, or leave it to Python where other threads would see it; the last call of atexit."""
        failed = End.code is None or (End.code and "mpi4py.MPI" in sys.modules)  # mpi4py may abort
        if failed or threading.active_count() > 1 or not self._flushed():
            self._spare()
            return
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        mpi: Any = sys.modules.get("mpi4py.MPI")
        ends = mpi is not None and sys.modules["mpi4py"].rc.finalize is not False
        calls = (mpi.Is_initialized, mpi.Is_finalized, mpi.Finalize) if mpi and ends else None
        mpi = None
        self._take_apart()
        if not self._flushed():
            End.code = EXIT_FLUSH
        if calls is not None and calls[0]() and not calls[1]():
            calls[2]()
        LIBC.exit(End.code)

    def _take_apart(self) -> None:
        own = []
        for name in reversed(sys.modules):
            if id(sys.modules[name]) in self._known:
                break
            own.append(name)
        own = [name for name in reversed(own) if name not in KEPT] + ["__main__"]
        left = [
            weakref.ref(sys.modules[name])
            for name in own
            if isinstance(sys.modules[name], ModuleType)
        ]
        for name in own:
            sys.modules[name] = None  # type: ignore[assignment]  # as Python does
        for name in own:
            del sys.modules[name]
        gc.collect()
        for reference in reversed(left):
            module = reference()
            if module is not None:
                ctypes.pythonapi._PyModule_Clear(ctypes.py_object(module))
        module = None
        gc.collect()

    def _spare(self) -> None:
        """Keep the server's modules from being taken apart by Python."""
        for name, module in list(sys.modules.items()):
            if id(module) in self._known:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))
                del sys.modules[name]

    @staticmethod
    def _flushed() -> bool:
        try:
            for stream in (sys.stdout, sys.stderr):
                if stream is not None and not stream.closed:
                    stream.flush()
        except (OSError, ValueError):
            return False
        return True


def become(job: dict[str, Any], files: list[int], python: str) -> NoReturn:
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
    _do_as_told(job["env"])
    random.seed()
    if "numpy" in sys.modules:
        sys.modules[
            "numpy"
        ].random.seed()  # as in a process of its own: ranks must not be alike by chance
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
            _forget_another()
            if not hasattr(sys.modules.get(args[0]), "__path__"):
                sys.modules.pop(args[0], None)  # it is about to be __main__
            runpy._run_module_as_main(args[0])  # type: ignore[attr-defined]  # what `python -m` itself calls
        elif kind == "-c":
            sys.argv = ["-c", *args[1:]]
            sys.path.insert(0, "")
            _forget_another()
            exec(compile(args[0], "<string>", "exec"), main.__dict__)
        else:
            sys.argv = [kind, *args]
            sys.path.insert(0, os.path.dirname(os.path.realpath(kind)))
            _forget_another()
            main.__dict__["__file__"] = kind
            exec(compile(Path(kind).read_bytes(), kind, "exec"), main.__dict__)
    except SystemExit as ended:
        code = ended.code
        End.code = 0 if code is None else code & 0xFF if isinstance(code, int) else 1
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
        End.code = 1
        sys.exit(1)
    End.code = 0
    sys.exit(0)


def _do_as_told(environment: dict[str, str]) -> None:
    """What Python does at its start where these are set."""
    if environment.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    if environment.get("PYTHONUNBUFFERED"):
        python: Any = sys  # whose __stdout__ types take for constant
        python.stdout = python.__stdout__ = _unbuffered(sys.stdout, 1)
        python.stderr = python.__stderr__ = _unbuffered(sys.stderr, 2)


def _unbuffered(stream: Any, number: int) -> io.TextIOWrapper:
    raw: Any = io.FileIO(number, "w", closefd=False)  # no buffer, as Python itself does it
    raw.name = stream.name
    how = {"encoding": stream.encoding, "errors": stream.errors, "newline": "\n"}
    return io.TextIOWrapper(raw, **how, line_buffering=stream.line_buffering, write_through=True)


def _forget_another() -> None:
    """Leave hpczero to be imported where the job has another one, such as that of an older commit."""
    found = PathFinder.find_spec("hpczero", sys.path)
    if found is None or found.origin != OWN:
        for name in [name for name in sys.modules if name.partition(".")[0] == "hpczero"]:
            del sys.modules[name]
