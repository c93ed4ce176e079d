"""Tables as text that is also markdown.

Owns: alignment and how numbers with a spread are written. Must not know: what was measured.
"""

from __future__ import annotations

from collections.abc import Sequence

from scaling.evidence.spread import Spread


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table, first column to the left and the others to the right, aligned for a terminal too."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first, *others = zip(cells, widths, strict=True)
        padded = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
        return f"| {' | '.join(padded)} |"

    rule = [f"{'-' * widths[0]}", *(f"{'-' * (width - 1)}:" for width in widths[1:])]
    return "\n".join([line(header), line(rule), *(line(row) for row in rows), ""])


def with_spread(spread: Spread | None, digits: int, scale: float = 1.0) -> str:
    """``median [low, high]``, each times ``scale``; a dash where nothing was measured."""
    if spread is None:
        return "–"
    middle, low, high = (x * scale for x in (spread.median, spread.low, spread.high))
    return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"
