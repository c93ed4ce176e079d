"""What the ranks of the emulated cluster do in its tests: ``python -m mpi4py -m tests.cluster.jobs NAME``.

Rank 0 writes one line of JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

if TYPE_CHECKING:
    from hpczero import Topology

WORLD = MPI.COMM_WORLD


def report(value: Any) -> None:
    """``value`` of every rank, in rank order, on rank 0's stdout. Collective."""
    values = WORLD.gather(value)
    if values is not None:
        print(json.dumps(values), flush=True)


def nodes() -> None:
    """Which host each rank is on, and which nodes hpczero finds."""
    from hpczero import Topology

    topology = Topology.of_world()
    header = topology.describe()
    report({"host": socket.gethostname(), "nodes": topology.world.nodes, "header": header})
    topology.free()


def send(nbytes_in_all: str) -> None:
    """Seconds that messages between hosts take; 4 ranks, of which 0 and 1 share a host."""
    whole = int(nbytes_in_all)
    half = whole // 2

    def seconds(messages: dict[tuple[int, int], int]) -> float:
        """Of the slowest rank; ``messages`` are bytes by (from, to)."""
        WORLD.Barrier()
        start = time.monotonic()
        requests = [
            WORLD.Isend(bytes(nbytes), destination)
            if WORLD.rank == source
            else WORLD.Irecv(bytearray(nbytes), source)
            for (source, destination), nbytes in messages.items()
            if WORLD.rank in (source, destination)
        ]
        MPI.Request.Waitall(requests)
        return WORLD.allreduce(time.monotonic() - start, MPI.MAX)

    pairs = [(a, b) for a in range(WORLD.size) for b in range(WORLD.size) if a != b]
    seconds(dict.fromkeys(pairs, 1))  # connect
    seconds({(0, 1): whole})  # on no link
    out_of_one, into_one = {(0, 2): half, (1, 3): half}, {(2, 0): half, (3, 1): half}
    report([seconds(messages) for messages in ({(0, 2): whole}, out_of_one, into_one)])


def stages(folder: str) -> None:
    """Whether a large activation of the first stage is at the next while the first computes, which is told by files."""
    import torch

    from hpczero import Mesh, Topology
    from hpczero.comm.stage_messages import Message, StageMessages

    topology = Topology.of_world(mesh=Mesh(pipeline=WORLD.size))
    messages, first = StageMessages(topology.pipeline), WORLD.rank == 0
    found = []
    for number in range(3):  # the first one connects, and says the form
        messages.begin(0)
        topology.barrier()
        arrived = Path(folder, str(number))
        with messages.moving():
            if first:
                messages.send(Message("F", 1, number), torch.full((2**18,), float(number)))
                deadline = time.monotonic() + (15 if number else 0)
                while not arrived.exists() and time.monotonic() < deadline:
                    time.sleep(0.01)
                found.append(arrived.exists())
            else:
                came = messages.receive(Message("F", 1, number))
                arrived.touch()
                assert bool((came == number).all())
            messages.finish()
    report(found)
    topology.free()


def crossing(names: str, numel: str, times: str, node_of_rank: str = "") -> None:
    """Gathers and reductions of ``numel`` fp32 elements by transports: bytes of their accounts, a digest of each.

    On the nodes given (``0,0,1``) or else found.
    """
    import torch

    from hpczero import Topology

    torch.set_num_threads(1)
    given = [int(word) for word in node_of_rank.split(",")] if node_of_rank else None
    topology = Topology.of_world(given)
    found = [_crossed(topology, name, int(numel), int(times)) for name in names.split(",")]
    sent = sum(nbytes for nbytes, _ in found)
    digests = [digest for _, digest in found]
    nodes = repr(topology.world.nodes)
    report({"node": topology.node_index, "nodes": nodes, "sent": sent, "digests": digests})
    topology.free()


def _crossed(topology: Topology, name: str, numel: int, times: int) -> tuple[int, str]:
    """Bytes that one transport says this rank has sent, and the digest. Collective over ``topology``."""
    import torch

    from hpczero.comm import choose
    from hpczero.memory.buffers import Use

    transport = choose(topology, name, algorithms="default")
    whole = transport.allocate(numel, torch.float32, category="test", use=Use.GATHER, keep=True)
    gradient = transport.allocate(numel, torch.float32, category="test", use=Use.REDUCE)
    transport.settle()
    gradient.take()
    generator = torch.Generator().manual_seed(topology.rank)
    gradient.tensor.copy_(torch.randn(numel, generator=generator))
    shard = numel // topology.size
    mine, summed = whole.tensor[topology.shard_index * shard :][:shard], torch.empty(shard)
    for _ in range(times):
        transport.reduce_scatter(gradient.tensor, summed, scale=0.5, name="u").wait()
        mine.copy_(summed)
        transport.all_gather(whole.tensor, name="u").wait()
    digest = hashlib.sha256(whole.tensor.numpy().tobytes()).hexdigest()
    sent = sum(transport.stats.sent_nbytes.values())
    WORLD.Barrier()
    transport.close()
    return sent, digest


def train() -> None:
    """Digests of weights and losses after some steps over every transport, while ranks are late at random."""
    import random

    import torch
    from torch import nn

    import hpczero
    from tests.helpers.small_models import adamw, tiny_gpt, tiny_tokens

    topology = hpczero.Topology.of_world()
    late = random.Random(topology.rank)  # when and how long: on each rank at other places

    def dawdle(*_: Any) -> None:
        time.sleep(late.choice((0.0, 0.0, 0.002, 0.01)))

    def digest(transport: str, algorithms: str) -> str:
        model = tiny_gpt(layers=3)
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(dawdle)
                module.register_full_backward_hook(dawdle)
        optimizer = adamw(model)
        hpczero.zeroify(
            model, optimizer, topology=topology, transport=transport, algorithms=algorithms
        )
        losses = []
        for _ in range(4):
            batch = tiny_tokens(topology.rank)
            loss = model(batch, batch)
            loss.backward()
            dawdle()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        weights = hpczero.full_state_dict(model) or {}
        content = b"".join(value.numpy().tobytes() for value in weights.values())
        hpczero.release(model)
        return f"{losses} {hashlib.sha256(content).hexdigest()}"

    torch.set_num_threads(1)
    ways = [("flat", "default"), ("hierarchical", "default"), ("window", "default")]
    ways += [
        ("window", "all_gather=doubling,reduce_scatter=library"),
        ("window", "all_gather=library"),
        ("window", "all_gather=pairwise"),
        ("auto", "measure"),
    ]
    report({", ".join(way): digest(*way) for way in ways})
    topology.free()


def differ(how: str) -> None:
    """The last rank runs another module than the others, or stays away from a collective."""
    import torch

    import hpczero
    from tests.helpers.small_models import MLP, adamw

    topology = hpczero.Topology.of_world()
    model = MLP(sizes=(6, 6, 6, 6))
    optimizer = adamw(model)
    hpczero.zeroify(
        model, optimizer, stage=3, topology=topology, transport="window", algorithms="default"
    )
    batch = torch.ones(1, 6)
    for step in range(3):
        is_odd = step == 2 and topology.rank == topology.size - 1
        if is_odd and how == "other module":
            batch = model.layers[1](batch)
        if is_odd and how == "late":
            time.sleep(600)
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def fail() -> None:
    """The last rank raises while the others wait."""
    if WORLD.rank == WORLD.size - 1:
        raise RuntimeError("on purpose")
    WORLD.Barrier()


def part_with(exit_code: str) -> None:
    """Say which host each rank is on, then all exit with ``exit_code``."""
    report(socket.gethostname())
    WORLD.Barrier()
    sys.exit(int(exit_code))


def hang() -> None:
    """Never ends, and leaves a process in a session of its own, whose parent is gone, on every host."""
    daemon = "import os, time; os.fork() and os._exit(0); time.sleep(600)"
    subprocess.run([sys.executable, "-c", daemon], start_new_session=True, check=True)
    report(os.readlink("/proc/self/ns/pid"))
    WORLD.Barrier()
    time.sleep(600)


def namespaces() -> None:
    """The namespaces of each rank."""
    kinds = ("net", "uts", "pid", "mnt", "ipc")
    report({kind: os.readlink(f"/proc/self/ns/{kind}") for kind in kinds})


def without_compiler(job: Callable[..., None]) -> Callable[..., None]:
    """``job`` in a process that compiles nothing: torch imports its compiler for any optimizer, which takes seconds."""

    def run(*words: str) -> None:
        from hpczero.accelerator.choice import leave_out_compiler

        leave_out_compiler()
        job(*words)

    return run


if __name__ == "__main__":
    job = globals()[sys.argv[1]]
    (without_compiler(job) if job in (train, differ) else job)(*sys.argv[2:])
