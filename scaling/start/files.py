"""Files that a command looks for and opens: counts of calls of the system, by ``strace``.

Owns: the call of ``strace``, and what each line of its says. Must not know: which commands are counted, the report.
Counts are exact, whatever else the machine does; the command takes several times as long while it is counted.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpczero.errors import ConfigError

# Calls that name a file, by what a server has to do for them.
OPENS = frozenset({"open", "openat", "openat2", "creat"})
LOOKS = frozenset(
    {
        *("stat", "lstat", "newfstatat", "fstatat64", "statx", "access", "faccessat"),
        *("faccessat2", "readlink", "readlinkat", "execve", "statfs", "getxattr"),
    }
)
# Of a line such as: 123 openat(AT_FDCWD, "/a/b", O_RDONLY) = -1 ENOENT (No such file or directory)
_LINE = re.compile(r'^(?:\d+ +)?(\w+)\((?:\w+(?:<[^>]*>)?, )?"((?:[^"\\]|\\.)*)"')
_MISSED = re.compile(r" = -1 E\w+")
# Of one that a call of another thread came between.
_LATER = re.compile(r"^(?:\d+ +)?<\.\.\. (\w+) resumed>")


@dataclass
class Calls:
    """Calls of one process and its children that named a file.

    Attributes:
        opened: files opened.
        looked: files looked at without opening them.
        missed: of both, those that found nothing.
        shared: of both, those below a folder that stands for a shared file system.
        shared_names: different names among the last.
    """

    opened: int = 0
    looked: int = 0
    missed: int = 0
    shared: int = 0
    shared_names: set[str] = field(default_factory=set)

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
        if found is None or found[1] not in OPENS | LOOKS:
            return
        if not found[2]:  # of a file that is open already
            return
        if found[1] in OPENS:
            self.opened += 1
        else:
            self.looked += 1
        self.missed += bool(_MISSED.search(line))
        name = os.path.normpath(found[2])
        if any(f"{name}/".startswith(folder) for folder in shared):
            self.shared += 1
            self.shared_names.add(name)

    def as_row(self) -> dict[str, int]:
        """For a record."""
        return {
            "opened": self.opened,
            "looked": self.looked,
            "missed": self.missed,
            "shared": self.shared,
            "shared_names": len(self.shared_names),
        }


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
