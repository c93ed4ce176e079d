"""One training over any layout of ranks, and the same one in one process with stock torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hpczero.models.config import GPTConfig
from hpczero.options.config import LayoutOptions

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

STEPS, MICRO_BATCHES = 10, 3
# Odd sizes: heads, vocabulary and hidden units do not divide by every number of tensor ranks.
SIZES = GPTConfig(vocab_size=61, context=12, layers=4, hidden=24, heads=4)


@dataclass
class Trained:
    """What a training left behind.

    Attributes:
        losses: of each step, the mean over all tokens.
        norms: of the gradient of each step, before clipping.
        state: whole parameters at the end, by their names in the whole model; None but on rank 0.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    state: dict[str, Tensor] | None = None


def text(step: int, micro: int, rank: int, context: int = SIZES.context) -> Tensor:
    """(2, context + 1) tokens of one micro-batch of one data parallel rank."""
    seed = 1 + rank + 100 * micro + 10_000 * step
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, SIZES.vocab_size, (2, context + 1), generator=generator)


def clip_of(data: int) -> float:
    """A largest norm that clips some steps of ``data`` data parallel ranks, and not all."""
    return 0.9 / math.sqrt(data)


def optimizer_of(model: nn.Module, *, eps: float = 1e-3) -> torch.optim.Optimizer:
    """AdamW; with its usual eps it would blow up gradients that are exactly zero but for rounding (key biases)."""
    return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1, eps=eps)


def samples_of(topology: Topology, context: int = SIZES.context) -> Callable[[int, int], Any]:
    """For the passes of a run: inputs and targets of a step and a micro-batch, of this data parallel rank."""

    def samples(step: int, micro: int) -> tuple[Any, Any]:
        tokens = text(step, micro, topology.data.rank, context)
        return tokens[:, :-1].numpy(), tokens[:, 1:].numpy()

    return samples


def take(passes: Any, step: int, samples: Callable[[int, int], Any]) -> Callable[[], float]:
    """Forwards and backwards of a step of a run, which nobody times; its loss. Collective."""
    from hpczero.run.results.metrics import Stopwatch

    loss: Callable[[], float] = passes.take(step, samples, Stopwatch(lambda: 0.0), lambda: None)
    return loss


@contextmanager
def laid_out(
    comm: MPI.Intracomm, options: LayoutOptions, nodes: Sequence[int] | None = None
) -> Iterator[Topology]:
    """The topology that the options mean for the ranks of ``comm``, all on one node or on these. Collective."""
    from hpczero import Topology
    from hpczero.plan.degrees import mesh_on_nodes

    mesh = mesh_on_nodes(options, nodes or [0] * comm.size)
    topology = Topology.create(comm, nodes, mesh=mesh)
    yield topology
    topology.free()


def train_alone(
    config: GPTConfig,
    data: int,
    *,
    steps: int = STEPS,
    micro_batches: int = MICRO_BATCHES,
    seed: int = 3,
    dtype: torch.dtype = torch.float32,
) -> Trained:
    """In one process, whole, with stock torch: the micro-batches of ``data`` ranks one after the other."""
    from hpczero.models.gpt import GPT

    model = GPT(config)
    model.initialize_all(seed=seed)
    optimizer = optimizer_of(model)
    found = Trained()
    for step in range(steps):
        total = 0.0
        for rank in range(data):
            for micro in range(micro_batches):
                tokens = text(step, micro, rank, config.context)
                loss = model(tokens[:, :-1], tokens[:, 1:]) / (data * micro_batches)
                loss.backward()
                total += loss.item()
        found.losses.append(total)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip_of(data))
        found.norms.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()
    found.state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return found


def train_laid_out(
    config: GPTConfig,
    topology: Topology,
    options: LayoutOptions,
    *,
    stage: int,
    steps: int = STEPS,
    micro_batches: int = MICRO_BATCHES,
    seed: int = 3,
    around: Callable[[Any, Any, int], None] = lambda model, optimizer, step: None,
    prepare: Callable[[Any, Any], Callable[[], None]] = lambda adapter, model: lambda: None,
    **of_zeroify: Any,
) -> Trained:
    """Over the ranks of ``topology``, as the training command does it. Collective over its world.

    Args:
        config: of the model.
        topology: with a mesh that the options mean.
        options: degrees.
        stage: of ZeRO.
        steps: to take.
        micro_batches: of each data parallel rank and step.
        seed: of the initial weights.
        around: called before each optimizer step, with model, optimizer and step.
        prepare: called with adapter and zeroified model; what it returns is called at the end.
        of_zeroify: further arguments of it.
    """
    import hpczero
    from hpczero.accelerator import HostAccelerator
    from hpczero.adapters.gpt import GPTAdapter
    from hpczero.parallel.tensor import close
    from hpczero.run.evaluation import passes_of
    from hpczero.run.starting.building import divide

    adapter = GPTAdapter(config)
    with torch.device("meta"):
        model = adapter.build()
    initialize = adapter.initializer(model, seed)
    divide(options, adapter, model, topology)
    optimizer = optimizer_of(model)
    hpczero.zeroify(
        model,
        optimizer,
        stage=stage,
        topology=topology,
        initialize=initialize,
        secondary=options.secondary,
        **of_zeroify,
    )
    end = prepare(adapter, model)
    passes = passes_of(
        options, adapter, model, accumulation=micro_batches, accelerator=HostAccelerator()
    )

    found, samples = Trained(), samples_of(topology, config.context)
    for step in range(steps):
        loss = take(passes, step, samples)
        around(model, optimizer, step)
        found.norms.append(hpczero.clip_grad_norm_(model, clip_of(topology.data.size)))
        optimizer.step()
        optimizer.zero_grad()
        losses = topology.data_sequence.gather(loss())
        found.losses.append(sum(losses) / len(losses))
    found.state = hpczero.full_state_dict(model)
    hpczero.release(model)
    close(model)
    end()
    return found


def problems(found: Trained, expected: Trained, *, tolerance: float = 1e-6) -> list[str]:
    """How a training differs from another one, relative to losses, norms and the largest element of each parameter."""
    said = []
    for name, mine, others in (
        ("loss", found.losses, expected.losses),
        ("norm", found.norms, expected.norms),
    ):
        off = [abs(a - b) / abs(b) for a, b in zip(mine, others, strict=True)]
        if not max(off) <= tolerance:
            said.append(f"{name} off by {max(off):.2g} at step {off.index(max(off))}")
    if found.state is not None and expected.state is not None:
        if found.state.keys() != expected.state.keys():
            said.append(f"names {sorted(found.state.keys() ^ expected.state.keys())[:4]}")
        for name in found.state.keys() & expected.state.keys():
            value, right = found.state[name], expected.state[name]
            if value.shape != right.shape:
                said.append(f"{name} {tuple(value.shape)}, expected {tuple(right.shape)}")
                continue
            off_by = ((value - right).abs().max() / right.abs().max()).item()
            # Biases begin at zero: all they are is what a few updates made of rounded sums (5.4e-6 with AVX2).
            if not off_by <= 10 * tolerance:
                said.append(f"{name} off by {off_by:.2g}")
    return said


def sizes(**changes: Any) -> GPTConfig:
    """``SIZES`` but for these."""
    return dataclasses.replace(SIZES, **changes)
