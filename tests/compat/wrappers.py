# mypy: disable-error-code="override, operator, union-attr, attr-defined, index, assignment"
"""What surrounds a model: wrappers, own methods, autocast, the compiler."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.compat.construct import (
    BF16,
    SHARDED,
    WIDTH,
    Habits,
    Net,
    Training,
    plain_step,
    the_wrapper,
    wrap,
)
from tests.helpers.small_models import seeded

habits = Habits()


class Lightning(nn.Module):
    """training_step of a module around the model."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.net = module

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self.net(x), y)


def lightning(training: Training) -> None:
    training.kept["wrapper"] = Lightning(training.model)


@habits.loss("training-step", after=lightning, subject=the_wrapper)
def training_step(subject: Any, batch: Any) -> Tensor:
    """`training_step` of a module around the model."""
    return subject.training_step(batch)


class LossInside(Net):
    """The model computes its loss itself."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(super().forward(x), y)


@habits.loss("loss-inside", model=LossInside)
def own_loss(model: Any, batch: Any) -> Tensor:
    """The model returns its loss."""
    return model(*batch)


class Encodes(Net):
    def encode(self, x: Tensor) -> Tensor:
        return self.through(self.stem(x))


@habits.loss(
    "other-method", model=Encodes, remark='`hpczero.register_forward(model, "encode")`', **SHARDED
)
def by_method(model: Any, batch: Any) -> Tensor:
    """A method other than forward (`model.encode(x)`)."""
    return F.mse_loss(model.encode(batch[0])[:, :3], batch[1])


@habits.loss("forward-called", remark="`model(x)`", **SHARDED)
def by_forward(model: Any, batch: Any) -> Tensor:
    """`model.forward(x)`."""
    return F.mse_loss(model.forward(batch[0]), batch[1])


@habits.loss("one-block")
def one_block(model: Any, batch: Any) -> Tensor:
    """Only a block is called."""
    return F.mse_loss(model.blocks[0](batch[0])[:, :3], batch[1])


@habits.loss("block-by-block")
def block_by_block(model: Any, batch: Any) -> Tensor:
    """Blocks are called one by one, the model never.

    Only the units are called; the model's own layers are not used.
    """
    return F.mse_loss(model.through(batch[0])[:, :3], batch[1])


@habits.step("eval-between")
def train_and_eval(training: Training) -> None:
    """`eval()`, `no_grad`, `inference_mode` between steps."""
    training.model.train()
    plain_step(training)
    training.model.eval()
    with torch.no_grad():
        training.note(training.model(torch.ones(2, WIDTH)).sum())
    with torch.inference_mode():
        training.note(training.model(torch.ones(2, WIDTH)).sum())


# --- autocast and compiler


@habits.loss("autocast", tolerance=BF16)
def under_autocast(model: Any, batch: Any) -> Tensor:
    """`torch.autocast` around the forward."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.mse_loss(model(batch[0]).float(), batch[1])


@habits.step("autocast-over-steps", tolerance=BF16)
def autocast_over_all(training: Training) -> None:
    """One autocast context over several steps (plain torch goes on with casts of old weights)."""
    with training.kept.pop("context", ExitStack()) as context:  # left by an error and at the end
        if training.step == 0:
            context.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
        plain_step(training)
        if training.step < training.construct.steps - 1:
            training.kept["context"] = context.pop_all()


def one_block_net() -> nn.Module:
    return seeded(lambda: Net(blocks=1))


OF_ONE_BLOCK = {"build": one_block_net, "stages": (3,)}


@habits.after("compiled-forward", **OF_ONE_BLOCK)
def compile_blocks(training: Training) -> None:
    """`block.forward = torch.compile(block.forward)`, after zeroify."""
    for block in training.model.blocks:
        block.forward = torch.compile(block.forward, backend="aot_eager")


@habits.after("compiled-model", subject=the_wrapper, stages=(3,))
def compile_model(training: Training) -> None:
    """`torch.compile(model)`."""
    training.kept["wrapper"] = torch.compile(training.model, backend="aot_eager")


@habits.change(
    "scripted-blocks", refused="ScriptModule", remark="script nothing, or compile blocks"
)
def scripted(model: Any) -> None:
    """`torch.jit.script` of each block."""
    model.blocks = nn.ModuleList(torch.jit.script(block) for block in model.blocks)


@habits.after("compiled-blocks", **OF_ONE_BLOCK)
def compile_in_place(training: Training) -> None:
    """`block.compile()`."""
    for block in training.model.blocks:
        block.compile(backend="aot_eager")


habits.add("wrapped", "a module around the model is called", after=wrap, subject=the_wrapper)
habits.add("wrapped-before", "the same, made before zeroify", before=wrap, subject=the_wrapper)
