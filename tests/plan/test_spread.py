"""Bytes held and sent where ranks share layers, blocks and tokens: against plain ZeRO, and numbers by hand."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from hpczero.job.mesh import Mesh
from hpczero.models.config import GPTConfig, parameter_count
from hpczero.plan.degrees import GroupSpan, rank_map, span_of
from hpczero.plan.footprint import footprint_of
from hpczero.plan.peak import PlannedRun
from hpczero.plan.precision import DType
from hpczero.plan.sent import Wire, sent_by
from hpczero.plan.sizing import ForwardSizes
from hpczero.plan.spread import Spread, bubble, forwards_alive

MODEL = GPTConfig(vocab_size=101, context=12, layers=5, hidden=24, heads=4)
ROUND = GPTConfig(vocab_size=512, context=64, layers=8, hidden=64, heads=8, positions="rotary")


@pytest.mark.parametrize("transport", ["flat", "hierarchical", "window", "ipc"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_without_other_degrees_it_is_the_plan_of_zero(
    transport: Any, stage: int, precision: str
) -> None:
    spread = Spread(
        MODEL,
        Mesh(shard=8),
        4,
        stage=stage,
        precision=precision,
        micro_batch=3,
        accumulation=2,
        transport=transport,
    )
    run = PlannedRun(**vars(spread))
    shares = spread.shares(0)
    assert shares.states == run.memory.states
    assert (shares.unsharded, shares.exchange) == (run.memory.unsharded, run.memory.exchange)
    assert shares.activations == run.activations
    assert (shares.secondary, shares.held, shares.boundary) == (0, 0, 0)
    assert shares.total + run._copied == run.most
    sent = sent_by(spread, 0)
    footprint = footprint_of(transport, ranks=8, local_size=4)
    traffic = run.plan.traffic(micro_steps=2, footprint=footprint)
    assert sent.total.nbytes == traffic.nbytes
    assert (sent.all_gathers, sent.reduce_scatters) == (
        traffic.all_gathers,
        traffic.reduce_scatters,
    )
    assert sent.shards == sent.total


@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
def test_activations_of_a_block_are_korthikantis_without_masks_of_dropout(tensor: int) -> None:
    model = GPTConfig(vocab_size=101, context=64, layers=8, hidden=64, heads=8)
    sbh = 64 * 2 * 64  # sequence x batch x hidden
    plain = ForwardSizes(model, 128, 2, 1, tensor=tensor)
    assert plain.forward_nbytes == sbh * (8 + 24 / tensor)
    parallel = ForwardSizes(model, 128, 2, 1, tensor=tensor, sequence_parallel=True)
    assert parallel.forward_nbytes == sbh * (4 + 28 / tensor)  # theirs gathers once more
    inputs = ForwardSizes(model, 128, 2, 1, tensor=tensor, checkpointing=True)
    assert inputs.forward_nbytes == 2 * sbh


def test_forwards_alive_follow_the_schedule() -> None:
    def alive(schedule: Any, micro: int, interleave: int = 1) -> list[Fraction]:
        return [
            forwards_alive(
                schedule, stage=s, pipeline=4, micro_batches=micro, interleave=interleave
            )
            for s in range(4)
        ]

    assert alive("1f1b", 8) == [4, 3, 2, 1]
    assert alive("1f1b", 2) == [2, 2, 2, 1]
    assert alive("gpipe", 8) == [8, 8, 8, 8]
    # p (1 + (p - 1) / (p v)) of a stage's blocks: 4 (1 + 3 / 8)
    assert alive("interleaved", 8, 2) == [Fraction(11, 2), Fraction(9, 2), Fraction(7, 2), 2.5]
    assert alive("interleaved", 1, 2) == [1, 1, 1, 1]


def test_bubble_is_the_formula() -> None:
    assert bubble(pipeline=4, micro_batches=8) == Fraction(3, 8)
    assert bubble(pipeline=8, micro_batches=32) == Fraction(7, 32)
    assert bubble(pipeline=4, micro_batches=8, interleave=2) == Fraction(3, 16)
    assert bubble(pipeline=1, micro_batches=8) == 0


def test_states_of_tensor_ranks_and_stages_add_up_to_the_whole_model() -> None:
    mesh = Mesh(pipeline=4, shard=2, tensor=4)
    spread = Spread(ROUND, mesh, 8, stage=3, precision="bf16")
    # Of each rank's part: whole on all four ranks are two norms and two biases of a block, and the final norm.
    hidden, ranks = 64, 8
    whole = 3 * (8 * 6 * hidden + 2 * hidden)
    twice = 512 * hidden  # the tied weight, on two stages
    padding = sum(spread.plan_of(place).padding_numel for place in range(4)) * 4
    numel = parameter_count(ROUND) + whole + twice + padding
    owned = sum(spread.shares(place).master for place in range(4)) * ranks // 4
    assert owned == numel


def test_shares_by_hand_under_a_pipeline() -> None:
    mesh = Mesh(pipeline=2, shard=2)
    spread = Spread(ROUND, mesh, 2, stage=3, precision="bf16", micro_batch=2, accumulation=4)
    block = 12 * 64 * 64 + 13 * 64
    padded = -(-block // 128) * 128
    table = 512 * 64
    first, last = (spread.shares(place) for place in range(2))
    assert first.held == 2 * (4 * padded + table)
    assert last.held == 2 * (4 * padded + table + 128)  # the final norm
    assert first.parameters == 0
    assert first.master == 4 * (4 * padded + table) // 2
    assert first.optimizer == 2 * first.master == 2 * first.gradients
    # Gradients alone, in use: the largest block beside the others' one; parameters are in what is held.
    assert first.unsharded <= 2 * (table + 2 * padded)
    tokens = 2 * 64
    output = tokens * 64 * 2
    # one in and one out on the one side, and two outputs that have gone
    assert first.boundary == 2 * output + 2 * output
    assert last.boundary == 2 * output
    kept = (4 + 4 + 8 + 3) * 64 * tokens * 2  # of one block, rotary
    assert first.activations == 2 * 4 * kept + 5 * 64 * tokens * 2
    assert spread.worst == 0


def test_second_shard_takes_its_part_of_the_node_and_saves_a_quarter_between_nodes() -> None:
    plain = Spread(ROUND, Mesh(shard=8), 4, stage=3, precision="bf16")
    second = Spread(ROUND, Mesh(shard=8), 4, stage=3, precision="bf16", secondary=True)
    whole = 2 * sum(unit.layout.padded_numel for unit in plain.plan.units)
    assert second.shares(0).secondary == whole // 4
    assert second.shares(0).states - plain.shares(0).states == whole // 4
    before, after = sent_by(plain, 0).shards, sent_by(second, 0).shards
    # Bf16: 8 Psi of which 2 are gathered for backward
    assert before.between * 6 == after.between * 8
    assert sent_by(plain, 0).all_gathers == sent_by(second, 0).all_gathers
    # forward: 3 peers and 2 nodes; backward: quarters of all to three peers
    shard = whole // 2 // 8
    assert after.inside - before.inside == 3 * (whole // 4) - 6 * shard * 2


@pytest.mark.parametrize(("reduce", "nbytes"), [("fp32", 4), ("bf16", 2)])
def test_replicas_reduce_their_shard_in_the_dtype_of_partial_sums_and_gather_it_in_fp32(
    reduce: DType, nbytes: int
) -> None:
    spread = Spread(ROUND, Mesh(replicate=3, shard=4), 4, stage=2, precision="bf16", reduce=reduce)
    parts = sum(-(-unit.layout.shard_numel // 3) for unit in spread.plan.units)
    sent = sent_by(spread, 0)
    assert sent.shards.between == 0
    assert sent.replicas == Wire(0, 2 * parts * (nbytes + 4))


@pytest.mark.parametrize(
    ("parallel", "checkpointing"), [(False, False), (True, False), (False, True)]
)
def test_sums_of_tensor_ranks_are_eight_bsh(parallel: bool, checkpointing: bool) -> None:
    spread = Spread(
        ROUND,
        Mesh(shard=2, tensor=4),
        4,
        precision="bf16",
        micro_batch=2,
        accumulation=3,
        sequence_parallel=parallel,
        checkpointing=checkpointing,
    )
    bsh = 2 * 64 * 64
    per_block = 12 if checkpointing else 8
    # 8 blocks, two ends, 3 micro-batches, (t - 1) / t
    elements = (8 * per_block + 4) * bsh * 3 * 3 // 4
    assert sent_by(spread, 0).tensor == Wire(2 * elements, 0)


def test_attention_of_shared_tokens_exchanges_four_tensors_each_way() -> None:
    spread = Spread(ROUND, Mesh(shard=2, sequence=4), 4, precision="fp32", micro_batch=2)
    tokens = 2 * 64 // 4
    expected = 8 * 8 * tokens * 64 * 3 // 4 * 4
    assert sent_by(spread, 0).context == Wire(expected, 0)
    assert spread.shards == GroupSpan(8, 2)  # they hold the same parameters, and share them too


def test_stages_send_activations_on_and_gradients_back() -> None:
    def sent(**more: Any) -> list[Wire]:
        spread = Spread(
            ROUND, Mesh(pipeline=4), 2, stage=1, precision="bf16", accumulation=6, **more
        )
        return [sent_by(spread, place).pipeline for place in range(4)]

    bsh = 64 * 64 * 2 * 6
    assert sent() == [Wire(bsh, 0), Wire(bsh, bsh), Wire(bsh, bsh), Wire(bsh, 0)]
    # The last stage sends its first group on to the first stage, which sends gradients back to it.
    more = sent(schedule="interleaved", interleave=2)
    assert [wire.nbytes for wire in more] == [3 * bsh, 4 * bsh, 4 * bsh, 3 * bsh]
    # From node to node: both ways between stages 1 and 2 twice, once between 3 and 0.
    assert sum(wire.between for wire in more) == 6 * bsh


def test_stages_that_hold_a_tied_weight_exchange_its_shard() -> None:
    spread = Spread(ROUND, Mesh(pipeline=2, shard=4), 4, stage=1, precision="bf16")
    table = 512 * 64
    assert [sent_by(spread, place).ties for place in range(2)] == [Wire(0, table // 4 * 4)] * 2


def test_stage_3_under_a_pipeline_gathers_each_unit_once_a_step() -> None:
    spread = Spread(ROUND, Mesh(pipeline=2, shard=4), 4, stage=3, accumulation=8)
    for place in range(2):
        sent, units = sent_by(spread, place), len(spread.plan_of(place).units)
        assert (sent.all_gathers, sent.reduce_scatters) == (units, units)


@pytest.mark.parametrize("names", [("tensor",), ("shard", "sequence"), ("pipeline", "tensor")])
def test_members_counted_by_strides_are_those_of_the_mesh(names: tuple[str, ...]) -> None:
    mesh = Mesh(pipeline=2, replicate=3, shard=2, sequence=2, tensor=2)
    members = mesh.members(0, *names)
    for local in (2, 3, 8):
        expected = GroupSpan(len(members), len({rank // local for rank in members}))
        assert span_of(mesh, local, *names) == expected
    # From another rank on
    mesh = Mesh(pipeline=2, replicate=2, shard=2, tensor=2)
    assert span_of(mesh, 4, "replicate", "shard", first=8) == GroupSpan(4, 2)


def test_map_names_each_rank_of_a_small_job_and_each_group_of_a_large_one() -> None:
    small = rank_map(Mesh(pipeline=2, tensor=2), 2)
    assert [line.split() for line in small[1:]] == [
        ["rank", "node", "pipeline", "tensor"],
        ["0", "0", "0", "0"],
        ["1", "0", "0", "1"],
        ["2", "1", "1", "0"],
        ["3", "1", "1", "1"],
    ]
    large = "\n".join(rank_map(Mesh(pipeline=64, shard=6, tensor=8), 8))
    assert "3072 rank(s) on 384 node(s): pipeline 64 x shard 6 x tensor 8" in large
    assert "8 ranks, every 1st, on one node: first group 0, 1, 2, ... 7" in large
    assert "64 ranks, every 48th, on 64 nodes: first group 0, 48, 96, ... 3024" in large


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved"])
def test_worst_stage_holds_most_of_all(schedule: Any) -> None:
    more = 2 if schedule == "interleaved" else 1
    for accumulation in (1, 3, 8):
        spread = Spread(
            ROUND,
            Mesh(pipeline=4, shard=2),
            2,
            stage=1,
            accumulation=accumulation,
            schedule=schedule,
            interleave=more,
        )
        totals = [spread.shares(place).total for place in range(4)]
        assert totals[spread.worst] == max(totals)
        assert sum(spread.kinds.values()) == 4
