"""Average: a running average of the weights, of which each rank keeps its part.

    kept       (owned_numel,) fp32 of each trained unit: 1/N of the parameters on a rank, at every stage
    applied    the model has the averages, and what is kept are the weights of training

Only trained parameters are averaged; frozen ones and buffers stay the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hpczero.errors import PlanError, StepError
from hpczero.zero.sharding import Sharding
from hpczero.zero.units.unit import Unit
from hpczero.zero.zeroify import sharding as sharding_of

LEFT = "an exception left `with average.applied():`, and whole parameters may be averages or weights of training"


class Average:
    """A running average of the weights of one model, which checkpoints save and load under its name.

    Attributes:
        name: in checkpoints.
        count: updates so far; 0: there is no average yet.
    """

    def __init__(self, model: nn.Module, name: str, weight: Callable[[int], float]) -> None:
        """Take memory. Collective over world.

        Args:
            model: zeroified.
            name: unlike those of its other averages.
            weight: weight of the present weights in an update, 0 to 1, by the count before it. The first update takes
                the present weights.

        Raises:
            PlanError: on every rank: the name is taken or no name, nothing is trained, or weights rest on a tier.
        """
        self._sharding = sharding = sharding_of(model)
        self.name, self.count, self._weight = name, 0, weight
        self._in_model = False
        units = [unit for unit in sharding.units if unit.spec.trainable]
        with sharding.topology.agreed(f"average the weights as {name!r}"):
            if not name.isidentifier() or name in sharding.averages:
                raise PlanError(
                    f"name of an average: got {name!r}, expected an identifier unlike {sorted(sharding.averages)}"
                )
            if not units:
                raise PlanError("an average of weights: got a model of which nothing is trained")
            if any(unit.away is not None for unit in units):
                raise PlanError(
                    "an average of weights that rest on a memory tier (offload), expected them in memory; leave the "
                    "optimizer and the parameters on the device"
                )
        comm = sharding.collectives
        self._buffers = {
            unit: comm.allocate(unit.owned_numel, torch.float32, category="averages")
            for unit in units
        }
        sharding.averages[name] = self

    def close(self) -> None:
        """Give the memory back; checkpoints are without it from now on. Not collective, on all ranks alike."""
        self._check_kept("close it")
        self._sharding.averages.pop(self.name, None)
        for buffer in self._buffers.values():
            buffer.release()
        self._buffers.clear()

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights of now into the average: after ``optimizer.step()``. Not collective, on all ranks alike.

        Raises:
            StepError: inside of ``applied``.
        """
        self._check_kept("update it")
        weight = 1.0 if self.count == 0 else self._weight(self.count)
        for unit, buffer in self._buffers.items():
            with unit.owned_values() as here:
                if self.count == 0:
                    buffer.tensor.copy_(here)
                else:
                    buffer.tensor.lerp_(here, weight)
        self.count += 1

    @contextmanager
    def applied(self) -> Iterator[nn.Module]:
        """Context: the model has the averages, for evaluation, ``full_state_dict`` or an export. Collective over world.

        Frozen parameters and buffers are the model's own; what the block does to buffers (``update_bn``) ends with it.
        Steps, updates and checkpoints are refused inside.

        Raises:
            StepError: on every rank: there was no update yet, it is applied already, or a forward or backward runs.
        """
        sharding = self._sharding
        with sharding.topology.agreed(f"apply the average {self.name!r}"):
            self._check_kept("apply it")
            schedule = sharding.schedule
            if schedule.in_call or schedule.backward.runs:
                raise StepError("an average is applied while a forward or a backward runs")
            if not self.count:
                raise StepError(
                    f"the average {self.name!r} has no weights yet; call update() first"
                )
            sharding.attachment.check()
            sharding.check_values()
        buffers = [(buffer, buffer.clone()) for buffer in sharding.model.buffers()]
        self._exchange()
        publish(sharding)
        self._in_model = True
        try:
            yield sharding.model
        except BaseException:
            # Other ranks may not have left: nothing collective here.
            _restore(buffers)
            self._exchange()
            self._in_model = False
            for unit in self._buffers:
                unit.whole.doubt(LEFT)
            raise
        with sharding.topology.agreed(f"take the average {self.name!r} out of the model"):
            sharding.check_values()
        _restore(buffers)
        self._exchange()
        publish(sharding)
        self._in_model = False

    def check_out(self, what: str) -> None:
        """Refuse ``what`` while the model has the averages.

        Raises:
            StepError: it has.
        """
        if self._in_model:
            raise StepError(
                f"{what} inside of `with average.applied():`, where the model has the average {self.name!r} instead of "
                "its own weights; leave the block first"
            )

    def part(self, unit: Unit, position: int) -> Tensor:
        """(elements,) of this rank's part of the parameter in a slot of ``unit``; a view."""
        layout, index = unit.spec.layout, self._sharding.topology.shard_index
        slot = layout.slots[position]
        part = layout.overlap(index, slot.name)
        begin = slot.offset + part.start - layout.shard_range(index).start
        return self._buffers[unit].tensor[begin : begin + len(part)]

    def load(self, unit: Unit, owned: Tensor) -> None:
        """Replace what is kept of ``unit`` by (owned_numel,) values."""
        self._buffers[unit].tensor.copy_(owned)

    def _check_kept(self, what: str) -> None:
        self.check_out(what)
        if not self._buffers:
            raise StepError(f"the average {self.name!r} was closed; make a new one")

    @torch.no_grad()
    def _exchange(self) -> None:
        for unit, buffer in self._buffers.items():
            with unit.owned_values(changes=True) as here:
                before = here.clone()
                here.copy_(buffer.tensor)
            buffer.tensor.copy_(before)


@torch.no_grad()
def _restore(buffers: list[tuple[Tensor, Tensor]]) -> None:
    """Give buffers of training their values back: statistics of averaged weights are not those of training."""
    for buffer, before in buffers:
        buffer.copy_(before)


def publish(sharding: Sharding) -> None:
    """Bring to the model what this rank's masters hold. Collective over world."""
    sharding.schedule.residence.end_step()
    for unit in sharding.units:
        if unit.spec.trainable:
            unit.publish()


class EMA(Average):
    """Exponential moving average: a <- decay a + (1 - decay) w. The first update takes w.

    As torch.optim.swa_utils.AveragedModel with ``get_ema_multi_avg_fn(decay)``, of which each rank keeps 1/N, in fp32.
    Checkpoints keep it: make it before ``hpczero.checkpoint.load``, under the same name.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999, *, name: str = "ema") -> None:
        """Collective over world.

        Args:
            model: zeroified, trained by some optimizer.
            decay: 0 to 1.
            name: in checkpoints, and unlike that of other averages of the model.

        Raises:
            ValueError: a decay out of range.
            PlanError: on every rank: the model is not zeroified, the name is taken, nothing is trained, or weights
                rest on a memory tier.
        """
        if not 0 <= decay <= 1:
            raise ValueError(f"decay: got {decay!r}, expected 0 to 1")
        super().__init__(model, name, lambda count: 1 - decay)


class SWA(Average):
    """Stochastic weight averaging: the mean of the weights at all updates.

    As torch.optim.swa_utils.AveragedModel, of which each rank keeps 1/N, in fp32. Checkpoints keep it, as ``EMA``.

    Source: Izmailov et al., Averaging weights leads to wider optima and better generalization, UAI 2018.
    """

    def __init__(self, model: nn.Module, *, name: str = "swa") -> None:
        """Collective over world.

        Args:
            model: zeroified, trained by some optimizer.
            name: in checkpoints, and unlike that of other averages of the model.

        Raises:
            PlanError: on every rank: as of ``EMA``.
        """
        super().__init__(model, name, lambda count: 1 / (count + 1))


def publish_changes(model: nn.Module) -> None:
    """Bring to the model what was done to the parameters in ``optimizer.param_groups`` between steps. Collective.

    For optimizers that exchange weights outside of their step, as ``optimizer.eval()`` and ``optimizer.train()`` of
    schedule-free ones do: call it after each of them, on all ranks.

    Raises:
        PlanError: the model is not zeroified.
        StepError: on every rank: a forward or a backward runs.
    """
    publish(sharding_of(model))
