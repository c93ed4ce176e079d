"""What the fields of a manifest may be: types, ranges, places in the file.

Owns: the form of the JSON object. Must not know: files, classes, what the values mean. The form is checked even if the
digest is right, because anybody can write a digest. Numbers of a manifest decide where bytes are read and how much
memory is taken.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any

from hpczero.errors import CorruptCheckpoint
from hpczero.files.regular import shown

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
