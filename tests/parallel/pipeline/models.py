"""What the tests of pipelines share: a small GPT, its micro-batches, one process that trains it, stages that do.

Must not know: what any test looks for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import hpczero
from hpczero import Mesh, Pipeline, Topology
from hpczero.models import GPT
from hpczero.parallel import close, cut, gpt_rule, gpt_stages, split
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import adamw, tiny_gpt

if TYPE_CHECKING:  # importing MPI would start it where tests are only collected
    from mpi4py import MPI

Batch = tuple[list[Tensor], list[Tensor]]


def gpt(seed: int = 1, **changes: Any) -> GPT:
    """Five blocks, so that neither 2 nor 3 stages divide them."""
    return tiny_gpt(seed, **{"layers": 5, **changes})


def batch(number: int, micro_batches: int, *, size: int = 2) -> Batch:
    """Inputs and targets of each micro-batch, (size, 9) int64 tokens."""
    generator = torch.Generator().manual_seed(1000 + number)
    tokens = torch.randint(61, (micro_batches, size, 10), generator=generator)
    return list(tokens[:, :, :-1]), list(tokens[:, :, 1:])


@dataclass
class Left:
    """What a training leaves: of every step loss and norm, the last gradients, the weights; by name."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def trained_plainly(
    model: nn.Module, batches: Sequence[Sequence[Batch]], *, max_norm: float = 1.0
) -> Left:
    """Stock torch in one process; ``batches`` of each step has those of each data parallel rank."""
    optimizer, left = adamw(model, lr=1e-3, eps=1e-2), Left([], [], {}, {})
    for of_ranks in batches:
        pairs = [pair for inputs, targets in of_ranks for pair in zip(inputs, targets, strict=True)]
        losses = [model(x, y) for x, y in pairs]
        for loss in losses:
            (loss / len(pairs)).backward()
        left.losses.append(sum(loss.item() for loss in losses) / len(pairs))
        named = dict(model.named_parameters(remove_duplicate=False)).items()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        left.norms.append(norm.item())
        left.gradients = {n: p.grad.clone() for n, p in named if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    left.weights = {n: p.detach().clone() for n, p in named}
    return left


class Staged:
    """One rank's stage of a GPT, zeroified, with its pipeline."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        model: GPT,
        *,
        micro_batches: int,
        pipeline: int = 2,
        schedule: str = "1f1b",
        interleave: int = 1,
        balance: Sequence[int] | None = None,
        nodes: Sequence[int] | None = None,
        hold: bool = True,
        reduce: str = "once",
        tensor: int = 1,
        replicate: int = 1,
        sequence: bool = False,
        change: Callable[[nn.Module], object] = lambda model: None,
        **options: Any,
    ) -> None:
        """Collective. ``options`` are those of ``zeroify``; ``change`` is called between it and the cut."""
        mesh = Mesh.of(comm.size, pipeline=pipeline, tensor=tensor, replicate=replicate)
        self.topology = Topology.create(comm, nodes, mesh=mesh)
        how: dict[str, Any] = {"interleave": interleave, "balance": balance}
        self.model = cut(model, self.topology, gpt_stages(model), **how)
        if tensor > 1:
            split(self.model, self.topology, gpt_rule(model.config), sequence=sequence)
        change(self.model)
        self.optimizer = adamw(self.model, lr=1e-3, eps=1e-2)
        hpczero.zeroify(self.model, self.optimizer, topology=self.topology, **options)
        self.pipeline = Pipeline(
            self.model, micro_batches=micro_batches, schedule=schedule, hold=hold, reduce=reduce
        )

    @property
    def state(self) -> hpczero.Sharding:
        return hpczero.sharding(self.model)

    def gradients(self, inputs: Any, targets: Any) -> dict[str, Tensor]:
        """Of one step that is not taken, by the names on this stage. Collective."""
        self.pipeline.step(inputs, targets)
        found = hpczero.full_gradients(self.model)
        self.optimizer.zero_grad()
        return found

    def train(self, batches: Sequence[Sequence[Batch]], *, max_norm: float = 1.0) -> Left:
        """As ``trained_plainly``, gradients and weights of this stage. Collective."""
        left, data = Left([], [], {}, {}), self.topology.data
        for of_ranks in batches:
            loss = self.pipeline.step(*of_ranks[data.rank])
            left.losses.append(sum(self.topology.gather(loss)) / self.topology.size)
            left.norms.append(hpczero.clip_grad_norm_(self.model, max_norm))
            left.gradients = hpczero.full_gradients(self.model)
            self.optimizer.step()
            self.optimizer.zero_grad()
        left.weights = self.weights()
        return left

    def weights(self) -> dict[str, Tensor]:
        """Those of this stage. Collective."""
        with hpczero.gathered(self.model):
            return {n: p.detach().clone() for n, p in self.model.named_parameters()}

    def release(self) -> None:
        """Collective."""
        hpczero.release(self.model)
        if self.topology.tensor.size > 1:
            close(self.model)
        self.topology.free()


Make = Callable[..., Staged]


def check_bits(
    comm: MPI.Intracomm, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> None:
    """Something was found, and in every bit what is expected of its name."""
    wrong = [name for name, value in found.items() if not torch.equal(value, expected[name])]
    parallel_assert(comm, found and not wrong, f"{wrong}")


def check_near(
    comm: MPI.Intracomm, found: Mapping[str, Tensor], expected: Mapping[str, Tensor], within: float
) -> None:
    """Something was found, and no element differs by more."""
    far = {name: float((value - expected[name]).abs().max()) for name, value in found.items()}
    parallel_assert(comm, far and max(far.values()) < within, f"{far}")


def alone(
    model: nn.Module, inputs: Sequence[Tensor], targets: Sequence[Tensor], **options: Any
) -> dict[str, Tensor]:
    """Gradients that this process gets by itself, zeroified and without a pipeline, of all micro-batches."""
    topology, optimizer = Topology.alone(), adamw(model)
    hpczero.zeroify(model, optimizer, topology=topology, **options)
    for index, (x, y) in enumerate(zip(inputs, targets, strict=True)):
        with hpczero.accumulate(model, index, len(inputs)):
            model(x, y).backward()
    found = hpczero.full_gradients(model)
    hpczero.release(model)
    topology.free()
    return found
