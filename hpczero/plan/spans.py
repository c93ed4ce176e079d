"""Spans: how the groups of a mesh lie on nodes that are filled one after the other.

Owns: how many nodes a group touches, and the map of ranks as text. Must not know: MPI, torch, what groups exchange.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

from hpczero.job.mesh import DEGREES, Mesh

MOST_SHOWN = 16  # ranks that the map names one by one


@dataclass(frozen=True)
class Span:
    """A group and its nodes.

    Attributes:
        size: number of ranks.
        nodes: number of nodes that they are on.
    """

    size: int
    nodes: int

    @property
    def local(self) -> int:
        """Ranks of the group on the node that has most of them."""
        return -(-self.size // self.nodes)


def span_of(mesh: Mesh, ranks_per_node: int, *names: str, first: int = 0) -> Span:
    """The group of rank ``first`` that shares the degrees ``names``, on nodes of ``ranks_per_node``.

    Args:
        mesh: of the job.
        ranks_per_node: of each node.
        names: degrees; their ranks differ in these alone.
        first: a rank whose places in these degrees are all 0.
    """
    members = list(_members(mesh, names, first))
    return Span(len(members), len({rank // ranks_per_node for rank in members}))


def _members(mesh: Mesh, names: tuple[str, ...], first: int) -> Iterator[int]:
    """Ranks of one group, without a look at the others: a job may have many."""
    strides = [
        (degree, prod(mesh.degrees[place + 1 :]))
        for place, (name, degree) in enumerate(zip(DEGREES, mesh.degrees, strict=True))
        if name in names
    ]
    for places in product(*(range(degree) for degree, _ in strides)):
        yield first + sum(p * stride for p, (_, stride) in zip(places, strides, strict=True))


def rank_map(mesh: Mesh, ranks_per_node: int) -> list[str]:
    """Lines that say which rank has which place; one for each rank of a small job, else one for each kind of group.

    Args:
        mesh: of the job.
        ranks_per_node: of each node.
    """
    used = [name for name, degree in zip(DEGREES, mesh.degrees, strict=True) if degree > 1]
    nodes = -(-mesh.size // ranks_per_node)
    degrees = " x ".join(f"{name} {getattr(mesh, name)}" for name in used) or "one rank"
    lines = [f"{mesh.size} rank(s) on {nodes} node(s): {degrees}, slowest first"]
    if mesh.size <= MOST_SHOWN:
        columns = used or ["shard"]
        lines.append("  " + "".join(f"{title:>10}" for title in ("rank", "node", *columns)))
        for rank in range(mesh.size):
            places = dict(zip(DEGREES, mesh.coordinates(rank), strict=True))
            cells = (rank, rank // ranks_per_node, *(places[name] for name in columns))
            lines.append("  " + "".join(f"{cell:>10}" for cell in cells))
        return lines
    for name in reversed(used):
        span = span_of(mesh, ranks_per_node, name)
        members = list(_members(mesh, (name,), 0))
        step = members[1] - members[0]
        shown = ", ".join(map(str, members[:3])) + (f", ... {members[-1]}" if span.size > 3 else "")
        where = "on one node" if span.nodes == 1 else f"on {span.nodes} nodes"
        lines.append(
            f"  {name:<10}{span.size:>6} ranks, every {step}{_th(step)}, {where}: first group {shown}"
        )
    return lines


def _th(number: int) -> str:
    if number % 100 in (11, 12, 13):
        return "th"
    return {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
