"""Checks on one device that ranks share: ``mpirun -n 2 python -m scaling.gpu.checks JSON``, which ``jobs`` types.

One JSON line is printed for each row, by rank 0 unless a rank has to end alone. ``twin`` runs the same code on the host
with small sizes: so it is tested where there is no device. Here are what there is, the kernels, and the collectives.
"""

from __future__ import annotations

import faulthandler
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from hpczero.accelerator import HostAccelerator, be_deterministic, choose_accelerator
from hpczero.errors import CommError, run
from hpczero.kernels.codes import BITS, BLOCK, decode, encode, key_of
from hpczero.kernels.source import tree_sum_source
from hpczero.kernels.tree_sum import tree_sum
from scaling.evidence.record import Row, mpi_library
from scaling.gpu.bench import DEVICE, TWIN, Bench, forget, mps, print_row
from scaling.gpu.jobs import BEGINS, kind_of
from scaling.gpu.nvrtc import CompileError, find_nvrtc

if TYPE_CHECKING:
    from hpczero.comm import Collectives

COLLECTIVE_CALLS = 5
TWIN_ARCHITECTURE = "sm_90"
SUM_NUMEL = 100_003  # of the sums whose bits are compared
SUBNORMAL = 2.0**-130  # what numbers are multiplied by to be so small; of fp16 the sum alone is
NOTICE_S = 5.0  # before the end, for a job to say where it is
OVERTIME_S = 15.0  # after it, for a rank whose launcher has not ended it


def facts(bench: Bench) -> Iterator[Row]:
    """What there is, and what MPI says of device memory; last whether that is true, which takes a trial."""
    from hpczero.comm.awareness import claim, decide, tried_once
    from hpczero.options.environment import Environment

    said, (shared, how) = claim(), mps()
    turns = "run at a time" if shared else "take turns"
    found: Row = {
        "device": bench.accelerator.describe(),
        "devices this process sees": torch.cuda.device_count(),
        "torch": torch.__version__,
        "CUDA of torch": torch.version.cuda,
        "MPI": mpi_library(),
        "MPI says it takes device memory": f"{said.aware}: {said.reason}",
        "CUDA MPS": f"{how}: kernels of ranks that share a device {turns}",
        **bench.accelerator.usage(),
    }
    for name, value in found.items():
        yield {"fact": name, "value": value}
    if not bench.accelerator.is_host:
        aware, why = decide(Environment.read().gpu_aware, said, tried_once)
        given = f"{'yes' if aware else 'no'}: {why}"
        yield {"fact": "MPI is given device memory", "value": given, "gpu_aware": aware}


def kernels(bench: Bench) -> Iterator[Row]:
    """The sum against the device's own copy, and against the host's sum, bit by bit; the cast of masters."""
    nbytes = bench.sizes.kernel_nbytes
    source, target = bench.empty(nbytes // 8), bench.empty(nbytes // 8)
    copy_s = bench.device_seconds(lambda: target.copy_(source))
    copy_rate = 2 * source.nbytes / copy_s
    yield {"kernel": "copy", "gb_per_s": copy_rate / 1e9, "of_copy": 1.0}
    half = bench.empty(nbytes // 8, torch.bfloat16)
    cast_s = bench.device_seconds(lambda: half.copy_(source))
    rate = (source.nbytes + half.nbytes) / cast_s
    yield {"kernel": "cast fp32 to bf16", "gb_per_s": rate / 1e9, "of_copy": rate / copy_rate}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for count in (2, 4, 8):
            wrong = wrong_sums(bench, dtype, count)
            rate = _sum_rate(bench, dtype, count)
            yield {
                "kernel": f"sum of {count} {str(dtype).removeprefix('torch.')}",
                "gb_per_s": rate / 1e9,
                "of_copy": rate / copy_rate,
                "bits_equal": not wrong,
                "wrong": ", ".join(wrong),
                **compiled(bench, dtype, count),
            }
    for form in BITS:
        yield {"kernel": f"codes {form}", **_codes(bench, form, copy_rate)}


def _codes(bench: Bench, form: str, copy_rate: float) -> Row:
    """Codes made and read on the device against the host's, bit by bit; fp32 bytes encoded in a second."""
    key = None if form == "nf4" else key_of("step 1")
    values = torch.randn(SUM_NUMEL // BLOCK * BLOCK, generator=torch.Generator().manual_seed(1))
    found = []
    for device in (torch.device("cpu"), bench.accelerator.device):
        there = values.to(device, copy=True)
        words = torch.zeros(len(values) // BLOCK * (BITS[form] * 2 + 1), device=device)
        encode(there, words, form, key=key, first=BLOCK)
        decode(words.view(1, -1), there.view(1, -1), form)
        found.append((words.cpu().view(torch.int32), there.cpu().view(torch.int32)))
    many = bench.empty(bench.sizes.kernel_nbytes // 8 // BLOCK * BLOCK).fill_(1)
    words = bench.empty(len(many) // BLOCK * (BITS[form] * 2 + 1))
    rate = many.nbytes / bench.device_seconds(lambda: encode(many, words, form, key=key))
    equal = all(map(torch.equal, *found))
    return {"gb_per_s": rate / 1e9, "of_copy": rate / copy_rate, "bits_equal": equal}


def compiled(bench: Bench, dtype: torch.dtype, count: int) -> Row:
    """Whether the sum is one kernel, and what a thread of it takes: one that does not compile has the same bits.

    On the twin by CUDA's compiler for ``TWIN_ARCHITECTURE``, where it is installed; else nothing is known.
    """
    from hpczero.kernels.tree_sum import NAMES, kernel_figures

    if not bench.accelerator.is_host:
        figures = kernel_figures((count,), dtype, torch.float32, bench.accelerator.device)
        return {"compiled": figures is not None, **(figures or {})}
    compiler = find_nvrtc()
    if compiler is None:
        return {"compiled": None}
    try:
        source = tree_sum_source([range(count)], NAMES[dtype], "fp32", aligned=True, cuda=True)
        found = compiler.compile(source, TWIN_ARCHITECTURE)
    except CompileError as error:
        return {"compiled": False, "compiler": str(error).partition("\n")[0]}
    return {"compiled": True, "registers": found.registers, "local_nbytes": found.local_nbytes}


def _sum_rate(bench: Bench, dtype: torch.dtype, count: int) -> float:
    """Bytes that the sum of ``count`` blocks reads and writes in a second."""
    numel = bench.sizes.kernel_nbytes // (count * dtype.itemsize + 4)
    blocks = [bench.empty(numel, dtype).fill_(1) for _ in range(count)]
    out, groups = bench.empty(numel), [range(count)]
    took = bench.device_seconds(lambda: tree_sum(blocks, out, groups=groups, scale=0.5))
    return (sum(block.nbytes for block in blocks) + out.nbytes) / took


def wrong_sums(bench: Bench, dtype: torch.dtype, count: int) -> list[str]:
    """The cases in which the device's sum has not the bits of the host's: on the default lane, twice on another."""
    generator = torch.Generator().manual_seed(count)
    few = [torch.randn(SUM_NUMEL + 1, generator=generator).to(dtype) for _ in range(count)]
    before = torch.randn(SUM_NUMEL, generator=generator)
    one, two = [range(count)], [range(count // 2), range(count // 2, count)]
    cases: dict[str, tuple[int, float, dict[str, Any]]] = {  # first element, size, arguments
        "one group": (0, 1.0, {"groups": one}),
        "unaligned": (1, 1.0, {"groups": one}),
        "accumulate": (0, 1.0, {"groups": one, "accumulate": True}),
        "two groups": (0, 1.0, {"groups": two, "node_dtype": dtype}),
        "subnormal": (0, SUBNORMAL, {"groups": one, "accumulate": True}),
    }
    lane = bench.accelerator.lane()
    wrong = []
    for name, (first, size, given) in cases.items():
        small = [block * size for block in few]
        there = [block.to(bench.accelerator.device) for block in small]
        expected = before * size
        # Copies: the host's sum is not to meet the alignment that the device's is tried with.
        cut = [block[first : first + SUM_NUMEL].clone() for block in small]
        tree_sum(cut, expected, scale=0.3, **given)
        blocks = [block[first : first + SUM_NUMEL] for block in there]
        for where in ("default lane", "own lane", "own lane again"):
            out = bench.empty(SUM_NUMEL + first)[first:]
            out.copy_(before * size)
            if where == "default lane":
                tree_sum(blocks, out, scale=0.3, **given)
            else:
                lane.after(bench.accelerator.mark())
                with lane.current():
                    tree_sum(blocks, out, scale=0.3, **given)
                lane.finish()
            if not torch.equal(out.cpu().view(torch.int32), expected.view(torch.int32)):
                wrong.append(f"{name} ({where})")
    return wrong


def collectives(bench: Bench) -> Iterator[Row]:
    """All-gather and reduce-scatter by every way, and the bound: what the copies alone take on a shared device.

    Peers' memory comes last: it is what may not work, and what it says then is a row.
    """
    from hpczero.comm import Flat, Hierarchical
    from hpczero.comm.awareness import reach_of
    from hpczero.comm.devices import DirectReach, HostReach, Reach, StagedReach

    accelerator = bench.accelerator
    staged: Reach = HostReach() if accelerator.is_host else StagedReach(accelerator)
    ways: dict[str, Callable[[], Collectives]] = {}
    ways["staged"] = lambda: Flat(bench.topology, reach=staged)
    if isinstance(reach_of(accelerator, bench.topology.shard), DirectReach):
        ways["mpi"] = lambda: Flat(bench.topology, reach=DirectReach(accelerator))
    ways["ipc"] = lambda: Hierarchical(bench.topology, inside="ipc", reach=staged)
    for nbytes in bench.sizes.messages:
        source, target = bench.empty(nbytes // 4), bench.empty(nbytes // 4)
        ms = bench.device_seconds(partial(target.copy_, source)) * 1e3
        yield {"way": "copy", "operation": "copy", "nbytes": nbytes, "ms": ms}
        del source, target
    for way, make in ways.items():
        for nbytes in bench.sizes.messages:
            try:
                for row in _moved(bench, make(), nbytes):
                    yield {"way": way, "nbytes": nbytes, **row}
            except CommError as error:
                yield {"way": way, "nbytes": nbytes, "said": bench.survived(error)}
                break


def _moved(bench: Bench, transport: Collectives, nbytes: int) -> Iterator[Row]:
    """Both operations on ``nbytes`` by ``transport``, which is closed at the end."""
    from hpczero.memory.buffers import Use

    size, me = bench.topology.size, bench.topology.shard_index
    shard = nbytes // 4 // size
    whole = transport.allocate(shard * size, torch.float32, category="w", use=Use.GATHER)
    gradient = transport.allocate(shard * size, torch.float32, category="g", use=Use.REDUCE)
    transport.settle()
    gradient.take()
    out = bench.empty(shard)
    whole.tensor.zero_()
    whole.tensor[me * shard : (me + 1) * shard] = me + 1.0
    gradient.tensor.fill_(bench.topology.rank + 1.0)

    def gather() -> None:
        transport.all_gather(whole.tensor, name="w").wait()

    def reduce() -> None:
        transport.reduce_scatter(gradient.tensor, out, scale=1.0, name="g").wait()

    for operation, call in (("all_gather", gather), ("reduce_scatter", reduce)):
        took = bench.seconds(call, calls=COLLECTIVE_CALLS)
        if operation == "all_gather":
            expected = torch.arange(1.0, size + 1).repeat_interleave(shard)
            right = torch.equal(whole.tensor.cpu(), expected)
        else:
            right = bool((out == size * (size + 1) / 2).all())
        yield {
            "operation": operation,
            "ms": sorted(took)[len(took) // 2] * 1e3,
            "all_ms": [1e3 * s for s in took],
            "right": all(bench.topology.gather(float(right))),
            "time_sliced": bench.time_sliced,
        }
    transport.close()


CHECKS = {check.__name__: check for check in (facts, kernels, collectives)}


def main() -> int:
    """Run some checks; rank 0 prints their rows. Collective over MPI's world, but for checks without MPI."""
    given = json.loads(sys.argv[1])
    checks, twin = given["checks"], bool(given["twin"])
    from scaling.gpu.contact import contact, smoke
    from scaling.gpu.train import train
    from scaling.gpu.training import fits, overlap, parity, speed, trace

    alone: dict[str, Callable[..., Iterator[Row]]] = {"contact": contact, "train": train}
    if all(kind_of(name) in alone for name, _ in checks):
        for name, end in checks:
            _heed(float(end))
            print_row({BEGINS: name})
            for row in alone[kind_of(name)](*_argument(name), twin=twin):
                print_row(row)
        return 0
    more = {check.__name__: check for check in (fits, overlap, parity, smoke, speed, trace)}
    found: dict[str, Callable[..., Iterator[Row]]] = {**CHECKS, **more}
    found["fits_not"] = partial(fits, stage=0)
    if "parity" in dict(checks):  # before CUDA starts; for the others it changes nothing
        be_deterministic()
    accelerator = HostAccelerator() if twin else choose_accelerator("cuda")  # before MPI
    bench = Bench(accelerator, TWIN if twin else DEVICE, twin=twin)
    for name, end in checks:
        _heed(float(end))
        bench.say({BEGINS: name})
        for row in found[kind_of(name)](bench, *_argument(name)):
            bench.say(row)
        forget(bench)
    if bench.left_open:
        bench.leave()
    bench.topology.free()
    return 0


def _argument(check: str) -> list[str]:
    """What follows the colon."""
    return check.split(":")[1:]


def _heed(end: float) -> None:
    """Shortly before ``end`` (seconds since the epoch) all stacks go to stderr; nothing of us stays long after it."""
    left_s = end - time.time()
    faulthandler.dump_traceback_later(max(left_s - NOTICE_S, 0.1))
    signal.alarm(max(int(left_s + OVERTIME_S), 1))  # ends the process, also inside of a library


if __name__ == "__main__":
    run(main)
