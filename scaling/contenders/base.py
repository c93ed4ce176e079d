"""What a contender is: one rank's part of one way to train; and the model, data and optimizer of all."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor, nn

from hpczero.models.gpt import GPT
from scaling.contenders.workload import LEARNING_RATE, SEED, Recommender, Workload
from scaling.evidence.record import versions

CLIP = 1.0  # largest norm of the gradient, where a contender clips


class Contender(ABC):
    """Made and driven by `scaling.contenders.rank`.

    The order is: ``connect``, ``build``, ``step`` many times, ``close``.

    Attributes:
        rank, size: known after ``connect``.
        model, optimizer: after ``build``.
    """

    rank: int
    size: int
    model: nn.Module
    optimizer: torch.optim.Optimizer

    @property
    def data_rank(self) -> int:
        """Whose samples this rank has: those of rank ``data_rank``, where ranks share a model."""
        return self.rank

    @abstractmethod
    def connect(self) -> None:
        """Join the other ranks. Collective."""

    @abstractmethod
    def build(self, workload: Workload) -> None:
        """Make ``model`` and ``optimizer`` from ``gpt(workload)``. Collective."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait for every rank. Collective."""

    @abstractmethod
    def close(self) -> None:
        """Leave the other ranks. Collective."""

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        """One training step. Collective.

        Args:
            tokens: (sequences, context) int64.
            targets: likewise, the tokens that follow.

        Returns:
            The loss of this rank's own samples before the update.
        """
        self.optimizer.zero_grad()
        loss = self.model(tokens, targets)
        loss.backward()
        self.optimizer.step()
        return float(loss.item())

    def settings(self) -> dict[str, str]:
        """What a reader must know to repeat it, library versions included."""
        return {}


class GlooContender(Contender):
    """Ranks that torch.distributed joins over gloo, on the loopback interface.

    Attributes:
        own: settings of this way to train, by name.
    """

    own: Mapping[str, object] = MappingProxyType({})

    def connect(self) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        torch.distributed.init_process_group("gloo")

    def barrier(self) -> None:
        torch.distributed.barrier()

    def close(self) -> None:
        torch.distributed.destroy_process_group()

    def settings(self) -> dict[str, str]:
        own = {name: str(value) for name, value in self.own.items()}
        return {"transport": "gloo", **versions("torch"), **own}


def gpt(workload: Workload) -> GPT:
    """The model with its initial weights, the same on every rank."""
    model = GPT(workload.model)
    model.initialize_all(seed=SEED)
    return model


def adamw(parameters: Iterable[nn.Parameter], *, fused: bool = True) -> torch.optim.AdamW:
    """The optimizer of every contender that takes one of torch's."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=fused, foreach=not fused or None)


def drawn(seed: int | list[int], vocab_size: int, shape: int | tuple[int, int]) -> np.ndarray:
    """Ids of tokens.

    Drawn with probability 1 / (1 + token), as in text, so that there is something to learn and wrong gradients show in
    the loss.
    """
    weight = 1.0 / np.arange(1, vocab_size + 1)
    draw = np.random.default_rng(seed)
    return draw.choice(vocab_size, size=shape, p=weight / weight.sum())


def batch(workload: Workload, *, step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Tokens and the ones that follow them, each (sequences, context) int64, a function of step and rank alone."""
    shape = workload.sequences, workload.context + 1
    samples = torch.from_numpy(drawn([SEED, step, rank], workload.vocab_size, shape))
    return samples[:, :-1].contiguous(), samples[:, 1:].contiguous()


def clicks(workload: Recommender, *, step: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers, categories and clicks of a batch, a function of step and rank alone."""
    draw = np.random.default_rng([SEED, step, rank])
    shape = workload.samples, workload.tables
    return (
        torch.from_numpy(draw.standard_normal((workload.samples, workload.dense), np.float32)),
        torch.from_numpy(draw.integers(0, workload.rows, shape)),
        torch.from_numpy(draw.integers(0, 2, workload.samples).astype(np.float32)),
    )
