"""What activations pass through where a layer is cut over ranks: an exchange forward, and its adjoint backward.

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
4.2.2; Jacobs et al., DeepSpeed Ulysses, arXiv 2309.14509, sec. 3.2.
"""

from __future__ import annotations

import enum
import fnmatch
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils import _pytree
from typing_extensions import override

from hpczero.comm.sums import Sums
from hpczero.errors import StepError
from hpczero.plan.placement import part_of
from hpczero.zero.calls.ways import untraced

# Rules: which layers of a model are cut over tensor parallel ranks, and what stands between them.
#
# A rule names every module that holds parameters. What it does not name is refused, because a layer that works on a
# part of the features without anybody's knowledge would be silently wrong.
#
# Patterns are names of modules with ``*`` for any text without a dot: ``blocks.*.attention.qkv``.


@dataclass(frozen=True)
class Split:
    """How the weight of a layer is cut.

    Attributes:
        dim: 0 cuts the outputs of a linear layer or the ids of an embedding; 1 the inputs of a linear layer.
        strips: equal ranges of ``dim`` that are cut each by itself: q, k and v in one weight are three.
        grain: elements of ``dim`` that stay together: the size of a head.
        entered: whether the layer's input has been entered for several layers together (``Rule.entries``).
        joined: whether the outputs are gathered: every rank has all of them.
        all_tokens: whether it stands where all ranks have all tokens, under sequence parallelism too: before
            ``Rule.cut_before`` or behind ``Rule.join_after``.
    """

    dim: int
    strips: int = 1
    grain: int = 1
    entered: bool = False
    joined: bool = False
    all_tokens: bool = False


class Kept(enum.Enum):
    """Where a layer stands that every rank keeps whole. It decides whether ranks have parts of its gradient."""

    STREAM = "between cut layers: under sequence parallelism it sees own tokens, and gradients are partial sums"
    ALL_TOKENS = (
        "where all ranks have all tokens, always: before Rule.cut_before, behind Rule.join_after"
    )
    INSIDE = "within cut features, a norm of each head: gradients are partial sums"
    POSITIONS = "an embedding of positions: under sequence parallelism its output is cut along time"


@dataclass(frozen=True)
class Rule:
    """How one kind of model is cut.

    Attributes:
        layers: by pattern. Every module with parameters of its own matches exactly one.
        counts: attributes that count what is cut, heads say: ``blocks.*.attention.heads``.
        dropouts: ``nn.Dropout`` modules between cut layers, whose masks differ on ranks under sequence parallelism.
        entries: modules whose first argument enters once for several layers in it; with the argument's name.
        cut_before: modules whose first argument is cut along time, under sequence parallelism. Empty where embeddings
            do it.
        join_after: modules whose output is gathered along time, under sequence parallelism. Empty where the head does.
        check: raises PlanError for a model that the rule does not fit, before anything is changed. None: nothing.
        finish: sets what the model calls: (model, sums, sequence). None: nothing.
    """

    layers: Mapping[str, Split | Kept]
    counts: tuple[str, ...] = ()
    dropouts: tuple[str, ...] = ()
    entries: Mapping[str, str] = field(default_factory=dict)
    cut_before: tuple[str, ...] = ()
    join_after: tuple[str, ...] = ()
    check: Callable[[nn.Module], None] | None = None
    finish: Callable[[nn.Module, Sums, bool], None] | None = None

    def found(self, name: str) -> list[str]:
        """Patterns of ``layers`` that the module ``name`` matches."""
        return [pattern for pattern in self.layers if matches(pattern, name)]


def matches(pattern: str, name: str) -> bool:
    """Whether ``name`` is one of ``pattern``, part by part."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


# Dropout where activations lie in parts on tensor ranks: other masks on each, the same ones again in a recomputation.
#
# Where an activation is whole on all ranks, its mask must be the same on all: torch's default stream, seeded equally.
# Where ranks hold parts of it, the masks must differ: a stream that follows from one number of the default stream and
# the rank. Nothing is kept between calls. Whoever restores the default stream, as activation checkpointing does, gets
# the same masks again.
#
# Source: the idea of two streams is Megatron-LM's (``core/tensor_parallel/random.py``).

MOST_SEED = 2**62


@contextmanager
def own_masks(rank: int, device: torch.device) -> Iterator[None]:
    """Context: random numbers of ``rank`` alone. The default stream goes on by the same one number on all ranks.

    Not collective. Within another such context the numbers depend on both ranks.
    """
    # On the host: nothing waits for the device.
    seed = int(torch.randint(MOST_SEED, (), device="cpu"))
    own = (seed + rank * 0x9E3779B97F4A7C15) % MOST_SEED
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(own)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(own)
        yield


Attend = Callable[[Tensor, Tensor, Tensor, bool, float], Tensor]  # q, k, v, rotary, dropout


def attend_by_own_masks(
    q_BHTD: Tensor,
    k_BHTD: Tensor,
    v_BHTD: Tensor,
    rotary: bool,
    dropout: float,
    *,
    sums: Sums,
    inner: Attend,
) -> Tensor:
    """Attention ``inner`` where each rank has other heads, and drops by masks of its own."""
    if dropout == 0.0:
        return inner(q_BHTD, k_BHTD, v_BHTD, rotary, dropout)
    with own_masks(sums.rank, q_BHTD.device):
        return inner(q_BHTD, k_BHTD, v_BHTD, rotary, dropout)


class PartDropout(nn.Dropout):
    """Dropout of an activation that lies in parts on the ranks."""

    def __init__(self, plain: nn.Dropout, sums: Sums) -> None:
        """Take the place of ``plain``, which may be such a one of other ranks."""
        super().__init__(plain.p, plain.inplace)
        self.train(plain.training)
        self.ranks = (sums.rank, *getattr(plain, "ranks", ()))

    @override
    def forward(self, input: Tensor) -> Tensor:
        """Drop elements by masks of this rank's own."""
        if not self.training or self.p == 0.0:
            return super().forward(input)
        with ExitStack() as stack:
            for rank in self.ranks:
                stack.enter_context(own_masks(rank, input.device))
            return super().forward(input)


def check_streams(sums: Sums, device: torch.device) -> None:
    """Refuse to drop by streams that differ. Collective over the ranks of ``sums``.

    Raises:
        StepError: ranks that share a layer are seeded differently; on every rank.
    """
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    mine = zlib.crc32(b"".join(state.numpy().tobytes() for state in states))
    found = sums.all_gather(torch.tensor([mine], dtype=torch.int64, device="cpu"), 0).tolist()
    if len(set(found)) > 1:
        odd = next(rank for rank, other in enumerate(found) if other != found[0])
        raise StepError(
            f"rank {odd} of the tensor parallel group has another random stream than rank 0, and the model drops: "
            "activations that are the same on all of these ranks would be dropped differently. Seed torch by the index "
            "in topology.data (torch.manual_seed), and draw equally often on all of them"
        ).on_all_ranks()


class _FunctionKind(NamedTuple):
    """One of the seven.

    Attributes:
        move: (x, sums, dimensions) -> y.
        adjoint: name of the kind that backward is, with the dimensions in the other order.
    """

    move: Callable[..., Tensor]
    adjoint: str


KINDS = {
    "enter": _FunctionKind(lambda x, sums: x.view_as(x), "leave"),
    "leave": _FunctionKind(lambda x, sums: sums.all_reduce(x), "enter"),
    "gather": _FunctionKind(lambda x, sums, dim: sums.all_gather(x, dim), "scatter"),
    "scatter": _FunctionKind(lambda x, sums, dim: sums.reduce_scatter(x, dim), "gather"),
    # A copy: a view of the input could not be changed in place, and would keep all of it in memory.
    "own_part": _FunctionKind(lambda x, sums, dim: sums.own_part(x, dim).clone(), "whole"),
    "whole": _FunctionKind(lambda x, sums, dim: sums.all_gather(x, dim), "own_part"),
    "exchange": _FunctionKind(lambda x, sums, a, b: sums.all_to_all(x, a, b), "exchange"),
}


class ParallelFunction(Function):
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
        # Its own part of it is all that a rank uses: a loss of its own would not be seen.
        if ctx.kind == "whole":
            compare("gradients of outputs that all ranks have", d, ctx.sums)
        return _moved(d, ctx.sums, adjoint, ctx.dims[::-1]), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        """The same exchange of the tangent."""
        return ParallelFunction.forward(tangent, ctx.sums, ctx.kind, ctx.dims)

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
    y: Tensor = ParallelFunction.apply(x, sums, kind, dims)  # type: ignore[no-untyped-call]
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
