"""Who carries what between nodes of different sizes, against a map of every single element."""

from __future__ import annotations

from itertools import product

import numpy as np
import numpy.typing as npt
import pytest

from hpczero.plan.footprint import Carriers

NODES = (
    ((0, 1, 2), (3,)),
    ((0,), (1, 2, 3)),
    ((0, 2), (1, 4), (3,)),
    ((0, 1, 2, 3, 4, 5, 6, 7), (8, 9, 10), (11, 12, 13, 14, 15)),
    ((0,), (1,), (2, 3)),
)
COUNTS = (0, 1, 7, 64, 100, 640, 1000, 4096)
UNIT = 64  # elements at whose multiples parts begin


def views(nodes: tuple[tuple[int, ...], ...]) -> list[Carriers]:
    """The division as each rank sees it."""
    return [
        Carriers(nodes, node, local)
        for node, ranks in enumerate(nodes)
        for local in range(len(ranks))
    ]


def carriers_of_elements(view: Carriers, far: int, count: int) -> npt.NDArray[np.int64]:
    """(shards of ``far``, count): the local rank of ``view``'s node that carries each element; -1 for nobody."""
    found = np.full((len(view.nodes[far]), count), -1)
    for local in range(view.size):
        for piece in view.carried(local, far, count):
            part = found[view.nodes[far].index(piece.rank)][piece.start : piece.start + piece.numel]
            assert (part == -1).all(), "carried twice"
            part[:] = local
    return found


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("nodes", NODES)
def test_each_element_of_another_node_is_carried_once_and_all_ranks_carry_as_much(
    nodes: tuple[tuple[int, ...], ...], count: int
) -> None:
    for near, far in product(range(len(nodes)), repeat=2):
        if near == far:
            continue
        view = Carriers(nodes, near, 0)
        found = carriers_of_elements(view, far, count)
        assert (found >= 0).all()
        assert (np.diff(found.ravel()) >= 0).all(), "parts follow one another"
        held = np.bincount(found.ravel(), minlength=view.size)
        even = found.size / view.size
        short = min(UNIT, count)  # what alignment may move, at either end
        assert (np.abs(held - even) <= short).all(), f"{held}, {even} each"
        begins = np.flatnonzero(np.diff(found, prepend=-2, axis=1).ravel()) % max(count, 1)
        assert (begins % UNIT == 0).all(), f"{begins}"


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("nodes", NODES)
def test_an_owner_knows_who_carries_its_shard(
    nodes: tuple[tuple[int, ...], ...], count: int
) -> None:
    for view in views(nodes):
        for far in set(range(len(nodes))) - {view.node}:
            theirs = carriers_of_elements(Carriers(nodes, far, 0), view.node, count)[view.local]
            mine = np.full(count, -1)
            for piece in view.takers(far, count):
                mine[piece.start : piece.start + piece.numel] = nodes[far].index(piece.rank)
            assert (mine == theirs).all()


@pytest.mark.parametrize(
    ("shard", "chunk"), [(1000, 128), (1000, 1000), (228, 128), (64, 7), (0, 5)]
)
@pytest.mark.parametrize("nodes", NODES)
def test_sums_are_those_of_the_pieces(
    nodes: tuple[tuple[int, ...], ...], shard: int, chunk: int
) -> None:
    for view in views(nodes):
        others = [far for far in range(len(nodes)) if far != view.node]
        rounds = [min(chunk, shard - start) for start in range(0, shard, chunk)]
        pieces = [
            [piece for far in others for piece in view.carried(view.local, far, count)]
            for count in rounds
        ]
        each = [sum(piece.numel for piece in several) for several in pieces]
        assert view.reduced_numel(shard, chunk) == sum(each)
        assert view.reduce_messages(shard, chunk) == sum(map(len, pieces))
        if rounds[:1] == [chunk]:
            assert view.carried_numel(chunk) == each[0]
        turns = 2 if chunk < shard else 1
        row = max(each, default=0) + len(nodes) * chunk
        assert view.exchange_numel(shard, chunk) == turns * row
        for nbytes in (1, 96, 10**6):
            messages = sum(
                len(range(0, piece.numel * 4, nbytes))
                for far in others
                for piece in view.takers(far, shard)
            )
            assert view.gather_messages(shard, 4, nbytes) == messages
        for far in others:
            most = max(len(view.carried(local, far, shard)) for local in range(view.size))
            assert view.most_pieces(far, shard) == most


@pytest.mark.parametrize("nodes", NODES)
def test_a_node_sends_each_element_to_each_other_node_once(
    nodes: tuple[tuple[int, ...], ...],
) -> None:
    shard, ranks = 6400, sum(map(len, nodes))
    for node, members in enumerate(nodes):
        mine = [view for view in views(nodes) if view.node == node]
        reduced = sum(view.reduced_numel(shard, 640) for view in mine)
        assert reduced == (ranks - len(members)) * shard
        gathered = sum(
            piece.numel
            for view in mine
            for far in set(range(len(nodes))) - {node}
            for piece in view.takers(far, shard)
        )
        assert gathered == (len(nodes) - 1) * len(members) * shard


@pytest.mark.parametrize("nodes", [((0, 1, 2), (3,)), ((0, 1), (2, 3), (4,))])
def test_bytes_on_a_nodes_link_are_at_most_a_tenth_more_than_between_even_nodes(
    nodes: tuple[tuple[int, ...], ...],
) -> None:
    """In both directions together: who has more ranks gives more in a gather, and takes more in a reduction."""
    many, ranks = len(nodes), sum(map(len, nodes))
    numel = 64 * 60 * ranks
    shard, even = numel // ranks, 2 * numel * (many - 1) / many
    sent = [
        sum(v.reduced_numel(shard, shard) for v in views(nodes) if v.node == node)
        for node in range(many)
    ]
    for node, members in enumerate(nodes):
        # By hand: each of its shards from each other node
        received = (many - 1) * len(members) * shard
        assert sent[node] + received <= 1.1 * even
    assert sum(sent) == (many - 1) * numel
