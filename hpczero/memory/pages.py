"""Memory that begins at a page, or at a coarser bound: what calls past the kernel's cache need.

Owns: its allocation. Must not know: what is kept there.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from hpczero.accelerator import Accelerator
from hpczero.memory.buffers import lasting


def host_pages(nbytes: int, alignment: int, accelerator: Accelerator) -> Tensor:
    """(nbytes,) uint8 of the host that ``accelerator`` copies from and to at full speed. Not collective.

    On the host it is mapped for itself: untouched pages take no memory and read as zero, and all of it goes back to the
    kernel with the last tensor that points to it. With a device it is pinned.

    Args:
        nbytes: how much.
        alignment: of its address, a power of two.
        accelerator: whose memory it is the other side of.

    Raises:
        MemoryError: there is not enough.
    """
    try:
        if not accelerator.is_host:
            return _aligned(accelerator.pinned(nbytes + alignment), nbytes, alignment)
        pages = mmap.mmap(-1, nbytes + alignment)
    except (OSError, RuntimeError) as error:  # of the kernel, of torch
        raise MemoryError(f"{nbytes:,} bytes of host memory: {error}") from error
    with torch.inference_mode(False):
        return _aligned(torch.frombuffer(pages, dtype=torch.uint8), nbytes, alignment)


def device_pages(nbytes: int, alignment: int, accelerator: Accelerator) -> Tensor:
    """As ``host_pages``, of the device itself; on the host both are the same."""
    if accelerator.is_host:
        return host_pages(nbytes, alignment, accelerator)
    memory = lasting(nbytes + alignment, torch.uint8, accelerator.device)
    return _aligned(memory, nbytes, alignment)


def padded(nbytes: int, alignment: int) -> int:
    """The next multiple of ``alignment``."""
    return -(-nbytes // alignment) * alignment


def _aligned(memory: Tensor, nbytes: int, alignment: int) -> Tensor:
    start = -memory.data_ptr() % alignment
    return memory[start : start + nbytes]
