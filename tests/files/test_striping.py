"""Stripes of a folder, by a stand-in for Lustre's ``lfs`` that says what the true one says."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hpczero.doctor.examination import check_stripes
from hpczero.doctor.finding import Status
from hpczero.errors import ConfigError
from hpczero.files import direct
from hpczero.files.direct import ALL, Striping, stripe, striping_of
from hpczero.options.config import CheckpointOptions
from tests.helpers.mpirun import run_ranks
from tests.helpers.runs import steps, train

# Lustre 2.15: lfs getstripe -d of a folder
PLAIN = "stripe_count:  4 stripe_size:   1048576 pattern:       raid0 stripe_offset: -1\n"
GROWING = """\
  lcm_layout_gen:    0
  lcm_mirror_count:  1
  lcm_entry_count:   2
    lcme_id:             N/A
    lcme_extent.e_start: 0
    lcme_extent.e_end:   134217728
      stripe_count:  1       stripe_size:   1048576       pattern:       raid0       stripe_offset: -1
    lcme_id:             N/A
    lcme_extent.e_start: 134217728
    lcme_extent.e_end:   EOF
      stripe_count:  -1      stripe_size:   16777216      pattern:       raid0       stripe_offset: -1
"""


class Lfs:
    """Says ``says`` of every folder, and notes its calls."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.path = f"{folder}:{os.environ['PATH']}"

    def says(self, text: str, code: int = 0) -> None:
        (self.folder / "text").write_text(text)
        tool, stream = self.folder / "lfs", 2 if code else 1
        calls = f'echo "$*" >>{self.folder}/calls'
        tool.write_text(f"#!/bin/sh\n{calls}\ncat {self.folder}/text >&{stream}\nexit {code}\n")
        tool.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def lfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lfs:
    found = Lfs(tmp_path / "bin")
    monkeypatch.setenv("PATH", found.path)
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (PLAIN, Striping(4, 2**20)),
        (GROWING, Striping(ALL, 16 * 2**20)),
        (PLAIN.replace("4 ", "0 "), Striping(1, 2**20)),
        ("stripe_count: 2\n", Striping(2, 0)),
        ("", None),
    ],
)
def test_layout_of_large_files_is_read(
    lfs: Lfs, tmp_path: Path, text: str, expected: Striping | None
) -> None:
    lfs.says(text)
    assert striping_of(tmp_path / "not" / "yet") == expected
    assert lfs.calls == [f"getstripe -d {tmp_path}"]


def test_folder_that_is_not_on_lustre_has_none(lfs: Lfs, tmp_path: Path) -> None:
    lfs.says("error: getstripe failed: Inappropriate ioctl for device", code=25)
    assert striping_of(tmp_path) is None
    (lfs.folder / "lfs").unlink()
    assert striping_of(tmp_path) is None


def test_server_that_does_not_answer_is_not_waited_for(
    lfs: Lfs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lfs.says("")
    (lfs.folder / "lfs").write_text("#!/bin/sh\nexec sleep 100\n")
    monkeypatch.setattr(direct, "LIMIT_S", 0.2)
    assert striping_of(tmp_path) is None


@pytest.mark.parametrize(
    ("count", "nodes", "remedy"),
    [
        (1, 2, "lfs setstripe -c 2 -S 16M runs, before the first checkpoint"),
        (4, 25, "--checkpoint.stripes 25"),
        (63, 64, "lfs setstripe -c -1 -S 16M runs"),
        (1, 1, ""),
        (64, 500, ""),
        (ALL, 500, ""),
    ],
)
def test_fewer_targets_than_nodes_are_a_warning_with_the_line_to_type(
    count: int, nodes: int, remedy: str
) -> None:
    found = check_stripes(Striping(count, 2**20), Path("runs"), nodes)
    assert found is not None
    assert (found.status is Status.WARN) == bool(remedy)
    assert remedy in found.remedy
    there = "all storage targets" if count == ALL else f"{count} storage target(s), 1 MiB"
    assert there in found.value
    assert check_stripes(None, Path("runs"), nodes) is None, "there is no Lustre"


def test_doctor_says_how_the_folder_is_striped(lfs: Lfs, tmp_path: Path) -> None:
    lfs.says(PLAIN)
    line = ["-m", "hpczero.doctor", "--json", "--directory", str(tmp_path)]
    done = run_ranks(2, line, timeout=100, env={"PATH": lfs.path})
    assert done.returncode == 0, done
    found: dict[str, Any] = {f["title"]: f for f in json.loads(done.stdout)["findings"]}
    assert f"files in {tmp_path} lie on 4 storage target(s)" in found["stripes"]["value"]
    assert lfs.calls == [f"getstripe -d {tmp_path}"]  # one rank asks


def test_folder_is_striped_as_asked(lfs: Lfs, tmp_path: Path) -> None:
    lfs.says("")
    stripe(tmp_path / "checkpoints", 25)
    assert lfs.calls == [f"setstripe -c 25 -S 16777216 {tmp_path}/checkpoints"]
    assert (tmp_path / "checkpoints").is_dir()


def test_folder_that_cannot_be_striped_is_refused(lfs: Lfs, tmp_path: Path) -> None:
    lfs.says("error on ioctl 0x4008669a: Inappropriate ioctl for device", code=25)
    with pytest.raises(ConfigError, match=r"stripes: got 8, but .* lfs said: error on ioctl"):
        stripe(tmp_path, 8)
    (lfs.folder / "lfs").unlink()
    with pytest.raises(ConfigError, match=r"no lfs on this host\. Leave it at 0"):
        stripe(tmp_path, 8)


def test_impossible_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"checkpoint.stripes: got -2, expected -1 or more"):
        CheckpointOptions(stripes=-2)


@pytest.mark.slow
@pytest.mark.limit(200)
def test_run_stripes_its_folder_once_before_its_first_checkpoint_and_only_if_asked(
    lfs: Lfs, tmp_path: Path
) -> None:
    lfs.says("")
    few: dict[str, Any] = {"train__steps": 2, "checkpoint__every": 1}
    plain = train(tmp_path / "plain", 2, **few)
    assert plain.returncode == 0, plain
    assert lfs.calls == []
    asked = train(tmp_path / "asked", 2, **few, checkpoint__stripes=-1)
    assert asked.returncode == 0, asked
    assert lfs.calls == [f"setstripe -c -1 -S 16777216 {tmp_path}/asked/r/checkpoints"]
    assert steps(tmp_path / "asked") == [2, 1]
    lfs.says("No space left on device", code=28)
    refused = train(tmp_path / "refused", 2, **few, checkpoint__stripes=3)
    assert refused.returncode == 78, refused
    assert refused.stderr.count("lfs said: No space left on device") == 1
