"""The comparison that most tests of this folder make."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from tests.equality.cases import Case
from tests.equality.reference import (
    differences,
    first_step_apart,
    relative_error,
    train_plain,
    train_sharded,
)
from tests.helpers.parallel import parallel_assert

if TYPE_CHECKING:
    from hpczero import Topology


@pytest.fixture
def equals_one_process(topology: Topology) -> Callable[[Case], None]:
    """Train a case at every stage and compare with one process; the stages among themselves bit for bit.

    Rank 0 alone trains the reference and judges; the other ranks wait for its verdict.
    """

    def check(case: Case) -> None:
        runs = {
            f"stage {stage}, {transport}": train_sharded(
                case, topology, stage=stage, transport=transport
            )
            for stage in case.stages
            for transport in (case.transports if stage == 3 else ("auto",))
        }
        problems: list[str] = []
        if topology.is_root:
            expected = train_plain(case, topology.size)
            start, end = case.build().state_dict(), expected[-1].state or {}
            moved = max(relative_error(end[name], value) for name, value in start.items())
            assert moved > 1e-3, "the reference learned nothing: this test would prove nothing"
            clipped = [record.grad_norm > case.max_norm for record in expected]
            assert not any(clipped) or not all(clipped), "clip some steps, not all"
            assert math.isinf(case.max_norm) or any(clipped), "nothing to clip"
            for name, found in runs.items():
                problems += [f"{name}, {problem}" for problem in differences(found, expected)]
            problems += first_step_apart(runs)
        parallel_assert(topology.world.comm, not problems, "\n".join(problems[:12]))

    return check
