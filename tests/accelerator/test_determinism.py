"""The same bits in every run: what is set, when it is too late, and that the training command does it."""

from __future__ import annotations

import pytest

from hpczero.errors import ConfigError
from hpczero.options.environment import fix_cublas_workspace
from tests.helpers.mpirun import run_alone
from tests.helpers.runs import train

PROGRAM = """
import os, torch
from hpczero.accelerator import be_deterministic
twice = torch.tensor([0, 0])
torch.zeros(1).put_(twice, torch.ones(2))  # which of them stays has no order
be_deterministic()
assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
assert torch.are_deterministic_algorithms_enabled()
assert not torch.is_deterministic_algorithms_warn_only_enabled()
try:
    torch.zeros(1).put_(twice, torch.ones(2))
except RuntimeError as error:
    print(str(error).split(".")[0])
"""


@pytest.mark.parametrize("given", ["", ":4096:8", ":16:8"])
def test_workspaces_with_one_order_are_taken_or_kept(given):
    variables = {"CUBLAS_WORKSPACE_CONFIG": given, "OTHER": "1"}
    fix_cublas_workspace(variables)
    assert variables == {"CUBLAS_WORKSPACE_CONFIG": given or ":4096:8", "OTHER": "1"}


def test_a_workspace_without_one_order_is_refused():
    variables = {"CUBLAS_WORKSPACE_CONFIG": ":0:0"}
    with pytest.raises(ConfigError, match=r"CUBLAS_WORKSPACE_CONFIG: got ':0:0', expected :4096:8"):
        fix_cublas_workspace(variables)
    assert variables == {"CUBLAS_WORKSPACE_CONFIG": ":0:0"}


@pytest.mark.slow
def test_an_operation_without_an_order_is_an_error_afterwards():
    done = run_alone(["-c", PROGRAM], 60).ended()
    assert "put_" in done.stdout
    assert "deterministic" in done.stdout


@pytest.mark.slow
@pytest.mark.limit(180)
def test_the_training_command_refuses_and_runs(tmp_path, monkeypatch):
    found = []
    for workspace, code in ((":0:0", 78), ("", 0)):
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", workspace)
        changes = {"parallel__deterministic": "true", "parallel__device": "cpu", "train__steps": 2}
        found.append(train(tmp_path, 1, **changes).ended(code))
    refused, ran = found
    assert "CUBLAS_WORKSPACE_CONFIG: got ':0:0'" in refused.stderr
    assert "cpu, deterministic operations alone" in ran.stdout + ran.stderr
