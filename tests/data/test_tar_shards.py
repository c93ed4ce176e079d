"""Samples in tar files: those that tarfile gives, by number, from any rank, with an exact resume; damage is named."""

from __future__ import annotations

import gzip
import io
import pickle
import tarfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hpczero.data.loading import ResumableLoader, TarShards
from hpczero.errors import ConfigError, DataError
from tests.data.test_resumable_loader import check_resume, rank_of, taken
from tests.helpers.parallel import on_root, parallel_assert
from tests.helpers.small_models import raises_on_all

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero.job.topology import Topology

FORMATS = (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT)


def write_shards(folder: Path, counts: tuple[int, ...] = (7, 0, 5, 1)) -> list[Path]:
    paths = []
    for shard, count in enumerate(counts):
        path = folder / f"{shard:03}.tar"
        with tarfile.open(path, "w", format=FORMATS[shard % 3]) as tar:
            for n in range(count):
                name = f"train/{'long' * 30 if shard == 0 else ''}{shard}-{n}"
                add(tar, f"{name}.txt", f"text {shard} {n}".encode() * (n + 1))
                add(tar, f"{name}.SEG.png", bytes([shard, n]) * 600 * n)
        paths.append(path)
    return paths


def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def plain(paths: list[Path]) -> list[dict[str, Any]]:
    """What tarfile reads, one member after another."""
    found: list[dict[str, Any]] = []
    for path in paths:
        with tarfile.open(path) as tar:
            for member in tar:
                file = tar.extractfile(member)
                assert file is not None
                key, _, extension = member.name.partition(".")
                if not found or found[-1]["__key__"] != key:
                    found.append({"__key__": key})
                found[-1][extension.lower()] = file.read()
    return found


def length(sample: dict[str, Any]) -> tuple[str, int]:
    return sample["__key__"], len(sample["seg.png"])


def test_samples_are_those_that_tarfile_reads(tmp_path: Path) -> None:
    paths = write_shards(tmp_path)
    shards = TarShards.open(paths)
    assert len(shards) == 13
    assert [shards[n] for n in range(13)] == plain(paths)
    again = pickle.loads(pickle.dumps(shards))
    assert [again[n] for n in (12, 0, 8)] == [shards[n] for n in (12, 0, 8)]


def test_loader_resumes_in_shards_on_other_ranks_with_workers(tmp_path: Path) -> None:
    shards = TarShards.open(write_shards(tmp_path), decode=length)

    def make(rank: int, size: int) -> ResumableLoader:
        given: Any = {"global_batch": 6, "draws": False, "collate_fn": list}
        workers = 1 if size == 2 else 0
        return ResumableLoader(shards, topology=rank_of(rank, size), num_workers=workers, **given)

    def seen(group: list[ResumableLoader], steps: int) -> list[Any]:
        return [sample for batch in taken(group, steps) for sample in batch]

    whole = seen([make(0, 1)], 9)
    assert len(set(whole[:12])) == 12
    check_resume(seen, whole, make, before=2, after=3, steps=3)


def test_state_of_other_shards_of_equal_length_is_refused(tmp_path: Path) -> None:
    paths = write_shards(tmp_path)
    one, other = (
        ResumableLoader(TarShards.open(p), topology=rank_of(0, 1), global_batch=6)
        for p in (paths, paths[::-1])
    )
    with pytest.raises(ConfigError, match=r"of other batches \(fingerprint was"):
        one.load_state_dict(other.state_dict())


def damaged(path: Path, kind: str) -> None:
    data = path.read_bytes()
    if kind == "missing":
        path.unlink()
    elif kind == "gzip":
        path.write_bytes(gzip.compress(data))
    elif kind == "text":
        path.write_bytes(b"no tar file\n" * 200)
    elif kind == "in a member":
        path.write_bytes(data[: 4 * 512 + 100])
    elif kind == "after a member":
        with tarfile.open(path) as tar:
            at = tar.getmembers()[3].offset
        path.write_bytes(data[:at])
    elif kind == "hole":
        with tarfile.open(path) as tar:
            at = tar.getmembers()[2].offset
        path.write_bytes(data[:at] + bytes(512) + data[at + 512 :])
    elif kind == "two in one":
        path.write_bytes(data + data)
    elif kind == "below zero":
        head = bytearray(tarfile.TarInfo("no extension").tobuf())
        head[124:136] = (-512).to_bytes(12, "big", signed=True)
        head[148:156] = b" " * 8
        head[148:156] = b"%06o\0 " % sum(head)
        path.write_bytes(head + bytes(10240))
    elif kind == "key":
        with tarfile.open(path, "w") as tar:
            add(tar, "a.__key__", b"x")
    elif kind == "twice":
        with tarfile.open(path, "w") as tar:
            for _ in range(2):
                add(tar, "a.txt", b"x")
    elif kind == "link":
        with tarfile.open(path, "w") as tar:
            member = tarfile.TarInfo("a.txt")
            member.type, member.linkname = tarfile.SYMTYPE, "b"
            tar.addfile(member)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("missing", "cannot be read"),
        ("gzip", "no uncompressed tar file"),
        ("text", "no uncompressed tar file"),
        ("in a member", "002.tar: "),
        ("after a member", "002.tar: is cut short"),
        ("hole", "002.tar: has more after the mark of its end"),
        ("two in one", "002.tar: has more after the mark of its end"),
        ("below zero", "no extension is no plain file"),
        ("key", "sample a has two files .__key__"),
        ("twice", "sample a has two files .txt"),
        ("link", "a.txt is no plain file"),
    ],
)
def test_damaged_shard_is_named_when_it_is_opened(tmp_path: Path, kind: str, said: str) -> None:
    paths = write_shards(tmp_path)
    damaged(paths[2], kind)
    with pytest.raises(DataError, match=said) as caught:
        TarShards.open(paths)
    assert str(caught.value).count("002.tar") == 1


def test_members_that_webdataset_passes_over_divide_no_sample(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        names = "README __meta__ __info__/1.jpg d/._7.jpg d/7.jpg d/._7.cls d/7.CLS"
        for name in names.split():
            add(tar, name, name.encode())
        add(tar, "/\udcff.jpg", b"no UTF-8")
    shards = TarShards.open([path])
    assert [shards[n] for n in range(len(shards))] == [
        {"__key__": "d/7", "jpg": b"d/7.jpg", "cls": b"d/7.CLS"},
        {"__key__": "/\udcff", "jpg": b"no UTF-8"},
    ]


def test_one_path_is_no_list_and_any_iterable_of_paths_is(tmp_path: Path) -> None:
    (path,) = write_shards(tmp_path, (3,))
    assert len(TarShards.open(each for each in [path])) == 3
    for one in (path, str(path)):
        with pytest.raises(DataError, match="expected a list of paths"):
            TarShards.open(one)  # type: ignore[arg-type]


def test_shards_without_samples_and_shards_that_change_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="without a sample"):
        TarShards.open(write_shards(tmp_path, (0, 0)))
    (path,) = write_shards(tmp_path, (3,))
    shards = TarShards.open([path])
    write_shards(tmp_path, (4,))
    with pytest.raises(DataError, match="has changed since"):
        shards[2]


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_ranks_share_the_headers_and_have_one_verdict(
    comm: MPI.Intracomm, topology: Topology, folder: Path
) -> None:
    paths = [folder / f"{n:03}.tar" for n in range(4)]
    on_root(comm, write_shards, folder)
    shards = TarShards.open(paths, topology)
    parallel_assert(comm, [shards[n] for n in range(len(shards))] == plain(paths))
    on_root(comm, damaged, paths[1], "text")
    for given, said in (
        (paths, "001.tar: no uncompressed"),
        (paths[2:] if comm.rank else paths[2:][::-1], "rank 1 was given other"),
        (paths[3:] if comm.rank else paths[2:], "1 and 2 of them"),
    ):
        raises_on_all(comm, DataError, said, partial(TarShards.open, given, topology))
