"""The one sum of ranks' values, in one order: on the host, and by kernels on a device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate as running_sums
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from hpczero.kernels.source import (
    MOST_BLOCKS,
    MOST_BLOCKS_OF_ROWS,
    THREADS,
    VECTOR_NBYTES,
    tree_sum_source,
)

# A sum of any number of blocks as launches that read few blocks each: subtrees first, then the tree over their sums.
#
# The tree halves a sequence again and again, so all parts of one depth are trees of their own, and the tree over the
# parts is the rest of the whole one. Cut there, every addition has the operands that it has in one launch: the same
# bits.
#
#     40 blocks, at most 32      level 0   blocks 0..19 -> s0 | blocks 20..39 -> s1      fp32, not scaled
#                                level 1   s0, s1 -> out                                 scaled, accumulated

T = TypeVar("T")
Groups = tuple[tuple[int, ...], ...]
Level = tuple[Groups, ...]


@dataclass(frozen=True)
class Launch:
    """One sum of few blocks.

    Attributes:
        blocks: (numel,) or (rows, numel) each, of one dtype, group by group; rows of equal strides.
        sizes: blocks of each group.
        out: fp32 of the same shape.
        scale: multiplies the sum once.
        accumulate: whether to add to what ``out`` holds.
    """

    blocks: tuple[Tensor, ...]
    sizes: tuple[int, ...]
    out: Tensor
    scale: float
    accumulate: bool


def sum_by_launches(
    blocks: Sequence[Tensor],
    out: Tensor,
    *,
    groups: Sequence[Sequence[int]],
    scale: float,
    accumulate: bool,
    launch: Callable[[Launch], bool],
    most: int = MOST_BLOCKS,
) -> bool:
    """``tree_sum`` of any number of blocks by sums of at most ``most``, in order, each with its bits.

    The last launch alone writes ``out``, scales and accumulates. ``launch`` starts one sum, which rounds partial sums
    as ``tree_sum`` does; False where it cannot.

    Returns:
        Whether all were started; if not, ``out`` is as it was.
    """
    *lower, (last,) = _levels(tuple(tuple(group) for group in groups), most)
    there = list(blocks)
    for level in lower:
        sums = [torch.empty_like(out) for _ in level]
        for part, into in zip(level, sums, strict=True):
            if not launch(_launch(there, part, into, 1.0, False)):
                return False
        there = sums
    return launch(_launch(there, last, out, scale, accumulate))


@lru_cache(maxsize=64)
def _levels(groups: Groups, most: int) -> tuple[Level, ...]:
    """``levels``, which training asks for again and again with the same few groups: 25 us of 49 nodes' each."""
    return levels(groups, most)


def _launch(
    blocks: Sequence[Tensor], groups: Groups, out: Tensor, scale: float, accumulate: bool
) -> Launch:
    in_order = tuple(blocks[i] for group in groups for i in group)
    return Launch(in_order, tuple(map(len, groups)), out, scale, accumulate)


def groups_in_order(sizes: Sequence[int]) -> list[range]:
    """Groups of these sizes over blocks that follow one another."""
    ends = list(running_sums(sizes, initial=0))
    return [range(start, stop) for start, stop in pairwise(ends)]


def levels(groups: Sequence[Sequence[int]], most: int) -> tuple[Level, ...]:
    """The launches of a sum, level by level; the last level has one.

    Args:
        groups: indices of blocks, node by node, as in ``tree_sum``.
        most: blocks that one launch reads at most; 4 or more.

    Returns:
        Each launch as the ``groups`` of its own ``tree_sum``. Those of the first level index the blocks. Those of
        another index the fp32 sums of the level before.
    """
    assert most >= 4, "a cut of several groups leaves two or more in each part"
    whole = tuple(tuple(group) for group in groups)
    if sum(map(len, whole)) <= most:
        return ((whole,),)
    if len(whole) > 1:
        parts = _parts_of_groups(whole, most)
        if parts is not None:  # each rounds its groups' sums, and nothing is rounded later
            return (parts, *levels([range(len(parts))], most))
    cuts = [_cut(group, most) for group in whole]
    launches: list[Groups] = []
    rest: list[range] = []
    for cut in cuts:
        rest.append(range(len(launches), len(launches) + len(cut)))
        launches += [(part,) for part in cut]
    return (tuple(launches), *levels(rest, most))


def _parts_of_groups(groups: Groups, most: int) -> Level | None:
    """Whole groups, two or more in each part: one group alone would not be rounded. None if they are too large."""
    parts: tuple[Groups, ...] = (groups,)
    while all(len(part) >= 4 for part in parts):
        parts = tuple(half for part in parts for half in _halves(part))
        if all(sum(map(len, part)) <= most for part in parts):
            return parts
    return None


def _cut(group: tuple[int, ...], most: int) -> tuple[tuple[int, ...], ...]:
    parts: tuple[tuple[int, ...], ...] = (group,)
    while max(map(len, parts)) > most:
        parts = tuple(half for part in parts for half in _halves(part))
    return parts


def _halves(part: tuple[T, ...]) -> tuple[tuple[T, ...], tuple[T, ...]]:
    """As ``tree_sum`` halves: the first is the larger."""
    middle = (len(part) + 1) // 2
    return part[:middle], part[middle:]


logger = logging.getLogger("hpczero.kernels")

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
BLOCKS_PER_SM = 8


def device_tree_sum(
    blocks: Sequence[Tensor],
    out: Tensor,
    *,
    groups: Sequence[Sequence[int]],
    scale: float,
    accumulate: bool,
    node_dtype: torch.dtype,
) -> bool:
    """Sum as ``tree_sum`` does, on torch's current stream of ``out``'s device. Other processes may own the blocks.

    The tensors are of one form, as ``tree_sum.rows_of`` gives them. Of more than ``MOST_BLOCKS`` blocks
    (``MOST_BLOCKS_OF_ROWS`` of several rows) it takes several launches and memory for their sums: 4 bytes for each
    element of ``out`` and each 8 to 32 blocks.

    Returns:
        Whether it was done. It is not where a kernel cannot be compiled; ``tree_sum``'s operations give the same bits.
    """
    import cupy

    device = out.device
    most = torch.cuda.get_device_properties(device).multi_processor_count * BLOCKS_PER_SM
    rows, numel = out.shape if out.dim() == 2 else (1, out.numel())
    across = min(max(-(-numel // THREADS), 1), most)
    grid = across, min(rows, max(most // across, 1))

    def launch(one: Launch) -> bool:
        form = _KernelForm.of(one)
        kernel = _kernel(one.sizes, form, NAMES[node_dtype], device.index)
        if kernel is None:
            return False
        kernel(
            grid,
            (THREADS,),
            (
                *(block.data_ptr() for block in one.blocks),
                one.out.data_ptr(),
                rows,
                numel,
                one.blocks[0].stride(0) if rows > 1 else 0,
                one.out.stride(0) if rows > 1 else 0,
                cupy.float32(one.scale),
                cupy.int32(one.accumulate),
            ),
        )
        return True

    with cupy.cuda.Device(device.index), _current_lane(cupy, device):
        return sum_by_launches(
            blocks,
            out,
            groups=groups,
            scale=scale,
            accumulate=accumulate,
            launch=launch,
            most=MOST_BLOCKS if rows == 1 else MOST_BLOCKS_OF_ROWS,
        )


class _KernelForm(NamedTuple):
    """What a kernel is compiled for, beside the shape of its tree."""

    dtype: str
    aligned: bool
    several_rows: bool

    @classmethod
    def of(cls, one: Launch) -> _KernelForm:
        """That of one launch, whose blocks have equal strides."""
        tensors, rows = (*one.blocks, one.out), one.out.shape[0] if one.out.dim() == 2 else 1
        nbytes = [tensor.data_ptr() for tensor in tensors]
        if rows > 1:
            nbytes += [tensor.stride(0) * tensor.itemsize for tensor in tensors]
        return cls(
            NAMES[one.blocks[0].dtype], all(n % VECTOR_NBYTES == 0 for n in nbytes), rows > 1
        )


# One for each stream, for ever: torch's streams are never destroyed, and a CuPy stream that goes may take its with it.
_lanes: dict[tuple[int, int], Any] = {}


def _current_lane(cupy: Any, device: torch.device) -> Any:
    """Torch's current stream as CuPy's."""
    stream = torch.cuda.current_stream(device)
    key = (stream.device_index, stream.cuda_stream)
    if key not in _lanes:
        if hasattr(stream, "__cuda_stream__") and hasattr(cupy.cuda.Stream, "from_external"):
            _lanes[key] = cupy.cuda.Stream.from_external(stream)
        else:
            _lanes[key] = cupy.cuda.ExternalStream(*reversed(key))  # CuPy before 14
    return _lanes[key]


def kernel_figures(
    sizes: Sequence[int], dtype: torch.dtype, node_dtype: torch.dtype, device: torch.device
) -> dict[str, int] | None:
    """What the driver says of the kernel that sums aligned blocks in groups of ``sizes``; None: it does not compile.

    Returns:
        ``registers`` of a thread and its ``local_nbytes``, which hold what found no register.
    """
    form = _KernelForm(NAMES[dtype], aligned=True, several_rows=False)
    kernel = _kernel(tuple(sizes), form, NAMES[node_dtype], device.index)
    if kernel is None:
        return None
    found = kernel.attributes
    return {"registers": found["num_regs"], "local_nbytes": found["local_size_bytes"]}


@cache
def _kernel(
    sizes: tuple[int, ...], form: _KernelForm, node_dtype: str, device: int
) -> Any:  # Any: a kernel of CuPy's, or None where it cannot be compiled
    import cupy

    source = tree_sum_source(
        groups_in_order(sizes),
        form.dtype,
        node_dtype,
        aligned=form.aligned,
        cuda=True,
        several_rows=form.several_rows,
    )
    with cupy.cuda.Device(device):
        kernel = cupy.RawKernel(source, "tree_sum", options=("--std=c++17",))
        try:
            kernel.compile()
        except Exception as error:  # of the compiler, of its libraries that are missing
            logger.warning(
                "the kernel that sums gradients cannot be compiled, and torch's operations do it in several passes: %s",
                str(error)[-400:],
            )
            return None
    return kernel


# The one sum: k blocks into one in fp32, as a balanced tree within each node, then over nodes.
#
#     blocks 0 1 2 3 | 4 5 6 7          node 0 | node 1
#            \/   \/   \/   \/          fp32 partial sums
#             \___/     \___/           rounded to ``node_dtype`` here, and only here
#                  \_____/              fp32, times ``scale``

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
            *form, groups=groups, scale=scale, accumulate=accumulate, node_dtype=node_dtype
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


class ShardSum:
    """Where a transport puts this rank's shard of a sum over ranks: ``out (+)= scale *`` the sum, see ``tree_sum``.

    Attributes:
        out: (shard_numel,) fp32.
        scale, accumulate: as of ``tree_sum``.
        last: whether ``out`` has the sum afterwards, and not a part of it.
    """

    last = True

    def __init__(self, out: Tensor, scale: float = 1.0, *, accumulate: bool = False) -> None:
        """``accumulate``: add to ``out`` instead of replacing it."""
        self.out, self.scale, self.accumulate = out, scale, accumulate

    def take(
        self,
        blocks: Sequence[Tensor],
        start: int,
        *,
        groups: Sequence[Sequence[int]],
        node_dtype: torch.dtype = torch.float32,
        ranks: int = 1,
    ) -> None:
        """Sum the elements of the shard from ``start`` on; each is asked for once.

        Args:
            blocks: (numel,) each, as of ``tree_sum``.
            start: first of the elements.
            groups: as of ``tree_sum``.
            node_dtype: as of ``tree_sum``.
            ranks: whose sum each block is: 1, or the ranks of a node.
        """
        into = self.out[start : start + blocks[0].numel()]
        tree_sum(
            blocks,
            into,
            groups=groups,
            scale=self.scale,
            accumulate=self.accumulate,
            node_dtype=node_dtype,
        )

    def of_node(self, blocks: Sequence[Tensor], node: int) -> Sequence[Tensor]:
        """Those of ``blocks``, one of each rank of node ``node``, that the sum of the node is made of."""
        return blocks

    def sum_of_node(self, blocks: Sequence[Tensor], into: Tensor) -> None:
        """Set ``into``, fp32, to the sum over the ranks of one node."""
        tree_sum(blocks, into, groups=[range(len(blocks))], scale=1.0)


# The sum over the leaves of a step: the same bits on any number of ranks.
#
# A step has M leaves: micro-batches of a fixed shape, by their global number. Their gradients are added up in one
# binary tree that M alone shapes: it splits k leaves at the largest power of two below k.
#
#     6 leaves    (0 1) (2 3) | (4 5)      7 leaves    (0 1) (2 3) | (4 5) 6
#
# Leaves come in the order of their numbers, those of one micro-step together: leaf ``micro_step * ranks + place``. A
# rank adds them up as a binary counter does: two neighbouring sums of as many leaves become one. What it carries from
# one micro-step to the next are sums of 2^k leaves, one for each bit of the number of leaves so far. Which rank had a
# leaf, and how many leaves came together, plays no part.
#
# Source: the counter is pairwise summation, Higham, Accuracy and Stability of Numerical Algorithms, 2002, sec. 4.2.


def carried(leaves: int) -> int:
    """Sums that are carried after so many leaves."""
    return leaves.bit_count()


class LeafSum(ShardSum):
    """One micro-step's part of the sum over leaves. The last one sets ``out`` to ``scale *`` the sum of all.

    Between nodes each node brings the sum of its ranks, which must be a whole branch of the tree: nodes have a power
    of two of ranks each.
    """

    def __init__(
        self,
        out: Tensor,
        scale: float,
        *,
        carries: Sequence[Tensor],
        before: int,
        count: int,
        last: bool,
    ) -> None:
        """``out`` may be the first of ``carries``.

        Args:
            out: (shard_numel,) fp32.
            scale: multiplies the sum of all leaves, once.
            carries: (shard_numel,) fp32 each; as many as are carried before or after.
            before: leaves of earlier micro-steps.
            count: leaves of this one; those of the ranks in the order of the sum, the first ones.
            last: whether no leaf follows.
        """
        super().__init__(out, scale)
        self._carries, self._before, self._count, self.last = carries, before, count, last

    def take(
        self,
        blocks: Sequence[Tensor],
        start: int,
        *,
        groups: Sequence[Sequence[int]],
        node_dtype: torch.dtype = torch.float32,
        ranks: int = 1,
    ) -> None:
        """As of ``ShardSum``. ``node_dtype`` plays no part: sums of nodes are fp32."""
        here = [blocks[i] for group in groups for i in group][: -(-self._count // ranks)]
        numel = blocks[0].numel()
        for (piece,) in pieces((numel,), piece_numel(self.out.device)):
            at = slice(start + piece.start, min(start + piece.stop, start + numel))
            terms = [block[piece] for block in here]
            carries = [carry[at] for carry in self._carries]
            if self.last:
                _finish(_push(terms, carries, self._before // ranks), self.out[at], self.scale)
            else:
                for place, (_, term, _) in enumerate(_push(terms, carries, self._before // ranks)):
                    if term is not carries[place]:
                        carries[place].copy_(term)

    def of_node(self, blocks: Sequence[Tensor], node: int) -> Sequence[Tensor]:
        """As of ``ShardSum``: those that are leaves of this step; none where all of them come after the last."""
        return blocks[: max(self._count - node * len(blocks), 0)]

    def sum_of_node(self, blocks: Sequence[Tensor], into: Tensor) -> None:
        """As of ``ShardSum``, in the order of the tree."""
        if blocks:
            _finish(_push(blocks, [], 0), into, 1.0)


# Of how many leaves (a power of two), what they add up to, and whether it may be written to.
_Branch = tuple[int, Tensor, bool]


def _push(blocks: Sequence[Tensor], carries: Sequence[Tensor], before: int) -> list[_Branch]:
    """Branches after ``blocks`` more leaves, the largest first; what is carried may be overwritten."""
    sizes = [1 << bit for bit in reversed(range(before.bit_length())) if before >> bit & 1]
    branches: list[_Branch] = [
        (size, carry, True) for size, carry in zip(sizes, carries, strict=False)
    ]
    for block in blocks:
        branch = 1, block.float(), block.dtype is not torch.float32
        while branches and branches[-1][0] == branch[0]:
            branch = _joined(branches.pop(), branch)
        branches.append(branch)
    return branches


def _joined(left: _Branch, right: _Branch) -> _Branch:
    (size, one, writable), (others, other, also) = left, right
    into = one if writable else other if also else None
    return size + others, torch.add(one, other, out=into), True


def _finish(branches: list[_Branch], out: Tensor, scale: float) -> None:
    """Set ``out`` to ``scale *`` the sum of all branches, the smallest added first."""
    while len(branches) > 1:
        right = branches.pop()
        branches.append(_joined(branches.pop(), right))
    total = branches[0][1]
    if total is not out:
        out.copy_(total)
    if scale != 1.0:
        out.mul_(scale)
