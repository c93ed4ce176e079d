"""Copies of a run's state in memory of the nodes: on its own node and on the next one, for the loss of one node.

    <folder>/hpczero-<user>/<run>/node-1/step-000000006-<token>/state.h5        the slabs of nodes 0 and 1, else holes
                                                                manifest.json   written last

A copy is a checkpoint whose bytes lie on several nodes. Offsets, digests and manifest are those of any checkpoint, but
the file has no HDF5 around its datasets. A rank writes its slabs to the file of its node and sends them to a rank of
the next node, the last node to the first. A reader gets what its node lacks from a node that has it, and then reads
the file of its node as any checkpoint.

The files are in memory of the node, and outlive the processes. A copy counts if the nodes of now hold every slab of it
together. The copy before goes once the new one is whole on every node.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from mpi4py import MPI
from typing_extensions import override

from hpczero.checkpoint.disk import format as on_disk
from hpczero.checkpoint.disk.folder import in_one_unit, read_manifest
from hpczero.checkpoint.disk.format import MANIFEST_FILE, STATE_FILE, Dataset, Manifest
from hpczero.checkpoint.disk.stored import check_content
from hpczero.checkpoint.inventory import Inventory
from hpczero.checkpoint.reading import Loaded, load_one
from hpczero.checkpoint.snapshot import Snapshot, take
from hpczero.checkpoint.writing import Writer, stage, write_parts
from hpczero.errors import (
    CheckpointMismatch,
    CheckpointNotWritten,
    ConfigError,
    CorruptCheckpoint,
)
from hpczero.files.direct import PAGE, read_at, write_at
from hpczero.files.durable import write_text
from hpczero.files.regular import open_regular
from hpczero.job.log import spans
from hpczero.job.topology import Topology
from hpczero.zero.sharding import Sharding

logger = logging.getLogger("hpczero.checkpoint")

META = "nodes"  # in what the manifest says: the ranks of each node that wrote the copy
TAG_PLACE, TAG_BYTES, TAG_SLAB = 71, 72, 73

Bytes = npt.NDArray[np.uint8]


class Held(NamedTuple):
    """What one folder holds of one copy: the slabs of its node and of the node before.

    Attributes:
        token: of the copy; all its folders have the same.
        step: optimizer steps done.
        created: when, as the manifest says.
        node: number that the node had when it wrote.
        nodes: how many there were.
        path: the folder, on the node that sees it.
    """

    token: str
    step: int
    created: str
    node: int
    nodes: int
    path: str

    def has(self, writer: int) -> bool:
        """Whether it holds the slabs that ranks of node ``writer`` wrote."""
        return self.node in (writer, (writer + 1) % self.nodes)


@dataclass(frozen=True)
class Copy:
    """A copy that the nodes of now hold together.

    Attributes:
        token: its token.
        manifest: the same on every rank.
        held: for each node of now, what it holds of it.
    """

    token: str
    manifest: Manifest
    held: tuple[tuple[Held, ...], ...]


class Move(NamedTuple):
    """One slab on its way to the node whose rank reads it."""

    dataset: Dataset
    slab: int
    source: int
    path: str
    reader: int

    @property
    def place(self) -> tuple[int, int]:
        """First byte in the file, and number of bytes."""
        elements = self.dataset.slab(self.slab)
        item = self.dataset.itemsize
        return self.dataset.offset + elements.start * item, len(elements) * item


class MemoryCopies:
    """The copies of one run. Methods are collective over the topology's world unless they say otherwise."""

    def __init__(
        self,
        folder: str,
        run: Path,
        topology: Topology,
        *,
        every: int,
        slab_nbytes: int = on_disk.SLAB_NBYTES,
    ) -> None:
        """Not collective.

        Args:
            folder: in memory of every node, such as /dev/shm.
            run: folder of the run, which names the copies; the same in each start.
            topology: its nodes hold the copies.
            every: steps between copies; 0: there are none.
            slab_nbytes: bytes that one digest covers.
        """
        place = os.path.abspath(run)  # without a look at the shared disk
        name = f"{run.name[:64]}-{hashlib.sha256(place.encode()).hexdigest()[:16]}"
        self._user = Path(folder) / f"hpczero-{os.getuid()}"
        self._run = self._user / name
        # Of a node that holds none: a few slabs, which never count as a copy.
        self._reading = self._run / f"reading-{topology.node_index}"
        self._topology = topology
        self._every = every
        self._slab_nbytes = slab_nbytes
        self._found: Copy | None = None
        self._inventory: Inventory | None = None  # the same for every copy with this plan

    @property
    def step(self) -> int:
        """Step of the copy that ``find`` found; 0 if there is none. Not collective."""
        return 0 if self._found is None else self._found.manifest.step

    def is_due(self, done: int) -> bool:
        """Whether a copy is made after ``done`` steps. Not collective."""
        return self._every > 0 and self._topology.num_nodes > 1 and done % self._every == 0

    # --- what is there

    def find(self) -> None:
        """Look for the newest copy that the nodes of now hold together, and tell of those that are not whole.

        Raises:
            ConfigError: copies are asked for on one node, and there are none of a time with more.
        """
        topology = self._topology
        if not self._every:
            return
        mine: list[Held] = []
        wrong: list[str] = []
        hosts = topology.world.hosts()
        with topology.agreed("look for copies in memory"):
            if topology.local_rank == 0 and self._is_ours():
                mine, wrong = self._seen(hosts)
        said = [json.loads(text) for text in topology.world.gather_text(json.dumps([mine, wrong]))]
        found = [[Held(*entry) for entry in entries] for entries, _ in said]
        for text in (text for _, texts in said for text in texts) if topology.is_root else ():
            logger.warning("a copy in memory is not used: %s", text)
        newest = self._newest([held for entries in found for held in entries])
        if newest is not None:
            token = newest.token
            kept = [tuple(held for held in entries if held.token == token) for entries in found]
            root = next(rank for rank, entries in enumerate(kept) if entries)
            text = ""
            with topology.agreed("read the manifest of a copy in memory"):
                if topology.rank == root:
                    text = read_manifest(Path(kept[root][0].path)).to_json()
            manifest = Manifest.from_json(topology.broadcast_text(text, root))
            by_node = tuple(kept[ranks[0]] for ranks in topology.world.nodes)
            self._found = Copy(token, manifest, by_node)
        with topology.agreed("see whether there is another node for copies"):
            if topology.num_nodes < 2 and newest is None:
                raise ConfigError(
                    f"checkpoint.buddy: got {self._every} on {topology.num_nodes} node, where a copy would be lost "
                    "with what it is a copy of; expected two nodes or more, or 0"
                )

    def _is_ours(self) -> bool:
        """Whether the folder of this user exists and belongs to nobody else. Not collective."""
        with suppress(FileNotFoundError):
            found = self._user.lstat()
            own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
            return own and not found.st_mode & 0o077
        return False

    def _seen(self, hosts: Sequence[str]) -> tuple[list[Held], list[str]]:
        """What this node holds, and what is wrong with the rest. Emulated nodes share out what their host has."""
        world = self._topology.world
        folders = sorted(self._run.glob("node-*"))
        if world.faked:
            first = [ranks[0] for ranks in world.nodes]
            here = [node for node, rank in enumerate(first) if hosts[rank] == hosts[world.rank]]
            folders = folders[here.index(world.node_index) :: len(here)]
        held, wrong = [], []
        for path in (path for folder in folders for path in sorted(folder.glob("step-*"))):
            if not (path / MANIFEST_FILE).exists():  # its job was killed meanwhile
                continue
            try:
                manifest = read_manifest(path)
                check_content(manifest, path)
                nodes = _nodes_of(manifest, path)
            except (CorruptCheckpoint, CheckpointMismatch) as error:
                wrong.append(f"rank {self._topology.rank}: {error}")
                continue
            number = int(path.parent.name.removeprefix("node-"))
            token = path.name.rpartition("-")[2]
            held.append(Held(token, manifest.step, manifest.created, number, len(nodes), str(path)))
        return held, wrong

    def _newest(self, held: Sequence[Held]) -> Held | None:
        """One folder of the newest copy that is whole; the same on every rank. Not collective."""
        for newest in sorted(held, key=lambda each: (each.step, each.created), reverse=True):
            parts = [each for each in held if each.token == newest.token]
            lost = [n for n in range(newest.nodes) if not any(part.has(n) for part in parts)]
            if not lost:
                return newest
            if self._topology.is_root and newest is parts[0]:
                logger.warning(
                    "the copies in memory of step %d are not used: they were made on %d nodes, those of node(s) %s are "
                    "here, and nobody has what node(s) %s wrote",
                    newest.step,
                    newest.nodes,
                    spans(sorted(part.node for part in parts)),
                    spans(lost),
                )
        return None

    # --- one is loaded

    def load(self, sharding: Sharding) -> Loaded:
        """Load what ``find`` found; no file of the shared disk is opened.

        Raises:
            CorruptCheckpoint: on every rank; a copy is damaged. The model is as ``load_one`` says.
            CheckpointNotWritten: on every rank; there is no room for slabs that a node lacks.
            CheckpointMismatch: as ``load_one``.
        """
        assert self._found is not None, "find has found one"
        topology = self._topology
        sharding.unfreezing.settle()
        with topology.watchdog.operation("a load of copies in memory"):
            try:
                return load_one(self._bring(self._found), sharding, asked_for=True)
            finally:
                if topology.local_rank == 0:
                    shutil.rmtree(self._reading, ignore_errors=True)

    def _bring(self, copy: Copy) -> Path:
        """Have every slab on the node whose rank will read it. Returns the folder to read on this node."""
        topology, held = self._topology, copy.held[self._topology.node_index]
        path = Path(held[0].path) if held else self._reading
        with stage(topology, "make room for a copy in memory"):
            if topology.local_rank == 0 and not held:
                shutil.rmtree(path, ignore_errors=True)  # of a load that was killed
                self._make(path, copy.manifest.file_nbytes)
                write_text(path / MANIFEST_FILE, copy.manifest.to_json())
        by_reader: dict[int, list[Move]] = {}
        for move in self._moves(copy):
            by_reader.setdefault(move.reader, []).append(move)
        for turn in range(max(map(len, by_reader.values()), default=0)):
            self._move([moves[turn] for moves in by_reader.values() if turn < len(moves)], path)
        return path

    def _moves(self, copy: Copy) -> Iterator[Move]:
        """The slabs that are not where they will be read, the same on every rank. Not collective."""
        world, nodes = self._topology.world, copy.manifest.meta[META]
        node_then = {rank: node for node, ranks in enumerate(nodes) for rank in ranks}
        node_now = {rank: node for node, ranks in enumerate(world.nodes) for rank in ranks}
        for dataset in copy.manifest.datasets:
            writers = _owners(dataset, copy.manifest.world_size)
            readers = _owners(dataset, world.size)
            if dataset.name in (on_disk.BUFFERS, on_disk.RNG):  # rank 0 reads them whole
                readers = [0] * dataset.num_slabs
            for slab, (writer, reader) in enumerate(zip(writers, readers, strict=True)):
                then, here = node_then[writer], copy.held[node_now[reader]]
                if here and here[0].has(then):
                    continue
                # Two at most, but for emulated nodes.
                sources = [
                    (ranks, each)
                    for ranks, parts in zip(world.nodes, copy.held, strict=True)
                    for each in parts
                    if each.has(then)
                ]
                ranks, each = sources[slab % len(sources)]
                yield Move(dataset, slab, ranks[reader % len(ranks)], each.path, reader)

    def _move(self, moves: Sequence[Move], path: Path) -> None:
        """One slab for each reader at most."""
        topology = self._topology
        comm, rank = topology.world.comm, topology.rank
        sent: list[tuple[Move, Bytes]] = []
        with topology.agreed("read a copy in memory"):
            for move in (move for move in moves if move.source == rank):
                try:
                    descriptor = open_regular(Path(move.path) / STATE_FILE)
                    try:
                        sent.append((move, read_at(descriptor, *move.place)))
                    finally:
                        os.close(descriptor)
                except (OSError, EOFError) as error:
                    raise CorruptCheckpoint(
                        f"rank {rank}: {move.path}: cannot be read: {error}"
                    ) from error
        mine = next((move for move in moves if move.reader == rank), None)
        into = np.empty(0 if mine is None else mine.place[1], dtype=np.uint8)
        with topology.watchdog.collective("checkpoint: slabs of a copy in memory"):
            requests = [] if mine is None else [comm.Irecv(into, mine.source, TAG_SLAB)]
            requests += [comm.Isend(data, move.reader, TAG_SLAB) for move, data in sent]
            MPI.Request.Waitall(requests)
        with stage(topology, "put slabs into memory"):
            if mine is not None:
                with (path / STATE_FILE).open("r+b", buffering=0) as file:
                    write_at(file.fileno(), mine.place[0], into)

    # --- one is made

    def save(self, sharding: Sharding, step: int, extra: Mapping[str, Any]) -> None:
        """Copy the state of the run to this node and the next one. The copy before goes once this one is whole.

        Raises:
            CheckpointNotWritten: on every rank; the copy before is as it was.
            ConfigError, CheckpointError, StepError: as ``take``.
        """
        topology = self._topology
        with topology.watchdog.operation("copies in memory"):
            sharding.unfreezing.settle()
            if self._inventory is None or self._inventory.plan is not sharding.plan:
                self._inventory = Inventory.create(sharding)
            snapshot = take(
                sharding,
                step=step,
                extra=extra,
                slab_nbytes=self._slab_nbytes,
                inventory=self._inventory,
            )
            token = topology.broadcast_text(secrets.token_hex(4))
            path = self._path(step, token)
            try:
                self._write(snapshot, path)
            except BaseException:
                if topology.local_rank == 0:
                    shutil.rmtree(path, ignore_errors=True)
                raise
            self.keep(token)

    def _write(self, snapshot: Snapshot, path: Path) -> None:
        topology = self._topology
        parts, nbytes = [], PAGE
        for part in snapshot.parts:
            parts.append(replace(part, dataset=replace(part.dataset, offset=nbytes)))
            nbytes += -(-part.dataset.nbytes // PAGE) * PAGE
        datasets = [part.dataset for part in parts]
        nodes, here = topology.world.nodes, topology.node_index
        with stage(topology, "make room for a copy in memory"):
            if topology.local_rank == 0:
                ranks = [*nodes[here], *nodes[here - 1]]
                self._make(path, nbytes, needed=sum(_share(d, ranks, topology) for d in datasets))
        written = write_parts(
            parts, path / STATE_FILE, topology, partial(PairWriter, topology=topology)
        )
        text = ""
        if topology.is_root:
            text = Manifest(
                step=snapshot.step,
                created=on_disk.now(),
                world_size=snapshot.world_size,
                table=snapshot.table,
                datasets=tuple(written),
                file_nbytes=nbytes,
                rest="",
                meta={**snapshot.meta, META: [list(ranks) for ranks in nodes]},
            ).to_json()
        text = topology.broadcast_text(text)
        with stage(topology, "finish a copy in memory"):
            if topology.local_rank == 0:
                write_text(path / MANIFEST_FILE, text)

    def _path(self, step: int, token: str) -> Path:
        folder = self._run / f"node-{self._topology.node_index}"
        return folder / f"{on_disk.step_folder(step)}-{token}"

    def _make(self, path: Path, nbytes: int, *, needed: int = 0) -> None:
        """A folder with a file of holes. Not collective.

        Raises:
            CheckpointNotWritten: the folder of this user is another's, or there is no room.
            OSError: it cannot be made.
        """
        rank = self._topology.rank
        self._user.mkdir(mode=0o700, exist_ok=True)
        if not self._is_ours():
            found = self._user.lstat()
            raise CheckpointNotWritten(
                f"rank {rank}: {self._user}: has mode {stat.filemode(found.st_mode)}, of user {found.st_uid}; "
                f"expected a directory of user {os.getuid()} that nobody else may enter; remove it, or give another "
                "--checkpoint.buddy_folder"
            )
        system = os.statvfs(self._user)
        free = system.f_bavail * system.f_frsize
        if free < needed:
            there, wanted = in_one_unit(free, needed)
            raise CheckpointNotWritten(
                f"rank {rank}: {self._user}: {there} are free and the copies on this node need {wanted}; use more "
                "nodes, give another --checkpoint.buddy_folder, or --checkpoint.buddy 0"
            )
        path.mkdir(mode=0o700, parents=True)
        with (path / STATE_FILE).open("xb", buffering=0) as file:
            file.truncate(nbytes)

    # --- old ones go

    def keep(self, token: str | None = None) -> None:
        """Remove every copy of the run from this node but that of ``token``; None removes all. Not collective."""
        if self._topology.local_rank or not self._is_ours():
            return
        if token is None:
            shutil.rmtree(self._run, ignore_errors=True)
            return
        for path in self._run.glob("node-*/step-*"):
            if not path.name.endswith(f"-{token}"):
                shutil.rmtree(path, ignore_errors=True)

    def keep_found(self) -> None:
        """``keep`` what ``find`` found. Not collective."""
        self.keep(None if self._found is None else self._found.token)


class PairWriter(Writer):
    """Writes to the file of this node, and what ranks of the node before send; sends to the next node.

    Messages come before what may fail on one rank alone.
    """

    @override
    def __init__(self, path: Path, *, topology: Topology) -> None:
        super().__init__(path)
        nodes, here = topology.world.nodes, topology.node_index
        after, before = nodes[(here + 1) % len(nodes)], nodes[here - 1]
        mine, place = nodes[here], topology.local_rank
        self._to = after[place % len(after)]
        self._sources = [r for i, r in enumerate(before) if i % len(mine) == place]
        self._comm = topology.world.comm

    @override
    def write(self, dataset: Dataset, start: int, data: npt.NDArray[Any]) -> None:
        comm = self._comm
        own = np.array([dataset.offset + start * dataset.itemsize, data.nbytes], dtype=np.int64)
        found = np.ascontiguousarray(data).view(np.uint8)
        requests = [comm.Isend(own, self._to, TAG_PLACE), comm.Isend(found, self._to, TAG_BYTES)]
        came: list[tuple[int, Bytes]] = []
        for source in self._sources:
            place = np.empty(2, dtype=np.int64)
            comm.Recv(place, source, TAG_PLACE)
            theirs = np.empty(int(place[1]), dtype=np.uint8)
            comm.Recv(theirs, source, TAG_BYTES)
            came.append((int(place[0]), theirs))
        MPI.Request.Waitall(requests)
        for offset, values in ((int(own[0]), found), *came):
            write_at(self._descriptor, offset, values)

    @override
    def close(self) -> None:
        self.abandon()  # memory: there is no disk to wait for


def _owners(dataset: Dataset, size: int) -> list[int]:
    """Of each slab the rank that writes or reads it, of ``size`` ranks."""
    return [rank for rank in range(size) for _ in dataset.slabs_of(rank, size)]


def _share(dataset: Dataset, ranks: Sequence[int], topology: Topology) -> int:
    """Bytes of the slabs that ``ranks`` write."""
    slabs = sum(len(dataset.slabs_of(rank, topology.size)) for rank in ranks)
    return min(slabs * dataset.slab_numel, dataset.numel) * dataset.itemsize


def _nodes_of(manifest: Manifest, path: Path) -> list[list[int]]:
    """Ranks of each node that wrote. Raises CorruptCheckpoint: the manifest does not name each rank once."""
    nodes = manifest.meta.get(META, ())
    sound = isinstance(nodes, list) and all(isinstance(ranks, list) for ranks in nodes)
    ranks = {rank for ranks in nodes for rank in ranks if type(rank) is int} if sound else set()
    count = manifest.world_size
    if sorted(ranks) != list(range(count)) or sum(len(each) for each in nodes) != len(ranks):
        raise CorruptCheckpoint(
            f"{path}: manifest.json cannot be: meta.{META} is {nodes!r}, expected each of {count} rank(s) once, by "
            "nodes"
        )
    found: list[list[int]] = nodes
    return found
