"""Device memory: flat buffers that can be given back and taken again, and the ledger of what is held.

Storage comes from torch on every device, so that autograd's saved tensors keep pointing at it while it is resized.

[Note: Refilling freed parameters]
A parameter is a view of its unit's buffer for the whole run. Freeing is ``untyped_storage().resize_(0)``; taking again
resizes to the old size, and the views are valid again. Neither touches a version counter, so autograd accepts the
refilled weights in backward (torch 2.13, measured in tests/memory/test_buffers.py). Replacing the storage instead would
leave saved views such as ``weight.t()`` on the old memory.
"""

from __future__ import annotations

import threading
from enum import Enum, auto

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CPU = torch.device("cpu")


def lasting(numel: int, dtype: torch.dtype, device: torch.device = CPU) -> torch.Tensor:
    """(numel,), content undefined, that outlives the call it is made in.

    Made inside ``torch.inference_mode`` like any other, it could not be written to afterwards.
    """
    if not torch.is_inference_mode_enabled():
        return torch.empty(numel, dtype=dtype, device=device)
    with torch.inference_mode(False):
        return torch.empty(numel, dtype=dtype, device=device)


class Memory:
    """Ledger of bytes held, by category (``parameters``, ``unsharded``, ``exchange``, ...)."""

    def __init__(self) -> None:
        self.current: dict[str, int] = {}
        self.peak: dict[str, int] = {}
        self._lock = threading.Lock()  # what runs in the background takes memory too

    def add(self, category: str, nbytes: int) -> None:
        """Count ``nbytes`` more (or, if negative, fewer) in ``category``."""
        with self._lock:
            now = self.current.get(category, 0) + nbytes
            self.current[category] = now
            self.peak[category] = max(self.peak.get(category, 0), now)

    def reset_peak(self) -> None:
        """Start a new peak measurement from what is held now."""
        self.peak = dict(self.current)

    @property
    def total(self) -> int:
        """Bytes held now, all categories."""
        return sum(self.current.values())


class Use(Enum):
    """What a buffer is for, as far as a transport cares."""

    PRIVATE = auto()  # of this rank alone
    GATHER = auto()  # all_gather fills it, the same on every rank; each writes its own shard only
    REDUCE = auto()  # reduce_scatter reads it


class Buffer:
    """One flat buffer of fixed size that is either held or released; memory of this rank alone.

    Attributes:
        tensor: (numel,) of ``dtype``, valid while held; the same object, with an empty storage, while released.
        shared: whether other ranks see what is written here.
        lasts: whether the content outlives ``release``.
    """

    shared = False
    lasts = False

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        *,
        memory: Memory,
        category: str,
        keep: bool = False,
        device: torch.device = CPU,
    ) -> None:
        """Held from the start. ``memory`` counts it in ``category``; with ``keep`` ``release`` keeps the memory."""
        self.tensor = lasting(numel, dtype, device)
        self._keep = keep
        self._nbytes = numel * self.tensor.element_size()
        self._memory = memory
        self._category = category
        self._held = True
        memory.add(category, self._nbytes)

    @property
    def held(self) -> bool:
        """Whether the memory is there."""
        return self._held

    @property
    def nbytes(self) -> int:
        """Bytes while held."""
        return self._nbytes

    def take(self) -> None:
        """Take the memory again, content undefined; nothing if it is held. See [Note: Refilling freed parameters]."""
        if not self._held:
            self.tensor.untyped_storage().resize_(self._nbytes)
            self._memory.add(self._category, self._nbytes)
            self._held = True

    def release(self) -> None:
        """Give the memory back, content lost; nothing if it is released.

        Memory that ``parameter.numpy()`` points to stays held: torch refuses to take it from under NumPy.
        """
        if not self._keep and self._held and self.tensor.untyped_storage().resizable():
            self.tensor.untyped_storage().resize_(0)
            self._memory.add(self._category, -self._nbytes)
            self._held = False

    @property
    def moved(self) -> bool:
        """Whether the tensor has other memory than the buffer has given it, which others count on."""
        return False

    @property
    def pinned(self) -> bool:
        """Whether ``release`` would have to keep memory that it should give back."""
        return self._held and not self._keep and not self.tensor.untyped_storage().resizable()

    def renew(self) -> None:
        """Leave the memory to whoever else points to it; hold other memory, content undefined, in the same tensor."""
        with torch.inference_mode(False):
            self.tensor.data = torch.empty_like(self.tensor)


class Scratch:
    """Memory to receive into, kept and grown to the largest need."""

    def __init__(self, memory: Memory, *, category: str, device: torch.device = CPU) -> None:
        self._device = device
        self._memory = memory
        self._category = category
        self._buffer: Buffer | None = None

    def get(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """(numel,), content undefined, good until the next call."""
        nbytes = numel * dtype.itemsize
        if self._buffer is None or self._buffer.nbytes < nbytes:
            self.release()
            words = -(-nbytes // torch.float32.itemsize)
            self._buffer = Buffer(
                words,
                torch.float32,
                memory=self._memory,
                category=self._category,
                device=self._device,
            )
        return self._buffer.tensor.view(dtype)[:numel]

    def release(self) -> None:
        """Give the memory back."""
        if self._buffer is not None:
            self._buffer.release()
            self._buffer = None
