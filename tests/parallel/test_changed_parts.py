"""Changes inside gathered where ranks hold parts of a model: everybody's, or a named error."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch

import hpczero
from hpczero.errors import StepError
from hpczero.models import GPT, GPTConfig
from hpczero.parallel import close, gpt_rule, split
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import raises_on_all
from tests.parallel.wholes import tensor_ranks

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

pytestmark = pytest.mark.mpi

CONFIG = GPTConfig(vocab_size=61, context=8, layers=1, hidden=12, heads=4)


def sharded(topology: Topology) -> GPT:
    model = split(GPT(CONFIG), topology, gpt_rule(CONFIG))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hpczero.zeroify(model, optimizer, topology=topology, stage=3)
    return model


@pytest.mark.ranks(2, 4)
def test_the_ranks_of_one_copy_give_their_parts_to_all_others(comm: MPI.Intracomm) -> None:
    with tensor_ranks(comm, tensor=2) as topology:
        for modifier in range(comm.size):
            model = sharded(topology)
            mine = topology.mesh.members(modifier, "tensor")
            with hpczero.gathered(model, modifier_rank=modifier), torch.no_grad():
                for parameter in model.parameters():  # others' changes are void
                    parameter.fill_(3.0 if comm.rank in mine else float(comm.rank))
            state = hpczero.full_state_dict(model)
            right = state is None or all(bool((x == 3.0).all()) for x in state.values())
            parallel_assert(comm, right, f"modifier {modifier}")
            with hpczero.gathered(model):
                same = all(bool((p == 3.0).all()) for p in model.parameters())
            parallel_assert(comm, same, f"modifier {modifier}")
            hpczero.release(model)
            close(model)


def _norm(model: GPT) -> None:
    model.final_norm.weight.fill_(3.0)


def _split_weight(model: GPT) -> None:
    model.wte.weight.mul_(2.0)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(
    ("change", "said"), [(_norm, "'final_norm.weight'"), (_split_weight, "'wte.weight'")]
)
def test_a_change_on_one_rank_of_a_copy_alone_is_refused(
    comm: MPI.Intracomm, change: Callable[[GPT], None], said: str
) -> None:
    with tensor_ranks(comm, tensor=2) as topology:
        model, modifier = sharded(topology), comm.size - 1

        def one_rank() -> None:
            with hpczero.gathered(model, modifier_rank=modifier), torch.no_grad():
                if comm.rank == modifier:
                    change(model)

        raises_on_all(comm, StepError, said, one_rank)
        hpczero.release(model)
        close(model)
