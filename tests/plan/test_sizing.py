"""Sizing against the paper's printed numbers, Plan.build on the real model, and torch's memory profiler."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from hpczero.activations import Checkpointing, keep_products
from hpczero.errors import PlanError
from hpczero.job.mesh import Mesh
from hpczero.models.config import PRESETS, GPTConfig, parameter_shapes
from hpczero.models.gpt import DEVICE_LOSS_CHUNK_NUMEL, GPT, LOSS_CHUNK_NUMEL
from hpczero.parallel.tensor.loss import DEVICE_PIECE_NUMEL, PIECE_NUMEL
from hpczero.plan import Plan
from hpczero.plan.alternatives import alternatives
from hpczero.plan.offload import Activations
from hpczero.plan.peak import PlannedRun
from hpczero.plan.rules import default_rule
from hpczero.plan.sizing import (
    DEVICE_LOSS_PIECE_NUMEL,
    LOSS_PIECE_NUMEL,
    ForwardSizes,
    MachineSizes,
    blockwise_plan,
    fewest_ranks,
    fit,
    ideal_state_nbytes,
    largest,
)
from hpczero.plan.spread import Spread
from tests.helpers.planned import planned

# Rajbhandari et al., ZeRO, SC20, table 1: GB per device as printed, (Pos, Pos+g, Pos+g+p) for 7.5B, 128B and 1T.
TABLE_1 = {
    1: ("120 120 120", "2048 2048 2048", "16000 16000 16000"),
    4: ("52.5 41.3 30", "896 704 512", "7000 5500 4000"),
    16: ("35.6 21.6 7.5", "608 368 128", "4750 2875 1000"),
    64: ("31.4 16.6 1.88", "536 284 32", "4187 2218 250"),
    256: ("30.4 15.4 0.47", "518 263 8", "4046 2054 62.5"),
    1024: ("30.1 15.1 0.12", "513 257 2", "4011 2013 15.6"),
}
MODELS = (7_500_000_000, 128_000_000_000, 1_000_000_000_000)
TABLE_1_CELLS = [
    (numel, ranks, stage, printed)
    for ranks, row in TABLE_1.items()
    for numel, cells in zip(MODELS, row, strict=True)
    for stage, printed in enumerate(cells.split(), start=1)
]
SMALL = GPTConfig(vocab_size=1000, context=64, layers=3, hidden=64, heads=4)


def activation_nbytes(model: GPTConfig, tokens: int, itemsize: int, **more: Any) -> int:
    return ForwardSizes(model, tokens, itemsize, model.layers, **more).peak_nbytes()


@pytest.mark.parametrize(("numel", "ranks", "stage", "printed"), TABLE_1_CELLS)
def test_ideal_states_reproduce_table_1(numel: int, ranks: int, stage: int, printed: str) -> None:
    # Less than one unit of the last printed digit: eight cells of the paper are truncated, the others rounded.
    last_digit = 10.0 ** -len(printed.partition(".")[2])
    computed = ideal_state_nbytes(stage, numel, data_parallel=ranks) / 1e9
    assert abs(computed - float(printed)) < last_digit


def test_ideal_states_of_plain_data_parallelism_are_16_bytes_per_parameter() -> None:
    assert ideal_state_nbytes(0, 1_500_000_000, data_parallel=400) == 24e9


@pytest.mark.parametrize(
    ("data_parallel", "expected_gb"), [(4, 20.9), (8, 14.3), (16, 10.9), (25, 9.7)]
)
def test_ideal_states_of_figure_3_with_model_parallelism(
    data_parallel: int, expected_gb: float
) -> None:
    numel = 12 * 75 * 8192**2 + 51_281 * 8192
    states = ideal_state_nbytes(2, numel, data_parallel=data_parallel, model_parallel=16)
    assert states / 1e9 == pytest.approx(expected_gb, abs=0.05)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 7, 64])
def test_ideal_volume_is_what_the_plan_sends_without_padding(stage: int, ranks: int) -> None:
    shapes = list(parameter_shapes(PRESETS["gpt2"]))
    plan = blockwise_plan(shapes, num_shards=ranks, stage=stage, precision="bf16")
    traffic = plan.traffic()
    # ZeRO, SC20, sec. 7: 2Ψ, with sharded parameters 3Ψ, times (N - 1) / N of a ring
    ideal = (3 if stage == 3 else 2) * plan.numel * Fraction(ranks - 1, ranks)
    # The padding of each unit is rounded down to whole elements once.
    assert 0 <= traffic.numel - traffic.padding - ideal < len(plan.units)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "config",
    [SMALL, dataclasses.replace(SMALL, tie_embeddings=False, positions="rotary", ffn_multiple=3)],
    ids=["tied", "untied-rotary"],
)
def test_blockwise_plan_equals_the_plan_of_the_built_model(
    config: GPTConfig, stage: int, precision: str
) -> None:
    with torch.device("meta"):
        model = GPT(config)
    built = Plan.build(model, num_shards=3, stage=stage, precision=precision, rule=default_rule)
    sized = blockwise_plan(parameter_shapes(config), num_shards=3, stage=stage, precision=precision)
    assert sized == built
    assert sized.memory() == built.memory()


def fitted(name: str, ranks: int, stage: int, room: int = 10**12, **more: Any) -> Any:
    """How a preset fits at one stage in bf16, with samples of 1,024 tokens."""
    shapes = parameter_shapes(PRESETS[name])
    plan = blockwise_plan(shapes, num_shards=ranks, stage=stage, precision="bf16")
    return fit(PRESETS[name], plan, MachineSizes(ranks, room), sequence=1024, **more)


def peak_nbytes(model: GPT, tokens: torch.Tensor) -> int:
    """Most bytes allocated at once during forward and backward, gradients of parameters excluded.

    Looked at outside of matrix products, whose scratch no plan counts: on processors that have AVX-512 but no
    AVX512_BF16, oneDNN's products of bf16 take an fp32 copy of their result (torch 2.13).
    """
    model(tokens, tokens).backward()  # from here on gradients are allocated
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiler:
        model(tokens, tokens).backward()
    held, peak, product_ends = 0, 0, 0
    # Only the raw events carry frees in time order.
    for event in profiler.profiler.kineto_results.events():
        if event.name() in ("aten::mm", "aten::addmm", "aten::bmm"):
            product_ends = event.start_ns() + event.duration_ns()
        elif event.name() == "[memory]":
            held += event.nbytes()
            if event.start_ns() > product_ends:
                peak = max(peak, held)
    return peak


@pytest.mark.worth("the plan is compared with torch's profiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"positions": "rotary"}, {"ffn_multiple": 2}, {"vocab_size": 5000}, {"layers": 8}],
    ids=["base", "rotary", "narrow-mlp", "large-vocabulary", "deep"],
)
@pytest.mark.parametrize(
    ("kind", "rest"),
    [
        ("none", "device"),
        ("block", "device"),
        ("selective", "device"),
        ("block", "disk"),
        ("selective", "disk"),
    ],
)
def test_activations_agree_with_the_memory_profiler(
    tmp_path: Path, kind: Any, rest: Any, changes: dict[str, Any], dtype: torch.dtype
) -> None:
    base = GPTConfig(vocab_size=400, context=128, layers=6, hidden=128, heads=4)
    by_itself = (kind, rest) == ("block", "device")
    config = dataclasses.replace(base, **changes, checkpoint_activations=by_itself)
    model = GPT(config).to(dtype)
    batch = 8
    tokens = torch.randint(0, 400, (batch, 128), generator=torch.Generator().manual_seed(0))
    with ExitStack() as stack:
        if kind == "selective" or rest == "disk":
            policy = keep_products if kind == "selective" else None
            window = batch * 2**15  # half an input of a block, or a quarter
            made = Checkpointing.create(rest, folder=tmp_path, policy=policy, window=window)
            model.call_block = stack.enter_context(made)
        measured = peak_nbytes(model, tokens)
    given = {"checkpointing": kind != "none", "kept": Activations(kind, rest)}
    predicted = activation_nbytes(config, 128 * batch, dtype.itemsize, **given)
    # Left out on purpose: norm and softmax statistics, rotary tables, weight gradients in flight; and staging, which is
    # no tensor of torch's.
    assert measured == pytest.approx(predicted, rel=0.05)


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_on_their_way_agree_with_the_memory_profiler(tied: bool) -> None:
    """A vocabulary that outweighs everything else, and few tokens."""
    config = GPTConfig(
        vocab_size=20_000, context=16, layers=2, hidden=128, heads=4, tie_embeddings=tied
    )
    tokens = torch.randint(0, 400, (1, 16), generator=torch.Generator().manual_seed(0))
    activations = activation_nbytes(config, 16 * 1, 4, checkpointing=False)
    arriving = Spread(config, Mesh(), 1, precision="fp32").arriving_nbytes(0)
    assert arriving == (3 if tied else 1) * 4 * 20_000 * 128
    # Most activations are gone when the embedding gets its gradient.
    assert arriving <= peak_nbytes(GPT(config), tokens) <= arriving + activations


def test_pieces_of_the_loss_are_those_of_the_model() -> None:
    assert LOSS_PIECE_NUMEL == LOSS_CHUNK_NUMEL == PIECE_NUMEL
    assert DEVICE_LOSS_PIECE_NUMEL == DEVICE_LOSS_CHUNK_NUMEL == DEVICE_PIECE_NUMEL


def test_larger_pieces_of_a_device_are_planned() -> None:
    config, tokens = PRESETS["gpt2"], 16 * 1024
    here, there = (
        activation_nbytes(config, 1024 * 16, 2, checkpointing=False, on_device=on_device)
        for on_device in (False, True)
    )
    rows = 2**28 // config.vocab_size - 2**24 // config.vocab_size
    assert tokens * config.vocab_size > 2**28
    # Of three fp32 tensors, less the half gradient of those logits, which is not there yet.
    assert there - here == (3 * 4 - 2) * rows * config.vocab_size


@pytest.mark.parametrize("checkpointing", [False, True])
def test_largest_micro_batch_fits_and_one_more_does_not(checkpointing: bool) -> None:
    config, room = PRESETS["gpt2-xl"], 32 * 10**9
    row = fitted("gpt2-xl", 16, 2, room)
    batch = row.micro_batch_checkpointed if checkpointing else row.micro_batch

    def total(size: int) -> int:
        return row.memory.total + activation_nbytes(
            config, 1024 * size, 2, checkpointing=checkpointing
        )

    assert batch > 1
    assert total(batch) <= room < total(batch + 1)


def test_checkpointing_is_counted_only_where_the_micro_batch_needs_it() -> None:
    config = PRESETS["gpt2-xl"]

    def sized(micro_batch: int) -> tuple[int, bool]:
        row = fitted("gpt2-xl", 16, 2, 32 * 10**9, micro_batch=micro_batch)
        return row.needed_nbytes - row.memory.total, row.fits

    def activations(micro_batch: int, checkpointing: bool) -> int:
        return activation_nbytes(config, 1024 * micro_batch, 2, checkpointing=checkpointing)

    assert sized(2) == (activations(2, False), True)
    assert sized(40) == (activations(40, True), True)
    assert sized(4000) == (activations(4000, True), False)


@pytest.mark.parametrize("threshold", [0, 1, 2, 17, 99, 100])
def test_largest_finds_the_last_good_number(threshold: int) -> None:
    assert largest(lambda n: n <= threshold, 100) == threshold


def test_fewest_ranks_is_above_the_start_or_none() -> None:
    assert fewest_ranks(lambda n: n >= 89, start=64) == 89
    assert fewest_ranks(lambda n: n >= 10, start=64) == 65
    assert fewest_ranks(lambda n: False, start=1) is None


# --- checkpointed blocks: predicted as they are held, and refused where nothing would be saved


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
    Activations("block", "host").check(on_host=False)


def test_what_takes_as_much_memory_on_its_way_is_refused_with_both_figures() -> None:
    asked = Activations("block", "disk", "x", buffers=4)
    asked.check_saves(inputs=12, input_nbytes=2**20)
    said = r"saves nothing: 5 inputs of 1,048,576 bytes take 5,242,880"
    with pytest.raises(PlanError, match=said):
        asked.check_saves(inputs=5, input_nbytes=2**20)
    with pytest.raises(PlanError, match="saves nothing"):
        asked.check_saves(inputs=1000, input_nbytes=1000)  # they would not leave
    Activations("block").check_saves(inputs=1, input_nbytes=1)


def test_a_run_that_activations_fill_is_told_of_the_disk() -> None:
    deep = dataclasses.replace(PRESETS["gpt2"], layers=96)
    run = planned(deep, micro_batch=8, checkpointing=True)
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
