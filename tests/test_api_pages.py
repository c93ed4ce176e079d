"""The pages that ``make docs`` writes: every public name with its text, and no warning left alone."""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import hpczero
import hpczero.activations
import hpczero.checkpoint
import hpczero.plan
import hpczero.trackers
from tests.helpers.mpirun import ROOT, Finished, run_command

PROGRAM = ROOT / "docs" / "api.py"
PUBLIC = {
    "hpczero": hpczero.__all__,
    "hpczero/activations": hpczero.activations.__all__,
    "hpczero/checkpoint": hpczero.checkpoint.__all__,
    "hpczero/plan": hpczero.plan.__all__,
    "hpczero/trackers": hpczero.trackers.__all__,
}


class Texts(HTMLParser):
    """Which names a page has a text for: `id` of the element around each docstring."""

    def __init__(self) -> None:
        super().__init__()
        self.named: list[str] = []
        self.told: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag == "section" and found.get("id"):
            self.named.append(str(found["id"]))
        elif found.get("class") == "docstring" and self.named:
            self.told.add(self.named[-1])


def make_pages(folder: Path) -> Finished:
    pytest.importorskip("pdoc")
    return run_command([sys.executable, PROGRAM, folder], 100)


@pytest.mark.slow
def test_every_public_name_has_its_text_on_a_page(tmp_path: Path) -> None:
    make_pages(tmp_path).ended()
    for page, names in PUBLIC.items():
        texts = Texts()
        texts.feed((tmp_path / f"{page}.html").read_text())
        assert set(names) <= texts.told, page


@pytest.mark.slow
def test_what_pdoc_cannot_make_sense_of_ends_it(tmp_path: Path) -> None:
    program = f"""
import runpy, sys
import hpczero.plan
hpczero.plan.Plan.__annotations__["stage"] = "NoSuchName[int]"
sys.argv = [{str(PROGRAM)!r}, {str(tmp_path)!r}]
runpy.run_path({str(PROGRAM)!r}, run_name="__main__")
"""
    pytest.importorskip("pdoc")
    done = run_command([sys.executable, "-c", program], 100).ended(1)
    assert "NoSuchName" in done.stderr, done
