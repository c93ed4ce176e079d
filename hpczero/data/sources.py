"""Sources: what a TOML file names as data of a run, opened as one.

[[source]]
path = "web.h5"               a token file of ``data prepare``
weight = 3

[[source]]
path = "code.bin"             flat tokens; .npy, or .bin with .idx of Megatron
validation = "code-val.bin"   without it the last 5 % are held out
dtype = "uint16"              of .bin without .idx
weight = 1

[tokenizer]                   only where no source is a token file
file = "tokenizer.json"       of the tokenizers library; or
vocab_size = 50257
separator = 50256             the id that ends a document, if it is known
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from typing_extensions import override

from hpczero.data.appendix import TokenArray, check_ids
from hpczero.data.batches import (
    HeldOut,
    Int64Array,
    Sampler,
    Samples,
    StepBatches,
    Windows,
    check_global_batch,
)
from hpczero.data.tokenize import IdsTokenizer, LibraryTokenizer, Tokenizer, same_tokenizer
from hpczero.data.tokens import TokenFile, TokenSplit
from hpczero.errors import ConfigError, DataError
from hpczero.files.regular import (
    Closing,
    check_regular,
    is_there,
    open_regular,
    parse_toml,
    read_text,
    reason,
)

# Samples of several files with weights: in exact proportions, from any position on, on any number of ranks.
#
# [Note: Turns]
# Weights are integers w_1 ... w_k with sum W. Of the first p positions source 1 has floor(p * w_1 / W). The positions
# that it leaves are counted anew, and shared by the others in the same way. All of it is arithmetic on p: there is no
# list, no random number, and nothing to restore. Every W positions hold exactly w_i of each source, and up to any
# position a source is less than one sample for each source before it away from its share.

MOST_PERIOD = 10**6  # W; p * W must fit into 64 bits for any p that a run reaches
MOST_POSITION = 2**62 // MOST_PERIOD


class Turns:
    """Which of several sources has a position ([Note: Turns]).

    Args:
        weights: above 0; those of decimal digits are taken as they are written (0.1 is a tenth).

    Raises:
        ConfigError: a weight is not above 0, or they have no common period of at most a million.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        if not weights or not all(0 < weight < math.inf for weight in weights):
            raise ConfigError(f"got weights {list(weights)}, expected finite numbers above 0")
        exact = [Fraction(str(weight)) for weight in weights]
        denominator = math.lcm(*(weight.denominator for weight in exact))
        whole = [int(weight * denominator) for weight in exact]
        self.weights = [weight // math.gcd(*whole) for weight in whole]
        self.period = sum(self.weights)
        if self.period > MOST_PERIOD:
            raise ConfigError(
                f"got weights {list(weights)}, which repeat after {self.period:,} samples, expected at most "
                f"{MOST_PERIOD:,}; use fewer digits"
            )

    def of(self, places: npt.NDArray[np.integer]) -> tuple[Int64Array, Int64Array]:
        """Source of each position, and how many positions that source had before.

        Args:
            places: integers (n,), at least 0.

        Returns:
            Both int64 (n,).

        Raises:
            ValueError: a position is negative or above 4e12.
        """
        left = places.astype(np.int64)
        if left.size and not 0 <= int(left.min()) <= int(left.max()) <= MOST_POSITION:
            raise ValueError(f"Turns: got positions {left.min()} to {left.max()}")
        source = np.full(len(left), len(self.weights) - 1, dtype=np.int64)
        before = np.empty_like(left)
        undecided = np.arange(len(left))
        total = self.period
        for index, weight in enumerate(self.weights):
            had = left * weight // total
            mine = (left + 1) * weight // total > had
            source[undecided[mine]] = index
            before[undecided[mine]] = had[mine]
            undecided, left = undecided[~mine], (left - had)[~mine]
            total -= weight
        return source, before


class MixedBatches(StepBatches[tuple[Int64Array, Int64Array]]):
    """Training batches of several sources; as ``Batches``, whose order of samples each source has for itself.

    Raises:
        ConfigError: a weight or the global batch is out of range.
    """

    def __init__(
        self, sources: Sequence[Samples], weights: Sequence[float], global_batch: int, seed: int
    ) -> None:
        check_global_batch(global_batch)
        self.global_batch = global_batch
        self.turns = Turns(weights)
        self._sources = list(sources)
        self._samplers = [
            Sampler(len(source), seed + index * 0x9E3779B97F4A7C15)
            for index, source in enumerate(sources)
        ]

    @override
    def at(self, places: Int64Array) -> tuple[Int64Array, Int64Array]:
        source, before = self.turns.of(places)
        samples = np.empty_like(before)
        for index, sampler in enumerate(self._samplers):
            samples[source == index] = sampler.samples(before[source == index])
        return _rows(self._sources, source, samples)


class Joined:
    """The samples of several sources one after another."""

    def __init__(self, sources: Sequence[Samples]) -> None:
        self._sources = list(sources)
        self._starts = np.cumsum([0, *(len(source) for source in sources)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def rows(self, samples: Int64Array, /) -> tuple[Int64Array, Int64Array]:
        """Inputs and targets of samples (n,), int64 (n, seq_len) each."""
        source = np.searchsorted(self._starts, samples, side="right") - 1
        return _rows(self._sources, source, samples - self._starts[source])


def _rows(
    sources: Sequence[Samples], source: Int64Array, samples: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """Inputs and targets of ``samples[i]`` of ``sources[source[i]]``, in that order."""
    x = y = np.empty((0, 0), dtype=np.int64)
    for index, one in enumerate(sources):
        mine = source == index
        if mine.any():
            inputs, targets = one.rows(samples[mine])
            if not x.size:
                x, y = (np.empty((len(source), inputs.shape[1]), dtype=np.int64) for _ in range(2))
            x[mine], y[mine] = inputs, targets
    return x, y


# Flat token files, memory-mapped: .bin as nanoGPT has them, .bin with .idx as Megatron has them, .npy.
#
# Source: Megatron-LM, megatron/core/datasets/indexed_dataset.py (the form of .idx); NumPy, format of .npy.

DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")
MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
MEGATRON_HEAD = 34  # bytes: magic, version, dtype, numbers of sequences and of documents
MEGATRON_DTYPES = {1: "uint8", 4: "int32", 5: "int64", 8: "uint16"}
CHECK_NUMEL = 2**22  # read at a time
SAMPLED_NBYTES = 2**20  # of each end of a file, for its fingerprint
SAMPLES = 64


class FlatTokens:
    """Tokens ``start`` to ``stop`` of a memory-mapped file; a ``MixtureSource`` of a split."""

    def __init__(
        self,
        path: Path,
        ids: np.memmap[Any, np.dtype[Any]],
        start: int,
        stop: int,
        vocab_size: int,
        fingerprint: bytes,
    ) -> None:
        self._path = path
        self._ids = ids
        self._start = start
        self._vocab_size = vocab_size
        self._nbytes = _nbytes_now(ids)
        self.fingerprint = fingerprint
        self.numel = stop - start
        self.dtype: np.dtype[np.unsignedinteger[Any]] = np.dtype(f"<u{ids.dtype.itemsize}")

    def read(self, start: int, stop: int) -> TokenArray:
        """(stop - start,) tokens.

        Raises:
            DataError: they are not of the vocabulary, or the file was cut since it was opened.
        """
        if _nbytes_now(self._ids) < self._nbytes:  # to touch what is gone ends the process
            raise DataError(f"{self._path}: is shorter than when it was opened; leave it alone")
        found = np.array(self._ids[self._start + start : self._start + stop]).view(self.dtype)
        if found.size:  # an id below 0 is a very large one
            check_ids(found, self._vocab_size, f"{self._path}[{start}:{stop}]")
        return found

    def check_all(self) -> None:
        """Read all. Raises DataError at the first id that is not of the vocabulary."""
        for start in range(0, self.numel, CHECK_NUMEL):
            self.read(start, min(start + CHECK_NUMEL, self.numel))


def mapped(path: Path, dtype: str | None) -> np.memmap[Any, np.dtype[Any]]:
    """The tokens of a flat file: of NumPy if it ends in .npy, of Megatron if a file with .idx lies beside it, or bare.

    ``dtype`` is that of bare tokens, little endian; None: uint16. Other forms state their own.

    Raises:
        DataError: the file cannot be read, is empty, or is not of that form.
    """
    try:
        check_regular(path)
        if path.suffix == ".npy":
            found = np.lib.format.open_memmap(path, mode="r")
        else:
            index = path.with_suffix(".idx")
            stated = _megatron(index, path) if is_there(index) else None
            name = stated or dtype or "uint16"
            if path.stat().st_size % np.dtype(name).itemsize:
                raise ValueError(f"its {path.stat().st_size:,} bytes are no whole number of {name}")
            found = np.memmap(path, dtype=np.dtype(name).newbyteorder("<"), mode="r")
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not a flat token file: {reason(error)}") from error
    except Exception as error:  # NumPy reads a header of .npy as Python, which fails in many ways
        raise DataError(f"{path}: not a flat token file: its header cannot be read") from error
    kind = found.dtype.newbyteorder("=").name
    if found.ndim != 1 or kind not in DTYPES or found.dtype.byteorder == ">" or not len(found):
        raise DataError(
            f"{path}: holds {found.dtype} of shape {found.shape}, expected one row of {', '.join(DTYPES)}, "
            "little endian"
        )
    if dtype is not None and kind != dtype:
        raise DataError(
            f"{path}: holds {kind}, and dtype is {dtype!r}; leave it out, or state {kind!r}"
        )
    mine: np.memmap[Any, np.dtype[Any]] = found
    return mine


def _nbytes_now(ids: np.memmap[Any, np.dtype[Any]]) -> int:
    """Length of the mapped file, wherever it is called now."""
    mapping: mmap.mmap = ids.base  # type: ignore[assignment]
    return mapping.size()


def fingerprint(path: Path) -> bytes:
    """Equal for equal files; of a large one both ends and some blocks between are looked at, in the same places."""
    seen = xxhash.xxh3_128()
    nbytes = path.stat().st_size
    seen.update(f"{nbytes} ".encode())
    places = {0: SAMPLED_NBYTES, max(nbytes - SAMPLED_NBYTES, 0): SAMPLED_NBYTES}
    places |= {nbytes * n // SAMPLES: 4096 for n in range(1, SAMPLES)}
    with path.open("rb") as file:
        for place, count in sorted(places.items()):
            file.seek(place)
            seen.update(file.read(count))
    return seen.digest()


def _megatron(index: Path, path: Path) -> str:
    """Name of the type of the tokens in ``path`` by its ``index``; a ValueError if the two do not fit together."""
    with open(open_regular(index), "rb") as file:
        head = file.read(MEGATRON_HEAD)
        if len(head) < MEGATRON_HEAD or not head.startswith(MEGATRON_MAGIC):
            raise ValueError(f"{index.name} beside it is no index of Megatron's form")
        version, sequences, documents = (
            int.from_bytes(head[at : at + 8], "little") for at in (9, 18, 26)
        )
        if version != 1 or head[17] not in MEGATRON_DTYPES:
            raise ValueError(
                f"{index.name} is of version {version} with dtype {head[17]}, expected version 1 with one of "
                f"{MEGATRON_DTYPES}"
            )
        if MEGATRON_HEAD + sequences * 12 + documents * 8 > index.stat().st_size:
            raise ValueError(f"{index.name} is cut short")
        lengths = np.fromfile(file, dtype="<i4", count=sequences)
        pointers = np.fromfile(file, dtype="<i8", count=sequences)
    name = MEGATRON_DTYPES[head[17]]
    ends = np.cumsum(lengths, dtype=np.int64) * np.dtype(name).itemsize
    one_after_another = sequences and bool((pointers[1:] == ends[:-1]).all()) and pointers[0] == 0
    if not one_after_another or lengths.min() < 0 or ends[-1] != path.stat().st_size:
        raise ValueError(
            f"{index.name} tells of other tokens, or of sequences that are not one after another"
        )
    return name


HELD_OUT = 0.05  # of a flat file without a validation file
KEYS: dict[str, dict[str, Any]] = {
    "source": {"path": str, "weight": (int, float), "validation": str, "dtype": str},
    "tokenizer": {"file": str, "vocab_size": int, "separator": (int, str)},
}


def names_sources(path: str | None) -> bool:
    """Whether ``data.path`` names a file of sources."""
    return path is not None and path.endswith(".toml")


@dataclass(frozen=True)
class MixtureSource:
    """One of them.

    Attributes:
        path: of its training tokens.
        weight: its share is weight / sum of weights.
        train, validation: its splits.
        identity: equal for equal tokens, as far as the file tells.
    """

    path: Path
    weight: float
    train: TokenSplit
    validation: TokenSplit
    identity: str


class Together:
    """Splits of all sources as one: what a run says of them. Samples come from ``Sources.batches``.

    Attributes:
        bytes_per_token: bytes of text per token; None if some source does not tell, as flat files do not.
    """

    def __init__(self, splits: list[TokenSplit]) -> None:
        self._splits = splits
        text_nbytes = sum(split.text_nbytes for split in splits)
        known = all(split.text_nbytes for split in splits)
        self.bytes_per_token = text_nbytes / len(self) if known else None

    def __len__(self) -> int:
        return sum(len(split) for split in self._splits)


class Sources(Closing):
    """Several token files, open, as one. Not collective: each rank opens its own.

    Attributes:
        path: of the TOML file.
        tokenizer: of all sources.
        vocab_size: number of token ids.
        source_sha256: equal for equal sources with equal weights, wherever they lie.
        train, validation: all splits together.
    """

    def __init__(
        self, path: Path, tokenizer: Tokenizer, sources: list[MixtureSource], close: ExitStack
    ) -> None:
        self.path = path
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size
        self.sources = sources
        shares = Turns([source.weight for source in sources]).weights
        said = json.dumps([[s.identity, w] for s, w in zip(sources, shares, strict=True)])
        self.source_sha256 = hashlib.sha256(said.encode()).hexdigest()
        self.train = Together([source.train for source in sources])
        self.validation = Together([source.validation for source in sources])
        self._close = close

    @classmethod
    def open(cls, path: Path) -> Sources:
        """Open all files that a TOML file names; paths are relative to its folder.

        Raises:
            DataError: it or one of them is missing, malformed or damaged, or they have different vocabularies.
            ConfigError: a weight is out of range.
        """
        entries, stated = _read(path)
        with ExitStack() as stack:
            files: dict[int, TokenFile] = {}
            for number, entry in enumerate(entries):
                if entry["path"].endswith((".h5", ".hdf5")):
                    file = stack.enter_context(TokenFile.open(path.parent / entry["path"]))
                    files[number] = file
            tokenizer = _tokenizer(path, list(files.values()), stated)
            sources = [
                _of_file(entry, files[number])
                if number in files
                else _of_flat(path, entry, tokenizer.vocab_size)
                for number, entry in enumerate(entries)
            ]
            return cls(path, tokenizer, sources, stack.pop_all())

    @property
    def fingerprint(self) -> str:
        """Equal for sources that mean the same, as far as their files tell without reading all of them."""
        return f"{self.source_sha256} {self.tokenizer.to_json()}"

    def describe_shares(self) -> str:
        """What the run header says of each source: a line."""
        whole = sum(source.weight for source in self.sources)
        return "".join(
            f"\n  {source.weight / whole:.1%} of the samples from {source.path}, {len(source.train):,} tokens"
            for source in self.sources
        )

    def batches(self, seq_len: int, global_batch: int, seed: int) -> MixedBatches:
        """Training batches; raises as ``MixedBatches`` and ``Windows``."""
        windows = [
            Windows(source.train, seq_len, f"training ({source.path})") for source in self.sources
        ]
        weights = [source.weight for source in self.sources]
        return MixedBatches(windows, weights, global_batch, seed)

    def held_out(self, seq_len: int, max_samples: int) -> HeldOut:
        """Held-out samples, spread evenly over all held-out tokens; raises as ``HeldOut``."""
        windows = [
            Windows(source.validation, seq_len, f"held-out ({source.path})")
            for source in self.sources
        ]
        return HeldOut(self.sources[0].validation, seq_len, max_samples, Joined(windows))

    def close(self) -> None:
        """Close all files."""
        self._close.close()


def _read(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The tables of a file of sources, with keys and types checked."""
    try:
        body = parse_toml(read_text(path))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as sources: {reason(error)}") from error
    entries, stated = body.pop("source", []), body.pop("tokenizer", {})
    if body or not isinstance(entries, list) or not entries or not isinstance(stated, dict):
        raise DataError(
            f"{path}: got {', '.join(body) or 'no source'}, expected one [[source]] table or more, and at most a "
            "[tokenizer] table"
        )
    for kind, tables in (("source", entries), ("tokenizer", [stated])):
        for number, table in enumerate(tables):
            _check_table(
                path, f"{kind} {number + 1}" if kind == "source" else kind, table, KEYS[kind]
            )
    return entries, stated


def _check_table(path: Path, what: str, table: object, keys: Mapping[str, Any]) -> None:
    if not isinstance(table, dict):
        raise DataError(f"{path}: {what} is {table!r}, expected a table")
    for key, value in table.items():
        if key not in keys or not isinstance(value, keys[key]) or isinstance(value, bool):
            raise DataError(
                f"{path}: {what} has {key} = {value!r}, expected of {', '.join(keys)} with text for paths and numbers "
                "for the others"
            )
    if what.startswith("source") and "path" not in table:
        raise DataError(f"{path}: {what} has no path")
    if table.get("dtype", DTYPES[0]) not in DTYPES:
        raise DataError(
            f"{path}: {what} has dtype {table['dtype']!r}, expected {', '.join(DTYPES)}"
        )


def _tokenizer(path: Path, files: list[TokenFile], stated: Mapping[str, Any]) -> Tokenizer:
    """The one tokenizer of all sources."""
    if files and stated:
        raise DataError(
            f"{path}: token files bring their tokenizer; take the [tokenizer] table out"
        )
    for file in files[1:]:
        if not same_tokenizer(file.tokenizer.to_json(), files[0].tokenizer.to_json()):
            raise DataError(
                f"{path}: {file.path} and {files[0].path} have different tokenizers; prepare both with one"
            )
    if files:
        return files[0].tokenizer
    size, separator = stated.get("vocab_size", 0), stated.get("separator")
    if "file" in stated and not size and not isinstance(separator, int):
        return LibraryTokenizer.of_file(str(path.parent / stated["file"]), separator)
    named = "file" in stated or isinstance(separator, str)
    if named or size < 1 or not 0 <= (separator or 0) < size:
        raise DataError(
            f"{path}: no source is a token file, so say whose tokens they are: [tokenizer] with file, and perhaps the "
            "token that ends a document as separator; or with vocab_size of 1 or more and perhaps a number below it as "
            f"separator; got {dict(stated)}"
        )
    return IdsTokenizer(size, separator)


def _of_file(entry: Mapping[str, Any], file: TokenFile) -> MixtureSource:
    if wrong := [key for key in ("validation", "dtype") if key in entry]:
        raise DataError(f"{file.path}: a token file states its own {wrong[0]}; take it out")
    return MixtureSource(
        file.path, entry.get("weight", 1), file.train, file.validation, file.fingerprint
    )


def _of_flat(path: Path, entry: Mapping[str, Any], vocab_size: int) -> MixtureSource:
    file = path.parent / entry["path"]
    ids, identity = mapped(file, entry.get("dtype")), fingerprint(file)
    cut = len(ids)
    if "validation" in entry:
        other = path.parent / entry["validation"]
        found = mapped(other, entry.get("dtype"))
        held_out = FlatTokens(other, found, 0, len(found), vocab_size, fingerprint(other))
    else:
        cut -= max(1, round(cut * HELD_OUT))
        held_out = FlatTokens(file, ids, cut, len(ids), vocab_size, identity)
    train = FlatTokens(file, ids, 0, cut, vocab_size, identity)
    said = f"{identity.hex()} {train.numel} {held_out.fingerprint.hex()} {held_out.numel}"
    return MixtureSource(
        file, entry.get("weight", 1), TokenSplit(train, 0, 0), TokenSplit(held_out, 0, 0), said
    )
