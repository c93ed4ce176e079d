"""What the plan says of parts is what the cut model has: shapes on every rank, and what autograd keeps of a block."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import hpczero
from hpczero.accelerator import HostAccelerator
from hpczero.adapters.gpt import GPTAdapter
from hpczero.models import GPT, GPTConfig
from hpczero.options.config import LayoutOptions
from hpczero.parallel import close, cut, gpt_rule, gpt_stages, split
from hpczero.parallel.tensor.layers import ColumnLinear
from hpczero.plan.degrees import mesh_of
from hpczero.plan.sent import sent_by
from hpczero.plan.sizing import ForwardSizes
from hpczero.plan.spread import Spread, part_of_gpt
from hpczero.run.evaluation import PipelinePasses, passes_of
from hpczero.run.starting.building import divide
from tests.helpers.parallel import parallel_assert
from tests.parallel.layouts import take
from tests.parallel.wholes import split_over, tensor_ranks

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3, 4)]

ODD = GPTConfig(vocab_size=61, context=16, layers=9, hidden=30, heads=5, ffn_multiple=3)


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
        place = {"rank": topology.tensor.index, "stage": topology.pipeline.index}
        degrees = {"tensor": tensor, "pipeline": pipeline, "interleave": interleave}
        part = part_of_gpt(config, **degrees, **place)
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
    with split_over(comm, GPT(config), gpt_rule(config), sequence=sequence) as model:
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
        planned = ForwardSizes(config, 2 * 48, 4, 1, tensor=comm.size, sequence_parallel=sequence)
        counted, expected = sum(kept.values()), planned.forward_nbytes
        # Beside it: a mean and a deviation of each token and norm, a sum of exponentials of each token and head.
        small = 4 * 2 * 48 * (4 + 12)
        parallel_assert(comm, expected <= counted <= expected + small, f"{counted} {expected}")
        parallel_assert(comm, y.shape == x.shape)
        parallel_assert(comm, planned.peak_nbytes(Fraction(1)) > expected)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("kind", ["pipeline", "interleaved", "tensor", "sequence"])
def test_what_ranks_send_in_a_step_is_what_the_plan_says(
    comm: MPI.Intracomm, stage: int, kind: str
) -> None:
    options = {
        "pipeline": LayoutOptions(pipeline=2),
        "interleaved": LayoutOptions(pipeline=2, interleave=2),
        "tensor": LayoutOptions(tensor=2),
        "sequence": LayoutOptions(tensor=2, sequence=True),
    }[kind]
    if comm.size % 2:
        options = LayoutOptions(pipeline=3)
    # Sizes that divide, so that nothing is padded but shards; in fp32 every byte count is of one kind.
    config = GPTConfig(vocab_size=64, context=16, layers=6, hidden=32, heads=4)
    mesh = mesh_of(options, comm.size, comm.size)
    topology = hpczero.Topology.create(comm, mesh=mesh)
    adapter, micro, times = GPTAdapter(config), 2, 4
    with torch.device("meta"):
        model = adapter.build()
    initialize = adapter.initializer(model, 1)
    divide(options, adapter, model, topology)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    how: dict[str, Any] = {"stage": stage, "transport": "flat"}
    hpczero.zeroify(model, optimizer, topology=topology, initialize=initialize, **how)
    passes = passes_of(options, adapter, model, accumulation=times, accelerator=HostAccelerator())
    generator = torch.Generator().manual_seed(topology.data.rank)
    tokens = torch.randint(0, 64, (times, micro, 17), generator=generator).numpy()
    stats = hpczero.sharding(model).collectives.stats
    before = dict(stats.calls)
    take(passes, 0, lambda _, i: (tokens[i, :, :-1], tokens[i, :, 1:]))
    optimizer.step()
    how |= {"precision": "fp32", "micro_batch": micro, "accumulation": times}
    how |= {"schedule": options.order, "interleave": options.interleave}
    spread = Spread(config, mesh, comm.size, sequence_parallel=options.sequence, **how)
    planned = sent_by(spread, topology.pipeline.index)
    calls = [stats.calls[verb] - before.get(verb, 0) for verb in ("all_gather", "reduce_scatter")]
    of_shards = [planned.all_gathers, planned.reduce_scatters]
    parallel_assert(comm, calls == of_shards, f"{calls} {planned}")
    if isinstance(passes, PipelinePasses):
        messages = passes._pipeline.messages.stats.sent_nbytes
        expected = planned.pipeline.nbytes + planned.ties.nbytes
        # Stages that hold a tied weight tell each other a few words about it.
        words = 64 if planned.ties.nbytes else 0
        parallel_assert(comm, 0 <= messages - expected <= words, f"{messages} {expected}")
    if options.tensor > 1:
        sums = next(m.sums for m in model.modules() if isinstance(m, ColumnLinear))
        counted = sum(sums.stats.sent_nbytes.values())
        # The loss: a maximum, a sum and a logit of each token, fp32, to the one other rank.
        loss = times * micro * 16 * 3 * 4
        told = f"{counted} {planned.tensor} {loss}"
        parallel_assert(comm, counted == planned.tensor.nbytes + loss, told)
    hpczero.release(model)
    topology.free()
