"""What can happen to a file: seeded, and without knowing what the file is.

A harm is done to the file at ``path``. ``of_bytes`` keep a regular file there, ``of_texts`` are for JSON and the like,
``of_places`` put something else in its place.
"""

from __future__ import annotations

import os
import random
import re
import socket
from collections.abc import Callable
from pathlib import Path

Harm = Callable[[Path, random.Random], object]
Change = Callable[[bytes, random.Random], bytes]

PAGE = 4096
DEEP = 100_000
LONG = 5001  # digits: more than Python reads


def _range(data: bytes, draw: random.Random, most: int = PAGE) -> slice:
    length = min(len(data), draw.randint(1, most))
    start = draw.randrange(len(data) - length + 1)
    return slice(start, start + length)


def _replace(data: bytes, where: slice, by: bytes) -> bytes:
    return data[: where.start] + by + data[where.stop :]


def flip(data: bytes, draw: random.Random, count: int = 1) -> bytes:
    changed = bytearray(data)
    for where in draw.sample(range(8 * len(data)), min(count, 8 * len(data))):
        changed[where // 8] ^= 1 << where % 8
    return bytes(changed)


def swap(data: bytes, draw: random.Random) -> bytes:
    length = draw.randint(1, max(len(data) // 4, 1))
    first = draw.randrange(len(data) - 2 * length + 1) if len(data) >= 2 * length else 0
    second = draw.randint(first + length, max(len(data) - length, first + length))
    one, other = data[first : first + length], data[second : second + length]
    return data[:first] + other + data[first + length : second] + one + data[second + length :]


def fill(by: int) -> Change:
    def change(data: bytes, draw: random.Random) -> bytes:
        where = _range(data, draw)
        return _replace(data, where, bytes([by]) * (where.stop - where.start))

    return change


def noise(data: bytes, draw: random.Random) -> bytes:
    where = _range(data, draw, 64)
    return _replace(data, where, draw.randbytes(where.stop - where.start))


def lost(data: bytes, draw: random.Random) -> bytes:
    return _replace(data, _range(data, draw), b"")


def inserted(what: bytes) -> Change:
    def change(data: bytes, draw: random.Random) -> bytes:
        at = draw.randint(0, len(data))
        return data[:at] + what + data[at:]

    return change


def number(by: bytes) -> Change:
    """Another number in the place of one."""

    def change(data: bytes, draw: random.Random) -> bytes:
        found = [match.span() for match in re.finditer(rb"-?\b[0-9]+(\.[0-9]+)?\b", data)]
        if not found:
            return inserted(by)(data, draw)
        return _replace(data, slice(*draw.choice(found)), by)

    return change


BYTES: dict[str, Change] = {
    "a bit flipped": flip,
    "8 bits flipped": lambda data, draw: flip(data, draw, 8),
    "cut short": lambda data, draw: data[: draw.randrange(len(data))],
    "one byte short": lambda data, draw: data[:-1],
    "empty": lambda data, draw: b"",
    "a part of zeros": fill(0),
    "a part of ones": fill(255),
    "all zeros": lambda data, draw: bytes(len(data)),
    "halves swapped": lambda data, draw: data[len(data) // 2 :] + data[: len(data) // 2],
    "parts swapped": swap,
    "a part of noise": noise,
    "a part lost": lost,
    "noise alone": lambda data, draw: draw.randbytes(len(data)),
    "written twice": lambda data, draw: data + data,
    "noise behind it": lambda data, draw: data + draw.randbytes(draw.randint(1, PAGE)),
    "NULs inside": inserted(bytes(17)),
    "NULs behind it": lambda data, draw: data + bytes(draw.randint(1, PAGE)),
}

TEXTS: dict[str, Change] = {
    "lists without end": lambda data, draw: b"[" * DEEP,
    "objects without end": lambda data, draw: b'{"a":' * DEEP,
    "lists inside": inserted(b"[" * DEEP),
    "a number of many digits": number(b"9" * LONG),
    "a number below 0": number(b"-1"),
    "a number above 2^63": number(b"9223372036854775808"),
    "a number above all floats": number(b"1e999"),
    "another number": number(b"7"),
    "null for a number": number(b"null"),
    "text for a number": number(b'"x"'),
    "no UTF-8": inserted(b"\xff\xfe\xc3"),
    "a number alone": lambda data, draw: b"7",
    "null": lambda data, draw: b"null",
    "an empty list": lambda data, draw: b"[]",
    "an empty object": lambda data, draw: b"{}",
    "a digit of another script": number("²".encode()),
    "a line lost": lambda data, draw: b"\n".join(line for line, keep in _lines(data, draw) if keep),
}


def _lines(data: bytes, draw: random.Random) -> list[tuple[bytes, bool]]:
    lines = data.split(b"\n")
    gone = draw.randrange(len(lines))
    return [(line, place != gone) for place, line in enumerate(lines)]


def of(change: Change) -> Harm:
    """To the content of a regular file."""

    def harm(path: Path, draw: random.Random) -> None:
        data = path.read_bytes()
        changed = change(data, draw)
        while changed == data:  # zeros among zeros: no harm, and nothing is shown
            changed = flip(data, draw) if draw.random() < 0.1 else change(data, draw)
        path.write_bytes(changed)

    return harm


def place(put: Callable[[Path], object]) -> Harm:
    """Something else where the file was."""

    def harm(path: Path, _: random.Random) -> None:
        path.unlink()
        put(path)

    return harm


def _socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the address of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**42)


PLACES: dict[str, Harm] = {
    "a FIFO": place(os.mkfifo),
    "a folder": place(lambda path: path.mkdir()),
    "a link to itself": place(lambda path: path.symlink_to(path.name)),
    "a link to nothing": place(lambda path: path.symlink_to("nothing")),
    "a device without end": place(lambda path: path.symlink_to("/dev/zero")),
    "a device without anything": place(lambda path: path.symlink_to("/dev/null")),
    "a terminal": place(lambda path: path.symlink_to("/dev/tty")),
    "a socket": place(_socket),
    "4 TiB of nothing": place(_huge),
    "nothing": place(lambda path: None),
}

HARMS: dict[str, Harm] = {**{name: of(change) for name, change in BYTES.items()}, **PLACES}
HARMS_OF_TEXT: dict[str, Harm] = {**HARMS, **{name: of(c) for name, c in TEXTS.items()}}
