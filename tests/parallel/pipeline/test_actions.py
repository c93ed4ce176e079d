"""Schedules do every forward and backward once, in an order that runs, with the bubble of the published formulas."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from hpczero.errors import ConfigError, PlanError
from hpczero.parallel.pipeline.simulate import Action, Costs, forwards_of, schedule_of, simulate

SIZES = [(p, m) for p in range(1, 7) for m in (1, 2, 3, 5, 8, 12)]


def words(actions: tuple[Action, ...]) -> str:
    """F and B with micro-batch, chunk as letter where there are several."""
    return " ".join(f"{a.kind}{a.micro_batch}{'abc'[a.chunk] if a.chunk else ''}" for a in actions)


def test_one_forward_one_backward_is_the_one_of_the_paper() -> None:
    assert [words(actions) for actions in schedule_of("1f1b", 3, 4)] == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_interleaved_is_the_one_of_the_paper() -> None:
    """Two stages of two chunks, four micro-batches; b is the second chunk."""
    assert [words(actions) for actions in schedule_of("interleaved", 2, 4, chunks=2)] == [
        "F0 F1 F0b F1b F2 B0b F3 B1b F2b B0 F3b B1 B2b B3b B2 B3",
        "F0 F1 F0b B0b F1b B1b F2 B0 F3 B1 F2b B2b F3b B3b B2 B3",
    ]


BUBBLES = [(name, p, m, 1) for name in ("gpipe", "1f1b") for p, m in SIZES]
BUBBLES += [
    ("interleaved", p, rounds * p, chunks)
    for p, rounds, chunks in itertools.product((2, 3, 4), (1, 2, 4), (2, 3))
]


@pytest.mark.parametrize(("name", "stages", "micro_batches", "chunks"), BUBBLES)
def test_bubble_is_that_of_the_formula_which_chunks_divide(
    name: str, stages: int, micro_batches: int, chunks: int
) -> None:
    found = simulate(schedule_of(name, stages, micro_batches, chunks=chunks), chunks=chunks)
    assert found.bubble == pytest.approx((stages - 1) / (chunks * micro_batches), rel=1e-12)
    assert chunks > 1 or found.busy == (found.busy[0],) * stages


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_forwards_that_wait_are_as_many_as_stages_follow(stages: int, micro_batches: int) -> None:
    alive = simulate(schedule_of("1f1b", stages, micro_batches)).alive
    assert alive == tuple(min(stages - stage, micro_batches) for stage in range(stages))
    alive = simulate(schedule_of("gpipe", stages, micro_batches)).alive
    assert alive == (micro_batches,) * stages


def check(lists: Sequence[tuple[Action, ...]], micro_batches: int, chunks: int, kinds: str) -> None:
    """Every action comes once, messages of a boundary are taken in the order in which they are sent, and all run."""
    expected = {Action(k, i, c) for k in kinds for c in range(chunks) for i in range(micro_batches)}  # type: ignore[arg-type]
    order: dict[tuple[str, int], list[int]] = {}
    for stage, actions in enumerate(lists):
        assert len(actions) == len(expected)
        assert set(actions) == expected
        assert actions[-1].kind == kinds[-1]  # gradients are reduced then
        for action in actions:
            piece = action.chunk * len(lists) + stage
            order.setdefault((action.kind, piece), []).append(action.micro_batch)
    for kind in kinds:
        assert len({tuple(taken) for (k, _), taken in order.items() if k == kind}) == 1
    simulate(lists, chunks=chunks)


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_schedules_are_complete_and_run(stages: int, micro_batches: int, chunks: int) -> None:
    forwards = (forwards_of(stages, micro_batches, chunks=chunks),) * stages
    check(forwards, micro_batches, chunks, "F")
    gpipe = schedule_of("gpipe", stages, micro_batches, chunks=chunks)
    check(gpipe, micro_batches, chunks, "FB")
    if chunks == 1 or micro_batches % stages == 0:
        check(
            schedule_of("1f1b", stages, micro_batches, chunks=chunks), micro_batches, chunks, "FB"
        )


def test_bubble_follows_uneven_costs() -> None:
    """By hand: the second stage is the slower one, and waits once for a forward and never again."""
    costs = Costs(forward=[1.0, 2.0], backward=[1.0, 3.0], message=0.5)
    found = simulate(schedule_of("1f1b", 2, 2), costs=costs)
    assert found.busy == (4.0, 10.0)
    assert found.seconds == 1.0 + 0.5 + 10.0 + 0.5 + 1.0
    assert found.bubble == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("zigzag", 2, 2), "'zigzag', expected one of gpipe, 1f1b, interleaved"),
        (("1f1b", 2, 0), "micro_batches 0"),
        (("1f1b", 0, 2), "stages 0"),
        (("gpipe", 2, 1.5), "micro_batches 1.5"),
        (("interleaved", 2, 2), "several chunks"),
    ],
)
def test_what_no_schedule_can_run_is_refused(arguments: tuple, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        schedule_of(*arguments)


@pytest.mark.parametrize("name", ["1f1b", "interleaved"])
def test_interleaved_needs_whole_groups(name: str) -> None:
    with pytest.raises(ConfigError, match="got 5 micro-batches for 3 stages, expected a multiple"):
        schedule_of(name, 3, 5, chunks=2)


def test_stages_that_wait_for_each_other_are_named() -> None:
    """The first stage wants a gradient before it has sent what the second one begins with."""
    lists = [
        [Action("F", 0), Action("B", 0), Action("F", 1), Action("B", 1)],
        [Action("F", 0), Action("F", 1), Action("B", 0), Action("B", 1)],
    ]
    with pytest.raises(
        PlanError,
        match=r"stage 0 before the backward of micro-batch 0.*stage 1 before the forward of m",
    ):
        simulate(lists)
