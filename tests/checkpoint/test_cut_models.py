"""Models that hpczero itself cuts: their checkpoints and final weights are those of the whole model in one process."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import hpczero
from hpczero.models import GPT, GPTConfig
from hpczero.parallel import close, cut, gpt_rule, gpt_stages, split
from tests.checkpoint.layouts import contents, described, first_ranks
from tests.helpers.parallel import parallel_assert

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = [pytest.mark.mpi]

LAYOUTS: list[tuple[dict[str, int], int]] = [
    ({}, 1),
    ({"tensor": 2}, 1),
    ({"tensor": 3}, 1),
    ({"pipeline": 2}, 2),
    ({"tensor": 2, "pipeline": 2}, 1),
    ({"tensor": 2, "replicate": 2}, 1),
    ({"pipeline": 2, "shard": 2}, 1),
]


def config(*, tied: bool) -> GPTConfig:
    """Heads and vocabulary that 2 and 3 ranks do not divide."""
    return GPTConfig(
        vocab_size=37, context=8, layers=4, hidden=20, heads=5, ffn_multiple=3, tie_embeddings=tied
    )


def built(
    topology: hpczero.Topology, interleave: int, tied: bool, seed: int
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A GPT cut for the degrees of ``topology``, with an optimizer of two groups."""
    sizes = config(tied=tied)
    with torch.device("meta"):
        model: nn.Module = GPT(sizes)
        whole = GPT(sizes)
    if topology.pipeline.size > 1:
        cut(model, topology, gpt_stages(model), interleave=interleave)
    split(model, topology, gpt_rule(sizes))
    named = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in named if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in named if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, foreach=False)
    fill = partial(whole.initialize, seed=seed)
    hpczero.zeroify(model, optimizer, topology=topology, stage=2, initialize=fill)
    return model, optimizer


@pytest.mark.ranks(4)
@pytest.mark.parametrize("tied", [True, False])
def test_a_gpt_is_saved_and_loaded_as_whole_by_every_layout(
    comm: MPI.Intracomm, folder: Path, tied: bool
) -> None:
    """First values without a step, then what one process has trained."""
    with first_ranks(comm, {}) as topology:
        if topology is not None:
            model, optimizer = built(topology, 1, tied, seed=3)
            hpczero.checkpoint.save(folder / "first", model, step=0)
            for step in range(2):
                tokens = torch.randint(37, (3, 9), generator=torch.Generator().manual_seed(step))
                model(tokens[:, :-1], tokens[:, 1:]).backward()
                optimizer.step()
                optimizer.zero_grad()
            hpczero.checkpoint.save(folder / "second", model, step=2)
            weights = hpczero.full_state_dict(model)
            hpczero.release(model)
    wrong = []
    first, second = folder / "first" / "step-000000000", folder / "second" / "step-000000002"
    for degrees, interleave in LAYOUTS:
        with first_ranks(comm, degrees) as topology:
            if topology is None:
                continue
            model, _ = built(topology, interleave, tied, seed=3)
            place = folder / "mine" / str(degrees)
            path = hpczero.checkpoint.save(place, model, step=0)
            if contents(path) != contents(first):
                wrong.append(f"{degrees}: the file of first values")
            hpczero.checkpoint.load(second, model)
            path = hpczero.checkpoint.save(place, model, step=2)
            if contents(path) != contents(second) or described(path) != described(second):
                wrong.append(f"{degrees}: the file")
            found = hpczero.full_state_dict(model)
            if topology.is_root:
                assert found is not None
                assert weights is not None
                same = found.keys() == weights.keys() and all(
                    torch.equal(found[name], value) for name, value in weights.items()
                )
                wrong += [] if same else [f"{degrees}: the weights"]
            hpczero.release(model)
            close(model)
    parallel_assert(comm, not wrong, str(wrong))
