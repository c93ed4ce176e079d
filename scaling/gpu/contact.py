"""First contact with a GPU: the checks ``contact``, without MPI, and ``smoke``, on two ranks.

They cost seconds and find what would spoil every other check. ``contact`` starts a process for each part, so that one
that crashes or hangs loses its own rows: ``python -m scaling.gpu.contact PART``. Among its rows are torch's memory and
streams, CuPy's memory as a tensor of torch, the kernel, memory of another process, and whether MPI starts two ranks.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection

import torch

from hpczero.accelerator import Accelerator, choose_accelerator
from hpczero.errors import CommError, run
from hpczero.kernels.tree_sum import kernel_figures, tree_sum
from scaling.evidence.record import Row, mpi_library, versions
from scaling.gpu.bench import MIB, Bench, print_row
from scaling.gpu.jobs import launcher, nvidia_smi

CALLS = 300  # of a call whose cost to the host is taken
WARM_UP = 20
EXPORTED = {False: 512 * MIB, True: MIB}  # on a device, on the twin
SMALL_NUMEL = 4096
LIBRARIES = ("torch", "numpy", "mpi4py", "mpich", "h5py", "triton")
COPIES = 10
PRODUCT = {False: 8192, True: 256}  # rows of a square matrix
PART_S, SLOW = 30.0, 4.0  # the most of a part; as many times that on the twin
TAIL_CHARACTERS = 1500


def contact(*, twin: bool) -> Iterator[Row]:
    """The device without MPI, each part in a process of its own; then two ranks of MPI. Not collective."""
    most_s = PART_S * (SLOW if twin else 1)
    # The first at once: each is mostly its own start. What is timed comes alone.
    for together in (("machine", "device", "kernel", "ranks"), ("peer",)):
        running = {part: _started(part, twin=twin) for part in together}
        end = time.monotonic() + most_s
        for part, process in running.items():
            try:
                out, err = process.communicate(timeout=max(end - time.monotonic(), 0.1))
                said = "" if process.returncode == 0 else f"exit code {process.returncode}"
            except subprocess.TimeoutExpired:
                process.kill()
                out, err = process.communicate()
                said = f"not done after {most_s:.0f} s"
            yield from ({"part": part, **row} for row in _rows(out))
            if said:
                yield {"part": part, "said": f"{said}\n{err[-TAIL_CHARACTERS:]}".strip()}


def _started(part: str, *, twin: bool) -> subprocess.Popen[str]:
    launch = launcher(2) if part == "ranks" else []
    words = [part, "twin"] if twin else [part]
    command = [*launch, sys.executable, "-m", "scaling.gpu.contact", *words]
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def _rows(printed: str) -> list[Row]:
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


def device(accelerator: Accelerator, *, twin: bool) -> Iterator[Row]:
    """Memory of CuPy as a tensor of torch; pinned memory, streams, events; the rate of a product in bf16."""
    yield {"tried": "device", "found": accelerator.describe(), "torch": torch.__version__}
    block = accelerator.export(4 * MIB)  # CommError here: torch copies instead of pointing
    block.memory.fill_(3)
    accelerator.finish()
    lane, host = accelerator.lane(), accelerator.pinned(4 * MIB)
    lane.after(accelerator.mark())
    lane.copy(host, block.memory)
    lane.finish()
    span = accelerator.span()
    block.memory.add_(1)
    span.end()
    took_s = span.seconds()
    right = bool((host == 3).all()) and bool((block.memory == 4).all())
    yield {"tried": "memory, streams, events", "right": right, "us": took_s * 1e6}
    block.close()
    n = PRODUCT[twin]
    x, y = (torch.ones(n, n, device=accelerator.device, dtype=torch.bfloat16) for _ in range(2))
    _rate(accelerator, lambda: x @ y)
    rate = _rate(accelerator, lambda: x @ y)
    yield {"tried": f"product of {n} x {n} in bf16", "tflops": 2 * n**3 * rate / 1e12}


def machine() -> Iterator[Row]:
    """What something may depend on here; nothing of it touches the device."""
    found: dict[str, object] = {
        "nvidia-smi": nvidia_smi("name,driver_version,memory.total,compute_mode,mig.mode.current")[
            1
        ],
        "kernel": os.uname().release,
        "cores": len(os.sched_getaffinity(0)),
        "free in /dev/shm, GiB": round(shutil.disk_usage("/dev/shm").free / 2**30, 1),
        "locked memory": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "open files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "launchers": " ".join(filter(None, map(shutil.which, ("mpirun", "mpiexec", "srun")))),
        "compiler": shutil.which("cc") or "none",
        "versions": ", ".join(f"{name} {number}" for name, number in versions(*LIBRARIES).items()),
    }
    for name, value in found.items():
        yield {"tried": name, "found": str(value)}


def kernel(accelerator: Accelerator, *, twin: bool) -> Iterator[Row]:
    """The sum's kernel is compiled, and has the host's bits, of subnormal numbers too."""
    start = time.perf_counter()
    if not twin:
        figures = kernel_figures((2,), torch.bfloat16, torch.float32, accelerator.device)
        found = {"right": figures is not None, "s": time.perf_counter() - start}
        yield {"tried": "compile the sum", **found, **(figures or {})}
    for numbers, size in (("normal", 1.0), ("subnormal", 2.0**-140)):
        generator = torch.Generator().manual_seed(0)
        few = [torch.randn(SMALL_NUMEL, generator=generator) * size for _ in range(2)]
        here, there = torch.zeros(SMALL_NUMEL), torch.zeros(SMALL_NUMEL, device=accelerator.device)
        tree_sum(few, here, groups=[range(2)], scale=0.5)
        tree_sum([f.to(accelerator.device) for f in few], there, groups=[range(2)], scale=0.5)
        same = torch.equal(here.view(torch.int32), there.cpu().view(torch.int32))
        yield {"tried": f"sum of {numbers} numbers has the host's bits", "right": same}


def peer(accelerator: Accelerator, *, twin: bool) -> Iterator[Row]:
    """Another process reads a block of this one: right, and at which rate beside a copy of its own."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=_read_of_peer, args=(there, twin), daemon=True)
    process.start()
    block = accelerator.export(EXPORTED[twin])
    block.memory.fill_(7)
    accelerator.finish()
    here.send((block.ticket, EXPORTED[twin]))
    yield {"tried": "memory of another process", **here.recv()}  # the part has a limit of time
    process.join()
    block.close()


def _read_of_peer(pipe: Connection, twin: bool) -> None:
    accelerator = choose_accelerator("cpu" if twin else "cuda")
    ticket, nbytes = pipe.recv()
    theirs = accelerator.attach(ticket, nbytes)
    right = bool((theirs.memory == 7).all())
    mine = torch.empty_like(theirs.memory)
    other = torch.empty_like(mine)
    rates = [
        2 * nbytes * _rate(accelerator, partial(mine.copy_, source)) / 1e9
        for source in (theirs.memory, other)
    ]
    theirs.close()
    pipe.send({"right": right, "gb_per_s": rates[0], "own_copy_gb_per_s": rates[1]})


def _rate(accelerator: Accelerator, call: Callable[[], object]) -> float:
    """How often in a second, by the device's clock."""
    call()
    accelerator.finish()
    span = accelerator.span()
    for _ in range(COPIES):
        call()
    span.end()
    return COPIES / span.seconds()


def ranks(accelerator: Accelerator, *, twin: bool) -> Iterator[Row]:
    """Two ranks of MPI with the device, and which MPI that is."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    everywhere = world.gather(accelerator.describe())
    if everywhere is not None:
        found = {
            "threads": MPI.Query_thread(),
            "found": f"{mpi_library()}: {', '.join(everywhere)}",
        }
        yield {"tried": "start two ranks", "right": len(everywhere) == 2, **found}


PARTS = {part.__name__: part for part in (device, kernel, peer, ranks)}


def main() -> int:
    """One part of ``contact``."""
    twin, part = "twin" in sys.argv[2:], sys.argv[1]
    kind = "cpu" if twin else "cuda"
    # Before MPI; ``machine`` is there to say why there is no device.
    found = machine() if part == "machine" else PARTS[part](choose_accelerator(kind), twin=twin)
    for row in found:
        print_row(row)
    return 0


def smoke(bench: Bench) -> Iterator[Row]:
    """Memory of another process, torch.distributed, and what small calls cost the host. On two ranks."""
    yield _peers_memory(bench)
    yield _bridged(bench)
    for name, call in _small_calls(bench).items():
        for _ in range(WARM_UP):
            call()
        bench.accelerator.finish()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        took_us = (time.perf_counter() - start) / CALLS * 1e6
        bench.accelerator.finish()
        yield {"tried": f"host time of {name}", "us": took_us}
    yield {"tried": "shared memory that is free", "bytes": shutil.disk_usage("/dev/shm").free}


def _peers_memory(bench: Bench) -> Row:
    """Rank 0 exports a block, and rank 1 reads it: is it right, how fast is it."""
    nbytes, topology = EXPORTED[bench.twin], bench.topology
    accelerator, group = bench.accelerator, bench.topology.world
    what, right, rate = f"peer's memory, {nbytes // MIB} MiB", 1.0, 0.0
    try:
        with group.agreed("export and map memory"):
            block = accelerator.export(nbytes)
            block.memory.fill_(7 + topology.rank)
            accelerator.finish()
        tickets = group.comm.allgather(block.ticket)
        peer = (topology.rank + 1) % topology.size
        with group.agreed("map memory of another rank"):
            theirs = accelerator.attach(tickets[peer], nbytes) if topology.size > 1 else None
        topology.barrier()
        block.seal()
        if theirs is not None:
            mine = torch.empty_like(block.memory)
            right = float((theirs.memory == 7 + peer).all())
            rate = 2 * nbytes / bench.device_seconds(lambda: mine.copy_(theirs.memory))
            theirs.close()
        topology.barrier()
        block.close()
    except CommError as error:
        return {"tried": what, "said": bench.survived(error)}
    return {"tried": what, "right": all(topology.gather(right)), "gb_per_s": rate / 1e9}


def _bridged(bench: Bench) -> Row:
    """What a stream has just written is summed and gathered over the bridge."""
    import torch.distributed as dist

    import hpczero.bridge

    what = "torch.distributed over the bridge"
    size, numel = bench.topology.size, SMALL_NUMEL
    x = bench.empty(numel).fill_(1).mul_(1 + bench.topology.rank)
    rows = [bench.empty(numel) for _ in range(size)]
    try:
        hpczero.bridge.init(bench.topology.world.comm)
        dist.all_gather(rows, x)
        dist.all_reduce(x)
        dist.destroy_process_group()
    except CommError as error:
        return {"tried": what, "said": bench.survived(error)}
    right = bool((x == size * (size + 1) / 2).all())
    right = right and all(bool((row == 1 + rank).all()) for rank, row in enumerate(rows))
    return {"tried": what, "right": all(bench.topology.gather(float(right)))}


def _small_calls(bench: Bench) -> dict[str, Callable[[], object]]:
    accelerator = bench.accelerator
    ones = bench.empty(SMALL_NUMEL).fill_(1)
    half = bench.empty(SMALL_NUMEL, torch.bfloat16).fill_(1)
    out, lane = bench.empty(SMALL_NUMEL), accelerator.lane()

    def waited() -> None:
        ones.add_(1)
        accelerator.finish()

    def copied() -> None:
        lane.after(accelerator.mark())
        lane.copy(out, ones)
        lane.finish()

    return {
        "an addition": lambda: ones.add_(1),
        "a sum of two blocks": lambda: tree_sum([half, half], out, groups=[range(2)], scale=0.5),
        "an addition and a wait": waited,
        "a copy on a lane and a wait": copied,
        "a span": lambda: accelerator.span().end(),
    }


if __name__ == "__main__":
    run(main)
