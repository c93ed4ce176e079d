# mypy: disable-error-code="override, operator, union-attr, attr-defined, index, assignment"
"""Reading, copying, saving, moving and changing a model between steps."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
from torch import Tensor, nn

from tests.compat.construct import SHARDED, Habits, Training, plain_step, squared_error, vectors

habits = Habits()


@habits.after("deepcopy-after", refused="cannot be copied or pickled", remark="copy before zeroify")
def copied_after(training: Training) -> None:
    """`copy.deepcopy(model)` after zeroify."""
    copy.deepcopy(training.model)


@habits.after(
    "pickle-after", refused="cannot be copied or pickled", remark="`hpczero.full_state_dict`"
)
def pickled_after(training: Training) -> None:
    """`torch.save(model)` after zeroify."""
    torch.save(training.model, io.BytesIO())


@habits.step("state-round-trip")
def state_round_trip(training: Training) -> None:
    """`state_dict` saved and loaded inside `gathered`."""
    plain_step(training)
    with training.whole(training.model):
        file = io.BytesIO()
        torch.save(training.model.state_dict(), file)
    file.seek(0)
    with training.whole(training.model, change=True):
        training.model.load_state_dict(torch.load(file, weights_only=True))


@habits.step("block-states")
def block_states(training: Training) -> None:
    """`block.state_dict()` inside `gathered`, read afterwards.

    States of parts, read when they are no longer whole.
    """
    plain_step(training)
    with training.whole(training.model):
        kept = [block.state_dict() for block in training.model.blocks]
    training.note(sum(value.square().sum() for state in kept for value in state.values()))


@habits.step("weights-kept")
def weight_views(training: Training) -> None:
    """Clones of parameters made inside `gathered`."""
    plain_step(training)
    with training.whole(training.model):
        kept = [p.detach().clone() for p in training.model.parameters()]
    training.note(sum(value.square().sum() for value in kept))


@habits.step("weight-clipping")
def clip_weights(training: Training) -> None:
    """Weights clamped after each step (WGAN), inside `gathered`."""
    plain_step(training)
    with torch.no_grad(), training.whole(training.model, change=True):
        for parameter in training.model.parameters():
            parameter.clamp_(-0.4, 0.4)


@habits.loss("l2-penalty", remark="weight decay", **SHARDED)
def l2_penalty(model: nn.Module, batch: Any) -> Tensor:
    """An L2 penalty over `model.parameters()`."""
    return squared_error(model, batch) + 0.01 * sum(p.square().sum() for p in model.parameters())


@habits.after("to-nowhere")
def moves_nowhere(training: Training) -> None:
    """`model.to('cpu')`, `.float()`, `.cpu()` that change nothing."""
    training.model.to("cpu")
    training.model.float()
    training.model.cpu()


@habits.after(
    "cast-after",
    batch=lambda place: tuple(each.double() for each in vectors(place)),
    refused="a zeroified model cannot be moved or cast",
    remark="before zeroify; `precision=`",
)
def casts(training: Training) -> None:
    """`model.double()` after zeroify."""
    training.model.double()
