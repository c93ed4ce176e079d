"""One optimizer step over the micro batches of a rank: training takes it, and measurements measure it.

``TrainingStep.take`` has the order of calls: passes (forward and backward, ``PlainPasses`` of evaluation.py), clip,
step, zero_grad, with the clocks around them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

import hpczero
from hpczero.accelerator import Accelerator
from hpczero.activations import Checkpointing
from hpczero.run.evaluation import Passes, Samples
from hpczero.run.results.metrics import Stopwatch
from hpczero.tier import Flow

WORK = ("data", "forward", "backward")


@dataclass(frozen=True)
class Taken:
    """A step that is done, as this rank saw it.

    Attributes:
        loss: mean over the global batch, before the update; the same on every rank.
        own_loss: this rank's part of it: the mean over its samples, weighted by their number.
        grad_norm: 2-norm of the mean gradient before clipping.
        learning_rate: that of the first group in this update.
        step_s: seconds the step took.
        exposed_s: seconds the device's computation stood still for collectives; 0 on the host.
        watch: phases ``data``, ``forward``, ``backward``, ``optimizer``, ``communication``. It goes on running.
        tier: what went through this rank's memory tier; None without offload.
        activations: the same of inputs of blocks; None where they rest on the device.
    """

    loss: float
    own_loss: float
    grad_norm: float
    learning_rate: float
    step_s: float
    exposed_s: float
    watch: Stopwatch
    tier: Flow | None = None
    activations: Flow | None = None

    @property
    def own_s(self) -> float:
        """Seconds of this rank's own work: loading, forward and backward without waits for others."""
        return (sum(map(self.watch.ms, WORK)) - self.watch.waited_ms(*WORK)) / 1e3

    @property
    def communication_ms(self) -> float:
        """Milliseconds in collectives and in waits for them, in any phase."""
        return self.watch.waited_ms(*WORK, "optimizer") + self.watch.ms("communication")


class TrainingStep:
    """Takes the steps of one model, one after the other.

    Attributes:
        passes: forward and backward of its micro batches.
        waits: whether clocks wait for the device; False on the host.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        passes: Passes,
        samples: Samples,
        accelerator: Accelerator,
        clip: float | None = None,
        scheduler: LRScheduler | None = None,
        waits: bool = False,
        checkpointing: Checkpointing | None = None,
    ) -> None:
        """Not collective.

        Args:
            model: zeroified with ``optimizer``.
            optimizer: its parameters are this rank's shards.
            passes: forward and backward of its micro batches.
            samples: gives the samples of this rank for a step and a micro step.
            accelerator: device of the model.
            clip: largest norm of the gradient; None leaves it as it is.
            scheduler: scheduler of the learning rate; it steps after each update.
            waits: whether to wait for the device before each clock is read. Phases are then those of the device, and a
                step takes a little longer. It has no effect on the host.
            checkpointing: what calls the model's blocks; None where nothing calls them otherwise.
        """
        self._model, self._optimizer, self._scheduler = model, optimizer, scheduler
        self.passes, self._samples = passes, samples
        self._accelerator, self.waits = accelerator, waits and not accelerator.is_host
        self._clip = math.inf if clip is None else clip
        sharding = hpczero.sharding(model)
        self._topology, self._collectives = sharding.topology, sharding.collectives
        self._store = sharding.away.store
        away = checkpointing is not None and checkpointing.staging_nbytes > 0
        self._checkpointing = checkpointing if away else None
        self._known_exposed_s = 0.0

    def take(self, number: int) -> Taken:
        """Take step ``number``, counted from 0. Collective over the topology of the model.

        Raises:
            StepError: as ``optimizer.step`` of a zeroified model.
        """
        exposed_s, moved, rested = self._exposed_s(), self._moved(), self._moved_inputs()
        watch = Stopwatch(self._waited_s)
        read_losses = self.passes.take(number, self._samples, watch, self._finish)
        with watch.phase("optimizer"):
            grad_norm = hpczero.clip_grad_norm_(self._model, self._clip)
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._finish()
        learning_rate = float(self._optimizer.param_groups[0]["lr"])
        if self._scheduler is not None:
            self._scheduler.step()
        ranks, plan = self._topology.data_sequence, self.passes.plan  # each with tokens of its own
        with watch.phase("communication"):
            losses = read_losses()
            own_loss = math.fsum(losses) / len(losses)
            mean_loss = ranks.total(*losses) / (ranks.size if plan is None else plan.count)
        return Taken(
            loss=mean_loss,
            own_loss=own_loss,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            step_s=watch.elapsed_s(),
            exposed_s=self._exposed_s() - exposed_s,
            watch=watch,
            tier=None if self._store is None else self._moved() - moved,
            activations=None if self._checkpointing is None else self._moved_inputs() - rested,
        )

    def _moved(self) -> Flow:
        """What has gone through the memory tier so far."""
        return Flow() if self._store is None else self._store.tier.traffic.total

    def _moved_inputs(self) -> Flow:
        """What of inputs of blocks has gone through their tier so far."""
        return Flow() if self._checkpointing is None else self._checkpointing.traffic

    def _finish(self) -> None:
        if self.waits:
            self._accelerator.finish()
            self._known_exposed_s = self._exposed_s()

    def _waited_s(self) -> float:
        """Seconds that this rank has stood still for collectives so far, by the clock of the device that computes."""
        shards = self._known_exposed_s if self.waits else self._collectives.stats.seconds
        return shards + self.passes.waited_s

    def _exposed_s(self) -> float:
        return self._collectives.calls.exposed.seconds() or 0.0
