"""Checks and measurements on one device that ranks share: ``mpirun -n 2 python -m scaling.gpu_checks NAME JSON``.

Owns: what each check does in the ranks. Must not know: limits, goals, the order of a run. Rank 0 prints one JSON line
for each row. ``twin`` runs the same code on the host with small sizes: so it is tested where there is no device.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hpczero.accelerator import Accelerator, HostAccelerator, choose_accelerator
from hpczero.errors import run
from hpczero.kernels.tree_sum import tree_sum
from hpczero.models.config import GPTConfig, flops_per_token

if TYPE_CHECKING:
    from hpczero.topology import Topology

Row = dict[str, Any]
MIB = 2**20
REPEATS = 7


@dataclass(frozen=True)
class Sizes:
    """What differs between a device and its twin."""

    sum_numel: int
    messages: tuple[int, ...]
    tiny: GPTConfig
    models: tuple[tuple[str, GPTConfig, int], ...]  # name, network, sequences of one step
    large: tuple[GPTConfig, int]


def _gpt(layers: int, hidden: int, heads: int, vocab: int, context: int) -> GPTConfig:
    return GPTConfig(vocab_size=vocab, context=context, layers=layers, hidden=hidden, heads=heads)


_TINY = _gpt(3, 48, 3, 101, 24)
DEVICE = Sizes(
    sum_numel=64 * MIB,
    messages=(64 * MIB, 512 * MIB),
    tiny=_TINY,
    models=(
        ("124M", _gpt(12, 768, 12, 50304, 1024), 16),
        ("1.5B", _gpt(48, 1600, 25, 50304, 1024), 8),
    ),
    large=(_gpt(48, 1600, 25, 50304, 1024), 4),
)
TWIN = Sizes(
    sum_numel=MIB // 8,
    messages=(MIB // 4,),
    tiny=_TINY,
    models=(("tiny", _gpt(2, 64, 2, 256, 32), 2),),
    large=(_gpt(2, 64, 2, 256, 32), 2),
)


class Bench:
    """The device, the ranks that share it, and a clock that waits for it."""

    def __init__(self, accelerator: Accelerator, sizes: Sizes, *, twin: bool) -> None:
        from hpczero.topology import Topology

        self.accelerator = accelerator
        self.sizes = sizes
        self.twin = twin
        self.topology: Topology = Topology.of_world()

    def seconds(self, call: Callable[[], object], repeats: int = REPEATS) -> list[float]:
        """Of the slowest rank, each time from a common start until the device is through; the first is left out."""
        found = []
        for _ in range(repeats + 1):
            self.accelerator.finish()
            self.topology.barrier()
            start = time.perf_counter()
            call()
            self.accelerator.finish()
            found.append(max(self.topology.gather(time.perf_counter() - start)))
        return found[1:]

    def empty(self, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=self.accelerator.device)


def facts(bench: Bench) -> Iterator[Row]:
    """What there is, and what MPI says of device memory."""
    from mpi4py import MPI

    from hpczero.comm.awareness import claim

    said = claim()
    yield {
        "device": bench.accelerator.describe(),
        "torch": torch.__version__,
        "mpi": MPI.Get_library_version().split(",")[0].strip("\0 \n"),
        "gpu_aware_claim": said.aware,
        "reason": said.reason,
        **bench.accelerator.usage(),
    }


def kernels(bench: Bench) -> Iterator[Row]:
    """The sum against the device's own copy, and against the host's sum, bit by bit; the cast of masters."""
    numel = bench.sizes.sum_numel
    source, target = bench.empty(numel), bench.empty(numel)
    copy_s = min(bench.seconds(lambda: target.copy_(source)))
    copy_rate = 2 * source.nbytes / copy_s
    yield {"kernel": "copy", "gb_per_s": copy_rate / 1e9, "of_copy": 1.0}
    half = bench.empty(numel, torch.bfloat16)
    cast_s = min(bench.seconds(lambda: half.copy_(source)))
    rate = (source.nbytes + half.nbytes) / cast_s
    yield {"kernel": "cast fp32 to bf16", "gb_per_s": rate / 1e9, "of_copy": rate / copy_rate}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for count in (2, 4, 8):
            generator = torch.Generator().manual_seed(count)
            few = [torch.randn(100_003, generator=generator).to(dtype) for _ in range(count)]
            expected, groups = torch.empty(100_003), [range(count)]
            tree_sum(few, expected, groups=groups, scale=0.3)
            there = bench.empty(100_003)
            blocks = [block.to(bench.accelerator.device) for block in few]
            tree_sum(blocks, there, groups=groups, scale=0.3)
            blocks = [bench.empty(numel, dtype).fill_(1) for _ in range(count)]
            took = min(
                bench.seconds(
                    lambda blocks=blocks, groups=groups: tree_sum(  # type: ignore[misc]
                        blocks, target, groups=groups, scale=0.5
                    )
                )
            )
            rate = (sum(block.nbytes for block in blocks) + target.nbytes) / took
            yield {
                "kernel": f"sum of {count} {str(dtype).removeprefix('torch.')}",
                "gb_per_s": rate / 1e9,
                "of_copy": rate / copy_rate,
                "bits_equal": torch.equal(there.cpu(), expected),
            }


def collectives(bench: Bench) -> Iterator[Row]:
    """All-gather and reduce-scatter by every way, and the bound: what the copies alone take on a shared device."""
    from hpczero.comm import Flat, Hierarchical
    from hpczero.comm.awareness import reach_of
    from hpczero.comm.reach import DirectReach, HostReach, Reach, StagedReach
    from hpczero.device import Use

    accelerator, size = bench.accelerator, bench.topology.size
    staged: Reach = HostReach() if accelerator.is_host else StagedReach(accelerator)
    ways: dict[str, Callable[[], Any]] = {
        "ipc": lambda: Hierarchical(bench.topology, inside="ipc", reach=staged),
        "staged": lambda: Flat(bench.topology, reach=staged),
    }
    if isinstance(reach_of(accelerator, bench.topology), DirectReach):
        ways["mpi"] = lambda: Flat(bench.topology, reach=DirectReach(accelerator))
    for nbytes in bench.sizes.messages:
        numel = nbytes // 4 // size * size
        shard = numel // size
        source, target = bench.empty(numel), bench.empty(numel)
        bound = min(bench.seconds(lambda source=source, target=target: target.copy_(source)))  # type: ignore[misc]
        yield {"way": "copy", "operation": "copy", "nbytes": nbytes, "ms": bound * 1e3}
        del source, target
        for name, make in ways.items():
            transport = make()
            whole = transport.allocate(numel, torch.float32, category="w", use=Use.GATHER)
            gradient = transport.allocate(numel, torch.float32, category="g", use=Use.REDUCE)
            transport.settle()
            gradient.take()
            out = bench.empty(shard)
            mine = slice(
                bench.topology.shard_index * shard, (bench.topology.shard_index + 1) * shard
            )
            whole.tensor.zero_()
            whole.tensor[mine] = bench.topology.shard_index + 1.0
            gradient.tensor.fill_(bench.topology.rank + 1.0)

            def gather(transport: Any = transport, whole: Any = whole) -> None:
                transport.all_gather(whole.tensor, name="w").wait()

            def reduce(
                transport: Any = transport, gradient: Any = gradient, out: Tensor = out
            ) -> None:
                transport.reduce_scatter(gradient.tensor, out, scale=1.0, name="g").wait()

            for operation, call in (("all_gather", gather), ("reduce_scatter", reduce)):
                took = bench.seconds(call)
                if operation == "all_gather":
                    expected = torch.arange(1.0, size + 1).repeat_interleave(shard)
                    right = torch.equal(whole.tensor.cpu(), expected)
                else:
                    right = bool((out == size * (size + 1) / 2).all())
                yield {
                    "way": name,
                    "operation": operation,
                    "nbytes": nbytes,
                    "ms": sorted(took)[len(took) // 2] * 1e3,
                    "all_ms": [1e3 * s for s in took],
                    "right": all(bench.topology.gather(float(right))),
                }
            transport.close()


CHECKS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "facts": facts,
    "kernels": kernels,
    "collectives": collectives,
}


def tokens_per_s(config: GPTConfig, sequences: int, step_s: float) -> float:
    """Of one rank."""
    return sequences * config.context / step_s


def tflops(config: GPTConfig, sequences: int, step_s: float) -> float:
    """Model FLOPs of one rank and second, in 1e12: 6 N + 12 L C T for each token."""
    return tokens_per_s(config, sequences, step_s) * flops_per_token(config) / 1e12


def main() -> int:
    """Run one check; rank 0 prints its rows. Collective over MPI's world."""
    name, options = sys.argv[1], json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    twin = bool(options.get("twin"))
    accelerator = HostAccelerator() if twin else choose_accelerator("cuda")  # before MPI
    from scaling.gpu_training import TRAINING

    bench = Bench(accelerator, TWIN if twin else DEVICE, twin=twin)
    for row in {**CHECKS, **TRAINING}[name](bench):
        if bench.topology.is_root:
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
    bench.topology.free()
    return 0


if __name__ == "__main__":
    run(main)
