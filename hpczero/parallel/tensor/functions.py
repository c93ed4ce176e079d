"""What activations pass through where a layer is cut over ranks: an exchange forward, and its adjoint backward.

Owns: which exchange belongs to which, and derivatives of every order and mode. Must not know: layers, parameters, MPI.

    enter      identity       | sum             whole on all ranks -> used by each in its own way
    leave      sum            | identity        partial sums -> whole on all ranks
    gather     gather         | sum, own part   own tokens -> all of them, used by each in its own way
    scatter    sum, own part  | gather          partial sums -> own tokens
    own_part   own part       | gather          whole on all ranks -> own part
    whole      gather         | own part        own parts -> whole on all ranks
    exchange   all-to-all     | the other way   own tokens of all heads <-> all tokens of own heads

Each is linear, so its forward derivative is itself. Each adjoint is one of the seven, so gradients of gradients are
right too. All are collective over the ranks of ``sums`` where a row says sum, gather or all-to-all.

Source: Shoeybi et al., Megatron-LM, arXiv 1909.08053, sec. 3 (f and g); Korthikanti et al., arXiv 2205.05198, sec.
4.2.2; Jacobs et al., DeepSpeed Ulysses, arXiv 2309.14509, sec. 3.2; issue 19.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils import _pytree

from hpczero.comm.sums import Sums
from hpczero.errors import StepError
from hpczero.plan.placement import part_of
from hpczero.zero.calls.ways import untraced


class _Kind(NamedTuple):
    """One of the seven.

    Attributes:
        move: (x, sums, dimensions) -> y.
        adjoint: name of the kind that backward is, with the dimensions in the other order.
    """

    move: Callable[..., Tensor]
    adjoint: str


KINDS = {
    "enter": _Kind(lambda x, sums: x.view_as(x), "leave"),
    "leave": _Kind(lambda x, sums: sums.all_reduce(x), "enter"),
    "gather": _Kind(lambda x, sums, dim: sums.all_gather(x, dim), "scatter"),
    "scatter": _Kind(lambda x, sums, dim: sums.reduce_scatter(x, dim), "gather"),
    # A copy: a view of the input could not be changed in place, and would keep all of it in memory.
    "own_part": _Kind(lambda x, sums, dim: sums.own_part(x, dim).clone(), "whole"),
    "whole": _Kind(lambda x, sums, dim: sums.all_gather(x, dim), "own_part"),
    "exchange": _Kind(lambda x, sums, a, b: sums.all_to_all(x, a, b), "exchange"),
}


class Exchange(Function):
    """(x, sums, kind, dimensions) -> y, for a kind of ``KINDS``."""

    @staticmethod
    def forward(x: Tensor, sums: Sums, kind: str, dims: tuple[int, ...]) -> Tensor:
        """Move ``x``. In a group of one some verbs return it."""
        y = KINDS[kind].move(x, sums, *dims)
        return y.view_as(x) if y is x else y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep all but the tensor."""
        _, ctx.sums, ctx.kind, ctx.dims = inputs

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None, None, None]:
        """The adjoint, which can be differentiated itself."""
        adjoint = KINDS[ctx.kind].adjoint
        if (
            ctx.kind == "whole"
        ):  # its own part of it is all that a rank uses: a loss of its own would not be seen
            compare("gradients of outputs that all ranks have", d, ctx.sums)
        return _moved(d, ctx.sums, adjoint, ctx.dims[::-1]), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        """The same exchange of the tangent."""
        return Exchange.forward(tangent, ctx.sums, ctx.kind, ctx.dims)

    @staticmethod
    def vmap(*_: Any) -> NoReturn:
        """Refuse: the other ranks would not know of the batch.

        Raises:
            StepError: always.
        """
        raise StepError(
            "a layer that is cut over ranks was called inside torch.func.vmap (jacrev and hessian use it too), which "
            "cannot batch exchanges between ranks; call the model on the whole batch, or use one that was not split"
        )


def _moved(x: Tensor, sums: Sums, kind: str, dims: tuple[int, ...]) -> Tensor:
    y: Tensor = Exchange.apply(x, sums, kind, dims)  # type: ignore[no-untyped-call]
    return y


@untraced
def enter(x: Tensor, sums: Sums) -> Tensor:
    """``x`` as it is; backward sums its gradients, which are partial on each rank."""
    return _moved(x, sums, "enter", ())


@untraced
def leave(x: Tensor, sums: Sums) -> Tensor:
    """The sum of all ranks' ``x``, the same on all. Collective."""
    return _moved(x, sums, "leave", ())


@untraced
def gather(x: Tensor, sums: Sums, dim: int) -> Tensor:
    """All ranks' ``x`` along ``dim``, of which each rank makes something else. Collective."""
    return _moved(x, sums, "gather", (dim,))


@untraced
def scatter(x: Tensor, sums: Sums, dim: int) -> Tensor:
    """Own part along ``dim`` of the sum of all ranks' ``x``. Collective."""
    return _moved(x, sums, "scatter", (dim,))


@untraced
def own_part(x: Tensor, sums: Sums, dim: int) -> Tensor:
    """Own part along ``dim`` of ``x``, which is the same on all ranks; backward is collective."""
    return _moved(x, sums, "own_part", (dim,))


@untraced
def whole(x: Tensor, sums: Sums, dim: int) -> Tensor:
    """All ranks' ``x`` along ``dim``, of which all make the same. Collective."""
    return _moved(x, sums, "whole", (dim,))


@untraced
def exchange(x: Tensor, sums: Sums, scatter_dim: int, gather_dim: int) -> Tensor:
    """Own part along one dimension of all ranks' ``x`` along another (``Sums.all_to_all``). Collective."""
    return _moved(x, sums, "exchange", (scatter_dim, gather_dim))


@untraced
def compare(what: str, x: Tensor, sums: Sums) -> None:
    """Have the next exchange find out whether all ranks have the same ``x`` (``Sums.compare``)."""
    if not torch._C._are_functorch_transforms_active():  # their tensors have no memory of their own
        sums.compare(what, x)


# Inputs of a model whose layers are cut: they must be the same on all ranks that share the layers.
#
# Nothing else would tell. Every rank adds its part of each product, and a sum over parts of different samples has the
# right shape. What a rank was given travels as a checksum with its first exchange, which costs no message. Tensors on a
# device are not looked at: they would have to be waited for.


@untraced
def compare_inputs(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, sums: Sums
) -> None:
    """A forward pre-hook of the model; the next exchange raises CommError on all ranks where inputs differ.

    A pipeline stage gets activations, which under sequence parallelism are those of own tokens. Of its inputs only what
    is not floating point is compared: tokens, targets, masks.
    """
    part = part_of(module)
    is_whole = part is None or (part.first and part.last)
    for x in _pytree.tree_leaves((args, kwargs)):
        if _is_plain(x) and (is_whole or not x.is_floating_point()):
            compare("inputs of the model", x, sums)


def _is_plain(x: object) -> bool:
    plain = type(x) in (Tensor, nn.Parameter)
    return plain and x.layout is torch.strided and x.device.type == "cpu"  # type: ignore[attr-defined]
