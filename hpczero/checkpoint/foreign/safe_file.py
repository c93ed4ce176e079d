"""Safetensors files, written tensor by tensor: one file, or several with an index.

The safetensors library cannot be used to write: it writes only what is whole in memory. The bytes are those of
``safetensors.torch.save_file``, with the metadata sorted, so equal weights are equal files. torch is imported only
where tensors of torch are written: the checkpoint command writes files without it.

    8 bytes: size of the header | header: JSON, padded with spaces | tensors, end to end, by dtype and name
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash
from typing_extensions import Self

from hpczero.errors import CheckpointError, CheckpointNotWritten
from hpczero.files.direct import write_at
from hpczero.files.durable import sync
from hpczero.files.regular import WHY, Explained, parse_json
from hpczero.job.team import Alone, Team

if TYPE_CHECKING:
    from torch import Tensor

DIGESTS_KEY = "hpczero.digests"
HAS = "hpczero.has-digests"  # a second entry, or damage to the name of the first would leave a file without digests
UNKNOWN = "0" * 16  # as long as any other

Array = npt.NDArray[Any]


def digest_of_tensor(dtype: str, shape: Iterable[int]) -> Any:
    """Digest of one tensor, to be updated with its contiguous bytes; ``dtype`` as in the file."""
    return xxhash.xxh3_64(f"{dtype} {list(shape)} ".encode())


def tensor_digest(dtype: str, shape: Iterable[int], pieces: Iterable[Array]) -> str:
    """``digest_of_tensor``, 16 hexadecimal digits, of bytes that are there."""
    state = digest_of_tensor(dtype, shape)
    for piece in pieces:
        state.update(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
    return str(state.hexdigest())


def with_digests(metadata: Mapping[str, str], tensors: Mapping[str, str]) -> dict[str, str]:
    """``metadata`` with the entries for the digests; ``tensors`` has the digest of each tensor."""
    entry = {"metadata": _of_texts(metadata), "tensors": dict(tensors)}
    return {**metadata, HAS: "true", DIGESTS_KEY: json.dumps(entry, separators=(",", ":"))}


def digests_of(metadata: Mapping[str, str], names: Iterable[str]) -> dict[str, str] | None:
    """What a file with these ``metadata`` and tensors states as digest of each tensor; None if it states none.

    Raises:
        ValueError: the metadata are not what was written, or the file has other tensors.
    """
    if DIGESTS_KEY not in metadata and HAS not in metadata:
        return None
    if DIGESTS_KEY not in metadata or metadata.get(HAS) != "true":
        raise ValueError("its digests are lost")
    entry = parse_json(metadata[DIGESTS_KEY])
    fields = entry if isinstance(entry, dict) else {}
    others = {name: text for name, text in metadata.items() if name not in (DIGESTS_KEY, HAS)}
    if fields.get("metadata") != _of_texts(others):
        raise ValueError("what it says beside its tensors does not have the digest it states")
    tensors = fields.get("tensors")
    if not isinstance(tensors, dict) or tensors.keys() != set(names):
        raise ValueError("its tensors are not those it has digests of")
    return tensors


def _of_texts(metadata: Mapping[str, str]) -> str:
    text = json.dumps(sorted(metadata.items()))
    return str(xxhash.xxh3_64(text.encode()).hexdigest())


SINGLE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
KEY = "hpczero.checkpoint"  # of what our own files say about their tensors
ALIGNMENT = 8

# dtype of torch: its name in the file, bytes of an element. In the order of the library's own list: a file has the
# tensors of the last dtypes first. safetensors 0.8, safetensors/src/tensor.rs: enum Dtype, fn prepare
DTYPES = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "int16": ("I16", 2),
    "uint16": ("U16", 2),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int32": ("I32", 4),
    "uint32": ("U32", 4),
    "float32": ("F32", 4),
    "float64": ("F64", 8),
    "int64": ("I64", 8),
    "uint64": ("U64", 8),
}
_RANKS = {dtype: rank for rank, dtype in enumerate(DTYPES)}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file: torch's name of its dtype, its shape, and its bytes in contiguous pieces.

    A piece is valid until the next one. Pieces are left out where they are known later.
    """

    dtype: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[Array]] = lambda: iter(())

    @property
    def code(self) -> str:
        """Name of the dtype in the file."""
        return DTYPES[self.dtype][0]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return prod(self.shape) * DTYPES[self.dtype][1]


class SafeFile:
    """One file on its way to the disk; a context manager, which leaves nothing of a file that was not committed.

    Several ranks may write it, each its own tensors, whole. Entering the block and ``commit`` are collective over them;
    ``write`` is not. Calls raise ``error`` where the file cannot be written. Tensors come in any order.
    """

    error: type[CheckpointError] = CheckpointNotWritten

    def __init__(
        self,
        path: Path,
        entries: Mapping[str, TensorEntry],
        metadata: Mapping[str, str],
        team: Team | None = None,
    ) -> None:
        """Nothing is written before the block begins.

        Args:
            path: replaced if it exists; the same file on every rank.
            entries: the tensors by name.
            metadata: what the file says beside its tensors.
            team: the ranks that write, which all give the same arguments; None: this process.
        """
        self._entries, self._metadata = entries, metadata
        self._team = team or Alone()
        self._digests: dict[str, str] = {}  # of what this rank has written
        self._places: dict[str, int] = {}
        self._nbytes = 0
        for name in sorted(sorted(entries), key=lambda name: -_RANKS[entries[name].dtype]):
            self._places[name] = self._nbytes
            self._nbytes += entries[name].nbytes
        self._path = path
        self._temporary = path.with_name(f".{path.name}.tmp")
        self._begin = len(self._header({}))  # of the tensors in the file

    def write(self, name: str, pieces: Iterable[Array]) -> None:
        """Write the bytes of one tensor, which are given from first to last."""
        for _ in self.steps(name, pieces):
            pass

    def steps(self, name: str, pieces: Iterable[Array]) -> Iterator[None]:
        """As ``write``; stops after each piece."""
        entry = self._entries[name]
        end = self._begin + self._places[name] + entry.nbytes
        state = digest_of_tensor(entry.code, entry.shape)
        # Opened for each tensor: a folder may have more files than a process may hold open.
        with self._told():
            file = self._temporary.open("r+b", buffering=0)
        with file:
            begin = end - entry.nbytes
            for piece in pieces:
                flat = np.ascontiguousarray(piece).reshape(-1).view(np.uint8)
                with self._told():
                    write_at(file.fileno(), begin, flat)
                state.update(flat.data)
                begin += flat.nbytes
                yield
        assert begin == end, f"{name}: {begin - end} bytes too many"
        self._digests[name] = state.hexdigest()

    def commit(self) -> None:
        """All tensors are written: the file takes its name, once it is on the disk."""
        team = self._team
        with team.agreed(f"write {self._path.name}"), self._told():
            if self._digests:
                sync(self._temporary)
        found = {k: v for part in team.all_gather_lists([*self._digests.items()]) for k, v in part}
        missing = [name for name in self._entries if name not in found]
        assert not missing, f"never written: {missing}"
        with team.agreed(f"write {self._path.name}"), self._told():
            if team.rank == 0:
                with self._temporary.open("r+b") as file:
                    file.write(self._header(found))
                sync(self._temporary)  # a rename may reach the disk before the contents do
                self._temporary.replace(self._path)

    def __enter__(self) -> Self:
        header = self._header({})
        digests = self._team.all_gather_lists([xxhash.xxh3_64(header).hexdigest()])
        if any(theirs != digests[0] for theirs in digests):
            raise self.error(
                f"{self._path}: ranks differ in the names, shapes or dtypes of its tensors, or in what it says beside "
                "them; give the same model and the same options on every rank"
            )
        try:
            with self._team.agreed(f"begin {self._path.name}"), self._told():
                if self._team.rank == 0:
                    with self._temporary.open("wb") as file:
                        file.write(header)
                        # an empty tensor may be the last
                        file.truncate(self._begin + self._nbytes)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # of what could not be written: told before
            if self._team.rank == 0:
                self._temporary.unlink(missing_ok=True)

    def _told(self) -> Explained:
        return Explained(
            self.error,
            f"{self._path}: the weights cannot be written ({WHY}); check space and permissions",
        )

    def _header(self, digests: Mapping[str, str]) -> bytes:
        """Of the same size, whether ``digests`` are known or not."""
        known = {name: digests.get(name, UNKNOWN) for name in self._entries}
        metadata = with_digests(self._metadata, known)
        header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
        for name, begin in self._places.items():
            entry = self._entries[name]
            header[name] = {
                "dtype": entry.code,
                "shape": list(entry.shape),
                "data_offsets": [begin, begin + entry.nbytes],
            }
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % ALIGNMENT)
        return len(text).to_bytes(8, "little") + text


def divided(sizes: Mapping[str, int], most: int) -> dict[str, list[str]]:
    """Names of tensors by file: ``model-00001-of-0000N.safetensors`` and so on, in order.

    Args:
        sizes: bytes of each tensor.
        most: bytes of a file. A larger tensor has a file of its own.
    """
    parts: list[list[str]] = [[]]
    room = most
    for name, nbytes in sizes.items():
        if parts[-1] and nbytes > room:
            parts.append([])
            room = most
        parts[-1].append(name)
        room -= nbytes
    count = len(parts)
    return {f"model-{n:05d}-of-{count:05d}.safetensors": part for n, part in enumerate(parts, 1)}


def write_index(folder: Path, parts: Mapping[str, list[str]], sizes: Mapping[str, int]) -> None:
    """Write the index, which says in which file each tensor is. ``parts`` is of ``divided(sizes, ...)``.

    Raises:
        OSError: it cannot be written.
    """
    places = {name: file for file, part in parts.items() for name in part}
    total = {"total_size": sum(sizes.values())}
    content = {"metadata": total, "weight_map": {name: places[name] for name in sizes}}
    write_json(folder / INDEX_FILE, content)


def write_all(
    folder: Path,
    entries: Mapping[str, TensorEntry],
    metadata: Mapping[str, str],
    most: int,
    team: Team | None = None,
) -> None:
    """Write files of at most ``most`` bytes, then the index. Collective over ``team``.

    Each rank writes a range of the tensors, in their order: about as many bytes as any other rank.

    Raises:
        CheckpointNotWritten: they cannot be written.
    """
    team = team or Alone()
    sizes = {name: entry.nbytes for name, entry in entries.items()}
    parts = divided(sizes, most)
    with ExitStack() as stack:
        homes: dict[str, SafeFile] = {}
        for file, names in parts.items():
            part = {name: entries[name] for name in names}
            writer = stack.enter_context(SafeFile(folder / file, part, metadata, team))
            homes |= dict.fromkeys(names, writer)

        def steps() -> Iterator[None]:
            for name, rank in ranges(sizes, team.size).items():
                if rank == team.rank:
                    yield from homes[name].steps(name, entries[name].pieces())

        team.take_steps("write the weights", steps())
        for writer in dict.fromkeys(homes.values()):
            writer.commit()
    with team.agreed("write the index"):
        if team.rank == 0:
            write_index(folder, parts, sizes)


def ranges(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Which of ``ranks`` writes each tensor: neighbours go to one rank, and ranks have about as many bytes each."""
    total, begin = max(sum(sizes.values()), 1), 0
    found = {}
    for name, nbytes in sizes.items():
        found[name] = min((2 * begin + nbytes) * ranks // (2 * total), ranks - 1)
        begin += nbytes
    return found


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write one small file; it is on the disk on return. Raises OSError: it cannot be written."""
    with path.open("x", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())


class WeightsWriter(SafeFile):
    """One file of tensors of torch."""

    error = CheckpointError

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, Tensor],
        metadata: Mapping[str, str],
        team: Team | None = None,
    ) -> None:
        """Nothing is written before the block begins.

        Args:
            path: replaced if it exists.
            tensors: shapes and dtypes by name, in the order of the model; values do not matter. The same tensor under
                several names is written under the first.
            metadata: what the file says beside its tensors.
            team: as of ``SafeFile``. Each tensor is written by one rank.
        """
        self._names = {id(tensors[name]): name for name in reversed(list(tensors))}
        self._tensors = dict(tensors)  # ids stay theirs
        entries = {
            name: TensorEntry(
                str(tensors[name].dtype).removeprefix("torch."), tuple(tensors[name].shape)
            )
            for name in self._names.values()
        }
        super().__init__(path, entries, metadata, team)
        self._writers = spread({name: e.nbytes for name, e in entries.items()}, self._team.size)

    def put(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Write those values that this rank writes, each with the very tensor that the file was begun with.

        Shapes and dtypes are those of the tensors. Not collective.

        Raises:
            CheckpointError: they cannot be written.
        """
        for tensor, values in pairs:
            if self._writers[self._names[id(tensor)]] == self._team.rank:
                self.put_tensor(tensor, values)

    def put_tensor(self, tensor: Tensor, values: Tensor) -> None:
        """As ``put``, of one tensor, whichever rank writes it."""
        import torch  # here: the checkpoint command writes files without it

        assert (values.dtype, values.shape) == (tensor.dtype, tensor.shape), "as it was begun"
        flat = values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        self.write(self._names[id(tensor)], [flat])


def spread(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Which of ``ranks`` writes each tensor: the one that has the fewest bytes, so neighbours go to different ranks."""
    loads = [0] * ranks
    found = {}
    for name, nbytes in sizes.items():
        found[name] = loads.index(min(loads))
        loads[found[name]] += nbytes
    return found
