"""Rounds between nodes: few messages whatever the number of nodes, buffers that are no larger than that takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpczero.plan.footprint import (
    EXCHANGE_BYTES,
    EXCHANGE_MESSAGES,
    FEW_NODES,
    GATHER_MESSAGES,
    LEAST_BYTES,
    SHORT_MESSAGES,
    gather_messages,
    gather_round,
    rail_chunk,
    rail_messages,
    rail_nbytes,
)

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
