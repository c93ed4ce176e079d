"""CUDA devices: streams and events of torch, exported memory of CuPy.

Nothing here touches CUDA before a ``CudaAccelerator`` is made. A rank makes it before it starts MPI (``choice``).

[Note: One exported block]
A CUDA IPC handle names a whole ``cudaMalloc`` block, whatever pointer into it was given (cupy#9436). Memory of pools
(cudaMallocAsync, expandable segments) has no handle. Each export is therefore one block from ``cudaMalloc`` itself, and
we cut it up by offsets.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from hpczero.accelerator.base import Accelerator, Attached, Lane, Mark, MemoryExport, Span
from hpczero.errors import CommError, ConfigError

# Bytes: smaller blocks may lie in one allocation with others, which an export would show too.
GRANULE = 2 * 2**20
LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess, the only flag there is


class _Event(Mark):
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def wait(self) -> None:
        self.event.synchronize()


class _Events(Span):
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._begin, self._end = (
            torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        self._begin.record(stream)

    def end(self) -> None:
        self._end.record(self._stream)

    def passed(self) -> bool:
        return bool(self._end.query())  # type: ignore[no-untyped-call]

    def seconds(self) -> float:
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end)) / 1e3


class _Stream(Lane):
    """A CUDA stream of high priority: copies and sums are short, and somebody waits for them."""

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def after(self, mark: Mark) -> None:
        assert isinstance(mark, _Event), "marks of one kind of device"
        self._stream.wait_event(mark.event)

    def copy(self, into: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            into.copy_(source, non_blocking=True)

    def mark(self) -> Mark:
        return _Event(self._stream)

    @contextmanager
    def current(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            yield


class _ExportedBlock(MemoryExport):
    """One allocation that other processes may map ([Note: One exported block])."""

    def __init__(self, cupy: ModuleType, device: torch.device, nbytes: int) -> None:
        self._runtime = cupy.cuda.runtime
        self._address = 0
        self.nbytes = 0
        try:
            self._address = self._allocated(-(-max(nbytes, 1) // GRANULE) * GRANULE)
        except self._runtime.CUDARuntimeError as error:
            free, total = torch.cuda.mem_get_info(device)
            raise CommError(
                f"{device}: no {nbytes:,} bytes for buffers that other ranks read ({error}); {free:,} of {total:,} "
                "bytes are free. Use more ranks, smaller units, or --parallel.transport flat"
            ) from error
        try:
            self.ticket = bytes(self._runtime.ipcGetMemHandle(self._address))
        except self._runtime.CUDARuntimeError as error:
            self.close()
            raise CommError(
                f"{device}: its memory cannot be exported to other processes ({error}); CUDA IPC does not work here "
                "(WSL, some virtual GPUs). Use --parallel.transport hierarchical"
            ) from error
        self.memory = _tensor_at(cupy, device, self._address, nbytes, self)

    def _allocated(self, nbytes: int) -> int:
        try:
            address = int(self._runtime.malloc(nbytes))
        except self._runtime.CUDARuntimeError:
            gc.collect()
            torch.cuda.empty_cache()  # torch may keep what has been freed
            address = int(self._runtime.malloc(nbytes))
        self.nbytes = nbytes
        return address

    def close(self) -> None:
        address, self._address = self._address, 0
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.nbytes = 0
        if address:
            self._runtime.free(address)


class _Peer(Attached):
    def __init__(self, cupy: ModuleType, device: torch.device, ticket: bytes, nbytes: int) -> None:
        self._runtime = cupy.cuda.runtime
        try:
            self._address = int(self._runtime.ipcOpenMemHandle(ticket, LAZY_PEER_ACCESS))
        except self._runtime.CUDARuntimeError as error:
            raise CommError(
                f"{device}: the memory of another rank of this node cannot be mapped ({error}). Its device is hidden "
                "from this process or cannot be reached: ask for GPUs per node, not per task (--gpus-per-node, "
                "--gpu-bind=none), and keep containers in one IPC namespace; or use --parallel.transport hierarchical"
            ) from error
        self.memory = _tensor_at(cupy, device, self._address, nbytes, self)

    def close(self) -> None:
        address, self._address = self._address, 0
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        if address:
            self._runtime.ipcCloseMemHandle(address)


def _tensor_at(
    cupy: ModuleType, device: torch.device, address: int, nbytes: int, owner: object
) -> Tensor:
    """(nbytes,) uint8 at an address that ``owner`` keeps valid; no copy."""
    memory = cupy.cuda.UnownedMemory(address, max(nbytes, 1), owner, device.index)
    array = cupy.ndarray(nbytes, dtype=cupy.uint8, memptr=cupy.cuda.MemoryPointer(memory, 0))
    found = torch.as_tensor(array, device=device)
    if nbytes and found.data_ptr() != address:
        # The driver names the device of whoever allocated it, and torch then copies: a snapshot, never up to date.
        raise CommError(
            f"{device}: torch copies memory at {address:#x} instead of pointing to it, so ranks would train on old "
            "values; use --parallel.transport hierarchical"
        )
    return found


class CudaAccelerator(Accelerator):
    """One CUDA device."""

    def __init__(self, index: int) -> None:
        """Start CUDA on device ``index`` for this thread.

        Raises:
            ConfigError: there is no such device, or CuPy is missing.
        """
        count = torch.cuda.device_count()
        if index >= count:
            raise ConfigError(
                f"device cuda:{index}: this process sees {count} CUDA device(s); ask for as many GPUs per node as "
                "ranks (--gpus-per-node), or use --parallel.device cpu"
            )
        self.device = torch.device("cuda", index)
        self._cupy = load_cupy()
        self._blocks: weakref.WeakSet[_ExportedBlock] = weakref.WeakSet()
        try:
            self.enter_thread()
            torch.cuda.init()  # type: ignore[no-untyped-call]
            # The context is there before MPI asks for it (mpi4jax#106).
            torch.empty(1, device=self.device, dtype=torch.float32)
        except RuntimeError as error:
            raise ConfigError(
                f"{self.device}: cannot be used by this process ({error}). Where ranks share a device, its compute "
                "mode must not be exclusive (nvidia-smi -q -d COMPUTE); else start one rank for each device, or use "
                "--parallel.device cpu"
            ) from error

    @override
    def mark(self) -> Mark:
        return _Event(torch.cuda.current_stream(self.device))

    @override
    def span(self) -> Span:
        return _Events(torch.cuda.current_stream(self.device))

    @override
    def lane(self) -> Lane:
        return _Stream(self.device)

    @override
    def pinned(self, nbytes: int) -> Tensor:
        with torch.inference_mode(False):  # it is kept
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True, device="cpu")

    @override
    def export(self, nbytes: int) -> MemoryExport:
        block = _ExportedBlock(self._cupy, self.device, nbytes)
        self._blocks.add(block)
        return block

    @override
    def attach(self, ticket: bytes, nbytes: int) -> Attached:
        return _Peer(self._cupy, self.device, ticket, nbytes)

    @override
    def bring(self, tensor: Tensor) -> Tensor:
        # Torch keeps the pinned copy until it has been read.
        return tensor.pin_memory().to(self.device, non_blocking=True)

    @property
    @override
    def identity(self) -> str:
        return str(getattr(torch.cuda.get_device_properties(self.device), "uuid", self.device))

    @override
    def describe(self) -> str:
        found = torch.cuda.get_device_properties(self.device)
        return f"{found.name}, {found.total_memory / 2**30:.0f} GiB, as {self.device}"

    @override
    def usage(self) -> Mapping[str, int]:
        stats: dict[str, Any] = torch.cuda.memory_stats(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        # Not torch's, and there all the time.
        exported = sum(block.nbytes for block in self._blocks)
        return {
            "allocated": int(stats.get("allocated_bytes.all.current", 0)) + exported,
            "allocated_peak": int(stats.get("allocated_bytes.all.peak", 0)) + exported,
            "reserved": int(stats.get("reserved_bytes.all.current", 0)) + exported,
            "reserved_peak": int(stats.get("reserved_bytes.all.peak", 0)) + exported,
            "inactive_split": int(stats.get("inactive_split_bytes.all.current", 0)),
            "retries": int(stats.get("num_alloc_retries", 0)),
            "used_by_all": total - free,
            "total": total,
        }

    @override
    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    @override
    def enter_thread(self) -> None:
        torch.cuda.set_device(self.device)
        self._cupy.cuda.Device(self.device.index).use()


def load_cupy() -> ModuleType:
    """Import CuPy.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import cupy
    except ImportError as error:
        raise ConfigError(
            f"CuPy cannot be imported ({error}); install cupy-cuda12x[ctk] or cupy-cuda13x[ctk], as the CUDA of the "
            "driver, or use --parallel.device cpu"
        ) from error
    module: ModuleType = cupy
    return module
