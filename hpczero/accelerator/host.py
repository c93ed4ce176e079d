"""The host as an accelerator: nothing is late, and exports lie in shared memory. It is the CPU twin of a device."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import override

from hpczero.accelerator.base import Accelerator, Attached, Lane, Mark, MemoryExport, Span
from hpczero.errors import CommError

FOLDER = Path("/dev/shm")


class _SharedFile(MemoryExport):
    """A file in /dev/shm, mapped by all who attached it. It has no name once it is sealed."""

    def __init__(self, nbytes: int) -> None:
        name = f"hpczero-export-{os.getpid()}-{secrets.token_hex(8)}"
        self._path: Path | None = FOLDER / name
        self.ticket = name.encode()
        try:
            descriptor = os.open(FOLDER / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                # Touching a page that a full tmpfs cannot give kills the process; this is an error instead.
                os.posix_fallocate(descriptor, 0, max(nbytes, 1))
                self.memory = _mapped(descriptor, nbytes)
            finally:
                os.close(descriptor)
        except OSError as error:
            self.seal()
            raise CommError(
                f"no {nbytes:,} bytes of shared memory in {FOLDER}: {error.strerror}; free some of it, enlarge it "
                "(mount -o remount,size=...), or use transport flat"
            ) from error

    def seal(self) -> None:
        path, self._path = self._path, None
        if path is not None:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        self.seal()
        # The map goes with the last tensor on it.
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.seal()


class _MappedFile(Attached):
    def __init__(self, ticket: bytes, nbytes: int) -> None:
        path = FOLDER / ticket.decode()
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise CommError(
                f"{path}: {os.strerror(error.errno or errno.EIO)}; ranks of a node must see the same {FOLDER} (one "
                "container for the node, or --ipc=host)"
            ) from error
        try:
            self.memory = _mapped(descriptor, nbytes)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")


def _mapped(descriptor: int, nbytes: int) -> Tensor:
    memory = mmap.mmap(descriptor, max(nbytes, 1))
    return torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]


class HostAccelerator(Accelerator):
    """The CPU and its memory."""

    is_host = True

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    @override
    def mark(self) -> Mark:
        return Mark()

    @override
    def span(self) -> Span:
        return Span()

    @override
    def lane(self) -> Lane:
        return Lane()

    @override
    def pinned(self, nbytes: int) -> Tensor:
        with torch.inference_mode(False):  # it is kept
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    @override
    def export(self, nbytes: int) -> MemoryExport:
        return _SharedFile(nbytes)

    @override
    def attach(self, ticket: bytes, nbytes: int) -> Attached:
        return _MappedFile(ticket, nbytes)

    @override
    def describe(self) -> str:
        return "cpu"

    @override
    def usage(self) -> Mapping[str, int]:
        return {}
