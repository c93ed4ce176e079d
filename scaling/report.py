"""All results as text, and their plots drawn anew: ``python -m scaling.report [FILE ...]``.

Owns: which report belongs to which file. Must not know: how anything was measured.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from hpczero.errors import ConfigError, run
from scaling import checkpoint_report, collectives_report, peers_report, transports_report
from scaling.record import ROOT, Row, read_rows

# By the beginning of a file's name.
TEXT: dict[str, Callable[[list[Row]], str]] = {
    "checkpoint": checkpoint_report.text,
    "collectives": collectives_report.text,
    "peers": peers_report.text,
    "transports": transports_report.text,
}
DRAW: dict[str, Callable[[list[Row], Path], None]] = {
    "checkpoint": checkpoint_report.draw,
    "collectives": collectives_report.draw,
    "peers": peers_report.draw,
    "transports": transports_report.draw,
}


def main() -> int:
    """Print the reports of the files given, or of all in scaling/results; markdown."""
    if any(argument.startswith("-") for argument in sys.argv[1:]):
        sys.stdout.write(f"usage: python -m scaling.report [FILE ...]\n\n{main.__doc__}\n")
        return 0
    paths = [Path(argument) for argument in sys.argv[1:]]
    for path in paths or sorted((ROOT / "scaling" / "results").rglob("*.jsonl")):
        kind = path.name.split("-")[0]
        if kind not in TEXT:
            raise ConfigError(f"{path}: got a file of {kind!r}, expected {', '.join(TEXT)}")
        rows = read_rows(path)
        sys.stdout.write(f"{TEXT[kind](rows)}\n\n")
        DRAW[kind](rows, path.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    run(main)
