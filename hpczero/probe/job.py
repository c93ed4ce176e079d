"""The probe of a job: its kernels, links and tiers, as one rank of it will find them while all others work too."""

from __future__ import annotations

import itertools
import json
import mmap
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional as F

from hpczero.accelerator import Accelerator, HostAccelerator
from hpczero.kernels.tree_sum import tree_sum
from hpczero.predict.machine import MeasuredKernels
from hpczero.probe.tiers import Speed, measure_disk, measure_host

if TYPE_CHECKING:
    from hpczero.job.topology import Topology


SIDES = (64, 256, 512, 1024)  # of square products
FEW = (16, 64, 256)  # tokens in products with square weights
ROWS, WIDTH, VOCAB = 512, 1024, 8192  # of memory-bound work: 2 MiB and 16 MiB in fp32
HEADS, HEAD, SEQUENCE, SAMPLES = 8, 64, 128, 4
UPDATED = 2**22  # elements of the update and of sums: 16 MiB each
TURN_S = 0.12  # for each piece of work
LEAST, MOST = 3, 10_000  # repetitions of each
EXCHANGES = 5
FRESH_NBYTES = 2**25
WAIT_SIDE, WAITS, NAP_S = 256, 100, 50e-6  # about 1 ms of work before each wait
LEAST_WAIT_S = 1e-7
POOL_NBYTES = 2**26  # of operands: twice a large cache


def measure_kernels(
    topology: Topology,
    *,
    accelerator: Accelerator | None = None,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:  # Any: JSON
    """All pieces of work on this rank. Collective: the ranks begin every piece together.

    Args:
        topology: the ranks.
        accelerator: device of this rank; None: the host.
        dtype: of parameters and activations.
    """
    accelerator = accelerator or HostAccelerator()
    found = _kernels(topology, accelerator, dtype)
    if topology.size > 1:
        found |= _between_ranks(topology)
    return found


def _kernels(topology: Topology, accelerator: Accelerator, dtype: torch.dtype) -> dict[str, Any]:
    def seconds(call: Callable[[], object]) -> float:
        """Of one call, the first left out: the mean, as a step is a sum, and other programs take their share of it."""
        call()
        accelerator.finish()
        begin = time.perf_counter()
        call()
        accelerator.finish()
        # The number is known beforehand: a device only queues what is started, and would do so for ever.
        times = min(max(int(TURN_S / (time.perf_counter() - begin)), LEAST), MOST)
        topology.barrier()
        begin = time.perf_counter()
        for _ in range(times):
            call()
        accelerator.finish()
        return (time.perf_counter() - begin) / times

    def both(
        make: Callable[[], Any], inputs: Sequence[torch.Tensor], numel: int, name: str
    ) -> dict[str, float]:
        """Forward and backward of what ``make`` computes, for each of ``numel`` elements."""
        forward = seconds(make)
        out = make()
        gradient = torch.ones_like(out)
        # Not out.backward(), which would add to the gradients of the calls before.
        backward = seconds(lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True))
        return {f"{name}/forward": forward / numel, f"{name}/backward": backward / numel}

    def fresh(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=dtype, requires_grad=True, device=accelerator.device)

    def ones(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.ones(*shape, dtype=dtype, device=accelerator.device)

    products = {}
    for side in SIDES:
        # A step touches more than a cache holds, so every product finds its operands in memory.
        many = max(POOL_NBYTES // (3 * dtype.itemsize * side * side), 1)
        pool = itertools.cycle([ones(3, side, side) for _ in range(many)])

        def product(pool: Iterator[torch.Tensor] = pool) -> None:
            a, b, out = next(pool)
            torch.matmul(a, b, out=out)

        products[str(side)] = 2 * side**3 / seconds(product)

    few, inner = {}, {}
    for rows in FEW:
        many = max(POOL_NBYTES // (dtype.itemsize * WIDTH * WIDTH), 2)
        weights = itertools.cycle([ones(WIDTH, WIDTH) for _ in range(many)])
        tokens, made = ones(rows, WIDTH), ones(rows, WIDTH)
        flops = 2 * rows * WIDTH * WIDTH
        few[str(rows)] = flops / seconds(
            lambda t=tokens, o=made, w=weights: torch.matmul(t, next(w), out=o)  # type: ignore[misc]
        )
        inner[str(rows)] = flops / seconds(
            lambda t=tokens, w=weights: torch.matmul(t.t(), t, out=next(w))  # type: ignore[misc]
        )

    x, wide = fresh(ROWS, WIDTH), fresh(ROWS, 4 * WIDTH)
    plain, other = x.detach(), torch.randn(ROWS, WIDTH, dtype=dtype, device=accelerator.device)
    scale, shift = fresh(WIDTH), fresh(WIDTH)
    numel = ROWS * WIDTH
    elements = both(
        lambda: F.layer_norm(x, (WIDTH,), scale, shift), [x, scale, shift], numel, "norm"
    )
    elements |= both(lambda: F.gelu(wide, approximate="tanh"), [wide], 4 * numel, "gelu")
    elements["add/forward"] = elements["fork/backward"] = seconds(lambda: plain + other) / numel
    elements["bias/backward"] = seconds(lambda: wide.detach().sum(0)) / (4 * numel)
    elements["copy/forward"] = elements["copy/backward"] = seconds(plain.clone) / numel
    elements["add/backward"] = elements["fork/forward"] = elements["bias/forward"] = 0.0

    logits, targets = (
        fresh(ROWS, VOCAB),
        torch.zeros(ROWS, dtype=torch.int64, device=accelerator.device),
    )
    loss = both(
        lambda: F.cross_entropy(logits, targets, reduction="sum"), [logits], ROWS * VOCAB, "loss"
    )
    loss["loss/backward"] += loss["loss/forward"]  # the loss is computed once more
    elements |= loss

    q, k, v = (fresh(SAMPLES, HEADS, SEQUENCE, HEAD) for _ in range(3))
    attended = both(
        lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), [q, k, v], 1, "attention"
    )
    flops = 4 * SAMPLES * SEQUENCE * SEQUENCE * HEADS * HEAD
    attention = [flops / attended["attention/forward"], 2 * flops / attended["attention/backward"]]

    update = seconds(_update(accelerator.device)) / UPDATED

    blocks = [ones(UPDATED) for _ in range(3)]
    out, here, there = (ones(UPDATED, dtype=torch.float32) for _ in range(3))
    sums = [
        seconds(partial(tree_sum, blocks[:terms], out, groups=[range(terms)], scale=0.5)) / UPDATED
        for terms in (1, 3)
    ]
    small, one = (ones(8, dtype=torch.float32) for _ in range(2))
    small.requires_grad_()
    found: dict[str, Any] = {
        "products": products,
        "few": few,
        "inner": inner,
        "elements": dict(sorted(elements.items())),
        "attention": attention,
        "update": update,
        "sums": [sums[0], max((sums[1] - sums[0]) / 2, 0.0)],
        "memory_rate": 2 * 4 * UPDATED / seconds(lambda: there.copy_(here)),
        "fresh": FRESH_NBYTES / seconds(_touch_new_pages),
        "dispatch": seconds(lambda: small * one),
        "exchange": None,
        "between": None,
        "wait": None,
        "wait_between": None,
    }
    return found


def host_update_s(topology: Topology) -> float:
    """Seconds of one element of an update by the host, beside a device. Collective: the ranks begin together."""
    update = _update(torch.device("cpu"))
    update()  # makes its state
    topology.barrier()
    begin = time.perf_counter()
    for _ in range(LEAST):
        update()
    return (time.perf_counter() - begin) / LEAST / UPDATED


def _update(device: torch.device) -> Callable[[], object]:
    """The norm of a gradient, clipping by it, and AdamW's step, as a training step takes them."""
    weight = torch.zeros(UPDATED, device=device, requires_grad=True, dtype=torch.float32)
    gradient = torch.ones(UPDATED, device=device, dtype=torch.float32)
    weight.grad = gradient
    optimizer = torch.optim.AdamW([weight], lr=1e-3, fused=True)

    def take() -> None:
        torch.dot(gradient, gradient)
        gradient.mul_(1.0)
        optimizer.step()

    return take


def _touch_new_pages() -> None:
    """Memory of the host that the kernel hands out anew."""
    with mmap.mmap(-1, FRESH_NBYTES) as pages:
        np.frombuffer(pages, dtype=np.uint8)[:: mmap.PAGESIZE] = 1


def _between_ranks(topology: Topology) -> dict[str, float | None]:
    """Messages between the ranks. Collective, so every rank does the same number of them."""
    world = topology.world
    node = world.part(world.nodes[world.node_index], "the probe of a node")
    mine = np.ones(UPDATED, dtype=np.float32)  # of the host: that of a device may be faster

    def mean(call: Callable[[], object], times: int) -> float:
        call()
        topology.barrier()
        start = time.perf_counter()
        for _ in range(times):
            call()
        return (time.perf_counter() - start) / times

    def gathered() -> float:
        part = mine[: mine.size // node.size].copy()
        out = mine[: part.size * node.size]
        took = mean(lambda: node.comm.Allgather(part, out), EXCHANGES)
        return float(part.nbytes * (node.size - 1) / took)

    def sent() -> float:
        """To the same place on the next node, while all others send too."""
        here, place = world.node_index, world.local_rank
        there = world.nodes[(here + 1) % world.num_nodes][place]
        back = world.nodes[here - 1][place]
        half = mine.size // 2
        took = mean(
            lambda: world.comm.Sendrecv(mine[:half], there, recvbuf=mine[half:], source=back),
            EXCHANGES,
        )
        return half * mine.itemsize / took

    work = torch.ones(3, WAIT_SIDE, WAIT_SIDE, dtype=torch.float32, device="cpu")

    def worked() -> None:
        torch.matmul(work[0], work[1], out=work[2])

    def waited(barrier: Callable[[], Any]) -> float:  # Any: a request of MPI
        """Of ranks that come from equal work: where they outnumber cores, one waits until the others had their turn."""

        def meet() -> None:
            worked()
            met = barrier()
            while not met.Test():
                time.sleep(NAP_S)

        return max(mean(meet, WAITS) - mean(worked, WAITS), LEAST_WAIT_S)

    # How many ranks a node has may differ, so all nodes time the same number of calls between the same barriers.
    alone = max(topology.gather(node.size)) == 1
    crossing = world.num_nodes > 1 and world.is_rectangular
    found = {
        "exchange": None if alone else gathered() or None,
        "between": sent() if crossing else None,
        "wait": waited((world if alone else node).comm.Ibarrier),
        "wait_between": waited(world.rail.Ibarrier) if crossing and world.rail else None,
    }
    node.free()
    return found


def probe_job(
    topology: Topology, accelerator: Accelerator, *, dtype: torch.dtype, folder: Path | None = None
) -> tuple[MeasuredKernels, list[str]]:
    """What the ranks measure together, and what could not be measured. Collective over world; equal on every rank.

    Args:
        topology: the ranks; all of them take part.
        accelerator: device of this rank.
        dtype: of parameters and activations.
        folder: on a disk of each node, for the disk tier; None: none. One that cannot be used is no error.
    """
    with topology.agreed("probe what this host computes"):
        mine = measure_kernels(topology, accelerator=accelerator, dtype=dtype)
    troubles: list[str] = []

    def note(medium: str, speeds: list[Speed]) -> None:
        errors = [speed.error for speed in speeds if speed.error]
        troubles.extend(f"no tier on {medium}: {error}" for error in errors[:1])
        if not errors:
            own = speeds[topology.rank]
            mine[f"{medium}_read"], mine[f"{medium}_write"] = own.read, own.write

    if folder is not None:
        note("disk", measure_disk(topology.world, folder))
    if not accelerator.is_host:
        note("host", measure_host(topology.world, accelerator))
        mine["host_update"] = host_update_s(topology)
    found = [json.loads(text) for text in topology.world.gather_text(json.dumps(mine))]
    return MeasuredKernels.of_ranks(found), troubles
