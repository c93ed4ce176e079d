"""What the checks share: sizes, the device with its ranks, two clocks, a GPT to train.

What differs between a device and its twin on the host is here too, whether ranks take turns on a device, the cap of
memory, and how ranks print rows and end.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import resource
import socket
import subprocess
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

import hpczero
from hpczero.accelerator import Accelerator
from hpczero.errors import HpcZeroError, abort_job
from hpczero.models import GPT
from hpczero.models.config import GPTConfig
from scaling.contenders.workload import gpt_sizes
from scaling.evidence.record import LEFT, Row

if TYPE_CHECKING:
    from hpczero.job.topology import Topology

MIB = 2**20
REPEATS = 7
CALLS = 20  # of a kernel without a pause: one may be over before the host has read its clock
MPS_S = 5.0
TILE_NUMEL = 2**20
OTHERS_S = 3.0  # for ranks that stop at about the same time, each by itself


@dataclass(frozen=True)
class Sizes:
    """What differs between a device and its twin."""

    kernel_nbytes: int  # that one call of a kernel reads and writes, or three quarters of it
    messages: tuple[int, ...]
    tiny: GPTConfig
    long: GPTConfig  # with so many tokens that fused attention has several blocks of them
    models: tuple[tuple[str, GPTConfig, int], ...]  # name, network, sequences of one step
    large: tuple[GPTConfig, int]
    capped: tuple[GPTConfig, int]  # to be trained in less memory than its states take


_TINY = gpt_sizes(3, 48, 3, 101, 24)
_LONG = gpt_sizes(2, 128, 2, 101, 1024)
DEVICE = Sizes(
    kernel_nbytes=2048 * MIB,
    messages=(64 * MIB, 512 * MIB),
    tiny=_TINY,
    long=_LONG,
    models=(
        ("124M", gpt_sizes(12, 768, 12, 50304, 1024), 16),
        ("1.5B", gpt_sizes(48, 1600, 25, 50304, 1024), 8),
    ),
    large=(gpt_sizes(48, 1600, 25, 50304, 1024), 4),
    # 0.77 B: of 1.5 B four ranks' caps are 90 GB together, more than a card of 80 GB has.
    capped=(gpt_sizes(36, 1280, 20, 50304, 1024), 1),
)
TWIN = Sizes(
    kernel_nbytes=MIB,
    messages=(MIB // 4,),
    tiny=_TINY,
    long=dataclasses.replace(_LONG, context=256),  # a host computes in bf16 ten times as long
    models=(("tiny", gpt_sizes(2, 64, 2, 256, 32), 2),),
    large=(gpt_sizes(2, 64, 2, 256, 32), 2),
    capped=(gpt_sizes(8, 512, 8, 2048, 64), 1),
)


class Bench:
    """The device, the ranks that share it, and two clocks: the host's, which waits for the device, and the device's.

    Attributes:
        left_open: a transport could not be closed: MPI must not be finalized under its windows.
    """

    def __init__(self, accelerator: Accelerator, sizes: Sizes, *, twin: bool) -> None:
        from hpczero.job.topology import Topology

        self.accelerator = accelerator
        self.sizes = sizes
        self.twin = twin
        self.topology: Topology = Topology.of_world()
        self.left_open = False

    def seconds(
        self, call: Callable[[], object], repeats: int = REPEATS, *, calls: int = 1
    ) -> list[float]:
        """By the host's clock, of the slowest rank: what one of ``calls`` took, in each repetition. Collective.

        From a common start until the device is through. For calls that wait on the host themselves, or long ones. The
        first repetition is left out.
        """
        found = []
        for _ in range(repeats + 1):
            self.accelerator.finish()
            self.topology.barrier()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            self.accelerator.finish()
            found.append(max(self.topology.gather((time.perf_counter() - start) / calls)))
        return found[1:]

    def device_seconds(self, call: Callable[[], object], *, calls: int = CALLS) -> float:
        """By the device's clock, of the slowest rank: what one of ``calls`` without a pause took at least. Collective.

        For calls that return before they are done.
        """
        found = []
        call()
        for _ in range(REPEATS):
            self.accelerator.finish()
            self.topology.barrier()
            span = self.accelerator.span()
            for _ in range(calls):
                call()
            span.end()
            found.append(max(self.topology.gather(span.seconds() / calls)))
        return min(found)

    def empty(self, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=self.accelerator.device)

    def cap(self, nbytes: int) -> None:
        """Let this process take at most ``nbytes`` from now on.

        Of the device's memory, by torch; on the twin of private memory, beyond what it has.
        """
        if not self.accelerator.is_host:
            fraction = min(nbytes / self.accelerator.usage()["total"], 1.0)
            torch.cuda.set_per_process_memory_fraction(fraction, self.accelerator.device)
            return
        status = Path("/proc/self/status").read_text()
        (held,) = (line for line in status.splitlines() if line.startswith("VmData:"))
        most = int(held.split()[1]) * 1024 + nbytes
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))

    @cached_property
    def time_sliced(self) -> bool:
        """Whether ranks share a device on which the kernels of only one process run at a time. Collective."""
        if self.accelerator.is_host:
            return False
        device = self.accelerator.device
        name = getattr(torch.cuda.get_device_properties(device), "uuid", device)
        mine = zlib.crc32(f"{socket.gethostname()} {name}".encode())
        most = max(Counter(self.topology.gather(float(mine))).values())
        return most > 1 and not all(self.topology.gather(float(mps()[0])))

    def survived(self, error: HpcZeroError) -> str:
        """What an error said that all ranks have in common, so that the check can go on.

        Raises:
            HpcZeroError: ``error``, if other ranks may be waiting for this one; that ends the job.
        """
        if self.topology.size > 1 and not error.agreed:
            raise error
        self.left_open = True
        return str(error).partition("\n")[0]

    def say(self, row: Row) -> None:
        """Print one row, if this is rank 0; it is out when this returns."""
        if self.topology.is_root:
            print_row(row)

    def leave(self) -> NoReturn:
        """End all ranks without MPI's finalize, which may wait for ever under open windows. Collective."""
        self.topology.barrier()
        self.say(LEFT)
        self.topology.barrier()  # a launcher ends the others when the first is gone
        sys.stderr.flush()
        os._exit(0)

    def leave_alone(self, row: Row) -> NoReturn:
        """Print one row of this rank and end the job, whatever the others are doing; they may do the same."""
        print_row({"rank": self.topology.rank, **row})
        time.sleep(OTHERS_S)
        print_row(LEFT)
        abort_job(1)
        os._exit(1)  # one rank alone


def forget(bench: Bench) -> None:
    """Give back what nobody uses any more."""
    gc.collect()
    if not bench.accelerator.is_host:
        torch.cuda.empty_cache()


def print_row(row: Row) -> None:
    """Print one row; it is out when this returns."""
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


def mps() -> tuple[bool, str]:
    """Whether CUDA MPS is on, by which kernels of several processes run on a device at a time, and how we know.

    Asks a daemon that runs already; never starts one. Without it processes take turns on the device.
    """
    folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "")
    named = f"CUDA_MPS_PIPE_DIRECTORY is {folder or 'not set'}"
    try:
        done = subprocess.run(
            ["nvidia-cuda-mps-control"],
            input="get_server_list\n",
            capture_output=True,
            text=True,
            timeout=MPS_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False, f"{named}, nvidia-cuda-mps-control does not answer"
    except OSError:
        there = bool(folder) and (Path(folder) / "control").exists()
        pipe = f"{'a' if there else 'no'} pipe of a daemon is named"
        return there, f"{named}, no nvidia-cuda-mps-control to ask, {pipe}"
    answers = done.returncode == 0 and "cannot find" not in (done.stdout + done.stderr).lower()
    return answers, f"{named}, {'a' if answers else 'no'} control daemon answers"


def tokens(
    config: GPTConfig, sequences: int, seed: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Inputs and targets, (sequences, context) each, drawn anew for each seed."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(config.vocab_size, (sequences, config.context + 1), generator=generator)
    return drawn[:, :-1].contiguous().to(device), drawn[:, 1:].contiguous().to(device)


class Values:
    """The same million small random numbers again and again: random enough to compute with, and quick.

    By ranges: drawn as a GPT's, and checked in whole, 1.5 B values take a core 15 seconds, several times in a run.
    """

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._tile = 0.02 * torch.randn(TILE_NUMEL, generator=generator)

    def __call__(self, name: str, tensor: Tensor) -> None:
        """Fill a whole parameter."""
        self.fill_range(name, tuple(tensor.shape), 0, tensor.view(-1))

    def fill_range(self, name: str, shape: tuple[int, ...], start: int, values: Tensor) -> None:
        """Fill ``values`` with the elements from ``start`` on of one parameter."""
        done = 0
        while done < len(values):
            at = (start + done) % TILE_NUMEL
            piece = self._tile[at : at + len(values) - done]
            values[done : done + len(piece)].copy_(piece)
            done += len(piece)


def compile_blocks(model: GPT) -> None:
    """Let torch compile each block."""
    for block in model.blocks:
        block.compile()


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """What all ways train with."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3, fused=True)


def sharded(
    bench: Bench,
    config: GPTConfig,
    initialize: Callable[[str, Tensor], None] | None = None,
    *,
    compiled: bool = False,
    **options: Any,
) -> tuple[nn.Module, Any]:
    """A GPT by hpczero, and its optimizer. Collective.

    Args:
        bench: whose ranks.
        config: of the network.
        initialize: first values; None: a GPT's own.
        compiled: each block by torch's compiler.
        options: of ``zeroify``.
    """
    with torch.device("meta"):
        model = GPT(config)
    if compiled:
        compile_blocks(model)
    optimizer = adamw(model)
    given = {"topology": bench.topology, **options}
    own = initialize or model.initial_weights(seed=0)
    hpczero.zeroify(model, optimizer, device=bench.accelerator, initialize=own, **given)
    return model, optimizer


def train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    """One step; its loss."""
    loss: Tensor = model(x, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()
