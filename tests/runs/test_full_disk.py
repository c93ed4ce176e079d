"""A run on a disk that is full, from the start or in its middle: one line that says so, whatever it was writing."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.runs import train
from tests.helpers.small_disk import fill, memory_disk, small_disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with memory_disk(tmp_path / "disk", 2**20) as path:
        yield path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("free_nbytes", "code", "said"),
    [
        (0, 78, "cannot be written as a run folder: No space left on device"),
        (2**14, 65, "the weights cannot be written"),
        (2**17, 65, "the weights cannot be written"),
    ],
)
def test_run_ends_with_one_line(disk: Path, free_nbytes: int, code: int, said: str) -> None:
    system = os.statvfs(disk)
    (disk / "filler").write_bytes(bytes(system.f_bavail * system.f_frsize - free_nbytes))
    changes = {"train__steps": 40, "log__tensorboard": "true"}
    done = train(disk, 1, **changes).ended(code)
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("[rank 0]")]
    assert said in line


@pytest.mark.slow
def test_run_whose_tier_has_no_room_ends_with_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    with small_disk(tmp_path, 8 * 2**20) as scratch:
        if scratch is None:
            pytest.skip("cannot mount a file system: needs root and mkfs.ext4")
        filler = fill(scratch, 2**17)
        given: dict[str, Any] = {"train__steps": 2, "offload__folder": scratch}
        given |= {f"offload__{part}": "disk" for part in ("optimizer", "gradients", "parameters")}
        given["offload__window"] = 1
        done = train(tmp_path, **given).ended(1)
        assert "Traceback" not in done.stderr
        (line,) = [line for line in done.stderr.splitlines() if line.startswith("[rank ")]
        assert re.search(
            r"/hpczero-tier-.*no room for [0-9,]+ bytes beyond [0-9,]+: .*ENOSPC", line
        )
        assert list(scratch.iterdir()) == []
        filler.unlink()
        done = train(tmp_path, **given, run__overwrite="true").ended()
