"""From options to a mesh: how many ranks share what, and what of that cannot work.

``train``, ``sample`` and ``plan`` ask here, so they refuse alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import gcd, isqrt, prod

from hpczero.errors import ConfigError
from hpczero.job.mesh import DEGREES, Mesh
from hpczero.models.config import GPTConfig
from hpczero.options.config import LayoutOptions

MOST_SHOWN = 16  # ranks that the map names one by one


@dataclass(frozen=True)
class GroupSpan:
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


@lru_cache(maxsize=4096)  # each stage of each layout of a search asks
def span_of(mesh: Mesh, ranks_per_node: int, *names: str, first: int = 0) -> GroupSpan:
    """The group of rank ``first`` that shares the degrees ``names``, on nodes of ``ranks_per_node``.

    Args:
        mesh: of the job.
        ranks_per_node: of each node.
        names: degrees; their ranks differ in these alone.
        first: a rank whose places in these degrees are all 0.
    """
    strides = _strides(mesh, names)
    size = prod(degree for degree, _ in strides)
    last = first + sum((degree - 1) * stride for degree, stride in strides)
    if last - first == size - 1:  # neighbours, of whom a job may have many
        return GroupSpan(size, last // ranks_per_node - first // ranks_per_node + 1)
    members = _members(mesh, names, first)
    return GroupSpan(size, len({rank // ranks_per_node for rank in members}))


def _strides(mesh: Mesh, names: tuple[str, ...]) -> list[tuple[int, int]]:
    """Degree, and distance of neighbours in it, of each of the names."""
    return [
        (degree, prod(mesh.degrees[place + 1 :]))
        for place, (name, degree) in enumerate(zip(DEGREES, mesh.degrees, strict=True))
        if name in names
    ]


def _members(mesh: Mesh, names: tuple[str, ...], first: int) -> Iterator[int]:
    """Ranks of one group, without a look at the others."""
    strides = _strides(mesh, names)
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


def divisors(number: int) -> list[int]:
    """All divisors of ``number``, ascending."""
    small = [size for size in range(1, isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def mesh_of(options: LayoutOptions, ranks: int, ranks_per_node: int) -> Mesh:
    """The mesh that the options mean. Nodes are filled with ranks one after the other. Not collective.

    ``parallel.shard node`` is the largest degree with which no group of shards leaves its node.

    Args:
        options: degrees.
        ranks: of the job.
        ranks_per_node: of each node; the last one may have fewer.

    Raises:
        ConfigError: the degrees do not multiply to the ranks; tensor groups would lie on several nodes; shards of a
            node have no two ranks there; a secondary shard would save nothing.

    Source: groups of shards inside a node: Zhang et al., MiCS, arXiv 2205.00119; a second one: Wang et al.,
    ZeRO++, arXiv 2306.10209, sec. 3.2.
    """
    given = {"pipeline": options.pipeline, "sequence": options.context, "tensor": options.tensor}
    left = Mesh.of(ranks, **given).shard
    local = max(min(ranks_per_node, ranks), 1)
    if options.tensor > 1 and local % options.tensor and not options.spread_tensor:
        raise ConfigError(
            f"parallel.tensor: got {options.tensor}, which does not divide the {local} rank(s) of a node, so ranks "
            "that share every product would lie on several nodes; expected a divisor of it, or "
            "parallel.spread_tensor true (slow)"
        )
    shard = _shards(options, left, local)
    if left % shard:
        raise ConfigError(
            f"parallel.shard: got {shard}, expected a divisor of the {left} rank(s) that pipeline {options.pipeline}, "
            f"context {options.context} and tensor {options.tensor} leave of {ranks}, or world or node"
        )
    mesh = Mesh.of(ranks, shard=shard, replicate=left // shard, **given)
    if options.secondary:
        _check_secondary(mesh, local)
    return mesh


def mesh_on_nodes(options: LayoutOptions, nodes: Sequence[int]) -> Mesh:
    """The mesh that the options mean for ranks that lie on these nodes. Not collective.

    Args:
        options: degrees.
        nodes: node of each rank, as the job has found them.

    Raises:
        ConfigError: as ``mesh_of`` and ``check_on_nodes``.
    """
    per_node = max(Counter(nodes).values())
    mesh = mesh_of(options, len(nodes), per_node)
    check_on_nodes(mesh, nodes, spread_tensor=options.spread_tensor)
    return mesh


def check_on_nodes(mesh: Mesh, nodes: Sequence[int], *, spread_tensor: bool) -> None:
    """Refuse tensor groups that lie on several nodes, whatever the order in which the launcher has placed ranks.

    Args:
        mesh: of the job.
        nodes: node of each rank, as the job has found them.
        spread_tensor: whether that is allowed.

    Raises:
        ConfigError: names the first such group and its nodes.
    """
    if spread_tensor or mesh.tensor == 1:
        return
    for first in range(0, mesh.size, mesh.tensor):
        group = range(first, first + mesh.tensor)
        found = [nodes[rank] for rank in group]
        if len(set(found)) > 1:
            raise ConfigError(
                f"parallel.tensor: ranks {group[0]} to {group[-1]} share every product and lie on nodes "
                f"{', '.join(map(str, sorted(set(found))))}; expected one node: start ranks node after node (mpirun "
                "--map-by core, srun --distribution=block), or take a tensor degree that divides the ranks of a node, "
                f"or parallel.spread_tensor true (slow)"
            )


def check_micro_batches(options: LayoutOptions, micro_batches: int) -> None:
    """Refuse a number of micro-batches that the schedule cannot run.

    Args:
        options: the pipeline.
        micro_batches: forwards of a step.

    Raises:
        ConfigError: names both numbers and what would do.
    """
    if options.interleave > 1 and micro_batches % options.pipeline:
        more = -(-micro_batches // options.pipeline) * options.pipeline
        raise ConfigError(
            f"parallel.interleave: got {options.interleave} groups of blocks with {micro_batches} micro-batch(es) for "
            f"{options.pipeline} stages, which run them in groups of {options.pipeline}; expected a multiple, such as "
            f"train.accumulation {more}, or parallel.interleave 1"
        )


def check_model(options: LayoutOptions, model: GPTConfig) -> None:
    """Refuse degrees that this model cannot be cut into.

    Args:
        options: degrees.
        model: sizes.

    Raises:
        ConfigError: names the degree, the size it does not suit, and what would.
    """
    if options.pipeline > model.layers:
        raise ConfigError(
            f"parallel.pipeline: got {options.pipeline} stages for a model of {model.layers} block(s), "
            f"expected at most {model.layers}"
        )
    parts = options.pipeline * options.interleave
    if parts > model.layers:
        raise ConfigError(
            f"parallel.interleave: got {options.interleave} groups on each of {options.pipeline} stages = {parts} for "
            f"a model of {model.layers} block(s), expected at most {model.layers // options.pipeline} group(s)"
        )
    if options.tensor > model.heads:
        raise ConfigError(
            f"parallel.tensor: got {options.tensor} for a model of {model.heads} attention head(s), so some ranks "
            f"would have none; expected at most {model.heads}"
        )
    shares = options.context * (options.tensor if options.context > 1 else 1)
    if model.heads % shares:
        beside = f" beside tensor {options.tensor}" if options.tensor > 1 else ""
        raise ConfigError(
            f"parallel.context: got {options.context}{beside} for a model of {model.heads} attention heads, which each "
            f"rank must have as many of; expected a product that divides {model.heads}"
        )
    if model.context % options.context:
        raise ConfigError(
            f"parallel.context: got {options.context} for sequences of {model.context} tokens (model.context), "
            f"expected a divisor of {model.context}"
        )


def _shards(options: LayoutOptions, left: int, local: int) -> int:
    """Degree of shards of ``left`` ranks."""
    if options.shard == "world":
        return left
    if options.shard != "node":
        return int(options.shard)
    inside = options.context * options.tensor
    shard = gcd(left, local // inside) if local % inside == 0 else 1
    if shard == 1 and left > 1:
        raise ConfigError(
            f"parallel.shard: got node, but context {options.context} and tensor {options.tensor} leave no two of the "
            f"{local} rank(s) of a node to share anything with; expected world, a number, or smaller degrees"
        )
    return shard


def _check_secondary(mesh: Mesh, local: int) -> None:
    """Refuse a second shard inside the node where all of the first one is there already."""
    width = mesh.shard * mesh.sequence * mesh.tensor
    if mesh.shard * mesh.sequence == 1 or (width <= local and local % width == 0):
        raise ConfigError(
            f"parallel.secondary: got true, but the {mesh.shard * mesh.sequence} rank(s) that share parameters lie on "
            "one node already, so nothing between nodes would be saved; expected a larger parallel.shard, or "
            "parallel.secondary false"
        )
