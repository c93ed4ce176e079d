"""Whether memory that a step frees is still there for the next, asked of the kernel."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STEPS = """
import resource, torch, hpczero
from torch import nn
model = nn.Sequential(*(nn.Linear(3000, 3000) for _ in range(2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
hpczero.zeroify(model, optimizer, transport="flat")
batch = torch.ones(16, 3000)
faults = []
for _ in range(10):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    model(batch).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(faults[4:]))  # the heap has found its size; now and then it still grows
"""


def page_faults_of_a_step(**variables: str) -> int:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}
    found = subprocess.run(
        [sys.executable, "-c", STEPS], capture_output=True, text=True, env=environment, timeout=120
    )
    assert found.returncode == 0, found.stderr
    return int(found.stdout.split()[-1])


@pytest.mark.slow
def test_a_step_takes_no_new_pages_unless_the_user_wants_his_heap_as_it_was() -> None:
    kept = page_faults_of_a_step()
    untouched = page_faults_of_a_step(HPCZERO_KEEP_HEAP="0")
    assert kept < 100
    assert untouched > 10 * max(kept, 1), (kept, untouched)


@pytest.mark.slow
def test_settings_of_the_users_own_are_left_alone() -> None:
    # with blocks of 64 KiB and more mapped one by one, every step takes all its pages anew
    step_pages = 2 * 4 * 3000 * 3000 // resource.getpagesize()
    assert page_faults_of_a_step(MALLOC_MMAP_THRESHOLD_="65536") > step_pages
