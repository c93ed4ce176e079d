"""Given: what a program gives a step of a pipeline, by micro-batch.

Owns: which stage needs what, and how many there must be. Must not know: messages, actions, the model's call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpczero.errors import ConfigError
from hpczero.parallel.pipeline.stages import Stage


class Given(NamedTuple):
    """Inputs and targets of one stage.

    Attributes:
        number: of micro-batches.
        inputs: of each micro-batch; empty where the stage needs none.
        targets: of each micro-batch; empty tuples where the stage needs none.
        wants_loss: whether the last stage computes one.
    """

    number: int
    inputs: list[tuple[Any, ...]]
    targets: list[tuple[Any, ...]]
    wants_loss: bool

    @classmethod
    def of(
        cls,
        stage: Stage,
        micro_batches: int,
        inputs: Sequence[Any] | None,
        targets: Sequence[Any] | None,
        *,
        any_number: bool = False,
        targets_too: bool = True,
    ) -> Given:
        """Check what a program has given. Not collective.

        Args:
            stage: of this rank.
            micro_batches: of a step.
            inputs: as of ``Pipeline.step``.
            targets: as of ``Pipeline.step``.
            any_number: whether there may be more or fewer micro-batches than in a step.
            targets_too: whether the last stage needs targets, and computes a loss.

        Raises:
            ConfigError: the stage lacks what it needs, or there are too many or too few; a target needs a gradient.
        """
        needs = {
            "inputs": stage.is_first(0),
            "targets": targets_too and stage.is_last(len(stage.chunks) - 1),
        }
        given = {"inputs": inputs, "targets": targets}
        lengths = {name: len(value) for name, value in given.items() if value is not None}
        number = next(iter(lengths.values()), micro_batches) if any_number else micro_batches
        for name, needed in needs.items():
            if needed and given[name] is None:
                raise ConfigError(
                    f"stage {stage.group.rank} of {stage.group.size} needs the {name} of the micro-batches, got None; "
                    "only stages that are not the first need no inputs, and those that are not the last no targets"
                )
        if not number or any(length != number for length in lengths.values()):
            found = ", ".join(f"{length} {name}" for name, length in lengths.items()) or "none"
            expected = "equally many, at least 1" if any_number else f"{number} of each"
            raise ConfigError(
                f"stage {stage.group.rank} of {stage.group.size}: got {found}, expected {expected}: one for each "
                "micro-batch"
            )
        if needs["targets"] and torch.is_grad_enabled():
            _check_without_gradients(targets or ())
        return cls(
            number,
            [_as_tuple(each) for each in inputs] if inputs is not None and needs["inputs"] else [],
            [_as_tuple(each) for each in targets]
            if targets is not None and needs["targets"]
            else [()] * number,
            targets_too,
        )


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _check_without_gradients(targets: Sequence[Any]) -> None:
    """The gradient of a target would be of a sum over micro-batches, and carry a loss scale."""
    for number, target in enumerate(targets):
        if any(isinstance(each, Tensor) and each.requires_grad for each in _as_tuple(target)):
            raise ConfigError(
                f"pipeline: the targets of micro-batch {number} need a gradient, expected none; detach them, or make "
                "what is trained of them a parameter of the model"
            )
