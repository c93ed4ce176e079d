"""What a checkpoint is on disk: names, the parameter table, the grid of slabs, the manifest.

    <folder>/step-000001200/state.h5         flat datasets
                            manifest.json    what they are, where they lie, a digest of every byte; written last

Nothing in it depends on the number of ranks, the stage or the units at the save. Parameters lie end to end in
registration order, the trainable ones first, without padding. The format: docs/checkpoint-format.md.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime, timezone
from importlib.metadata import version
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from hpczero.errors import CheckpointMismatch, CorruptCheckpoint
from hpczero.files.regular import parse_json, shown

DATASET_ITEMSIZES = {"<f4": 4, "|u1": 1}
MOST = 2**63 - 1
MOST_SLAB_NBYTES = 2**30  # is in memory whole
MOST_RANKS = 2**31 - 1  # as MPI has it
MOST_DIMS = 64  # as NumPy has it

COUNT = (0, MOST)

# What a field may be: its type, the length of its list, or the least and the most of a whole number.
Kind = type | int | tuple[int, int]
# Fields of the manifest, outer ones first. ``*`` is every part of a list or object. A field with ``?`` may be missing
# or null.
RULES: dict[str, Kind] = {
    "step": COUNT,
    "world_size": (0, MOST_RANKS),
    "created": str,
    "file": dict,
    "file.name": str,
    "file.rest": str,
    "file.nbytes": COUNT,
    "datasets": list,
    "datasets.*": dict,
    "datasets.*.name": str,
    "datasets.*.dtype": str,
    "datasets.*.numel": COUNT,
    "datasets.*.slab_numel": (1, MOST_SLAB_NBYTES),
    "datasets.*.offset": COUNT,
    "datasets.*.digests": list,
    "datasets.*.digests.*": str,
    "parameters": list,
    "parameters.*": 5,
    "parameters.*.0": str,
    "parameters.*.1": list,
    "parameters.*.1.*": COUNT,
    "parameters.*.2": COUNT,
    "parameters.*.3": (-1, 2**15 - 1),
    "parameters.*.4?": COUNT,
    "meta": dict,
}
_DIGEST = re.compile(r"[0-9a-f]{16}")


def expect(sound: bool, field: str, got: object, expected: str) -> None:
    """Raise CorruptCheckpoint unless the field is sound. The message names the field, what it is and what it may be."""
    if not sound:
        raise CorruptCheckpoint(
            f"manifest.json cannot be: {field} is {shown(got)}, expected {expected}"
        )


def check_rules(body: Any, rules: Mapping[str, Kind], where: str = "") -> None:
    """Refuse an object whose fields are not as ``rules`` have it; ``where`` the object is, for the message.

    Raises:
        CorruptCheckpoint: the message names the field, what it is and what was expected.
    """
    for path, kind in rules.items():
        for place, value in _fields_at(body, path.split("."), where):
            plain = list if isinstance(kind, int) else kind if isinstance(kind, type) else int
            expect(type(value) is plain, place, value, f"a {plain.__name__}")
            if isinstance(kind, int):
                expect(len(value) == kind, place, value, f"{kind} parts")
            elif not isinstance(kind, type):
                expect(kind[0] <= value <= kind[1], place, value, f"{kind[0]} to {kind[1]}")


def _fields_at(value: Any, path: Sequence[str], where: str) -> Iterator[tuple[str, Any]]:
    if not path:
        yield where.rstrip("."), value
    elif value is not None:
        name = path[0].removesuffix("?")
        parts = dict(enumerate(value)) if isinstance(value, list) else value
        keys = list(parts) if name == "*" else [int(name) if isinstance(value, list) else name]
        for key in keys:
            if parts.get(key) is not None or not path[0].endswith("?"):
                expect(key in parts, f"{where}{key}", "not there", "a value")
                yield from _fields_at(parts[key], path[1:], f"{where}{key}.")


def is_text(value: str) -> bool:
    """Whether a text can be written as UTF-8; JSON's escapes may be half a character."""
    return value.isascii() or not any("\ud800" <= character <= "\udfff" for character in value)


def check_names(what: str, names: Sequence[str]) -> None:
    """Refuse a name that comes twice, or that no file can hold. Raises CorruptCheckpoint: the message has the name."""
    known: set[str] = set()
    for name in names:
        sound = name not in known and is_text(name)
        expect(sound, what, name, "each name once, of whole characters")
        known.add(name)


def check_form(body: Mapping[str, Any]) -> None:
    """Refuse the JSON object of a manifest of an impossible form, whatever digest it states.

    Raises:
        CorruptCheckpoint: the message names the field, what it is and what was expected.
    """
    check_rules(body, RULES)
    check_names("a dataset", [entry["name"] for entry in body["datasets"]])
    check_names("a parameter", [row[0] for row in body["parameters"]])
    _check_datasets(body["datasets"], body["file"]["nbytes"])
    _check_parameters(body["parameters"])


def _check_datasets(entries: Sequence[Any], file_nbytes: int) -> None:
    places = []
    for entry in entries:
        known = [each.name for each in fields(Dataset)]
        expect(sorted(entry) == sorted(known), "a dataset", entry, f"an object with {known}")
        name, numel, slab, digests = (entry[k] for k in ("name", "numel", "slab_numel", "digests"))
        expect(name.startswith("/"), "a dataset", name, "a path")
        itemsize = DATASET_ITEMSIZES.get(entry["dtype"], 0)
        expect(itemsize > 0, f"{name}.dtype", entry["dtype"], " or ".join(DATASET_ITEMSIZES))
        most = MOST_SLAB_NBYTES // itemsize
        expect(slab <= most, f"{name}.slab_numel", slab, f"1 to {most}")
        begin, end = entry["offset"], entry["offset"] + numel * itemsize
        if numel:
            expect(end <= file_nbytes, f"{name}: its end", end, f"at most {file_nbytes}")
            places.append((begin, end, name))
        found, count = len(digests), -(-numel // slab)
        expect(found == count, f"{name}.digests", f"{found} digests", f"{count}")
        for digest in digests:
            sound = _DIGEST.fullmatch(digest) is not None
            expect(sound, f"{name}.digests", digest, "16 hexadecimal digits")
    for (_, end, before), (begin, _, name) in pairwise(sorted(places)):
        expect(end <= begin, f"{name}.offset", begin, f"{end} or above: behind {before}")


def _check_parameters(rows: Sequence[Any]) -> None:
    """Refuse a table whose parameters with values do not lie end to end, trainable ones first.

    All other names must be further names of these, and come last.
    """
    end, frozen, further = 0, False, False
    for name, shape, offset, group, owner in rows:
        expect(len(shape) <= MOST_DIMS, f"{name}.shape", shape, "a list of sizes")
        if owner is None:
            sound = not further and offset == end and not (frozen and group >= 0)
            expect(sound, f"{name}.offset", offset, f"{end}, trainable parameters first")
            end, frozen = end + prod(shape), frozen or group < 0
        else:
            further = True
            sound = owner < len(rows) and rows[owner][1:] == [shape, offset, group, None]
            same = "the index of a parameter of the same shape and place"
            expect(sound, f"{name}.tied_to", owner, same)


FORMAT = "hpczero checkpoint"
VERSION = 1
ALGORITHM = "xxh3_64"
SLAB_NBYTES = 16 * 2**20
STATE_FILE = "state.h5"
MANIFEST_FILE = "manifest.json"
MASTER = "/state/master"
BUFFERS = "/buffers"
RNG = "/rng"
STATE = "/state/"  # and a key of the optimizer's state
SEVERAL = "optimizers"  # in what the manifest says of the optimizer: class and number of groups of each, if several
NAMED = 5  # of many in a message
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module"}

_LAST_FIELD = ', "sha256": '
_STEP_FOLDER = re.compile(r"step-(\d{9,})")


def step_folder(step: int) -> str:
    """Name of the folder of a committed checkpoint."""
    return f"step-{step:09d}"


def step_of_folder(name: str) -> int | None:
    """The step that a folder's name states; None if it is not one of our names."""
    found = _STEP_FOLDER.fullmatch(name)
    return int(found[1]) if found and step_folder(int(found[1])) == name else None


def digest(data: npt.NDArray[Any]) -> str:
    """Digest of the bytes of a contiguous array, 16 hexadecimal digits."""
    return str(xxhash.xxh3_64(data.data).hexdigest())


def now() -> str:
    """UTC, ISO 8601, in seconds."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def programs() -> dict[str, str]:
    """Where, when and with which programs a checkpoint is made."""
    return {
        "host": socket.gethostname(),
        "created": now(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "numpy": version("numpy"),
    }


def some(names: Sequence[str], between: str = ", ") -> str:
    """The first of some names, and how many more there are, for a message."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return between.join(names[:NAMED]) + more


def plain_name(name: str) -> str:
    """The name without what ``torch.compile(module)`` and torch's ``checkpoint_wrapper`` put into it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


@dataclass(frozen=True)
class Row:
    """One name in the parameter table.

    Attributes:
        name: qualified, as in ``model.named_parameters(remove_duplicate=False)``, by ``plain_name``.
        shape: shape of the parameter.
        offset: place of its first element in the flat datasets.
        group: optimizer group; -1 if it is frozen.
        tied_to: index of the row that holds its values, if this is a further name of a tied parameter.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    group: int
    tied_to: int | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def frozen(self) -> bool:
        """Whether it has no optimizer state."""
        return self.group < 0


@dataclass(frozen=True)
class Table:
    """All parameters of a model. Rows that hold values come first, in the order of their offsets."""

    rows: tuple[Row, ...]

    @classmethod
    def build(
        cls, parameters: Iterable[tuple[str, tuple[int, ...], int]], aliases: Mapping[str, str]
    ) -> Table:
        """Lay parameters end to end, trainable ones first.

        Args:
            parameters: (name, shape, group) in registration order, each once.
            aliases: further names of tied parameters, each with the name it is tied to.
        """
        rows: list[Row] = []
        offset = 0
        listed = list(parameters)
        for name, shape, group in sorted(listed, key=lambda entry: entry[2] < 0):  # stable
            rows.append(Row(name, tuple(shape), offset, group))
            offset += rows[-1].numel
        places = {row.name: index for index, row in enumerate(rows)}
        for alias, name in aliases.items():
            owner = rows[places[name]]
            rows.append(Row(alias, owner.shape, owner.offset, owner.group, places[name]))
        return cls(tuple(rows))

    @property
    def owners(self) -> tuple[Row, ...]:
        """Rows that hold values of their own."""
        return tuple(row for row in self.rows if row.tied_to is None)

    @property
    def numel(self) -> int:
        """Elements of all parameters, each tied one once."""
        return sum(row.numel for row in self.owners)

    @property
    def trainable_numel(self) -> int:
        """Elements that have optimizer state; they come first."""
        return sum(row.numel for row in self.owners if not row.frozen)

    def trained(self) -> Table:
        """The trainable parameters alone, with their further names; they keep their places."""
        kept = [index for index, row in enumerate(self.rows) if not row.frozen]
        places: dict[int | None, int | None] = {old: new for new, old in enumerate(kept)}
        places[None] = None
        rows = [self.rows[index] for index in kept]
        return Table(tuple(replace(row, tied_to=places[row.tied_to]) for row in rows))

    def named(self) -> dict[str, Row]:
        """Rows by name."""
        return {row.name: row for row in self.rows}

    def overlapping(self, start: int, stop: int) -> list[str]:
        """Parameters with elements in [start, stop), as ``name[a:b]``."""
        found = []
        for row in self.owners:
            first, last = max(start, row.offset), min(stop, row.offset + row.numel)
            if first < last:
                found.append(f"{row.name}[{first - row.offset}:{last - row.offset}]")
        return found

    def to_json(self) -> list[list[Any]]:
        """The table as plain lists."""
        return [[r.name, list(r.shape), r.offset, r.group, r.tied_to] for r in self.rows]

    @classmethod
    def from_json(cls, rows: Sequence[Sequence[Any]]) -> Table:
        """The reverse of ``to_json``."""
        return cls(
            tuple(
                Row(str(name), tuple(map(int, shape)), int(offset), int(group), tied_to)
                for name, shape, offset, group, tied_to in rows
            )
        )


@dataclass(frozen=True)
class Dataset:
    """One flat dataset, cut into slabs of fixed size from its start; the last may be short.

    Attributes:
        name: path in the HDF5 file.
        dtype: NumPy's name of the type, little endian, such as ``<f4``.
        numel: number of elements.
        slab_numel: number of elements of a slab.
        offset: place of its first byte in the file; 0 until the file is made, and if the dataset is empty.
        digests: one of each slab; empty until it is written.
    """

    name: str
    dtype: str
    numel: int
    slab_numel: int
    offset: int = 0
    digests: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str, dtype: str, numel: int, slab_nbytes: int = SLAB_NBYTES) -> Dataset:
        """A dataset with slabs of ``slab_nbytes`` bytes."""
        return cls(name, dtype, numel, max(slab_nbytes // np.dtype(dtype).itemsize, 1))

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return np.dtype(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.numel * self.itemsize

    @property
    def num_slabs(self) -> int:
        """Number of slabs."""
        return -(-self.numel // self.slab_numel)

    def slab(self, index: int) -> range:
        """Elements of slab ``index``."""
        start = index * self.slab_numel
        return range(start, min(start + self.slab_numel, self.numel))

    def slabs_of(self, rank: int, size: int) -> range:
        """Slabs that ``rank`` of ``size`` ranks writes or reads: consecutive, and as even as possible."""
        return range(rank * self.num_slabs // size, (rank + 1) * self.num_slabs // size)


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds. A reader who has it needs nothing more than bytes at offsets.

    Attributes:
        step: optimizer steps done.
        created: UTC, ISO 8601.
        world_size: number of ranks that saved it.
        table: the parameters.
        datasets: all flat datasets.
        file_nbytes: size of the HDF5 file in bytes.
        rest: digest of all bytes of the file outside of the datasets.
        meta: optimizer, buffers, random streams, the user's extra, provenance.
        version: version of the format.
    """

    step: int
    created: str
    world_size: int
    table: Table
    datasets: tuple[Dataset, ...]
    file_nbytes: int
    rest: str
    meta: dict[str, Any] = field(default_factory=dict)
    version: int = VERSION

    def plain(self) -> Manifest:
        """The same by ``plain_name``: files of before have the names of wrapped modules. Its content was checked."""
        rows = tuple(replace(row, name=plain_name(row.name)) for row in self.table.rows)
        if len({row.name for row in rows}) < len(rows):
            return self
        meta = dict(self.meta)
        meta["buffers"] = [[plain_name(name), *rest] for name, *rest in meta["buffers"]]
        if optimizer := meta["optimizer"]:
            present = {key: _plain_keys(values) for key, values in optimizer["present"].items()}
            meta["optimizer"] = {**optimizer, "present": present}
        base = meta.get("base")
        if isinstance(base, dict) and isinstance(base.get("sums"), dict):
            meta["base"] = {**base, "sums": _plain_keys(base["sums"])}
        return replace(self, table=Table(rows), meta=meta)

    def dataset(self, name: str) -> Dataset | None:
        """The dataset with this path."""
        return next((dataset for dataset in self.datasets if dataset.name == name), None)

    def damage(self, path: Path, dataset: Dataset, slab: range) -> str:
        """A text that says which elements of which parameters are not those that were written."""
        where = ""
        if dataset.dtype == "<f4":
            where = f" ({some(self.table.overlapping(slab.start, slab.stop))})"
        return (
            f"{path}: corrupt: elements {slab.start:,} to {slab.stop:,} of {dataset.name}{where} do not have the "
            "digest they were written with"
        )

    def to_json(self) -> str:
        """The text of ``manifest.json``: one object.

        Its last field, ``sha256``, is the digest of all text before it.
        """
        body = {
            "format": FORMAT,
            "version": self.version,
            "step": self.step,
            "created": self.created,
            "world_size": self.world_size,
            "algorithm": ALGORITHM,
            "file": {"name": STATE_FILE, "nbytes": self.file_nbytes, "rest": self.rest},
            "datasets": [asdict(dataset) for dataset in self.datasets],
            "parameters": self.table.to_json(),
            "meta": self.meta,
        }
        head = json.dumps(body)[:-1]
        return f'{head}{_LAST_FIELD}"{_sha256(head)}"}}'

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Read a manifest and check it.

        Raises:
            CorruptCheckpoint: it is not whole, or was changed.
            CheckpointMismatch: a later version wrote it.
        """
        try:
            body = parse_json(text)
        except ValueError as error:
            raise CorruptCheckpoint(f"{MANIFEST_FILE} is not whole ({error})") from error
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            found = body.get("format") if isinstance(body, dict) else body
            raise CorruptCheckpoint(f"format is {shown(found)}, expected {FORMAT!r}")
        # Of the text itself: a flipped bit may leave the meaning as it was, as in 1e-8 and 1E-8.
        head = text.rpartition(_LAST_FIELD)[0]
        if text != f'{head}{_LAST_FIELD}"{_sha256(head)}"}}':
            raise CorruptCheckpoint(
                f"{MANIFEST_FILE} was changed: it does not have the digest it states"
            )
        check_rules(body, {"version": (1, MOST), "algorithm": str})
        version, algorithm = body["version"], body["algorithm"]
        if version > VERSION:
            raise CheckpointMismatch(
                f"format version is {version}, and this hpczero reads up to {VERSION}; upgrade hpczero"
            )
        if algorithm != ALGORITHM:
            raise CheckpointMismatch(
                f"digests are {shown(algorithm)}, expected {ALGORITHM!r}; upgrade hpczero"
            )
        check_form(body)
        return cls(
            step=body["step"],
            created=body["created"],
            world_size=body["world_size"],
            table=Table.from_json(body["parameters"]),
            datasets=tuple(
                Dataset(**{**entry, "digests": tuple(entry["digests"])})
                for entry in body["datasets"]
            ),
            file_nbytes=body["file"]["nbytes"],
            rest=body["file"]["rest"],
            meta=body["meta"],
            version=version,
        )


def _plain_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    return {plain_name(name): value for name, value in values.items()}


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
