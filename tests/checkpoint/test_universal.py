"""Universal checkpoints of DeepSpeed, as its ds_to_universal lays them out, become checkpoints of ours."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hpczero.checkpoint.disk.stored import Stored
from hpczero.checkpoint.foreign.converting import convert
from hpczero.errors import CheckpointError
from tests.checkpoint.test_dcp import Poison, stored

SHAPES = {"first.weight": (13, 7), "first.bias": (13,), "last.weight": (5, 13)}
OPTIONS = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "params": [0]}


class LossScaler:
    """Of a class that a reader has not."""

    def __init__(self) -> None:
        self.scale = 1.0


def universal(folder: Path, stage: int) -> dict[str, dict[str, Tensor]]:
    """After stage 1: tensors of the parameter's shape in dictionaries, and steps. After stage 3: flat, without."""
    torch.manual_seed(stage)
    place = folder / "global_step3_universal"
    values = {
        name: {key: torch.randn(shape) for key in ("fp32", "exp_avg", "exp_avg_sq")}
        for name, shape in SHAPES.items()
    }
    for name, state in values.items():
        home = place / "zero" / name
        home.mkdir(parents=True)
        for key, value in state.items():
            whole = {"cat_dim": 0, "param": torch.nn.Parameter(value)}
            torch.save(whole if stage < 3 else value.reshape(-1), home / f"{key}.pt")
        if stage < 3:
            torch.save(torch.tensor(3.0), home / "step.pt")
    (place / "zero" / "mean").mkdir()
    torch.save({"param": torch.zeros(3)}, place / "zero" / "mean" / "fp32.pt")  # of a buffer
    said = {
        "module": OrderedDict(mean=torch.arange(3, dtype=torch.float64), again=torch.empty(0)),
        "buffer_names": ["mean"],
        "param_shapes": [OrderedDict((name, torch.Size(s)) for name, s in SHAPES.items())],
        "shared_params": {"again.weight": "first.weight"},
        "global_steps": 4,
        "skipped_steps": 1,
    }
    torch.save(said, place / "mp_rank_00_model_states.pt")
    optimizer = {"param_groups": [OPTIONS], "loss_scaler": LossScaler(), "zero_stage": stage}
    torch.save(optimizer, place / "zero" / "optimizer_state.pt")
    (folder / "latest_universal").write_text(place.name)
    return values


@pytest.mark.parametrize("stage", [1, 3])
def test_weights_moments_steps_and_options_come_in(tmp_path: Path, stage: int) -> None:
    values = universal(tmp_path, stage)
    path = convert(tmp_path, tmp_path / "run")
    assert path.name == "step-000000003"
    names = {
        "fp32": "/state/master",
        "exp_avg": "/state/exp_avg",
        "exp_avg_sq": "/state/exp_avg_sq",
    }
    for name, state in values.items():
        for key, value in state.items():
            assert torch.equal(stored(path, names[key], name), value), (name, key)
    with Stored(path) as held:
        meta, rows = held.manifest.meta, held.manifest.table.rows
    assert meta["buffers"] == [["mean", "float64", [3]]]
    assert [(r.name, rows[r.tied_to].name) for r in rows if r.tied_to is not None] == [
        ("again.weight", "first.weight")
    ]
    assert meta["optimizer"]["kinds"]["step"] == "tensor:float32"
    assert set(meta["optimizer"]["present"]["step"].values()) == {3.0}
    (group,) = meta["optimizer"]["groups"]
    assert group == {**{k: v for k, v in OPTIONS.items() if k != "params"}, "betas": [0.9, 0.95]}


def test_what_runs_a_program_or_is_not_whole_is_refused(tmp_path: Path) -> None:
    universal(tmp_path, 3)
    zero = tmp_path / "global_step3_universal" / "zero"

    def refuses(message: str, **options: Any) -> None:
        with pytest.raises(CheckpointError, match=message):
            convert(tmp_path, tmp_path / "run", **options)

    torch.save(torch.ones(90), zero / "first.weight" / "exp_avg.pt")
    refuses(r"exp_avg.pt: has 90 elements, and \*model_states.pt says \(13, 7\)")
    torch.save({"param": torch.ones(1), "sub_param_shape": 1}, zero / "first.weight" / "exp_avg.pt")
    refuses("exp_avg.pt: has sub_param_shape, expected 'param' alone")
    torch.save(Poison(f"touch {tmp_path}/ran"), zero / "first.weight" / "exp_avg.pt")
    refuses("exp_avg.pt: torch.load cannot read it with weights_only=True")
    assert not (tmp_path / "ran").exists()
    (zero / "last.weight" / "fp32.pt").unlink()
    refuses("last.weight/fp32.pt: is not there", optimizer=None)
