"""The disk tier: its file, its errors, its memory."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hpczero.accelerator import HostAccelerator
from hpczero.errors import ConfigError, TierError
from hpczero.files import direct
from hpczero.tier import DiskTier, Record
from hpczero.tier import disk as disk_module
from tests.helpers.mpirun import ROOT, run_command
from tests.tier.suite import PART, TierSuite, content, filled, get, put

MIB = 2**20


def disk(folder: Path, **options) -> DiskTier:
    return DiskTier(folder, **{"blocks": 3, "block_nbytes": MIB, **options})


@pytest.fixture(autouse=True)
def on_a_disk(tmp_path: Path) -> None:
    kind = direct.filesystem_of(tmp_path)
    if kind in disk_module.IN_MEMORY:
        pytest.skip(f"{tmp_path} lies in memory ({kind}): give pytest a --basetemp on a disk")


class TestDisk(TierSuite):
    make = DiskTier


class TestDiskThroughTheCache(TierSuite):
    """As on a file system without direct calls."""

    @pytest.fixture(autouse=True)
    def no_direct_calls(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(disk_module, "make_direct", lambda fd: 0)

    make = staticmethod(partial(DiskTier, tell=lambda text: None))


class TestDiskOfCoarseAlignment(TierSuite):
    """As on a file system that wants 64 KiB; calls are smaller than that."""

    @pytest.fixture(autouse=True)
    def coarse(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(direct, "PAGE", 2**16)

    @staticmethod
    def make(folder, **sizes):
        tier = DiskTier(folder, call_nbytes=4096, **sizes)
        assert tier.reserve(Record("a", {PART: 1})).end == 2**16
        return tier


def descriptors() -> set[str]:
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = entry.readlink()
        except OSError:
            continue
        if "hpczero-tier-" in target.name:
            found.add(entry.name)
    return found


def test_file_has_no_name_its_room_is_there_at_once_and_goes_with_it(tmp_path):
    before = descriptors()
    tier = disk(tmp_path)
    (fd,) = descriptors() - before
    assert list(tmp_path.iterdir()) == []
    tier.reserve(Record("r", {"a": 5000, "b": 1}))
    found = os.fstat(int(fd))
    assert (found.st_nlink, found.st_size) == (0, 3 * 4096)
    assert found.st_blocks * 512 >= 3 * 4096
    assert found.st_mode & 0o777 == 0o600
    tier.close()
    assert descriptors() == before
    disk(tmp_path)  # and is forgotten
    assert descriptors() == before


def test_bytes_go_past_the_cache_where_the_file_system_can(tmp_path):
    trial = tmp_path / "trial"
    trial.touch()
    able = direct.open_direct(trial)
    if able is None:
        pytest.skip(f"{direct.filesystem_of(tmp_path)} has no direct calls")
    os.close(able)
    before = descriptors()
    with disk(tmp_path) as tier:
        (fd,) = descriptors() - before
        assert fcntl.fcntl(int(fd), fcntl.F_GETFL) & os.O_DIRECT
        assert "past the kernel's cache" in tier.describe()


def test_alignment_grows_until_a_trial_works(tmp_path, monkeypatch):
    real, tried = os.pwritev, []

    def wants_16k(fd: int, views: list[memoryview], offset: int) -> int:
        tried.append(len(views[0]))
        if len(views[0]) % 2**14:
            raise OSError(errno.EINVAL, "")
        return real(fd, views, offset)

    monkeypatch.setattr(os, "pwritev", wants_16k)
    with (tmp_path / "file").open("w+b") as file:
        assert direct.make_direct(file.fileno()) == 2**14
        assert tried == [2**12, 2**13, 2**14]
        assert os.fstat(file.fileno()).st_size == 0


def test_trial_that_gives_other_bytes_means_no_direct_calls(tmp_path, monkeypatch):
    real = os.preadv

    def lies(fd: int, views: list[memoryview], offset: int) -> int:
        count = real(fd, views, offset)
        views[0][7] ^= 1
        return count

    monkeypatch.setattr(os, "preadv", lies)
    with (tmp_path / "file").open("w+b") as file:
        before = fcntl.fcntl(file.fileno(), fcntl.F_GETFL)
        assert direct.make_direct(file.fileno()) == 0
        assert fcntl.fcntl(file.fileno(), fcntl.F_GETFL) == before


def test_file_system_without_direct_calls_is_told_once(tmp_path, monkeypatch):
    monkeypatch.setattr(direct, "_works", lambda fd, alignment: False)
    told: list[str] = []
    with disk(tmp_path, tell=told.append) as tier:
        filled(tier, 10)
        assert "through the kernel's cache" in tier.describe()
    assert len(told) == 1
    assert "O_DIRECT" in told[0]
    with pytest.warns(RuntimeWarning, match="O_DIRECT"):
        disk(tmp_path)


# --- refusals


def test_folders_in_memory_and_missing_ones_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="is no folder"):
        disk(tmp_path / "missing")
    for kind in ("tmpfs", "ramfs"):
        monkeypatch.setattr(disk_module, "filesystem_of", lambda folder, kind=kind: kind)
        with pytest.raises(ConfigError, match=rf"lies in memory \({kind}\)"):
            disk(tmp_path)


def test_real_tmpfs_is_refused():
    folder = Path("/dev/shm")
    if direct.filesystem_of(folder) != "tmpfs":
        pytest.skip("/dev/shm is no tmpfs here")
    with pytest.raises(ConfigError, match="tmpfs"):
        disk(folder)


def test_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    def denied(*args, **named) -> int:
        raise OSError(errno.EROFS, "")

    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(TierError, match=rf"{tmp_path}/hpczero-tier.*\(EROFS\)"):
        disk(tmp_path)


def test_no_room_names_bytes_and_gives_back_what_it_took(tmp_path, monkeypatch):
    real = os.posix_fallocate
    before = descriptors()
    with disk(tmp_path) as tier:
        (fd,) = descriptors() - before
        place = tier.reserve(Record("r", {PART: 4096}))

        def full(fd: int, begin: int, nbytes: int) -> None:
            real(fd, begin, nbytes // 2)
            raise OSError(errno.ENOSPC, "")

        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(TierError, match=r"room for 40,960 bytes.*\(ENOSPC\).*bytes are free"):
            tier.reserve(Record("s", {PART: 40_000}))
        assert os.fstat(int(fd)).st_size == 4096
        monkeypatch.undo()
        put(tier, place, {PART: content(4096, 0)})
        filled(tier, 10)
        tier.drain()


def test_limit_of_the_system_on_files_is_an_error_at_reserve(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with disk(tmp_path) as tier:
        tier.reserve(Record("small", {"a": 2**19}))
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
        try:
            with pytest.raises(TierError, match=r"1,048,576 bytes beyond 524,288.*\(EFBIG\)"):
                tier.reserve(Record("large", {"a": 2**20}))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    ("call", "doing", "name"),
    [("pwritev", "writing", "ENOSPC"), ("pwritev", "writing", "EIO"), ("preadv", "reading", "EIO")],
)
def test_errors_of_the_disk_name_file_place_and_bytes(tmp_path, monkeypatch, call, doing, name):
    real, number = getattr(os, call), getattr(errno, name)

    def fails(fd: int, views: list[memoryview], offset: int) -> int:
        if offset >= 8192:
            raise OSError(number, "")
        return real(fd, views, offset)

    with disk(tmp_path, call_nbytes=4096) as tier:
        place = tier.reserve(Record("r", {PART: 12_288}))
        if call == "preadv":
            put(tier, place, {PART: content(12_288, 0)})
        tier.drain()
        monkeypatch.setattr(os, call, fails)
        place_of = rf"{tmp_path}/hpczero-tier\S+ .*{doing} at byte 8,192"
        expected = rf"{place_of}: .*\({name}\); got 0 of 4,096"
        if call == "preadv":
            wait: Any = tier.fetch(place, [PART]).wait
        else:
            put(tier, place, {PART: content(12_288, 0)})
            wait = tier.drain
        with pytest.raises(TierError, match=expected):
            wait()


@pytest.mark.parametrize("direct_calls", [True, False])
def test_calls_that_come_short_go_on_or_are_named(tmp_path, monkeypatch, direct_calls):
    if not direct_calls:
        monkeypatch.setattr(disk_module, "make_direct", lambda fd: 0)
    with disk(tmp_path, tell=lambda text: None) as tier:
        place = tier.reserve(Record("r", {PART: 40_960}))
        reads, writes = os.preadv, os.pwritev
        for call, real in (("preadv", reads), ("pwritev", writes)):  # two pages at a time
            monkeypatch.setattr(
                os, call, lambda fd, views, at, real=real: real(fd, [views[0][:8192]], at)
            )
        put(tier, place, {PART: content(40_960, 0)})
        assert torch.equal(get(tier, place, PART)[PART], content(40_960, 0))
        monkeypatch.setattr(os, "preadv", lambda fd, views, at: 0)
        with pytest.raises(TierError, match=r"reading at byte 0: the file ends there; got 0 of"):
            tier.fetch(place, [PART]).wait()
        monkeypatch.setattr(os, "preadv", lambda fd, views, at: reads(fd, [views[0][:512]], at))
        if direct_calls:
            with pytest.raises(TierError, match="came short; got 512 of 40,960"):
                tier.fetch(place, [PART]).wait()
        else:
            assert torch.equal(get(tier, place, PART)[PART], content(40_960, 0))


def test_file_that_was_cut_is_a_short_read(tmp_path):
    before = descriptors()
    with disk(tmp_path) as tier:
        (fd,) = descriptors() - before
        place = filled(tier, 40_960)
        tier.drain()
        os.ftruncate(int(fd), 8192)
        with pytest.raises(TierError, match=r"the file ends there; got 8,192 of 40,960 bytes"):
            tier.fetch(place, [PART]).wait()


# --- what is left, and what is held

KILLED = """
import os, sys, time
from pathlib import Path
from hpczero.tier import DiskTier, Record
tier = DiskTier(Path(sys.argv[1]), blocks=2, block_nbytes=2**20)
places = [tier.reserve(Record(str(i), {"a": 2**20})) for i in range(64)]
while True:
    for place in places:
        tier.evict(tier.fetch(place, (), fresh=["a"]).wait(), ["a"])
    print("writes", flush=True)
"""


@pytest.mark.fresh
def test_killed_process_leaves_no_file_and_no_room_taken(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, tmp_path], stdout=subprocess.PIPE, cwd=ROOT
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"writes\n"
    assert list(tmp_path.iterdir()) == []
    process.send_signal(signal.SIGKILL)
    assert process.wait(30) == -signal.SIGKILL
    process.stdout.close()
    assert list(tmp_path.iterdir()) == []


def test_name_left_by_a_kill_between_making_and_unlinking_goes_with_the_next_start(tmp_path):
    old = tmp_path / "hpczero-tier-node01-77-0123456789abcdef"
    young = tmp_path / "hpczero-tier-node01-78-0123456789abcdef"
    other = tmp_path / "hpczero-tier-notes.txt"
    for path in (old, young, other):
        path.touch()
    for path in (old, other):
        os.utime(path, (0, 0))
    disk(tmp_path).close()
    assert sorted(tmp_path.iterdir()) == sorted([young, other])


RESIDENT = """
import sys
from pathlib import Path
from hpczero.tier import DiskTier, Record
count = int(sys.argv[2])
def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))
with DiskTier(Path(sys.argv[1]), blocks=3, block_nbytes=2**20) as tier:
    before = resident()
    places = [tier.reserve(Record(str(i), {"a": 2**20})) for i in range(count)]
    for turn in range(2):
        for place in places:
            staged = tier.fetch(place, ["a"] if turn else (), fresh=() if turn else ["a"]).wait()
            staged["a"].fill_(turn)
            tier.evict(staged, ["a"])
    tier.drain()
    print(resident() - before)
"""


@pytest.mark.slow
@pytest.mark.fresh
def test_memory_does_not_grow_with_what_rests(tmp_path):
    grown = []
    for count in (4, 200):
        done = run_command([sys.executable, "-c", RESIDENT, tmp_path, str(count)], timeout=100)
        assert done.returncode == 0, done
        grown.append(int(done.stdout))
    few, many = grown
    assert many < few + 8 * 1024, grown  # KiB; 200 records are 200 MiB


def test_ranks_may_share_a_folder(tmp_path):
    with disk(tmp_path) as first, disk(tmp_path, accelerator=HostAccelerator()) as second:
        places = [filled(tier, 100, seed) for seed, tier in enumerate((first, second))]
        for seed, (tier, place) in enumerate(zip((first, second), places, strict=True)):
            assert torch.equal(get(tier, place, PART)[PART], content(100, seed))
