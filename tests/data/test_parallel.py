"""Preparing text on many cores: the same bytes on any number of them, and nothing is left when it is interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.mpirun import ROOT, run_command
from tests.helpers.processes import end_family, launch_environment

WAIT_S = 60.0


def text(seed: int, num_lines: int) -> str:
    return "".join(
        f"def f{(seed + n) * 7919 % 1000003}(x, y):\n    return x + {n}  # naïve – ☃\n\n"
        for n in range(num_lines)
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A file of several batches, many small ones, and one of a single line."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text/long").write_text(text(0, 40_000))
    (tmp_path / "text/line").write_text(text(1, 20_000).replace("\n", " "))
    for n in range(200):
        (tmp_path / f"text/{n}").write_text(text(n * 1000, 5 + n % 7))
    return tmp_path / "text"


@pytest.mark.parametrize("tokenizer", ["bytes", pytest.param("bpe", marks=pytest.mark.slow)])
def test_file_has_the_same_bytes_on_one_core_and_on_all(folder: Path, tokenizer: str) -> None:
    all_cores = sorted(os.sched_getaffinity(0))
    found = []
    for name, cores in (("one", all_cores[:1]), ("all", all_cores)):
        out = folder.parent / f"{name}.h5"
        code = (
            f"import os, sys; os.sched_setaffinity(0, {cores})\n"
            "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
        )
        words = f"-m hpczero.data prepare {folder} --out {out} --tokenizer {tokenizer}".split()
        run_command([sys.executable, "-c", code, *words], timeout=120).ended()
        found.append(out.read_bytes())
    assert found[0] == found[1]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_command_leaves_no_half_file(folder: Path, number: int, code: int) -> None:
    (folder / "more").write_text(text(2, 600_000))  # of several seconds
    out = folder.parent / "out"
    process = subprocess.Popen(
        [sys.executable, "-m", "hpczero.data", "prepare", folder, "--out", out / "tokens.h5"],
        cwd=ROOT,
        env=launch_environment(PYTHONPATH=os.fspath(ROOT)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        # A shell's job in the background, as these tests may be, is one that SIGINT does not interrupt.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        while not (out.exists() and any(out.iterdir())):
            assert process.poll() is None, "it ended before it wrote"
            time.sleep(0.005)
        process.send_signal(number)
        assert process.wait(WAIT_S) == code
    finally:
        end_family(process.pid)
        process.communicate()
    assert not list(out.iterdir())


def test_interrupted_learning_of_pairs_ends_at_once(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys, threading, time\n"
        "from pathlib import Path\n"
        "from hpczero.data import BPETokenizer\n"
        "from hpczero.errors import run\n"
        "from hpczero.job.long_work import watched\n"
        "def learn(progress):\n"
        "    progress.phase('learn byte pairs')\n"
        "    words = (b'%d ' % (n * 7919) for n in range(3_000_000))\n"
        "    with progress.silent():\n"
        "        BPETokenizer.train([b''.join(words)], 60_000)\n"
        "    sys.stdout.write('learnt')\n"
        "def interrupt(moment):\n"
        "    if moment.what and moment.elapsed_s > 1:\n"
        "        raise KeyboardInterrupt\n"
        "run(lambda: watched(learn, interrupt))\n"
    )
    done = run_command([sys.executable, "-c", program], timeout=WAIT_S, cwd=tmp_path).ended(130)
    assert "learnt" not in done.stdout
    assert not done.stderr, done
