"""Shards tile the flat buffer and overlaps tile every parameter, whatever the shapes and the number of ranks."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hpczero.plan.footprint import (
    EXCHANGE_BYTES,
    EXCHANGE_MESSAGES,
    FEW_NODES,
    GATHER_MESSAGES,
    LEAST_BYTES,
    SHORT_MESSAGES,
    exchange_chunk,
    gather_messages,
    gather_round,
    node_chunk,
    rail_chunk,
    rail_messages,
    rail_nbytes,
)
from hpczero.plan.layout import ShardLayout

Shapes = list[tuple[int, ...]]

shapes = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=8)
ranks = st.integers(1, 40)
aligns = st.sampled_from([1, 2, 7, 64])


def pack(parameter_shapes: Shapes, num_shards: int, align: int) -> ShardLayout:
    named = [(f"p{index}", shape) for index, shape in enumerate(parameter_shapes)]
    return ShardLayout.pack(named, num_shards, align=align)


@given(shapes, ranks, aligns)
@example([], 3, 64)
@example([(0,), (0, 5)], 4, 64)  # parameters, and not one element
@example([(3,)], 5, 1)  # more ranks than elements
def test_shard_ranges_tile_the_buffer(
    parameter_shapes: Shapes, num_shards: int, align: int
) -> None:
    layout = pack(parameter_shapes, num_shards, align)
    owned = [element for rank in range(num_shards) for element in layout.shard_range(rank)]
    assert owned == list(range(sum(prod(shape) for shape in parameter_shapes)))


@given(shapes, ranks, aligns)
@example([(7, 15), (15,), (0,), (1,)], 3, 64)
def test_overlaps_tile_every_parameter(
    parameter_shapes: Shapes, num_shards: int, align: int
) -> None:
    layout = pack(parameter_shapes, num_shards, align)
    for slot in layout.slots:
        parts = [layout.overlap(rank, slot.name) for rank in range(num_shards)]
        assert [e for part in parts for e in part] == list(range(prod(slot.shape)))
        for rank, part in enumerate(parts):  # and each part is what the rank's shard holds of it
            inside = {slot.offset + element for element in part}
            mine = {e for e in layout.shard_range(rank) if slot.offset <= e < slot.stop}
            assert inside == mine


@given(shapes, ranks, aligns)
def test_padding_is_less_than_one_alignment_per_shard(
    parameter_shapes: Shapes, num_shards: int, align: int
) -> None:
    layout = pack(parameter_shapes, num_shards, align)
    assert layout.shard_numel % align == 0
    assert layout.padded_numel == layout.shard_numel * num_shards
    assert layout.padded_numel >= layout.numel
    # an even cut rounded up, then the alignment
    assert layout.shard_numel < layout.numel / num_shards + 1 + align


@given(shapes)
def test_parameters_lie_end_to_end_in_the_given_order(parameter_shapes: Shapes) -> None:
    layout = pack(parameter_shapes, 2, 64)
    assert [slot.shape for slot in layout.slots] == parameter_shapes
    ends = [0, *(slot.stop for slot in layout.slots)]
    assert [slot.offset for slot in layout.slots] == ends[:-1]
    for slot in layout.slots:
        assert layout.slot(slot.name) is slot


@pytest.mark.parametrize(("num_shards", "align"), [(0, 1), (-1, 1), (1, 0)])
def test_counts_below_one_and_repeated_names_are_refused(num_shards: int, align: int) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        ShardLayout.pack([("p", (2,))], num_shards, align=align)
    with pytest.raises(ValueError, match="must be distinct"):
        ShardLayout.pack([("p", (2,)), ("p", (3,))], 2)


@given(st.integers(0, 2**31), st.integers(1, 100_000), st.sampled_from([2, 4]))
def test_exchange_blocks_fit_the_bound(shard_numel: int, num_shards: int, itemsize: int) -> None:
    chunk = exchange_chunk(shard_numel, num_shards, itemsize)
    bound = max(EXCHANGE_BYTES, LEAST_BYTES * num_shards)
    assert chunk <= shard_numel
    assert chunk * num_shards * itemsize <= bound
    if chunk < shard_numel:  # and no smaller than need be, in steps of what loads take at once
        assert chunk % 64 == 0
        assert (chunk + 64) * num_shards * itemsize > bound


@pytest.mark.parametrize("ranks", range(1, 25))
@pytest.mark.parametrize("itemsize", [2, 4])
def test_chunks_begin_where_a_device_loads_16_bytes_at_a_time(ranks: int, itemsize: int) -> None:
    shard_numel = 64 * 1_000_003
    chunks = [
        exchange_chunk(shard_numel, ranks, itemsize),
        node_chunk(ranks, itemsize, EXCHANGE_BYTES, 2**30),
        *(rail_chunk(shard_numel, ranks, itemsize, nbytes) for nbytes in (2**16, 2**22, 100_000)),
    ]
    assert all(chunk > 1000 for chunk in chunks)
    assert all(chunk * itemsize % 16 == 0 for chunk in chunks), chunks


def test_chunks_of_a_few_elements_go_on_all_the_same() -> None:
    assert node_chunk(3, 4, 2**30, 20) == 5
    assert node_chunk(3, 4, 2**30, 1) == 1


# --- rounds between nodes: few messages, and buffers no larger than that takes


numels = st.integers(0, 2**31)
nodes_of = st.integers(2, 20_000)
itemsizes = st.sampled_from([2, 4])
rounds = st.sampled_from([24, 2**16, 2**22])


@given(numels, nodes_of, itemsizes, rounds)
def test_one_call_sends_a_bounded_number_of_messages(
    numel: int, nodes: int, itemsize: int, wished: int
) -> None:
    short = SHORT_MESSAGES if nodes <= FEW_NODES and wished <= LEAST_BYTES else 0
    assert rail_messages(numel, nodes, itemsize, wished) <= max(EXCHANGE_MESSAGES, nodes - 1, short)
    assert gather_messages(numel, nodes, wished) <= max(GATHER_MESSAGES, nodes - 1, short)


@given(st.integers(1, 2**25), st.integers(2, FEW_NODES), st.sampled_from([2**14, 2**16, 2**18]))
def test_short_rounds_between_few_nodes_are_as_long_as_wished(
    nbytes: int, nodes: int, wished: int
) -> None:
    """Up to 16 MiB to each of 16 peers by 64 KiB; where rounds are longer, links wait for sums."""
    fits = -(-nbytes // wished) <= SHORT_MESSAGES // (nodes - 1)
    assert not fits or gather_round(nbytes, nodes, wished) == min(nbytes, wished)
    assert not fits or rail_chunk(nbytes // 4, nodes, 4, wished) == max(min(nbytes, wished) // 4, 1)


@given(numels, nodes_of, itemsizes, rounds)
def test_messages_are_as_long_as_wished_or_at_least_the_least_or_the_whole_block(
    numel: int, nodes: int, itemsize: int, wished: int
) -> None:
    chunk = rail_chunk(numel, nodes, itemsize, wished)
    assert chunk <= max(numel, 1)
    assert chunk * itemsize >= min(numel * itemsize, LEAST_BYTES, wished)
    assert chunk % 64 == 0 or chunk == max(numel, 1)
    assert gather_round(numel, nodes, wished) >= min(numel, wished)


@given(numels, nodes_of, itemsizes)
def test_buffers_never_pass_two_blocks_to_and_two_from_every_node(
    numel: int, nodes: int, itemsize: int
) -> None:
    held, blocks = rail_nbytes(numel, nodes, itemsize), 2 * nodes * max(numel, 1) * itemsize
    aligned = 4 * nodes * 64 * itemsize
    assert held <= 2 * blocks + aligned
    allowed = max(EXCHANGE_BYTES, 4 * nodes * LEAST_BYTES)
    few = 4 * nodes * numel * itemsize * (nodes - 1) // max(EXCHANGE_MESSAGES - nodes + 2, 1)
    assert held <= max(allowed, few) + aligned or held <= blocks


@pytest.mark.parametrize(
    ("shard_numel", "nodes", "chunk", "messages"),
    [
        (2**20, 4, 2**14, 64 * 3),  # few nodes: 64 KiB
        (2**23, 4, 2**14, 512 * 3),  # still, where a block is long
        (1_132_672, 50, 226_560, 5 * 49),  # a block of gpt-60b on 400 ranks, 8 on a node
        (1_132_672, 25, 113_280, 10 * 24),  # 16 on a node
        (110_613, 512, 110_613, 511),  # 4,096 ranks: at once
        (4_531, 12_500, 4_531, 12_499),  # 100,000 ranks
    ],
)
def test_a_reduction_by_hand(shard_numel: int, nodes: int, chunk: int, messages: int) -> None:
    assert rail_chunk(shard_numel, nodes, 4) == chunk
    assert rail_messages(shard_numel, nodes, 4) == messages
