"""Simulation: the lists of all stages run against each other, before anything is computed.

Owns: what is wrong with a set of lists, and how long each stage stands still. Must not know: torch, MPI, models, by
which schedule lists were made.

Found are: an action that comes twice or never, a backward before its forward, messages of one boundary that are sent in
another order than they are taken, a reduction before the last backward, and lists in which stages wait for each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hpczero.errors import PlanError
from hpczero.parallel.pipeline.actions import Action

Key = tuple[str, int, int]  # kind, piece of the model, micro-batch


@dataclass(frozen=True)
class Costs:
    """How long actions take, in any unit.

    Attributes:
        forward: of each piece of the model, or of every one.
        backward: the same.
        message: from one piece to the next.
    """

    forward: float | Sequence[float] = 1.0
    backward: float | Sequence[float] = 2.0
    message: float = 0.0

    def of(self, kind: str, piece: int) -> float:
        """Of one action."""
        given = self.forward if kind == "F" else self.backward
        return float(given if isinstance(given, (int, float)) else given[piece])


@dataclass(frozen=True)
class Simulation:
    """What the lists come to; times in the unit of the costs.

    Attributes:
        seconds: from the first action to the end of the last.
        busy: (stages,) time in actions.
        alive: (stages,) most forwards that wait for their backward at a time.
    """

    seconds: float
    busy: tuple[float, ...]
    alive: tuple[int, ...]

    @property
    def idle(self) -> tuple[float, ...]:
        """(stages,) time that each stage stands still."""
        return tuple(self.seconds - busy for busy in self.busy)

    @property
    def bubble(self) -> float:
        """Idle time of the busiest stage, relative to its work.

        With equal costs (p - 1) / m for GPipe and 1F1B, (p - 1) / (v m) for interleaved, with v chunks.

        Source: Narayanan et al., Megatron-LM, arXiv 2104.04473, sec. 2.2.
        """
        busiest = max(self.busy)
        return (self.seconds - busiest) / busiest if busiest else 0.0


def simulate(
    lists: Sequence[Sequence[Action]],
    micro_batches: int,
    *,
    chunks: int = 1,
    costs: Costs | None = None,
    trains: bool = True,
) -> Simulation:
    """Run the lists.

    Args:
        lists: the actions of every stage.
        micro_batches: of one step.
        chunks: runs of blocks on each stage.
        costs: None: a backward takes twice as long as a forward, messages nothing.
        trains: whether there are backwards.

    Raises:
        PlanError: the lists cannot run, or would not give the gradients of the step; names stages and actions.
    """
    costs = costs or Costs()
    _check_complete(lists, micro_batches, chunks, trains=trains)
    _check_order_of_messages(lists)
    stages, last = len(lists), len(lists) * chunks - 1
    done: dict[Key, float] = {}
    place, clock, busy = [0] * stages, [0.0] * stages, [0.0] * stages
    alive, most = [0] * stages, [0] * stages
    while any(place[stage] < len(actions) for stage, actions in enumerate(lists)):
        before = sum(place)
        for stage, actions in enumerate(lists):
            while place[stage] < len(actions):
                action = actions[place[stage]]
                piece = action.chunk * stages + stage
                needs = _needs(action, piece, last)
                if not all(key in done for key in needs):
                    break
                ready = [done[k] + (costs.message if k[1] != piece else 0.0) for k in needs]
                cost = costs.of(action.kind, piece)
                clock[stage] = max([clock[stage], *ready]) + cost
                busy[stage] += cost
                alive[stage] += 1 if action.kind == "F" else -1
                most[stage] = max(most[stage], alive[stage])
                done[action.kind, piece, action.micro_batch] = clock[stage]
                place[stage] += 1
        if sum(place) == before:
            raise PlanError(f"pipeline: the stages wait for each other: {_stand(lists, place)}")
    return Simulation(max(clock), tuple(busy), tuple(most))


def _needs(action: Action, piece: int, last: int) -> list[Key]:
    """What must have been done before an action, on this stage or another one."""
    i = action.micro_batch
    if action.kind == "F":
        return [("F", piece - 1, i)] if piece else []
    return [("F", piece, i), *([("B", piece + 1, i)] if piece < last else [])]


def _stand(lists: Sequence[Sequence[Action]], place: Sequence[int]) -> str:
    """At which action each stage stands, in words."""
    found = [
        f"stage {stage} before the {actions[at]}"
        if at < len(actions)
        else f"stage {stage} at its end"
        for stage, (actions, at) in enumerate(zip(lists, place, strict=True))
    ]
    return "; ".join(found)


def _check_complete(
    lists: Sequence[Sequence[Action]], micro_batches: int, chunks: int, *, trains: bool
) -> None:
    kinds: tuple[Literal["F", "B"], ...] = ("F", "B") if trains else ("F",)
    every = range(micro_batches)
    expected = {Action(k, i, c) for k in kinds for c in range(chunks) for i in every}
    for stage, actions in enumerate(lists):
        seen = Counter(action._replace(reduces=False) for action in actions)
        for action in sorted(expected | seen.keys()):
            times, right = seen[action], int(action in expected)
            if times != right:
                raise PlanError(
                    f"pipeline stage {stage}: the {action} comes {times} times, expected {right}"
                )
        _check_reductions(stage, actions)


def _check_reductions(stage: int, actions: Sequence[Action]) -> None:
    """Gradients are reduced once, when all have come."""
    for place, action in enumerate(actions):
        last = place == len(actions) - 1 and action.kind == "B"
        if action.reduces != last:
            found = "reduces" if action.reduces else "does not reduce"
            raise PlanError(
                f"pipeline stage {stage}: the {action}, action {place + 1} of {len(actions)}, {found} gradients; "
                "expected of the last action, a backward, and of no other"
            )


def _check_order_of_messages(lists: Sequence[Sequence[Action]]) -> None:
    """The first message of a boundary says what the others are like, so it must be the first on both sides."""
    stages = len(lists)
    order: dict[tuple[str, int], list[int]] = {}
    for stage, actions in enumerate(lists):
        for action in actions:
            key = (action.kind, action.chunk * stages + stage)
            order.setdefault(key, []).append(action.micro_batch)
    for (kind, piece), sent in order.items():
        to = piece + 1 if kind == "F" else piece - 1
        taken = order.get((kind, to), sent)
        if taken != sent:
            raise PlanError(
                f"pipeline: stage {piece % stages} sends micro-batches {sent} of piece {piece} in this order, and "
                f"stage {to % stages} takes them as {taken}, {'forward' if kind == 'F' else 'backward'}; expected one "
                "order"
            )
