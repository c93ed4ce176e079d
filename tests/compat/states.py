# mypy: disable-error-code="override, operator, union-attr, attr-defined, index, assignment"
"""Reading, copying, saving, moving and changing a model between steps."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
from torch import Tensor, nn

from tests.compat.construct import SHARDED, Training, of_net, plain_step, squared_error, vectors


def copied_after(training: Training) -> None:
    copy.deepcopy(training.model)


def pickled_after(training: Training) -> None:
    torch.save(training.model, io.BytesIO())


def state_round_trip(training: Training) -> None:
    """Saved and loaded in mid-training."""
    plain_step(training)
    with training.whole(training.model):
        file = io.BytesIO()
        torch.save(training.model.state_dict(), file)
    file.seek(0)
    with training.whole(training.model, change=True):
        training.model.load_state_dict(torch.load(file, weights_only=True))


def block_states(training: Training) -> None:
    """States of parts, read when they are no longer whole."""
    plain_step(training)
    with training.whole(training.model):
        kept = [block.state_dict() for block in training.model.blocks]
    training.note(sum(value.square().sum() for state in kept for value in state.values()))


def weight_views(training: Training) -> None:
    plain_step(training)
    with training.whole(training.model):
        kept = [p.detach().clone() for p in training.model.parameters()]
    training.note(sum(value.square().sum() for value in kept))


def clip_weights(training: Training) -> None:
    """WGAN: weights changed by hand after each step."""
    plain_step(training)
    with torch.no_grad(), training.whole(training.model, change=True):
        for parameter in training.model.parameters():
            parameter.clamp_(-0.4, 0.4)


def l2_penalty(model: nn.Module, batch: Any) -> Tensor:
    return squared_error(model, batch) + 0.01 * sum(p.square().sum() for p in model.parameters())


def moves_nowhere(training: Training) -> None:
    training.model.to("cpu")
    training.model.float()
    training.model.cpu()


def casts(training: Training) -> None:
    training.model.double()


CONSTRUCTS = [
    of_net("state-round-trip", "`state_dict` saved and loaded inside `gathered`", state_round_trip),
    of_net("block-states", "`block.state_dict()` inside `gathered`, read afterwards", block_states),
    of_net("weights-kept", "clones of parameters made inside `gathered`", weight_views),
    of_net(
        "weight-clipping", "weights clamped after each step (WGAN), inside `gathered`", clip_weights
    ),
    of_net(
        "deepcopy-after",
        "`copy.deepcopy(model)` after zeroify",
        after=copied_after,
        refused="cannot be copied or pickled",
        remark="copy before zeroify",
    ),
    of_net(
        "pickle-after",
        "`torch.save(model)` after zeroify",
        after=pickled_after,
        refused="cannot be copied or pickled",
        remark="`hpczero.full_state_dict`",
    ),
    of_net(
        "to-nowhere",
        "`model.to('cpu')`, `.float()`, `.cpu()` that change nothing",
        after=moves_nowhere,
    ),
    of_net(
        "cast-after",
        "`model.double()` after zeroify",
        after=casts,
        batch=lambda place: tuple(each.double() for each in vectors(place)),
        refused="a zeroified model cannot be moved or cast",
        remark="before zeroify; `precision=`",
    ),
    of_net(
        "l2-penalty",
        "an L2 penalty over `model.parameters()`",
        loss=l2_penalty,
        **SHARDED,
        remark="weight decay",
    ),
]
