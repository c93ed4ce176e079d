# mypy: disable-error-code="override, operator, union-attr, attr-defined, index"
"""Autograd used by hand: gradients of gradients, own functions, several forwards and backwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.compat.construct import GIVEN_BACK, WIDTH, Habits, Net, Residual, Training

habits = Habits()

# --- gradients of gradients, and of inputs


@habits.loss("gradient-penalty")
def gradient_penalty(model: nn.Module, batch: Any) -> Tensor:
    """A gradient penalty (`create_graph=True`)."""
    x = batch[0].requires_grad_()
    y = model(x)
    (slope,) = torch.autograd.grad(y.square().mean(), x, create_graph=True)
    return F.mse_loss(y, batch[1]) + (slope.norm(dim=1) - 1).square().mean()


@habits.loss("penalty-alone")
def penalty_alone(model: nn.Module, batch: Any) -> Tensor:
    """A loss that is a gradient's norm and nothing else."""
    x = batch[0].requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return slope.square().mean()


@habits.loss("saliency")
def saliency(model: nn.Module, batch: Any) -> Tensor:
    """`torch.autograd.grad` with respect to inputs.

    The gradient of inputs weighs them, without a graph of its own.
    """
    x = batch[0].requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().mean(), x)
    return F.mse_loss(model(x.detach() * (1 + slope)), batch[1])


@habits.loss("adversarial")
def adversarial(model: nn.Module, batch: Any) -> Tensor:
    """Adversarial examples (FGSM).

    FGSM; its backward also reaches the parameters, as users forget.
    """
    x = batch[0].requires_grad_()
    (slope,) = torch.autograd.grad(F.mse_loss(model(x), batch[1]), x)
    return F.mse_loss(model((x + 0.1 * slope.sign()).detach()), batch[1])


@habits.loss("forces")
def forces(model: nn.Module, batch: Any) -> Tensor:
    """Energy and forces, both fitted (double backward)."""
    positions = batch[0].requires_grad_()
    energy = model(positions).sum()
    (force,) = torch.autograd.grad(-energy, positions, create_graph=True)
    return energy.square() * 0.01 + F.mse_loss(force[:, :3], batch[1])


@habits.backward(
    "grad-of-parameters", refused=f"was assigned a tensor|{GIVEN_BACK}", remark="`loss.backward()`"
)
def grad_of_parameters(training: Training) -> None:
    """`torch.autograd.grad(loss, model.parameters())`."""
    parameters = list(training.model.parameters())
    found = torch.autograd.grad(training.loss(), parameters)
    for parameter, gradient in zip(parameters, found, strict=True):
        parameter.grad = gradient


@habits.backward("backward-inputs")
def backward_to_some(training: Training) -> None:
    """`loss.backward(inputs=...)`."""
    training.loss().backward(inputs=list(training.model.head.parameters()))


@habits.backward(
    "func-grad", refused="inside a transform of torch.func (Grad)", remark="`loss.backward()`"
)
def functional_gradient(training: Training) -> None:
    """`torch.func.grad` over `functional_call` of the model."""
    parameters = dict(training.model.named_parameters())

    def loss(values: Any) -> Tensor:
        x = torch.ones(4, WIDTH)
        return torch.func.functional_call(training.model, values, (x,)).square().mean()

    found = torch.func.grad(loss)(parameters)
    for name, parameter in parameters.items():
        parameter.grad = found[name]


@habits.backward(
    "func-jvp",
    refused="inside a transform of torch.func (Jvp)",
    remark="`torch.autograd.functional`",
)
def forward_mode(training: Training) -> None:
    """`torch.func.jvp` of the model."""
    x = torch.ones(4, WIDTH)
    tangent = torch.func.jvp(training.model, (x,), (x,))[1]
    tangent.square().mean().backward()


@habits.block("vmap-inside")
class VmapsInside(Residual):
    """`torch.vmap` inside a block."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.vmap(self.branch)(x)


@habits.block("ensemble")
class Ensemble(Residual):
    """`vmap` over stacked weights inside a block.

    Its own weights, stacked twice, called by functional_call under vmap.
    """

    def forward(self, x: Tensor) -> Tensor:
        stacked = torch.stack([self.inner.weight, self.inner.weight * 0.5])
        run = torch.vmap(lambda w: torch.func.functional_call(self.inner, {"weight": w}, (x,)))
        return x + self.outer(torch.tanh(run(stacked)).mean(0))


@habits.block("functional-call-inside")
class CallsFunctionally(Residual):
    """`functional_call` of a submodule inside a block."""

    def forward(self, x: Tensor) -> Tensor:
        scaled = {name: 2 * value for name, value in self.inner.named_parameters()}
        return x + self.outer(torch.func.functional_call(self.inner, scaled, (x,)))


# --- own functions


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        (gradient,) = gradients
        return 2 * x * weight * gradient, (x * x * gradient).sum(0)


@habits.block("own-function")
class OwnFunction(Residual):
    """An own `autograd.Function` that saves a parameter."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * Squares.apply(x, self.inner.weight[0])


class ReversesGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


@habits.block("gradient-reversal")
class DomainAdversarial(Residual):
    """Gradient reversal."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(ReversesGradient.apply(x))


@habits.block("straight-through")
class StraightThrough(Residual):
    """A straight-through estimator."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + (torch.round(y) - y).detach()


# --- several forwards, several backwards


@habits.loss("siamese")
def siamese(model: nn.Module, batch: Any) -> Tensor:
    """Two forwards, one backward."""
    first, second = model(batch[0]), model(batch[0].flip(0))
    return F.cosine_embedding_loss(first, second, torch.ones(4)) + F.mse_loss(first, batch[1])


@habits.loss("contrastive")
def contrastive(model: nn.Module, batch: Any) -> Tensor:
    """A contrastive loss over two views."""
    first, second = F.normalize(model(batch[0])), F.normalize(model(batch[0] + 0.1))
    return F.cross_entropy(first @ second.T / 0.5, torch.arange(4))


@habits.loss("preference", tolerance=3e-6)
def preference(model: nn.Module, batch: Any) -> Tensor:
    """DPO: two forwards with and two without gradient.

    DPO: chosen and rejected through one model; the reference under no_grad.
    """
    chosen, rejected = model(batch[0]).sum(-1), model(-batch[0]).sum(-1)
    with torch.no_grad():
        reference = model(batch[0]).sum(-1) - model(-batch[0]).sum(-1)
    return (
        -F.logsigmoid(0.3 * (chosen - rejected) - 0.1 * reference).mean() + chosen.square().mean()
    )


@habits.loss("stop-gradient")
def stop_gradient(model: nn.Module, batch: Any) -> Tensor:
    """One of two forwards is detached.

    SimSiam, BYOL: one side of each pair is detached.
    """
    first, second = model(batch[0]), model(batch[0] * 0.9)
    return F.mse_loss(first, second.detach()) + F.mse_loss(second, batch[1])


@habits.loss("forward-thrown-away")
def forward_thrown_away(model: nn.Module, batch: Any) -> Tensor:
    """A forward whose result is not used."""
    model(batch[0] * 2)  # with grad, never used
    return F.mse_loss(model(batch[0]), batch[1])


@habits.loss("rollout")
def rollout(model: nn.Module, batch: Any) -> Tensor:
    """Three forwards, each on the output of the last."""
    x, loss = batch[0], torch.zeros(())
    for _ in range(3):
        y = model(x)
        loss = loss + F.mse_loss(y, batch[1])
        x = torch.cat([y, x[:, :3]], dim=1)
    return loss / 3


class TwoHeads(Net):
    def __init__(self, block: Callable[[], nn.Module] = Residual) -> None:
        super().__init__(block)
        self.second = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.through(self.stem(x))
        return self.head(x), self.second(x)


@habits.loss("two-heads", model=TwoHeads)
def both_heads(model: nn.Module, batch: Any) -> Tensor:
    """Losses of two heads, summed."""
    first, second = model(batch[0])
    return F.mse_loss(first, batch[1]) + F.l1_loss(second, batch[1])


@habits.backward("two-heads-two-backwards", model=TwoHeads)
def head_by_head(training: Training) -> None:
    """A backward for each head."""
    kept: list[Tensor] = []

    def loss(place: Any) -> Tensor:
        x, y = training.construct.batch(place)
        first, second = training.model(x)
        kept.append(F.l1_loss(second, y))
        return F.mse_loss(first, y)

    training.mean(loss).backward(retain_graph=True)
    torch.stack(kept).mean().backward()


@habits.backward("seeded-backward")
def explicit_seed(training: Training) -> None:
    """`loss.backward(gradient)`."""
    training.loss().backward(torch.tensor(0.25))


@habits.backward("probe")
def probe_then_train(training: Training) -> None:
    """Gradients of inputs between forward and backward.

    Asks for the gradient of one activation before the backward that counts.
    """
    loss = training.loss()
    x = torch.ones(2, WIDTH, requires_grad=True)
    (slope,) = torch.autograd.grad(training.model(x).sum(), x)
    training.note(slope.norm())
    loss.backward()


@habits.backward("anomaly")
def anomaly(training: Training) -> None:
    """`set_detect_anomaly(True)`."""
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        training.loss().backward()
