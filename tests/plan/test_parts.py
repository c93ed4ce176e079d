"""Parts of a GPT: every element of the whole model is on one tensor rank and stage, as the model itself has it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpczero.models import GPT, GPTConfig, parameter_count
from hpczero.plan.spread import TIED, blocks_of, part_of_gpt

SIZES = {"vocab_size": 13, "context": 6, "layers": 5, "hidden": 30, "heads": 5}


def config(tied: bool = True, positions: str = "learned") -> GPTConfig:
    return GPTConfig(**SIZES, tie_embeddings=tied, positions=positions)  # type: ignore[arg-type]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize(
    ("tensor", "pipeline", "interleave"), [(1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 2), (3, 2, 1)]
)
def test_every_element_of_the_whole_model_is_counted_once(
    tied: bool, positions: str, tensor: int, pipeline: int, interleave: int
) -> None:
    sizes = config(tied, positions)
    with torch.device("meta"):
        whole = dict(GPT(sizes).named_parameters())
    seen = {name: np.zeros(each.numel(), dtype=int) for name, each in whole.items()}
    for stage in range(pipeline):
        for rank in range(tensor):
            part = part_of_gpt(
                sizes,
                tensor=tensor,
                rank=rank,
                pipeline=pipeline,
                stage=stage,
                interleave=interleave,
            )
            for place in part.placements:
                assert place.shape == tuple(whole[place.name].shape)
                if place.counted:
                    runs = place.runs()
                    for start, count in zip(runs.whole, runs.numel, strict=True):
                        seen[place.name][start : start + count] += 1
    assert {name: set(times.tolist()) for name, times in seen.items()} == {
        name: {1} for name in whole
    }


def test_tensor_ranks_hold_as_much_and_only_padding_more() -> None:
    sizes = config(tied=False)
    parts = [part_of_gpt(sizes, tensor=4, rank=rank) for rank in range(4)]
    assert len({part.numel for part in parts}) == 1
    # 5 heads of 6 over 4 ranks are 2 each, 8 in all; 13 token ids are 4 each, 16 in all; 120 / 4 of the MLP are even.
    hidden = 30
    qkv = 3 * 12 * (hidden + 1)
    block = qkv + hidden * 12 + hidden + 30 * (hidden + 1) + hidden * 30 + hidden + 4 * hidden
    expected = 5 * block + 2 * 4 * hidden + 6 * hidden + 2 * hidden
    assert parts[0].numel == expected
    assert 4 * expected > parameter_count(sizes)


def test_tied_weight_is_on_both_ends_of_a_pipeline_and_counts_once() -> None:
    first, last = (part_of_gpt(config(), pipeline=2, stage=stage) for stage in range(2))
    found = [[each for each in part.placements if each.name == TIED] for part in (first, last)]
    assert [(each.tied, each.counted) for (each,) in found] == [(True, True), (True, False)]
    assert [each for each in part_of_gpt(config()).placements if each.tied] == []


def test_blocks_per_stage_differ_by_at_most_one() -> None:
    for layers in range(1, 14):
        for parts in range(1, layers + 1):
            groups = [blocks_of(layers, parts, part) for part in range(parts)]
            assert [block for group in groups for block in group] == [*range(layers)]
            assert max(map(len, groups)) - min(map(len, groups)) <= 1


def test_groups_of_an_interleaved_stage_go_around_the_stages() -> None:
    sizes = GPTConfig(vocab_size=5, context=2, layers=8, hidden=4, heads=2)
    groups = [part_of_gpt(sizes, pipeline=2, stage=s, interleave=2).groups for s in range(2)]
    assert groups == [(range(2), range(4, 6)), (range(2, 4), range(6, 8))]
