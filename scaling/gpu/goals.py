"""What the figures of ``python -m scaling.gpu`` should be, and how they are shown, also on two pages of docs.

docs/gpu-status.md gets the goals, docs/performance.md the speed beside plain torch and FSDP2: by ``python -m
scaling.gpu --pages scaling/results/<device>``. What stands between the two marks of a page is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from hpczero.errors import ConfigError
from scaling.evidence.harness import Report
from scaling.evidence.record import ROOT, Row, head_of, of_kind, parse_rows
from scaling.evidence.spread import table, table_of

HIDDEN = ("kind", "all_ms")  # columns that are in the rows and not in the tables
SLICED = "time-sliced: not judged"  # kernels of several processes take turns without CUDA MPS

BEGIN, END = "<!-- gpu: begin -->", "<!-- gpu: end -->"
PAGES = ("docs/gpu-status.md", "docs/performance.md")
GIB = 2**30

Verdict = tuple[str, str]  # what, with its figure


def text(rows: list[Row]) -> str:
    """What the command printed, and where it ran."""
    head = head_of(rows)
    where = "a twin on the host, whose times mean nothing" if head.get("twin") else "a device"
    return f"Checks of {where}: {head['machine']}, commit {head['commit']}, {head['date']}.\n\n{report(rows)}"


def report(rows: list[Row]) -> str:
    """All rows as tables, then each goal with its figure."""
    parts = []
    for check in dict.fromkeys(row["kind"] for row in rows):
        if check not in ("run", "failure", "took"):
            parts.append(f"{check}\n\n{_table([row for row in rows if row['kind'] == check])}")
    failures = [_failure(row) for row in rows if row["kind"] == "failure"]
    if failures:
        parts.append("not run or failed\n\n" + "\n".join(failures))
    parts.append("goals\n\n" + "\n".join(f"- {what}: {how}" for what, how in goals(rows)))
    return "\n\n".join(parts)


def _table(rows: list[Row]) -> str:
    columns = [c for c in dict.fromkeys(k for row in rows for k in row) if c not in HIDDEN]
    return table(columns, [[_text(row.get(column)) for column in columns] for row in rows])


def _failure(row: Row) -> str:
    first, *others = row["said"].splitlines()
    lines = [f"- {row['check']} on {row['ranks']} rank(s): {first}", *others]
    return "\n      ".join(lines)


def _text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:,.3g}" if isinstance(value, float) else str(value)


def goals(rows: list[Row]) -> Iterator[Verdict]:
    """Each goal of a GPU run that these rows can speak of."""
    twin = any(row.get("twin") for row in rows)  # whose times mean nothing

    def of(check: str, wanted: Callable[[Row], bool] = lambda row: True) -> list[Row]:
        return [row for row in rows if row["kind"] == check and wanted(row)]

    yield from _smoke([*of("contact"), *of("smoke")])
    yield from _kernels(of("kernels"), twin)
    for check in ("parity", "collectives", "overlap"):
        for row in of(check, lambda row: bool(row.get("said"))):
            yield f"{check} by {row['way']} on {row['ranks']} ranks works", _yes(False)
    yield from _parity(of("parity", lambda row: not row.get("said")))
    yield from _collectives(of("collectives", lambda row: not row.get("said")), twin)
    yield from _train(of("train"))
    yield from _speed(rows, twin)
    for row in [] if twin else of("overlap", lambda row: row.get("exposed") is not None):
        met = _met(row["exposed"], row["exposed"] <= 0.2, sliced=bool(row.get("time_sliced")))
        yield "exposed communication at most 0.2 of the serial", met
    held: dict[int, bool] = {}
    for row in [*of("fits"), *of("fits_not")]:  # one row, or one of each rank that ran out
        held[row["stage"]] = held.get(row["stage"], True) and row["trains"]
    if held.keys() >= {0, 3}:
        right = held[3] and not held[0]
        yield "does not fit at stage 0, trains at stage 3", _met(str(held), right)


def _train(rows: list[Row]) -> Iterator[Verdict]:
    for row in rows:
        what = f"hpczero.train, {row['model']}"
        if row["run"] == "compared" and row["deterministic"]:
            yield f"{what}: losses after a resume are those without a stop", _yes(row["equal"])
        elif row["run"] == "verified":
            yield f"{what}: checkpoints are sound", _yes(row["right"])
        elif row.get("said"):
            yield f"{what}, {row['run']}: runs", _yes(False)


def speed_ratios(rows: list[Row]) -> list[tuple[Row, float | None]]:
    """Of each model and way the quicker of its rows, and its tokens per second over those of plain torch."""
    best: dict[tuple[str, str, bool], Row] = {}
    for row in rows:
        if row["kind"] == "speed" and not row.get("said"):
            key = row["model"], row["way"], row["compiled"]
            if key not in best or row["tokens_per_s"] > best[key]["tokens_per_s"]:
                best[key] = row
    found: list[tuple[Row, float | None]] = []
    for (model, _, compiled), row in best.items():
        plain = best.get((model, "plain torch", compiled))
        found.append((row, row["tokens_per_s"] / plain["tokens_per_s"] if plain else None))
    return found


def _speed(rows: list[Row], twin: bool) -> Iterator[Verdict]:
    ratios = speed_ratios(rows)
    said = [row for row in rows if row["kind"] == "speed" and row.get("said")]
    # Where plain torch cannot compile either, the machine has no compiler.
    nobody = {(row["model"], row["compiled"]) for row in said if row["way"] == "plain torch"}
    for row in said:
        if (row["model"], row["compiled"]) not in nobody:
            kind = "compiled" if row["compiled"] else "eager"
            yield f"{row['model']}, {row['way']}, {kind}: trains", _yes(False)
    of_fsdp2 = {
        (row["model"], row["compiled"]): ratio for row, ratio in ratios if row["way"] == "FSDP2"
    }
    for row, ratio in ratios:
        if twin or "stage" not in row or ratio is None:
            continue
        which = f"{row['model']}, stage {row['stage']}{', compiled' if row['compiled'] else ''}"
        yield f"{which}: tokens/s at least 0.97 of plain torch", _met(ratio, ratio >= 0.97)
        beside = of_fsdp2.get((row["model"], row["compiled"]))
        if beside:
            of_it = ratio / beside
            yield f"{which}: tokens/s at least 1.0 of FSDP2", _met(of_it, of_it >= 1.0)
        if row["peak_nbytes"] and not row["compiled"]:  # a compiled block keeps other activations
            over = row["peak_nbytes"] / (row["planned_nbytes"] + row["activations_nbytes"])
            what = f"{which}: peak memory at most 1.05 of plan and activations"
            yield what, _met(over, over <= 1.05)


def _kernels(rows: list[Row], twin: bool) -> Iterator[Verdict]:
    if codes := [row["bits_equal"] for row in rows if "codes" in row["kernel"]]:
        yield "codes have the host's bits", _yes(all(codes))
    rows = [row for row in rows if "sum" in row["kernel"] or "cast" in row["kernel"]]
    if not rows:
        return
    least = min(row["of_copy"] for row in rows)
    if not twin:
        yield "kernels at least 0.85 of the copy's rate", _met(least, least >= 0.85)
    bits = all(row.get("bits_equal", True) for row in rows)
    yield "sums have the host's bits", _yes(bits)
    known = [row for row in rows if row.get("compiled") is not None]
    if known:
        built = all(row["compiled"] for row in known)
        yield "sums are compiled kernels", _yes(built)
    most = max((row["registers"] for row in known if row["compiled"]), default=0)
    local = max((row["local_nbytes"] for row in known if row["compiled"]), default=0)
    if most:
        met = _met(f"{most} and {local}", most <= 64 and local == 0)
        yield "sums take at most 64 registers and no local memory", met


def _smoke(rows: list[Row]) -> Iterator[Verdict]:
    for row in rows:
        if row.get("said") or "right" in row:
            right = bool(row.get("right"))
            tried = row.get("tried", f"contact: {row.get('part')}")
            yield f"{tried}: works and right", _yes(right)


def _parity(rows: list[Row]) -> Iterator[Verdict]:
    if not rows:
        return
    equal = all(row["bits_equal"] for row in rows)
    yield "stages and transports bit-identical", _yes(equal)
    fp32 = [r["largest_relative_difference"] for r in rows if r["precision"] == "fp32"]
    if fp32:
        yield "fp32 losses within 1e-5 of plain torch", _met(max(fp32), max(fp32) <= 1e-5)


def _collectives(rows: list[Row], twin: bool) -> Iterator[Verdict]:
    bounds = () if twin else (("copy", 0.8), ("mpi", 2.0), ("staged", 5.0))
    for row in rows:
        if row["way"] == "copy":
            continue
        size = f"{row['nbytes'] / 2**20:g} MiB, {row['ranks']} ranks"
        where = f"{row['operation']} of {size}"
        yield f"{where}, {row['way']}: right", _met(str(row["right"]), row["right"])
        if row["way"] != "ipc":
            continue
        same = [r for r in rows if (r["ranks"], r["nbytes"]) == (row["ranks"], row["nbytes"])]
        for other, least in bounds:
            of_it = [r for r in same if r["way"] == other]
            ms = [r["ms"] for r in of_it if r["operation"] in ("copy", row["operation"])]
            if ms:
                ratio = ms[0] / row["ms"]
                sliced = other == "copy" and bool(row.get("time_sliced"))
                met = _met(ratio, ratio >= least, sliced=sliced)
                yield f"{where}: {other} / ipc at least {least}", met


def _yes(right: bool) -> str:
    return _met("yes" if right else "no", right)


def _met(figure: float | str, met: bool, *, sliced: bool = False) -> str:
    verdict = SLICED if sliced else "met" if met else "missed"
    return f"{_text(figure)}, {verdict}"


def write_pages(folder: Path, root: Path = ROOT) -> list[Path]:
    """Write the results in ``folder`` into the pages below ``root``; returns these.

    Raises:
        ConfigError: no results of a device in the folder, or a page without its two marks.
    """
    rows = read_folder(folder)
    where = _where(rows)
    speed = f"\n\n{_speed_table(rows)}" if any(of_kind(rows, "speed")) else " No speed measured."
    texts = (f"{where}\n\n{_goals_table(rows)}", f"{where}{speed}")
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
    """The rows of all runs in a folder, also of those that were cut off. Raises ConfigError: there are none."""
    files = sorted(folder.glob("gpu-*.jsonl")) + sorted(folder.glob("gpu-*.jsonl.unfinished"))
    rows = [row for file in files for row in parse_rows(file)[0]]
    if not any(of_kind(rows, "run")):
        raise ConfigError(
            f"{folder}: no results of python -m scaling.gpu, expected gpu-first.jsonl or others"
        )
    return rows


def _where(rows: list[Row]) -> str:
    head = head_of(rows)
    facts = {row["fact"]: row["value"] for row in of_kind(rows, "facts")}
    device = facts.get("device", "no device was described")
    twin = " **A twin on the host: its times mean nothing.**" if head.get("twin") else ""
    torch = facts.get("torch", head["versions"].get("torch"))
    mpi = facts.get("MPI", "MPI not told")
    return f"{device}, torch {torch}, {mpi}, commit {head['commit']}, {head['date'][:10]}.{twin}"


def _goals_table(rows: list[Row]) -> str:
    lines = [[what, *how.rsplit(", ", 1)] for what, how in goals(rows)]
    failed = [
        [f"{row['check']} on {row['ranks']} ranks", row["said"].partition("\n")[0], "failed"]
        for row in of_kind(rows, "failure")
    ]
    return table(["goal", "seen", "verdict"], [*lines, *failed])


def _speed_table(rows: list[Row]) -> str:
    return table_of(
        speed_ratios(rows),
        {
            "model": lambda one: one[0]["model"],
            "way": lambda one: one[0]["way"] + (", compiled blocks" if one[0]["compiled"] else ""),
            "ms per step": lambda one: f"{one[0]['step_ms_ahead']:.1f}",
            "tokens/s": lambda one: f"{one[0]['tokens_per_s']:,.0f}",
            "TFLOP/s": lambda one: f"{one[0]['tflops']:.0f}",
            "of plain torch": lambda one: "–" if one[1] is None else f"{one[1]:.2f}",
            "peak, GiB": lambda one: f"{one[0]['peak_nbytes'] / GIB:.2f}",
            "planned, GiB": lambda one: (
                f"{one[0]['planned_nbytes'] / GIB:.2f}" if "planned_nbytes" in one[0] else "–"
            ),
        },
    )


REPORT = Report("One GPU: checks and measurements", text)
