"""Bytes of checkpointed blocks: foretold as they are held, and refused where nothing would be saved."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hpczero.activations import Checkpointing, keep_products
from hpczero.errors import PlanError
from hpczero.job.mesh import Mesh
from hpczero.models import GPT, PRESETS, GPTConfig
from hpczero.plan.alternatives import alternatives
from hpczero.plan.offload import Activations
from hpczero.plan.peak import PlannedRun
from tests.plan.test_sizing import activation_nbytes, peak_nbytes

BASE = GPTConfig(vocab_size=400, context=128, layers=6, hidden=128, heads=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("changes", [{}, {"positions": "rotary"}, {"ffn_multiple": 2}])
@pytest.mark.parametrize(
    ("kind", "rest"), [("selective", "device"), ("block", "disk"), ("selective", "disk")]
)
def test_they_agree_with_the_memory_profiler(
    tmp_path: Path, kind: Any, rest: Any, changes: dict[str, Any], dtype: torch.dtype
) -> None:
    config = dataclasses.replace(BASE, **changes)
    model = GPT(config).to(dtype)
    policy = keep_products if kind == "selective" else None
    batch = 8
    window = batch * 2**15  # half an input of a block, or a quarter
    with Checkpointing.create(rest, folder=tmp_path, policy=policy, window=window) as checkpointing:
        model.call_block = checkpointing
        tokens = torch.randint(0, 400, (batch, 128), generator=torch.Generator().manual_seed(0))
        measured = peak_nbytes(model, tokens)
    predicted = activation_nbytes(
        config, 128 * batch, dtype.itemsize, checkpointing=True, kept=Activations(kind, rest)
    )
    # Left out on purpose: as in test_sizing, and staging, which is no tensor of torch's.
    assert measured == pytest.approx(predicted, rel=0.05)


@pytest.mark.parametrize("nbytes", [4096, 5000, 2**20, 2**26])
def test_staging_is_that_of_the_tier(tmp_path: Path, nbytes: int) -> None:
    asked = Activations("block", "disk", tmp_path, window=2**20, buffers=3)
    window = asked.block_nbytes(nbytes)
    with Checkpointing.create("disk", folder=tmp_path, window=window, buffers=3) as checkpointing:
        assert checkpointing.staging_nbytes == asked.staging_nbytes(nbytes)


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (Activations("some"), "expected one of none, block, selective"),  # type: ignore[arg-type]
        (Activations("block", "tape"), "expected one of device, host, disk"),  # type: ignore[arg-type]
        (Activations("none", "disk", "x"), "without checkpointing, so nothing rests there"),
        (Activations("block", "host"), "the same memory"),
        (Activations("block", "disk"), "without a folder"),
        (Activations("block", "disk", "x", buffers=1), "1 buffers"),
        (Activations("block", "disk", "x", window=100), "a window of 100 bytes"),
    ],
)
def test_what_does_not_go_together_is_refused(asked: Activations, text: str) -> None:
    with pytest.raises(PlanError, match=text):
        asked.check(on_host=True)


def test_host_beside_a_device_is_fine() -> None:
    Activations("block", "host").check(on_host=False)


def test_what_takes_as_much_memory_on_its_way_is_refused_with_both_figures() -> None:
    asked = Activations("block", "disk", "x", buffers=4)
    asked.check_saves(inputs=12, input_nbytes=2**20)
    with pytest.raises(
        PlanError, match=r"saves nothing: 5 inputs of 1,048,576 bytes take 5,242,880"
    ):
        asked.check_saves(inputs=5, input_nbytes=2**20)
    with pytest.raises(PlanError, match="saves nothing"):
        asked.check_saves(inputs=1000, input_nbytes=1000)  # they would not leave
    Activations("block").check_saves(inputs=1, input_nbytes=1)


def test_a_run_that_activations_fill_is_told_of_the_disk() -> None:
    deep = dataclasses.replace(PRESETS["gpt2"], layers=96)
    run = PlannedRun(
        deep,
        Mesh(shard=2),
        ranks_per_node=2,
        transport="window",
        stage=3,
        precision="fp32",
        micro_batch=8,
        accumulation=1,
        checkpointing=True,
    )
    on_disk = dataclasses.replace(run, kept=Activations("block", "disk", "FOLDER"))
    assert on_disk.most < 0.9 * run.most
    saved = 95 * run.input_nbytes - on_disk.kept.staging_nbytes(run.input_nbytes)
    assert run.most - on_disk.most == saved
    fits: Callable[[PlannedRun], bool] = lambda other: (  # noqa: E731
        other.most <= on_disk.most and other.micro_batch == run.micro_batch
    )
    words = [found.words for found in alternatives(run, fits, cores=2)]
    typed = "--activations.checkpointing block --activations.rest disk --activations.folder FOLDER"
    assert any(typed in text for text in words), words
