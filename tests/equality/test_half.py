"""Training in bf16 and fp16 equals a reference written by hand that makes the same casts in one process.

fp32 masters; parameters and activations in half precision; each rank's gradient in half precision, micro-batches of
``no_sync`` added in fp32 before it; the sum over ranks in fp32, in one order; the optimizer in fp32 on the masters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import hpczero
from hpczero import Precision, Topology
from hpczero.plan.precision import LossScale
from tests.equality import cases, models
from tests.equality.cases import Batch, Case, Lane, Place, gpt_case, seeded_case
from tests.equality.reference import relative_error, tree_sum
from tests.helpers.parallel import parallel_assert

pytestmark = pytest.mark.mpi

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Every cast is the same, so what may differ is how the optimizer's kernel rounds at the ends of tensors. One gradient
# or parameter that rounds to the other side in bf16 would show as 4e-3.
TOLERANCE = 1e-6


@dataclass
class Step:
    """What one step left: fp32 numbers and masters."""

    losses: list[float]
    grad_norm: float
    loss_scale: float
    skipped: int
    masters: dict[str, Tensor]


class ByHand:
    """The reference: all ranks in one process, nothing of hpczero but the choice of precision.

    Args:
        nodes: ranks of each node; a node's sum is rounded to ``precision.reduce`` before the nodes' sums are added.
        micros: micro-batches of a step; all but the last run in no_sync.
    """

    def __init__(
        self,
        case: Case,
        precision: Precision,
        nodes: Sequence[Sequence[int]],
        *,
        micros: int = 1,
    ) -> None:
        self.case, self.precision, self.nodes, self.micros = case, precision, nodes, micros
        self.dtype = DTYPES[precision.param]
        self.model = case.build()
        self.masters = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.optimizer = case.optimizer(_Named(self.masters))
        self.model.to(self.dtype)
        self.scale = precision.loss_scale.initial if precision.loss_scale else 1.0
        self.good_steps = 0
        self.skipped = 0

    def step(self, step: int) -> Step:
        """Forward and backward of all ranks, and the update."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.masters[name])
        ranks = sorted(rank for node in self.nodes for rank in node)
        found = [self._one_rank(step, rank) for rank in ranks]
        gradients = [gradient for _, gradient in found]
        mean = {
            name: self._sum([mine[name] for mine in gradients]) * (1.0 / (len(ranks) * self.scale))
            for name in gradients[0]  # of these models each rank uses the same parameters
        }
        norm = math.sqrt(sum(g.double().square().sum().item() for g in mean.values()))
        if math.isfinite(norm):
            for name, master in self.masters.items():
                master.grad = mean.get(name)
            self.optimizer.step()
        self._update_scale(overflow=not math.isfinite(norm))
        masters = {name: master.detach().clone() for name, master in self.masters.items()}
        return Step([loss for loss, _ in found], norm, self.scale, self.skipped, masters)

    def _one_rank(self, step: int, rank: int) -> tuple[float, dict[str, Tensor]]:
        """This rank's loss, and its gradient in half precision."""
        lane = Lane(self.case, _Casting(self.model), step=step, rank=rank, no_sync=nullcontext)
        total = 0.0
        sums: dict[str, Tensor] = {}
        for micro in range(self.micros):
            loss = lane.loss(micro) / self.micros
            (loss * self.scale).backward()
            total += loss.item()
            for name, parameter in self.model.named_parameters():
                if parameter.grad is not None:
                    mine, parameter.grad = parameter.grad.float(), None
                    sums[name] = sums[name] + mine if name in sums else mine
        return total, {name: value.to(self.dtype) for name, value in sums.items()}

    def _sum(self, gradients: Sequence[Tensor]) -> Tensor:
        """Over the ranks of each node, then over nodes; fp32 but for what travels between nodes."""
        sums = [tree_sum([gradients[rank].float() for rank in node]) for node in self.nodes]
        if len(sums) > 1:
            sums = [value.to(DTYPES[self.precision.reduce]).float() for value in sums]
        return tree_sum(sums)

    def _update_scale(self, *, overflow: bool) -> None:
        policy = self.precision.loss_scale
        if overflow:
            self.skipped += 1
            self.good_steps = 0
            self.scale /= 2
        elif policy:
            self.good_steps += 1
            if self.good_steps % policy.growth_interval == 0:
                self.scale *= 2


class _Named(nn.Module):
    """fp32 masters as a module, for a case's optimizer."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        for index, name in enumerate(list(tensors)):
            parameter = nn.Parameter(tensors[name])
            self.register_parameter(str(index), parameter)
            tensors[name] = parameter


class _Casting(nn.Module):
    """Inputs to the model's dtype, outputs to fp32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.dtype = next(model.parameters()).dtype

    def forward(self, *args):
        return _cast(self.model(*_cast(args, self.dtype)), torch.float32)


def _cast(tree, dtype: torch.dtype):
    def cast(leaf):
        return leaf.to(dtype) if torch.is_tensor(leaf) and leaf.is_floating_point() else leaf

    return tree_map(cast, tree)


def sharded_steps(case: Case, topology: Topology, stage: int, precision: Precision) -> list[Step]:
    """The same with hpczero. Collective over world; masters on rank 0."""
    model = case.build()
    optimizer = case.optimizer(model)
    hpczero.zeroify(model, optimizer, stage=stage, topology=topology, precision=precision)
    state = hpczero.sharding(model)
    losses: list[float] = []
    steps = []
    for step in range(case.steps):
        optimizer.zero_grad()
        lane = Lane(
            case, model, step=step, rank=topology.rank, no_sync=lambda: hpczero.no_sync(model)
        )
        losses.append(case.program(lane))
        norm = hpczero.clip_grad_norm_(model, math.inf)
        optimizer.step()
        masters = hpczero.full_state_dict(model) or {}
        steps.append(Step([], norm, state.loss_scale, state.skipped_steps, masters))
    hpczero.release(model)
    for done, of_ranks in zip(
        steps, zip(*topology.world.comm.allgather(losses), strict=True), strict=True
    ):
        done.losses = list(of_ranks)
    return steps


def deviations(found: Sequence[Step], expected: Sequence[Step]) -> list[str]:
    """What differs, in words."""
    wrong = []
    for step, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        if (mine.loss_scale, mine.skipped) != (theirs.loss_scale, theirs.skipped):
            wrong.append(f"step {step}: scale {mine.loss_scale} after {mine.skipped} skips")
        pairs = zip([*mine.losses, mine.grad_norm], [*theirs.losses, theirs.grad_norm], strict=True)
        for a, b in pairs:
            both_overflow = not math.isfinite(a) and not math.isfinite(b)
            if not both_overflow and not abs(a - b) <= TOLERANCE * abs(b):
                wrong.append(f"step {step}: loss or grad norm is {a!r}, expected {b!r}")
        for name, master in theirs.masters.items():
            error = relative_error(mine.masters[name], master)
            if not error <= TOLERANCE:
                wrong.append(f"step {step}: master {name!r} is off by {error:.1e}")
    return wrong


def check(
    case: Case, topology: Topology, precision: Precision, *, micros: int = 1
) -> list[Step] | None:
    """All stages against the reference; returns the reference on rank 0."""
    runs = [sharded_steps(case, topology, stage, precision) for stage in (0, 1, 2, 3)]
    expected = None
    problems = []
    if topology.is_root:
        by_hand = ByHand(case, precision, topology.world.nodes, micros=micros)
        expected = [by_hand.step(step) for step in range(case.steps)]
        for stage, found in enumerate(runs):
            problems += [f"stage {stage}, {problem}" for problem in deviations(found, expected)]
    parallel_assert(topology.world.comm, not problems, "\n".join(problems[:12]))
    return expected


def stack_case(**changes) -> Case:
    """Training of the stack of blocks, whose inputs are cast too."""
    return seeded_case(models.Stack, **changes)


def test_bf16_makes_the_casts_it_documents(topology):
    reference = check(stack_case(), topology, Precision.of("bf16"))
    exact = check(stack_case(), topology, Precision.of("fp32"))
    if topology.is_root:
        assert reference is not None
        assert exact is not None
        apart = abs(reference[-1].losses[0] / exact[-1].losses[0] - 1)
        assert 1e-5 < apart < 0.1, "bf16 is neither fp32 nor something else"


def test_bf16_gpt_with_tied_weights_and_checkpointed_blocks(topology):
    def build():
        return models.gpt(checkpoint_activations=True)

    check(gpt_case(build), topology, Precision.of("bf16"))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_outputs_that_the_loss_does_not_use(topology, precision):
    case = seeded_case(models.TwoHeadedStack, loss=cases.error_of_the_first)
    check(case, topology, Precision.of(precision))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_gradients_of_no_sync_are_added_in_fp32(topology, precision):
    case = stack_case(program=cases.accumulate_without_sync)
    check(case, topology, Precision.of(precision), micros=3)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("reduce", ["fp32", "bf16"])
@pytest.mark.parametrize("param", ["fp32", "bf16"])
def test_sums_of_nodes_travel_in_the_reduce_dtype(two_nodes, param, reduce):
    check(stack_case(), two_nodes, Precision(param=param, reduce=reduce))


def test_fp16_trains_with_a_loss_scale(topology):
    check(stack_case(), topology, Precision.of("fp16"))


def test_fp16_gpt(topology):
    check(gpt_case(models.gpt), topology, Precision.of("fp16"))


def test_fp16_lowers_a_scale_that_is_too_high_until_gradients_fit(topology):
    policy = LossScale(initial=2.0**18, growth_interval=1000)
    reference = check(stack_case(), topology, Precision(param="fp16", loss_scale=policy))
    if reference is not None:
        assert 1 < reference[-1].skipped < 10
        assert reference[-1].loss_scale == 2.0 ** (18 - reference[-1].skipped)


def test_fp16_overflow_on_one_rank_skips_the_step_on_all_and_the_scale_follows_the_rule(topology):
    def batch(place: Place) -> Batch:
        x, y = cases.vectors(place)
        overflows = place.step in (2, 5) and place.rank == topology.size - 1
        return (x * 1e6 if overflows else x), y

    policy = LossScale(initial=1024.0, growth_interval=3)
    precision = Precision(param="fp16", loss_scale=policy)
    check(stack_case(batch=batch), topology, precision)
    found = sharded_steps(stack_case(batch=batch), topology, 3, precision)
    # Halved by each overflow, of which the second is one good step short of growth; doubled by three good steps.
    scales = [1024, 1024, 512, 512, 512, 256, 256, 256, 512, 512]
    assert [step.loss_scale for step in found] == scales
    assert [step.skipped for step in found] == [0, 0, 1, 1, 1, 2, 2, 2, 2, 2]


def test_a_skipped_step_changes_no_bit(topology):
    def batch(place: Place) -> Batch:
        x, y = cases.vectors(place)
        return (x * math.nan if place == Place(1, 0, 0) else x), y

    precision = Precision(param="bf16", nonfinite="skip")
    found = sharded_steps(stack_case(batch=batch), topology, 3, precision)
    assert [step.skipped for step in found][:3] == [0, 1, 1]
    same = [
        torch.equal(found[1].masters[name], before) for name, before in found[0].masters.items()
    ]
    moved = [
        not torch.equal(found[2].masters[name], before) for name, before in found[1].masters.items()
    ]
    parallel_assert(topology.world.comm, all(same) and all(moved))
