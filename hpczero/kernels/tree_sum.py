r"""The one sum: k blocks into one in fp32, as a balanced tree within each node, then over nodes.

Owns: the order and the rounding places of every gradient reduction. Must not know: MPI, who sent which block. This is
the torch twin; it works piece by piece so that partial sums stay in cache.

    blocks 0 1 2 3 | 4 5 6 7          node 0 | node 1
           \/   \/   \/   \/          fp32 partial sums
            \___/     \___/           rounded to ``node_dtype`` here, and only here
                 \_____/              fp32, times ``scale``
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# fp32 elements per piece: a few pieces of partial sums (128 KiB each) fit a core's second-level cache.
PIECE_NUMEL = 32 * 1024


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
        blocks: k tensors (numel,) of one floating dtype; never written.
        out: (numel,) fp32.
        groups: indices into ``blocks`` node by node; together a permutation of all of them.
        scale: multiplies the sum once.
        accumulate: add to what ``out`` holds instead of replacing it.
        node_dtype: what each node's partial sum is rounded to where there is more than one node.
    """
    several_nodes = len(groups) > 1
    for start in range(0, out.numel(), PIECE_NUMEL):
        piece = slice(start, min(start + PIECE_NUMEL, out.numel()))

        def node_sum(group: Sequence[int], piece: slice = piece) -> Tensor:
            total = _tree([blocks[i][piece] for i in group])
            if several_nodes and node_dtype is not torch.float32:
                total = total.to(node_dtype)
            return total

        total = (
            _tree([node_sum(group) for group in groups]) if several_nodes else node_sum(groups[0])
        )
        if accumulate:
            # Not add_(alpha=scale): a fused multiply-add rounds once, and only where the processor has it.
            out[piece].add_(total * scale)
        else:
            torch.mul(total, scale, out=out[piece])


def _tree(blocks: Sequence[Tensor]) -> Tensor:
    """Balanced binary sum of ``blocks`` in order; fp32; a single fp32 block is returned as it is."""
    if len(blocks) == 1:
        return blocks[0].float()
    middle = (len(blocks) + 1) // 2
    left, right = _tree(blocks[:middle]), _tree(blocks[middle:])
    return torch.add(left, right)
