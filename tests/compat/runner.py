"""The two runners of a Construct, and what must be the same in both.

``train_plain`` is one process and stock torch, and trains on the mean of the ranks' losses. ``train_sharded`` runs
the same code on every rank. What comes out of a run is an Outcome: numbers, or an error that all ranks told.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

import hpczero
from hpczero.errors import HpcZeroError
from hpczero.plan.precision import LossScale
from tests.compat.construct import GIVEN_BACK, TOLERANCE, Construct, Place, Training
from tests.equality.reference import relative_error

if TYPE_CHECKING:  # importing MPI would start it where tests are only collected
    from hpczero import Topology

# Of the whole update, by its 2-norm. Three steps of SGD stay within 1e-6; a gradient that is lost, doubled or
# scaled by another number of ranks is off by 1e-2 and more.
UPDATE_TOLERANCE = 1e-4
ROUGH_UPDATE = 0.2  # in half precision
LOSS_TOLERANCE = 2e-6
# A third is no power of two: the mean rounds, and models whose numbers grow carry that on (measured: up to 2e-5).
ODD_SLACK = 50


# With a scale at which these models overflow in no step: a skipped one would be no fault.
PRECISIONS = {
    "fp16": hpczero.Precision(param="fp16", loss_scale=LossScale(initial=2.0**7)),
}


@dataclass
class Outcome:
    """What a run left behind.

    Attributes:
        losses: of each loss that was computed, in the order of the loop, those of each rank.
        numbers: what the loop noted.
        start, end: parameters and persistent buffers by name.
        error: kind and text, empty if it worked.
        named: whether the error is one of hpczero's.
    """

    losses: list[list[float]] = field(default_factory=list)
    numbers: list[float] = field(default_factory=list)
    start: dict[str, Tensor] = field(default_factory=dict)
    end: dict[str, Tensor] = field(default_factory=dict)
    error: str = ""
    named: bool = False


class Plain(Training):
    """One process that stands for all ranks."""

    size = 1

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.losses: list[list[float]] = []

    def mean(self, value: Callable[[Place], Tensor], micro: int = 0) -> Tensor:
        """Of all ranks' losses; buffers stay as rank 0 leaves them."""
        before = of_rank_0 = _buffers(self.models)
        losses = []
        for rank in range(self.size):
            _restore(before)
            torch.clear_autocast_cache()  # ranks share no casts, and no step those of old weights
            losses.append(_draw(value, Place(rank, self.step, micro)))
            if rank == 0:
                of_rank_0 = _buffers(self.models)
        _restore(of_rank_0)
        self.losses.append([loss.item() for loss in losses])
        return torch.stack(losses).mean()


class Sharded(Training):
    """One rank of several."""

    rank = 0

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.losses: list[list[float]] = []

    def mean(self, value: Callable[[Place], Tensor], micro: int = 0) -> Tensor:
        """This rank's loss: hpczero takes the mean of gradients."""
        loss = _draw(value, Place(self.rank, self.step, micro))
        self.losses.append([loss.item()])
        return loss

    @contextmanager
    def whole(self, model: nn.Module, *, change: bool = False) -> Iterator[None]:
        with hpczero.gathered(model, modifier_rank=0 if change else None):
            yield


def _draw(value: Callable[[Place], Tensor], place: Place) -> Tensor:
    torch.manual_seed(place.seed)  # dropout masks depend on the place alone
    return value(place)


Buffer = tuple[nn.Module, str, Tensor, Tensor]


def _buffers(models: Sequence[nn.Module]) -> list[Buffer]:
    """Each with the module it belongs to, its name there, and its present value."""
    return [
        (module, name, buffer, buffer.clone())
        for model in models
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]


def _restore(buffers: list[Buffer]) -> None:
    for module, name, buffer, value in buffers:
        module._buffers[name] = buffer  # a forward may have put another in its place
        if not torch.equal(buffer, value):
            # BatchNorm keeps its running statistics for backward, which in training does not read them.
            with torch.autograd.grad_mode._unsafe_preserve_version_counter(buffer):
                buffer.copy_(value)


def _loop(training: Training) -> None:
    for step in range(training.construct.steps):
        training.step = step
        training.construct.step(training)


def _set_up(construct: Construct, kind: type[Plain] | type[Sharded]) -> Plain | Sharded:
    parts = construct.parts(construct.build())
    return kind(parts, [construct.optimizer(part) for part in parts], construct)


def train_plain(construct: Construct, size: int) -> Outcome:
    """What ``size`` ranks do, in one process."""
    training = _set_up(construct, Plain)
    assert isinstance(training, Plain)
    training.size = size
    start = _states(training)
    construct.before(training)
    construct.after(training)
    _loop(training)
    return Outcome(training.losses, training.numbers, start, _states(training))


def _states(training: Training) -> dict[str, Tensor]:
    return {
        f"{index}.{name}": value.detach().clone()
        for index, model in enumerate(training.models)
        for name, value in model.state_dict().items()
        if isinstance(value, Tensor)
    }


def train_sharded(
    construct: Construct, topology: Topology, *, stage: int, transport: str
) -> Outcome:
    """With hpczero; complete on rank 0. Collective over world, also where it is refused.

    A rank that alone ended in an error would leave the others waiting: the watchdog of tests ends that.
    """
    training = _set_up(construct, Sharded)
    assert isinstance(training, Sharded)
    training.rank = topology.rank
    sharded = []
    outcome = Outcome()
    try:
        construct.before(training)
        for model, optimizer in zip(training.models, training.optimizers, strict=True):
            hpczero.zeroify(
                model,
                optimizer,
                stage=stage,
                topology=topology,
                transport=transport,
                precision=PRECISIONS.get(construct.precision, construct.precision),
            )
            sharded.append(model)
        construct.after(training)
        _loop(training)
        for index, model in enumerate(training.models):
            state = hpczero.full_state_dict(model) or {}
            outcome.end.update((f"{index}.{name}", value) for name, value in state.items())
    except Exception as error:  # whatever it is, the other transports are tried too
        outcome.error = f"{type(error).__name__}: {error}"
        # torch wraps what it meets while it loads a state.
        outcome.named = isinstance(error, HpcZeroError) or GIVEN_BACK in str(error)
    finally:
        for model in sharded:
            _clear(model, outcome)
            hpczero.release(model)
    outcome.numbers = training.numbers
    return _of_all_ranks(outcome, training.losses, topology)


def _clear(model: nn.Module, outcome: Outcome) -> None:
    """Free what a forward or backward holds that was interrupted; zero_grad works after any refusal."""
    try:
        model.zero_grad()
    except Exception as error:  # in place of a refusal, which would excuse it
        outcome.error = f"zero_grad after the run: {type(error).__name__}: {error}"
        outcome.named = False


def _of_all_ranks(outcome: Outcome, losses: list[list[float]], topology: Topology) -> Outcome:
    found = topology.world.comm.allgather((outcome.error, outcome.named, outcome.numbers, losses))
    errors = [error for error, *_ in found]
    if any(errors) and not all(errors):
        outcome.error = f"on some ranks only: {errors}"
    elif any(errors) and len({_unranked(error) for error in errors}) > 1:
        outcome.error = f"ranks disagree: {errors}"
    outcome.named = outcome.named and all(named for _, named, _, _ in found)
    if not outcome.error and any(numbers != found[0][2] for _, _, numbers, _ in found):
        outcome.error = f"ranks noted different numbers: {[n for _, _, n, _ in found]}"
    outcome.losses = [
        [each[0] for each in of_ranks] for of_ranks in zip(*(m for *_, m in found), strict=False)
    ]
    return outcome


def _unranked(error: str) -> str:
    return re.sub(r"\branks? ?\(?s?\)? ?\d+", "rank", error).partition("\n")[0]


def judge(
    construct: Construct, found: Mapping[str, Outcome], plain: Outcome, size: int
) -> list[str]:
    """What is wrong, in words, on ``size`` ranks.

    ``found`` is by "stage S, transport"; ``plain`` is empty if it need not work.
    """
    wrong = []
    slack = construct.tolerance / TOLERANCE * (1 if size in (1, 2) else ODD_SLACK)
    for name, outcome in found.items():
        refusal = construct.expects(int(name.removeprefix("stage ")[0]))
        if refusal:
            if not outcome.error:
                wrong.append(f"{name}: accepted, expected an error with {refusal!r}")
            elif outcome.named == construct.by_torch or not _says(outcome.error, refusal):
                wrong.append(f"{name}: expected an error with {refusal!r}, got {outcome.error}")
        elif outcome.error:
            wrong.append(f"{name}: {outcome.error}")
        else:
            wrong += [f"{name}: {problem}" for problem in _differences(outcome, plain, slack)[:2]]
    return wrong


def _says(error: str, refusal: str) -> bool:
    return any(words in error for words in refusal.split("|"))


def _differences(found: Outcome, plain: Outcome, slack: float) -> list[str]:
    wrong = []
    if found.end.keys() != plain.end.keys():
        wrong.append(f"states differ in {sorted(found.end.keys() ^ plain.end.keys())}")
        return wrong
    wrong += _numbers("losses", found.losses, plain.losses, slack)
    wrong += _numbers("noted", [found.numbers], [plain.numbers], slack)
    for name, expected in plain.end.items():
        error = relative_error(found.end[name], expected)
        if not error <= TOLERANCE * slack:
            wrong.append(f"{name!r} is off by {error:.2e} of its largest magnitude")
    moved, apart = 0.0, 0.0
    for name, expected in plain.end.items():
        moved += float((expected.double() - plain.start[name].double()).square().sum())
        apart += float((expected.double() - found.end[name].double()).square().sum())
    if not apart <= min(UPDATE_TOLERANCE * slack, ROUGH_UPDATE) ** 2 * moved:
        wrong.append(f"the update as a whole is off by {(apart / max(moved, 1e-30)) ** 0.5:.2e}")
    return wrong


def _numbers(
    what: str, found: list[list[float]], expected: list[list[float]], slack: float
) -> list[str]:
    if [len(each) for each in found] != [len(each) for each in expected]:
        return [f"{what}: {found}, expected {expected}"]
    pairs = [
        (a, b)
        for mine, theirs in zip(found, expected, strict=True)
        for a, b in zip(mine, theirs, strict=True)
    ]
    apart = [
        (a, b) for a, b in pairs if not abs(a - b) <= LOSS_TOLERANCE * slack * max(abs(b), 1e-3)
    ]
    return [f"{what}: {a!r}, expected {b!r}" for a, b in apart[:1]]


def learned(plain: Outcome) -> bool:
    """Whether the reference moved enough that a comparison with it proves something."""
    moved = [relative_error(plain.start[name], value) for name, value in plain.end.items()]
    return max(moved) > 1e-3
