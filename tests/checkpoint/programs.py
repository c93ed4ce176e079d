"""What the tests of checkpoints share: a training program that any number of ranks can go on with.

Must not know: what any test looks for.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import hpczero
from hpczero.checkpoint import Checkpoints, Loaded
from hpczero.checkpoint.disk.folder import read_manifest

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero.job.mesh import Mesh

GLOBAL_BATCH = 60  # 1 to 6 ranks divide it
SLAB_NBYTES = 1000  # many slabs, and none of them on the edge of anything


class Net(nn.Module):
    """Tied, frozen and zero-size parameters, buffers, a unit of each kind; sizes that divide by nothing."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.embed = nn.Linear(7, 13, bias=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(13, 13), nn.Tanh()) for _ in range(3))
        self.frozen = nn.Linear(13, 13)
        self.head = nn.Linear(13, 7, bias=False)
        self.back = nn.Linear(7, 13, bias=False)
        self.back.weight = self.embed.weight  # tied
        self.nothing = nn.Parameter(torch.empty(0))
        self.calls: Tensor
        self.mean: Tensor
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(0.0, 0.3, generator=generator)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        x = self.back(self.head(self.frozen(x)))
        if self.training:
            self.calls += 1
            self.mean += 0.125
        return x.square().mean(dim=1)


def global_batch(step: int) -> Tensor:
    return torch.randn(GLOBAL_BATCH, 7, generator=torch.Generator().manual_seed(1000 + step))


def two_groups(parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """Of those that train: matrices, which decay, and the rest."""
    trained = [p for p in parameters if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, centered=True),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
}


class Program:
    """One zeroified ``Net`` in training; the same numbers on any number of ranks, up to rounding."""

    optimizer: Any

    def __init__(
        self, topology: hpczero.Topology, *, optimizer: str = "AdamW", **options: Any
    ) -> None:
        self.topology, self.step = topology, 0
        self.model = Net()
        self.optimizer = OPTIMIZERS[optimizer](two_groups(self.model.parameters()))
        hpczero.zeroify(self.model, self.optimizer, topology=topology, **options)
        self.scheduler = LambdaLR(self.optimizer, lambda step: 1.0 / (1 + step))

    def train(self, steps: int) -> list[float]:
        """Global losses of so many steps."""
        losses = []
        for _ in range(steps):
            share = GLOBAL_BATCH // self.topology.size
            mine = global_batch(self.step)[self.topology.rank * share :][:share]
            loss = self.model(mine).mean()
            loss.backward()
            self.update()
            self.step += 1
            losses.append(sum(self.topology.gather(loss.item())) / self.topology.size)
        return losses

    def update(self) -> None:
        """After a backward."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()

    def checkpoints(self, folder: Path, **options: Any) -> Checkpoints:
        return Checkpoints(
            folder, self.model, self.optimizer, **{"slab_nbytes": SLAB_NBYTES, **options}
        )

    def save(self, folder: Path, **options: Any) -> Path:
        with self.checkpoints(folder, **options) as checkpoints:
            return checkpoints.save(self.step, self.extra())

    def extra(self) -> dict[str, Any]:
        return {"scheduler": self.scheduler.state_dict(), "sample": self.step * GLOBAL_BATCH}

    def load(self, folder: Path) -> Loaded:
        found = hpczero.checkpoint.load(folder, self.model, self.optimizer)
        self.take(found.extra)
        self.step = found.step
        return found

    def take(self, extra: dict[str, Any]) -> None:
        """What ``extra`` gave."""
        self.scheduler.load_state_dict(extra["scheduler"])

    def close(self) -> None:
        hpczero.release(self.model)


def held_save() -> tuple[threading.Event, Callable[[str], None]]:
    """An event, and what keeps a save from being written until it is set."""
    go_on = threading.Event()

    def at(name: str) -> None:
        if name == "created":
            assert go_on.wait(60)

    return go_on, at


@contextmanager
def program_of(
    comm: MPI.Intracomm,
    n: int,
    kind: type[Any] = Program,
    mesh: Mesh | None = None,
    **options: Any,
) -> Iterator[Any]:
    """A program on the first ``n`` ranks; None on the others, which wait at the end. Collective over ``comm``."""
    with first_ranks(comm, n, mesh) as topology:
        program = None if topology is None else kind(topology, **options)
        yield program
        if program is not None:
            program.close()


@contextmanager
def first_ranks(
    comm: MPI.Intracomm, n: int, mesh: Mesh | None = None
) -> Iterator[hpczero.Topology | None]:
    """A topology of the first ``n`` ranks; None on the others, which wait at the end. Collective over ``comm``."""
    part = cast("MPI.Intracomm", comm.Split(0 if comm.rank < n else 1, comm.rank))
    topology = hpczero.Topology.create(part, mesh=mesh) if comm.rank < n else None
    try:
        yield topology
    finally:
        if topology is not None:
            topology.free()
        part.Free()
        comm.Barrier()


def command(*arguments: object) -> tuple[subprocess.CompletedProcess[str], set[str]]:
    """Run ``hpczero.checkpoint`` in a process of its own; also says what that has imported."""
    words = [sys.executable, "-X", "importtime", "-m", "hpczero.checkpoint", *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
    return done, {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}


def state_digests(path: Path) -> dict[str, tuple[str, ...]]:
    """Digests of what must not depend on who saved it."""
    datasets = read_manifest(path).datasets
    return {d.name: d.digests for d in datasets if d.name != "/rng"}
