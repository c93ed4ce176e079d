"""Architectures of transformers train as in one process of plain torch, on every transport."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import hpczero
from tests.compat import architectures, libraries
from tests.compat.architectures import text
from tests.compat.construct import Construct, Place
from tests.helpers.parallel import parallel_assert

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.ranks(2),
    # Others' code warns of itself; a warning of hpczero's is an error as everywhere.
    pytest.mark.filterwarnings("ignore", "error:::hpczero"),
]


@pytest.mark.worth("the Trainer trains as plain torch does")
@pytest.mark.parametrize(
    "construct", [*architectures.CONSTRUCTS, *libraries.habits], ids=lambda each: each.name
)
def test_equals_plain_torch(construct: Construct, holds: Callable[[Construct], None]) -> None:
    holds(construct)


@pytest.mark.parametrize("transport", ["window", "flat", "hierarchical"])
def test_layers_that_ranks_would_drop_are_run_by_all_at_stage_3(
    comm: MPI.Intracomm, topology: Topology, transport: str
) -> None:
    wav2vec2 = next(each for each in architectures.ARCHITECTURES if each.name == "wav2vec2")
    dropping = replace(wav2vec2, options={**wav2vec2.options, "layerdrop": 0.9})

    def losses(model: nn.Module, ranks: Sequence[int]) -> Iterator[list[float]]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        if len(ranks) == 1:
            hpczero.zeroify(model, optimizer, stage=3, topology=topology, transport=transport)
        for step in range(4):
            found = [model(**wav2vec2.batch(Place(rank, step))).loss for rank in ranks]
            sum(found, torch.zeros(())).div(len(ranks)).backward()
            optimizer.step()
            optimizer.zero_grad()
            yield [loss.item() for loss in found]

    plain = [of[comm.rank] for of in losses(wav2vec2.build(), range(comm.size))]
    model = dropping.build()
    torch.manual_seed(comm.rank)  # each rank would drop its own layers
    found = [of[0] for of in losses(model, [comm.rank])]
    hpczero.release(model)
    parallel_assert(comm, found == pytest.approx(plain, rel=1e-5), f"{found} {plain}")


@pytest.mark.parametrize("transport", ["window", "flat", "hierarchical"])
def test_ranks_whose_texts_end_at_other_places_write_what_plain_torch_writes(
    comm: MPI.Intracomm, topology: Topology, transport: str
) -> None:
    gpt2 = next(each for each in architectures.ARCHITECTURES if each.name == "gpt2")
    prompts = [text(Place(rank, 0))["input_ids"] for rank in range(comm.size)]

    def write(model: Any, rank: int, end: Any) -> list[list[int]]:
        found = model.eval().generate(
            prompts[rank], max_new_tokens=9, do_sample=False, eos_token_id=end, pad_token_id=0
        )
        return list(found.tolist())

    plain = gpt2.build()
    # Both texts of rank 0 have ended after the third token.
    first = write(plain, 0, -1)
    ends = [[row[9] for row in first], -1]
    expected = [write(plain, rank, ends[rank % 2]) for rank in range(comm.size)]
    parallel_assert(comm, len(expected[0][0]) < len(expected[1][0]), f"{expected}")
    model = gpt2.build()
    hpczero.zeroify(model, None, topology=topology, transport=transport)
    found = write(model, comm.rank, ends[comm.rank % 2])
    with hpczero.gathered(model):  # where a rank may write alone
        alone = write(model, 0, ends[0]) if comm.rank == 0 else expected[0]
    again = write(model, comm.rank, ends[comm.rank % 2])
    hpczero.release(model)
    parallel_assert(comm, found == again == expected[comm.rank], f"{found} {again} {expected}")
    parallel_assert(comm, alone == expected[0], f"{alone} {expected[0]}")
