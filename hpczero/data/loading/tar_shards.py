"""Samples in tar files, as webdataset has them: by number, so any rank reads any of them and a run goes on anywhere.

Owns: where each file of each sample lies, and reading it there. Must not know: batches, order, what is in a file.

Members that follow one another and have one name up to the first dot are one sample: ``7.jpg`` and ``7.cls``. As in
webdataset, names that begin with a dot (``._7.jpg`` of macOS), have none, or begin and end with ``__`` are none. The
headers of all tar files are read once, by all ranks together. Afterwards a sample is some reads at offsets; nothing is
unpacked.

Source: the convention of webdataset, https://github.com/webdataset/webdataset.
"""

from __future__ import annotations

import os
import re
import tarfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash
from torch.utils.data import Dataset

from hpczero.data.team.base import Alone, Team
from hpczero.data.team.ranks import Ranks
from hpczero.errors import DataError
from hpczero.files.regular import open_regular, reason

if TYPE_CHECKING:
    from hpczero.job.topology import Topology

BLOCK_NBYTES = 512  # of tar
OPEN_FILES = 32
STEP_MEMBERS = 1000
STEP_NBYTES = 2**20
PASSED_OVER = re.compile(r"__[^/]*__($|/)")


@dataclass(frozen=True)
class Shard:
    """One tar file.

    Attributes:
        path: of the file.
        nbytes: its length.
        samples: of each sample its key, and (extension, offset, bytes) of each file.
    """

    path: Path
    nbytes: int
    samples: tuple[tuple[str, tuple[tuple[str, int, int], ...]], ...]


class TarShards(Dataset[Any]):
    """The samples of some tar files by number, in the order of the files and of their members. ``open`` makes one.

    A sample is a dictionary: ``"__key__"`` and, by extension, the bytes of its files; or what ``decode`` makes of that.

    Attributes:
        fingerprint: equal for equal keys, extensions and lengths; ``ResumableLoader`` keeps it in its state.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        decode: Callable[[dict[str, Any]], Any] = dict,
    ) -> None:
        self._shards = list(shards)
        self._decode = decode
        self._where = [
            (shard, number)
            for shard, one in enumerate(self._shards)
            for number in range(len(one.samples))
        ]
        self._open: OrderedDict[int, int] = OrderedDict()
        seen = xxhash.xxh3_128()
        for one in self._shards:
            for key, files in one.samples:
                said = f"{key} {[(name, nbytes) for name, _, nbytes in files]}\n"
                seen.update(said.encode(errors="surrogateescape"))  # names may be no UTF-8
        self.fingerprint = seen.hexdigest()

    @classmethod
    def open(
        cls,
        paths: Iterable[str | Path],
        topology: Topology | None = None,
        decode: Callable[[dict[str, Any]], Any] = dict,
    ) -> TarShards:
        """Read the headers of all files. Collective over the topology's world, whose ranks share them.

        Args:
            paths: of uncompressed tar files, equal on all ranks; their order is that of the samples.
            topology: None: this process reads all headers.
            decode: what a sample becomes, called where it is read, so in a worker.

        Raises:
            DataError: a file is missing, compressed, cut short or no tar file, none has a sample, or ranks were given
                different files; on every rank.
        """
        team: Team = Alone() if topology is None else Ranks(topology)
        with team.agreed("list its tar files"):
            if isinstance(paths, (str, Path)):
                raise DataError(f"got the path {paths}, expected a list of paths")
            files = [Path(path) for path in paths]
        _check_alike(files, team)
        mine: list[tuple[int, Shard]] = []

        def steps() -> Iterator[None]:
            for number in range(team.rank, len(files), team.size):
                yield from _indexed(files[number], number, mine)

        team.take_steps("read the headers of its tar files", steps())
        found = dict(entry for share in team.all_gather_lists(mine) for entry in share)
        shards = [found[number] for number in range(len(files))]
        with team.agreed("count its samples"):
            if not any(shard.samples for shard in shards):
                raise DataError(
                    f"got {len(files)} tar file(s) without a sample, expected one or more"
                )
        return cls(shards, decode)

    def __len__(self) -> int:
        return len(self._where)

    def __getitem__(self, index: int) -> Any:
        """A sample. Raises DataError if its file cannot be read, or has changed since it was opened."""
        shard, number = self._where[index]
        one = self._shards[shard]
        key, files = one.samples[number]
        sample: dict[str, Any] = {"__key__": key}
        try:
            descriptor = self._descriptor(shard)
            for name, offset, nbytes in files:
                sample[name] = _read(descriptor, nbytes, offset)
                if len(sample[name]) != nbytes:
                    raise DataError(f"{one.path}: has changed since its headers were read")
        except DataError:
            raise
        except (OSError, ValueError) as error:
            raise DataError(f"{one.path}: cannot be read ({reason(error)})") from error
        return self._decode(sample)

    def _descriptor(self, shard: int) -> int:
        """The file, open; of all of them the last ones used stay open."""
        if shard in self._open:
            self._open.move_to_end(shard)
            return self._open[shard]
        one = self._shards[shard]
        descriptor = open_regular(one.path)
        if os.fstat(descriptor).st_size != one.nbytes:
            os.close(descriptor)
            raise DataError(f"{one.path}: has changed since its headers were read")
        self._open[shard] = descriptor
        if len(self._open) > OPEN_FILES:
            os.close(self._open.popitem(last=False)[1])
        return descriptor

    def __getstate__(self) -> dict[str, Any]:
        """For a worker that is spawned: it opens the files anew."""
        return {**self.__dict__, "_open": OrderedDict()}


def _check_alike(paths: Sequence[Path], team: Team) -> None:
    """Raise DataError on every rank where ranks were given different files. Collective over ``team``."""
    mine = xxhash.xxh3_128(b"\0".join(os.fsencode(path) for path in paths)).hexdigest()
    given = [each for (each,) in team.all_gather_lists([(len(paths), mine)])]
    with team.agreed("compare the lists of tar files"):
        for rank, other in enumerate(given):
            if other != given[0]:
                raise DataError(
                    f"rank {rank} was given other tar files than rank 0 ({other[0]} and {given[0][0]} of them), "
                    "expected one list on all ranks, in one order; do all nodes see the same folder?"
                )


def _indexed(path: Path, number: int, into: list[tuple[int, Shard]]) -> Iterator[None]:
    """Read the headers of a tar file, in steps; then it is the last ``into``."""
    samples: list[tuple[str, list[tuple[str, int, int]]]] = []
    try:
        with open(open_regular(path), "rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
            while (member := tar.next()) is not None:
                tar.members = []  # type: ignore[attr-defined]  # it would keep all of them
                _add(path, member, samples)
                if not len(samples) % STEP_MEMBERS:
                    yield
            descriptor, end = file.fileno(), tar.offset
            nbytes = os.fstat(descriptor).st_size
            if os.pread(descriptor, BLOCK_NBYTES, end) != bytes(BLOCK_NBYTES):
                raise DataError(f"{path}: is cut short: the mark of its end is not there")
            for start in range(end, nbytes, STEP_NBYTES):
                if any(os.pread(descriptor, STEP_NBYTES, start)):
                    raise DataError(
                        f"{path}: has more after the mark of its end: it is damaged, or several tar files in one"
                    )
                yield
    except DataError:
        raise
    except tarfile.TarError as error:
        raise DataError(f"{path}: no uncompressed tar file, or a damaged one ({error})") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({reason(error)})") from error
    found = tuple((key, tuple(files)) for key, files in samples)
    into.append((number, Shard(path, nbytes, found)))
    yield


def _add(
    path: Path, member: tarfile.TarInfo, samples: list[tuple[str, list[tuple[str, int, int]]]]
) -> None:
    """Put a member into the last sample, or into a new one; or pass over it, where it is of none."""
    if member.isdir():
        return
    if not member.isreg() or member.issparse() or member.size < 0:
        raise DataError(f"{path}: {member.name} is no plain file, expected files and folders")
    stem, dot, extension = member.name.rpartition("/")[2].partition(".")
    if not stem or not dot or PASSED_OVER.match(member.name):
        return
    key, extension = member.name[: -len(extension) - 1], extension.lower()
    if not samples or samples[-1][0] != key:
        samples.append((key, []))
    files = samples[-1][1]
    if extension == "__key__" or any(extension == other for other, _, _ in files):
        raise DataError(f"{path}: sample {key} has two files .{extension}")
    files.append((extension, member.offset_data, member.size))


def _read(descriptor: int, nbytes: int, offset: int) -> bytes:
    """``nbytes`` at ``offset``, or as many as there are; the system gives at most 2 GiB at once."""
    found = os.pread(descriptor, nbytes, offset)
    while 0 < len(found) < nbytes:
        more = os.pread(descriptor, nbytes - len(found), offset + len(found))
        if not more:
            break
        found += more
    return found
