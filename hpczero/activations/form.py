"""Form: how a tensor lies in memory, so that its copy lies in the same way.

Owns: a tensor's bytes, and new memory for them. Must not know: where they rest.

A kernel may round in another way where strides differ, or where memory begins elsewhere between two bounds of a cache
line. Recomputation would then not give the bits of the first forward. So a copy has both as the original had them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

LINE = 64  # bytes; torch's memory begins at a multiple of it


@dataclass(frozen=True)
class Form:
    """Of one tensor with memory of its own, or a view of some.

    Attributes:
        shape, stride, dtype: as torch has them.
        offset: of its first byte behind a multiple of ``LINE``.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> Form:
        """That of a dense or strided tensor."""
        offset = tensor.data_ptr() % LINE
        if offset % tensor.element_size():
            offset = 0
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, offset)

    @property
    def span(self) -> int:
        """Elements from the first to the last, gaps between them included."""
        if not math.prod(self.shape):
            return 0
        return 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))

    @property
    def nbytes(self) -> int:
        """Of ``span``."""
        return self.span * self.dtype.itemsize

    def raw(self, tensor: Tensor) -> Tensor:
        """(nbytes,) uint8 view of a tensor of this form."""
        with torch.no_grad():
            return tensor.detach().as_strided((self.span,), (1,)).view(torch.uint8)

    def memory(self, device: torch.device, room: int = 0) -> Tensor:
        """(nbytes or ``room``, what is more) uint8, content undefined, that begins as the original did."""
        whole = torch.empty(self.offset + max(self.nbytes, room), dtype=torch.uint8, device=device)
        return whole[self.offset :]

    def tensor(self, memory: Tensor) -> Tensor:
        """A tensor over ``memory``, which ``memory`` has made; no view of another tensor."""
        storage, item = memory.untyped_storage(), self.dtype.itemsize
        empty = torch.empty(0, dtype=self.dtype, device=memory.device)
        with torch.no_grad():
            return empty.set_(storage, memory.storage_offset() // item, self.shape, self.stride)

    def lost(self, device: torch.device) -> Tensor:
        """All NaN: what is computed from it shows that it is no result."""
        tensor = self.tensor(self.memory(device))
        with torch.no_grad():
            return (
                tensor.as_strided((self.span,), (1,))
                .fill_(math.nan)
                .as_strided(self.shape, self.stride)
            )
