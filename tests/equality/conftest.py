"""The comparison that most tests of this folder make."""

from __future__ import annotations

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
            f"stage {stage}": train_sharded(case, topology, stage=stage) for stage in case.stages
        }
        problems: list[str] = []
        if topology.is_root:
            expected = train_plain(case, topology.size)
            moved = [
                relative_error(expected[-1].state[name], value)
                for name, value in case.build().state_dict().items()
            ]
            assert max(moved) > 1e-3, "the reference learned nothing: this test would prove nothing"
            for name, found in runs.items():
                problems += [f"{name}, {problem}" for problem in differences(found, expected)]
            problems += first_step_apart(runs)
        parallel_assert(topology.world, not problems, "\n".join(problems[:12]))

    return check
