"""The loss over held-out samples, every few steps, and another metric where the model has one.

Owns: when it is due, and what it is. Must not know: training, where the samples come from.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from hpczero.accelerator import Accelerator
from hpczero.adapters.base import Adapter
from hpczero.job.topology import Topology
from hpczero.run.passes import Passes
from hpczero.run.starting.reading import HeldOutSet
from hpczero.zero.access import finish_update
from hpczero.zero.sharding import KEY


@dataclass(frozen=True)
class Found:
    """What an evaluation finds.

    Attributes:
        loss: mean over the held-out samples.
        metric: the adapter's metric over them; None where it has none.
    """

    loss: float
    metric: float | None = None


class Evaluation:
    """Held-out figures of one model, over the same samples each time."""

    def __init__(
        self,
        model: nn.Module,
        held_out: HeldOutSet | None,
        *,
        passes: Passes,
        topology: Topology,
        accelerator: Accelerator,
        micro_batch: int,
        every: int,
        steps: int,
        adapter: Adapter | None = None,
    ) -> None:
        """Not collective.

        Args:
            model: zeroified or not.
            held_out: the samples; None evaluates nothing.
            passes: forwards of the model.
            topology: its data group divides the samples.
            accelerator: device of the model.
            micro_batch: samples of one forward.
            every: steps between evaluations; 0 evaluates after the last step alone.
            steps: number of steps of the run.
            adapter: whose metric is told too; None, or one without a metric: the loss alone.
        """
        self._measuring: Passes | None = None
        if adapter is not None and adapter.metric_name:
            self._measuring = passes.measuring(adapter)
        self._model, self._held_out, self._passes = model, held_out, passes
        self._topology, self._accelerator = topology, accelerator
        self._micro_batch, self._every, self._steps = micro_batch, every, steps

    def after(self, done: int) -> Found | None:
        """What is found if it is due after ``done`` steps, else None. Collective over topology.data."""
        if self._held_out is None or not is_due(done, self._every, self._steps):
            return None
        loss = self.mean_loss(self._held_out)
        if self._measuring is None:
            return Found(loss)
        return Found(loss, self._mean(self._held_out, self._measuring))

    def mean_loss(self, held_out: HeldOutSet) -> float:
        """Mean loss over the held-out set, of text in nats per token. Collective over topology.data.

        It is equal on every rank.
        """
        return self._mean(held_out, self._passes)

    @torch.no_grad()
    def _mean(self, held_out: HeldOutSet, passes: Passes) -> float:
        if KEY in self._model.__dict__:
            finish_update(self._model)  # what is measured is what would be saved now
        self._model.eval()
        rank, size = self._topology.data.rank, self._topology.data.size
        device = self._accelerator.device
        total = passes.held_out(
            (*(torch.as_tensor(array).to(device) for array in part.arrays), part.num_samples)
            for part in held_out.batches(micro_batch=self._micro_batch, rank=rank, world_size=size)
        )
        self._model.train()
        # Ranks that share a sample's tokens have the mean over their own of them.
        summed = sum(self._topology.data_sequence.gather(total))
        return summed / (len(held_out) * self._topology.sequence.size)


def is_due(done: int, every: int, num_steps: int) -> bool:
    """Whether something happens now that happens each ``every`` steps (0: never) and after the last one."""
    return done == num_steps or (every > 0 and done % every == 0)
