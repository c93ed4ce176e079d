"""Options of transformers that cannot work over MPI, and launches in which every rank would train alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.mpirun import run_alone

pytestmark = pytest.mark.filterwarnings("ignore", "error:::hpczero")
PROGRAM = """\
import sys
from hpczero.errors import run
def main():
    from hpczero.hf.trainer import HpczeroTrainingArguments
    HpczeroTrainingArguments(sys.argv[1], use_cpu=True)
run(main)
"""


@pytest.mark.parametrize(
    "options",
    [
        {"torch_compile": True},
        {"auto_find_batch_size": True},
        {"fsdp": "full_shard"},
        {"deepspeed": {"zero_optimization": {"stage": 3}}},
        {"ddp_backend": "gloo"},
        {"ddp_find_unused_parameters": True},
        {"fp16": True},
        {"bf16_full_eval": True},
        {"save_on_each_node": True},
        {"enable_jit_checkpoint": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_option_that_cannot_work_is_refused_by_name(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    from hpczero.errors import ConfigError
    from hpczero.hf.trainer import HpczeroTrainingArguments

    with pytest.raises(ConfigError, match=f"^{next(iter(options))}: got"):
        HpczeroTrainingArguments(str(tmp_path), use_cpu=True, **options)


def test_single_jobs_by_mistake_are_refused(tmp_path: Path) -> None:
    """SLURM has started two tasks, and MPI sees one rank in each."""
    finished = run_alone(
        ["-c", PROGRAM, str(tmp_path)], 120, {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
    )
    assert finished.returncode == 78, finished
    assert "MPI sees 1 rank(s), but SLURM_STEP_NUM_TASKS=2" in finished.stderr


def test_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import hpczero.hf.trainer
    from hpczero.errors import ConfigError

    monkeypatch.delitem(sys.modules, "hpczero.hf.trainer.arguments", raising=False)
    for name in ["accelerate", *(each for each in sys.modules if each.startswith("accelerate."))]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match="accelerate"):
        _ = hpczero.hf.trainer.HpczeroTrainingArguments
