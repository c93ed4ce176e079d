"""Records on disk, and the counters of the kernel they are made from."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

import pytest

from scaling.evidence.host import PeakPss, machine_seconds, process_seconds, pss_nbytes
from scaling.evidence.record import Recorder, circumstances, of_kind, read_rows, slug


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "peers-x.jsonl"
    with Recorder(path) as recorder:
        recorder.write("run", circumstances())
        recorder.write("turn", {"seconds": [0.1, 2.5]})
    rows = read_rows(path)
    assert rows == recorder.rows
    assert list(of_kind(rows, "turn")) == [{"kind": "turn", "seconds": [0.1, 2.5]}]
    assert {"date", "machine", "commit", "versions", "cores"} <= rows[0].keys()
    assert "torch" in rows[0]["versions"]


def test_a_run_that_fails_leaves_the_last_result_and_its_own_rows(tmp_path: Path) -> None:
    path = tmp_path / "peers-x.jsonl"
    path.write_text('{"kind": "old"}\n')

    def fail() -> None:
        with Recorder(path) as recorder:
            recorder.write("turn", {})
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert read_rows(path) == [{"kind": "old"}]
    assert read_rows(tmp_path / "peers-x.jsonl.unfinished") == [{"kind": "turn"}]


def test_machine_names_are_plain_folder_names() -> None:
    assert slug("Intel(R) Xeon(R) CPU @ 2.20GHz 4 cores") == "intel-xeon-cpu-2-20ghz-4-cores"


def test_peak_memory_sees_what_was_freed_again() -> None:
    before = pss_nbytes()
    with PeakPss() as peak:
        # of the kernel itself: what an earlier test freed may still be in the heap
        block = mmap.mmap(-1, 2**26)
        for _ in range(64):
            block.write(os.urandom(2**20))
        looking = time.monotonic() + 5.0
        while peak.nbytes - before < 0.9 * 2**26 and time.monotonic() < looking:
            time.sleep(0.01)
        block.close()
    assert 0.9 * 2**26 < peak.nbytes - before < 1.5 * 2**26


def test_cpu_time_counts_work() -> None:
    own, machine, begin = process_seconds([os.getpid()]), machine_seconds(), time.process_time()
    while time.process_time() < begin + 0.3:
        pass
    assert process_seconds([os.getpid()]) - own == pytest.approx(0.3, abs=0.05)
    assert machine_seconds() - machine > 0.25
