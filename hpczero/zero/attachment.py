"""Attachment: whether the model and its optimizers still hold what was sharded, and nothing else.

Owns: the refusal of parameters that came later. Must not know: buffers, values, what a step does.

It is checked at every step. To walk through modules by torch's own iterators costs more than the rest of a small step
(issue 17). The check therefore compares identities first, and looks for names once something is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from hpczero.errors import StepError
from hpczero.zero.units.module_buffers import modules_of
from hpczero.zero.units.unit import Unit
from hpczero.zero.update.optimizer_state import OptimizerState
from hpczero.zero.update.stepper import Stepper


class Attachment:
    """Of one model and its optimizers.

    Attributes:
        modules: modules of the model, as ``check`` found them last.
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit], rank: int) -> None:
        """Not collective.

        Args:
            model: its parameters belong to ``units``.
            units: all units of the model.
            rank: rank of this process, for errors.
        """
        self._model = model
        self.modules = modules_of(model)
        self._rank = rank
        # Ids stay theirs: units keep the tensors.
        self._parameters = {id(p) for unit in units for p in unit.parameters}
        self._watched: list[tuple[Stepper, OptimizerState, set[int], int]] = []
        self._others: list[Callable[[], None]] = []

    def watch(self, stepper: Stepper, state: OptimizerState) -> None:
        """Check this optimizer too from now on."""
        count = len(stepper.optimizer.param_groups)
        self._watched.append((stepper, state, {id(shard) for shard in stepper.shards}, count))

    def follow(self) -> None:
        """The optimizers have more shards, and more groups."""
        watched, self._watched = self._watched, []
        for stepper, state, _, _ in watched:
            self.watch(stepper, state)

    def also(self, check: Callable[[], None]) -> None:
        """Call ``check`` too from now on; it may raise StepError or TierError, which all ranks then do."""
        self._others.append(check)

    def check(self) -> None:
        """Refuse parameters that came after ``zeroify``. No unit would reduce their gradients, and ranks would differ.

        Raises:
            StepError: the message names the first such parameter of the model, or the optimizer's group.
            StepError, TierError: of what was added by ``also``.
        """
        known = self._parameters
        self.modules = modules_of(self._model)
        for module in self.modules:
            for parameter in module._parameters.values():
                if parameter is not None and id(parameter) not in known:
                    self._refuse_parameter()
        for stepper, state, shards, count in self._watched:
            for index, group in enumerate(stepper.optimizer.param_groups[:count]):
                foreign = sum(id(parameter) not in shards for parameter in group["params"])
                if foreign:
                    raise StepError(
                        f"rank {self._rank}: group {index} of {stepper.name} has {foreign} parameter(s) put in "
                        "after zeroify, whose gradients nobody would reduce; put them in by "
                        "optimizer.add_param_group, in a group of their own"
                    )
            state.check(shards)
        for check in self._others:
            check()

    def _refuse_parameter(self) -> None:
        for name, parameter in self._model.named_parameters():
            if id(parameter) not in self._parameters:
                raise StepError(
                    f"rank {self._rank}: parameter {name!r} came into the model after zeroify (a module "
                    "replaced, load_state_dict(assign=True)?), so it is neither sharded nor trained; build the whole "
                    "model before zeroify, and change values inside `with hpczero.gathered(model, modifier_rank=0):`"
                )
