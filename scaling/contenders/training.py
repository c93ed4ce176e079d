"""A GPT in training as the training command builds it, over ranks that are connected already."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

import hpczero
from hpczero.accelerator import Accelerator, HostAccelerator
from hpczero.adapters.gpt import GPTAdapter
from hpczero.job.topology import Topology
from hpczero.models.config import GPTConfig
from hpczero.options.config import LayoutOptions
from hpczero.run.evaluation import LeafPlan, passes_of
from hpczero.run.starting.building import divide
from hpczero.run.step import Taken, TrainingStep
from scaling.contenders.base import adamw
from scaling.contenders.workload import SEED

PLAIN = LayoutOptions()


def build(
    adapter: GPTAdapter,
    topology: Topology,
    layout: LayoutOptions = PLAIN,
    *,
    seed: int = SEED,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = adamw,
    **options: Any,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Model and optimizer, in shards. Collective over ``topology``; ``options`` are of ``zeroify``."""
    with torch.device("meta"):
        model = adapter.build()
    initialize = adapter.initializer(model, seed)
    divide(layout, adapter, model, topology)
    made = optimizer(model.parameters())
    own = {"secondary": layout.secondary, "initialize": initialize, **options}
    hpczero.zeroify(model, made, topology=topology, **own)
    return model, made


def random_samples(seed: Any, sequences: int, model: GPTConfig) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and the ones that follow them, each (sequences, context) int64; ``seed`` is that of NumPy."""
    shape = (sequences, model.context + 1)
    tokens = np.random.default_rng(seed).integers(0, model.vocab_size, shape)
    return tokens[:, :-1].copy(), tokens[:, 1:].copy()


class GPTTraining:
    """A model, its optimizer and its steps, in memory until it is closed. Collective over ``topology``."""

    def __init__(
        self,
        adapter: GPTAdapter,
        topology: Topology,
        samples: Callable[[int, int], Any],
        layout: LayoutOptions = PLAIN,
        *,
        accumulation: int = 1,
        device: Accelerator | None = None,
        waits: bool = False,
        plan: LeafPlan | None = None,
        **options: Any,
    ) -> None:
        """Build it.

        Args:
            adapter: of the model.
            topology: the ranks.
            samples: of a step and a micro-batch.
            layout: which ranks share what.
            accumulation: forwards of a step.
            device: where ranks compute; None: the host.
            waits: as of ``TrainingStep``.
            plan: of leaves, with ``exact`` among the options.
            options: of ``build``.
        """
        device = device or HostAccelerator()
        self.topology = topology
        self.model, self.optimizer = build(adapter, topology, layout, device=device, **options)
        self.passes = passes_of(
            layout, adapter, self.model, accumulation=accumulation, accelerator=device, plan=plan
        )
        self._step = TrainingStep(
            self.model,
            self.optimizer,
            passes=self.passes,
            samples=samples,
            accelerator=device,
            clip=1.0,
            waits=waits,
        )
        self.taken = 0

    def take(self) -> Taken:
        """One step."""
        taken = self._step.take(self.taken)
        self.taken += 1
        return taken

    def steps(self, count: int) -> list[float]:
        """Train; the loss of each step, the mean over the global batch."""
        return [self.take().loss for _ in range(count)]

    def close(self) -> None:
        """Give everything back."""
        hpczero.release(self.model)
