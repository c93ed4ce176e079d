"""What the plan says of parts is what the cut model has: shapes on every rank, and what autograd keeps of a block."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn

from hpczero.models import GPT, GPTConfig
from hpczero.parallel import close, cut, gpt_rule, gpt_stages, split
from hpczero.plan.held import Held
from hpczero.plan.parts import part_of_gpt
from tests.helpers.parallel import parallel_assert
from tests.parallel.wholes import tensor_ranks

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3, 4)]

ODD = GPTConfig(vocab_size=61, context=16, layers=7, hidden=30, heads=5, ffn_multiple=3)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("tensor", "interleave"), [(1, 1), (1, 2), (2, 1)])
def test_shapes_of_every_rank_are_those_of_the_plan(
    comm: MPI.Intracomm, tied: bool, tensor: int, interleave: int
) -> None:
    if comm.size % tensor:
        tensor = comm.size
    pipeline = comm.size // tensor
    interleave = interleave if pipeline > 1 else 1
    config = dataclasses.replace(ODD, tie_embeddings=tied)
    with tensor_ranks(comm, pipeline=pipeline, tensor=tensor) as topology:
        with torch.device("meta"):
            model: nn.Module = GPT(config)
        if pipeline > 1:
            cut(model, topology, gpt_stages(model), interleave=interleave)
        if tensor > 1:
            split(model, topology, gpt_rule(config))
        part = part_of_gpt(
            config,
            tensor=tensor,
            rank=topology.tensor.index,
            pipeline=pipeline,
            stage=topology.pipeline.index,
            interleave=interleave,
        )
        found = sorted(tuple(each.shape) for each in model.parameters())
        planned = sorted(shape for _, shape in part.shapes)
        parallel_assert(comm, found == planned, f"{found} {planned}")
        if tensor > 1:
            close(model)


@pytest.mark.parametrize("sequence", [False, True], ids=["plain", "sequence"])
def test_what_autograd_keeps_of_a_block_is_what_the_plan_counts(
    comm: MPI.Intracomm, sequence: bool
) -> None:
    config = GPTConfig(vocab_size=64, context=48, layers=1, hidden=192, heads=12)
    with tensor_ranks(comm) as topology:
        model = split(GPT(config), topology, gpt_rule(config), sequence=sequence)
        own = 48 // comm.size if sequence else 48
        x = torch.randn(2, own, 192, requires_grad=True)
        kept: dict[int, int] = {}
        parameters = {each.untyped_storage().data_ptr() for each in model.parameters()}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        block = model.get_submodule("blocks.0")
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            y = block(x)
        planned = Held(config, 2 * 48, 4, 1, tensor=comm.size, sequence_parallel=sequence)
        counted, expected = sum(kept.values()), planned.forward_nbytes
        # Beside it: a mean and a deviation of each token and norm, a sum of exponentials of each token and head.
        small = 4 * 2 * 48 * (4 + 12)
        parallel_assert(comm, expected <= counted <= expected + small, f"{counted} {expected}")
        parallel_assert(comm, y.shape == x.shape)
        parallel_assert(comm, planned.peak_nbytes(Fraction(1)) > expected)
        close(model)
