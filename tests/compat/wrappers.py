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
    Construct,
    Net,
    Training,
    net,
    of_net,
    plain_step,
    seeded,
    the_wrapper,
    wrap,
)


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


def training_step(subject: Any, batch: Any) -> Tensor:
    return subject.training_step(batch)


class LossInside(Net):
    """The model computes its loss itself."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(super().forward(x), y)


def own_loss(model: Any, batch: Any) -> Tensor:
    return model(*batch)


class Encodes(Net):
    def encode(self, x: Tensor) -> Tensor:
        return self.through(self.stem(x))


def by_method(model: Any, batch: Any) -> Tensor:
    return F.mse_loss(model.encode(batch[0])[:, :3], batch[1])


def by_forward(model: Any, batch: Any) -> Tensor:
    return F.mse_loss(model.forward(batch[0]), batch[1])


def one_block(model: Any, batch: Any) -> Tensor:
    return F.mse_loss(model.blocks[0](batch[0])[:, :3], batch[1])


def block_by_block(model: Any, batch: Any) -> Tensor:
    """Only the units are called; the model's own layers are not used."""
    return F.mse_loss(model.through(batch[0])[:, :3], batch[1])


def train_and_eval(training: Training) -> None:
    training.model.train()
    plain_step(training)
    training.model.eval()
    with torch.no_grad():
        training.note(training.model(torch.ones(2, WIDTH)).sum())
    with torch.inference_mode():
        training.note(training.model(torch.ones(2, WIDTH)).sum())


# --- autocast and compiler


def under_autocast(model: Any, batch: Any) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.mse_loss(model(batch[0]).float(), batch[1])


def autocast_over_all(training: Training) -> None:
    """One context over all steps."""
    with training.kept.pop("context", ExitStack()) as context:  # left by an error and at the end
        if training.step == 0:
            context.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
        plain_step(training)
        if training.step < training.construct.steps - 1:
            training.kept["context"] = context.pop_all()


def compile_blocks(training: Training) -> None:
    for block in training.model.blocks:
        block.forward = torch.compile(block.forward, backend="aot_eager")


def compile_model(training: Training) -> None:
    training.kept["wrapper"] = torch.compile(training.model, backend="aot_eager")


def scripted(model: Any) -> None:
    model.blocks = nn.ModuleList(torch.jit.script(block) for block in model.blocks)


def compile_in_place(training: Training) -> None:
    for block in training.model.blocks:
        block.compile(backend="aot_eager")


def one_block_net() -> nn.Module:
    return seeded(lambda: Net(blocks=1))


CONSTRUCTS = [
    of_net("wrapped", "a module around the model is called", after=wrap, subject=the_wrapper),
    of_net("wrapped-before", "the same, made before zeroify", before=wrap, subject=the_wrapper),
    of_net(
        "training-step",
        "`training_step` of a module around the model",
        after=lightning,
        subject=the_wrapper,
        loss=training_step,
    ),
    Construct("loss-inside", "the model returns its loss", net(kind=LossInside), loss=own_loss),
    of_net("one-block", "only a block is called", loss=one_block),
    of_net("block-by-block", "blocks are called one by one, the model never", loss=block_by_block),
    of_net(
        "forward-called",
        "`model.forward(x)`",
        loss=by_forward,
        **SHARDED,
        remark="`model(x)`",
    ),
    Construct(
        "other-method",
        "a method other than forward (`model.encode(x)`)",
        net(kind=Encodes),
        loss=by_method,
        **SHARDED,
        remark='`hpczero.register_forward(model, "encode")`',
    ),
    of_net("eval-between", "`eval()`, `no_grad`, `inference_mode` between steps", train_and_eval),
    of_net("autocast", "`torch.autocast` around the forward", loss=under_autocast, tolerance=BF16),
    of_net(
        "autocast-over-steps",
        "one autocast context over several steps (plain torch goes on with casts of old weights)",
        autocast_over_all,
        tolerance=BF16,
    ),
    of_net(
        "compiled-forward",
        "`block.forward = torch.compile(block.forward)`, after zeroify",
        after=compile_blocks,
        stages=(3,),
        build=one_block_net,
    ),
    of_net(
        "compiled-blocks",
        "`block.compile()`",
        after=compile_in_place,
        stages=(3,),
        build=one_block_net,
    ),
    of_net(
        "compiled-model",
        "`torch.compile(model)`",
        after=compile_model,
        subject=the_wrapper,
        stages=(3,),
    ),
    Construct(
        "scripted-blocks",
        "`torch.jit.script` of each block",
        net(change=scripted),
        refused="ScriptModule",
        remark="script nothing, or compile blocks",
    ),
]
