"""Which lines differ between a rank and rank ``root``.

Owns: the comparison. Must not know: what the lines say, what is told of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpczero.job.group import Group


def unlike(group: Group, mine: Sequence[str], root: int = 0) -> tuple[str, str] | None:
    """Lines that only this rank has, and lines that only ``root`` has; None if both have the same. Collective.

    Args:
        group: the ranks that are compared.
        mine: lines of this rank, in an order that counts.
        root: rank of the group whose lines are expected.

    Returns:
        Two texts, each with ``; `` between its lines, or ``nothing``.
    """
    text = group.broadcast_text("\n".join(mine), root)
    expected = text.split("\n") if text else []
    if list(mine) == expected:
        return None
    more = "; ".join(line for line in mine if line not in expected)
    less = "; ".join(line for line in expected if line not in mine)
    return more or "nothing", less or "nothing"
