"""Published runs against the range of the model, and that range against the runs that it is from."""

from __future__ import annotations

import pytest

from hpczero.models.config import parameter_count
from hpczero.predict.machine import load_machine
from scaling.predict.published import PUBLISHED, compare, ranges

LEAST = 0.9  # of the runs: within their range


def test_nine_of_ten_published_runs_are_within_their_range_and_likely_is_near() -> None:
    found = [(run, values) for run, *values in compare() if run.comparable]
    assert len(found) >= 25
    within = [low <= run.value <= high for run, (low, _, high) in found]
    assert sum(within) >= LEAST * len(found), [
        run.name for (run, _), good in zip(found, within, strict=True) if not good
    ]
    assert all(low < likely < high for _, (low, likely, high) in found)
    ratios = sorted(likely / run.value for run, (_, likely, _) in found)
    assert ratios[0] > 0.75
    assert ratios[-1] < 1.35
    assert ratios[len(ratios) // 2] == pytest.approx(1.0, abs=0.07)


def test_machines_say_what_other_runs_on_one_node_imply() -> None:
    for name, (least, median, most) in ranges().items():
        machine = load_machine(name)
        stated = *machine.bounds["matmul_efficiency"], machine.matmul_efficiency
        assert stated == pytest.approx((least, most, median), abs=2e-3), name


@pytest.mark.parametrize(
    ("name", "billions"),
    [("1,008 B", 1008), ("530 B", 530), ("70 B", 70.6), ("405 B", 405.9), ("100 B", 100)],
)
def test_models_have_as_many_parameters_as_was_published(name: str, billions: float) -> None:
    runs = [run for run in PUBLISHED if f" {name}," in run.name]
    for run in runs:
        assert parameter_count(run.spread.model) / 1e9 == pytest.approx(billions, rel=0.02)
    assert runs


def test_what_interleaving_brings_is_what_was_published() -> None:
    plain, more = (run for run in PUBLISHED if not run.comparable)
    predicted = more.of(more.predicted().likely) / plain.of(plain.predicted().likely)
    assert predicted == pytest.approx(more.value / plain.value, rel=0.03)  # 1.28
