"""What activations pass through where a layer is cut over ranks: a pair of exchanges, one forward and one backward.

Owns: which exchange belongs to which, and derivatives of every order and mode. Must not know: layers, parameters, MPI.

    enter         identity                 | sum                         whole on all ranks -> used by each in its own way
    leave         sum                      | identity                    partial sums -> whole on all ranks
    gather        gather                   | sum, own part               own tokens -> all of them, used by each in its own way
    scatter       sum, own part            | gather                      partial sums -> own tokens
    own_part      own part                 | gather                      whole on all ranks -> own part
    whole         gather                   | own part                    own parts -> whole on all ranks
    exchange      all-to-all               | all-to-all, the other way   own tokens of all heads <-> all tokens of own heads

Each is linear, so its forward-mode derivative is itself; each backward is one of the seven, so that gradients of
gradients are right too. ``torch.func.vmap`` is refused.

Source: Shoeybi et al., Megatron-LM, arXiv 1909.08053, sec. 3 (f and g); Korthikanti et al., arXiv 2205.05198, sec.
4.2.2 (g and its conjugate); issue 19.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import Function

from hpczero.comm.sums import Sums
from hpczero.errors import StepError
from hpczero.zero.calls.untraced import untraced


class _Exchange(Function):
    """One of the seven: (x, sums, dims) -> y. Subclasses give ``moved`` and ``back``."""

    @staticmethod
    def moved(x: Tensor, sums: Sums, dims: tuple[int, ...]) -> Tensor:
        """The exchange itself. In a group of one it may return ``x``."""
        raise NotImplementedError

    @staticmethod
    def back(d: Tensor, sums: Sums, dims: tuple[int, ...]) -> Tensor:
        """Its adjoint, which can be differentiated again."""
        raise NotImplementedError

    @classmethod
    def vmap(cls, *_: Any) -> NoReturn:
        """torch.func.vmap would call an exchange with a batch that the others do not know of.

        Raises:
            StepError: always.
        """
        raise StepError(
            "a layer that is cut over tensor parallel ranks was called inside torch.func.vmap, which cannot batch "
            "exchanges between ranks; call the model on the whole batch, or use a model that was not split"
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep the ranks and dimensions."""
        ctx.sums, ctx.dims, ctx.kind = inputs[1:]


def _function(cls: type[_Exchange]) -> type[_Exchange]:
    """Give ``cls`` what torch looks for on a Function itself."""

    def forward(x: Tensor, sums: Sums, dims: tuple[int, ...], kind: object) -> Tensor:
        y = cls.moved(x, sums, dims)
        return y.view_as(x) if y is x else y

    def backward(ctx: Any, d: Tensor) -> tuple[Any, ...]:
        return cls.back(d, ctx.sums, ctx.dims), None, None, None

    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        y = cls.moved(tangent, ctx.sums, ctx.dims)
        return y.view_as(tangent) if y is tangent else y

    cls.forward = staticmethod(forward)
    cls.backward = staticmethod(backward)
    cls.jvp = staticmethod(jvp)
    return cls
