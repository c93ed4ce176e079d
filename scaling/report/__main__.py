"""All results as text, and their plots drawn anew: ``python -m scaling.report [FILE or FOLDER ...] [--page P]``.

Owns: which report belongs to which file. Must not know: how anything was measured.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tyro

from hpczero.errors import ConfigError, run
from hpczero.options.reading import parse_command_line
from scaling.bridge import report as bridge_report
from scaling.checkpoint import report as checkpoint_report
from scaling.collectives import report as collectives_report
from scaling.evidence.record import HOME, Row, commit, of_kind, parse_rows
from scaling.gpu import goals as gpu_goals
from scaling.hostcost import report as hostcost_report
from scaling.layouts import report as layouts_report
from scaling.overhead import report as overhead_report
from scaling.parallel import report as parallel_report
from scaling.peers import report as peers_report
from scaling.planner import report as planner_report
from scaling.predict import report as predict_report
from scaling.report.page import Report, page
from scaling.report.rows import is_sound
from scaling.simulate import check as simulate_check
from scaling.simulate import report as simulate_report
from scaling.start import report as start_report
from scaling.sweep import plots as sweep_plots
from scaling.sweep import report as sweep_report
from scaling.tiers import report as tiers_report
from scaling.transports import report as transports_report


def gpu_text(rows: list[Row]) -> str:
    """What `scaling.gpu` printed, and where."""
    head = next(of_kind(rows, "run"))
    where = "a twin on the host, whose times mean nothing" if head.get("twin") else "a device"
    return (
        f"Checks of {where}: {head['machine']}, commit {head['commit']}, {head['date']}.\n\n"
        f"{gpu_goals.report(rows)}"
    )


def simulate_text(rows: list[Row]) -> str:
    """A simulated job, or simulated steps beside those of emulated hosts."""
    beside = any(of_kind(rows, "layout"))
    return simulate_check.text(rows) if beside else simulate_report.text(rows)


def draw_nothing(rows: list[Row], path: Path) -> None:
    """For tables that have no figure."""


# By the beginning of a file's name.
TEXT: dict[str, Callable[[list[Row]], str]] = {
    "bridge": bridge_report.text,
    "checkpoint": checkpoint_report.text,
    "collectives": collectives_report.text,
    "gpu": gpu_text,
    "hostcost": hostcost_report.text,
    "layouts": layouts_report.text,
    "overhead": overhead_report.text,
    "parallel": parallel_report.text,
    "peers": peers_report.text,
    "planner": planner_report.text,
    "predict": predict_report.text,
    "simulate": simulate_text,
    "start": start_report.text,
    "sweep": sweep_report.text,
    "tiers": tiers_report.text,
    "transports": transports_report.text,
}
DRAW: dict[str, Callable[[list[Row], Path], None]] = {
    "bridge": bridge_report.draw,
    "checkpoint": checkpoint_report.draw,
    "collectives": collectives_report.draw,
    "gpu": draw_nothing,
    "hostcost": draw_nothing,
    "layouts": layouts_report.draw,
    "overhead": draw_nothing,
    "parallel": parallel_report.draw,
    "peers": peers_report.draw,
    "planner": planner_report.draw,
    "predict": predict_report.draw,
    "simulate": draw_nothing,
    "start": draw_nothing,
    "sweep": sweep_plots.draw,
    "tiers": tiers_report.draw,
    "transports": transports_report.draw,
}

# Headings of the page.
TITLES = {
    "bridge": "torch.distributed over MPI, beside gloo",
    "checkpoint": "Saving and loading checkpoints",
    "collectives": "Collectives between nodes, beside the MPI library",
    "gpu": "One GPU: checks and measurements",
    "hostcost": "Messages and host time at up to 100,000 ranks",
    "layouts": "Layouts of tensor, pipeline and data parallelism",
    "overhead": "What hpczero adds to a step",
    "parallel": "Tensor and pipeline parallelism, beside torch",
    "peers": "A training step, beside FSDP2, DDP and DeepSpeed",
    "planner": "Settings that were predicted to be fastest, tried",
    "predict": "Steps of published runs, predicted",
    "simulate": "A step of many ranks, simulated",
    "start": "The start of a job",
    "sweep": "Weak and strong scaling",
    "tiers": "Offload to host memory and disk",
    "transports": "Transports between the ranks",
}

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
    options = parse_command_line(
        Options,
        sys.argv[1:],
        prog="python -m scaling.report",
        description=str(main.__doc__),
        default=Options(),
    )
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
        say(f"left out: {problem}")
    if options.page is not None:
        remark = (
            f"Drawn by commit {commit()} from the records named below. Each section says on what machine and by which "
            "commit it was measured; emulated nodes are never scaling."
        )
        whole = page(reports, title="hpczero: measurements", remark=remark)
        Path(options.page).write_text(whole, encoding="utf-8")
        say(f"page in {options.page}")
    if options.files and problems:
        raise problems[0]
    return 0


def results_in(path: Path) -> list[Path]:
    """``path`` itself, or the results in it and its folders.

    Raises:
        ConfigError: a folder without any.
    """
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.rglob("*.jsonl") if file.stem.split("-")[0] in TEXT)
    if not found:
        raise ConfigError(
            f"{path}: holds no results of the measuring commands (python -m scaling....), expected files such as "
            "sweep-weak.jsonl; give the folder that such a command wrote. Points of a study by sbatch are there once "
            "its command has been typed again with --collect"
        )
    return found


def show(path: Path) -> Report:
    """Print the report of one file and write what belongs beside it.

    Raises:
        ConfigError: it cannot be read, there is nothing to report, or nothing here reports such files.
    """
    kind = path.stem.split("-")[0]
    if kind not in TEXT:
        raise ConfigError(f"{path}: got a file of {kind!r}, expected {', '.join(TEXT)}")
    rows, malformed = read(path, kind)
    try:
        text = TEXT[kind](rows)
        if malformed:
            text = with_remark(text, f"Left out: {malformed} malformed line(s) of this file.")
        for suffix in (".png", ".svg") if kind == "sweep" else (".png",):
            DRAW[kind](rows, path.with_suffix(suffix))
        if kind == "sweep":
            sweep_report.write_tables(rows, path, text)
    except UNREPORTABLE as error:
        raise ConfigError(
            f"{path}: holds values that cannot be reported ({error!r}); correct the line or remove it"
        ) from error
    sys.stdout.write(f"{text}\n\n")
    return Report(path.stem, rows, text, DRAW[kind], TITLES[kind])


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


def with_remark(text: str, remark: str) -> str:
    """``text`` with a paragraph behind its first."""
    first, _, others = text.partition("\n")
    return f"{first}\n\n{remark}\n{others}"


def say(line: str) -> None:
    """Remarks, on stderr."""
    sys.stderr.write(f"report: {line}\n")


if __name__ == "__main__":
    run(main)
