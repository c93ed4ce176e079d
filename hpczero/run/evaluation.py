"""The loss over held-out text, every few steps.

Owns: when it is due, and what it is. Must not know: training, where the text comes from.
"""

from __future__ import annotations

import torch
from torch import nn

from hpczero.accelerator import Accelerator
from hpczero.data import HeldOut
from hpczero.job.topology import Topology
from hpczero.run.passes import Passes
from hpczero.zero.access import finish_update
from hpczero.zero.sharding import KEY


class Evaluation:
    """Held-out loss of one model, over the same samples each time."""

    def __init__(
        self,
        model: nn.Module,
        held_out: HeldOut | None,
        *,
        passes: Passes,
        topology: Topology,
        accelerator: Accelerator,
        micro_batch: int,
        every: int,
        steps: int,
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
        """
        self._model, self._held_out, self._passes = model, held_out, passes
        self._topology, self._accelerator = topology, accelerator
        self._micro_batch, self._every, self._steps = micro_batch, every, steps

    def after(self, done: int) -> float | None:
        """``mean_loss`` if it is due after ``done`` steps, else None. Collective over topology.data."""
        if self._held_out is None or not is_due(done, self._every, self._steps):
            return None
        return self.mean_loss(self._held_out)

    @torch.no_grad()
    def mean_loss(self, held_out: HeldOut) -> float:
        """Mean loss over the held-out set in nats per token, equal on every rank. Collective over topology.data."""
        if KEY in self._model.__dict__:
            finish_update(self._model)  # what is measured is what would be saved now
        self._model.eval()
        rank, size = self._topology.data.rank, self._topology.data.size
        device = self._accelerator.device
        total = self._passes.held_out(
            (
                torch.from_numpy(part.x).to(device),
                torch.from_numpy(part.y).to(device),
                part.num_samples,
            )
            for part in held_out.batches(micro_batch=self._micro_batch, rank=rank, world_size=size)
        )
        self._model.train()
        # Ranks that share a sample's tokens have the mean over their own of them.
        summed = sum(self._topology.data_sequence.gather(total))
        return summed / (len(held_out) * self._topology.sequence.size)


def is_due(done: int, every: int, num_steps: int) -> bool:
    """Whether something happens now that happens each ``every`` steps (0: never) and after the last one."""
    return done == num_steps or (every > 0 and done % every == 0)
