"""Records: JSON lines that begin with machine, commit, versions and date, and the folder of a machine."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Collection, Iterator, Mapping
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from hpczero.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]  # of the checkout; relative names of results begin here
LAUNCH = ROOT / "install" / "launch.sh"
CHANGED, UNKNOWN = "+changes", "unknown"  # see `commit`

Row = dict[str, Any]  # Any: JSON; each kind of row has its own names

LEFT: Row = {"left": True}  # the last of a job that has said all and ends without MPI's consent


def path_of(name: str, results: str | None) -> Path:
    """Where rows of this machine go.

    Args:
        name: of the files, without suffix.
        results: folder of all machines' results; None: scaling/results.
    """
    return ROOT / (results or "scaling/results") / machine_name() / f"{name}.jsonl"


class Recorder:
    """Writes rows to ``path`` when the measurement is complete; until then they lie beside it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Row] = []
        self._unfinished = path.with_name(f"{path.name}.unfinished")

    def __enter__(self) -> Recorder:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._unfinished.open("w", encoding="utf-8")
        return self

    def write(self, kind: str, values: Mapping[str, Any]) -> None:
        """Add one row; it is on disk when this returns, whatever happens later."""
        row = {"kind": kind, **values}
        self.rows.append(row)
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._file.close()
        if kind is None:
            self._unfinished.replace(self.path)


def read_rows(path: Path) -> list[Row]:
    """All rows of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def parse_rows(path: Path, *, needs: Collection[str] = ()) -> tuple[list[Row], int]:
    """Rows of a file that somebody may have been killed writing: (whole ones, number of malformed lines).

    Args:
        path: of JSON lines.
        needs: names that a row must have; one without them is malformed.
    """
    rows, malformed = [], 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict) and "kind" in row and row.keys() >= set(needs):
            rows.append(row)
        elif line.strip():
            malformed += 1
    return rows, malformed


def of_kind(rows: list[Row], kind: str) -> Iterator[Row]:
    """The rows of one kind, in order."""
    return (row for row in rows if row["kind"] == kind)


def circumstances() -> Row:
    """What a reader must know of any measurement: when, where, with what."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine_name(),
        "cpu": cpu_model(),
        "cores": cores(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "commit": commit(),
        "versions": versions("torch", "mpi4py", "numpy"),
    }


def run_row(options: object, names: str, **others: Any) -> Row:
    """The first row of a record: circumstances, the options of these ``names`` (separated by spaces), and others."""
    chosen = {name: getattr(options, name) for name in names.split()}
    return {"kind": "run", **circumstances(), **chosen, **others}


def head_of(rows: list[Row]) -> Row:
    """The row that says what was run, where and when."""
    return next(of_kind(rows, "run"))


def emulated(head: Row) -> str:
    """What stands before any figure of a run between emulated nodes."""
    return "emulated nodes on one machine (not scaling): " if head["emulated"] else ""


def where_and_when(head: Row) -> str:
    """Machine, commit and day of a run, for titles. Args: head, its row of ``circumstances``."""
    return f"{head['cpu']}, {head['cores']} cores, commit {head['commit']}, {head['date'][:10]}"


def machine_name() -> str:
    """Name of the folder of this machine's results, such as ``amd-epyc-2-cores``."""
    return slug(f"{cpu_model()} {cores()} cores")


def slug(text: str) -> str:
    """Lower case, with single hyphens for all that is neither letter nor digit; trade marks left out."""
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)", "", text.lower())).strip("-")


def cpu_model() -> str:
    """As the kernel calls it; the architecture where it does not."""
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found.group(1) if found else platform.machine()


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


def commit(tree: Path = ROOT) -> str:
    """Commit of a working tree, with ``+changes`` if it differs; ``unknown`` where git cannot tell."""

    def git(*args: str) -> str:
        command = ["git", *args]
        return subprocess.run(
            command, cwd=tree, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        head = git("rev-parse", "--short=12", "HEAD")
        # Results of other runs and notes do not change what is measured.
        changed = git("status", "--porcelain", "--", "hpczero", "scaling", ":!scaling/results")
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN
    return f"{head}{CHANGED}" if changed else head


def checkouts(against: str | None, name: str = "against") -> dict[str, Path]:
    """Folders of the code that is compared: ``this``, and under ``name`` that of ``against``, if one is given.

    Raises:
        ConfigError: no checkout is there.
    """
    if against is None:
        return {"this": ROOT}
    if not Path(against, "hpczero").is_dir():
        raise ConfigError(f"--against: got {against}, expected a checkout of hpczero")
    return {"this": ROOT, name: Path(against).resolve()}


def names_code(commit: str) -> bool:
    """Whether two measurements of this ``commit`` have measured the same code."""
    return commit != UNKNOWN and not commit.endswith(CHANGED)


def mpi_library() -> str:
    """Name and version of the MPI library, such as ``Open MPI v4.1.4``. It starts MPI."""
    from mpi4py import MPI

    return MPI.Get_library_version().split(",")[0].strip("\0 \n")


def versions(*packages: str) -> dict[str, str]:
    """Installed versions; packages that are not installed are left out."""
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
