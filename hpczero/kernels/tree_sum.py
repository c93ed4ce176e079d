r"""The one sum: k blocks into one in fp32, as a balanced tree within each node, then over nodes.

Owns: the order and the rounding places of every gradient reduction. Must not know: MPI, who sent which block. This is
the torch twin. It works piece by piece, so partial sums stay in cache. On a CUDA device ``device_sum`` does the same in
one launch, or by subtrees.

    blocks 0 1 2 3 | 4 5 6 7          node 0 | node 1
           \/   \/   \/   \/          fp32 partial sums
            \___/     \___/           rounded to ``node_dtype`` here, and only here
                 \_____/              fp32, times ``scale``
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hpczero.kernels.device_sum import device_tree_sum

# fp32 elements per piece: a few pieces of partial sums (128 KiB each) fit a core's second-level cache.
PIECE_NUMEL = 32 * 1024


def piece_numel(device: torch.device) -> int:
    """Most elements of one sum: what stays in cache on the host, everything on a device."""
    return PIECE_NUMEL if device.type == "cpu" else 2**62


def pieces(shape: Sequence[int], most: int) -> Iterator[tuple[slice, ...]]:
    """Pieces of a tensor of rows, or of one row, with at most ``most`` elements each: whole rows, if several fit."""
    *rows, width = shape
    together = max(most // max(width, 1), 1)
    for top in range(0, rows[0], together) if rows else [None]:
        across = () if top is None else (slice(top, min(top + together, rows[0])),)
        for start in range(0, width, most):
            yield *across, slice(start, min(start + most, width))


def rows_of(blocks: Sequence[Tensor], out: Tensor) -> tuple[Sequence[Tensor], Tensor] | None:
    """The tensors of a sum as rows that one launch can read: one row without gaps, or rows equally far apart.

    Returns:
        The blocks and ``out``, (numel,) each or (rows, numel) each; None where elements of a row do not lie together,
        or the rows of one block are further apart than those of another.
    """
    if all(tensor.is_contiguous() for tensor in (*blocks, out)):
        if out.dim() == 1:
            return blocks, out
        return [block.view(-1) for block in blocks], out.view(-1)
    if out.dim() != 2 or out.stride(1) != 1:
        return None
    between = {block.stride() for block in blocks}
    return (blocks, out) if len(between) == 1 and blocks[0].stride(1) == 1 else None


def tree_sum(
    blocks: Sequence[Tensor],
    out: Tensor,
    *,
    groups: Sequence[Sequence[int]],
    scale: float,
    accumulate: bool = False,
    node_dtype: torch.dtype = torch.float32,
) -> None:
    """``out = scale * sum(blocks)``, or ``out += ...``, summed in fp32 in one fixed order.

    Args:
        blocks: k tensors (numel,) or (rows, numel) of one floating dtype, rows of any stride; never written.
        out: fp32 of the same shape.
        groups: indices into ``blocks`` node by node; together a permutation of all of them.
        scale: multiplies the sum once.
        accumulate: whether to add to what ``out`` holds instead of replacing it.
        node_dtype: each node's partial sum is rounded to it where there is more than one node.
    """
    if (
        out.device.type == "cuda"
        and (form := rows_of(blocks, out)) is not None
        and device_tree_sum(
            *form,
            groups=groups,
            scale=scale,
            accumulate=accumulate,
            node_dtype=node_dtype,
        )
    ):
        return
    for piece in pieces(out.shape, piece_numel(out.device)):
        terms = [blocks[i][piece] for i in groups[0]]
        if len(groups) > 1:
            terms = [_node_sum([blocks[i][piece] for i in group], node_dtype) for group in groups]
        into = out[piece]
        if accumulate:
            # Not add_(alpha=scale): a fused multiply-add rounds once, and only where the processor has it.
            into.add_(_tree(terms) * scale)
        else:
            _tree(terms, into)
            if scale != 1.0:
                into.mul_(scale)


def _node_sum(blocks: Sequence[Tensor], node_dtype: torch.dtype) -> Tensor:
    total = _tree(blocks)
    return total if node_dtype is torch.float32 else total.to(node_dtype)


def _tree(blocks: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """Balanced binary sum of ``blocks`` in order, in fp32.

    It goes into ``out`` if given. A single fp32 block is its own sum.
    """
    if len(blocks) == 1:
        return blocks[0].float() if out is None else out.copy_(blocks[0])
    middle = (len(blocks) + 1) // 2
    left, right = _tree(blocks[:middle]), _tree(blocks[middle:])
    return torch.add(left, right, out=out)
