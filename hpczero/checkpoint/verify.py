"""Whether a checkpoint is what was written, by one process, without MPI and without a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from hpczero.checkpoint.disk.folder import misnamed, read_manifest
from hpczero.checkpoint.disk.format import MANIFEST_FILE, STATE_FILE, Manifest, digest
from hpczero.checkpoint.disk.manifest_content import check_content
from hpczero.checkpoint.disk.rawfile import opened, read_at, rest_digest
from hpczero.errors import CheckpointMismatch, CorruptCheckpoint
from hpczero.files.regular import is_there, reason


class Verdict(IntEnum):
    """What ``verify`` exits with."""

    SOUND = 0
    CORRUPT = 2
    INCOMPLETE = 3
    UNSUPPORTED = 4


@dataclass(frozen=True)
class Report:
    """Result for one checkpoint.

    Attributes:
        path: its folder.
        verdict: the result of all checks.
        problems: one line each; the first is the worst.
        manifest: None if it cannot be read.
        read_nbytes: bytes that were checked against their digests.
    """

    path: Path
    verdict: Verdict
    problems: tuple[str, ...] = ()
    manifest: Manifest | None = None
    read_nbytes: int = 0


def verify(path: Path, *, deep: bool = True) -> Report:
    """Examine the checkpoint ``path``. Not collective.

    Args:
        path: folder of one checkpoint.
        deep: whether to read every byte. Otherwise manifest, size and what HDF5 itself needs are checked.
    """
    try:
        missing = [n for n in (MANIFEST_FILE, STATE_FILE) if not is_there(path / n)]
    except OSError as error:
        return Report(path, Verdict.CORRUPT, (f"{path}: cannot be read: {reason(error)}",))
    if missing:
        return Report(path, Verdict.INCOMPLETE, (f"{path}: {' and '.join(missing)} missing",))
    try:
        manifest = read_manifest(path)
        check_content(manifest, path)
    except CheckpointMismatch as error:
        return Report(path, Verdict.UNSUPPORTED, (str(error),))
    except CorruptCheckpoint as error:
        return Report(path, Verdict.CORRUPT, (str(error),))
    wrong = misnamed(path, manifest)
    problems = [wrong] if wrong else []
    try:
        problems += _damaged_slabs(path, manifest) if deep else []
        if rest_digest(path / STATE_FILE, manifest.datasets) != manifest.rest:
            problems.append(
                f"{path}: corrupt: HDF5's own part of {STATE_FILE} (headers, tables, attributes) is not what was "
                "written; hpczero can still load the checkpoint, other readers may fail"
            )
    except (OSError, EOFError) as error:
        why = reason(error) if isinstance(error, OSError) else str(error)
        problems.append(f"{path}: {STATE_FILE} cannot be read: {why}")
    data = sum(dataset.nbytes for dataset in manifest.datasets)
    read = manifest.file_nbytes - (0 if deep else data)
    verdict = Verdict.CORRUPT if problems else Verdict.SOUND
    return Report(path, verdict, tuple(problems), manifest, read)


def _damaged_slabs(path: Path, manifest: Manifest) -> Iterator[str]:
    with opened(path / STATE_FILE) as descriptor:
        for dataset in manifest.datasets:
            for index, expected in enumerate(dataset.digests):
                slab = dataset.slab(index)
                offset = dataset.offset + slab.start * dataset.itemsize
                try:
                    found = digest(read_at(descriptor, offset, len(slab) * dataset.itemsize))
                except (OSError, EOFError) as error:
                    yield f"{path}: {dataset.name} cannot be read: {error}"
                    break
                if found != expected:
                    yield manifest.damage(path, dataset, slab)
