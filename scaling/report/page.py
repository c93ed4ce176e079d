"""One page with all reports: text, tables, figures, nothing that is not in the file itself.

Figures are SVG inside the page, on white, so that they are read on a light and on a dark page alike.
"""

from __future__ import annotations

import base64
import html
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

from scaling.evidence.harness import Report
from scaling.evidence.record import Row

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #ffffff; --line: #d0d7de; --soft: #f3f5f7; --mark: #0a58a6; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ed; --paper: #15191e; --line: #3b434c; --soft: #1f252c; --mark: #7ab8ff; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1.25rem 4rem; max-width: 78rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.7rem; margin: 0 0 .25rem; } h2 { font-size: 1.25rem; margin: 2.5rem 0 .5rem; padding-top: 1rem;
  border-top: 1px solid var(--line); }
a { color: var(--mark); } nav ul { padding-left: 1.2rem; } li { overflow-wrap: anywhere; }
.scroll { overflow-x: auto; margin: .75rem 0 1rem; }
table { border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums; }
th, td { border: 1px solid var(--line); padding: .3rem .55rem; text-align: right; white-space: nowrap; }
th { background: var(--soft); } th:first-child, td:first-child { text-align: left; }
figure { margin: 1rem 0; } figure img { display: block; width: 100%; height: auto; background: #fff;
  border: 1px solid var(--line); border-radius: 6px; padding: .5rem; }
figcaption { font-size: .86rem; opacity: .8; margin-top: .3rem; }
code { background: var(--soft); padding: .1em .3em; border-radius: 4px; }
@media print { h2 { break-before: page; } }
"""


@dataclass(frozen=True)
class Section:
    """One file of results: its name without suffix, its rows, the text of the report, and the report itself."""

    name: str
    rows: list[Row]
    text: str
    report: Report


def page(sections: Sequence[Section], *, title: str, remark: str) -> str:
    """The whole file. No script, no link to anything outside."""
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    parts = []
    for number, section in enumerate(sections):
        # the conditions, the figures, the tables
        intro, tables = split(section.text)
        figures = "".join(_figure(path_name, svg) for path_name, svg in figures_of(section))
        body = markdown.render(intro) + figures + markdown.render(tables)
        body = body.replace("<table>", '<div class="scroll"><table>')
        body = body.replace("</table>", "</table></div>")
        heading = f"{html.escape(section.report.title)} <code>{html.escape(section.name)}</code>"
        parts.append(f'<section id="r{number}">\n<h2>{heading}</h2>\n{body}</section>\n')
    links = "".join(
        f'<li><a href="#r{number}">{html.escape(section.report.title)}</a> <code>{html.escape(section.name)}</code>: '
        f"{html.escape(section.text.partition('; ')[0].partition('. ')[0])}</li>"
        for number, section in enumerate(sections)
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{html.escape(title)}</h1>\n<p>{html.escape(remark)}</p>\n<nav><ul>{links}</ul></nav>\n"
        f"{''.join(parts)}</body>\n</html>\n"
    )


def split(text: str) -> tuple[str, str]:
    """What comes before the first table or its heading, and the rest."""
    lines = text.splitlines()
    first = next(
        (n for n, line in enumerate(lines) if n and line.startswith(("|", "**"))), len(lines)
    )
    return "\n".join(lines[:first]), "\n".join(lines[first:])


def figures_of(section: Section) -> list[tuple[str, bytes]]:
    """(name, SVG) of every figure of a report, in the order they were drawn."""
    with tempfile.TemporaryDirectory(prefix="page-") as folder:
        if section.report.draw is not None:
            section.report.draw(section.rows, Path(folder) / f"{section.name}.svg")
        drawn = sorted(Path(folder).glob("*.svg"), key=lambda path: path.stat().st_mtime_ns)
        return [(path.stem, path.read_bytes()) for path in drawn]


def _figure(name: str, svg: bytes) -> str:
    """As an image of its own: names inside of one SVG do not meet those of another."""
    data = base64.b64encode(svg).decode("ascii")
    shown = html.escape(name)
    return (
        f'<figure><img alt="{shown}; its numbers are in the tables below" src="data:image/svg+xml;base64,{data}">'
        f"<figcaption>{shown}</figcaption></figure>\n"
    )
