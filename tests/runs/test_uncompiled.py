"""The compiler that is left out: not imported by training, itself where it is used, and nobody sees a difference."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.helpers.mpirun import run_command
from tests.helpers.runs import options

pytestmark = pytest.mark.fresh  # imports are what is looked at

LIMIT_S = 90

TRAINS = """
import runpy, sys
sys.argv[0] = "train"
try:
    runpy.run_module("hpczero.train", run_name="__main__")
finally:
    print("compiler:", "torch._dynamo.symbolic_convert" in sys.modules, "sympy" in sys.modules)
"""


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("recomputed", ["block", "selective"])
def test_training_does_not_import_the_compiler(
    tmp_path: Path, precision: str, recomputed: str
) -> None:
    changes = {
        "train__steps": 2,
        "parallel__precision": precision,
        "activations__checkpointing": recomputed,
        "checkpoint__every": 1,
        "evaluation__batches": 1,
    }
    done = run_command(
        [sys.executable, "-c", TRAINS, *options(tmp_path, **changes)[2:]], LIMIT_S
    ).ended()
    assert "compiler: False False" in done.stdout


USES = """
import sys
import torch
from torch.utils.checkpoint import checkpoint
from hpczero.accelerator.choice import leave_out_compiler

leave_out_compiler()
standin = torch._dynamo
assert sys.modules["torch._dynamo"] is standin

def trained(compiled):
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    run = torch.compile(model, backend="eager") if compiled else model
    for _ in range(3):
        optimizer.zero_grad()
        checkpoint(run, torch.ones(2, 4), use_reentrant=False).sum().backward()
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    return [p.detach().clone() for p in model.parameters()]

before = trained(False)
assert torch._dynamo is standin, "somebody asked for more"
%s
import torch._dynamo
assert torch._dynamo is sys.modules["torch._dynamo"] is not standin
assert "torch._dynamo.symbolic_convert" in sys.modules
for after in (trained(True), trained(False)):
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
assert standin.config.error_on_nested_fx_trace is torch._dynamo.config.error_on_nested_fx_trace
true = torch._dynamo
leave_out_compiler()
assert torch._dynamo is true, "where the compiler is in already nothing changes"
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "use",
    [
        "torch.compile(lambda x: x + 1, backend='eager')(torch.ones(1))",
        "assert torch._dynamo.explain",
        "import torch._dynamo.eval_frame",
        "from torch._dynamo import config; config.verbose = True; assert torch._dynamo.config.verbose",
        "torch.compiler.reset()",
    ],
)
def test_compiler_is_itself_from_its_first_use_on(use: str) -> None:
    run_command([sys.executable, "-c", USES % use], LIMIT_S).ended()
