"""Jobs that are killed, go back, come twice and are requeued: a short campaign; ``tests.campaign`` does long ones."""

from __future__ import annotations

import pytest

from tests.campaign import KILLED_BEFORE_A_CHANGE, Options, run


@pytest.mark.slow
@pytest.mark.limit(900)
def test_runs_that_are_killed_go_back_and_are_started_twice_lose_nothing() -> None:
    report = run(Options(kills=4, seed=7))
    assert report.kills >= 4
    # What was done, and that there was something to lose.
    assert report.counts[KILLED_BEFORE_A_CHANGE] > 0, report
    assert report.counts["checkpoints looked for afterwards"] > 0, report
