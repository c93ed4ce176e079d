# mypy: disable-error-code="override, operator, union-attr, attr-defined, index"
"""Autograd used by hand: gradients of gradients, own functions, several forwards and backwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.compat.construct import (
    GIVEN_BACK,
    WIDTH,
    Construct,
    Net,
    Residual,
    Training,
    net,
    of_net,
)

# --- gradients of gradients, and of inputs


def gradient_penalty(model: nn.Module, batch: Any) -> Tensor:
    x = batch[0].requires_grad_()
    y = model(x)
    (slope,) = torch.autograd.grad(y.square().mean(), x, create_graph=True)
    return F.mse_loss(y, batch[1]) + (slope.norm(dim=1) - 1).square().mean()


def penalty_alone(model: nn.Module, batch: Any) -> Tensor:
    x = batch[0].requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return slope.square().mean()


def saliency(model: nn.Module, batch: Any) -> Tensor:
    """The gradient of inputs weighs them, without a graph of its own."""
    x = batch[0].requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().mean(), x)
    return F.mse_loss(model(x.detach() * (1 + slope)), batch[1])


def adversarial(model: nn.Module, batch: Any) -> Tensor:
    """FGSM; its backward also reaches the parameters, as users forget."""
    x = batch[0].requires_grad_()
    (slope,) = torch.autograd.grad(F.mse_loss(model(x), batch[1]), x)
    return F.mse_loss(model((x + 0.1 * slope.sign()).detach()), batch[1])


def forces(model: nn.Module, batch: Any) -> Tensor:
    """An energy and its derivative with respect to positions, both fitted: interatomic potentials."""
    positions = batch[0].requires_grad_()
    energy = model(positions).sum()
    (force,) = torch.autograd.grad(-energy, positions, create_graph=True)
    return energy.square() * 0.01 + F.mse_loss(force[:, :3], batch[1])


def grad_of_parameters(training: Training) -> None:
    parameters = list(training.model.parameters())
    found = torch.autograd.grad(training.loss(), parameters)
    for parameter, gradient in zip(parameters, found, strict=True):
        parameter.grad = gradient


def backward_to_some(training: Training) -> None:
    training.loss().backward(inputs=list(training.model.head.parameters()))


def functional_gradient(training: Training) -> None:
    parameters = dict(training.model.named_parameters())

    def loss(values: Any) -> Tensor:
        x = torch.ones(4, WIDTH)
        return torch.func.functional_call(training.model, values, (x,)).square().mean()

    found = torch.func.grad(loss)(parameters)
    for name, parameter in parameters.items():
        parameter.grad = found[name]


def forward_mode(training: Training) -> None:
    x = torch.ones(4, WIDTH)
    tangent = torch.func.jvp(training.model, (x,), (x,))[1]
    tangent.square().mean().backward()


class VmapsInside(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.vmap(self.branch)(x)


class Ensemble(Residual):
    """Its own weights, stacked twice, called by functional_call under vmap."""

    def forward(self, x: Tensor) -> Tensor:
        stacked = torch.stack([self.inner.weight, self.inner.weight * 0.5])
        run = torch.vmap(lambda w: torch.func.functional_call(self.inner, {"weight": w}, (x,)))
        return x + self.outer(torch.tanh(run(stacked)).mean(0))


class CallsFunctionally(Residual):
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


class OwnFunction(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * Squares.apply(x, self.inner.weight[0])


class ReversesGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


class DomainAdversarial(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(ReversesGradient.apply(x))


class StraightThrough(Residual):
    """A quantised code with the gradient of the other."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + (torch.round(y) - y).detach()


# --- several forwards, several backwards


def siamese(model: nn.Module, batch: Any) -> Tensor:
    first, second = model(batch[0]), model(batch[0].flip(0))
    return F.cosine_embedding_loss(first, second, torch.ones(4)) + F.mse_loss(first, batch[1])


def contrastive(model: nn.Module, batch: Any) -> Tensor:
    first, second = F.normalize(model(batch[0])), F.normalize(model(batch[0] + 0.1))
    return F.cross_entropy(first @ second.T / 0.5, torch.arange(4))


def preference(model: nn.Module, batch: Any) -> Tensor:
    """DPO: chosen and rejected through one model; the reference under no_grad."""
    chosen, rejected = model(batch[0]).sum(-1), model(-batch[0]).sum(-1)
    with torch.no_grad():
        reference = model(batch[0]).sum(-1) - model(-batch[0]).sum(-1)
    return (
        -F.logsigmoid(0.3 * (chosen - rejected) - 0.1 * reference).mean() + chosen.square().mean()
    )


def stop_gradient(model: nn.Module, batch: Any) -> Tensor:
    """SimSiam, BYOL: one side of each pair is detached."""
    first, second = model(batch[0]), model(batch[0] * 0.9)
    return F.mse_loss(first, second.detach()) + F.mse_loss(second, batch[1])


def forward_thrown_away(model: nn.Module, batch: Any) -> Tensor:
    model(batch[0] * 2)  # with grad, never used
    return F.mse_loss(model(batch[0]), batch[1])


def rollout(model: nn.Module, batch: Any) -> Tensor:
    """Three steps in time through one model."""
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


def both_heads(model: nn.Module, batch: Any) -> Tensor:
    first, second = model(batch[0])
    return F.mse_loss(first, batch[1]) + F.l1_loss(second, batch[1])


def head_by_head(training: Training) -> None:
    """One forward, a backward for each head."""
    kept: list[Tensor] = []

    def loss(place: Any) -> Tensor:
        x, y = training.construct.batch(place)
        first, second = training.model(x)
        kept.append(F.l1_loss(second, y))
        return F.mse_loss(first, y)

    training.mean(loss).backward(retain_graph=True)
    torch.stack(kept).mean().backward()


def explicit_seed(training: Training) -> None:
    training.loss().backward(torch.tensor(0.25))


def probe_then_train(training: Training) -> None:
    """Asks for the gradient of one activation before the backward that counts."""
    loss = training.loss()
    x = torch.ones(2, WIDTH, requires_grad=True)
    (slope,) = torch.autograd.grad(training.model(x).sum(), x)
    training.note(slope.norm())
    loss.backward()


def anomaly(training: Training) -> None:
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        training.loss().backward()


CONSTRUCTS = [
    of_net("gradient-penalty", "a gradient penalty (`create_graph=True`)", loss=gradient_penalty),
    of_net(
        "penalty-alone", "a loss that is a gradient's norm and nothing else", loss=penalty_alone
    ),
    of_net("forces", "energy and forces, both fitted (double backward)", loss=forces),
    of_net("saliency", "`torch.autograd.grad` with respect to inputs", loss=saliency),
    of_net("adversarial", "adversarial examples (FGSM)", loss=adversarial),
    of_net(
        "grad-of-parameters",
        "`torch.autograd.grad(loss, model.parameters())`",
        backward=grad_of_parameters,
        refused=f"was assigned a tensor|{GIVEN_BACK}",
        remark="`loss.backward()`",
    ),
    of_net("backward-inputs", "`loss.backward(inputs=...)`", backward=backward_to_some),
    of_net(
        "func-grad",
        "`torch.func.grad` over `functional_call` of the model",
        backward=functional_gradient,
        refused="inside a transform of torch.func (Grad)",
        remark="`loss.backward()`",
    ),
    of_net(
        "func-jvp",
        "`torch.func.jvp` of the model",
        backward=forward_mode,
        refused="inside a transform of torch.func (Jvp)",
        remark="`torch.autograd.functional`",
    ),
    Construct("vmap-inside", "`torch.vmap` inside a block", net(VmapsInside)),
    Construct(
        "functional-call-inside",
        "`functional_call` of a submodule inside a block",
        net(CallsFunctionally),
    ),
    Construct("ensemble", "`vmap` over stacked weights inside a block", net(Ensemble)),
    Construct(
        "own-function", "an own `autograd.Function` that saves a parameter", net(OwnFunction)
    ),
    Construct("gradient-reversal", "gradient reversal", net(DomainAdversarial)),
    Construct("straight-through", "a straight-through estimator", net(StraightThrough)),
    of_net("siamese", "two forwards, one backward", loss=siamese),
    of_net("contrastive", "a contrastive loss over two views", loss=contrastive),
    of_net(
        "preference",
        "DPO: two forwards with and two without gradient",
        loss=preference,
        tolerance=3e-6,
    ),
    of_net("stop-gradient", "one of two forwards is detached", loss=stop_gradient),
    of_net("forward-thrown-away", "a forward whose result is not used", loss=forward_thrown_away),
    of_net("rollout", "three forwards, each on the output of the last", loss=rollout),
    Construct("two-heads", "losses of two heads, summed", net(kind=TwoHeads), loss=both_heads),
    Construct(
        "two-heads-two-backwards",
        "a backward for each head",
        net(kind=TwoHeads),
        backward=head_by_head,
    ),
    of_net("seeded-backward", "`loss.backward(gradient)`", backward=explicit_seed),
    of_net("probe", "gradients of inputs between forward and backward", backward=probe_then_train),
    of_net("anomaly", "`set_detect_anomaly(True)`", backward=anomaly),
]
