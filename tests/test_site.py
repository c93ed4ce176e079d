"""The site that ``make docs`` builds: every page and public name is on it and found, and no warning is left alone."""

from __future__ import annotations

import json
import sys
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path

import pytest

from tests.helpers.mpirun import ROOT, Finished, run_command
from tests.helpers.transcripts import Tree
from tests.surface import MODULES
from tests.test_docs import DOCUMENTS

LIMIT_S = 120  # of the whole site, as CONTRIBUTING.md has it; on an idle machine

pytestmark = pytest.mark.slow


class Named(HTMLParser):
    """Which names a page has: `id` of headings and of what autodoc describes."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids.update(value for name, value in attrs if name == "id" and value)


def build(folder: Path) -> Finished:
    """As the Makefile does, in ``folder``."""
    for needed in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(needed, reason="make docs installs it")
    line = (ROOT / "Makefile").read_text().partition("$(PYTHON) -m sphinx ")[2].partition("\n")[0]
    return run_command([sys.executable, "-m", "sphinx", *line.split()], LIMIT_S, None, folder)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project, which has its site in build/docs."""
    copy = Tree(tmp_path_factory.mktemp("tree")).folder
    done = build(copy).ended()
    assert done.stderr == "", done
    return copy


def test_every_document_is_a_page_and_every_public_name_has_its_place(tree: Path) -> None:
    site = tree / "build" / "docs"
    assert "README.html" in (site / "index.html").read_text()
    for document in DOCUMENTS:
        assert (site / document.relative_to(ROOT)).with_suffix(".html").is_file(), document
    told = set()
    for page in (site / "docs" / "reference").glob("*.html"):
        told |= {name.rpartition(".")[2] for name in Named(page).ids}
    for module in MODULES:
        assert (site / "docs" / "reference" / f"{module}.html").is_file()
        public = import_module(module)
        names = {each for each in public.__all__ if callable(getattr(public, each))}
        assert names
        assert names <= told, module


def test_search_finds_the_page_of_a_word_without_a_server(tree: Path) -> None:
    text = (tree / "build" / "docs" / "searchindex.js").read_text()
    index = json.loads(text[text.index("{") : text.rindex("}") + 1])
    found = {index["docnames"][page] for page in index["terms"]["offload"]}
    assert {"docs/tiers", "docs/decisions/0021-offload"} <= found


@pytest.mark.parametrize(
    ("path", "before", "after", "said"),
    [
        ("docs/zero.md", "\n## ", "\n[gone](running.md#no-such-heading)\n\n## ", "no-such-heading"),
        ("docs/zero.md", "\n## ", "\n[gone](no-such-page.md)\n\n## ", "no-such-page"),
        ("hpczero/errors.py", '"""', '"""Made ``up.\n\n', "literal"),
        ("README.md", "[sharp bits](docs/sharp-bits.md)", "sharp bits", "docs/sharp-bits"),
    ],
)
def test_what_leads_nowhere_or_cannot_be_read_ends_it(
    tree: Path, path: str, before: str, after: str, said: str
) -> None:
    file = tree / path
    whole = file.read_text()
    file.write_text(whole.replace(before, after, 1))
    done = build(tree)  # what has not changed is not read again
    file.write_text(whole)
    assert done.returncode == 1, done
    assert said in done.stderr, done
