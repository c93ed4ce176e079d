"""Published runs in layouts with tensor and pipeline parallelism, beside the model of a step."""

from __future__ import annotations

import sys

import pytest

from hpczero.models.config import parameter_count
from scaling.predict.published import PUBLISHED, compare
from tests.helpers.mpirun import run_command

FOUND = {run.name: value / run.value for run, value in compare()}


@pytest.mark.parametrize(
    ("name", "billions"),
    [("1 T", 1008), ("530 B", 530), ("70 B", 70), ("405 B", 405), ("100 B", 100)],
)
def test_models_have_as_many_parameters_as_was_published(name: str, billions: int) -> None:
    runs = [run for run in PUBLISHED if f" {name}," in run.name]
    assert len(runs) == 1
    assert parameter_count(runs[0].spread.model) / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize("run", PUBLISHED, ids=lambda run: run.name)
def test_nothing_is_off_by_more_than_a_third_without_a_fitted_constant(run: object) -> None:
    assert 0.7 < FOUND[run.name] < 1.3  # type: ignore[attr-defined]


def test_what_interleaving_brings_is_what_was_published() -> None:
    plain, more = (run for run in PUBLISHED if run.source.startswith("arXiv 2410.06511"))
    predicted = more.of(more.predicted()) / plain.of(plain.predicted())
    assert predicted == pytest.approx(more.value / plain.value, rel=0.03)  # 1.28


@pytest.mark.tool
def test_table_says_for_each_run_where_it_is_from() -> None:
    done = run_command([sys.executable, "-m", "scaling.predict", "--published"], 60)
    assert done.returncode == 0, done
    for run in PUBLISHED:
        assert f"| {run.name} |" in done.stdout
        assert f"- {run.name}: {run.source}" in done.stdout
    assert "nothing fitted" in done.stdout
