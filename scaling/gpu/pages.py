"""Results of a device as the tables of two pages: ``python -m scaling.gpu --pages scaling/results/<device>``.

docs/gpu-status.md gets the goals, docs/performance.md the speed beside plain torch and FSDP2. What stands between the
two marks of a page is replaced.
"""

from __future__ import annotations

from pathlib import Path

from hpczero.errors import ConfigError
from scaling.evidence.record import HOME, Row, of_kind, parse_rows
from scaling.evidence.table import table
from scaling.gpu.goals import goals, speed_ratios

BEGIN, END = "<!-- gpu: begin -->", "<!-- gpu: end -->"
PAGES = ("docs/gpu-status.md", "docs/performance.md")
GIB = 2**30


def write_pages(folder: Path, root: Path = HOME) -> list[Path]:
    """Write the results in ``folder`` into the pages below ``root``; returns these.

    Raises:
        ConfigError: no results of a device in the folder, or a page without its two marks.
    """
    rows = read_folder(folder)
    where = _where(rows)
    texts = (
        f"{where}\n\n{_goals(rows)}",
        f"{where}\n\n{_speed(rows)}"
        if any(of_kind(rows, "speed"))
        else f"{where} No speed measured.",
    )
    paths = [root / page for page in PAGES]
    for path, text in zip(paths, texts, strict=True):
        page = path.read_text(encoding="utf-8")
        if page.count(BEGIN) != 1 or page.count(END) != 1:
            raise ConfigError(
                f"{path}: expected one line {BEGIN} and one line {END} around the results"
            )
        before, after = page.split(BEGIN)[0], page.split(END)[1]
        path.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")
    return paths


def read_folder(folder: Path) -> list[Row]:
    """The rows of all runs in a folder, also of those that were cut off.

    Raises:
        ConfigError: there are none.
    """
    files = sorted(folder.glob("gpu-*.jsonl")) + sorted(folder.glob("gpu-*.jsonl.unfinished"))
    rows = [row for file in files for row in parse_rows(file)[0]]
    if not any(of_kind(rows, "run")):
        raise ConfigError(
            f"{folder}: no results of python -m scaling.gpu, expected gpu-first.jsonl or others"
        )
    return rows


def _where(rows: list[Row]) -> str:
    head = next(of_kind(rows, "run"))
    facts = {row["fact"]: row["value"] for row in of_kind(rows, "facts")}
    device = facts.get("device", "no device was described")
    twin = " **A twin on the host: its times mean nothing.**" if head.get("twin") else ""
    torch = facts.get("torch", head["versions"].get("torch"))
    mpi = facts.get("MPI", "MPI not told")
    return f"{device}, torch {torch}, {mpi}, commit {head['commit']}, {head['date'][:10]}.{twin}"


def _goals(rows: list[Row]) -> str:
    lines = [[what, *how.rsplit(", ", 1)] for what, how in goals(rows)]
    failed = [
        [f"{row['check']} on {row['ranks']} ranks", row["said"].partition("\n")[0], "failed"]
        for row in of_kind(rows, "failure")
    ]
    return table(["goal", "seen", "verdict"], [*lines, *failed])


def _speed(rows: list[Row]) -> str:
    shown = []
    for row, ratio in speed_ratios(rows):
        shown.append(
            [
                row["model"],
                row["way"] + (", compiled blocks" if row["compiled"] else ""),
                f"{row['step_ms_ahead']:.1f}",
                f"{row['tokens_per_s']:,.0f}",
                f"{row['tflops']:.0f}",
                "–" if ratio is None else f"{ratio:.2f}",
                f"{row['peak_nbytes'] / GIB:.2f}",
                f"{row['planned_nbytes'] / GIB:.2f}" if "planned_nbytes" in row else "–",
            ]
        )
    head = [
        "model",
        "way",
        "ms per step",
        "tokens/s",
        "TFLOP/s",
        "of plain torch",
        "peak, GiB",
        "planned, GiB",
    ]
    return table(head, shown)
