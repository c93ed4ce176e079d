"""The host tier: shards rest in memory of the host, and are copied to the device and back.

Owns: that memory. Must not know: files, places. On a machine without a device the copies are made all the same, which
is how tests see them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import Tensor
from typing_extensions import override

from hpczero.accelerator import Accelerator, HostAccelerator
from hpczero.errors import TierError
from hpczero.files.direct import PAGE
from hpczero.memory.pages import device_pages, host_pages
from hpczero.tier.staged import StagedTier
from hpczero.tier.staging import Staging

# Torch rounds each piece of pinned memory up to a power of two: with the page that alignment may take, this is one.
SLAB_NBYTES = 32 * 2**20 - PAGE
COPY_NBYTES = 16 * 2**20
LANES = 2  # one for each way


class HostTier(StagedTier):
    """Memory of the host, pinned where there is a device. Staging lies on the device."""

    def __init__(
        self,
        *,
        blocks: int,
        block_nbytes: int,
        accelerator: Accelerator | None = None,
        lanes: int = LANES,
    ) -> None:
        """Makes the staging blocks.

        Args:
            blocks: of staging.
            block_nbytes: bytes of parts that fit into one.
            accelerator: of the device; None: the host itself.
            lanes: copies in flight.

        Raises:
            ConfigError: no blocks.
            OutOfMemory: they do not fit.
        """
        accelerator = accelerator or HostAccelerator()
        memory = partial(device_pages, accelerator=accelerator)
        staging = Staging(blocks, block_nbytes, alignment=PAGE, memory=memory)
        super().__init__(staging, accelerator=accelerator, lanes=lanes, call_nbytes=COPY_NBYTES)
        self._slabs: list[Tensor] = []
        self._in, self._out = accelerator.lane(), accelerator.lane()

    @override
    def describe(self) -> str:
        kind = "memory" if self._accelerator.is_host else "pinned memory"
        return f"{kind} of the host, staged on {self._accelerator.device}"

    @override
    def _make_room(self, begin: int, end: int) -> None:
        while len(self._slabs) * SLAB_NBYTES < end:
            try:
                self._slabs.append(host_pages(SLAB_NBYTES, PAGE, self._accelerator))
            except MemoryError as error:
                raise TierError(
                    f"host tier: got a request for {end - begin:,} bytes beyond {begin:,}, and the host has no more "
                    f"({error}); let less rest there, use fewer ranks on this node, or let it rest on disk"
                ) from error

    @override
    def _read(self, into: Tensor, offset: int) -> None:
        for slab, piece in self._cut(into, offset):
            self._in.copy(piece, slab)
        self._in.mark().wait()

    @override
    def _write(self, source: Tensor, offset: int) -> None:
        for slab, piece in self._cut(source, offset):
            self._out.copy(slab, piece)
        self._out.mark().wait()

    @override
    def _release(self) -> None:
        self._slabs.clear()

    def _cut(self, memory: Tensor, offset: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Where ``memory`` lies from ``offset`` on, slab by slab, and its part that lies there."""
        done = 0
        while done < memory.numel():
            index, at = divmod(offset + done, SLAB_NBYTES)
            count = min(SLAB_NBYTES - at, memory.numel() - done)
            yield self._slabs[index][at : at + count], memory[done : done + count]
            done += count
