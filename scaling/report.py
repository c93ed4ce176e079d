"""All results as text, and their plots drawn anew: ``python -m scaling.report [FILE or FOLDER ...] [--page P]``.

The page has text, tables and figures, and needs nothing that is not in the file itself. Figures are SVG inside of it,
on white, so that they are read on a light and on a dark page alike.

Somebody may have been killed while writing a file, or have edited it; what is left of it is still worth showing.
"""

from __future__ import annotations

import base64
import html
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import tyro
from markdown_it import MarkdownIt

from hpczero.errors import ConfigError, run
from scaling.evidence.harness import Report, options_of, say
from scaling.evidence.record import ROOT, Row, commit, parse_rows
from scaling.sweep.plots import is_point
from scaling.sweep.report import write_tables

COMMANDS = "checkpoint collectives hostcost layouts overhead planner tiers"
MODULES = {  # by the beginning of a file's name
    **{
        name: name
        for name in [
            "balance",
            "bridge",
            "codes",
            "exact",
            "parallel",
            "peers",
            "start",
            "transports",
        ]
    },
    **{name: f"{name}.__main__" for name in COMMANDS.split()},
    "gpu": "gpu.goals",
    "predict": "predict.check",
    "simulate": "simulate.check",
    "sweep": "sweep.plots",
}
REPORTS: dict[str, Report] = {
    name: import_module(f"scaling.{module}").REPORT for name, module in sorted(MODULES.items())
}


@dataclass(frozen=True)
class Options:
    """What to show.

    Attributes:
        files: results (.jsonl), or folders of them, such as that of a study; without any, all in scaling/results.
        page: also write one HTML page of all of them, which needs no network and no other file.
    """

    files: tyro.conf.Positional[tuple[str, ...]] = ()
    page: str | None = None


def main() -> int:
    """Print the reports as markdown and draw their plots beside the files; of sweeps also SVG, CSV and the text."""
    options = options_of(Options, "report")
    reports, problems = [], []
    found: dict[Path, None] = {}  # each once, in the order given
    for name in options.files:
        try:
            found.update(dict.fromkeys(results_in(Path(name))))
        except ConfigError as error:  # what else was given is still worth showing
            problems.append(error)
    for path in found if options.files else sorted((ROOT / "scaling/results").rglob("*.jsonl")):
        try:
            reports.append(show(path))
        except ConfigError as error:
            problems.append(error)
    for problem in problems:
        say("report", f"left out: {problem}")
    if options.page is not None:
        remark = (
            f"Drawn by commit {commit()} from the records named below. Each section says on what machine and by which "
            "commit it was measured; emulated nodes are never scaling."
        )
        whole = page(reports, title="hpczero: measurements", remark=remark)
        Path(options.page).write_text(whole, encoding="utf-8")
        say("report", f"page in {options.page}")
    if options.files and problems:
        raise problems[0]
    return 0


def results_in(path: Path) -> list[Path]:
    """``path`` itself, or the results in it and its folders. Raises ConfigError: a folder without any."""
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.rglob("*.jsonl") if file.stem.split("-")[0] in REPORTS)
    if not found:
        raise ConfigError(
            f"{path}: holds no results of the measuring commands (python -m scaling....), expected files such as "
            "sweep-weak.jsonl; give the folder that such a command wrote. Points of a study by sbatch are there once "
            "its command has been run again with --collect"
        )
    return found


def show(path: Path) -> Section:
    """Print the report of one file and write what belongs beside it.

    Raises:
        ConfigError: it cannot be read, there is nothing to report, or nothing here reports such files.
    """
    kind = path.stem.split("-")[0]
    if kind not in REPORTS:
        raise ConfigError(f"{path}: got a file of {kind!r}, expected {', '.join(REPORTS)}")
    rows, malformed = read(path, kind)
    report = REPORTS[kind]
    try:
        text = report.text(rows)
        if malformed:
            first, _, others = text.partition("\n")
            remark = f"Left out: {malformed} malformed line(s) of this file."
            text = f"{first}\n\n{remark}\n{others}"
        for suffix in (".png", ".svg") if kind == "sweep" else (".png",):
            if report.draw is not None:
                report.draw(rows, path.with_suffix(suffix))
        if kind == "sweep":
            write_tables(rows, path, text)
    except Exception as error:  # whatever a row without names, or with senseless values, leads to
        raise ConfigError(
            f"{path}: holds values that cannot be reported ({error!r}); correct the line or remove it"
        ) from error
    sys.stdout.write(f"{text}\n\n")
    return Section(path.stem, rows, text, report)


def read(path: Path, kind: str) -> tuple[list[Row], int]:
    """(sound rows, number of malformed lines) of a file of results.

    Raises:
        ConfigError: it cannot be read, or there is nothing to report.
    """
    try:
        rows, malformed = parse_rows(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    found = [row for row in rows if (kind, row["kind"]) != ("sweep", "point") or is_point(row)]
    malformed += len(rows) - len(found)
    kinds = {row["kind"] for row in found}
    if "run" not in kinds or len(kinds) < 2:
        raise ConfigError(
            f"{path}: has no finished measurement ({len(found)} row(s), {malformed} malformed line(s)); a sweep is "
            "collected by: python -m scaling.sweep weak|strong --folder FOLDER --collect"
        )
    return found, malformed


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


if __name__ == "__main__":
    run(main)
