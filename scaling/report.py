"""All results as text, and their plots drawn anew: ``python -m scaling.report [FILE ...] [--page report.html]``.

Owns: which report belongs to which file. Must not know: how anything was measured.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tyro

from hpczero.errors import ConfigError, run
from hpczero.options import parse_command_line
from scaling import (
    checkpoint_report,
    collectives_report,
    peers_report,
    predict_report,
    sweep_plots,
    sweep_report,
    transports_report,
)
from scaling.page import Report, page
from scaling.record import ROOT, Row, commit, parse_rows

# By the beginning of a file's name.
TEXT: dict[str, Callable[[list[Row]], str]] = {
    "checkpoint": checkpoint_report.text,
    "collectives": collectives_report.text,
    "peers": peers_report.text,
    "predict": predict_report.text,
    "sweep": sweep_report.text,
    "transports": transports_report.text,
}
DRAW: dict[str, Callable[[list[Row], Path], None]] = {
    "checkpoint": checkpoint_report.draw,
    "collectives": collectives_report.draw,
    "peers": peers_report.draw,
    "predict": predict_report.draw,
    "sweep": sweep_plots.draw,
    "transports": transports_report.draw,
}


@dataclass(frozen=True)
class Options:
    """What to show.

    Attributes:
        files: results (.jsonl); without any, all in scaling/results.
        page: also write one HTML page of all of them, which needs no network and no other file.
    """

    files: tyro.conf.Positional[tuple[str, ...]] = ()
    page: str | None = None


def main() -> int:
    """Print the reports as markdown and draw their plots beside the files; of sweeps also SVG, CSV and the text."""
    options = parse_command_line(
        Options,
        sys.argv[1:],
        prog="python -m scaling.report",
        description=str(main.__doc__),
        default=Options(),
    )
    given = [Path(name) for name in options.files]
    reports = []
    for path in given or sorted((ROOT / "scaling" / "results").rglob("*.jsonl")):
        kind = path.name.split("-")[0]
        if kind not in TEXT:
            raise ConfigError(f"{path}: got a file of {kind!r}, expected {', '.join(TEXT)}")
        rows, malformed = read(path)
        if malformed:
            sys.stderr.write(f"report: {path}: {malformed} malformed line(s) skipped\n")
        text = TEXT[kind](rows)
        sys.stdout.write(f"{text}\n\n")
        DRAW[kind](rows, path.with_suffix(".png"))
        if kind == "sweep":
            DRAW[kind](rows, path.with_suffix(".svg"))
            sweep_report.write_tables(rows, path)
        reports.append(Report(path.stem, rows, text, DRAW[kind]))
    if options.page is not None:
        remark = (
            f"Drawn by commit {commit()} from the records named below. Each section says on what machine and by which "
            "commit it was measured; emulated nodes are never scaling."
        )
        whole = page(reports, title="hpczero: measurements", remark=remark)
        Path(options.page).write_text(whole, encoding="utf-8")
        sys.stderr.write(f"report: page in {options.page}\n")
    return 0


def read(path: Path) -> tuple[list[Row], int]:
    """(rows, number of malformed lines) of a file of results.

    Raises:
        ConfigError: it cannot be read, or there is nothing to report.
    """
    try:
        rows, malformed = parse_rows(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    kinds = {row["kind"] for row in rows}
    if "run" not in kinds or len(kinds) < 2:
        raise ConfigError(
            f"{path}: has no finished measurement ({len(rows)} row(s), {malformed} malformed line(s)); a sweep is "
            "collected by: python -m scaling.sweep weak|strong --folder FOLDER --collect"
        )
    return rows, malformed


if __name__ == "__main__":
    run(main)
