"""Killed at every milestone of a save, and at any time: the last committed checkpoint is there and sound."""

from __future__ import annotations

import pytest

from tests.checkpoint.soak import MILESTONES, Options, soak


@pytest.mark.worth("no committed checkpoint is lost")
@pytest.mark.limit(400)
def test_jobs_killed_at_three_milestones_lose_nothing() -> None:
    milestones = ("wrote /state/master", "digested", "committed")
    said = soak(Options(kills=3, seed=3, at_milestones=1.0, milestones=milestones))
    assert "3 at milestones" in said


@pytest.mark.slow
@pytest.mark.limit(900)
def test_jobs_killed_at_every_milestone_lose_nothing() -> None:
    said = soak(Options(kills=len(MILESTONES), seed=3, at_milestones=1.0))
    assert f"{len(MILESTONES)} at milestones" in said


@pytest.mark.slow
@pytest.mark.limit(600)
def test_jobs_killed_at_any_time_while_they_save_in_the_background_lose_nothing() -> None:
    assert "2 jobs killed" in soak(Options(kills=2, seed=5, at_milestones=0.0, background=True))
