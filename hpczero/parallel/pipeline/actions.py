"""Actions: what each stage of a pipeline does in one step, in order.

Owns: the schedules GPipe, 1F1B and interleaved 1F1B as lists. Must not know: torch, MPI, models, how an action is done.

A stage is a rank of the pipeline. With ``chunks`` above 1 it has several runs of blocks: of ``p`` stages, chunk c of
stage s is piece ``c * p + s`` of the model, and a micro-batch passes the pieces in this order.

    1F1B, 3 stages, 4 micro-batches     stage 0   F0 F1 F2 B0 F3 B1 B2 B3*
    * reduces                           stage 1   F0 F1 B0 F2 B1 F3 B2 B3*
                                        stage 2   F0 B0 F1 B1 F2 B2 F3 B3*

Backwards come in the order of micro-batches in every schedule. Gradients are therefore added up in the same order, and
all schedules give the same bits. The last backward of a stage reduces the gradients of all its chunks. Before it some
gradients are not complete; units that are complete when it begins are reduced while it computes.

Source: Huang et al., GPipe, arXiv 1811.06965; Narayanan et al., Megatron-LM, arXiv 2104.04473, sec. 2.2 (issue 19).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

from hpczero.errors import ConfigError

Schedule = Literal["gpipe", "1f1b", "interleaved"]
SCHEDULES: tuple[str, ...] = get_args(Schedule)


class Action(NamedTuple):
    """One forward or backward of one chunk for one micro-batch.

    Attributes:
        kind: "F" or "B".
        micro_batch: from 0.
        chunk: of this stage's chunks, from 0.
        reduces: whether gradients are complete after it. They are reduced then, or before, where this and the last ones
            have no graph, because what they would train is frozen.
    """

    kind: Literal["F", "B"]
    micro_batch: int
    chunk: int = 0
    reduces: bool = False

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
    if chunks > 1 and name != "gpipe":
        if micro_batches % stages:
            raise ConfigError(
                f"pipeline schedule: interleaved runs micro-batches in groups of as many as there are stages, got "
                f"{micro_batches} micro-batches for {stages} stages, expected a multiple; change the number of "
                "micro-batches, cut without interleave, or take schedule='gpipe'"
            )
        return tuple(_interleaved(stage, stages, micro_batches, chunks) for stage in range(stages))
    if name == "gpipe":
        one = _marked(
            [*_forwards(stages, micro_batches, chunks), *_all_backwards(micro_batches, chunks)]
        )
        return (one,) * stages
    return tuple(_one_forward_one_backward(stage, stages, micro_batches) for stage in range(stages))


def forwards_of(stages: int, micro_batches: int, *, chunks: int = 1) -> tuple[Action, ...]:
    """The actions of each stage where nothing is trained; equal on all stages.

    Micro-batches pass in groups of as many as there are stages, so that a stage waits for the last piece of a group as
    little as can be. The last group may be smaller.
    """
    return tuple(_forwards(stages, micro_batches, chunks))


def _forwards(stages: int, micro_batches: int, chunks: int) -> list[Action]:
    return [
        Action("F", micro_batch, chunk)
        for begin in range(0, micro_batches, stages)
        for chunk in range(chunks)
        for micro_batch in range(begin, min(begin + stages, micro_batches))
    ]


def _all_backwards(micro_batches: int, chunks: int) -> list[Action]:
    return [
        Action("B", i, chunk) for chunk in reversed(range(chunks)) for i in range(micro_batches)
    ]


def _one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> tuple[Action, ...]:
    forwards = [Action("F", i) for i in range(micro_batches)]
    backwards = [Action("B", i) for i in range(micro_batches)]
    return _alternating(forwards, backwards, ahead=stages - stage - 1)


def _interleaved(stage: int, stages: int, micro_batches: int, chunks: int) -> tuple[Action, ...]:
    forwards = _forwards(stages, micro_batches, chunks)
    backwards = [Action("B", a.micro_batch, chunks - 1 - a.chunk) for a in forwards]
    # A backward has twice the way of a forward until the two meet; then every chunk but one runs ahead.
    ahead = 2 * (stages - stage - 1) + (chunks - 1) * stages
    return _alternating(forwards, backwards, ahead=ahead)


def _alternating(
    forwards: Sequence[Action], backwards: Sequence[Action], *, ahead: int
) -> tuple[Action, ...]:
    """``ahead`` forwards, then one forward and one backward in turn, then the backwards that are left."""
    ahead = min(ahead, len(forwards))
    actions = list(forwards[:ahead])
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        actions += [forward, backward]
    return _marked([*actions, *backwards[len(forwards) - ahead :]])


def _marked(actions: list[Action]) -> tuple[Action, ...]:
    """The last one is a backward, and reduces."""
    return (*actions[:-1], actions[-1]._replace(reduces=True))
