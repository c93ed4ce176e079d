"""Stages of a model train what one process trains: losses, norms, gradients and weights, whatever the layout."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from torch import nn

from hpczero.models import GPT
from hpczero.optim import Muon
from tests.helpers.parallel import parallel_assert
from tests.parallel.pipeline import models
from tests.parallel.pipeline.models import (
    Left,
    Make,
    alone,
    batch,
    check_bits,
    check_near,
    gpt,
    trained_plainly,
)

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = pytest.mark.mpi
# Sums in another order; one fp32 rounding is 6e-8. Adam with this eps magnifies little of it.
TOLERANCE = 2e-6


def check_equal(comm: MPI.Intracomm, found: Left, expected: Left) -> None:
    """Numbers, and the tensors of this stage. Collective."""
    wrong = []
    for what in ("losses", "norms"):
        pairs = zip(getattr(found, what), getattr(expected, what), strict=True)
        wrong += [f"{what}: {a!r}, expected {b!r}" for a, b in pairs if not abs(a - b) <= 1e-6 * b]
    for what in ("gradients", "weights"):
        theirs = getattr(expected, what)
        for name, value in getattr(found, what).items():
            largest = theirs[name].abs().max().clamp(min=1e-30)  # frozen biases are 0
            error = (value - theirs[name]).abs().max() / largest
            if not error <= TOLERANCE:
                wrong.append(f"{what} of {name!r} are off by {error:.1e}")
    parallel_assert(comm, not wrong, "; ".join(wrong))
    everywhere = {n for names in comm.allgather(list(found.weights)) for n in names}
    parallel_assert(comm, everywhere == expected.weights.keys(), f"{everywhere}")


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    ("schedule", "interleave", "micro_batches"),
    [("1f1b", 1, 3), ("gpipe", 1, 1), ("interleaved", 2, 4)],
)
def test_two_stages_equal_one_process(
    comm: MPI.Intracomm,
    staged: Make,
    stage: int,
    tied: bool,
    schedule: str,
    interleave: int,
    micro_batches: int,
) -> None:
    """Ranks begin with other values: those of rank 0 count."""
    degree = comm.size // 2
    batches = [[batch(10 * s + d, micro_batches) for d in range(degree)] for s in range(4)]
    options: dict[str, Any] = {"schedule": schedule, "interleave": interleave, "stage": stage}
    model = gpt(seed=1 + comm.rank, tie_embeddings=tied)
    found = staged(model, micro_batches=micro_batches, **options).train(batches)
    check_equal(comm, found, trained_plainly(gpt(tie_embeddings=tied), batches))
    if not tied:
        return
    held = set(found.weights) & {"wte.weight", "lm_head.weight"}
    last = comm.rank >= degree
    parallel_assert(comm, held == ({"lm_head.weight"} if last else {"wte.weight"}))
    ours = found.weights["lm_head.weight" if last else "wte.weight"]
    parallel_assert(comm, torch.equal(comm.bcast(ours, root=0), ours), "stages hold other values")


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("micro_batches", [1, 2, 5])
@pytest.mark.parametrize("options", [{"stage": 1}, {"stage": 3, "transport": "flat"}], ids=str)
def test_as_many_stages_as_ranks_with_uneven_blocks(
    comm: MPI.Intracomm, staged: Make, micro_batches: int, options: dict[str, Any]
) -> None:
    """Also with fewer micro-batches than stages."""
    batches = [[batch(s, micro_batches)] for s in range(3)]
    balance = [1, 3, 1] if comm.size == 3 else [1, 1, 2, 1]
    options = {**options, "balance": balance, "micro_batches": micro_batches}
    stages = staged(gpt(), pipeline=comm.size, **options)
    kept = [n for n, _ in stages.model.named_modules() if n.count(".") == 1 and "blocks" in n]
    parallel_assert(comm, len(kept) == balance[comm.rank], f"{kept}")
    check_equal(comm, stages.train(batches), trained_plainly(gpt(), batches))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("nodes", [None, [0, 1, 0, 1], [0, 0, 1, 1]], ids=str)
@pytest.mark.parametrize("replicate", [1, 2])
def test_replicas_of_stages_on_nodes_equal_one_process(
    comm: MPI.Intracomm, staged: Make, stage: int, nodes: list[int] | None, replicate: int
) -> None:
    """Two stages of two ranks, which share shards or have a replica each."""
    batches = [[batch(10 * s + d, 2) for d in range(2)] for s in range(3)]
    found = staged(gpt(), micro_batches=2, replicate=replicate, nodes=nodes, stage=stage)
    check_equal(comm, found.train(batches), trained_plainly(gpt(), batches))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("sequence", [False, True], ids=["whole tokens", "tokens along ranks"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(("stage", "interleave"), [(1, 1), (3, 2)])
def test_stages_whose_layers_are_split_equal_one_process(
    comm: MPI.Intracomm, staged: Make, stage: int, interleave: int, tied: bool, sequence: bool
) -> None:
    """Two stages of two tensor ranks; losses and norms, for gradients are of parts."""
    batches = [[batch(s, 2)] for s in range(3)]
    model = gpt(seed=1 + comm.rank, tie_embeddings=tied)
    options: dict[str, Any] = {"tensor": 2, "sequence": sequence, "interleave": interleave}
    found = staged(model, micro_batches=2, stage=stage, **options).train(batches)
    expected = trained_plainly(gpt(tie_embeddings=tied), batches)
    pairs = zip(found.losses + found.norms, expected.losses + expected.norms, strict=True)
    parallel_assert(comm, all(abs(a - b) < 1e-6 * b for a, b in pairs), f"{found.losses}")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("schedule", "stage", "interleave", "micro_batches"),
    [
        ("1f1b", 1, 1, 5),
        ("1f1b", 3, 1, 5),
        ("gpipe", 3, 1, 5),
        ("interleaved", 1, 2, 4),
        ("gpipe", 1, 2, 4),
    ],
)
def test_gradients_of_a_pipeline_have_the_bits_of_one_rank(
    comm: MPI.Intracomm,
    staged: Make,
    schedule: str,
    stage: int,
    interleave: int,
    micro_batches: int,
    precision: str,
) -> None:
    """Without a tie the additions are the same ones, in the same order; so are the casts.

    What passes from chunk to chunk has the width of parameters: it is no end of the model.
    """
    data = batch(3, micro_batches)
    options: dict[str, Any] = {"stage": stage, "precision": precision}
    model = gpt(tie_embeddings=False)
    order: dict[str, Any] = {"schedule": schedule, "interleave": interleave}
    stages = staged(model, micro_batches=micro_batches, **order, **options)
    found = stages.gradients(*data)
    check_bits(comm, found, alone(gpt(tie_embeddings=False), *data, **options))
    if interleave == 2:
        sent = 4 * 3 * (2 * 9 * 18) * (4 if precision == "fp32" else 2)
        parallel_assert(comm, stages.pipeline.messages.stats.sent_nbytes == sent)
        names = [name for name, _ in stages.model.named_parameters()]
        blocks = sorted({int(n.split(".")[1]) for n in names if n.startswith("blocks.")})
        parallel_assert(comm, blocks == ([0, 1, 3] if comm.rank == 0 else [2, 4]), f"{blocks}")


@pytest.mark.ranks(2, 4)
def test_reducing_each_micro_batch_gives_the_same_gradients(
    comm: MPI.Intracomm, staged: Make
) -> None:
    """Up to the order of additions."""
    data, found = batch(comm.rank % (comm.size // 2), 3), []
    for reduce in ("once", "each"):
        stages = staged(gpt(), micro_batches=3, reduce=reduce, stage=2, transport="flat")
        stats = stages.state.collectives.stats
        stats.reset()
        found.append(stages.gradients(*data))
        calls, units = stats.calls["reduce_scatter"], len(stages.state.units)
        parallel_assert(comm, calls == units * (3 if reduce == "each" else 1), f"{calls} {units}")
    once, each = found
    worst = max(((once[n] - each[n]).abs().max() / once[n].abs().max()).item() for n in once)
    parallel_assert(comm, once.keys() == each.keys() and worst < 1e-6, f"{worst}")


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(("schedule", "interleave"), [("1f1b", 1), ("gpipe", 1), ("1f1b", 2)])
@pytest.mark.parametrize("hold", [True, False])
def test_units_are_gathered_and_reduced_once_in_a_step(
    comm: MPI.Intracomm, staged: Make, schedule: str, interleave: int, hold: bool
) -> None:
    options: dict[str, Any] = {"schedule": schedule, "interleave": interleave, "hold": hold}
    stages = staged(gpt(), micro_batches=4, stage=3, transport="flat", **options)
    calls, units = stages.state.collectives.stats.calls, len(stages.state.units)
    for _ in range(2):
        calls.clear()
        stages.pipeline.step(*batch(0, 4))
        told = f"{dict(calls)} of {units} units"
        parallel_assert(comm, calls["reduce_scatter"] == units, told)
        gathers = calls["all_gather"]
        parallel_assert(comm, gathers == units if hold else gathers > units, told)
        held = stages.state.memory.current.get("unsharded", 0)
        parallel_assert(comm, held == 0, f"{held} bytes are whole after the step")
        stages.optimizer.step()
        stages.optimizer.zero_grad()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_muon_takes_a_tied_head_for_the_embedding_that_it_is(
    comm: MPI.Intracomm, staged: Make, stage: int
) -> None:
    with mock.patch.object(models, "adamw", lambda model, **_: Muon.of(model, 0.02, eps=1e-2)):
        batches = [[batch(step, 2)] for step in range(3)]
        found = staged(gpt(), micro_batches=2, stage=stage).train(batches)
        check_near(comm, found.weights, trained_plainly(gpt(), batches).weights, 1e-5)


@pytest.mark.ranks(2)
def test_a_model_on_the_meta_device_gets_the_values_of_the_whole_one(
    comm: MPI.Intracomm, staged: Make
) -> None:
    """By names in the whole model, the tied weight too."""
    config = gpt().config
    with torch.device("meta"):
        model = GPT(config)
    initialize = partial(gpt().initialize, seed=1)
    found = staged(model, micro_batches=2, stage=1, initialize=initialize).gradients(*batch(0, 2))
    expected = staged(gpt(seed=1), micro_batches=2, stage=1).gradients(*batch(0, 2))
    check_bits(comm, found, expected)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("frozen", [("wte", "wpe", "blocks.0", "blocks.1"), ("blocks.2",)], ids=str)
@pytest.mark.parametrize("options", [{"stage": 1}, {"stage": 3, "reduce": "each"}], ids=str)
def test_one_of_the_chunks_of_a_stage_may_be_frozen(
    comm: MPI.Intracomm, staged: Make, frozen: tuple[str, ...], options: dict[str, Any]
) -> None:
    """The first one's backwards come last, and have no graph where nothing before them is trained."""
    batches = [[batch(number, 4)] for number in range(3)]

    def freeze(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not f"{name}.".startswith(tuple(f"{n}." for n in frozen)))

    options = {"micro_batches": 4, "interleave": 2, "change": freeze, **options}
    stages, plain = staged(gpt(tie_embeddings=False), **options), gpt(tie_embeddings=False)
    freeze(plain)
    check_equal(comm, stages.train(batches), trained_plainly(plain, batches))
