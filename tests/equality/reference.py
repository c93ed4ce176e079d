"""The two runners of a Case and their comparison.

``train_plain`` is one process and stock torch. It trains the ranks' batches one after another, so per-rank batch
statistics and dropout masks are those of the ranks, averages their gradients, and steps on whole parameters.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor, nn

import hpczero
from hpczero import Topology
from hpczero.accelerator import Accelerator
from hpczero.plan.offload import Offload
from tests.equality.cases import Case, Lane
from tests.helpers.parallel import parallel_assert

# Relative to the largest magnitude in the tensor. An element is a sum of products, among them some as large as the
# tensor's large elements; where they cancel, rounding is much of what is left, and no bound relative to the element
# itself can hold. One fp32 rounding is 6e-8 of the largest; ten steps of them stay below 1e-6.
TOLERANCE = 1e-6
# Where the order of additions is another one, parameters differ in their last bit after a step, and what curvature
# makes of that shows in the next gradient. Stock torch in one process, given the ranks' batches in reverse order,
# departs from itself by up to 1.7e-6 in ten steps of these models, while losses and parameters stay within 3e-7.
LATER_GRADIENTS = 5e-6


@dataclass
class Record:
    """What one step of training left behind.

    Attributes:
        losses: of each rank, in rank order.
        between: each rank's numbers of ``Case.between``.
        grad_norm: before clipping.
        gradients: after clipping; a parameter without one is left out.
        state: parameters and buffers after the step; None where they were not gathered.
    """

    losses: tuple[float, ...]
    between: tuple[tuple[float, ...], ...]
    grad_norm: float
    gradients: dict[str, Tensor]
    state: dict[str, Tensor] | None


Gradients = dict[str, Tensor]


class _Rank:
    """What one rank does by itself in a step of the reference: its own gradients, as often as it would reduce them."""

    def __init__(self, case: Case, model: nn.Module, *, step: int, rank: int) -> None:
        self.reductions: list[Gradients] = []
        self._model = model
        self._sync = True
        self.lane = Lane(
            case,
            model,
            step=step,
            rank=rank,
            no_sync=self._no_sync,
            after_backward=self._after_backward,
        )

    @contextmanager
    def _no_sync(self) -> Iterator[None]:
        self._sync = False
        yield
        self._sync = True

    def _after_backward(self) -> None:
        if self._sync:
            self.reductions.append(_take_gradients(self._model))


def _take_gradients(model: nn.Module) -> Gradients:
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[name], parameter.grad = parameter.grad, None
    return found


def tree_sum(terms: Sequence[Tensor]) -> Tensor:
    """Sum of neighbours, then of their sums: the documented order of a reduction over ranks."""
    if len(terms) == 1:
        return terms[0]
    middle = (len(terms) + 1) // 2
    return tree_sum(terms[:middle]) + tree_sum(terms[middle:])


def _add_mean(model: nn.Module, gradients: Sequence[Gradients]) -> None:
    """Add the mean over ranks to ``.grad``; a rank without a gradient counts as zero, none at all leaves it alone."""
    for name, parameter in model.named_parameters():
        if any(name in mine for mine in gradients):
            zero = torch.zeros_like(parameter)
            mean = tree_sum([mine.get(name, zero) for mine in gradients]) * (1.0 / len(gradients))
            parameter.grad = mean if parameter.grad is None else parameter.grad + mean


def train_plain(case: Case, size: int) -> list[Record]:
    """Train in one process what ``size`` ranks would."""
    model = case.build()
    optimizer = case.optimizer(model)
    scheduler = case.scheduler(optimizer) if case.scheduler else None
    records = []
    for step in range(case.steps):
        case.zero_grad(model, optimizer, step)
        kept = _take_gradients(model)
        buffers = after_rank_0 = [buffer.clone() for buffer in model.buffers()]
        ranks = [_Rank(case, model, step=step, rank=rank) for rank in range(size)]
        losses = []
        for rank in ranks:  # each starts from the same buffers, and those of rank 0 stay
            _set(model, buffers)
            losses.append(case.program(rank.lane))
            if rank is ranks[0]:
                after_rank_0 = [buffer.clone() for buffer in model.buffers()]
        _set(model, after_rank_0)
        for name, parameter in model.named_parameters():
            parameter.grad = kept.get(name)
        for gradients in zip(*(rank.reductions for rank in ranks), strict=True):
            _add_mean(model, gradients)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), case.max_norm, case.norm_type)
        mean = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        state = {name: value.detach().clone() for name, value in model.state_dict().items()}
        between = tuple(tuple(case.between(r.lane)) for r in ranks) if case.between else ()
        records.append(Record(tuple(losses), between, norm.item(), mean, state))
    return records


def _set(model: nn.Module, buffers: Sequence[Tensor]) -> None:
    for buffer, value in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(value)


def train_sharded(
    case: Case,
    topology: Topology,
    *,
    stage: int,
    precision: str | hpczero.Precision = "fp32",
    transport: str = "auto",
    device: Accelerator | None = None,
    offload: Offload | None = None,
) -> list[Record]:
    """Train with hpczero. Collective over world; the records are complete on rank 0."""
    model = case.build()
    optimizer = case.optimizer(model)
    scheduler = case.scheduler(optimizer) if case.scheduler else None
    hpczero.zeroify(
        model,
        optimizer,
        stage=stage,
        topology=topology,
        precision=precision,
        rule=case.rule,
        initialize=case.initialize,
        transport=transport,
        device=device,
        offload=offload,
    )

    def no_sync() -> AbstractContextManager[None]:
        return hpczero.no_sync(model)

    records = []
    last = case.steps - 1
    for step in range(case.steps):
        lane = Lane(case, model, step=step, rank=topology.rank, no_sync=no_sync)
        case.zero_grad(model, optimizer, step)
        loss = case.program(lane)
        norm = hpczero.clip_grad_norm_(model, case.max_norm, case.norm_type)
        gradients = hpczero.full_gradients(model)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        state = hpczero.full_state_dict(model) if step in (0, last // 2, last) else None
        between = (tuple(case.between(lane)),) if case.between else ()
        records.append(Record((loss,), between, norm, gradients, state))
    hpczero.release(model)
    return _of_all_ranks(records, topology)


def _checksum(tensors: Mapping[str, Tensor]) -> int:
    whole = b"".join(name.encode() + tensor.numpy().tobytes() for name, tensor in tensors.items())
    return zlib.crc32(whole)


def _of_all_ranks(records: Sequence[Record], topology: Topology) -> list[Record]:
    """With the losses and numbers of every rank in place of this rank's. Collective over world.

    Raises:
        AssertionError: on every rank, if whole gradients or norms differ between ranks.
    """
    agreed = topology.world.comm.allgather(
        [(record.grad_norm.hex(), _checksum(record.gradients)) for record in records]
    )
    assert agreed.count(agreed[0]) == len(agreed), "ranks hold different gradients or norms"
    everybody = topology.world.comm.allgather(
        [(record.losses, record.between) for record in records]
    )
    together = []
    for record, numbers in zip(records, zip(*everybody, strict=True), strict=True):
        losses, between = (tuple(chain.from_iterable(each)) for each in zip(*numbers, strict=True))
        together.append(replace(record, losses=losses, between=between))
    return together


def differences(
    found: Sequence[Record],
    expected: Sequence[Record],
    tolerance: float = TOLERANCE,
    *,
    later_gradients: float | None = None,
) -> list[str]:
    """What in ``found`` is further than ``tolerance`` from ``expected``, in words; empty if all is well.

    Args:
        later_gradients: another tolerance for gradients after the first step; see LATER_GRADIENTS.
    """
    wrong = []
    for step, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        of_gradients = later_gradients if step and later_gradients else tolerance
        problems = [
            *_numbers("loss", mine.losses, theirs.losses, tolerance),
            *_numbers("grad norm", [mine.grad_norm], [theirs.grad_norm], tolerance),
            *_tensors("gradient", mine.gradients, theirs.gradients, of_gradients),
        ]
        if mine.state is not None and theirs.state is not None:
            problems += _tensors("state", mine.state, theirs.state, tolerance)
        for a, b in zip(mine.between, theirs.between, strict=True):
            problems += _numbers("number between steps", a, b, tolerance)
        wrong += [f"step {step}: {problem}" for problem in problems]
    return wrong


def _numbers(
    what: str, found: Sequence[float], expected: Sequence[float], tolerance: float
) -> list[str]:
    if len(found) != len(expected):
        return [f"{len(found)} of {what}, expected {len(expected)}"]
    return [
        f"{what} of rank {rank} is {a!r}, expected {b!r}"
        for rank, (a, b) in enumerate(zip(found, expected, strict=True))
        if not abs(a - b) <= tolerance * abs(b)  # so that NaN is wrong
    ]


def _tensors(
    what: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float
) -> list[str]:
    wrong = []
    # hpczero reduces a unit as a whole: what no rank used is zero there, and nothing in torch.
    surplus = [name for name in found if name not in expected and found[name].any()]
    if what == "state":
        surplus = [name for name in found if name not in expected]
    missing = [name for name in expected if name not in found]
    wrong += [f"{what} of {name!r} is there, expected none" for name in surplus]
    wrong += [f"{what} of {name!r} is missing" for name in missing]
    for name in expected.keys() & found.keys():
        error = relative_error(found[name], expected[name])
        if not error <= tolerance:
            wrong.append(f"{what} of {name!r} is off by {error:.2e} of its largest magnitude")
    return wrong


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Largest deviation, relative to the largest magnitude expected; 0 for nothing, infinite for another shape."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return math.inf
    if not expected.numel():
        return 0.0
    largest = expected.double().abs().max().item()
    error = (found.double() - expected.double()).abs().max().item()
    return error / largest if largest else (0.0 if error == 0.0 else math.inf)


def check_near(
    topology: Topology,
    runs: Mapping[str, Sequence[Record]],
    expected: Sequence[Record],
    *,
    later_gradients: float | None = None,
) -> None:
    """Every run is as near ``expected`` as ``differences`` wants it; rank 0 judges. Collective over world."""
    problems: list[str] = []
    for name, found in runs.items() if topology.is_root else ():
        wrong = differences(found, expected, later_gradients=later_gradients)
        problems += [f"{name}, {problem}" for problem in wrong]
    parallel_assert(topology.world.comm, not problems, "\n".join(problems[:12]))


def check_same_bits(topology: Topology, runs: Mapping[str, Sequence[Record]]) -> None:
    """All runs are equal in every bit. Collective over world."""
    apart = first_step_apart(runs)
    parallel_assert(topology.world.comm, not apart, "\n".join(apart))


def bits(records: Sequence[Record]) -> list[object]:
    """The records in a form in which ``==`` compares bits."""
    return [
        (
            [value.hex() for value in record.losses],
            [[value.hex() for value in numbers] for numbers in record.between],
            record.grad_norm.hex(),
            {name: tensor.numpy().tobytes() for name, tensor in record.gradients.items()},
            {name: tensor.numpy().tobytes() for name, tensor in (record.state or {}).items()},
        )
        for record in records
    ]


def first_step_apart(runs: Mapping[str, Sequence[Record]]) -> list[str]:
    """Which runs differ in a bit from the first, and from which step on."""
    (name, first), *others = runs.items()
    expected = bits(first)
    wrong = []
    for other, records in others:
        pairs = zip(bits(records), expected, strict=True)  # all run the same case
        apart = [step for step, (a, b) in enumerate(pairs) if a != b]
        if apart:
            wrong.append(f"{other} departs from {name} at step {apart[0]}")
    return wrong
