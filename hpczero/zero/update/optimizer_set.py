"""OptimizerSet: the optimizers of one model, whose groups are numbered one after the other.

Owns: which optimizers there are, and which of them a number of a group means. Must not know: units, steps, MPI.

The groups of optimizer 0 come first. A parameter that is trained is in one group of one optimizer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hpczero.errors import PlanError
from hpczero.zero.update.optimizers import check_optimizer, describe_options, group_of_parameters


class OptimizerSet:
    """None for inference, one, or several; in the order in which the program gave them."""

    def __init__(self, optimizers: tuple[Optimizer, ...]) -> None:
        """As they are now; groups that are added later have no number before ``recount``. Not collective."""
        self._optimizers = optimizers
        self._ranges = self._ranges_now()

    def _ranges_now(self) -> list[range]:
        counts = (len(optimizer.param_groups) for optimizer in self._optimizers)
        return [range(*ends) for ends in pairwise(accumulate(counts, initial=0))]

    def recount(self) -> dict[int, int]:
        """Number the groups anew, where optimizers have got more; new number of each that had one. Not collective."""
        before, self._ranges = self._ranges, self._ranges_now()
        pairs = zip(before, self._ranges, strict=True)
        return {n: now.start + n - past.start for past, now in pairs for n in past}

    @classmethod
    def of(cls, given: object) -> OptimizerSet:
        """What a program gives to ``zeroify``: None, an optimizer, or a tuple or list of them.

        Raises:
            PlanError: something else, none at all, or one of them twice.
        """
        if given is None:
            return cls(())
        found = tuple(given) if isinstance(given, (tuple, list)) else (given,)
        odd = [type(each).__name__ for each in found if not isinstance(each, Optimizer)]
        if odd:
            raise PlanError(
                f"optimizer: got {odd[0]}, expected a torch.optim.Optimizer, a tuple or list of them, or None for a "
                "model that is not trained"
            )
        if not found:
            raise PlanError(
                f"optimizer: got an empty {type(given).__name__}, expected at least one optimizer, or None for a model "
                "that is not trained"
            )
        if len({id(each) for each in found}) < len(found):
            raise PlanError("optimizer: got the same optimizer twice, expected each once")
        return cls(found)

    def __len__(self) -> int:
        return len(self._optimizers)

    def __iter__(self) -> Iterator[Optimizer]:
        return iter(self._optimizers)

    @property
    def alone(self) -> Optimizer | None:
        """The optimizer where there is one.

        Raises:
            PlanError: there are several.
        """
        if len(self) > 1:
            raise PlanError(
                f"the model has {len(self)} optimizers ({', '.join(self.classes)}), and one was asked for; go through "
                "hpczero.sharding(model).optimizers"
            )
        return self._optimizers[0] if self._optimizers else None

    @property
    def classes(self) -> list[str]:
        """The name of each one's class."""
        return [type(optimizer).__name__ for optimizer in self]

    @property
    def groups(self) -> list[dict[str, Any]]:
        """All groups as they are now, by their numbers."""
        return [group for optimizer in self for group in optimizer.param_groups]

    def groups_of(self, index: int) -> range:
        """The numbers of the groups of optimizer ``index``."""
        return self._ranges[index]

    def of_group(self, number: int) -> Optimizer:
        """Which optimizer the group of this number belongs to."""
        pairs = zip(self._optimizers, self._ranges, strict=True)
        return next(optimizer for optimizer, numbers in pairs if number in numbers)

    def name(self, index: int) -> str:
        """What a message calls optimizer ``index``."""
        return "the optimizer" if len(self) == 1 else f"optimizer {index} ({self.classes[index]})"

    def describe(self) -> list[str]:
        """As ``describe_options``, of all."""
        return [text for optimizer in self for text in describe_options(optimizer)]

    # --- before anything is sharded ------------------------------------------------------------------------------

    def check(self) -> None:
        """Refuse what cannot work on shards.

        Raises:
            PlanError: see ``check_optimizer``.
        """
        for optimizer in self:
            check_optimizer(optimizer)

    def number_parameters(self, model: nn.Module) -> dict[str, int]:
        """Number of the group of each trainable parameter of ``model`` by qualified name.

        Raises:
            PlanError: a parameter is in two optimizers; further see ``group_of_parameters``.
        """
        held = Counter(
            id(p)
            for optimizer in self
            for p in {
                id(p): p for group in optimizer.param_groups for p in group["params"]
            }.values()
        )
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and held[id(parameter)] > 1:
                raise PlanError(
                    f"parameter {name!r} is in {held[id(parameter)]} optimizers, expected one: two updates of one "
                    "shard would work on each other's values; give each parameter to one of them"
                )
        return group_of_parameters(self.groups, model)
