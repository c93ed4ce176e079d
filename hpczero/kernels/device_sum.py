"""The k-way sum on a CUDA device: a launch that reads every block once. The twin of ``tree_sum``'s torch operations.

Owns: compiled kernels, one for each shape of the tree, and the launch. Must not know: MPI, whose memory the blocks are,
how a sum of many blocks is cut (``subtrees``).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hpczero.kernels.source import THREADS, VECTOR_NBYTES, tree_sum_source
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

    Of more than ``MOST_BLOCKS`` blocks it takes several launches and memory for their sums: 4 bytes for each element of
    ``out`` and each 16 to 32 blocks.

    Returns:
        Whether it was done. It is not where a kernel cannot be compiled; ``tree_sum``'s operations give the same bits.
    """
    import cupy

    device = out.device
    most = torch.cuda.get_device_properties(device).multi_processor_count * BLOCKS_PER_SM
    grid = min(max(-(-out.numel() // THREADS), 1), most)

    def launch(one: Launch) -> bool:
        aligned = all(t.data_ptr() % VECTOR_NBYTES == 0 for t in (*one.blocks, one.out))
        dtype = NAMES[one.blocks[0].dtype]
        kernel = _kernel(one.sizes, dtype, NAMES[node_dtype], aligned, device.index)
        if kernel is None:
            return False
        kernel(
            (grid,),
            (THREADS,),
            (
                *(block.data_ptr() for block in one.blocks),
                one.out.data_ptr(),
                one.out.numel(),
                cupy.float32(one.scale),
                cupy.int32(one.accumulate),
            ),
        )
        return True

    with cupy.cuda.Device(device.index), _current_lane(cupy, device):
        return sum_by_launches(
            blocks, out, groups=groups, scale=scale, accumulate=accumulate, launch=launch
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
    kernel = _kernel(tuple(sizes), NAMES[dtype], NAMES[node_dtype], True, device.index)
    if kernel is None:
        return None
    found = kernel.attributes
    return {"registers": found["num_regs"], "local_nbytes": found["local_size_bytes"]}


@cache
def _kernel(
    sizes: tuple[int, ...], dtype: str, node_dtype: str, aligned: bool, device: int
) -> Any:  # Any: a kernel of CuPy's, or None where it cannot be compiled
    import cupy

    source = tree_sum_source(groups_in_order(sizes), dtype, node_dtype, aligned=aligned, cuda=True)
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
