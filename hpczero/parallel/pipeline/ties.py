"""Ties: weights that the first and the last stage both hold, such as an embedding that is also the head.

Owns: the sum of their gradients over the two stages, and the check that their values are equal. Must not know:
schedules, messages of activations, how gradients are reduced over data parallel ranks.

Each stage reduces its own gradient over its data parallel ranks first. The weight is a unit of its own on both stages,
so its shards are the same elements on both, and each rank adds its twin's shard to its own: first stage + last stage,
in this order, so that both get the same bits. Source: the sum that Megatron-LM makes over its embedding group, arXiv
2104.04473; on shards it is 1 / (data parallel ranks) of the bytes (issue 19).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hpczero.comm.stage_messages import StageMessages
from hpczero.errors import PlanError, StepError
from hpczero.kernels.norm import digest_of_bits
from hpczero.plan.placement import ModelPart
from hpczero.zero.sharding import Sharding
from hpczero.zero.units.unit import Unit


class Ties:
    """Of one stage's sharded model."""

    def __init__(self, state: Sharding, part: ModelPart, stages: int) -> None:
        """Not collective.

        Args:
            state: of the model.
            part: what of the whole model it is.
            stages: of the pipeline.

        Raises:
            PlanError: a tied weight shares its unit with other parameters.
        """
        self._state = state
        self._first = part.first
        self._peer = stages - 1 if part.first else 0
        local = {name for name, placement in part.placements.items() if placement.tied}
        found = [unit for unit in state.units if local & {s.name for s in unit.spec.layout.slots}]
        for unit in found:
            if len(unit.spec.layout.slots) > 1:
                others = [s.name for s in unit.spec.layout.slots if s.name not in local]
                raise PlanError(
                    f"unit {unit.spec.name!r} has a weight that the first and the last stage both hold, and "
                    f"{others[:3]} beside it, so its shards differ on the two stages; pass zeroify no rule, or one "
                    "that makes the weight's module a unit of its own, as hpczero.plan.rules.default_rule does"
                )
        names = {unit: part.placements[unit.spec.layout.slots[0].name].name for unit in found}
        self._names = names
        self._units: Sequence[Unit] = sorted(found, key=lambda unit: names[unit])

    def leave_to_first(self) -> None:
        """Of gradients that are there, which both stages have, the sum is to have one: the first's. Not collective."""
        for unit in () if self._first else self._units:
            if unit.spec.trainable:
                unit.gradients.drop(set_to_none=False)

    def add_gradients(self, messages: StageMessages) -> None:
        """Make the gradients on both stages the sum of the two. The first and the last stage call it together.

        Raises:
            StepError: the weight has other values on the other stage, or is trained on one stage alone.
        """
        for unit in self._units:
            name = self._names[unit]
            self._compare(unit, messages, name)
            if not unit.spec.trainable:
                continue
            gradients = unit.gradients
            assert gradients.present, "the last backward has reduced every unit"
            with gradients.rest.at_hand(changes=True):
                mine = gradients.reduced
                theirs = messages.swap(mine, self._peer, name=name)
                first, last = (mine, theirs) if self._first else (theirs, mine)
                torch.add(first, last, out=mine)
        if self._units:
            self._state.step.norms.forget()

    def _compare(self, unit: Unit, messages: StageMessages, name: str) -> None:
        """Same elements, same values; a gradient on either stage is one on both."""
        words = self._words(unit)
        theirs = messages.swap(words, self._peer, name=name).tolist()
        mine = words.tolist()
        if mine[:3] != theirs[:3]:
            raise StepError(
                f"rank {self._state.topology.rank}: of {name!r}, which the first and the last stage both hold, this "
                f"rank has shard {mine[0]} of {mine[1]} elements (trained: {bool(mine[2])}), and its twin shard "
                f"{theirs[0]} of {theirs[1]} (trained: {bool(theirs[2])}), expected the same; give both stages equally "
                "many ranks on each node, and freeze the weight on both or on none"
            )
        if mine[3] != theirs[3]:
            raise StepError(
                f"rank {self._state.topology.rank}: {name!r} has other values on the first stage than on the last one, "
                "which both hold it; train both with equal options, change it on both alike, and let initialize draw "
                "by the name in the whole model"
            )
        if unit.spec.trainable and theirs[4]:
            unit.gradients.usage.now[0] = True

    def _words(self, unit: Unit) -> Tensor:
        """(5,) int64: shard, its elements, trained, a digest of its values, whether this rank used it."""
        index, used, digest = self._state.collectives.group.index, False, 0
        if unit.spec.trainable:
            used = bool(unit.gradients.usage.now[0])
            # Of a unit that rests elsewhere too: its twin may rest in memory. Not while a delayed update changes both.
            if not any(stepper.pending for stepper in self._state.step.steppers):
                with unit.owned_values() as values:
                    digest = int(digest_of_bits(values.detach()))
        words = [index, unit.owned_numel, int(unit.spec.trainable), digest, int(used)]
        return torch.tensor(words, dtype=torch.int64, device=self._state.collectives.device)
