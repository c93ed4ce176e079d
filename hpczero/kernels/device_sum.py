"""The k-way sum on a CUDA device: a launch that reads every block once. The twin of ``tree_sum``'s torch operations.

Owns: compiled kernels, one for each shape of the tree, and the launch. Must not know: MPI, whose memory the blocks are,
how a sum of many blocks is cut (``subtrees``).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpczero.kernels.source import (
    MOST_BLOCKS,
    MOST_BLOCKS_OF_ROWS,
    THREADS,
    VECTOR_NBYTES,
    tree_sum_source,
)
from hpczero.kernels.subtrees import Launch, groups_in_order, sum_by_launches

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
        form = _Form.of(one)
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


class _Form(NamedTuple):
    """What a kernel is compiled for, beside the shape of its tree."""

    dtype: str
    aligned: bool
    several_rows: bool

    @classmethod
    def of(cls, one: Launch) -> _Form:
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
    form = _Form(NAMES[dtype], aligned=True, several_rows=False)
    kernel = _kernel(tuple(sizes), form, NAMES[node_dtype], device.index)
    if kernel is None:
        return None
    found = kernel.attributes
    return {"registers": found["num_regs"], "local_nbytes": found["local_size_bytes"]}


@cache
def _kernel(
    sizes: tuple[int, ...], form: _Form, node_dtype: str, device: int
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
