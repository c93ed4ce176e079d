"""EMA and SWA: running averages of a zeroified model's weights, in shards.

Owns: how much an update weighs. Must not know: shards.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import nn

from hpczero.zero.averages import Average, publish
from hpczero.zero.zeroify import sharding


class _Averaged:
    """What both have; see the subclasses."""

    def __init__(self, average: Average) -> None:
        self._average = average

    @property
    def count(self) -> int:
        """Updates so far."""
        return self._average.count

    def update(self) -> None:
        """Take the weights of now into the average: after ``optimizer.step()``. Not collective, on all ranks alike.

        Raises:
            StepError: inside of ``applied``.
        """
        self._average.update()

    def applied(self) -> AbstractContextManager[nn.Module]:
        """Context: the model has the averages, for evaluation, ``full_state_dict`` or an export. Collective over world.

        Frozen parameters and buffers are the model's own; what the block does to buffers ends with it. Steps, updates
        and checkpoints are refused inside.

        Raises:
            StepError: on every rank: there was no update yet, it is applied already, or a forward or backward runs.
        """
        return self._average.applied_to_model()

    def close(self) -> None:
        """Give the memory back; checkpoints are without it from now on. Not collective, on all ranks alike."""
        self._average.close()


class EMA(_Averaged):
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
        super().__init__(Average(sharding(model), name, lambda count: 1 - decay))


class SWA(_Averaged):
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
        super().__init__(Average(sharding(model), name, lambda count: 1 / (count + 1)))


def publish_changes(model: nn.Module) -> None:
    """Bring to the model what was done to the parameters in ``optimizer.param_groups`` between steps. Collective.

    For optimizers that exchange weights outside of their step, as ``optimizer.eval()`` and ``optimizer.train()`` of
    schedule-free ones do: call it after each of them, on all ranks.

    Raises:
        PlanError: the model is not zeroified.
        StepError: on every rank: a forward or a backward runs.
    """
    publish(sharding(model))
