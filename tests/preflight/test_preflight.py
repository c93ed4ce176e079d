"""Preflight: which nodes are called bad, and by what."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpczero.preflight.verdict import (
    NodeReading,
    NodeReport,
    blame,
    faults,
    rounds,
    who_reads_again,
    who_reads_what,
)
from tests.helpers.mpirun import Finished, run_ranks
from tests.helpers.parallel import parallel_assert

if TYPE_CHECKING:  # importing MPI would start it where tests are only collected
    from mpi4py import MPI


def nodes(**changes: Mapping[str, object]) -> list[NodeReport]:
    """Five good nodes, but for the changes."""
    rates: dict[str, object] = {"write_mbyte_s": 100.0, "read_mbyte_s": 200.0, "pairs": {"x": 10.0}}
    return [
        NodeReport(name, 1, **{"gpus": 4, **rates, **changes.get(name, {})})  # type: ignore[arg-type]
        for name in ("a", "b", "c", "d", "e")
    ]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"gpus": 3}, "3 GPU(s), expected 4"),
        ({"file_error": "No space left"}, "files: No space left"),
        ({"pairs": {"a": 7.0, "b": 7.9}}, "to other nodes: 8 MB/s, the typical node has 10"),
        ({"write_mbyte_s": 20.0}, "writing a file: 20 MB/s, the typical node has 100"),
        ({"read_mbyte_s": 20.0}, "reading another node's file: 20 MB/s"),
    ],
)
def test_bad_node_is_named_with_its_figure(change: dict[str, object], what: str) -> None:
    (fault,) = faults(nodes(c=change), gpus=None)
    assert fault.node == "c"
    assert what in fault.what


def test_good_nodes_and_their_slow_partner_are_told_apart() -> None:
    names = "abcde"
    speed = {frozenset(p): 3.0 if "c" in p else 10.0 for p in itertools.combinations(names, 2)}
    measured = {n: {"pairs": {m: speed[frozenset((n, m))] for m in names if m != n}} for n in names}
    assert [fault.node for fault in faults(nodes(**measured), gpus=None)] == ["c"]


def test_no_node_is_bad_where_all_are_alike_or_nothing_can_be_compared() -> None:
    assert faults(nodes(), gpus=4) == []
    alone = [NodeReport("a", 1, 0), NodeReport("b", 1, 0, pairs={"a": 1.0})]
    assert faults(alone, gpus=None) == []
    assert [f.node for f in faults(alone, gpus=1)] == ["a", "b"]


@pytest.mark.parametrize("count", [1, 2, 3, 8, 25])
def test_every_node_meets_every_other_once_and_one_at_a_time(count: int) -> None:
    found = rounds(count, most=1000)
    met = list(itertools.chain.from_iterable(found))
    assert sorted(met) == list(itertools.combinations(range(count), 2))
    for pairs in found:
        busy = list(itertools.chain.from_iterable(pairs))
        assert len(busy) == len(set(busy))


def test_rounds_of_many_nodes_are_limited() -> None:
    assert len(rounds(1000, most=32)) <= 32


def preflight(ranks: int, folder: Path, words: str) -> Finished:
    line = ["-m", "hpczero.preflight", "--directory", str(folder), *words.split()]
    return run_ranks(ranks, line, timeout=60)


def test_command_measures_emulated_nodes_and_leaves_no_file(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = preflight(2, tmp_path, f"--file_mib 2 --pair_mib 1 --gpus 0 --json {report}")
    assert done.returncode == 0, done
    assert re.search(r"all 1 node\(s\) are good\s*$", done.stdout), done
    (node,) = json.loads(report.read_text())["nodes"]
    assert node["ranks"] == 2
    assert node["write_mbyte_s"] > 0
    assert node["read_mbyte_s"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_missing_gpu_ends_the_command_with_1_and_the_option_for_sbatch(tmp_path: Path) -> None:
    done = preflight(1, tmp_path, "--file_mib 1 --gpus 9")
    assert done.returncode == 1, done
    assert re.fullmatch(r"--exclude=[\w-]+", done.stdout.splitlines()[-1])


def test_folder_that_cannot_be_written_is_named_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = preflight(2, tmp_path / "file" / "runs", "--file_mib 1")
    assert done.returncode == 78, done
    assert f"--directory: nothing can be written into {tmp_path}/file/runs" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_rank_that_never_comes_to_mpi_does_not_keep_the_others(tmp_path: Path) -> None:
    # As on a node whose file system hangs while Python is read from it.
    program = (
        "import runpy, sys, time\n"
        "from hpczero.errors import launcher_rank\n"
        "if launcher_rank() == 1: time.sleep(600)\n"
        f"sys.argv = ['preflight', '--time_limit', '2', '--directory', {str(tmp_path)!r}]\n"
        "runpy.run_module('hpczero.preflight', run_name='__main__', alter_sys=True)\n"
    )
    done = run_ranks(2, ["-c", program], timeout=60)
    assert done.returncode != 0, done
    # The second one where the MPI library holds Python's lock while it starts.
    assert "did not end within 2 s" in done.stderr or "Timeout (0:00:12)!" in done.stderr, done


# --- files of several nodes


def errors_of_files(comm: MPI.Intracomm, folder: Path) -> list[str]:
    """What ``try_files`` finds wrong with each rank, taken for a node."""
    from hpczero.preflight.probes import try_files

    names = [f"n{rank}" for rank in range(comm.size)]
    return comm.allgather(try_files(comm, names, folder, 10_007)[2])


@pytest.mark.mpi
@pytest.mark.ranks(1, 2, 3)
def test_nodes_that_write_and_read_rightly_have_no_fault(comm: MPI.Intracomm, folder: Path) -> None:
    errors = errors_of_files(comm, folder)
    parallel_assert(comm, errors == [""] * comm.size, str(errors))


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_node_that_cannot_write_is_bad_and_its_reader_is_not(
    comm: MPI.Intracomm, folder: Path
) -> None:
    if comm.rank == 0:
        (folder / "node-1").mkdir()
    comm.Barrier()
    errors = errors_of_files(comm, folder)
    parallel_assert(comm, errors[1].startswith("cannot write: "), str(errors))
    parallel_assert(comm, not any(errors[:1] + errors[2:]), str(errors))


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_node_that_writes_other_bytes_is_bad_where_a_third_one_sees_it(
    comm: MPI.Intracomm, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def garble(file: int) -> None:
        os.pwrite(file, b"garbled", 5000)

    if comm.rank == 1:
        monkeypatch.setattr(os, "fsync", garble)
    errors = errors_of_files(comm, folder)
    if comm.size == 2:  # nobody can tell
        parallel_assert(comm, all("one of the two is bad" in text for text in errors), str(errors))
    else:
        expected = ["", "what it wrote has other bytes on n0 and n2", ""]
        parallel_assert(comm, errors == expected, str(errors))


@pytest.mark.mpi
@pytest.mark.ranks(3)
def test_node_that_reads_other_bytes_is_bad_and_the_writer_is_not(
    comm: MPI.Intracomm, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if comm.rank == 0:
        monkeypatch.setattr(Path, "read_bytes", lambda path: b"garbled")
    errors = errors_of_files(comm, folder)
    expected = ["what n1 wrote has other bytes here, and is right on n2", "", ""]
    parallel_assert(comm, errors == expected, str(errors))


def test_every_node_that_wrote_is_read_once_by_another_one() -> None:
    def pairs(wrote: list[bool]) -> list[tuple[int, int]]:
        return [(reading.reader, reading.writer) for reading in who_reads_what(wrote)]

    assert pairs([True]) == [(0, 0)]
    assert pairs([True, True, True]) == [(0, 1), (1, 2), (2, 0)]
    assert pairs([True, False, True, False]) == [(0, 2), (2, 0)]
    assert pairs([False, True]) == pairs([False]) == []


def test_second_reader_has_read_rightly_and_is_neither_of_the_two() -> None:
    good, wrong = NodeReading(1, 2), NodeReading(0, 1, "has other bytes")
    assert who_reads_again([wrong, good, NodeReading(2, 0)]) == [NodeReading(2, 1)]
    unread = NodeReading(2, 0, "cannot be read")
    assert who_reads_again([wrong, good, unread]) == [NodeReading(1, 0)]
    assert who_reads_again([good]) == []
    alone = blame([NodeReading(0, 0, "has other bytes")], [], ["a"])
    assert alone == {0: "what it wrote has other bytes"}
