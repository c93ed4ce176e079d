"""Loading: any map-style data set through torch's own ``DataLoader``, with an exact resume on any number of ranks.

This room needs torch; the rest of ``data`` does not.
"""

from __future__ import annotations

import os
import random
import re
import sys
import tarfile
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash
from torch.utils.data import DataLoader, Dataset, IterableDataset

from hpczero.data.batches import Int64Array, Sampler, at_even_distances
from hpczero.errors import ConfigError, DataError
from hpczero.files.direct import read_at
from hpczero.files.regular import open_regular, reason
from hpczero.job.team import Alone, Ranks, Team, shared

if TYPE_CHECKING:
    from hpczero.job.topology import Topology


# ResumableLoader: torch's own ``DataLoader`` over a rank's part of each global batch, with an exact resume.
#
# [Note: What has been taken]
# Workers read ahead: they have asked for batches that the program has not seen. What counts is what the program was
# given, so the loader counts, and not the sampler that workers read from. The count is of global batches. It means the
# same on any number of ranks and workers. What a program does at the end of an epoch comes after its last batch. A
# state made while the program has that batch says so, and the first loop after a load is then over at once.

# What tells a data set from others of its length, so that a run does not go on with other samples unnoticed.
#
# A data set of the library ``datasets`` has a fingerprint of its own, of the path on which it was made: the same rows
# may have another one on another day. So the rows are looked at.

LOOKED_AT = 256  # rows at even distances


def fingerprint_of(dataset: Any) -> str | None:
    """The ``fingerprint`` of a data set if that is a text; None: nothing is known of it but its length.

    Of one of ``datasets`` it is the digest of its columns and of at most ``LOOKED_AT`` rows, as they are on disk:
    transforms are not called.
    """
    said = getattr(dataset, "fingerprint", None)
    if isinstance(said, str):
        return said
    library = sys.modules.get("datasets")  # whoever has such a data set has imported it
    if library is None or not isinstance(dataset, library.Dataset):
        return None
    numbers = at_even_distances(len(dataset), LOOKED_AT).tolist() if len(dataset) else []
    rows = dataset.with_format("arrow")[numbers].to_pylist() if numbers else []
    digest = xxhash.xxh3_128(f"{len(dataset)} {sorted(dataset.column_names)}".encode())
    for row in rows:
        digest.update(repr(sorted(row.items())).encode())
    return digest.hexdigest()


# A data set whose samples are drawn by their place in the run, whoever draws them.
#
# [Note: Random numbers of a sample]
# Augmentation draws from torch, NumPy and Python. In a worker of torch's loader these streams depend on the worker's
# number and on how many samples it had before, so a resumed run or another number of ranks would draw others. Here each
# sample has streams of its own, seeded by (seed, position). The streams of the program are put back afterwards.


class Keyed(Dataset[Any]):
    """``dataset`` asked for (index, position)."""

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self._dataset = dataset
        self._seed = seed

    def __getitem__(self, key: tuple[int, int]) -> Any:
        """The sample of an index, with the random numbers of a position."""
        index, position = key
        with _streams_of(self._seed, position):
            return self._dataset[index]


class Plain(Dataset[Any]):
    """``dataset`` asked for (index, position), where samples draw nothing."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self._dataset = dataset

    def __getitems__(self, keys: list[tuple[int, int]]) -> Any:
        """The samples of several indices."""
        indices = [index for index, _ in keys]
        at_once = getattr(self._dataset, "__getitems__", None)
        return at_once(indices) if at_once else [self._dataset[index] for index in indices]


@contextmanager
def _streams_of(seed: int, position: int) -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002  data sets draw from it
    first, second = np.random.SeedSequence([seed, position]).generate_state(2).tolist()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(first << 32 | second)
        np.random.seed(first)  # noqa: NPY002
        random.seed(first << 32 | second)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002


MOST_SEED = 2**63  # torch takes no larger one


@dataclass(frozen=True)
class Share:
    """What one rank takes of a global batch.

    Attributes:
        samples: indices into the data set, int64 (n,), n at least 1.
        positions: the place of each in the run, int64 (n,): epoch * num_samples + place in the epoch.
        weight: what the mean loss over ``samples`` counts: number of ranks * n / samples of the global batch. The mean
            over ranks of weight * loss is then the mean loss over the global batch. It is 0 for a rank that has no
            sample of its own and takes one to be in step with the others.
    """

    samples: Int64Array
    positions: Int64Array
    weight: float


@dataclass(frozen=True)
class GlobalBatches:
    """The batches of a run over a data set, epoch after epoch.

    Attributes:
        num_samples: length of the data set.
        global_batch: samples of a step over all ranks.
        seed: of the order.
        shuffle: whether each epoch has an order of its own; otherwise it is that of the data set.
        drop_last: whether samples that fill no global batch are left out of the epoch.

    Raises:
        ConfigError: a number is below 1, or no batch is left, or the seed is none.
    """

    num_samples: int
    global_batch: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = True

    def __post_init__(self) -> None:
        for name in ("num_samples", "global_batch"):
            value = getattr(self, name)
            if not isinstance(value, (int, np.integer)) or value < 1:
                raise ConfigError(f"{name}: got {value!r}, expected a whole number of at least 1")
        if not isinstance(self.seed, (int, np.integer)) or not 0 <= self.seed < MOST_SEED:
            raise ConfigError(
                f"seed: got {self.seed!r}, expected a whole number from 0 to 2^63 - 1"
            )
        if self.drop_last and self.num_samples < self.global_batch:
            raise ConfigError(
                f"got {self.num_samples} samples and a global batch of {self.global_batch}, so no batch is full; use a "
                "smaller one, or drop_last=False"
            )

    def __len__(self) -> int:
        """Batches of an epoch."""
        whole, rest = divmod(self.num_samples, self.global_batch)
        return whole + (rest > 0 and not self.drop_last)

    def share(self, batch: int, rank: int, world_size: int) -> Share:
        """What one rank takes of a batch. Not collective. The number of the batch counts through all epochs, from 0."""
        epoch, index = divmod(batch, len(self))
        begin = index * self.global_batch
        count = min(self.global_batch, self.num_samples - begin)
        start, stop = count * rank // world_size, count * (rank + 1) // world_size
        weight = world_size * (stop - start) / count
        if start == stop:
            start, stop = 0, 1
        places = np.arange(begin + start, begin + stop, dtype=np.int64)
        positions = epoch * self.num_samples + places
        samples = places
        if self.shuffle:
            samples = Sampler(self.num_samples, self.seed).samples(positions)
        return Share(samples, positions, weight)


# Which samples, in which order, is decided here.
OURS = ("batch_size", "sampler", "batch_sampler", "generator", "in_order")
BATCHES = "batches"
IN_LAST = "in_last_batch"  # there, and True, while the program has the last batch of an epoch


class ResumableLoader:
    """The batches of one rank, epoch after epoch.

    ``for batch in loader`` gives what is left of the current epoch, so the first loop after ``load_state_dict`` goes on
    where the checkpoint was made. A loop that is left early is gone on with by the next one.

    Nothing here is collective: each rank has its own workers.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        global_batch: int,
        topology: Topology,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
        draws: bool = True,
        **options: Any,  # Any: of torch
    ) -> None:
        """Not collective.

        Args:
            dataset: with ``__getitem__`` and ``__len__``, equal on all ranks.
            global_batch: samples of a batch over all ranks.
            topology: its ``data`` ranks share each batch.
            seed: of the order, and of what samples draw.
            shuffle: whether each epoch has an order of its own.
            drop_last: whether samples that fill no global batch are left out of the epoch.
            draws: whether samples draw random numbers (augmentation). Each then has random streams of its own, which
                costs about 0.1 ms; torch's, NumPy's and Python's global ones. False where nothing is drawn.
            options: of ``torch.utils.data.DataLoader``: ``num_workers``, ``collate_fn``, ``pin_memory`` and so on.

        Raises:
            ConfigError: the data set is a stream or empty, no batch is full, or an option decides which samples come.
        """
        if wrong := [name for name in OURS if name in options]:
            raise ConfigError(
                f"ResumableLoader: got {', '.join(wrong)}; it decides itself which samples come, by "
                "global_batch, seed, shuffle and drop_last"
            )
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise ConfigError(
                f"ResumableLoader: got a {type(dataset).__name__}, which has no samples by number, so "
                "nobody knows where to go on in it (a state_dict of its own counts what one process has read, which "
                "means nothing on other ranks); give a data set with __getitem__ and __len__"
            )
        self.batches = GlobalBatches(len(dataset), global_batch, seed, shuffle, drop_last)
        self._rank, self._size = topology.data.rank, topology.data.size
        self._fingerprint = fingerprint_of(dataset)
        self._taken = 0
        self._turn = 0  # which loop over the batches is the last one
        self._in_last = False  # whether that loop has given the last batch of an epoch, and goes on
        self._over = False  # whether the next loop has nothing left
        keyed = Keyed(dataset, seed) if draws else Plain(dataset)
        # A generator of its own: the loader would draw from that of the program, once more in a resumed run.
        self._loader: DataLoader[Any] = DataLoader(
            keyed,
            batch_sampler=_LoaderState(self),
            generator=torch.Generator().manual_seed(seed),
            **options,
        )

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return len(self.batches)

    @property
    def taken(self) -> int:
        """Global batches given to the program since the start of the run."""
        return self._taken

    @property
    def epoch(self) -> int:
        """Number of the epoch that the program is in, from 0. The next one begins where the loop over this one ends."""
        return (self._taken - (self._in_last or self._over)) // len(self)

    def __iter__(self) -> Iterator[Any]:
        """What is left of the current epoch.

        Raises:
            ConfigError: ranks take different numbers of samples of some batch, so that a mean over ranks is not the
                mean over samples; ``weighted`` is for that.
        """
        batches = self.batches
        rest = 0 if batches.drop_last else batches.num_samples % batches.global_batch
        if batches.global_batch % self._size or rest % self._size:
            raise ConfigError(
                f"ResumableLoader: {self._size} ranks cannot take equal parts of {len(batches)} batches of "
                f"{batches.global_batch} of {batches.num_samples} samples; use a global batch that the ranks "
                "divide and drop_last=True, or `for weight, batch in loader.weighted()` and weight * loss"
            )
        return (batch for _, batch in self.weighted())

    def weighted(self) -> Iterator[tuple[float, Any]]:
        """What is left of the current epoch, each batch with the weight of this rank's mean loss.

        The mean over ranks of weight * loss is the mean loss over the global batch, and so are the gradients that a
        zeroified model averages. A rank without a sample gets one all the same, of weight 0.

        Raises:
            RuntimeError: another loop over this loader was begun meanwhile, or a state was loaded; or the data set
                raised StopIteration, which would end an epoch before its last batch.
        """
        self._turn += 1
        turn = self._turn
        if self._over:
            self._over = False
            return
        for batch in self._loader:
            weight = self.batches.share(self._taken, self._rank, self._size).weight
            self._taken += 1  # before: the program may save while it has the batch
            self._in_last = self._taken % len(self) == 0
            try:
                yield weight, batch
            finally:  # asked for the next one, or left
                if turn == self._turn:
                    self._in_last = False
            if turn != self._turn:
                raise RuntimeError(
                    "ResumableLoader: this loop is not the last one over the loader: another was begun, or a state was "
                    "loaded; leave the loop first"
                )
        if self._taken % len(self):
            raise RuntimeError(
                f"ResumableLoader: a sample of batch {self._taken % len(self)} of {len(self)} raised StopIteration, "
                "which ends a loop without a word; have the data set raise another error"
            )

    def state_dict(self) -> dict[str, int | str]:
        """What to keep in a checkpoint: how many batches were taken, and of what. Equal on all ranks.

        A data set may have a ``fingerprint``, a text that tells it from others of its length. One of ``datasets`` has
        one here, made of its rows.
        """
        fingerprint = {} if self._fingerprint is None else {"fingerprint": self._fingerprint}
        of_what = {name: int(value) for name, value in vars(self.batches).items()}
        ends = {IN_LAST: True} if self._in_last or self._over else {}
        return {BATCHES: self._taken, **of_what, **fingerprint, **ends}

    def load_state_dict(self, state: Mapping[str, int | str]) -> None:
        """Go on where ``state`` was made, on any number of ranks. Not collective.

        Raises:
            ConfigError: it is of other batches: the data set has another length, or an option differs.
        """
        mine = self.state_dict()
        if wrong := [
            f"{name} was {state.get(name)} and is {mine.get(name)}"
            for name in [*mine, *(["fingerprint"] if "fingerprint" not in mine else [])]
            if name not in (BATCHES, IN_LAST) and state.get(name) != mine.get(name)
        ]:
            raise ConfigError(
                f"ResumableLoader: the state is of other batches ({'; '.join(wrong)}); give the same data set and "
                "options"
            )
        taken = state.get(BATCHES)
        if not isinstance(taken, int) or taken < 0:
            raise ConfigError(
                f"ResumableLoader: the state has {taken!r} batches, expected 0 or more"
            )
        self._taken = taken
        self._over, self._in_last = bool(state.get(IN_LAST)), False
        self._turn += 1

    def _rest(self) -> Iterator[list[tuple[int, int]]]:
        """Keys of this rank's samples, batch after batch, from now on to the end of the epoch."""
        start = self._taken
        return (
            list(zip(share.samples.tolist(), share.positions.tolist(), strict=True))
            for share in (
                self.batches.share(batch, self._rank, self._size)
                for batch in range(start, (start // len(self) + 1) * len(self))
            )
        )


class _LoaderState:
    """What torch's loader and its workers read ahead from."""

    def __init__(self, loader: ResumableLoader) -> None:
        self._owner = loader

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return self._owner._rest()

    def __len__(self) -> int:
        return len(self._owner)


# Samples in tar files, as webdataset has them: by number, so any rank reads any of them and a run goes on anywhere.
#
# Members that follow one another and have one name up to the first dot are one sample: ``7.jpg`` and ``7.cls``. As in
# webdataset, names that begin with a dot (``._7.jpg`` of macOS), have none, or begin and end with ``__`` are none. The
# headers of all tar files are read once, by all ranks together. Afterwards a sample is some reads at offsets; nothing
# is unpacked.
#
# Source: the convention of webdataset, https://github.com/webdataset/webdataset.

BLOCK_NBYTES = 512  # of tar
OPEN_FILES = 32
STEP_MEMBERS = 1000
STEP_NBYTES = 2**20
PASSED_OVER = re.compile(r"__[^/]*__($|/)")


@dataclass(frozen=True)
class TarShard:
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
        self, shards: Sequence[TarShard], decode: Callable[[dict[str, Any]], Any] = dict
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
        shards = shared(team, "read the headers of its tar files", files, _indexed)
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
                sample[name] = read_at(descriptor, offset, nbytes).tobytes()
        except EOFError as error:
            raise DataError(f"{one.path}: has changed since its headers were read") from error
        except OSError as error:
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


def _indexed(path: Path) -> Generator[None, None, TarShard]:
    """Read the headers of a tar file, in steps."""
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
    return TarShard(path, nbytes, tuple((key, tuple(files)) for key, files in samples))


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
