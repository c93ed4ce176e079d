"""What a step does beside the sums: random numbers, modes, recomputation, memory, evaluation, and what it refuses."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hpczero
from hpczero import LossScale, Mesh, Pipeline, Precision, Topology
from hpczero.activations import Checkpointing
from hpczero.errors import ConfigError, PlanError, StepError
from hpczero.models import GPT
from hpczero.models.gpt import checkpointed
from hpczero.parallel import cut, gpt_stages
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import adamw, zeroified
from tests.helpers.world import World
from tests.parallel.pipeline.models import Make, alone, batch, check_bits, check_near, gpt

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = pytest.mark.mpi
FP16 = Precision(param="fp16", loss_scale=LossScale(initial=8.0))  # no gradient overflows


def mean_loss(inputs: list[Tensor], targets: list[Tensor]) -> float:
    """Of one process."""
    plain = gpt()
    losses: list[float] = [plain(x, y).item() for x, y in zip(inputs, targets, strict=True)]
    return sum(losses) / len(losses)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("stage", [1, 3])
def test_dropout_does_not_repeat_between_micro_batches(
    comm: MPI.Intracomm, staged: Make, stage: int
) -> None:
    """The same micro-batch again and again: equal without dropout, different with it."""
    (x, *_), _ = batch(0, 1)
    options: dict[str, Any] = {"micro_batches": 3, "stage": stage, "transport": "flat"}
    stages = staged(gpt(dropout=0.2), pipeline=comm.size, **options)
    torch.manual_seed(7)
    found = stages.pipeline.outputs([x, x, x])
    parallel_assert(comm, (found is not None) == (comm.rank == comm.size - 1))
    different = found is None or not any(torch.equal(found[0], other) for other in found[1:])
    parallel_assert(comm, different, "masks repeat")
    stages.model.eval()
    found = stages.pipeline.outputs([x, x, x])
    parallel_assert(comm, found is None or all(torch.equal(found[0], each) for each in found[1:]))
    parallel_assert(comm, found is None or torch.allclose(found[0], gpt()(x), atol=1e-6))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("seed", [lambda _: 5, lambda t: 5 + t.rank], ids=["one", "own"])
def test_stages_that_would_drop_alike_are_told(
    comm: MPI.Intracomm,
    staged: Make,
    seed: Callable[[Topology], int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With one seed a mask of the first stage is one of the last stage again."""
    stages, masks = staged(gpt(dropout=0.5), micro_batches=2, stage=1), []
    torch.manual_seed(seed(stages.topology))
    for module in stages.model.modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda _, __, y: masks.append((y == 0).numpy().tobytes()))
    stages.train([[batch(step, 2)] for step in range(2)])
    first, last = comm.allgather(set(masks))
    told, same = caplog.text.count("draw the same random numbers"), bool(first & last)
    alike = len(set(comm.allgather(seed(stages.topology)))) == 1
    parallel_assert(comm, (told, same) == (alike and comm.rank == 0, alike), f"{told} {same}")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("interleave", [1, 2])
def test_recomputation_gives_the_bits_of_what_is_kept(
    comm: MPI.Intracomm, staged: Make, stage: int, interleave: int
) -> None:
    """With dropout, whose masks must come again."""
    found = []
    for call in (None, checkpointed):
        model = gpt(dropout=0.2)
        model.call_block = call or model.call_block
        stages = staged(model, micro_batches=4, interleave=interleave, stage=stage)
        torch.manual_seed(3)
        found.append(stages.gradients(*batch(0, 4)))
    check_bits(comm, *found)


@pytest.mark.ranks(2)
def test_inputs_of_blocks_rest_on_disk_beside_a_pipeline(
    comm: MPI.Intracomm, folder: Path, staged: Make
) -> None:
    kept = staged(gpt(), micro_batches=3, stage=3).gradients(*batch(0, 3))
    model, checkpointing = gpt(), Checkpointing.create("disk", folder=folder)
    model.call_block = checkpointing
    stages = staged(model, micro_batches=3, stage=3)
    checkpointing.join(stages.model)
    check_bits(comm, kept, stages.gradients(*batch(0, 3)))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("interleave", [1, 2])
@pytest.mark.parametrize("number", [1, 2, 5])
def test_evaluation_is_that_of_one_process_and_leaves_nothing(
    comm: MPI.Intracomm, staged: Make, interleave: int, number: int
) -> None:
    """Of any number of micro-batches; a step afterwards is as it would have been."""
    inputs, targets = batch(9, number)
    stages = staged(gpt(dropout=0.1), micro_batches=4, interleave=interleave, stage=3)
    stages.model.eval()
    loss, expected = stages.pipeline.evaluate(inputs, targets), mean_loss(inputs, targets)
    parallel_assert(comm, abs(loss - expected) < 1e-6 * expected, f"{loss} {expected}")
    parallel_assert(comm, not hpczero.full_gradients(stages.model))
    first, last = comm.rank == 0, comm.rank == 1
    again = stages.pipeline.evaluate(inputs if first else None, targets if last else None)
    parallel_assert(comm, again == loss)


@pytest.mark.ranks(2)
def test_a_stage_needs_only_its_own_of_inputs_and_targets(
    comm: MPI.Intracomm, staged: Make
) -> None:
    inputs, targets = batch(0, 3)
    stages = staged(gpt(), micro_batches=3, stage=1)
    loss = stages.pipeline.step(inputs if comm.rank == 0 else None, targets if comm.rank else None)
    found = hpczero.full_gradients(stages.model)
    stages.optimizer.zero_grad()
    whole = stages.gradients(torch.stack(inputs), [(target,) for target in targets])
    check_bits(comm, whole, found)
    parallel_assert(comm, comm.bcast(loss, root=1) == loss)


@pytest.mark.ranks(2)
def test_what_was_sent_is_not_kept_for_the_backward(comm: MPI.Intracomm, staged: Make) -> None:
    """Of what a stage has returned its place in the graph is enough."""
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def call(block: nn.Module, x: Tensor) -> Tensor:
        next_micro_batch = made and len(made) % 3 == 0
        if next_micro_batch and comm.rank == 0:
            alive.append(sum(each() is not None for each in made[2::3]))
        y: Tensor = checkpoint(block, x, use_reentrant=False)
        made.append(weakref.ref(y))
        return y

    model = gpt()
    model.call_block = call
    stages = staged(model, micro_batches=4, schedule="gpipe", stage=1)
    stages.pipeline.step(*batch(0, 4))
    parallel_assert(comm, comm.rank == 1 or alive == [0, 0, 0], f"{alive}")
    parallel_assert(comm, stages.pipeline.simulation.alive == (4, 4))


@pytest.mark.ranks(2)
def test_micro_batches_of_another_step_may_have_another_shape(
    comm: MPI.Intracomm, staged: Make
) -> None:
    stages = staged(gpt(tie_embeddings=False), micro_batches=2, stage=3)
    for size in (1, 3, 2):
        data = batch(size, 2, size=size)
        check_bits(comm, stages.gradients(*data), alone(gpt(tie_embeddings=False), *data))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-6), (FP16, 2e-3)])
def test_a_block_may_change_what_it_is_given_in_place(
    comm: MPI.Intracomm, staged: Make, schedule: str, precision: str | Precision, tolerance: float
) -> None:
    """As in one process, where it is the output of the block before: ``x += ...``, ``nn.ReLU(inplace=True)``."""

    def halved(block: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = block(x.mul_(0.5))
        return out

    data, plain, cut_one = batch(0, 3), gpt(), gpt()
    plain.call_block = cut_one.call_block = halved
    options: dict[str, Any] = {"micro_batches": 3, "schedule": schedule, "precision": precision}
    found = staged(cut_one, pipeline=comm.size, **options).gradients(*data)
    expected = alone(plain, *data, precision=precision)
    parallel_assert(comm, found.keys() == expected.keys())
    check_near(comm, found, expected, tolerance)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", ["outputs", "gradients"])
def test_what_a_block_keeps_of_a_message_may_change_while_that_is_on_its_way(
    comm: MPI.Intracomm, staged: Make, what: str
) -> None:
    """A block that reuses what it has kept of the micro-batch before, and a neighbour that receives late."""
    data = batch(0, 4, size=1024)  # messages that no MPI library keeps a copy of

    def keeping(*, late: bool) -> GPT:
        model = gpt()
        ends, begins = (model.get_submodule(f"blocks.{n}") for n in (1, 2))
        kept: list[Tensor] = []

        def keep(value: Tensor) -> None:
            for older in kept:
                older.zero_()
            kept[:] = [value.detach()]

        def wait(gradient: Tensor) -> None:
            time.sleep(0.2)

        def call(block: nn.Module, x: Tensor) -> Tensor:
            if block is begins and late and what == "outputs":
                time.sleep(0.2)
            if block is begins and what == "gradients":
                x.register_hook(keep)
            y: Tensor = block(x)
            if block is ends and late and what == "gradients":
                y.register_hook(wait)
            if block is ends and what == "outputs":
                keep(y)
            return y

        model.call_block = call
        return model

    expected = alone(keeping(late=False), *data)
    stages = staged(keeping(late=True), micro_batches=4, schedule="gpipe", balance=[2, 3])
    check_near(comm, stages.gradients(*data), expected, 1e-6)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("where", [0, 1])
def test_a_frozen_stage_lets_gradients_through(
    comm: MPI.Intracomm, staged: Make, where: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Blocks and ends of one stage are frozen: the other one trains as if it were whole, and nothing is missed."""
    data = batch(0, 3)

    def freeze(model: nn.Module) -> None:
        if comm.rank == where:
            model.requires_grad_(False)

    stages = staged(gpt(tie_embeddings=False), micro_batches=3, stage=3, change=freeze)
    found = stages.gradients(*data)
    mine = {n for n, p in stages.model.named_parameters() if p.requires_grad}
    parallel_assert(comm, bool(mine) == (comm.rank != where))
    parallel_assert(comm, found.keys() == comm.bcast(mine, root=1 - where), f"{found.keys()}")
    stages.train([[data]])
    parallel_assert(comm, "no parameter has a gradient" not in caplog.text)
    check_bits(comm, found, alone(gpt(tie_embeddings=False), *data))


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("reduce", ["once", "each"])
def test_a_gradient_that_is_not_finite_on_one_stage_skips_the_step_on_all(
    comm: MPI.Intracomm, staged: Make, where: int, reduce: str
) -> None:
    """Of the first micro-batch on one rank: the scale goes as torch's does, and the next step is taken."""
    poison = [1.0]
    policy = LossScale(initial=2.0**10, growth_interval=2)
    theirs = torch.amp.GradScaler("cpu", policy.initial, growth_interval=2)
    plain = adamw(nn.Linear(1, 1))
    precision = Precision(param="fp16", loss_scale=policy)
    stages = staged(gpt(), micro_batches=2, stage=2, precision=precision, reduce=reduce)
    if (stages.topology.pipeline.rank, stages.topology.data.rank) == (where, 0):
        block = next(stages.model.get_submodule("blocks").children())
        next(block.parameters()).register_hook(lambda g: g * (poison.pop() if poison else 1.0))
    for step, value in enumerate([1.0, float("inf"), 1.0, 1.0, float("nan"), 1.0]):
        poison[:] = [value]
        stages.pipeline.step(*batch(0, 2))
        stages.optimizer.step()
        stages.optimizer.zero_grad()
        theirs.scale(plain.param_groups[0]["params"][0].sum() * value).backward()
        theirs.step(plain)
        theirs.update()
        plain.zero_grad()
        now = (stages.state.skipped_steps, stages.state.loss_scale)
        parallel_assert(comm, now == ((step + 2) // 3, theirs.get_scale()), f"{step} {now}")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("reduce", ["once", "each"])
def test_gradients_are_added_to_those_that_are_there(
    comm: MPI.Intracomm, staged: Make, stage: int, reduce: str
) -> None:
    """To zeros, and to those of a step before, as in plain torch; a tied weight is on both stages."""
    plain = gpt()
    theirs = adamw(plain, lr=1e-3, eps=1e-2)
    stages = staged(gpt(), micro_batches=2, stage=stage, reduce=reduce)
    for number in range(4):
        inputs, targets = batch(number, 2)
        stages.pipeline.step(inputs, targets)
        for x, y in zip(inputs, targets, strict=True):
            (plain(x, y) / 2).backward()
        if number:
            for each in (stages.optimizer, theirs):
                each.step()
                each.zero_grad(set_to_none=False)
    check_near(comm, stages.weights(), plain.state_dict(), 1e-6)


@pytest.mark.ranks(2)
def test_a_step_without_gradients_is_refused(comm: MPI.Intracomm, staged: Make) -> None:
    """All stages see it, and go on."""
    stages = staged(gpt(), micro_batches=2, stage=2)
    with pytest.raises(StepError, match=r"inside of torch\.no_grad"), torch.no_grad():
        stages.pipeline.step(*batch(0, 2))
    stages.pipeline.step(*batch(0, 2))
    stages.optimizer.step()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"micro_batches": 0}, "micro_batches 0"),
        ({"micro_batches": 2, "schedule": "zb"}, "'zb', expected one of gpipe"),
        ({"micro_batches": 2, "schedule": "interleaved"}, "cut the model with interleave=2"),
        ({"micro_batches": 2, "reduce": "never"}, "'never', expected one of once, each"),
    ],
)
def test_options_that_cannot_work_are_refused(
    comm: MPI.Intracomm, staged: Make, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        Pipeline(staged(gpt(), micro_batches=2, stage=1).model, **options)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("number", [1, 3])
def test_another_number_of_micro_batches_is_refused(
    comm: MPI.Intracomm, staged: Make, number: int
) -> None:
    stages = staged(gpt(), micro_batches=2, stage=1)
    with pytest.raises(ConfigError, match=f"stage {comm.rank} of 2: got {number} inputs"):
        stages.pipeline.step(*batch(0, number))


@pytest.fixture
def topology(comm: MPI.Intracomm) -> Iterator[Topology]:
    """Two stages."""
    topology = Topology.create(comm, mesh=Mesh(pipeline=2))
    yield topology
    topology.free()


def cut_gpt(topology: Topology) -> nn.Module:
    return cut(gpt(), topology, gpt_stages(gpt()))


@pytest.mark.ranks(2)
def test_models_that_are_no_stages_are_refused(comm: MPI.Intracomm) -> None:
    model, alone = gpt(), Topology.alone()
    for context in (nullcontext(), zeroified(model, adamw(model), topology=alone)):
        with context, pytest.raises(PlanError, match="GPT was not cut into stages"):
            Pipeline(model, micro_batches=2)
    alone.free()


@pytest.mark.ranks(2)
def test_a_rule_that_puts_a_tied_weight_beside_others_is_refused(
    comm: MPI.Intracomm, topology: Topology
) -> None:
    model = cut_gpt(topology)
    with (
        zeroified(model, adamw(model), topology=topology, rule=lambda model: []),
        pytest.raises(PlanError, match="unit 'root' has a weight that the first and the last"),
    ):
        Pipeline(model, micro_batches=2)


@pytest.mark.ranks(2)
def test_a_model_without_an_optimizer_is_evaluated_only(
    comm: MPI.Intracomm, topology: Topology
) -> None:
    model, data = cut_gpt(topology), batch(0, 2)
    with zeroified(model, None, topology=topology):
        pipeline = Pipeline(model, micro_batches=2)
        parallel_assert(comm, abs(pipeline.evaluate(*data) - mean_loss(*data)) < 1e-5)
        with pytest.raises(StepError, match="zeroified without an optimizer"):
            pipeline.step(*data)


@pytest.mark.ranks(2)
def test_stages_are_zeroified_over_the_topology_that_cut_them(
    comm: MPI.Intracomm, topology: Topology
) -> None:
    """Else a norm would be that of one stage, or gradients of two stages would be taken for those of one model."""
    model, other, alone = cut_gpt(topology), Topology.create(comm), Topology.alone()
    World(comm, other).refuses(PlanError, "built another model", model, adamw(model))
    with (
        zeroified(model, adamw(model), topology=alone),
        pytest.raises(PlanError, match="zeroified over another topology than it was cut for"),
    ):
        Pipeline(model, micro_batches=2)
    alone.free()
    other.free()
