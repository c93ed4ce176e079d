"""Tiers that behave badly on purpose, over a dictionary of pages. Users of tiers are tested with them.

``SlowTier`` is a disk that takes its time. ``LateTier`` moves bytes at the last moment and spoils memory that nobody
may look at, so that whoever reads too early, or writes too late, gets wrong values at once. ``FailingTier`` raises what
a disk raises.
"""

from __future__ import annotations

import errno
import os
import random
import threading
import time

from torch import Tensor

from hpczero.accelerator import HostAccelerator
from hpczero.errors import TierError
from hpczero.memory.pages import host_pages
from hpczero.tier import StagedTier, Staging
from hpczero.tier.staged import StagingBlock

PAGE = 4096
SPOILED = 0xA5


class PageTier(StagedTier):
    """Pages in a dictionary; of small calls, so that parts are many."""

    def __init__(self, *, blocks: int, block_nbytes: int, lanes: int = 3, staging=Staging) -> None:
        accelerator = HostAccelerator()
        super().__init__(
            staging(
                blocks,
                block_nbytes,
                alignment=PAGE,
                memory=lambda nbytes, alignment: host_pages(nbytes, alignment, accelerator),
            ),
            accelerator=accelerator,
            lanes=lanes,
            call_nbytes=2**18,
        )
        self._pages: dict[int, Tensor] = {}

    def describe(self) -> str:
        return f"a {type(self).__name__}"

    def _make_room(self, begin: int, end: int) -> None:
        return

    def _read(self, into: Tensor, offset: int) -> None:
        for at in range(0, into.numel(), PAGE):
            into[at : at + PAGE] = self._pages[offset + at]

    def _write(self, source: Tensor, offset: int) -> None:
        for at in range(0, source.numel(), PAGE):
            self._pages[offset + at] = source[at : at + PAGE].clone()


class SlowTier(PageTier):
    """Each call takes up to ``seconds``."""

    def __init__(self, *, blocks: int, block_nbytes: int, seconds: float = 1e-3) -> None:
        super().__init__(blocks=blocks, block_nbytes=block_nbytes)
        self._seconds = seconds
        self._dice = random.Random(0)

    def _read(self, into: Tensor, offset: int) -> None:
        time.sleep(self._seconds * self._dice.random())
        super()._read(into, offset)

    def _write(self, source: Tensor, offset: int) -> None:
        time.sleep(self._seconds * self._dice.random())
        super()._write(source, offset)


class _Spoiling(Staging):
    """Blocks that hold nonsense when they are taken, and when they are given back without being written."""

    def take(self, nbytes: int, holder: str) -> StagingBlock:
        block = super().take(nbytes, holder)
        block.memory.fill_(SPOILED)
        return block

    def give_back(self, block: StagingBlock, *, read_until=None) -> None:
        block.memory.fill_(SPOILED)
        super().give_back(block, read_until=read_until)


class LateTier(PageTier):
    """Reads and writes happen late, and a block is spoiled as soon as it is written."""

    def __init__(self, *, blocks: int, block_nbytes: int) -> None:
        super().__init__(blocks=blocks, block_nbytes=block_nbytes, lanes=1, staging=_Spoiling)

    def _read(self, into: Tensor, offset: int) -> None:
        time.sleep(2e-4)
        super()._read(into, offset)

    def _write(self, source: Tensor, offset: int) -> None:
        time.sleep(2e-4)
        super()._write(source, offset)
        source.fill_(SPOILED)


class FailingTier(PageTier):
    """Calls number ``first`` to ``last`` of ``doing`` (``read``, ``write`` or ``room``) raise ``number``."""

    def __init__(
        self,
        *,
        blocks: int = 3,
        block_nbytes: int = 2**20,
        doing: str = "",
        number: int = errno.EIO,
        first: int = 0,
        last: int = 2**60,
    ) -> None:
        super().__init__(blocks=blocks, block_nbytes=block_nbytes)
        self.doing = doing
        self._number = number
        self._wanted = range(first, last)
        self._lock = threading.Lock()
        self._count = 0

    def arm(self, doing: str, first: int = 0, last: int = 2**60) -> None:
        """From here on calls number ``first`` to ``last`` of ``doing`` fail; none where it is empty."""
        with self._lock:
            self.doing, self._wanted, self._count = doing, range(first, last), 0

    @property
    def calls(self) -> int:
        """Of ``doing`` since it was armed."""
        return self._count

    def _make_room(self, begin: int, end: int) -> None:
        self._fail("room", begin, end - begin)

    def _read(self, into: Tensor, offset: int) -> None:
        self._fail("read", offset, into.numel())
        super()._read(into, offset)

    def _write(self, source: Tensor, offset: int) -> None:
        self._fail("write", offset, source.numel())
        super()._write(source, offset)

    def _fail(self, doing: str, offset: int, nbytes: int) -> None:
        if doing != self.doing:
            return
        with self._lock:
            self._count += 1
            fails = self._count - 1 in self._wanted
        if fails:
            said = f"{os.strerror(self._number)} ({errno.errorcode[self._number]})"
            raise TierError(
                f"failing tier: {doing} at byte {offset:,}: {said}; got 0 of {nbytes:,} bytes"
            )
