"""Muon: matrices get an orthogonal update, all else AdamW's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from hpczero.plan.placement import ModelPart, part_of

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalized(
    matrices: Tensor,
    *,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    steps: int = 5,
    eps: float = 1e-7,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """About ``U V^T`` of each matrix ``U S V^T``, by X <- aX + (b XX^T + c (XX^T)^2) X.

    Args:
        matrices: (..., rows, columns); leading dimensions are a stack.
        coefficients: a, b, c. With those of Muon singular values end between about 0.7 and 1.2.
        steps: of the iteration.
        eps: least norm that a matrix is divided by.
        dtype: of the iteration. torch.optim.Muon has bfloat16.

    Returns:
        (..., rows, columns) in ``dtype``.

    Source: Jordan et al., Muon: an optimizer for hidden layers in neural networks, 2024.
    """
    if matrices.dim() > 2:
        # One by one, so that a matrix has the same bits in a stack and by itself, whoever owns it.
        each = [
            orthogonalized(matrix, coefficients=coefficients, steps=steps, eps=eps, dtype=dtype)
            for matrix in matrices
        ]
        return torch.stack(each) if each else matrices.to(dtype)
    a, b, c = coefficients
    x = matrices.to(dtype)
    tall = x.size(0) > x.size(1)
    x = x.T if tall else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


Rule = Literal["muon", "adamw"]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Options of a group that are one of a few.
_KNOWN: dict[str, tuple[Any, ...]] = {
    "rule": ("muon", "adamw"),
    "ns_dtype": tuple(_DTYPES),
    "adjust_lr_fn": (None, "original", "match_rms_adamw"),
}


class MuonDirections:
    """The rule of matrices in parts, of which one needs whole matrices: what a zeroified model sends between ranks.

    Attributes:
        state: the name of the momentum.
    """

    state = "momentum_buffer"

    def dtype(self, group: Mapping[str, Any], /) -> torch.dtype:
        """Of the iteration."""
        return _DTYPES[group["ns_dtype"]]

    def advance(self, state: Tensor, gradient: Tensor, group: Mapping[str, Any], /) -> None:
        """Change the momentum of some elements."""
        state.lerp_(gradient, 1 - group["momentum"])

    def wanted(self, state: Tensor, gradient: Tensor, group: Mapping[str, Any], /) -> Tensor:
        """What is orthogonalized, of some elements."""
        return gradient.lerp(state, group["momentum"]) if group["nesterov"] else state

    def direction(self, wanted: Tensor, group: Mapping[str, Any], /) -> Tensor:
        """Of whole matrices."""
        return orthogonalized(
            wanted,
            coefficients=group["ns_coefficients"],
            steps=group["ns_steps"],
            dtype=self.dtype(group),
        )

    def apply(
        self, values: Tensor, direction: Tensor, shape: Sequence[int], group: Mapping[str, Any], /
    ) -> None:
        """Change some values of a parameter of this shape."""
        lr = float(group["lr"])
        values.mul_(1 - lr * group["weight_decay"])
        values.add_(direction, alpha=-lr * _factor(shape, group["adjust_lr_fn"]))


class Muon(Optimizer):
    """As torch.optim.Muon, with stacks of matrices, a second rule for all else, and the iteration in fp32.

    A group has a rule. ``muon``: of gradient g, momentum B <- mB + (1 - m)g, and U = (1 - m)g + mB (``nesterov``) or B,
    the update is lr times about U's nearest orthogonal matrix; weights decay by lr times ``weight_decay``. ``adamw``:
    that of torch.optim.AdamW, element by element.

    For a plain model and for a zeroified one, where each matrix is updated by one rank, and AdamW's groups in shards.

    Source: Jordan et al., Muon, 2024; Liu et al., Muon is scalable for LLM training, arXiv 2502.16982, sec. 2.2.
    """

    hpczero_directions = MuonDirections()

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        *,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        ns_steps: int = 5,
        ns_dtype: str = "float32",
        adjust_lr_fn: str | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        rule: Rule = "muon",
    ) -> None:
        """Not collective.

        Args:
            params: parameters of 2 or more dimensions, the leading ones being a stack; or groups. A group with
                ``rule="adamw"`` takes any. ``Muon.of(model)`` makes the groups.
            lr: learning rate.
            weight_decay: decoupled, of both rules.
            momentum: of matrices.
            nesterov: see the class.
            ns_coefficients: of the iteration.
            ns_steps: of the iteration, below 100.
            ns_dtype: ``float32`` or ``bfloat16``, that of torch.optim.Muon.
            adjust_lr_fn: None or ``original``: lr times sqrt(max(1, rows / columns)); ``match_rms_adamw``: lr times
                0.2 sqrt(max(rows, columns)), for learning rates of AdamW.
            betas: of AdamW.
            eps: of AdamW.
            rule: of groups that have none.

        Raises:
            ValueError: an option, or a parameter of less than 2 dimensions in a group of matrices.
        """
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "ns_steps": ns_steps,
            "ns_dtype": ns_dtype,
            "adjust_lr_fn": adjust_lr_fn,
            "betas": betas,
            "eps": eps,
            "rule": rule,
        }
        super().__init__(params, defaults)
        for number, group in enumerate(self.param_groups):
            _check(number, group)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        lr: float = 1e-3,
        *,
        adamw_lr: float = 3e-4,
        adamw: Callable[[str, nn.Parameter], bool] | None = None,
        **options: Any,
    ) -> Muon:
        """Over the trainable parameters of ``model``: matrices, and a group for AdamW.

        AdamW gets vectors, embeddings, convolutions, and what else ``adamw`` says: of a language model the head, if it
        is not tied to the embedding. The head of a last pipeline stage that is tied is one.

        Args:
            model: not yet zeroified.
            lr: of matrices.
            adamw_lr: of the others.
            adamw: whether AdamW gets a parameter, by name and value, too.
            options: of the constructor.
        """
        apart = (nn.Embedding, nn.EmbeddingBag, nn.modules.conv._ConvNd)
        others = {
            id(p) for m in model.modules() if isinstance(m, apart) for p in m.parameters(False)
        }
        part = part_of(model) or ModelPart(())
        tied = {name for name, p in part.placements.items() if p.tied and not part.first}
        matrices: list[nn.Parameter] = []
        rest: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                other = parameter.dim() < 2 or id(parameter) in others or name in tied
                other = other or (adamw is not None and adamw(name, parameter))
                (rest if other else matrices).append(parameter)
        groups: list[dict[str, Any]] = [
            {"params": matrices, "rule": "muon"},
            {"params": rest, "rule": "adamw", "lr": adamw_lr},
        ]
        return cls([group for group in groups if group["params"]], lr, **options)

    @staticmethod
    def hpczero_whole_parameters(group: Mapping[str, Any]) -> bool:
        """Whether a group's parameters are updated whole; ``zeroify`` asks."""
        return bool(group["rule"] == "muon")

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:  # type: ignore[override]
        """Update parameters that have gradients; as of any optimizer of torch. Collective on a zeroified model."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if group["rule"] == "muon":
                for parameter in parameters:
                    self._step_on(parameter, group)
            elif parameters:
                self._step_elementwise(parameters, group)
        return loss

    def _step_on(self, parameter: nn.Parameter, group: Mapping[str, Any]) -> None:
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None, "chosen by it"
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer = state["momentum_buffer"]
        rule = self.hpczero_directions
        rule.advance(buffer, gradient, group)
        direction = rule.direction(rule.wanted(buffer, gradient, group), group)
        rule.apply(parameter, direction, parameter.shape, group)

    def _step_elementwise(self, parameters: list[nn.Parameter], group: Mapping[str, Any]) -> None:
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        states = [self.state[parameter] for parameter in parameters]
        beta1, beta2 = group["betas"]
        adamw(
            [*parameters],
            [p.grad for p in parameters if p.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def _factor(shape: Sequence[int], adjustment: str | None) -> float:
    rows, columns = shape[-2:]
    if adjustment == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


def _check(number: int, group: Mapping[str, Any]) -> None:
    """Refuse options that would do something else than they say.

    Raises:
        ValueError: names the group.
    """
    for name, known in _KNOWN.items():
        if group[name] not in known:
            raise ValueError(
                f"{name} of group {number}: got {group[name]!r}, expected one of {known}"
            )
    if not 0 <= group["ns_steps"] < 100:
        raise ValueError(f"ns_steps of group {number}: got {group['ns_steps']}, expected 0 to 99")
    for name in ("lr", "momentum", "weight_decay", "eps"):
        if not group[name] >= 0:
            raise ValueError(f"{name} of group {number}: got {group[name]!r}, expected 0 or more")
    if not all(0 <= beta < 1 for beta in group["betas"]):
        raise ValueError(
            f"betas of group {number}: got {group['betas']!r}, expected numbers from 0 to below 1"
        )
    small = [tuple(p.shape) for p in group["params"] if p.dim() < 2]
    if group["rule"] == "muon" and small:
        raise ValueError(
            f"group {number} of Muon: got a parameter of shape {small[0]}, expected matrices or stacks of them; put it "
            "into a group with rule='adamw', or let Muon.of(model) make the groups"
        )
