"""What stands for ``python`` in a job that the fork server runs: hands itself over, then is what the job is.

Run as ``python -I -S shim.py SOCKET arguments...``. Owns: signals and the exit of the process that a launcher knows.
Must not know: anything that takes time to import.
"""

import _socket  # socket takes ten times as long to import
import marshal
import os
import signal
import sys
from resource import RLIMIT_AS, RLIMIT_DATA, RLIMIT_NOFILE, RLIMIT_STACK, getrlimit

LIMITS = (RLIMIT_AS, RLIMIT_DATA, RLIMIT_NOFILE, RLIMIT_STACK)
PASSED_ON = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGCONT")


def namespaces() -> dict[str, str]:
    """Those that a process is in, by kind."""
    return {name: os.readlink(f"/proc/self/ns/{name}") for name in os.listdir("/proc/self/ns")}


def standing() -> list[str]:
    """What a process has from whoever started it, and a forked one from the server: rights, its group."""
    with open("/proc/self/status") as status:
        rights = ("Uid", "Gid", "Cap", "NoNewPrivs", "Seccomp")
        found = [line for line in status if line.startswith(rights)]
    with open("/proc/self/cgroup") as groups:
        return found + list(groups)


def main() -> None:
    """Ask for the job, pass signals on to it, end as it ends."""
    numbers = [getattr(signal, name) for name in PASSED_ON]
    ignored = [
        int(n) for n in numbers if n != signal.SIGINT and signal.getsignal(n) is signal.SIG_IGN
    ]
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # until there is somebody to pass them to
    umask = os.umask(0)
    os.umask(umask)
    job = marshal.dumps(
        {
            "args": sys.argv[2:],
            "env": dict(os.environ),
            "cwd": os.getcwd(),
            "umask": umask,
            "cores": sorted(os.sched_getaffinity(0)),
            "ignored": ignored,
            "limits": [getrlimit(limit) for limit in LIMITS],
            "standing": standing(),
            "namespaces": namespaces(),
        }
    )
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    connection.connect(sys.argv[1])
    files = b"".join(n.to_bytes(4, sys.byteorder) for n in (0, 1, 2))
    head = len(job).to_bytes(8, "little")
    connection.sendmsg([head], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, files)])
    view = memoryview(job)
    while view:
        view = view[connection.send(view) :]
    pid = int.from_bytes(receive(connection), "little")
    if not pid:  # it has what is read when a process starts
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
        os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
    for number in numbers:
        if number not in ignored:
            signal.signal(number, lambda number, frame: kill(pid, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    status = int.from_bytes(receive(connection), "little")
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        os._exit(128 + number)  # the first process of a namespace, which its own signals do not end
    os._exit(os.WEXITSTATUS(status))


def kill(pid: int, number: int) -> None:
    """Pass a signal on."""
    try:  # noqa: SIM105  (contextlib takes time to import)
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def receive(connection: _socket.socket) -> bytes:
    """Eight bytes; without them the server is gone, and so is the job."""
    found = b""
    while len(found) < 8:
        more = connection.recv(8 - len(found))
        if not more:
            os._exit(121)
        found += more
    return found


if __name__ == "__main__":
    main()
