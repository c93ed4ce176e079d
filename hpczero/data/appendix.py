"""What follows HDF5's part of a token file: where its slabs lie, a digest of each; and the reader of these slabs.

With the appendix our reader needs bytes at offsets and no library. HDF5's own part is for other readers.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from hpczero.errors import DataError
from hpczero.files.direct import read_into
from hpczero.files.regular import parse_json, reason, shown

FORMAT = "hpczero tokens"
VERSION = 2
LINE_NBYTES = 256
SPLITS = ("train", "validation")
DTYPES = ("uint8", "uint16", "uint32")
MOST_SLAB_NUMEL = 2**28  # is in memory whole
DESCRIPTION_NBYTES = 2**28  # a tokenizer of a million pairs has a tenth of it

_LINE = re.compile(rb"hpczero tokens 2: ([0-9]{1,18}) bytes, described in ([0-9]{1,18}), sha256 .*")

Table = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class SplitPart:
    """One split.

    Attributes:
        dtype: NumPy's name of the type, little endian in the file.
        numel: number of tokens.
        slab_numel: tokens of a slab; the last slab may be short.
        documents: number of documents that end in it.
        text_nbytes: bytes of its text.
        table: digest of the table of its slabs, 16 hexadecimal digits.
    """

    dtype: str
    numel: int
    slab_numel: int
    documents: int
    text_nbytes: int
    table: str

    @property
    def num_slabs(self) -> int:
        """Number of slabs."""
        return -(-self.numel // self.slab_numel)

    def slab(self, index: int) -> range:
        """Tokens of slab ``index``."""
        start = index * self.slab_numel
        return range(start, min(start + self.slab_numel, self.numel))


@dataclass(frozen=True)
class Description:
    """What a token file holds.

    Attributes:
        tokenizer: JSON of ``tokenize.from_json``.
        source_sha256: SHA-256 of the text.
        train, validation: the splits.
    """

    tokenizer: str
    source_sha256: str
    train: SplitPart
    validation: SplitPart

    def parts(self) -> dict[str, SplitPart]:
        """The splits by name, in the order of their tables."""
        return {"train": self.train, "validation": self.validation}


def digest(data: npt.NDArray[Any]) -> int:
    """Digest of the bytes of a contiguous array: xxh3, 64 bits."""
    return xxhash.xxh3_64_intdigest(data.data)


def table_digest(table: Table) -> str:
    """Digest of a table, in the form that a description has."""
    return f"{digest(table):016x}"


def to_bytes(start: int, description: Description, tables: Mapping[str, Table]) -> bytes:
    """The appendix of a file whose HDF5 part has ``start`` bytes."""
    text = json.dumps({"format": FORMAT, "version": VERSION, **asdict(description)}).encode()
    data = b"".join(tables[name].astype("<u8").tobytes() for name in SPLITS)
    return data + text + _line(start + len(data) + len(text) + LINE_NBYTES, text)


def _line(file_nbytes: int, text: bytes) -> bytes:
    """The last line of the file. It is compared whole, so every byte of it is checked."""
    sha256 = hashlib.sha256(text).hexdigest()
    said = f"hpczero tokens 2: {file_nbytes} bytes, described in {len(text)}, sha256 {sha256}"
    return said.encode().ljust(LINE_NBYTES - 1) + b"\n"


def read(descriptor: int) -> tuple[Description, dict[str, Table]] | None:
    """The appendix of an open file, checked; None if it has none.

    Raises:
        ValueError: it is damaged; the message says how.
        OSError: it cannot be read.
    """
    nbytes = os.fstat(descriptor).st_size
    line = os.pread(descriptor, LINE_NBYTES, max(nbytes - LINE_NBYTES, 0))
    if not line.startswith(b"hpczero tokens "):
        return None
    found = _LINE.match(line)
    if found is None:
        raise ValueError("its last line is damaged")
    text_nbytes = int(found[2])
    start = nbytes - LINE_NBYTES - text_nbytes
    if int(found[1]) != nbytes or start < 0 or text_nbytes > DESCRIPTION_NBYTES:
        raise ValueError(f"it has {nbytes:,} bytes, and its last line says {int(found[1]):,}")
    text = os.pread(descriptor, text_nbytes, start)
    if line != _line(nbytes, text):
        raise ValueError("its description does not have the digest it was written with")
    description = _description(parse_json(text.decode()))
    tables = {}
    for name, part in reversed(description.parts().items()):
        start -= part.num_slabs * 16
        if start < 0:
            raise ValueError(f"/{name}/tokens has more slabs than the file has room for")
        tables[name] = _table(descriptor, start, name, part, nbytes)
    return description, tables


def _table(descriptor: int, start: int, name: str, part: SplitPart, file_nbytes: int) -> Table:
    data = bytearray(part.num_slabs * 16)
    if os.preadv(descriptor, [data], start) != len(data):
        raise ValueError(f"the table of /{name}/tokens cannot be read whole")
    table = np.frombuffer(data, dtype="<u8").reshape(-1, 2)
    if table_digest(table) != part.table:
        raise ValueError(
            f"the table of /{name}/tokens does not have the digest it was written with"
        )
    itemsize = np.dtype(part.dtype).itemsize
    largest = min(part.slab_numel, part.numel) * itemsize
    if largest > file_nbytes or int(table[:, 0].max(initial=0)) > file_nbytes - largest:
        raise ValueError(f"slabs of /{name}/tokens lie behind the end of the file")
    return table


def _description(body: object) -> Description:
    """A description from its JSON; a ValueError if a field has an impossible value, whatever digest the file states."""
    fields = body if isinstance(body, dict) else {}
    for name, expected in (("format", FORMAT), ("version", VERSION)):
        if fields.get(name) != expected:
            raise ValueError(f"its {name} is {shown(fields.get(name))}, expected {expected!r}")
    for name in ("tokenizer", "source_sha256"):
        if type(fields.get(name)) is not str:
            raise ValueError(f"its {name} is {shown(fields.get(name))}, expected text")
    parts = {name: _part(name, fields.get(name)) for name in SPLITS}
    return Description(fields["tokenizer"], fields["source_sha256"], **parts)


def _part(split: str, entry: object) -> SplitPart:
    fields = entry if isinstance(entry, dict) else {}
    ranges = {
        "numel": (1, 2**62),
        "slab_numel": (1, MOST_SLAB_NUMEL),
        "documents": (0, 2**62),
        "text_nbytes": (0, 2**62),
    }
    for name, (least, most) in ranges.items():
        value = fields.get(name)
        if type(value) is not int or not least <= value <= most:
            raise ValueError(f"{split}.{name} is {shown(value)}, expected {least} to {most}")
    if fields.get("dtype") not in DTYPES:
        raise ValueError(f"{split}.dtype is {shown(fields.get('dtype'))}, expected one of {DTYPES}")
    table = fields.get("table")
    if not isinstance(table, str) or re.fullmatch("[0-9a-f]{16}", table) is None:
        raise ValueError(f"{split}.table is {shown(table)}, expected 16 hexadecimal digits")
    return SplitPart(table=table, dtype=fields["dtype"], **{name: fields[name] for name in ranges})


# The tokens of one split, read at offsets. Each slab is checked against its digest when it is first touched. Every id
# must be one of the vocabulary, too. A sound slab is not checked again: from then on only what is asked for is read.

REMEDY = "prepare it anew with `python -m hpczero.data prepare`, or fetch another copy"

TokenArray: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]


class Slabs:
    """One split in an open file. Not collective; one thread at a time."""

    def __init__(
        self, path: Path, descriptor: int, name: str, part: SplitPart, table: Table, vocab_size: int
    ) -> None:
        self._what = f"{path}: damaged: /{name}/tokens"
        self._descriptor = descriptor
        self._part = part
        self._places, self._digests = table[:, 0], table[:, 1]
        self.fingerprint = self._digests.tobytes()
        self._vocab_size = vocab_size
        self._sound = bytearray(part.num_slabs)
        self.dtype: np.dtype[np.unsignedinteger[Any]] = np.dtype(part.dtype).newbyteorder("<")
        self.numel = part.numel

    def read(self, start: int, stop: int) -> TokenArray:
        """(stop - start,) tokens.

        Raises:
            DataError: they are not those that were written, not of the vocabulary, or cannot be read.
        """
        found: TokenArray = np.empty(max(stop - start, 0), dtype=self.dtype)
        begin = start
        while begin < stop:
            index = begin // self._part.slab_numel
            slab = self._part.slab(index)
            end = min(stop, slab.stop)
            into = found[begin - start : end - start]
            if self._sound[index]:
                self._fill(into, index, begin - slab.start)
            else:
                into[:] = self._checked(index, slab)[begin - slab.start : end - slab.start]
            begin = end
        return found

    def check_all(self) -> None:
        """Read and check every slab. Raises DataError at the first that is not sound."""
        for index in range(self._part.num_slabs):
            self._checked(index, self._part.slab(index))

    def _checked(self, index: int, slab: range) -> TokenArray:
        data: TokenArray = np.empty(len(slab), dtype=self.dtype)
        self._fill(data, index, 0)
        if digest(data) != self._digests[index]:
            raise DataError(
                f"{self._what}[{slab.start}:{slab.stop}] do not have the digest they were written with; {REMEDY}"
            )
        check_ids(data, self._vocab_size, f"{self._what}[{slab.start}:{slab.stop}]")
        self._sound[index] = True
        return data

    def _fill(self, into: TokenArray, index: int, skip: int) -> None:
        """Read from token ``skip`` of a slab on."""
        offset = int(self._places[index]) + skip * self.dtype.itemsize
        try:
            read_into(self._descriptor, offset, into)
        except EOFError as error:
            raise DataError(f"{self._what}: {error}; {REMEDY}") from error
        except OSError as error:
            raise DataError(f"{self._what} cannot be read: {reason(error)}; {REMEDY}") from error


def check_ids(tokens: npt.NDArray[np.integer[Any]], vocab_size: int, what: str) -> None:
    """Refuse ids that are not of the vocabulary.

    Raises:
        DataError: the message names the largest.
    """
    if tokens.size and (largest := int(tokens.max())) >= vocab_size:
        raise DataError(
            f"{what} hold token id {largest}, and the vocabulary has {vocab_size} ids; {REMEDY}"
        )
