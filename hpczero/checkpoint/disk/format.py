"""What a checkpoint is on disk: names, the parameter table, the grid of slabs, the manifest.

Owns: the format and its version (docs/checkpoint-format.md). Must not know: MPI, torch, HDF5, who writes what.

    <folder>/step-000001200/state.h5         flat datasets
                            manifest.json    what they are, where they lie, a digest of every byte; written last

Nothing in it depends on the number of ranks, the stage or the units at the save. Parameters lie end to end in
registration order, the trainable ones first, without padding.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
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

_DIGEST = re.compile(r"[0-9a-f]{16}")
_DATASET = {"name", "dtype", "numel", "slab_numel", "offset", "digests"}


def check_form(body: Mapping[str, Any]) -> None:
    """Refuse a manifest of an impossible form, whatever digest it states.

    Args:
        body: its JSON object.

    Raises:
        CorruptCheckpoint: the message names the field, what it is and what was expected.
    """
    whole(body, "step")
    whole(body, "world_size", most=MOST_RANKS)
    of_type(body, "created", str)
    file = of_type(body, "file", dict)
    of_type(file, "name", str, "file.")
    of_type(file, "rest", str, "file.")
    nbytes = whole(file, "nbytes", "file.")
    _check_datasets(of_type(body, "datasets", list), nbytes)
    _check_parameters(of_type(body, "parameters", list))
    of_type(body, "meta", dict)


def refuse(field: str, got: object, expected: str) -> CorruptCheckpoint:
    """The error for a field."""
    return CorruptCheckpoint(
        f"manifest.json cannot be: {field} is {shown(got)}, expected {expected}"
    )


def of_type(fields: Mapping[str, Any], name: str, kind: type, where: str = "") -> Any:
    """The field ``name``, of this type.

    Raises:
        CorruptCheckpoint: it does not exist, or has another type.
    """
    if name not in fields:
        raise refuse(f"{where}{name}", "not there", f"a {kind.__name__}")
    if type(fields[name]) is not kind:
        raise refuse(f"{where}{name}", fields[name], f"a {kind.__name__}")
    return fields[name]


def whole(
    fields: Mapping[str, Any], name: str, where: str = "", *, least: int = 0, most: int = MOST
) -> int:
    """The field ``name``, a whole number.

    Raises:
        CorruptCheckpoint: it is not a whole number, or out of range.
    """
    value = of_type(fields, name, int, where)
    if not least <= value <= most:
        raise refuse(f"{where}{name}", value, f"{least} to {most}")
    return int(value)


def shape_of(value: object, field: str) -> tuple[int, ...]:
    """A shape from a list of sizes.

    Raises:
        CorruptCheckpoint: it is no such list.
    """
    sizes = value if isinstance(value, list) else [None]
    if len(sizes) > MOST_DIMS or not all(type(n) is int and 0 <= n <= MOST for n in sizes):
        raise refuse(field, value, "a list of sizes")
    return tuple(sizes)


def is_text(value: str) -> bool:
    """Whether a text can be written as UTF-8; JSON's escapes may be half a character."""
    return value.isascii() or not any("\ud800" <= character <= "\udfff" for character in value)


def _check_datasets(entries: Sequence[object], file_nbytes: int) -> None:
    places = []
    names = set()
    for entry in entries:
        if not isinstance(entry, dict) or entry.keys() != _DATASET:
            raise refuse("a dataset", entry, f"an object with {', '.join(sorted(_DATASET))}")
        name = of_type(entry, "name", str)
        where = f"{shown(name)}."
        if name in names or not name.startswith("/") or not is_text(name):
            raise refuse(f"{where}name", name, "a path that no other dataset has")
        names.add(name)
        itemsize = DATASET_ITEMSIZES.get(of_type(entry, "dtype", str, where))
        if itemsize is None:
            raise refuse(f"{where}dtype", entry["dtype"], " or ".join(DATASET_ITEMSIZES))
        numel = whole(entry, "numel", where)
        slab = whole(entry, "slab_numel", where, least=1, most=MOST_SLAB_NBYTES // itemsize)
        begin = whole(entry, "offset", where)
        if numel:
            if begin + numel * itemsize > file_nbytes:
                raise refuse(
                    f"{where}offset + size",
                    begin + numel * itemsize,
                    f"at most the {file_nbytes} bytes of the file",
                )
            places.append((begin, begin + numel * itemsize, name))
        digests = of_type(entry, "digests", list, where)
        if len(digests) != -(-numel // slab):
            raise refuse(f"{where}digests", f"{len(digests)} digests", f"{-(-numel // slab)}")
        for digest in digests:
            if not isinstance(digest, str) or _DIGEST.fullmatch(digest) is None:
                raise refuse(f"{where}digests", digest, "16 hexadecimal digits")
    for before, after in pairwise(sorted(places)):
        if before[1] > after[0]:
            raise refuse(
                f"{after[2]}.offset", after[0], f"{before[1]} or above: behind {before[2]}"
            )


def _check_parameters(rows: Sequence[object]) -> None:
    """Refuse a table that breaks a rule.

    Each name comes once. Parameters with values lie end to end, trainable ones first. All other names are further names
    of these.
    """
    names: set[str] = set()
    end, frozen, further = 0, False, False
    for row in rows:
        if not isinstance(row, list) or len(row) != 5 or type(row[0]) is not str:
            raise refuse("a parameter", row, "name, shape, offset, group, tied_to")
        name, where = row[0], f"{shown(row[0])}."
        if name in names or not is_text(name):
            raise refuse("a parameter", name, "each name once, of whole characters")
        names.add(name)
        fields = {"offset": row[2], "group": row[3], "tied_to": row[4]}
        shape = shape_of(row[1], f"{where}shape")
        offset = whole(fields, "offset", where)
        group = whole(fields, "group", where, least=-1, most=2**15 - 1)
        if row[4] is not None:
            further = True
            _check_tie(rows, whole(fields, "tied_to", where, most=len(rows) - 1), row, where)
            continue
        if further or offset != end or (frozen and group >= 0):
            raise refuse(f"{where}offset", offset, f"{end}, trainable parameters first")
        end, frozen = end + prod(shape), frozen or group < 0


def _check_tie(rows: Sequence[Any], owner: int, row: Sequence[Any], where: str) -> None:
    other = rows[owner]
    if not isinstance(other, list) or len(other) != 5 or other[1:] != [*row[1:4], None]:
        raise refuse(
            f"{where}tied_to", owner, "the index of a parameter of the same shape and place"
        )


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
        places = {old: new for new, old in enumerate(kept)}
        rows = (self.rows[index] for index in kept)
        ties = (None if row.tied_to is None else places[row.tied_to] for row in rows)
        moved = zip(kept, ties, strict=True)
        return Table(tuple(replace(self.rows[index], tied_to=tie) for index, tie in moved))

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
            names = self.table.overlapping(slab.start, slab.stop)
            more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
            where = f" ({', '.join(names[:NAMED])}{more})"
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
        version = whole(body, "version", least=1)
        if version > VERSION:
            raise CheckpointMismatch(
                f"format version is {version}, and this hpczero reads up to {VERSION}; upgrade hpczero"
            )
        algorithm = of_type(body, "algorithm", str)
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
