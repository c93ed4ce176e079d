"""Writing a checkpoint: the protocol.

Owns: the order of a save, and that it ends in a whole checkpoint or in none, on all ranks alike. Must not know: models.

    room? | hidden folder, file made by rank 0 | rounds: shards to slabs, digest, write | close, fsync
          | digests to rank 0, manifest | rename | retention

[Note: Errors]
Every stage ends in an agreement. If it fails on any rank, all ranks raise the same error. What was written by then is a
hidden folder, which does not count as a checkpoint.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from hpczero.checkpoint.disk import h5file, writers
from hpczero.checkpoint.disk.folder import Folder
from hpczero.checkpoint.disk.format import STATE_FILE, Dataset, Manifest, digest
from hpczero.checkpoint.disk.lines import strangers
from hpczero.checkpoint.disk.rawfile import rest_digest
from hpczero.checkpoint.exchange import Exchange
from hpczero.checkpoint.snapshot import Part, Snapshot
from hpczero.errors import CheckpointError, CheckpointNotWritten, ConfigError, is_out_of_memory
from hpczero.job.topology import Topology

Milestone = Callable[[str], None]


def write(
    snapshot: Snapshot,
    folder: Folder,
    topology: Topology,
    *,
    writer: str = "auto",
    keep: int | None = None,
    at: Milestone = lambda name: None,
    still_ours: Callable[[], None] = lambda: None,
    lineage: Mapping[Path, int] = MappingProxyType({}),
) -> Path:
    """Write and commit a checkpoint. Collective over topology.world.

    Args:
        snapshot: of all ranks.
        folder: equal on all ranks; locked by the caller.
        topology: its ``world`` carries nothing else meanwhile.
        writer: ``mpio``, ``posix`` or ``auto``.
        keep: newest checkpoints that stay; None removes none.
        at: called with the name of every milestone; tests end the process there.
        still_ours: raises if the lock on the folder was lost. Rank 0 calls it before the commit.
        lineage: that of the model when the snapshot was taken. Checkpoints of another line go to the side.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointNotWritten: on every rank. Older checkpoints are as they were.
    """
    temporary: Path | None = None
    try:
        with _stage(topology, "prepare the checkpoint"):
            if writer != "auto":
                writers.writer_for(writer)  # refuses what cannot be
            text = ""
            if topology.is_root:
                folder.check_room(snapshot.nbytes)
                temporary = folder.begin(snapshot.step)
                at("begun")
                text = json.dumps([str(temporary), *_create_file(snapshot, temporary, writer)])
                at("created")
        path, writer, entries = json.loads(topology.broadcast_text(text))
        temporary = Path(path)
        placed = [Dataset(**{**entry, "digests": ()}) for entry in entries]
        parts = [replace(part, dataset=d) for part, d in zip(snapshot.parts, placed, strict=True)]
        written = _write_parts(
            parts, temporary / STATE_FILE, topology, writers.writer_for(writer), at
        )
        with _stage(topology, "commit the checkpoint"):
            target = folder.path
            if topology.is_root:
                manifest = _manifest(snapshot, temporary / STATE_FILE, written)
                at("digested")
                still_ours()
                others = strangers(
                    folder.candidates(),
                    step=snapshot.step,
                    origin=lineage.get(folder.path.resolve()),
                    keep=keep,
                )
                target = folder.commit(temporary, manifest, others=others, at=at)
                at("committed")
        target = Path(topology.broadcast_text(str(target)))
    except BaseException:
        if topology.is_root and temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    if topology.is_root and keep is not None:
        folder.retain(keep, target)
        at("retained")
    return target


def _create_file(snapshot: Snapshot, folder: Path, writer: str) -> tuple[str, list[dict[str, Any]]]:
    """Create the state file, on rank 0. Returns the writer's name, ``auto`` resolved, and where each dataset lies."""
    datasets, reserved = h5file.create(
        folder / STATE_FILE,
        [part.dataset for part in snapshot.parts],
        snapshot.table,
        snapshot.meta,
        step=snapshot.step,
    )
    if writer == "auto":
        writer = writers.automatic(folder / STATE_FILE, reserved=reserved)
    return writer, [asdict(dataset) for dataset in datasets]


def _manifest(snapshot: Snapshot, state: Path, written: list[Dataset]) -> Manifest:
    """The manifest of the state file as it lies on the disk, on rank 0."""
    now = datetime.datetime.now(datetime.timezone.utc)
    return Manifest(
        step=snapshot.step,
        created=now.isoformat(timespec="seconds"),
        world_size=snapshot.world_size,
        table=snapshot.table,
        datasets=tuple(written),
        file_nbytes=state.stat().st_size,
        rest=rest_digest(state, written),
        meta=snapshot.meta,
    )


def _write_parts(
    parts: list[Part],
    path: Path,
    topology: Topology,
    kind: type[writers.Writer],
    at: Milestone,
) -> list[Dataset]:
    """Fill the datasets, and return them with their digests, complete on rank 0. Collective over world."""
    writer: writers.Writer | None = None
    mine: list[list[str]] = []
    try:
        # Two stages: a rank that cannot open it must not leave the others waiting in MPI-IO.
        with _stage(topology, "open the file"):
            writer = kind(path)
        with (
            topology.watchdog.collective("checkpoint: opening the file"),
            _stage(topology, "join in"),
        ):
            writer.join(topology.world.comm)
        for part in parts:
            dataset = part.dataset
            with _stage(topology, f"read {dataset.name} out of the model"):
                held = part.values()
            exchange = Exchange(topology.world.comm, topology.watchdog, part.held)
            digests: list[str] = []
            for windows in exchange.rounds(dataset):
                window = windows[topology.rank]
                # Before ranks wait for one another: what rests on a tier may be lost on one of them.
                with _stage(topology, f"read {dataset.name} out of the model"):
                    values = [held[place] for place in exchange.places(windows)]
                slabs = exchange.to_slabs(values, windows).numpy()
                del values
                data = slabs if dataset.dtype != "|u1" else slabs.astype(np.uint8, copy=False)
                with (
                    topology.watchdog.collective(f"checkpoint: writing {dataset.name}"),
                    _stage(topology, f"write {dataset.name}"),
                ):
                    for start in range(0, len(data), dataset.slab_numel):
                        digests.append(digest(data[start : start + dataset.slab_numel]))
                    writer.write(dataset, window.start, data)
            del held  # with windows of a tier
            mine.append(digests)
            at(f"wrote {dataset.name}")
        with (
            topology.watchdog.collective("checkpoint: closing the file"),
            _stage(topology, "close it"),
        ):
            writer.close()
        at("closed")
    except BaseException:
        if writer is not None:
            with contextlib.suppress(OSError):
                writer.abandon()
        raise
    with topology.watchdog.collective("checkpoint: collecting digests"):
        everybody = topology.world.comm.gather(mine)
    if everybody is None:
        return [part.dataset for part in parts]
    return [
        replace(part.dataset, digests=tuple(value for rank in everybody for value in rank[place]))
        for place, part in enumerate(parts)
    ]


@contextlib.contextmanager
def _stage(topology: Topology, what: str):  # type: ignore[no-untyped-def]  # as topology.agreed
    """``topology.agreed``, in which an error of the system becomes a CheckpointNotWritten."""
    with topology.agreed(what):
        try:
            yield
        except (
            OSError,
            RuntimeError,
            MemoryError,
            ConfigError,
        ) as error:  # the last: of a folder that cannot be read
            if isinstance(error, CheckpointError):
                raise
            remedy = "Check space, quota and permissions"
            if is_out_of_memory(error):
                remedy = "Memory is short, not the disk: a save needs room for one more state of the optimizer"
            raise CheckpointNotWritten(
                f"{error}; older checkpoints are as they were. {remedy}"
            ) from error
