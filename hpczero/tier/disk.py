"""The disk tier: shards rest in a file without a name, in a folder of this node or of all.

A killed run leaves bytes of several steps in it. So it loses its name as soon as it is open, and its room comes back
however the process ends.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import socket
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from torch import Tensor
from typing_extensions import override

from hpczero.accelerator import Accelerator, HostAccelerator
from hpczero.errors import ConfigError, TierError
from hpczero.files.direct import PAGE, filesystem_of, make_direct
from hpczero.files.durable import remove_old
from hpczero.memory.pages import host_pages
from hpczero.tier.staged import CALL_NBYTES, LANES, StagedTier, Staging

IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs", "rootfs"})
NAMED = re.compile(r"hpczero-tier-.+-\d+-[0-9a-f]{16}")
# A file keeps its name for an instant. One that has had it for so long is of a process that was killed in it.
LEFT_OVER_S = 600.0


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=3)


class DiskTier(StagedTier):
    """One file of this rank, read and written past the kernel's cache. Staging lies on the host."""

    def __init__(
        self,
        folder: Path,
        *,
        blocks: int,
        block_nbytes: int,
        accelerator: Accelerator | None = None,
        lanes: int = LANES,
        call_nbytes: int = CALL_NBYTES,
        tell: Callable[[str], None] = _warn,
    ) -> None:
        """Makes the file and the staging blocks.

        Args:
            folder: on a disk; is there. Ranks may share it.
            blocks: of staging.
            block_nbytes: bytes of parts that fit into one.
            accelerator: of the device that is copied to; None: the host.
            lanes: calls in flight, 4 to 8 for one disk.
            call_nbytes: of one call.
            tell: called once with a sentence if the file system reads and writes through the kernel's cache only.

        Raises:
            ConfigError: there is no such folder; it is memory; no blocks.
            TierError: the file cannot be made there, with what the system said.
            OutOfMemory: the blocks do not fit.
        """
        accelerator = accelerator or HostAccelerator()
        self._folder = folder
        self._kind = checked_folder(folder)
        self._fd = self._opened()
        # Calls in progress hold this object, so nobody uses the number any more when it goes.
        self._shut = weakref.finalize(self, os.close, self._fd)
        try:
            alignment = self._trial()
            self._direct = bool(alignment)
            memory = partial(host_pages, accelerator=accelerator)
            staging = Staging(blocks, block_nbytes, alignment=alignment or PAGE, memory=memory)
            super().__init__(staging, accelerator=accelerator, lanes=lanes, call_nbytes=call_nbytes)
        except BaseException:
            self._shut()
            raise
        if not self._direct:
            tell(
                f"disk tier: {self._kind} at {folder} takes no calls past the kernel's cache (O_DIRECT), so bytes go "
                "through it: expect a half to a fifth of the disk's speed, and more use of the processor"
            )

    @override
    def describe(self) -> str:
        way = "past the kernel's cache" if self._direct else "through the kernel's cache"
        return f"file in {self._folder} ({self._kind}), {way}, staged in memory of the host"

    @override
    def _make_room(self, begin: int, end: int) -> None:
        try:
            if end > begin:
                os.posix_fallocate(self._fd, begin, end - begin)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._fd, begin)  # what was reserved of it goes back
            raise TierError(
                f"{self._what}: no room for {end - begin:,} bytes beyond {begin:,}: {said(error)}; "
                f"{self._free()}Make room, or name another folder"
            ) from error

    @override
    def _read(self, into: Tensor, offset: int) -> None:
        self._move(os.preadv, into, offset, "reading")
        if not self._direct:
            os.posix_fadvise(self._fd, offset, into.numel(), os.POSIX_FADV_DONTNEED)

    @override
    def _write(self, source: Tensor, offset: int) -> None:
        self._move(os.pwritev, source, offset, "writing")
        # What is not on the disk yet stays in memory, and nobody would hear of its errors.
        if not self._direct:
            try:
                os.fdatasync(self._fd)
            except OSError as error:
                raise self._error("writing", offset, 0, source.numel(), said(error)) from error
            os.posix_fadvise(self._fd, offset, source.numel(), os.POSIX_FADV_DONTNEED)

    @override
    def _release(self) -> None:
        self._shut()

    # --- the file

    def _opened(self) -> int:
        name = f"hpczero-tier-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(8)}"
        self._path = self._folder / name
        remove_old(self._folder, NAMED, age_s=LEFT_OVER_S)
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                self._path.unlink()
            except BaseException:
                os.close(fd)
                raise
        except OSError as error:
            raise TierError(
                f"disk tier: {self._path} cannot be made: {said(error)}; name a folder that this rank may write to"
            ) from error
        return fd

    def _trial(self) -> int:
        try:
            return make_direct(self._fd)
        except OSError as error:
            raise TierError(
                f"{self._what}: a trial block cannot be written and read: {said(error)}; {self._free()}Name another "
                "folder"
            ) from error

    def _move(
        self,
        call: Callable[[int, list[memoryview], int], int],
        memory: Tensor,
        offset: int,
        doing: str,
    ) -> None:
        view, done = memory.numpy().data, 0
        while done < len(view):
            try:
                count = call(self._fd, [view[done:]], offset + done)
            except OSError as error:
                raise self._error(doing, offset, done, len(view), said(error)) from error
            if count <= 0:
                raise self._error(doing, offset, done, len(view), "the file ends there")
            done += count
            if self._direct and done % self._staging.alignment:
                raise self._error(doing, offset, done, len(view), "the call came short")

    def _error(self, doing: str, offset: int, got: int, expected: int, why: str) -> TierError:
        return TierError(
            f"{self._what}: {doing} at byte {offset:,}: {why}; got {got:,} of {expected:,} bytes. {self._free()}"
            "Look at the disk (dmesg, quota), or name another folder"
        )

    @property
    def _what(self) -> str:
        return f"disk tier: {self._path} (has no name any more)"

    def _free(self) -> str:
        try:
            return f"{shutil.disk_usage(self._folder).free:,} bytes are free. "
        except OSError:
            return ""


def checked_folder(folder: Path) -> str:
    """Type of the file system of a folder that a disk tier may use; asks nobody to write.

    Raises:
        ConfigError: it is no folder, or lies in memory.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"disk tier: {folder} is no folder; make it on a disk of each node, and name it"
        )
    kind = filesystem_of(folder)
    if kind in IN_MEMORY:
        raise ConfigError(
            f"disk tier: {folder} lies in memory ({kind}), so nothing would be saved; name a folder on a disk (df -T), "
            "or let shards rest in memory of the host"
        )
    return kind or "a file system"


def said(error: OSError) -> str:
    """The system's words, and the name of its number."""
    number = error.errno or 0
    return f"{os.strerror(number)} ({errno.errorcode.get(number, number)})"
