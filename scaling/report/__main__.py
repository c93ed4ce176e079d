"""All results as text, and their plots drawn anew: ``python -m scaling.report [FILE or FOLDER ...] [--page P]``.

Somebody may have been killed while writing a file, or have edited it; what is left of it is still worth showing.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from hpczero.errors import ConfigError, run
from scaling import bridge, parallel, peers, start, transports
from scaling.checkpoint.__main__ import REPORT as CHECKPOINT
from scaling.collectives.__main__ import REPORT as COLLECTIVES
from scaling.evidence.harness import Report, options_of, say
from scaling.evidence.record import HOME, Row, commit, parse_rows
from scaling.gpu.goals import REPORT as GPU
from scaling.hostcost.__main__ import REPORT as HOSTCOST
from scaling.layouts.__main__ import REPORT as LAYOUTS
from scaling.overhead.__main__ import REPORT as OVERHEAD
from scaling.planner.__main__ import REPORT as PLANNER
from scaling.predict.check import REPORT as PREDICT
from scaling.report.page import Section, page
from scaling.simulate.check import REPORT as SIMULATE
from scaling.sweep.plots import REPORT as SWEEP
from scaling.sweep.plots import is_point
from scaling.sweep.report import write_tables
from scaling.tiers.__main__ import REPORT as TIERS

REPORTS: dict[str, Report] = {  # by the beginning of a file's name
    "bridge": bridge.REPORT,
    "checkpoint": CHECKPOINT,
    "collectives": COLLECTIVES,
    "gpu": GPU,
    "hostcost": HOSTCOST,
    "layouts": LAYOUTS,
    "overhead": OVERHEAD,
    "parallel": parallel.REPORT,
    "peers": peers.REPORT,
    "planner": PLANNER,
    "predict": PREDICT,
    "simulate": SIMULATE,
    "start": start.REPORT,
    "sweep": SWEEP,
    "tiers": TIERS,
    "transports": transports.REPORT,
}
EVERY_RUN = "cpu cores commit date"  # that the row of every run has, but for those named here
OTHER_RUNS = ("gpu", "sweep")

# What a report meets where a row has the right names and senseless values.
UNREPORTABLE = (
    ArithmeticError,
    AttributeError,
    LookupError,
    StopIteration,
    TypeError,
    ValueError,
)


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
    options = options_of(Options, "report", str(main.__doc__))
    reports, problems = [], []
    found: dict[Path, None] = {}  # each once, in the order given
    for name in options.files:
        try:
            found.update(dict.fromkeys(results_in(Path(name))))
        except ConfigError as error:  # what else was given is still worth showing
            problems.append(error)
    for path in found if options.files else sorted((HOME / "scaling/results").rglob("*.jsonl")):
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
            "its command has been typed again with --collect"
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
    except UNREPORTABLE as error:
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
    found = [row for row in rows if is_sound(kind, row)]
    malformed += len(rows) - len(found)
    kinds = {row["kind"] for row in found}
    if "run" not in kinds or len(kinds) < 2:
        raise ConfigError(
            f"{path}: has no finished measurement ({len(found)} row(s), {malformed} malformed line(s)); a sweep is "
            "collected by: python -m scaling.sweep weak|strong --folder FOLDER --collect"
        )
    return found, malformed


def is_sound(kind: str, row: Row) -> bool:
    """Whether the report of files of ``kind`` can read ``row``."""
    needs = REPORTS[kind].needs.get(row["kind"], "")
    if row["kind"] == "run" and kind not in OTHER_RUNS:
        needs = f"{needs} {EVERY_RUN}"
    if not row.keys() >= set(needs.split()):
        return False
    return is_point(row) if (kind, row["kind"]) == ("sweep", "point") else True


if __name__ == "__main__":
    run(main)
