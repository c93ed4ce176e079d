"""Private gradients that a reduction in the background may still be reading when their owner is done with them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor
from typing_extensions import override

from hpczero.memory.buffers import CPU, Buffer, Memory

MOST_LENT = (
    1  # units whose gradients may wait while the next one's are filled; ``Plan.memory`` counts them
)


class LentBuffer(Buffer):
    """A buffer whose owner may release it at once. Its memory is given back when the reduction has read it."""

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        *,
        memory: Memory,
        category: str,
        keep: bool,
        device: torch.device = CPU,
    ) -> None:
        """Arguments as ``Buffer``."""
        super().__init__(numel, dtype, memory=memory, category=category, keep=keep, device=device)
        self._reader: Callable[[], None] | None = None
        self._wanted = True

    def lend(self, wait: Callable[[], None]) -> None:
        """Lend the buffer to a reader until ``wait`` returns."""
        self._reader = wait

    def get_back(self) -> None:
        """Return when nobody reads the buffer. Gives the memory back if the owner has released it."""
        if self._reader is not None:
            self._reader()
            self._reader = None
        if not self._wanted:
            super().release()

    def take(self) -> None:
        """Take the memory. Waits for the reader."""
        self._wanted = True
        self.get_back()
        super().take()

    @override
    def release(self) -> None:
        self._wanted = False
        if self._reader is None:
            super().release()


class Lending:
    """The private gradients of one transport."""

    def __init__(self) -> None:
        self._buffers: dict[int, LentBuffer] = {}
        self._lent: deque[LentBuffer] = deque()

    def add(self, buffer: LentBuffer) -> None:
        """Remember ``buffer`` by its tensor."""
        self._buffers[id(buffer.tensor)] = buffer

    def lend(self, full: Tensor, wait: Callable[[], None]) -> Callable[[], None]:
        """Lend ``full`` until ``wait`` returns. Waits itself if too much is lent already.

        Returns:
            What to call instead of ``wait``.
        """
        buffer = self._buffers.get(id(full))
        if buffer is None:
            return wait  # its owner keeps it until then
        buffer.lend(wait)
        self._lent.append(buffer)
        while len(self._lent) > MOST_LENT:
            self._lent.popleft().get_back()

        def finish() -> None:
            wait()
            buffer.get_back()

        return finish
