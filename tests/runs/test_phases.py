"""What is told of long work: in lines that are due, with figures that add up."""

from __future__ import annotations

import pytest

from hpczero.job.long_work import Moment
from hpczero.run.results.progress import PhaseProgress, clock, figures


def test_figures_are_done_total_rate_and_time_left() -> None:
    assert figures(Moment("hash", 50_000_000, 200_000_000, 25.0)) == (
        "50.0 of 200.0 MB  2.0 MB/s  left 0:01:15"
    )
    assert figures(Moment("hash", 0, 3_000_000, 1.0)) == "0.0 of 3.0 MB"
    assert figures(Moment("learn", 0, None, 61.5)) == "for 0:01:01"
    assert clock(3723.9) == "1:02:03"


def test_lines_that_are_due_tell_of_a_phase_and_one_tells_that_it_has_ended() -> None:
    said: list[str] = []
    with PhaseProgress("lines", said.append, every_s=0.0) as lines:
        lines.show(Moment())
        lines.show(Moment("hash", 10**6, 3 * 10**6, 1.0))
        lines.show(Moment("hash", 3 * 10**6, 3 * 10**6, 3.0))
        lines.show(Moment("learn", 0, None, 2.0))
    assert said == [
        "hash: 1.0 of 3.0 MB  1.0 MB/s  left 0:00:02",
        "hash: 3.0 of 3.0 MB  1.0 MB/s  left 0:00:00",
        "hash: took 0:00:03",
        "learn: for 0:00:02",
    ]


def test_short_work_is_not_told_of() -> None:
    said: list[str] = []
    with PhaseProgress("lines", said.append) as lines:
        lines.show(Moment("hash", 10**6, 3 * 10**6, 1.0))
        lines.show(Moment("learn", 0, None, 2.0))
    assert not said


def test_a_log_gets_lines_and_a_terminal_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    assert not PhaseProgress("auto", lambda line: None).is_bar
    with PhaseProgress("bar", lambda line: None) as bar:
        bar.show(Moment())
        bar.show(Moment("tokenize", 5 * 10**6, 10 * 10**6, 5.0))
    assert "5.0 of 10.0 MB  1.0 MB/s  left 0:00:05" in capsys.readouterr().out
    with PhaseProgress("bar", lambda line: None, to_stderr=True) as bar:
        bar.show(Moment("learn", 0, None, 5.0))
    assert "for 0:00:05" in capsys.readouterr().err
