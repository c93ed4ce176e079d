"""Schedules: what each stage of a pipeline does in one step, and how long each stage stands still.

A schedule is a list of actions for each stage. ``simulate`` runs the lists against each other before anything is
computed, and says how long a step takes and how many forwards wait at a time. Nothing here needs torch or MPI.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from hpczero.errors import ConfigError, PlanError

# Actions: what each stage of a pipeline does in one step, in order.
#
# A stage is a rank of the pipeline. With ``chunks`` above 1 it has several runs of blocks: of ``p`` stages, chunk c of
# stage s is piece ``c * p + s`` of the model, and a micro-batch passes the pieces in this order.
#
#     1F1B, 3 stages, 4 micro-batches     stage 0   F0 F1 F2 B0 F3 B1 B2 B3
#                                         stage 1   F0 F1 B0 F2 B1 F3 B2 B3
#                                         stage 2   F0 B0 F1 B1 F2 B2 F3 B3
#
# Backwards come in the order of micro-batches in every schedule. Gradients are therefore added up in the same order,
# and all schedules give the same bits. The last action of a stage is a backward: before it some gradients are not
# complete.
#
# Source: Huang et al., GPipe, arXiv 1811.06965; Narayanan et al., Megatron-LM, arXiv 2104.04473, sec. 2.2.

Schedule = Literal["gpipe", "1f1b", "interleaved"]
SCHEDULES: tuple[str, ...] = get_args(Schedule)


class Action(NamedTuple):
    """One forward or backward of one chunk for one micro-batch.

    Attributes:
        kind: "F" or "B".
        micro_batch: from 0.
        chunk: of this stage's chunks, from 0.
    """

    kind: Literal["F", "B"]
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        what = "forward" if self.kind == "F" else "backward"
        return f"{what} of micro-batch {self.micro_batch} in chunk {self.chunk}"


def schedule_of(
    name: str, stages: int, micro_batches: int, *, chunks: int = 1
) -> tuple[tuple[Action, ...], ...]:
    """The actions of all stages.

    Args:
        name: "gpipe": all forwards first. "1f1b": at most ``stages`` forwards wait for their backward. "interleaved":
            the same with several chunks on each stage; "1f1b" means it too where ``chunks`` is above 1.
        stages: ranks of the pipeline.
        micro_batches: of one step.
        chunks: runs of blocks on each stage.

    Raises:
        ConfigError: an unknown name, a number below 1, or numbers that the schedule cannot run.
    """
    if name not in SCHEDULES:
        raise ConfigError(
            f"pipeline schedule: got {name!r}, expected one of {', '.join(SCHEDULES)}"
        )
    numbers = {"stages": stages, "micro_batches": micro_batches, "chunks": chunks}
    for what, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ConfigError(f"pipeline: got {what} {number!r}, expected a number of at least 1")
    if chunks == 1 and name == "interleaved":
        raise ConfigError(
            "pipeline schedule: interleaved needs several chunks of blocks on each stage, got 1; cut the model with "
            "interleave=2 or more, or take schedule='1f1b'"
        )
    if chunks > 1 and name != "gpipe" and micro_batches % stages:
        raise ConfigError(
            f"pipeline schedule: interleaved runs micro-batches in groups of as many as there are stages, got "
            f"{micro_batches} micro-batches for {stages} stages, expected a multiple; change the number of "
            "micro-batches, cut without interleave, or take schedule='gpipe'"
        )
    forwards = forwards_of(stages, micro_batches, chunks=chunks)
    if name == "gpipe":
        in_order = (
            Action("B", i, c) for c in reversed(range(chunks)) for i in range(micro_batches)
        )
        return ((*forwards, *in_order),) * stages
    backwards = [Action("B", a.micro_batch, chunks - 1 - a.chunk) for a in forwards]
    if chunks == 1:
        ahead = [stages - stage - 1 for stage in range(stages)]
    else:
        # A backward has twice the way of a forward until the two meet; then every chunk but one runs ahead.
        ahead = [2 * (stages - stage - 1) + (chunks - 1) * stages for stage in range(stages)]
    return tuple(_alternating(forwards, backwards, ahead=number) for number in ahead)


def forwards_of(stages: int, micro_batches: int, *, chunks: int = 1) -> tuple[Action, ...]:
    """The actions of each stage where nothing is trained; equal on all stages.

    Micro-batches pass in groups of as many as there are stages, so that a stage waits for the last piece of a group as
    little as can be. The last group may be smaller.
    """
    return tuple(
        Action("F", micro_batch, chunk)
        for begin in range(0, micro_batches, stages)
        for chunk in range(chunks)
        for micro_batch in range(begin, min(begin + stages, micro_batches))
    )


def _alternating(
    forwards: Sequence[Action], backwards: Sequence[Action], *, ahead: int
) -> tuple[Action, ...]:
    """``ahead`` forwards, then one forward and one backward in turn, then the backwards that are left."""
    later, waiting = forwards[ahead:], backwards[max(len(forwards) - ahead, 0) :]
    turns = [action for pair in zip(later, backwards, strict=False) for action in pair]
    return (*forwards[:ahead], *turns, *waiting)


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
    def bubble(self) -> float:
        """Idle time of the busiest stage, relative to its work.

        With equal costs (p - 1) / m for GPipe and 1F1B, (p - 1) / (v m) for interleaved, with v chunks.

        Source: Narayanan et al., Megatron-LM, arXiv 2104.04473, sec. 2.2.
        """
        busiest = max(self.busy)
        return (self.seconds - busiest) / busiest if busiest else 0.0


def simulate(
    lists: Sequence[Sequence[Action]], *, chunks: int = 1, costs: Costs | None = None
) -> Simulation:
    """Run the lists.

    Args:
        lists: the actions of every stage.
        chunks: runs of blocks on each stage.
        costs: None: a backward takes twice as long as a forward, messages nothing.

    Raises:
        PlanError: stages wait for each other; names them and their actions.
    """
    costs = costs or Costs()
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
            where = [
                f"before the {actions[at]}" if at < len(actions) else "at its end"
                for actions, at in zip(lists, place, strict=True)
            ]
            found = "; ".join(f"stage {stage} {text}" for stage, text in enumerate(where))
            raise PlanError(f"pipeline: the stages wait for each other: {found}")
    return Simulation(max(clock), tuple(busy), tuple(most))


def _needs(action: Action, piece: int, last: int) -> list[Key]:
    """What must have been done before an action, on this stage or another one."""
    i = action.micro_batch
    if action.kind == "F":
        return [("F", piece - 1, i)] if piece else []
    return [("F", piece, i), *([("B", piece + 1, i)] if piece < last else [])]
