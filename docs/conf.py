"""The site that ``make docs`` builds in build/docs: guides, reference, decisions and figures, with one search.

Owns: which pages and modules are on it, and how their links are read there. Sphinx reads this file. The pages stay
plain Markdown, whose relative links also work on a code host; what only the site needs is added here on the way.
"""

from __future__ import annotations

import importlib
import re
from importlib import metadata
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]
MODULES = (
    "hpczero",
    "hpczero.activations",
    "hpczero.checkpoint",
    "hpczero.comm",
    "hpczero.data",
    "hpczero.errors",
    "hpczero.finetune",
    "hpczero.hf",
    "hpczero.models",
    "hpczero.optim",
    "hpczero.plan",
    "hpczero.plan.rules",
    "hpczero.trackers",
)
REFERENCE = ROOT / "docs" / "reference"  # written by this file, one page for each module
LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)\)")

project = "hpczero"
author = "The hpczero authors"
version = release = metadata.version("hpczero")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
include_patterns = [
    *(
        "README.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "docs/*.md",
        "docs/*/*.md",
        "docs/reference/*.rst",
    ),
    *(f"{folder}/README.md" for folder in ("examples", "scaling", "slurm", "tests/*")),
    "slurm/machines/*.md",
]
exclude_patterns = [".*", "build", "runs", "logs"]  # not even looked through
myst_heading_anchors = 6
default_role = "literal"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
html_theme = "furo"
html_title = "hpczero"
html_show_sourcelink = False
html_copy_source = False


def write_reference() -> None:
    """A page for each public module, and its names in place: hpczero loads them on first use, autodoc does not wait."""
    REFERENCE.mkdir(exist_ok=True)
    told: dict[int, str] = {}  # which module's page has an object already
    for name in MODULES:
        module = importlib.import_module(name)
        text = f"{name}\n{'=' * len(name)}\n\n.. automodule:: {name}\n   :members:\n"
        names = getattr(module, "__all__", ())
        for public in names:
            setattr(module, public, getattr(module, public))
        again = [each for each in names if told.setdefault(id(getattr(module, each)), name) != name]
        text += f"   :exclude-members: {', '.join(again)}\n" if again else ""
        (REFERENCE / f"{name}.rst").write_text(text, encoding="utf-8")


def contents(readme: str) -> str:
    """The site's contents, from the list of pages at the end of the README."""
    groups = re.findall(
        r"^- \*\*(\w+)\*\*: (.*)$", readme.partition("## Documentation")[2], re.MULTILINE
    )
    pages = {
        title: [page_of(ROOT, target) for _, target in LINK.findall(text)] for title, text in groups
    }
    pages["Reference"] = [f"docs/reference/{name}" for name in MODULES]
    pages["Cluster"].append("slurm/machines/mi250x")
    pages["Develop"] += ["tests/cluster/README", "tests/slurm/README"]
    return "".join(tree(title, names) for title, names in pages.items())


def tree(caption: str, names: list[str]) -> str:
    """Pages as a hidden part of the contents."""
    return "\n```{toctree}\n:hidden:\n" + f":caption: {caption}\n\n" + "\n".join(names) + "\n```\n"


def page_of(folder: Path, target: str) -> str:
    """Name of the page that a link in ``folder`` leads to; a folder's page is its README."""
    path = (folder / target).resolve()
    if path.is_dir():
        path /= "README.md"
    return path.relative_to(ROOT).with_suffix("").as_posix()


def for_the_site(app: Sphinx, name: str, source: list[str]) -> None:
    """What a page needs on the site alone: contents, and links to folders, which a site does not list."""
    path = Path(app.env.doc2path(name))

    def link(found: re.Match[str]) -> str:
        text, target = found.groups()
        if "://" in target or not (path.parent / target).is_dir():
            return found[0]
        return (
            f"[{text}]({target}/README.md)"
            if (path.parent / target / "README.md").is_file()
            else text
        )

    text = LINK.sub(link, source[0])
    if name == "README":
        text += contents(text)
    if name == "docs/decisions/README":
        text += tree("Decisions", sorted(each.stem for each in path.parent.glob("[0-9]*.md")))
    source[0] = text


def not_a_type(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Napoleon takes what stands before a colon in the first line of a property for its type; so it comes second."""
    if what in ("property", "attribute"):
        lines.insert(0, "")


def write_front(app: Sphinx, error: Exception | None) -> None:
    """index.html, which servers and people open first: the README."""
    text = '<!doctype html><meta http-equiv="refresh" content="0; url=README.html"><a href="README.html">hpczero</a>'
    if error is None:
        (Path(app.outdir) / "index.html").write_text(text, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    write_reference()
    app.connect("source-read", for_the_site)
    app.connect("autodoc-process-docstring", not_a_type, priority=400)  # before napoleon, at 500
    app.connect("build-finished", write_front)
    return {"parallel_read_safe": True}
