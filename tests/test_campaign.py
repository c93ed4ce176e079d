"""Jobs that are killed, go back, come twice and are requeued: a short campaign; ``tests.campaign`` does long ones."""

from __future__ import annotations

import pytest

from tests.campaign import Options, run


@pytest.mark.slow
@pytest.mark.limit(900)
def test_runs_that_are_killed_go_back_and_are_started_twice_lose_nothing() -> None:
    assert "0 lost" in run(Options(kills=4, seed=7))
