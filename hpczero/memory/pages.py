"""Pages of the host's memory: sizes in whole pages, and freed memory that the C library keeps."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

from hpczero.accelerator import Accelerator
from hpczero.memory.buffers import lasting
from hpczero.options.environment import Environment


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


# The C library's heap: whether what is freed is kept for the next step.
#
# [Note: Kept heap]
# A backward frees activations and gradients, and the next step asks for the same again. glibc returns large blocks, and
# the top of its heap, to the kernel at once, and the next step takes them back page by page: up to 24,000 page faults
# in a step of a 30 M parameter GPT. With both thresholds out of the way there are none, a step takes 2 to 4 % less
# time, and the peak stays as it is, since the peak is what is reused (docs/performance.md). One threshold alone makes
# it worse. The settings are made after sharding, when the memory of the plain model has gone back.

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
LARGE = 2**20
MOST = 2**31 - 1  # an int; a larger block is mapped by itself as ever


def keep_freed_memory(environment: Environment) -> bool:
    """Return to the kernel what is free now, and nothing from now on. Not collective.

    Returns:
        Whether it was done: not with another C library than glibc, nor where HPCZERO_KEEP_HEAP=0 or settings of
        malloc's own are in the environment.
    """
    return environment.keep_heap and _tune(environment, MOST)


def give_back_freed_memory(environment: Environment) -> bool:
    """Return every large block to the kernel when it is freed. Not collective.

    By itself glibc raises its thresholds to the largest block that was freed, up to 32 MiB, and keeps what lies below.
    Where shards rest on a tier, what was freed has to make room for what comes, of whatever size.

    Returns:
        Whether it was done: not with another C library than glibc, nor where settings of malloc's own are in the
        environment.
    """
    return _tune(environment, LARGE)


def _tune(environment: Environment, threshold: int) -> bool:
    if environment.tunes_malloc:
        return False
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018  (an allocator of another library may have a mallopt that does less)
        library.malloc_trim(0)
        options = (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD)
        done = [library.mallopt(option, threshold) for option in options]
    except (OSError, AttributeError):
        return False
    return all(done)
