"""What a report says of studies that are not as they should be: mixed, short, with several bases or placements."""

from __future__ import annotations

import csv
import io
from typing import Any

import numpy as np
import pytest

from scaling.evidence.record import Row
from scaling.sweep.curves import curves
from scaling.sweep.plots import FIGURES
from scaling.sweep.report import as_csv, conditions, loss_parity, text
from tests.scaling.studies import PARTS, rows

CUDA: Row = {"device": "cuda", "device_name": "NVIDIA H200, 140 GiB"}


def titles(found: list[Row]) -> list[str]:
    return [str(make(found).get_suptitle()) for make in FIGURES.values()]


# --- mixtures


@pytest.mark.parametrize(
    ("changes", "name", "values"),
    [
        ({"cpu": "another CPU"}, "device", ("a CPU", "another CPU")),
        (CUDA, "device", ("a CPU", "NVIDIA H200, 140 GiB, beside a CPU")),
        ({"mpi": "MPICH 4"}, "MPI", ("an MPI", "MPICH 4")),
        ({"versions": {"torch": "3"}}, "torch", ("2", "3")),
        ({"setting": {"HPCZERO_OVERLAP": "0"}}, "HPCZERO_OVERLAP", ("0", "not set")),
        ({"setting": {"partition": "h100"}}, "partition", ("h100", "not set")),
    ],
)
def test_a_curve_of_several_machines_or_libraries_is_called_so(
    changes: Row, name: str, values: tuple[str, str]
) -> None:
    found = rows()
    found[-1] |= changes
    (curve,) = curves(found)
    assert curve.mixed == {name: sorted(values)}
    said = text(found)
    assert said.startswith("**Some curves mix machines or libraries, named with each: their points")
    assert f"- Mixed {name}: {' | '.join(sorted(values))}" in said
    for title in titles(found):
        assert f"MIX points of different {name}: NOT comparable" in title


def test_curves_that_each_have_one_machine_are_not_mixed_and_all_machines_are_named() -> None:
    found = rows(stages=(0, 3))
    for row in found[1:]:
        if row["point"]["stage"] == 0:
            row["cpu"] = "another CPU"
    assert [curve.mixed for curve in curves(found)] == [{}, {}]
    assert "mix" not in text(found)
    assert conditions(found)[0].startswith("- a CPU | another CPU, 8 cores")
    assert all("a CPU | another CPU" in title for title in titles(found))
    lines = list(csv.DictReader(io.StringIO(as_csv(found))))
    assert [line["computes_on"] for line in lines] == ["another CPU"] * 3 + ["a CPU"] * 3


def test_a_device_stands_in_the_text_in_titles_and_in_the_table_of_memory() -> None:
    found = rows(**CUDA, probe=[], device_peak_nbytes=[2**30])
    assert conditions(found)[0].startswith("- NVIDIA H200, 140 GiB, beside a CPU, 8 cores")
    assert all("NVIDIA H200, 140 GiB" in title for title in titles(found))
    (curve,) = curves(found)
    assert [m.predicted_ms for m in curve.points] == [None] * 3  # the host was not measured
    (memory,) = [line for line in text(found).splitlines() if "PSS over the start" in line]
    assert "peak on the device, MiB" in memory
    assert " 1,024.0 |" in text(found)
    assert "peak on the device" not in text(rows())


def test_figures_and_text_name_the_commits_of_their_rows() -> None:
    found = rows()
    found[0]["asked_at"] = "asked"
    found[-1]["commit"] = "abd"
    assert all("commit abc, abd" in title and "asked" not in title for title in titles(found))
    assert "to warm up; commit abc, abd." in text(found)
    assert "asked" not in text(found).replace("asked for", "")


# --- the base


def two_bases() -> list[Row]:
    """At stage 0 the model does not fit on one rank."""
    return [
        row
        for row in rows(stages=(0, 3))
        if row["kind"] == "run" or row["point"]["stage"] == 3 or row["point"]["ranks"] > 1
    ]


def test_each_curve_begins_on_the_ideal_line_of_its_own_base() -> None:
    figure = FIGURES["scaling"](two_bases())
    up = figure.axes[0]
    ideals = {
        str(line.get_label()): (np.asarray(line.get_xdata()), np.asarray(line.get_ydata()))
        for line in up.lines
        if str(line.get_label()).startswith("ideal")
    }
    assert set(ideals) == {"ideal, N0 = 1", "ideal, N0 = 2"}
    for base, name in ((1, "ideal, N0 = 1"), (2, "ideal, N0 = 2")):
        xs, ys = ideals[name]
        assert (xs[0], ys[0]) == (base, 1.0)
        assert ys.tolist() == (xs / base).tolist()
    assert up.get_ylabel() == "speed-up over the N0 ranks of each curve"
    labels = {str(text.get_text()) for text in figure.legends[0].get_texts()}
    assert "tiny, stage 0, global batch 8, N0 = 2" in labels
    assert "tiny, stage 3, global batch 8, N0 = 1" in labels


def test_tables_and_csv_name_the_base() -> None:
    said = text(two_bases())
    assert "efficiency over 2 ranks" in said
    assert "efficiency over 1 rank " in said
    lines = list(csv.DictReader(io.StringIO(as_csv(two_bases()))))
    assert [line["base_ranks"] for line in lines] == ["2", "2", "1", "1", "1"]


# --- few jobs, few steps


def cut(found: list[Row], steps: int) -> list[Row]:
    """Only the first ``steps`` of each job."""
    for row in found[1:]:
        row["samples_ms"] = {part: row["samples_ms"][part][:steps] for part in PARTS}
        row["point"]["steps"] = steps
    return found


def test_what_is_no_interval_is_called_a_range() -> None:
    said = text(rows())
    assert "100.5 [100.0, 101.0]" in said
    assert "range" not in said
    few = text(cut(rows(), 5))
    assert "100.0 (100.0 to 101.0)" in few
    assert "[100.0, 101.0]" not in few
    assert "(a to b) is no 95% interval but a range" in few
    for found, bars in ((rows(), "95 % intervals"), (cut(rows(), 5), "ranges")):
        title = FIGURES["scaling"](found).legends[0].get_title().get_text()
        assert title.startswith(f"bars: {bars}")


def test_three_jobs_show_how_far_they_are_apart_and_not_how_calm_each_is() -> None:
    found = rows()
    for job, factor in ((1, 1.2), (2, 1.4)):
        for row in rows()[1:]:
            samples = {
                part: [[ms * factor for ms in step] for step in row["samples_ms"][part]]
                for part in PARTS
            }
            found.append({**row, "samples_ms": samples, "point": {**row["point"], "job": job}})
    (curve,) = curves(found)
    base = curve.base.step
    assert base.median == pytest.approx(100.5 * 1.2)
    assert base.high - base.low > 30
    assert not base.is_interval
    ratio = curve.efficiency(curve.points[1])
    assert ratio.high / ratio.low > 1.5
    assert "is no 95% interval" in text(found)


def test_fewer_than_thirty_steps_are_told() -> None:
    assert "**3 of 3 jobs have only 10 steps; a study wants 30 or more.**" in text(rows())
    found = rows()
    for row in found[1:]:
        row["point"]["steps"] = 30
    assert "a study wants" not in text(found)


@pytest.mark.parametrize(("precision", "equal"), [("fp32", 5e-5), ("bf16", 0.003), ("fp16", 4e-4)])
def test_losses_are_compared_as_closely_as_the_precision_allows(
    precision: str, equal: float
) -> None:
    found = rows()
    for row in found[1:]:
        row["point"]["precision"] = precision
    found[-1]["losses"] = [loss + equal for loss in found[-1]["losses"]]
    assert "NOT equal" not in loss_parity(found)[0]
    found[-1]["losses"][0] += 2 * equal
    assert "NOT equal" in loss_parity(found)[0]


# --- predictions and placements


def test_the_prediction_is_of_the_transport_that_ran() -> None:
    def predicted(transport: str) -> list[float | None]:
        (curve,) = curves(rows(transport=transport))
        return [m.predicted_ms for m in curve.points[1:]]

    window, messages = predicted("shared memory on one node"), predicted("messages on one node")
    flat = predicted("flat, all-gather ring, exchange pairwise")
    for fast, slow, slowest in zip(window, messages, flat, strict=True):
        assert fast is not None
        assert slow is not None
        assert slowest is not None
        assert fast < slow
        assert fast < slowest
    assert predicted("peers' memory of devices on one node") == [None, None]


def test_curves_of_several_placements_are_named_by_them() -> None:
    found = rows(times={1: 100.0, 2: 60.0, 4: 40.0})
    found[0]["ranks_per_node"] = [2, 4]
    again: list[Row] = []
    for row in found[1:]:
        if row["point"]["ranks"] == 4:
            again.append({**row, "point": {**row["point"], "nodes": 2}})
    names: dict[str, list[Any]] = {
        curve.name: [(m.point.ranks, m.point.nodes) for m in curve.points]
        for curve in curves([*found, *again])
    }
    assert names == {
        "tiny, stage 3, global batch 8, 2 ranks per node": [(1, 1), (2, 1), (4, 2)],
        "tiny, stage 3, global batch 8, 4 ranks per node": [(1, 1), (2, 1), (4, 1)],
    }
