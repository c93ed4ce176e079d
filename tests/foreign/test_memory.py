"""What a rank holds while it loads, its shard, and while it saves, some units: never the model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.foreign import llama
from tests.helpers.mpirun import ROOT, run_ranks

PROGRAM = ROOT / "tests" / "foreign" / "memory_program.py"
MIB = 2**20
WIDE: dict[str, Any] = {
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 1536,
    "max_position_embeddings": 32,
}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {**WIDE, "vocab_size": 8001, "num_hidden_layers": 16},
    "Mixtral": {**WIDE, "vocab_size": 401, "num_hidden_layers": 4, "num_local_experts": 8},
}
TRIED = MODELS if os.environ.get("HPCZERO_TEST_ALL") == "1" else ["Llama"]


def write(name: str, folder: Path) -> int:
    """A model in bf16, in files of 30 MB; the number of its parameters."""
    library = llama.library()
    config = getattr(library, f"{name}Config")(**MODELS[name])
    with torch.device("meta"):
        model = getattr(library, f"{name}ForCausalLM")(config)
    model = model.to_empty(device="cpu").to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    model.save_pretrained(folder, max_shard_size="30MB")
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.fresh
@pytest.mark.slow
@pytest.mark.limit(300)
@pytest.mark.filterwarnings("ignore", "error:::hpczero")
@pytest.mark.parametrize("name", TRIED)
def test_a_rank_loads_and_saves_what_it_could_not_hold(tmp_path: Path, name: str) -> None:
    numel = write(name, tmp_path)
    finished = run_ranks(2, [PROGRAM, tmp_path, "flat"], 250, env={"PYTHONPATH": os.fspath(ROOT)})
    assert finished.returncode == 0, str(finished)
    lines = [line.split() for line in finished.stdout.splitlines() if line.startswith("found")]
    assert len(lines) == 2, str(finished)
    read = 0
    for _, peak, shard, largest, nbytes in lines:
        bound = int(shard) + int(largest) + 64 * MIB
        assert int(peak) <= bound, str(finished)
        assert bound < 4 * numel, "a rank that held the model would not be found"
        read += int(nbytes)
    assert read == 2 * numel
    for line in finished.stdout.splitlines():
        if line.startswith("saved") and name == "Llama":  # experts are taken apart: more copies
            saved, unit = map(int, line.split()[1:])
            assert saved <= 3 * unit + 64 * MIB < 4 * numel, str(finished)
