"""Token files that came to harm: found when they are opened or read, whatever the harm; nothing outside is read."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpczero.data import ByteTokenizer, Corpus, TokenFile, appendix, prepare
from hpczero.data import token_writer as tokenwriter
from hpczero.data.appendix import LINE_NBYTES, digest
from hpczero.errors import DataError
from tests.files.test_regular import at_once
from tests.helpers.small_disk import memory_disk

FLIPS = 400


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "book.txt").write_text("".join(f"line {n} of the book\n" for n in range(12_000)))
    return tmp_path / "book.txt"


@pytest.fixture
def file(text: Path, tmp_path: Path) -> Path:
    """Several slabs of tokens."""
    prepare(Corpus.of_paths([text]), tmp_path / "tokens.h5")
    return tmp_path / "tokens.h5"


def content(path: Path) -> str:
    """Of all that a reader is given."""
    with TokenFile.open(path) as found:
        seen = hashlib.sha256(f"{found.tokenizer.to_json()} {found.source_sha256}".encode())
        for split in (found.train, found.validation):
            seen.update(f"{split.documents} {split.text_nbytes} {split.dtype}".encode())
            seen.update(split[: len(split)].tobytes())
    return seen.hexdigest()


# --- flips -----------------------------------------------------------------------------------------------------------


def test_no_flipped_bit_gives_other_tokens(file: Path) -> None:
    """Those in HDF5's own part and in what fills up pages change nothing; all others are found."""
    sound, expected = file.read_bytes(), content(file)
    draw = random.Random(3)
    tail = len(sound) - 2000  # with all of the appendix but the tables
    places = [draw.randrange(tail) for _ in range(FLIPS)] + [
        draw.randrange(tail, len(sound)) for _ in range(FLIPS // 4)
    ]
    found = 0
    for place in places:
        damaged = bytearray(sound)
        damaged[place] ^= 1 << draw.randrange(8)
        file.write_bytes(damaged)
        try:
            assert content(file) == expected, f"byte {place}"
        except DataError:
            found += 1
    assert found > FLIPS * 0.7


def test_damaged_slab_is_named_and_others_are_read(file: Path) -> None:
    with h5py.File(file) as opened:
        place = opened["train/tokens"].id.get_offset() + 2 * tokenwriter.SLAB_NUMEL
    with file.open("r+b") as opened_raw:
        opened_raw.seek(place + 7)
        opened_raw.write(b"\x01")
    size = tokenwriter.SLAB_NUMEL
    with TokenFile.open(file) as found:
        assert len(found.train[:size]) == size
        assert len(found.train[2 * size : 2 * size + 9]) == 9
        said = rf"tokens.h5: damaged: /train/tokens\[{size}:{2 * size}\] do not have"
        with pytest.raises(DataError, match=said):
            found.train[size - 1 : size + 1]
        with pytest.raises(DataError, match="do not have the digest"):
            found.train.check()


def test_slab_is_checked_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[int] = []

    def counted(data: np.ndarray) -> int:
        if data.ndim == 1:  # tokens, and not a table of digests
            checked.append(len(data))
        return digest(data)

    monkeypatch.setattr(appendix, "digest", counted)
    with TokenFile.open(file) as found:
        for start in (5, 700, 5, 20_000):
            found.train[start : start + 100]
        assert checked == [tokenwriter.SLAB_NUMEL]
        found.train[tokenwriter.SLAB_NUMEL - 1 : tokenwriter.SLAB_NUMEL + 1]
        assert len(checked) == 2


def test_any_slice_is_what_h5py_reads(file: Path) -> None:
    with h5py.File(file) as opened:
        expected = opened["train/tokens"][:]
    draw = random.Random(4)
    with TokenFile.open(file) as found:
        assert found.train.dtype == expected.dtype
        for _ in range(300):
            start = draw.randrange(-5, len(expected) + 5)
            stop = start + draw.choice([0, 1, 257, 40_000])
            assert np.array_equal(found.train[start:stop], expected[start:stop])
        assert np.array_equal(found.train[:], expected)
        with pytest.raises(ValueError, match="step 2"):
            found.train[::2]


# --- other harm ------------------------------------------------------------------------------------------------------

HARMS: dict[str, Callable[[bytes], bytes]] = {
    "one byte short": lambda data: data[:-1],
    "a byte too many": lambda data: data + b"\n",
    "empty": lambda data: b"",
    "halves swapped": lambda data: data[len(data) // 2 :] + data[: len(data) // 2],
    "no last line": lambda data: data[:-LINE_NBYTES],
    "end of zeros": lambda data: data[:-5000] + bytes(5000),
    "last line of another file": lambda data: (
        data[:-LINE_NBYTES] + data[-LINE_NBYTES:].replace(b"bytes, described", b"bytes, Described")
    ),
    "text": lambda data: b"no tokens at all",
}


@pytest.mark.parametrize("name", HARMS)
def test_harm_is_refused_when_the_file_is_opened(file: Path, name: str) -> None:
    file.write_bytes(HARMS[name](file.read_bytes()))
    with pytest.raises(DataError, match=r"tokens.h5: not a usable token file: .*; prepare it with"):
        TokenFile.open(file)


@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "loop", "none"])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "tokens.h5"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind != "none":
        path.symlink_to("/dev/zero" if kind == "device" else path.name)
    with at_once(), pytest.raises(DataError, match=r"tokens.h5: .*; prepare it with"):
        TokenFile.open(path)
    with at_once(), pytest.raises(DataError, match=r"tokens.h5: "):
        Corpus.of_paths([path])  # as a text


def resigned(path: Path, change: Callable[[dict], object]) -> None:
    """Change the description, and every digest over it."""
    data = path.read_bytes()
    line = data[-LINE_NBYTES:]
    nbytes = int(line.split(b"described in ")[1].split(b",")[0])
    body = json.loads(data[-LINE_NBYTES - nbytes : -LINE_NBYTES])
    change(body)
    text = json.dumps(body).encode()
    rest = data[: -LINE_NBYTES - nbytes]
    said = (
        f"hpczero tokens 2: {len(rest) + len(text) + LINE_NBYTES} bytes, described in {len(text)}, "
        f"sha256 {hashlib.sha256(text).hexdigest()}"
    )
    path.write_bytes(rest + text + said.encode().ljust(LINE_NBYTES - 1) + b"\n")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"numel": -1}, "train.numel is -1"),
        ({"numel": 2**61}, "more slabs than the file has room for"),
        ({"numel": 10**4000}, "train.numel is 1000"),
        ({"numel": True}, "train.numel is True"),
        ({"slab_numel": 0}, "train.slab_numel is 0"),
        ({"slab_numel": 1}, "more slabs|does not have the digest"),
        ({"dtype": "object"}, "train.dtype is 'object'"),
        ({"table": "x"}, "train.table is 'x'"),
        ({"documents": None}, "train.documents is None"),
        ({"numel": 3 * 2**15}, "digest"),
    ],
)
def test_description_that_cannot_be_is_refused_though_it_is_signed(
    file: Path, fields: dict[str, object], said: str
) -> None:
    resigned(file, lambda body: body["train"].update(fields))
    with pytest.raises(DataError, match=said):
        content(file)


@pytest.mark.parametrize("name", ["train", "tokenizer", "format", "version", "source_sha256"])
def test_description_without_a_field_is_refused(file: Path, name: str) -> None:
    resigned(file, lambda body: body.pop(name))
    with pytest.raises(DataError, match=name):
        TokenFile.open(file)


def test_place_outside_of_the_file_is_refused_though_it_is_signed(file: Path) -> None:
    with TokenFile.open(file) as found:
        num_slabs = -(-len(found.train) // tokenwriter.SLAB_NUMEL)
        rest = -(-len(found.validation) // tokenwriter.SLAB_NUMEL)
    data = file.read_bytes()
    nbytes = int(data[-LINE_NBYTES:].split(b"described in ")[1].split(b",")[0])
    start = len(data) - LINE_NBYTES - nbytes - 16 * (num_slabs + rest)
    table = np.frombuffer(data[start : start + 16 * num_slabs], dtype="<u8").reshape(-1, 2).copy()
    with h5py.File(file) as opened:
        assert table[0, 0] == opened["train/tokens"].id.get_offset()
    table[0, 0] = 2**64 - 8
    file.write_bytes(data[:start] + table.tobytes() + data[start + table.nbytes :])
    xxh = f"{digest(table):016x}"
    resigned(file, lambda body: body["train"].update(table=xxh))
    with pytest.raises(DataError, match="lie behind the end of the file"):
        TokenFile.open(file)


def test_new_file_that_h5py_has_changed_is_refused(file: Path) -> None:
    with h5py.File(file, "r+") as opened:
        opened.attrs["note"] = "mine"
    with pytest.raises(DataError, match="cut short, or changed by another program"):
        TokenFile.open(file)


# --- ids -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [[257], [65_536 + 3], [-1], [3, 2**40]])
def test_ids_outside_of_the_vocabulary_are_not_written(tmp_path: Path, ids: list[int]) -> None:
    def write() -> None:
        with tokenwriter.create(tmp_path / "t.h5", ByteTokenizer(), "") as writer:
            writer.append(0, writer.checked(np.array(ids), 0))

    with pytest.raises(DataError, match=f"token id {max(ids) if max(ids) > 0 else ids[0]}"):
        write()
    assert list(tmp_path.iterdir()) == []


def test_ids_outside_of_the_vocabulary_are_not_read(tmp_path: Path) -> None:
    class Wider(ByteTokenizer):
        vocab_size = 300

    with tokenwriter.create(tmp_path / "t.h5", Wider(), "") as writer:
        for split in (0, 1):
            writer.append(split, writer.checked(np.array([299, 1]), split))
    with (
        TokenFile.open(tmp_path / "t.h5") as found,
        pytest.raises(
            DataError,
            match=r"/train/tokens\[0:2\] hold token id 299, and the vocabulary has 257 ids",
        ),
    ):
        found.train[1:2]


# --- full disks ------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with memory_disk(tmp_path / "disk", 2**19) as disk:
        yield disk


def test_full_disk_is_an_error_wherever_it_is_met(text: Path, small_disk: Path) -> None:
    out = small_disk / "tokens.h5"
    for free_nbytes in (0, 4096, 20_000, 300_000, 400_000):
        system = os.statvfs(small_disk)
        left = system.f_bavail * system.f_frsize
        (small_disk / "filler").write_bytes(bytes(max(left - free_nbytes, 0)))
        with pytest.raises(DataError, match=r"cannot be written \(No space left on device\)"):
            prepare(Corpus.of_paths([text]), out)
        assert [entry.name for entry in small_disk.iterdir()] == ["filler"]
        (small_disk / "filler").unlink()
