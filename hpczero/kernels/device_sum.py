"""The k-way sum on a CUDA device: one launch that reads every block once. The twin of ``tree_sum``'s torch operations.

Owns: compiled kernels, one for each shape of the tree, and the launch. Must not know: MPI, whose memory the blocks are.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hpczero.kernels.source import MOST_BLOCKS, VECTOR_NBYTES, tree_sum_source

logger = logging.getLogger("hpczero.kernels")

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
THREADS = 256
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

    Returns:
        Whether it was done. It is not where the kernel cannot be compiled; ``tree_sum``'s operations give the same
        bits.
    """
    import cupy

    aligned = all(t.data_ptr() % VECTOR_NBYTES == 0 for t in (*blocks, out))
    shape = tuple(tuple(group) for group in groups)
    kernel = _kernel(shape, NAMES[blocks[0].dtype], NAMES[node_dtype], aligned, out.device.index)
    if kernel is None:
        return False
    most = torch.cuda.get_device_properties(out.device).multi_processor_count * BLOCKS_PER_SM
    grid = min(max(-(-out.numel() // THREADS), 1), most)
    with cupy.cuda.Device(out.device.index), _current_lane(cupy, out.device):
        kernel(
            (grid,),
            (THREADS,),
            (
                *(block.data_ptr() for block in blocks),
                out.data_ptr(),
                out.numel(),
                cupy.float32(scale),
                cupy.int32(accumulate),
            ),
        )
    return True


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


def can_launch(blocks: Sequence[Tensor]) -> bool:
    """Whether there are few enough blocks for one launch."""
    return len(blocks) <= MOST_BLOCKS


@cache
def _kernel(
    groups: tuple[tuple[int, ...], ...], dtype: str, node_dtype: str, aligned: bool, device: int
) -> Any:
    import cupy

    source = tree_sum_source(groups, dtype, node_dtype, aligned=aligned, cuda=True)
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
