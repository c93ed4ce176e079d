"""The folder of Open MPI's jobs on this machine, kept while tests run.

Owns: one folder inside of it. Must not know: pytest, what jobs do.

Each ``mpirun`` of Open MPI 4 makes ``ompi.HOST.USER`` in the folder for temporary files if it is not there, and at its
end removes it if it is empty. Of jobs that begin and end side by side one in some hundreds finds it gone, or made by
another, between two of its calls, and ends with 1 before it has started a rank ("orte_session_dir failed").
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def kept_session_folder() -> Iterator[Path]:
    """Keep it from being empty, so that no ``mpirun`` removes it; yields it."""
    named = (os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP"))  # as Open MPI looks
    base = Path(next(filter(None, named), "/tmp"))
    folder = base / f"ompi.{os.uname().nodename.partition('.')[0]}.{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    kept = Path(tempfile.mkdtemp(prefix="hpczero-tests-", dir=folder))
    try:
        yield folder
    finally:
        with suppress(OSError):  # jobs of others may go on in it
            kept.rmdir()
            folder.rmdir()
