"""Writing a token file, by one process or by many ranks: whole or not at all.

[Note: Who writes a slab]
Ranks bring their tokens in rounds. In a round those of rank 0 come first, then those of rank 1, and so on. Once all
ranks know how many each brings, a rank writes the slabs that are wholly its own, and digests them. What is left at the
ends of its tokens goes to rank 0, which joins it with that of others. Each slab has thus one writer, and no page of the
file has two, as file systems want it that keep pages in every node's memory. The file has the same bytes on any number
of ranks.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hpczero.data import appendix
from hpczero.data.appendix import FORMAT, SPLITS, VERSION, Description, SplitPart, check_ids
from hpczero.data.tokenize import Tokenizer
from hpczero.errors import DataError
from hpczero.files.direct import read_at, write_at
from hpczero.files.durable import remove_old
from hpczero.files.regular import WHY, Explained
from hpczero.job.team import Alone, Team

# HDF5's part of a token file: its structures are made in memory, around tokens that are in the file already.
#
# [Note: Tokens before structures]
# How many tokens a text has is known when the last of it is tokenized. Its tokens are written before, by many ranks, to
# the places where HDF5 will look for them. The tokens of a split are one contiguous dataset. HDF5 puts it at the next
# multiple of ``PAGE`` once the objects before it have their room, whatever its size. The first place is therefore known
# from the start, and the second once all training tokens are counted. Making the structures for a length of one tells
# both. At the end they are made for the true lengths, and must give the same places.
#
# [Note: HDF5 never sees a disk that is full]
# HDF5 1.10 crashes the process when it closes a file that it could not write. It therefore writes to memory.

PAGE = 4096


@dataclass(frozen=True)
class TokenDataset:
    """The tokens of one split: how many, and the attributes of their group."""

    numel: int
    attributes: Mapping[str, int]


@dataclass(frozen=True)
class Structure:
    """What HDF5 has in a file.

    Attributes:
        places: where the tokens of each split begin, in bytes.
        pieces: place and bytes of all that is not tokens.
        nbytes: length of HDF5's part of the file.
    """

    places: tuple[int, ...]
    pieces: tuple[tuple[int, npt.NDArray[np.uint8]], ...]
    nbytes: int


def structure_of(
    dtype: np.dtype[Any], datasets: tuple[TokenDataset, ...], attributes: Mapping[str, str | int]
) -> Structure:
    """The structures of a file with these splits, in the order of ``SPLITS``."""
    import h5py

    places = []
    settings = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    settings.set_layout(h5py.h5d.CONTIGUOUS)
    settings.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    settings.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    settings.set_obj_track_times(False)  # equal text makes equal files
    # The newest form of its structures: they have checksums, which other readers hold them against.
    aligned = {"alignment_threshold": 1, "alignment_interval": PAGE}
    with open(os.memfd_create("tokens"), "w+b", buffering=0) as image:
        with h5py.File(image, "w", libver=("v110", "v110"), **aligned) as file:
            kind = h5py.h5t.py_create(dtype.newbyteorder("<"))
            groups = [file.create_group(name) for name in SPLITS]
            for group, dataset in zip(groups, datasets, strict=True):
                space = h5py.h5s.create_simple((dataset.numel,))
                tokens = h5py.h5d.create(group.id, b"tokens", kind, space, settings)
                places.append(int(tokens.get_offset()))
            # After the datasets, whose places shall not depend on their length.
            for group, dataset in zip(groups, datasets, strict=True):
                group.attrs.update(dataset.attributes)
            file.attrs.update(attributes)
        made = image.fileno()
        nbytes = os.fstat(made).st_size
        # Not the written pages of the image: a page of the system may be larger than PAGE, and hold tokens too.
        edges = [0]
        for place, dataset in zip(places, datasets, strict=True):
            if dataset.numel:
                edges += [place, place + dataset.numel * dtype.itemsize]
        edges.append(nbytes)
        gaps = zip(edges[::2], edges[1::2], strict=True)
        pieces = tuple((start, read_at(made, start, stop - start)) for start, stop in gaps)
        return Structure(tuple(places), pieces, nbytes)


def places(dtype: np.dtype[Any], train_numel: int) -> tuple[int, ...]:
    """Where the tokens of each split begin, whatever comes later ([Note: Tokens before structures])."""
    counts = {"documents": 0, "text_nbytes": 0}
    return structure_of(
        dtype, (TokenDataset(train_numel, counts), TokenDataset(1, counts)), {}
    ).places


SLAB_NUMEL = 2**15  # of one digest (docs/performance.md)
STALE_S = 3600.0  # since it was last written to: nobody writes it any more
TRAIN, VALIDATION = range(len(SPLITS))

Ids = npt.NDArray[np.unsignedinteger[Any]]
Numbers = npt.NDArray[np.int64]


class TokenWriter:
    """A token file that is being written by a team. ``places``: where the tokens of each split begin, in bytes."""

    def __init__(self, path: Path, descriptor: int, tokenizer: Tokenizer, team: Team) -> None:
        self._path = path
        self._descriptor = descriptor
        self._tokenizer = tokenizer
        self._team = team
        self.dtype: np.dtype[np.unsignedinteger[Any]] = np.min_scalar_type(
            tokenizer.vocab_size - 1
        ).newbyteorder("<")
        self.places = places(self.dtype, 1)
        self._pending: tuple[list[Ids], ...] = ([], [])
        self._mine = np.zeros((3, 2), dtype=np.int64)  # tokens, documents, text bytes of each split
        self._all = np.zeros((3, 2), dtype=np.int64)
        self._digests: list[tuple[int, int, int]] = []  # split, slab, digest
        self._edges: dict[tuple[int, int], _Edge] = {}

    def checked(self, ids: npt.NDArray[np.integer[Any]], split: int) -> Ids:
        """``ids`` as the file has them. Not collective; any thread may call it.

        Raises:
            DataError: ids are not of the vocabulary.
        """
        what = f"/{SPLITS[split]}/tokens"
        check_ids(ids, self._tokenizer.vocab_size, what)
        if ids.size and int(ids.min()) < 0:
            raise DataError(f"{what} would hold token id {int(ids.min())}, expected 0 or above")
        return ids.astype(self.dtype, copy=False)

    def append(self, split: int, ids: Ids, documents: int = 0, text_nbytes: int = 0) -> None:
        """Bring tokens of ``checked``, and count documents and bytes of text. Not collective; see ``exchange``."""
        self._pending[split].append(ids)
        self._mine[:, split] += (len(ids), documents, text_nbytes)

    def exchange(self, error: Exception | None = None) -> None:
        """Write what all ranks have brought since the last call, in the order of ranks. Collective over the team.

        Args:
            error: of this rank's work, which all ranks then raise.

        Raises:
            DataError: the file cannot be written; on every rank.
            ValueError: training tokens come after held-out ones.
            HpcZeroError: some rank brings an error.
        """
        failed = error is not None
        found = self._team.all_gather(np.array([failed, *self._mine.flat], dtype=np.int64))
        if found[:, 0].any():
            with self._team.agreed("make tokens of its part of the text"):
                if error is not None:
                    raise error
        counts = found[:, 1:].reshape(self._team.size, 3, 2)
        before = self._all[0].copy()
        self._all += counts.sum(axis=0)
        self._find_places(before, self._all[0])
        stops = before + counts[:, 0].cumsum(axis=0)  # (size, 2): behind the tokens of each rank
        starts = stops - counts[:, 0]
        edges = [
            [(split, *edge) for split in (TRAIN, VALIDATION) for edge in _edges(*row[split])]
            for row in np.stack([starts, stops], axis=-1).tolist()
        ]
        mine: list[Ids] = [np.zeros(0, dtype=self.dtype)]
        with self._team.agreed("write tokens"), _said(self._path):
            own = [np.concatenate([*parts, mine[0]]) for parts in self._pending]
            for split, ids in enumerate(own):
                start = int(starts[self._team.rank, split])
                first, last = _whole_slabs(start, start + len(ids))
                if first < last:
                    self._write(split, first, ids[first - start : last - start])
            for split, start, stop in edges[self._team.rank]:
                begin = starts[self._team.rank, split]
                mine.append(own[split][start - begin : stop - begin])
        self._pending = ([], [])
        self._mine[:] = 0
        nbytes = [
            sum(stop - start for _, start, stop in row) * self.dtype.itemsize for row in edges
        ]
        brought = self._team.gather(np.concatenate(mine).view(np.uint8), nbytes)
        with self._team.agreed("write tokens"), _said(self._path):
            for row, data in zip(edges, brought, strict=False):  # which rank 0 alone has
                self._join(row, data.view(self.dtype))

    def finish(self) -> tuple[dict[str, SplitPart], dict[str, appendix.Table]]:
        """Write what is left, and say what the splits hold. Collective over the team.

        Raises:
            DataError: a split has no token, or the file cannot be written; on every rank.
        """
        self.exchange()
        for name, numel in zip(SPLITS, self._all[0], strict=True):
            if not numel:
                raise DataError(
                    f"/{name}/tokens would have no token; was there enough text for both splits?"
                )
        with self._team.agreed("write tokens"), _said(self._path):
            for (split, slab), edge in sorted(self._edges.items()):  # the last slab of each split
                self._write(split, slab * SLAB_NUMEL, edge.data[: edge.filled])
            os.fsync(self._descriptor)
        digests = [entry for share in self._team.all_gather_lists(self._digests) for entry in share]
        parts, tables = {}, {}
        for split, name in enumerate(SPLITS):
            rows = sorted((slab, digest) for of, slab, digest in digests if of == split)
            assert [slab for slab, _ in rows] == [*range(len(rows))], "each slab has one writer"
            table = np.array(
                [(self._place(split, slab * SLAB_NUMEL), of) for slab, of in rows], "<u8"
            )
            numel, documents, text_nbytes = self._all[:, split].tolist()
            tables[name] = table
            parts[name] = SplitPart(
                dtype=self.dtype.name,
                numel=numel,
                slab_numel=SLAB_NUMEL,
                documents=documents,
                text_nbytes=text_nbytes,
                table=appendix.table_digest(table),
            )
        return parts, tables

    def _find_places(self, before: Numbers, now: Numbers) -> None:
        """The place of the held-out tokens, once all training tokens are counted."""
        if before[VALIDATION] and now[TRAIN] > before[TRAIN]:
            raise ValueError(
                "TokenWriter: training tokens after held-out ones, expected them before"
            )
        if now[VALIDATION] and not before[VALIDATION]:
            self.places = places(self.dtype, max(int(now[TRAIN]), 1))

    def _place(self, split: int, token: int) -> int:
        return self.places[split] + token * self.dtype.itemsize

    def _write(self, split: int, start: int, ids: Ids) -> None:
        """Write slabs from token ``start`` on, and digest each; the last may be short."""
        write_at(self._descriptor, self._place(split, start), ids)
        for begin in range(0, len(ids), SLAB_NUMEL):
            digest = appendix.digest(ids[begin : begin + SLAB_NUMEL])
            self._digests.append((split, (start + begin) // SLAB_NUMEL, digest))

    def _join(self, edges: list[tuple[int, int, int]], data: Ids) -> None:
        """Put the edges of one rank into their slabs, and write those that are whole."""
        for split, start, stop in edges:
            ids, data = data[: stop - start], data[stop - start :]
            slab, begin = divmod(start, SLAB_NUMEL)
            edge = self._edges.setdefault((split, slab), _Edge(np.zeros(SLAB_NUMEL, self.dtype)))
            edge.data[begin : begin + len(ids)] = ids
            edge.filled += len(ids)
            if edge.filled == SLAB_NUMEL:
                self._write(split, slab * SLAB_NUMEL, edge.data)
                del self._edges[split, slab]


@dataclass
class _Edge:
    """A slab that several ranks fill, in order."""

    data: Ids
    filled: int = 0


def _whole_slabs(start: int, stop: int) -> tuple[int, int]:
    """First and last bound of the slabs that are all of tokens ``start`` to ``stop``; none if first >= last."""
    return -(-start // SLAB_NUMEL) * SLAB_NUMEL, stop // SLAB_NUMEL * SLAB_NUMEL


def _edges(start: int, stop: int) -> list[tuple[int, int]]:
    """What is left of tokens ``start`` to ``stop`` without whole slabs."""
    first, last = _whole_slabs(start, stop)
    found = [(start, stop)] if first > last else [(start, first), (last, stop)]
    return [(begin, end) for begin, end in found if begin < end]


@contextmanager
def create(
    path: Path,
    tokenizer: Tokenizer,
    source_sha256: str,
    check: Callable[[], None] = lambda: None,
    team: Team | None = None,
) -> Iterator[TokenWriter]:
    """Write a token file: yields its writer. Collective over the team.

    The file is written under a temporary name beside ``path`` and renamed at the end of the block. After an error
    nothing is left. What a killed job has left is removed an hour later. Several jobs may write the same path at once;
    the last whole file stays.

    Args:
        path: Of the file; one file for all ranks.
        tokenizer: Of its tokens.
        source_sha256: Of the text.
        check: Raises if ``path`` may not be replaced. Rank 0 calls it before anything is written, and before the
            rename.
        team: Ranks that write it; None: this process alone.

    Raises:
        DataError: The folder cannot be written, or a split has no token; on every rank.
    """
    team = team or Alone()
    name = f".{path.name}.{team.all_gather_lists([uuid.uuid4().hex])[0][0]}.tmp"
    temporary = path.with_name(name)
    descriptor = -1
    try:
        with team.agreed("make the token file"), _said(path):
            if team.rank == 0:
                check()
                path.parent.mkdir(parents=True, exist_ok=True)
                # By a process that was killed.
                left = re.compile(rf"\.{re.escape(path.name)}\..*\.tmp")
                remove_old(path.parent, left, age_s=STALE_S)
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                descriptor = os.open(temporary, flags, 0o666)
        with team.agreed("open the token file that rank 0 has made"), _said(path):
            if team.rank:
                descriptor = os.open(temporary, os.O_RDWR | os.O_CLOEXEC)
        writer = TokenWriter(path, descriptor, tokenizer, team)
        yield writer
        parts, tables = writer.finish()
        with team.agreed("complete the token file"), _said(path):
            if team.rank == 0:
                description = Description(tokenizer.to_json(), source_sha256, **parts)
                _complete(descriptor, writer, description, tables)
                check()  # again: writing may have taken hours
                temporary.replace(path)
    finally:
        if descriptor >= 0:
            os.close(descriptor)
        if team.rank == 0:
            with suppress(OSError, ValueError):  # gone by the rename, or never made
                temporary.unlink()


def _complete(
    descriptor: int,
    writer: TokenWriter,
    description: Description,
    tables: dict[str, appendix.Table],
) -> None:
    """Write HDF5's structures around the tokens, and the appendix."""
    datasets = tuple(
        TokenDataset(part.numel, {"documents": part.documents, "text_nbytes": part.text_nbytes})
        for part in description.parts().values()
    )
    attributes: dict[str, str | int] = {
        "format": FORMAT,
        "version": VERSION,
        "tokenizer": description.tokenizer,
        "source_sha256": description.source_sha256,
    }
    made = structure_of(writer.dtype, datasets, attributes)
    if made.places != writer.places:
        import h5py

        raise DataError(
            f"HDF5 {h5py.version.hdf5_version} looks for tokens at {made.places}, and they were written at "
            f"{writer.places}: this version of HDF5 cannot be used here; please report it"
        )
    # Readers expect room for a whole slab at each place, also where the last one is short.
    parts = description.parts()
    ends = [
        int(tables[name][-1, 0]) + min(part.numel, SLAB_NUMEL) * writer.dtype.itemsize
        for name, part in parts.items()
    ]
    end = max(made.nbytes, *ends)
    for place, data in made.pieces:
        write_at(descriptor, place, data)
    write_at(descriptor, end, np.frombuffer(appendix.to_bytes(end, description, tables), np.uint8))
    os.fsync(descriptor)  # first: a rename may reach the disk before the contents do


def _said(path: Path) -> Explained:
    """Context: an error of the file system becomes a DataError that says what to do."""
    text = f"{path}: cannot be written ({WHY}); check the folder, its permissions, space and quota"
    return Explained(DataError, text)
