"""Changes inside gathered where ranks hold parts of a model: everybody's, or a named error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import torch

import hpczero
from hpczero.errors import StepError
from hpczero.models import GPT, GPTConfig
from hpczero.parallel import close, gpt_rule, split
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import raises_on_all, sgd, zeroified
from tests.parallel.wholes import tensor_ranks

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

pytestmark = pytest.mark.mpi

CONFIG = GPTConfig(vocab_size=61, context=8, layers=1, hidden=12, heads=4)


@contextmanager
def sharded(topology: Topology) -> Iterator[GPT]:
    model = split(GPT(CONFIG), topology, gpt_rule(CONFIG))
    with zeroified(model, sgd(model), topology=topology, stage=3):
        yield model
    close(model)


@pytest.mark.ranks(2, 4)
def test_the_ranks_of_one_copy_give_their_parts_to_all_others(comm: MPI.Intracomm) -> None:
    with tensor_ranks(comm, tensor=2) as topology:
        for modifier in range(comm.size):
            mine = topology.mesh.members(modifier, "tensor")
            with sharded(topology) as model:
                with hpczero.gathered(model, modifier_rank=modifier), torch.no_grad():
                    for parameter in model.parameters():  # others' changes are void
                        parameter.fill_(3.0 if comm.rank in mine else float(comm.rank))
                state = hpczero.full_state_dict(model)
                right = state is None or all(bool((x == 3.0).all()) for x in state.values())
                parallel_assert(comm, right, f"modifier {modifier}")
                with hpczero.gathered(model):
                    same = all(bool((p == 3.0).all()) for p in model.parameters())
                parallel_assert(comm, same, f"modifier {modifier}")


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("name", ["final_norm.weight", "wte.weight"])
def test_a_change_on_one_rank_of_a_copy_alone_is_refused(comm: MPI.Intracomm, name: str) -> None:
    modifier = comm.size - 1
    with tensor_ranks(comm, tensor=2) as topology, sharded(topology) as model:

        def one_rank() -> None:
            with hpczero.gathered(model, modifier_rank=modifier), torch.no_grad():
                if comm.rank == modifier:
                    model.get_parameter(name).mul_(2.0)

        raises_on_all(comm, StepError, f"'{name}'", one_rank)
