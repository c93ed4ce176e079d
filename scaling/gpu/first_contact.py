"""First contact with a GPU, and where a step's time goes: the checks ``smoke`` and ``trace``.

Owns: what each of them tries. Must not know: limits, goals. See ``scaling.gpu.checks``, which runs them.

``smoke`` costs seconds and finds what would spoil every other check: peers' memory that cannot be mapped, waits that
take longer than they should. ``trace`` says how long the device is idle in a step, and between which kernels.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from hpczero.errors import CommError
from hpczero.kernels.tree_sum import tree_sum
from scaling.evidence.record import Row
from scaling.gpu.bench import MIB, Bench

CALLS = 300  # of a call whose cost to the host is taken
WARM_UP = 20
EXPORTED = {False: 512 * MIB, True: MIB}  # on a device, on the twin
TRACED_STEPS = 3
LARGEST = 12  # gaps that are told
SMALL_NUMEL = 4096

Kernel = tuple[float, float, str]  # begin, end in microseconds; name


def smoke(bench: Bench) -> Iterator[Row]:
    """Memory of another process, and what small calls cost the host. On two ranks."""
    yield from _peers_memory(bench)
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
    yield {"tried": "shared memory that is free", "bytes": _free_nbytes("/dev/shm")}


def _peers_memory(bench: Bench) -> Iterator[Row]:
    """Rank 0 exports a block, and rank 1 reads it: is it right, how fast is it."""
    nbytes, topology = EXPORTED[bench.twin], bench.topology
    accelerator, group = bench.accelerator, bench.topology.world
    what, said = f"peer's memory, {nbytes // MIB} MiB", ""
    right, rate = 1.0, 0.0
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
        said = bench.survived(error)
    if said:
        yield {"tried": what, "said": said}
        return
    yield {"tried": what, "right": all(topology.gather(right)), "gb_per_s": rate / 1e9}


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


def _free_nbytes(folder: str) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def trace(bench: Bench) -> Iterator[Row]:
    """The device's idle time in a step by the kernels' own clock, plain torch and hpczero; one rank."""
    from torch.profiler import ProfilerActivity, profile

    import hpczero
    from scaling.gpu.training import STAGES, forget, step_of

    activities = [ProfilerActivity.CPU, *([] if bench.twin else [ProfilerActivity.CUDA])]
    for name, config, sequences in bench.sizes.models:
        for stage in (None, *STAGES):
            forget(bench)
            model, step = step_of(bench, config, sequences, stage)
            for _ in range(TRACED_STEPS + 1):
                step()
            bench.accelerator.finish()
            with profile(activities=activities) as profiler:
                for _ in range(TRACED_STEPS):
                    step()
                bench.accelerator.finish()
            way = "plain" if stage is None else "hpczero"
            for row in idle_rows(_kernels(bench, profiler), TRACED_STEPS):
                yield {"model": name, "way": way, "stage": stage, **row}
            if model is not None:
                hpczero.release(model)
            del model, step


def _kernels(bench: Bench, profiler: Any) -> list[Kernel]:
    """What ran on the device; on the twin the operations of the host, of which none is within another."""
    kind = "CPU" if bench.twin else "CUDA"
    return [
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type.name == kind and not (bench.twin and event.cpu_parent is not None)
    ]


def idle_rows(kernels: Sequence[Kernel], steps: int) -> Iterator[Row]:
    """First how long a step took and how much of it nothing ran, then the longest gaps.

    Kernels of several streams may overlap: idle is where none runs.
    """
    in_order = sorted(kernels)
    if not in_order:
        yield {"said": "the profiler has seen nothing on the device"}
        return
    first, end, last = in_order[0]
    gaps: list[tuple[float, str, str]] = []
    for start, stop, name in in_order[1:]:
        if start > end:
            gaps.append((start - end, last, name))
        if stop > end:
            end, last = stop, name
    idle = sum(length for length, _, _ in gaps)
    yield {
        "step_ms": (end - first) / steps / 1e3,
        "idle_ms": idle / steps / 1e3,
        "idle": idle / (end - first),
        "kernels": len(in_order) // steps,
        "median_us": statistics.median(stop - start for start, stop, _ in in_order),
    }
    for length, before, after in sorted(gaps, reverse=True)[:LARGEST]:
        yield {"gap_us": length, "after": before[:60], "before": after[:60]}


FIRST_CONTACT: dict[str, Callable[[Bench], Iterator[Row]]] = {"smoke": smoke, "trace": trace}
