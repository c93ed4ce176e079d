"""Cross entropy over logits whose vocabulary lies in parts on the ranks.

    top    = largest logit of a row                  | maximum over the ranks
    total  = sum of exp(logit - top)                 | sum over the ranks, together with
    picked = logit of the target - top               | ... which lies on one of them
    loss   = log(total) - picked

Two small exchanges carry three numbers for each row. Nothing of the size of the logits is kept but the logits, and made
but their gradient. Where torch asks for more than a gradient (gradients of gradients, torch.func, forward mode), the
same loss is composed of torch's own operations, with more memory.

Source: Shoeybi et al., Megatron-LM, arXiv 1909.08053, sec. 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from hpczero.comm.sums import Sums
from hpczero.parallel.tensor.functions import compare, leave
from hpczero.zero.calls.ways import untraced

# Logits per piece, on the host and on a device, as in models/gpt.py.
PIECE_NUMEL, DEVICE_PIECE_NUMEL = 2**24, 2**28


class Words(NamedTuple):
    """Which part of the vocabulary a rank has.

    Attributes:
        first: its first token id.
        held: its ids; further columns of its logits are padding.
        size: ids of the whole vocabulary.
    """

    first: int
    held: int
    size: int


@untraced
def split_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    sums: Sums,
    words: Words,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """``F.cross_entropy`` of logits that lie in parts. Collective over the ranks of ``sums``.

    Args:
        logits: (N, own columns) fp32, bf16 or fp16; columns from ``words.held`` on are left out.
        targets: (N,) int64 ids of the whole vocabulary, the same on all ranks.
        sums: over the ranks that have parts.
        words: this rank's part.
        ignore_index: rows with this target do not count.
        reduction: "mean" over the rows that count, or "sum".

    Returns:
        fp32 scalar, the same bits on every rank.

    Raises:
        IndexError: a target is not in the vocabulary; on the host alone, as torch.
        CommError: ranks were given other targets; on the host alone, and on every rank.
        ValueError: shapes or the reduction do not fit.
    """
    if logits.ndim != 2 or targets.shape != logits.shape[:1] or reduction not in ("mean", "sum"):
        raise ValueError(
            f"split_cross_entropy: got logits {tuple(logits.shape)}, targets {tuple(targets.shape)}, reduction "
            f"{reduction!r}; expected (N, columns), (N,), 'mean' or 'sum'"
        )
    counts = targets != ignore_index
    wrong = counts & ((targets < 0) | (targets >= words.size))
    if targets.device.type == "cpu":
        if wrong.any():
            raise IndexError(f"Target {int(targets[wrong][0])} is out of bounds: {words.size} ids")
    else:
        torch._assert_async(~wrong.any(), "a target is out of bounds")
    compare("targets", targets, sums)
    mine = counts & (targets >= words.first) & (targets < words.first + words.held)
    local = torch.where(mine, targets - words.first, 0)
    further = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    total: Tensor = (
        _composed(logits, local, mine, counts, sums, words)
        if further
        else _SplitLoss.apply(logits, local, mine, counts, sums, words)  # type: ignore[no-untyped-call]
    )
    return total / counts.sum() if reduction == "mean" else total


class _Top(Function):
    """The largest logit of each row over all ranks, in fp32. The loss does not depend on it: it has no derivative."""

    @staticmethod
    def forward(own: Tensor, sums: Sums) -> Tensor:
        if own.shape[1]:
            return sums.maximum(own.amax(1).float())
        return sums.maximum(own.new_full(own.shape[:1], -torch.inf, dtype=torch.float32))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[None, None]:
        return None, None

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> None:
        return


class _SplitLoss(Function):
    """The sum over rows, by pieces."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        local: Tensor,
        mine: Tensor,
        counts: Tensor,
        sums: Sums,
        words: Words,
    ) -> Tensor:
        own = logits[:, : words.held]
        top = _Top.forward(own, sums)
        total, picked = torch.empty_like(top), torch.zeros_like(top)
        for rows, piece in _pieces(own):
            piece = piece.float() - top[rows, None]
            if words.held:
                found = piece.gather(1, local[rows, None])[:, 0]
                picked[rows] = torch.where(mine[rows], found, 0.0)
            total[rows] = piece.exp_().sum(1)
        total, picked = sums.all_reduce(torch.stack((total, picked)))
        ctx.save_for_backward(logits, local, mine, counts, top, total)
        ctx.sums, ctx.words = sums, words
        return torch.where(counts, total.log() - picked, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, None, None, None, None, None]:
        """(probability - 1 at the target) x ``d``, in the dtype of the logits."""
        logits, local, mine, counts, top, total = ctx.saved_tensors
        words = ctx.words
        compare("the gradient of the loss", d, ctx.sums)
        if torch.is_grad_enabled():  # a gradient of the gradient is wanted
            with torch.enable_grad():
                loss = _composed(logits, local, mine, counts, ctx.sums, words)
            (grad,) = torch.autograd.grad(loss, logits, d, create_graph=True)
            return grad, None, None, None, None, None
        out = torch.empty_like(logits)
        out[:, words.held :] = 0
        scale = torch.where(counts, d, 0.0)
        for rows, piece in _pieces(logits[:, : words.held]):
            piece = (piece.float() - top[rows, None]).exp_()
            piece *= (scale[rows] / total[rows])[:, None]
            if words.held:
                at = local[rows, None]
                piece.scatter_add_(1, at, -torch.where(mine[rows], scale[rows], 0.0)[:, None])
            out[rows, : words.held] = piece
        # A row that does not count has no gradient, whatever its logits are.
        out.masked_fill_(~counts[:, None], 0.0)
        return out, None, None, None, None, None


def _composed(
    logits: Tensor, local: Tensor, mine: Tensor, counts: Tensor, sums: Sums, words: Words
) -> Tensor:
    """The same sum by operations that torch differentiates as often as it likes."""
    own = logits[:, : words.held].float()
    top: Tensor = _Top.apply(own, sums)  # type: ignore[no-untyped-call]
    own = own - top[:, None]
    picked = torch.zeros_like(top)
    if words.held:
        picked = torch.where(mine, own.gather(1, local[:, None])[:, 0], 0.0)
    total, picked = leave(torch.stack((own.exp().sum(1), picked)), sums)
    return torch.where(counts, total.log() - picked, 0.0).sum()


def _pieces(own: Tensor) -> Iterator[tuple[slice, Tensor]]:
    most = PIECE_NUMEL if own.device.type == "cpu" else DEVICE_PIECE_NUMEL
    step = max(1, most // max(own.shape[1], 1))
    for start in range(0, own.shape[0], step):
        rows = slice(start, start + step)
        yield rows, own[rows]
