"""How a process uses torch: the accelerator it computes on, repeatable results, and the compiler left out."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable
from threading import RLock
from types import ModuleType
from typing import Any

import torch

from hpczero.accelerator.base import Accelerator
from hpczero.accelerator.host import HostAccelerator
from hpczero.errors import ConfigError
from hpczero.options.environment import LOCAL_RANK_VARIABLES, Environment, fix_cublas_workspace

# torch's compiler left out of a process that compiles nothing.
#
# Every optimizer of torch imports the compiler when it is made and when it steps, to say that it is not to be compiled.
# Activation checkpointing does so too. The import reads about a thousand files and takes as long and as much memory as
# the rest of torch; 400 ranks on a parallel file system feel it. The stand-in answers the three questions of these two
# as they are answered where nothing is compiled. Everything else, such as ``torch.compile``, imports the true compiler.

_NAME = "torch._dynamo"


def leave_out_compiler() -> None:
    """Do not import torch's compiler from now on, before it is used.

    For our commands; no effect once it is imported.
    """
    if _NAME not in sys.modules:
        found = importlib.util.find_spec(_NAME)
        standin = _Compiler(_NAME)
        standin.__file__ = None if found is None else found.origin
        sys.modules[_NAME] = standin
        torch._dynamo = standin


class _Config:
    # Checkpointing keeps it at each forward, and uses it only while it is itself traced.
    error_on_nested_fx_trace = True

    def __init__(self, compiler: _Compiler) -> None:
        object.__setattr__(self, "_compiler", compiler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiler.true().config, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._compiler.true().config, name, value)


class _Compiler(ModuleType):
    """Answers as ``torch._dynamo`` does in a process that compiles nothing."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._lock = RLock()
        self.config = _Config(self)

    def graph_break(self, msg: str = "") -> None:
        return

    def disable(self, fn: Any = None, recursive: bool = True, **options: Any) -> Any:
        """``fn``, which the compiler leaves out once it is imported."""
        if fn is None:
            return functools.partial(self.disable, recursive=recursive, **options)
        disabled: Callable[..., Any] | None = None

        @functools.wraps(fn)
        def called(*args: Any, **kwargs: Any) -> Any:
            nonlocal disabled
            if sys.modules.get(_NAME) is self:
                return fn(*args, **kwargs)
            if disabled is None:
                disabled = self.true().disable(fn, recursive, **options)
            return disabled(*args, **kwargs)

        return called

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__path__", "__all__"):
            raise AttributeError(name)  # many tools look at each module for such
        return getattr(self.true(), name)

    def true(self) -> Any:
        """The compiler itself, imported now if it was not."""
        with self._lock:
            if sys.modules.get(_NAME) is self:
                del sys.modules[_NAME]
                del torch._dynamo
            return importlib.import_module(_NAME)  # which puts itself in both places


def be_deterministic() -> None:
    """Allow only deterministic operations in this process. Not collective; comes before the first call of CUDA.

    Fused attention then takes its ordered backward, and an operation that has no ordered form raises torch's
    RuntimeError, which names it.

    Raises:
        ConfigError: CUDA has started already, or CUBLAS_WORKSPACE_CONFIG is set to what has no fixed order.

    Source: torch's notes on reproducibility.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise ConfigError(
            "deterministic: CUDA has started in this process, and cuBLAS has read its settings; expected to be asked "
            "before anything is on a device. Call it first, or export CUBLAS_WORKSPACE_CONFIG=:4096:8"
        )
    fix_cublas_workspace()
    torch.use_deterministic_algorithms(True)
    # It would fill all new memory with NaN, which costs a pass over each. Nothing here reads memory before writing it.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False  # by a measurement, which has another outcome every time


KINDS = ("auto", "cpu", "cuda")


def choose_accelerator(kind: str = "auto", environment: Environment | None = None) -> Accelerator:
    """The device of this rank. Not collective: it comes before MPI.

    Args:
        kind: ``cpu``, ``cuda``, or ``auto``: cuda where torch sees a device.
        environment: of this process; None reads it.

    Raises:
        ConfigError: ``cuda`` without a CUDA device, or an allocator whose memory no other process can map.
    """
    if kind not in KINDS:
        raise ConfigError(f"device: got {kind!r}, expected one of {', '.join(KINDS)}")
    if kind == "cpu" or (kind == "auto" and not _has_cuda()):
        return HostAccelerator()
    environment = environment or Environment.read()
    if not _has_cuda():
        raise ConfigError(
            "device: cuda was asked for, and torch sees none: this is a CPU build of torch, no GPU was given to the "
            "job (--gpus-per-node), or the driver is not loaded (nvidia-smi)"
        )
    check_allocator(environment.cuda_allocators)
    from hpczero.accelerator.cuda import CudaAccelerator

    local_rank = environment.local_rank
    if local_rank is None and not environment.launched_by:
        local_rank = 0  # a process of its own
    return CudaAccelerator(device_index(local_rank, torch.cuda.device_count()))


def accelerator_of(device: torch.device) -> Accelerator:
    """The accelerator whose memory ``device`` is, for a model that lies there already.

    Raises:
        ConfigError: the device is neither cpu nor cuda.
    """
    if device.type in ("cpu", "meta"):
        return HostAccelerator()
    if device.type != "cuda":
        raise ConfigError(f"device: got {device}, expected cpu or cuda")
    from hpczero.accelerator.cuda import CudaAccelerator

    check_allocator(Environment.read().cuda_allocators)
    index = torch.cuda.current_device() if device.index is None else device.index
    return CudaAccelerator(index)


def device_index(local_rank: int | None, count: int) -> int:
    """Which of ``count`` visible devices a rank takes. Several ranks may share one; they take them in turn.

    ``local_rank``: place of the rank on its node; None where the launcher does not say.
    """
    if count == 1:
        return 0  # the only one, or the launcher has given each rank its own
    if local_rank is None:
        raise ConfigError(
            f"device: this process sees {count} GPUs and the launcher does not say which rank of the node it is "
            f"({', '.join(LOCAL_RANK_VARIABLES)}); start it with mpirun or srun, or set CUDA_VISIBLE_DEVICES to one "
            "device for each rank"
        )
    return local_rank % count


def check_allocator(settings: Iterable[tuple[str, str]]) -> None:
    """Refuse allocators whose memory cannot be given to MPI or to other ranks. ``settings``: variables and values.

    Raises:
        ConfigError: such an allocator is set; the message names the variable.
    """
    for name, value in settings:
        text = value.replace(" ", "").lower()
        if "expandable_segments:true" in text or "backend:cudamallocasync" in text:
            raise ConfigError(
                f"{name}={value}: memory of this kind cannot be shared by CUDA IPC, and CUDA-aware MPI libraries have "
                "been slow, wrong or crashed on it (ucx#11548, ucx#7110); leave that setting out"
            )


def _has_cuda() -> bool:
    return torch.cuda.is_available()
