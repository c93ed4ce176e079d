"""Savers: one rank's part of each way to put the state of a training on disk and back.

``python -m scaling.checkpoint.ways JSON`` is a `scaling.contenders.rank` that takes further orders. Frameworks are
loaded by the way that needs them: a process of torch.distributed must not start MPI, and the other way round.

Every way ends with fsync of what it wrote: raw by each rank, DCP by ``FileSystemWriter(sync_files=True)``, which is its
default and leaves the folder's own entry out, hpczero its file, manifest and folders.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor
from torch.distributed.tensor import DTensor

from hpczero.errors import run
from hpczero.models.config import parameter_count
from scaling.checkpoint.__main__ import BYTES_PER_PARAMETER
from scaling.contenders.base import Contender, batch
from scaling.contenders.rank import Rank, Reply, main
from scaling.contenders.workload import Workload
from scaling.evidence.host import kernel_nbytes

if TYPE_CHECKING:
    from hpczero.checkpoint import Checkpoints

MOST_NBYTES = 2**30  # of one system call


class Way(ABC):
    """One way to save and load. Every method is collective."""

    def __init__(self, contender: Contender, nbytes: int) -> None:
        """``nbytes``: of the state of all ranks."""
        self.contender = contender
        self.nbytes = nbytes

    @abstractmethod
    def save(self, folder: Path, step: int) -> None:
        """Into the empty ``folder``; on the disk when it returns."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """What ``save`` put there, into model and optimizer."""


class Raw(Way):
    """As many bytes as the state has, from one buffer of each rank to its own part of one file: the floor."""

    def __init__(self, contender: Contender, nbytes: int) -> None:
        super().__init__(contender, nbytes)
        random = np.random.default_rng(contender.rank)
        self._buffer = random.integers(0, 256, nbytes // contender.size, dtype=np.uint8)

    def save(self, folder: Path, step: int) -> None:
        """pwrite, fsync."""
        with opened(folder / "raw", os.O_WRONLY | os.O_CREAT) as descriptor:
            for view, offset in self._pieces():
                done = os.pwrite(descriptor, view, offset)
                assert done == len(view), "a regular file with room"
            os.fsync(descriptor)

    def load(self, folder: Path) -> None:
        """Preadv into memory that is there already."""
        with opened(folder / "raw", os.O_RDONLY) as descriptor:
            for view, offset in self._pieces():
                done = os.preadv(descriptor, [view], offset)
                assert done == len(view), "a regular file, complete"

    def _pieces(self) -> Iterator[tuple[memoryview, int]]:
        whole, begin = self._buffer.data, self.contender.rank * len(self._buffer)
        for start in range(0, len(whole), MOST_NBYTES):
            yield whole[start : start + MOST_NBYTES], begin + start


class Hpczero(Way):
    """`hpczero.checkpoint`: the public calls, with everything they do."""

    def __init__(self, contender: Contender, nbytes: int, *, writer: str) -> None:
        super().__init__(contender, nbytes)
        self._writer = writer

    def save(self, folder: Path, step: int) -> None:
        from hpczero import checkpoint

        checkpoint.save(folder, self.contender.model, step=step, writer=self._writer)

    def load(self, folder: Path) -> None:
        from hpczero import checkpoint

        checkpoint.load(folder, self.contender.model)


class Dcp(Way):
    """torch.distributed.checkpoint, as its documentation says for FSDP2."""

    def save(self, folder: Path, step: int) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict import get_state_dict
        from torch.distributed.checkpoint.state_dict_saver import save

        model, optimizer = get_state_dict(self.contender.model, self.contender.optimizer)
        writer = FileSystemWriter(folder, sync_files=True)
        save({"model": model, "optimizer": optimizer}, storage_writer=writer)

    def load(self, folder: Path) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
        from torch.distributed.checkpoint.state_dict_loader import load

        model, optimizer = get_state_dict(self.contender.model, self.contender.optimizer)
        state = {"model": model, "optimizer": optimizer}  # loaded in place
        load(state, storage_reader=FileSystemReader(folder))
        set_state_dict(
            self.contender.model,
            self.contender.optimizer,
            model_state_dict=model,
            optim_state_dict=optimizer,
        )


WAYS: dict[str, Callable[[Contender, int], Way]] = {
    "raw": Raw,
    "posix": partial(Hpczero, writer="posix"),
    "mpio": partial(Hpczero, writer="mpio"),
    "dcp": Dcp,
}


class Saver(Rank):
    """Answers further commands of the crew; one method for each."""

    def __init__(self, contender: Contender, workload: Workload) -> None:
        super().__init__(contender, workload)
        self._ways: dict[str, Way] = {}
        self._checkpoints: Checkpoints | None = None

    def save(self, way: str, folder: str, step: int, metered: int = 0) -> Reply:
        """Save; says how long it took, or with ``metered`` how much more memory this process had meanwhile."""
        return self._told(partial(self._way(way).save, Path(folder), step), metered)

    def load(self, way: str, folder: str, metered: int = 0) -> Reply:
        """The same of a load of what the kernel has forgotten."""
        self._contender.barrier()
        forget(Path(folder))
        return self._told(partial(self._way(way).load, Path(folder)), metered)

    def digest(self) -> Reply:
        """Of this rank's parameters and optimizer state."""
        from xxhash import xxh3_64_hexdigest

        tensors = state_tensors(self._contender)
        return {"digests": [xxh3_64_hexdigest(t.numpy().data) for t in tensors]}

    def describe(self) -> Reply:
        """What hpczero can do here: save through MPI-IO, save in the background."""
        import h5py

        from hpczero.comm.background import can_run_in_background

        return {
            "mpio": bool(h5py.get_config().mpi),
            "background": can_run_in_background(),
            "mpi_io": os.environ.get("OMPI_MCA_io", ""),  # noqa: SIM112  (Open MPI's own)
            "hdf5": h5py.version.hdf5_version,
        }

    def hold(self, folder: str, step: int, steps: int) -> Reply:
        """Train ``steps`` steps, save in the background, train on until that is done.

        Says how long a plain copy of the shards takes, how long ``save`` held the training, each step without and with
        a write going on, and how long the write took.
        """
        contender = self._contender
        samples = batch(self._workload, step=step, rank=contender.rank)
        if self._checkpoints is None:
            from hpczero.checkpoint import Checkpoints

            self._checkpoints = Checkpoints(folder, contender.model, background=True)
        checkpoints = self._checkpoints
        copy_s = self._timed(lambda: [tensor.clone() for tensor in state_tensors(contender)])
        quiet_s = [self._timed(partial(contender.step, *samples)) for _ in range(steps)]
        contender.barrier()
        begin = time.perf_counter()
        checkpoints.save(step)
        hold_s, busy_s = time.perf_counter() - begin, []
        while True:
            busy_s.append(self._timed(partial(contender.step, *samples)))
            if checkpoints.check() is not None:
                break
        times = {"copy_s": copy_s, "hold_s": hold_s, "quiet_s": quiet_s, "busy_s": busy_s}
        return {**times, "write_s": time.perf_counter() - begin}

    def end(self) -> Reply:
        """Leave the other ranks."""
        if self._checkpoints is not None:
            self._checkpoints.close()
        return super().end()

    def _way(self, way: str) -> Way:
        if way not in self._ways:
            nbytes = BYTES_PER_PARAMETER * parameter_count(self._workload.model)
            self._ways[way] = WAYS[way](self._contender, nbytes)
        return self._ways[way]

    def _told(self, call: Callable[[], object], metered: int) -> Reply:
        return {"found": self._metered(call) if metered else self._timed(call)}

    def _timed(self, call: Callable[[], object]) -> float:
        self._contender.barrier()
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    def _metered(self, call: Callable[[], object]) -> int:
        """Largest resident set during ``call``, above the one before."""
        ctypes.CDLL(None).malloc_trim(0)  # what is free already must not hide what is needed
        self._contender.barrier()
        Path("/proc/self/clear_refs").write_text("5")  # the peak is now the present (proc(5))
        before = kernel_nbytes("/proc/self/status", "VmRSS:")
        call()
        most = kernel_nbytes("/proc/self/status", "VmHWM:")
        return max(most - before, 0)


def state_tensors(contender: Contender) -> list[Tensor]:
    """This rank's parameters and their optimizer state, flat; views."""
    found = []
    for group in contender.optimizer.param_groups:
        for parameter in group["params"]:
            state: dict[str, Any] = contender.optimizer.state[parameter]
            tensors = [parameter, *(v for v in state.values() if isinstance(v, Tensor) and v.dim())]
            for tensor in tensors:
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                # A zeroified optimizer guards its parameters against being taken for whole ones.
                found.append(local.detach().as_subclass(Tensor).reshape(-1))
    return found


def forget(folder: Path) -> None:
    """Have the kernel drop what it keeps of the files in ``folder``; they are on the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with opened(path, os.O_RDONLY) as descriptor:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """A descriptor."""
    descriptor = os.open(path, flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    run(partial(main, Saver))
