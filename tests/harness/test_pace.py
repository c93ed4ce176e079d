"""Limits of tests stretch with the pace of the machine, and only so far."""

from __future__ import annotations

import sys

import pytest

from tests.helpers import mpirun
from tests.helpers.mpirun import run_command
from tests.helpers.pace import REFERENCE_S, SLOWEST, Limit, pace

SLEEPS = [sys.executable, "-c", "import time; time.sleep(2)"]


@pytest.mark.parametrize(("took_s", "found"), [(0.2, 1.0), (1.0, 1.0), (2.5, 2.5), (99.0, SLOWEST)])
def test_pace_is_how_many_times_as_long_a_piece_of_work_takes(took_s: float, found: float) -> None:
    times = iter((100.0, 100.0 + took_s * REFERENCE_S))
    assert pace(lambda: next(times)) == pytest.approx(found)


def test_a_limit_is_stretched_once_for_each_pace_that_is_found() -> None:
    limit = Limit(10.0)
    assert limit.more_s(1.05) == 0.0, "a twentieth is no reason to look again"
    assert limit.more_s(3.0) == pytest.approx(20.0)
    assert limit.more_s(3.0) == 0.0, "it has had them"
    assert limit.more_s(4.0) == pytest.approx(10.0)


@pytest.mark.tool
def test_a_job_on_a_slow_machine_gets_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpirun, "pace", lambda: 1.0)
    with pytest.raises(pytest.fail.Exception, match="not done within 1 s"):
        run_command(SLEEPS, 1)
    monkeypatch.setattr(mpirun, "pace", lambda: SLOWEST)
    assert run_command(SLEEPS, 1).returncode == 0
