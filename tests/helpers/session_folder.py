"""The folder of Open MPI's jobs on this machine, kept while tests run.

Each ``mpirun`` of Open MPI 4 makes ``ompi.HOST.USER`` in the folder for temporary files if it is not there, and at its
end removes it if it is empty. Of jobs that begin and end side by side one in some hundreds finds it gone, or made by
another, between two of its calls, and ends with 1 before it has started a rank ("orte_session_dir failed").

Ranks without a launcher all are job 1 of family 0, so they take ``jf.0/1`` from one another in the same way: 5 of
2,000, six at a time. All in it goes at the end of each, but files that begin with ``output-`` and are not empty.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def kept_session_folder() -> Iterator[Path]:
    """Keep it from being empty, so that no job removes it; yields it."""
    named = (os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP"))  # as Open MPI looks
    base = Path(next(filter(None, named), "/tmp"))
    folder = base / f"ompi.{os.uname().nodename.partition('.')[0]}.{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    kept = Path(tempfile.mkdtemp(prefix="hpczero-tests-", dir=folder))
    alone = folder / "jf.0" / "1"
    alone.mkdir(parents=True, exist_ok=True)
    output = alone / f"output-{kept.name}"
    output.write_text("kept\n")
    try:
        yield folder
    finally:
        with suppress(OSError):  # jobs of others may go on in it
            kept.rmdir()
            output.unlink()
            alone.rmdir()
            alone.parent.rmdir()
            folder.rmdir()
