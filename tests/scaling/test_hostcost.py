"""The host cost of large jobs: counts of a real run against the plan and against counts by hand; sums of the report."""

from __future__ import annotations

import dataclasses

import pytest

from hpczero.errors import ConfigError, HpcZeroError
from scaling.evidence.record import ROOT, Row
from scaling.hostcost.__main__ import (
    OTHER,
    THIS,
    Options,
    measured,
    planned_messages,
    seconds,
    text,
)
from tests.scaling.studies import head

SMALL = Options(ranks=(48,), ranks_per_node=(8,))
BLOCKS, BLOCK = (
    132,
    12 * 6144**2 + 13 * 6144,
)  # units of gpt-60b beside the rest, and their elements


@pytest.fixture(scope="module")
def row() -> Row:
    """Six nodes of eight ranks."""
    return measured(ROOT, SMALL, 48, 8)


def test_counts_are_those_of_the_plan(row: Row) -> None:
    assert row["messages"] == planned_messages("gpt-60b", "bf16", 48, 8)
    assert row["units"] == BLOCKS + 1


def test_counts_of_a_block_are_those_by_hand(row: Row) -> None:
    shard = -(-BLOCK // 48)
    # rounds of 4 MiB both ways; buffers of 128 MiB would leave more for each of 6 nodes
    chunk = min(2**22, 128 * 2**20 // (4 * 6)) // 4
    assert row["gather_messages"] == 5 * -(-2 * shard // 2**22)
    assert row["reduce_messages"] == 5 * -(-shard // chunk)
    assert row["exchange_nbytes"] == 4 * 6 * chunk * 4


def test_agreements_are_sums_and_no_lists_of_ranks(row: Row) -> None:
    # 64 bytes and a flag for each unit; two numbers of 69 digits; one integer
    assert row["agreements_nbytes"] == 64 + BLOCKS + 1 + 2 * 69 * 8 + 8


def test_sums_are_one_for_all_peers_of_a_round_and_one_over_nodes(row: Row) -> None:
    rounds = row["reduce_messages"] // 5
    # one launch over eight ranks of a node, whose rows have gaps, and one over nodes
    rest = row["kernels"] - 2 * BLOCKS * rounds
    assert 0 < rest <= 4 * rounds  # the other unit's
    assert row["operations"] == 0


def test_a_sum_over_more_nodes_than_a_kernel_reads_is_several_launches() -> None:
    small = Options(model="gpt2", ranks=(160,), ranks_per_node=(4,))
    found = measured(ROOT, small, 160, 4)
    rounds = found["reduce_messages"] // 39
    # 40 nodes are two subtrees and the tree over them; four ranks of a node are one launch
    blocks = 12 * (3 + 1) * rounds
    assert blocks <= found["kernels"] <= blocks + 4 * rounds * 4


def test_times_of_all_parts_are_there(row: Row) -> None:
    assert all(row[f"{part}_s"] > 0 for part in ("gather", "exchange", "agreements"))


def case(tree: str, ranks: int, kernels: int) -> Row:
    return {
        "kind": "case",
        "tree": tree,
        "ranks": ranks,
        "ranks_per_node": 8,
        "gather_messages": 49,
        "reduce_messages": 245,
        "messages": 45_619,
        "exchange_nbytes": 2**20,
        "gather_s": 0.25,
        "exchange_s": 0.5,
        "kernels": kernels,
        "operations": 3_000,
        "agreements_s": 0.125,
    }


def test_the_report_charges_launches_and_names_both_checkouts() -> None:
    first = head(model="gpt-60b", precision="bf16", kernel_us=20.0, operation_us=5.0, against="def")
    rows = [first, case(THIS, 400, 500), case(OTHER, 400, 1_000_000)]
    assert seconds(rows[1], first) == pytest.approx(0.25 + 0.5 + 0.125 + 0.01 + 0.015)
    said = text(rows)
    assert "400 x 8, abc" in said
    assert "400 x 8, def" in said
    assert "0.9 " in said
    assert "20.9" in said


@pytest.mark.parametrize(
    ("name", "value"),
    [("model", "gpt-61b"), ("precision", "int8"), ("ranks", (401,)), ("against", "/nowhere")],
)
def test_impossible_options_are_told(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"--{name}: got"):
        dataclasses.replace(SMALL, **{name: value})  # type: ignore[arg-type]


def test_a_case_that_fails_says_why() -> None:
    broken = dataclasses.replace(SMALL)
    object.__setattr__(broken, "model", "gpt-61b")  # as of a checkout without this preset
    with pytest.raises(
        HpcZeroError, match=r"48 ranks with the code of .*: exit code 1; it said: [^$]*gpt-61b"
    ):
        measured(ROOT, broken, 48, 8)
