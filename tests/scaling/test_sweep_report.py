"""The arithmetic of a scaling study on rows made by hand, its tables, its figures and the page."""

from __future__ import annotations

import base64
import csv
import io
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from statistics import median
from xml.etree import ElementTree

import numpy as np
import pytest

from scaling.evidence.harness import Report
from scaling.evidence.record import Row
from scaling.report import Section, page, read
from scaling.sweep.curves import curves
from scaling.sweep.plots import FIGURES, draw
from scaling.sweep.report import as_csv, loss_parity, text
from tests.scaling.studies import PARTS, probe, rows


def test_strong_efficiency_is_time_over_time_and_ranks() -> None:
    (curve,) = curves(rows())
    assert [round(m.step.median, 3) for m in curve.points] == [100.5, 60.3, 40.2]
    ups = [curve.speed_up(m).median for m in curve.points]
    assert ups == pytest.approx([1.0, 100 / 60, 100 / 40])
    efficiency = [curve.efficiency(m).median for m in curve.points]
    assert efficiency == pytest.approx([1.0, 100 / 60 / 2, 100 / 40 / 4])
    assert curve.name == "tiny, stage 3, global batch 8"


def test_weak_efficiency_is_time_over_time() -> None:
    (curve,) = curves(rows("weak", times={1: 100.0, 2: 110.0, 4: 125.0}))
    assert [curve.efficiency(m).median for m in curve.points] == pytest.approx([1.0, 1 / 1.1, 0.8])
    assert [curve.speed_up(m).median for m in curve.points] == pytest.approx([1.0, 2 / 1.1, 3.2])


def test_with_a_growing_model_flops_per_rank_are_compared() -> None:
    (curve,) = curves(rows("weak", times={1: 100.0, 2: 100.0, 4: 400.0}, grow=True))
    # gpt-micro has twice tiny's context, gpt-nano eight times its context and twice its layers
    assert [curve.efficiency(m).median for m in curve.points] == pytest.approx([1.0, 2.0, 16.0 / 4])


def test_intervals_hold_the_ratio_and_shrink_with_samples() -> None:
    drawn = np.random.default_rng(1)
    few, many = (
        {
            ranks: [[ms] for ms in drawn.normal(mean, 5.0, n)]
            for ranks, mean in ((1, 100.0), (2, 60.0))
        }
        for n in (8, 200)
    )
    widths = []
    for samples in (few, many):
        found = rows(times={1: 1.0, 2: 1.0})
        for row in found[1:]:
            steps = samples[row["point"]["ranks"]]
            zero = [[0.0] for _ in steps]
            row["samples_ms"] = dict.fromkeys(PARTS, zero) | {"compute": steps}
        (curve,) = curves(found)
        ratio = curve.speed_up(curve.points[1])
        expected = median(s[0] for s in samples[1]) / median(s[0] for s in samples[2])
        assert ratio.low < expected < ratio.high
        assert ratio.median == pytest.approx(expected)
        assert curve.speed_up(curve.points[1]) == ratio  # drawn with a fixed seed
        widths.append(ratio.high - ratio.low)
    assert widths[1] < widths[0] / 3


def test_a_prediction_stands_beside_one_node_and_not_beside_several() -> None:
    found = rows()
    (curve,) = curves(found)
    predicted = [m.predicted_ms for m in curve.points]
    assert all(ms is not None and ms > 0 for ms in predicted)
    assert curve.predicted_speed_up(curve.base) == 1.0
    # a machine twice as fast is predicted to take half the time
    for row in found[1:]:
        row["probe"] = [probe(0.5)]
    (faster,) = curves(found)
    halved = [ms / 2 for ms in predicted if ms is not None]
    assert [m.predicted_ms for m in faster.points] == pytest.approx(halved)
    for row in found[1:]:
        row["point"]["nodes"] = 2 if row["point"]["ranks"] > 1 else 1
    (several,) = curves(found)
    assert [m.predicted_ms is None for m in several.points] == [False, True, True]
    assert "predicted" in [
        str(line.get_label()).rpartition(" ")[2]
        for line in FIGURES["scaling"](rows()).axes[0].lines
    ]


def test_jobs_that_measure_the_same_are_one_point() -> None:
    found = rows()
    again = [{**row, "point": {**row["point"], "job": 1}} for row in found[1:]]
    (curve,) = curves([*found, *again])
    assert [(m.point.ranks, len(m.rows), m.step.count) for m in curve.points] == [
        (1, 2, 20),
        (2, 2, 20),
        (4, 2, 20),
    ]


def test_the_text_says_the_conditions_and_the_parts_add_up() -> None:
    said = text(rows())
    assert "3 of 4 points; 2 malformed lines skipped" in said
    assert "All ranks share one machine's memory" in said
    assert "not scaling" not in said
    times, parts, memory = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in said.splitlines()
        if line.startswith("| 1 ")
    )
    assert times[2] == "100.5 [100.0, 101.0]"
    assert float(times[3]) > 0
    assert times[4:6] == ["1", "1"]
    assert sum(map(float, parts[1:6])) == pytest.approx(100.5)
    assert float(parts[6]) == pytest.approx(5.0)  # 50 ms once in ten steps
    assert parts[7] == "20.0%"
    assert memory == ["1", "40.0", "39.0", "0.975", "50.0"]


@pytest.mark.parametrize(
    ("changes", "label"),
    [
        ({"emulated": True}, "**Emulated nodes on one machine: this is not scaling.**"),
        ({"oversubscribed": True}, "**More ranks than cores: this is not scaling.**"),
    ],
)
def test_what_is_no_scaling_is_never_called_so(changes: Row, label: str) -> None:
    found = rows(**changes)
    assert text(found).startswith(label)
    for make in FIGURES.values():
        assert "NOT scaling" in make(found).get_suptitle()


def test_times_of_a_busy_machine_are_no_result() -> None:
    assert "no result" not in text(rows())
    found = rows(foreign_share=0.06)
    assert text(found).startswith("**Busy machine: these times are no result.** Strong scaling:")
    assert FIGURES["scaling"](found).get_suptitle().startswith("BUSY MACHINE")


def test_losses_of_the_same_samples_are_compared() -> None:
    found = rows(stages=(0, 3))
    assert loss_parity(found) == [
        "- Losses of tiny, global batch 8, fp32: 6 points, at most 0.0e+00 apart over 14 steps: equal "
        "(tolerance 0.0001)."
    ]
    found[3]["losses"][7] += 2e-4
    assert "at most 2.0e-04" in loss_parity(found)[0]
    assert "NOT equal" in loss_parity(found)[0]
    weak = rows("weak", times={1: 1.0, 2: 1.0})
    assert loss_parity(weak) == [
        "- Losses: no two points train on the same samples, so there is nothing to compare."
    ]


def test_csv_has_a_line_for_each_point() -> None:
    found = list(csv.DictReader(io.StringIO(as_csv(rows(stages=(0, 3))))))
    assert [(r["stage"], r["ranks"], r["global_batch"]) for r in found] == [
        (stage, ranks, "8") for stage in "03" for ranks in "124"
    ]
    assert float(found[2]["efficiency"]) == pytest.approx(100 / 40 / 4, abs=1e-4)
    assert float(found[2]["efficiency_low"]) <= float(found[2]["efficiency"])
    assert None not in found[0]


def test_every_axis_has_a_name_and_the_ideal_line_is_there() -> None:
    found = rows(stages=(0, 3))
    for name, make in FIGURES.items():
        figure = make(found)
        for axes in figure.axes:
            assert axes.get_xlabel(), name
            assert axes.get_ylabel() or axes.get_yticklabels(), name
    up, efficiency = FIGURES["scaling"](found).axes
    ideal = next(line for line in up.lines if line.get_label() == "ideal")
    assert (
        np.asarray(ideal.get_xdata()).tolist()
        == np.asarray(ideal.get_ydata()).tolist()
        == [1, 2, 4]
    )
    ends = [np.asarray(line.get_xdata()).tolist() for line in efficiency.lines]
    assert ends.count([4, 4]) == 2  # a bar through that point of each curve


# --- the page


class Page(HTMLParser):
    """What a page refers to, and whether its elements are closed."""

    VOID = ("meta", "img", "br", "hr")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.images: list[dict[str, str | None]] = []
        self.counts: dict[str, int] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.references += [v or "" for k, v in attrs if k in ("src", "href", "srcset", "action")]
        if tag == "img":
            self.images.append(values)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def made_page() -> str:
    found = rows(stages=(0, 3))
    report = Report("Strong & scaling", text, draw)
    reports = [Section("sweep-strong", found, text(found), report)]
    return page(reports, title="a <title>", remark="a & remark")


def test_the_page_needs_nothing_outside_of_itself() -> None:
    whole = made_page()
    parsed = Page()
    parsed.feed(whole)
    assert parsed.open == []
    assert "script" not in parsed.counts
    assert "link" not in parsed.counts
    assert "a &lt;title&gt;" in whole
    for reference in parsed.references:
        assert reference.startswith(("#", "data:image/svg+xml;base64,")), reference[:60]
    assert "@import" not in whole
    assert "url(" not in whole
    assert len(parsed.images) == len(FIGURES)
    assert parsed.counts["table"] == 2 * 3
    for image in parsed.images:
        assert image["alt"]
        svg = base64.b64decode((image["src"] or "").partition(",")[2])
        root = ElementTree.fromstring(svg)
        assert root.tag.endswith("svg")
        outside = re.findall(rb'href="(?!#)([^"]*)"', svg)
        assert outside == []


def test_chromium_shows_every_figure(tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
    if browser is None:
        pytest.skip("no chromium here to render the page with")
    probe = (
        "<script>onload = () => { document.title = [...document.images].every(i => i.complete && "
        "i.naturalWidth > 300) + ' ' + document.images.length + ' ' + (document.body.scrollWidth <= "
        "innerWidth) }</script>"
    )
    path = tmp_path / "page.html"
    path.write_text(made_page().replace("</head>", f"{probe}</head>"), encoding="utf-8")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=5000"]
    done = subprocess.run(
        [*command, "--window-size=1280,900", "--dump-dom", path.as_uri()],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title is not None
    assert title[1] == f"true {len(FIGURES)} true"


def test_a_file_without_measurements_is_named(tmp_path: Path) -> None:
    path = tmp_path / "sweep-strong.jsonl"
    path.write_text('{"kind": "run"}\n{"kin\n')
    with pytest.raises(Exception, match=r"has no finished measurement \(1 row\(s\), 1 malformed"):
        read(path, "sweep")
    with pytest.raises(Exception, match="cannot be read"):
        read(tmp_path / "nothing.jsonl", "sweep")
