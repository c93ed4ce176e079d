"""Jobs in which one stage fails, stands still or does something else end by themselves and say which. Real MPI jobs."""

from __future__ import annotations

import re

import pytest

from tests.helpers.mpirun import Finished, run_ranks

PROGRAM = """
import sys, time
import torch
import hpczero
from hpczero import Mesh, Pipeline, Topology
from hpczero.models import GPT, GPTConfig
from hpczero.parallel import cut, gpt_stages

topology = Topology.of_world(mesh=Mesh(pipeline={ranks}))
stage, calls = topology.rank, 0
model = GPT(GPTConfig(vocab_size=61, context=11, layers={ranks}, hidden=18, heads=2))

def call(block, x):
    global calls
    calls += 1
    trouble()
    return block(x)

def trouble():
    {trouble}

model.call_block = call
cut(model, topology, gpt_stages(model))
optimizer = torch.optim.AdamW(model.parameters())
hpczero.zeroify(model, optimizer, stage=1, topology=topology)
pipeline = Pipeline(model, micro_batches=3)
x = list(torch.ones(3, 2, 9, dtype=torch.int64))
{before}
for step in range(3):
    pipeline.step(x, x)
    optimizer.step()
    optimizer.zero_grad()
"""


def run(ranks: int = 2, *, trouble: str = "pass", before: str = "", timeout_s: int = 0) -> Finished:
    """``trouble`` runs before every block, ``before`` before the first step."""
    program = PROGRAM.format(ranks=ranks, trouble=trouble, before=before)
    environment = {"HPCZERO_TIMEOUT": str(timeout_s)} if timeout_s else {}
    return run_ranks(ranks, ["-c", program], timeout=60, env=environment)


def test_a_stage_that_stands_still_is_named_with_micro_batch_and_direction() -> None:
    """The second stage sleeps in the last forward of the second step; the first one waits for a gradient."""
    job = run(trouble="if stage == 1 and calls == 6: time.sleep(600)", timeout_s=2)
    assert job.returncode == 86, job
    said = "[rank 0] hang: stage 0 of 2: the gradient of micro-batch 2 from stage 1 (backward) has not finished after 2"
    assert said in job.stderr, job
    assert re.search(r"missing: rank 1 is outside of any collective for \d+ s", job.stderr), job


def test_a_stage_that_waits_for_an_activation_names_it() -> None:
    """Three stages; the one in the middle sleeps. Which of the others speaks first is a race."""
    job = run(3, trouble="if stage == 1 and calls == 2: time.sleep(600)", timeout_s=2)
    assert job.returncode == 86, job
    forward = "stage 2 of 3: the activation of micro-batch 1 from stage 1 (forward)"
    backward = "stage 0 of 3: the gradient of micro-batch 0 from stage 1 (backward)"
    assert forward in job.stderr or backward in job.stderr, job


@pytest.mark.parametrize(
    ("before", "code", "said"),
    [
        (
            "x[2] = x[2][:1]",
            1,
            r"\[rank 0\] StepError: rank 0 of the pipeline, stage 0 of 2: the activation of micro-batch 2 for stage 1 "
            r"\(forward\): got \(1, 9, 18\) torch.float32, expected \(2, 9, 18\) torch.float32, as before in this step",
        ),
        (
            "if stage == 1: pipeline = Pipeline(model, micro_batches=3, schedule='gpipe')",
            1,
            r"\[rank 1\] StepError: rank 1 of the pipeline: stage 0 runs this step with another number of "
            "micro-batches, another schedule or for another purpose",
        ),
        (
            "if stage == 1: pipeline.evaluate(x, x)",
            1,
            r"\[rank 1\] StepError: .*another purpose \(step, evaluate\) than stage 1",
        ),
        ("if stage == 0: x = None", 78, r"\[rank 0\] ConfigError: stage 0 of 2 needs the inputs"),
        (
            "if stage == 1: x.pop()",
            78,
            r"\[rank 1\] ConfigError: stage 1 of 2: got 2 inputs, 2 targets",
        ),
        (
            "if stage == 0: model.call_block = lambda b, x: b(x).detach()",
            1,
            r"\[rank 0\] StepError: stage 0 of 2, forward of micro-batch 0 in chunk 0: what this stage computed "
            "does not depend on any of its trained parameters",
        ),
        (
            "if stage == 1: model.call_block = lambda b, x: b(x.detach())",
            1,
            r"\[rank 1\] StepError: stage 1 of 2, backward of micro-batch 0 in chunk 0: what this stage computed "
            "does not depend on what it was given",
        ),
        (
            "if stage == 0: model.call_block = lambda b, x: (b(x), None)",
            1,
            r"\[rank 0\] StepError: .*the last block returned tuple, expected one floating point tensor",
        ),
        (
            "pipeline.step(x, x)\nif stage == 1: optimizer.param_groups[0]['params'][-1].data.add_(1)\n"
            "optimizer.step()\noptimizer.zero_grad()",
            1,
            r"\[rank [01]\] StepError: rank [01]: 'wte.weight' has other values on the first stage than on the last",
        ),
    ],
)
def test_what_one_stage_does_otherwise_ends_the_job_with_its_name(
    before: str, code: int, said: str
) -> None:
    job = run(before=before, timeout_s=30)
    assert job.returncode == code, job
    assert re.search(said, job.stderr), job
    assert "hang:" not in job.stderr, job
