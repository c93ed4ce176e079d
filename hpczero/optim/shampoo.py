"""Shampoo: matrices get an update that is preconditioned on both sides, all else Adam's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class Shampoo(Optimizer):
    """Of gradient G, (rows, columns): L <- bL + (1 - b)GG^T, R <- bR + (1 - b)G^TG, update L^(-1/4) G R^(-1/4).

    The update has the norm of Adam's on the same gradient (grafting), so learning rates of Adam serve. It goes through
    momentum; weights decay by lr times ``weight_decay``. A dimension above ``max_size``, and vectors, have no
    preconditioner; what has none at all gets Adam's update. Leading dimensions are a stack of matrices.

    For a plain model and for a zeroified one. There each parameter is updated by one rank, which has all of it.

    Source: Gupta et al., Shampoo, ICML 2018; grafting: Anil et al., arXiv 2002.09018, sec. 3.5.
    """

    hpczero_whole_parameters = True

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
        least: float = 1e-6,
        weight_decay: float = 0.01,
        every: int = 10,
        max_size: int = 4096,
    ) -> None:
        """Not collective.

        Args:
            params: parameters, or groups.
            lr: learning rate.
            betas: of the momentum; of the preconditioners and of Adam's second moment.
            eps: added to the root of Adam's second moment.
            least: smallest eigenvalue of a preconditioner, as a part of its largest.
            weight_decay: decoupled.
            every: steps between two computations of the roots.
            max_size: the longest dimension with a preconditioner.

        Raises:
            ValueError: an option is out of range.
        """
        defaults: dict[str, Any] = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "least": least,
            "weight_decay": weight_decay,
            "every": every,
            "max_size": max_size,
        }
        for name in ("lr", "eps", "least", "weight_decay"):
            if not defaults[name] >= 0:
                raise ValueError(f"{name}: got {defaults[name]!r}, expected 0 or more")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas: got {betas!r}, expected numbers from 0 to below 1")
        if every < 1:
            raise ValueError(f"every: got {every}, expected at least 1")
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:  # type: ignore[override]
        """Update parameters that have gradients; as of any optimizer of torch. Collective on a zeroified model."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_on(parameter, group)
        return loss

    def _step_on(self, parameter: nn.Parameter, group: Mapping[str, Any]) -> None:
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None, "chosen by it"
        if not state:
            state["step"] = 0
            state["momentum"], state["squares"] = (torch.zeros_like(gradient) for _ in range(2))
            for side, size in _sides(gradient, group["max_size"]):
                state[side] = gradient.new_zeros((*gradient.shape[:-2], size, size))
                state[f"{side}_root"] = gradient.new_zeros((*gradient.shape[:-2], size, size))
        first, second = group["betas"]
        state["step"] += 1
        step = state["step"]
        squares = state["squares"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        update = gradient / ((squares / (1 - second**step)).sqrt_() + group["eps"])
        if parameter.dim() >= 2:
            update = self._preconditioned(gradient, update, state, group)
        update = state["momentum"].lerp_(update, 1 - first) / (1 - first**step)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.sub_(update, alpha=group["lr"])

    def _preconditioned(
        self, gradient: Tensor, adams: Tensor, state: dict[str, Any], group: Mapping[str, Any]
    ) -> Tensor:
        """(..., rows, columns), with the norm of ``adams`` matrix by matrix."""
        second, found = group["betas"][1], gradient
        due = (state["step"] - 1) % group["every"] == 0
        sides = _sides(gradient, group["max_size"])
        for side, _ in sides:
            gram = gradient @ gradient.mT if side == "left" else gradient.mT @ gradient
            state[side].mul_(second).add_(gram, alpha=1 - second)
            if due:
                state[f"{side}_root"].copy_(
                    _inverse_root(state[side], 2 * len(sides), group["least"])
                )
            root = state[f"{side}_root"]
            found = root @ found if side == "left" else found @ root
        if not sides:
            return adams
        norms = [torch.linalg.matrix_norm(each, keepdim=True) for each in (adams, found)]
        grafted: Tensor = found * (norms[0] / norms[1].clamp(min=torch.finfo(found.dtype).tiny))
        return grafted


def _sides(matrix: Tensor, limit: int) -> list[tuple[str, int]]:
    """Which sides of a matrix have a preconditioner, and their sizes."""
    if matrix.dim() < 2:
        return []
    sides = (("left", matrix.shape[-2]), ("right", matrix.shape[-1]))
    return [(side, size) for side, size in sides if size <= limit]


def _inverse_root(matrices: Tensor, power: int, least: float) -> Tensor:
    """(..., n, n): the power -1/``power`` of symmetric matrices; values below ``least`` of the largest are that."""
    values, vectors = torch.linalg.eigh(matrices)
    tiny = torch.finfo(values.dtype).tiny
    values = values.clamp(min=0).maximum((least * values[..., -1:]).clamp(min=tiny))
    root: Tensor = (vectors * values.pow(-1 / power).unsqueeze(-2)) @ vectors.mT
    return root
