"""Jobs in which a rank is missing end by themselves, with the exit code and the place. Real MPI jobs."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from tests.helpers.mpirun import Finished, run_ranks

# A user's own loop on a zeroified model; `trouble(step)` is what goes wrong, at the third step.
LOOP = """
import sys, time
import torch
import hpczero

def trouble():
    {trouble}

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(5, 5)) for _ in range(3))
        self.calls = 0

    def forward(self, x):
        for index, block in enumerate(self.blocks):
            self.calls += 1
            if self.calls == 8 and topology.rank == 1:
                trouble()
            x = block(x)
        return x.sum()

topology = hpczero.Topology.of_world()
model = Model()
optimizer = torch.optim.AdamW(model.parameters())
hpczero.zeroify(model, optimizer, stage=3, topology=topology)
for step in range(1000):
    model(torch.ones(2, 5)).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def run_loop(trouble: str, **environment: str) -> Finished:
    """The loop on 2 ranks with ``trouble`` on rank 1, in the second block of the third step."""
    return run_ranks(2, ["-c", LOOP.format(trouble=trouble)], timeout=60, env=environment)


def test_hang_ends_the_job_with_86_and_names_operation_and_unit() -> None:
    job = run_loop("time.sleep(600)", HPCZERO_TIMEOUT="2", HPCZERO_TRANSPORT="flat")
    assert job.returncode == 86, job
    line = next(line for line in job.stderr.splitlines() if "hang:" in line)
    for said in ("all_gather of 'blocks.1'", "step 2", "not finished after 2 s", "HPCZERO_TIMEOUT"):
        assert said in line, job
    assert line.startswith("[rank 0] hang: "), job
    assert "in _all_gather" in job.stderr, job  # the stack of the call
    # rank 1 sleeps in its forward, after it had taken part in the unit before
    said = r"\[rank 0\] missing: rank 1 is outside of any collective for \d+ s.*, the last was .*'blocks.0'"
    assert re.search(said, job.stderr), job


def test_ranks_that_wait_say_early_where_all_are_and_go_on(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    early = "from hpczero.job import watchdog\nwatchdog.NOTICE_S = 0.5\n"
    loop = LOOP.replace("range(1000)", "range(4)").format(trouble="time.sleep(9)")
    program.write_text(early + loop)
    environment = {"HPCZERO_TIMEOUT": "20", "HPCZERO_TRANSPORT": "flat"}
    job = run_ranks(2, [program], timeout=60, env=environment)
    assert job.returncode == 0, job
    found = [line for line in job.stderr.splitlines() if "waits in" in line]
    lines = program.read_text().splitlines()
    called, sleeps = (
        lines.index(line) + 1 for line in ("            x = block(x)", "    time.sleep(9)")
    )
    said = (
        rf"\[rank 0\] waits in all_gather of 'blocks.1' .*\(line {called} of \S+train.py\) for \d+ s: missing: "
        rf"rank 1 is outside of any collective for \d+ s \(line {sleeps} of \S+train.py\), the last was "
    )
    assert len(found) == 1, job
    assert re.search(said, found[0]), job


def test_rank_that_leaves_early_is_a_hang_not_a_success() -> None:
    job = run_loop("sys.exit(0)", HPCZERO_TIMEOUT="2", HPCZERO_TRANSPORT="flat")
    assert job.returncode == 86, job
    assert "hang: all_gather of 'blocks.1'" in job.stderr, job
    assert "[rank 0] missing: rank(s) 1 do not answer" in job.stderr, job


def test_hang_in_shared_memory_names_the_unit_whose_gradient_is_missing() -> None:
    job = run_loop("time.sleep(600)", HPCZERO_TIMEOUT="2", HPCZERO_TRANSPORT="window")
    assert job.returncode == 86, job
    said = "[rank 0] hang: the rest of reduce_scatter of 'blocks.2' (step 2) has not finished after 2 s"
    assert said in job.stderr, job


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("topology.gather(1.0)", "Topology.gather"),
        (
            "with topology.agreed('read the data'): pass",
            "the agreement of all ranks after 'read the data'",
        ),
        ("hpczero.Topology.create(topology.world.comm)", "Topology.create"),
    ],
)
def test_rank_that_leaves_before_any_sharding_is_a_hang(body: str, what: str) -> None:
    program = f"""
import sys, hpczero
topology = hpczero.Topology.of_world()
if topology.rank == 1:
    sys.exit(0)
{body}
"""
    job = run_ranks(2, ["-c", program], timeout=60, env={"HPCZERO_TIMEOUT": "2"})
    assert job.returncode == 86, job
    assert f"[rank 0] hang: {what} has not finished after 2 s" in job.stderr, job


@pytest.mark.parametrize(
    ("trouble", "code", "said"),
    [
        ("raise ValueError('bad sample 17')", 1, "ValueError: bad sample 17"),
        (
            "from hpczero.errors import DataError; raise DataError('tokens.h5: empty')",
            78,
            "[rank 1] DataError: tokens.h5: empty",
        ),
    ],
    ids=["of the program", "of ours"],
)
def test_error_on_one_rank_ends_a_plain_loop_at_once(trouble: str, code: int, said: str) -> None:
    """Ours in one line. No watchdog: its limit is the default half hour, beyond the job's own here."""
    job = run_loop(trouble)
    assert job.returncode == code, job
    assert said in job.stderr, job
    assert ("Traceback" in job.stderr) == (code == 1), job


def test_error_that_all_ranks_agreed_on_ends_the_job_without_an_abort() -> None:
    body = """
        import torch, hpczero
        model = torch.nn.Linear(2, 2)
        hpczero.zeroify(model, torch.optim.SGD(model.parameters()), stage=7)
    """
    job = run_ranks(2, ["-c", textwrap.dedent(body)], timeout=60)
    assert job.returncode == 1, job  # as Python ends on an uncaught error
    assert job.stderr.count("ConfigError: stage: got 7") == 1, job
    assert "[rank 0] ConfigError: stage: got 7" in job.stderr, job
    assert " (told once; 2 of 2 ranks ended with it)\n" in job.stderr, job
    assert "MPI_ABORT" not in job.stderr, job


def test_call_that_never_returns_ends_a_job_of_one_rank() -> None:
    body = """
        import time
        from hpczero.job.watchdog import Watchdog
        with Watchdog(0, timeout_s=0.3).watch("all_gather of 'u'"):
            time.sleep(600)
    """
    job = run_ranks(1, ["-c", textwrap.dedent(body)], timeout=60)
    assert job.returncode == 86, job
    assert "[rank 0] hang: all_gather of 'u'" in job.stderr, job
