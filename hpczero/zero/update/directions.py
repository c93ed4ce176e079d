"""Directions: updates of whole parameters of which only one tensor goes to the owner and one comes back.

Owns: the messages of such a parameter, and torch's Muon as such a rule. Must not know: who owns which, units.

    part    momentum of its elements -> what is wanted -> owner
    owner   wanted of all parts -> direction, of the whole
    part    direction of its elements -> values; momentum is kept

Momentum stays in shards, and the owner never sees values. What is sent has the dtype in which the rule computes
directions. Every operation but the direction is element by element, so the bits are those of a step on the whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from hpczero.errors import StepError
from hpczero.zero.units.guard import own_gradient
from hpczero.zero.units.unit import Unit
from hpczero.zero.update.parts import unhooked, written_in
from hpczero.zero.update.whole_states import Job, States, Whole, state_of

_muon: Any = getattr(torch.optim, "_muon", None)  # from torch 2.9
ATTRIBUTE = "hpczero_directions"
PARTS = ("muon", "_single_tensor_muon", "_zeropower_via_newtonschulz", "_adjust_lr")  # of torch's
Group = Mapping[str, Any]


class Directions(Protocol):
    """An update in three parts, of which one needs whole parameters.

    Attributes:
        state: the name of the one state, as large as the parameter and zero at first.
    """

    state: str

    def dtype(self, group: Group, /) -> torch.dtype:
        """Of what is wanted and of directions."""
        ...

    def advance(self, state: Tensor, gradient: Tensor, group: Group, /) -> None:
        """Change the state of some elements by their gradient."""
        ...

    def wanted(self, state: Tensor, gradient: Tensor, group: Group, /) -> Tensor:
        """What a direction is made of, of some elements."""
        ...

    def direction(self, wanted: Tensor, group: Group, /) -> Tensor:
        """In the shape of the parameter, which ``wanted`` has; it may be used up."""
        ...

    def apply(
        self, values: Tensor, direction: Tensor, shape: Sequence[int], group: Group, /
    ) -> None:
        """Change the values of some elements of a parameter of this shape."""
        ...


class TorchsMuon:
    """torch.optim.Muon, by torch's own functions."""

    state = "momentum_buffer"

    def dtype(self, group: Group, /) -> torch.dtype:
        """See ``Directions``; the iteration begins with this rounding."""
        return torch.bfloat16

    def advance(self, state: Tensor, gradient: Tensor, group: Group, /) -> None:
        """See ``Directions``."""
        state.lerp_(gradient, 1 - group["momentum"])

    def wanted(self, state: Tensor, gradient: Tensor, group: Group, /) -> Tensor:
        """See ``Directions``."""
        return gradient.lerp(state, group["momentum"]) if group["nesterov"] else state

    def direction(self, wanted: Tensor, group: Group, /) -> Tensor:
        """See ``Directions``."""
        found: Tensor = _muon._zeropower_via_newtonschulz(
            wanted, group["ns_coefficients"], group["ns_steps"], group["eps"]
        )
        return found

    def apply(
        self, values: Tensor, direction: Tensor, shape: Sequence[int], group: Group, /
    ) -> None:
        """See ``Directions``."""
        given = group["lr"]
        given = given.squeeze() if isinstance(given, Tensor) else given  # of one element
        lr = _muon._adjust_lr(cast("float", given), group["adjust_lr_fn"], torch.Size(shape))
        values.mul_(1 - given * group["weight_decay"])
        values.add_(direction, alpha=-lr)


def directions_of(optimizer: Optimizer) -> Directions | None:
    """The rule of an optimizer whose step is one; None where its own step has to be called."""
    kind = type(optimizer)
    method = unhooked(kind.step)
    if method is None:
        return None
    if _muon is not None and kind is _muon.Muon:
        parts = [method, *(getattr(_muon, name, None) for name in PARTS)]
        own = all(part is not None and written_in(part, _muon.__name__) for part in parts)
        return TorchsMuon() if own else None
    own = written_in(method, kind.__module__)
    found: Directions | None = vars(kind).get(ATTRIBUTE)  # of that very class, not of its base
    return found if own else None


class DirectionJob(Job):
    """The update of one parameter by a rule of directions."""

    by_optimizer = False

    def __init__(
        self,
        unit: Unit,
        position: int,
        group: int,
        *,
        replicated: bool,
        optimizer: Optimizer,
        rule: Directions,
    ) -> None:
        """Not collective.

        Args:
            unit: see ``Job``.
            position: see ``Job``.
            group: see ``Job``.
            replicated: see ``Job``.
            optimizer: whose group it is.
            rule: of the optimizer.
        """
        super().__init__(unit, position, group, replicated=replicated)
        self._optimizer, self._rule = optimizer, rule

    @property
    def _options(self) -> Group:
        found: Group = self._optimizer.param_groups[self.group]
        return found

    @override
    def _said(self, shard: nn.Parameter, part: range, states: States) -> Tensor:
        gradient = own_gradient(shard)
        if gradient is None:
            return torch.zeros(1, device=shard.device, dtype=torch.float32)
        state = state_of(states, shard).get(self._rule.state)
        new = torch.zeros_like(gradient) if state is None else state.detach().reshape(-1).clone()
        if new.shape != gradient.shape:
            raise StepError(
                f"optimizer.state[...][{self._rule.state!r}] of a part of {self.name!r} has {new.numel():,} elements, "
                f"expected the {gradient.numel():,} of the part"
            )
        group = self._options
        self._rule.advance(new, gradient, group)
        wanted = self._rule.wanted(new, gradient, group).to(self._rule.dtype(group))
        return torch.cat([gradient.new_ones(1), _words(wanted)])

    @override
    def assemble(self, said: Sequence[tuple[range, Tensor]], states: States) -> Whole | None:
        """The direction from what was said of all parts; None where there is no gradient. Otherwise as of ``Job``."""
        if not self._present(said):
            return None
        group = self._options
        dtype = self._rule.dtype(group)
        wanted = torch.empty(self.numel, dtype=dtype, device=self.parts[0][0].device)
        for part, each in said:
            assert len(each) == 1 + _count(len(part), dtype), "options are agreed on before a step"
            wanted[part.start : part.stop].copy_(each[1:].view(dtype)[: len(part)])
        direction = self._rule.direction(wanted.view(self.shape), group)
        return Whole(nn.Parameter(direction.to(dtype), requires_grad=False))

    @override
    def answers(self, whole: Whole | None) -> dict[int, list[Tensor]]:
        """As of ``Job``: a mark, and directions."""
        if whole is None:
            return {
                rank: [torch.empty(0, dtype=torch.float32, device="cpu")] * 2
                for rank in self.holders
            }
        flat = whole.parameter.detach().reshape(-1)
        found: dict[int, list[Tensor]] = {}
        for rank in self.holders:
            if found and self._replicated:  # all get the same
                found[rank] = next(iter(found.values()))
            else:
                pieces = [_words(flat[p.start : p.stop]).cpu() for p in self.parts_of(rank)]
                found[rank] = [torch.ones(1, dtype=torch.float32, device="cpu"), torch.cat(pieces)]
        return found

    @override
    def take(self, answer: Sequence[Tensor], states: States) -> None:
        """Move values along the direction, and keep the new state."""
        mark, new = answer
        if not len(mark):
            return
        group, rule = self._options, self._rule
        dtype = rule.dtype(group)
        lengths = [_count(len(part), dtype) for _, part in self.parts]
        for (shard, part), each in zip(self.parts, new.split_with_sizes(lengths), strict=True):
            gradient = own_gradient(shard)
            assert gradient is not None, "it was said"
            kept = states.setdefault(shard, {})
            if rule.state not in kept:
                kept[rule.state] = torch.zeros_like(gradient)
            with torch.no_grad():
                rule.advance(kept[rule.state], gradient, group)
                direction = each.view(dtype)[: len(part)].to(shard.device)
                rule.apply(shard, direction, self.shape, group)


def _count(numel: int, dtype: torch.dtype) -> int:
    """Numbers of fp32 with as many bytes, rounded up."""
    return -(-numel * dtype.itemsize // 4)


def _words(values: Tensor) -> Tensor:
    """The bytes of (n,) ``values`` as numbers of fp32, padded."""
    if values.dtype == torch.float32:
        return values
    room = _count(len(values), values.dtype) * 4 // values.dtype.itemsize
    padded = values.new_zeros(room)
    padded[: len(values)].copy_(values)
    return padded.view(torch.float32)
