"""From options to a mesh: degrees, groups of shards inside nodes, and what is refused by name."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpczero.errors import ConfigError
from hpczero.job.mesh import SHARD, Mesh
from hpczero.models.config import GPTConfig
from hpczero.options.config import LayoutOptions
from hpczero.options.reading import read_run_config
from hpczero.plan.degrees import check_model, check_on_nodes, mesh_of
from tests.helpers.refused import refused

MODEL = GPTConfig(vocab_size=11, context=12, layers=5, hidden=18, heads=6)


@pytest.mark.parametrize("ranks", [1, 2, 7, 12])
def test_defaults_share_one_set_of_shards(ranks: int) -> None:
    assert mesh_of(LayoutOptions(), ranks, 4) == Mesh(shard=ranks)


@pytest.mark.parametrize(
    ("options", "ranks", "local", "expected"),
    [
        (LayoutOptions(tensor=2), 8, 4, Mesh(shard=4, tensor=2)),
        (LayoutOptions(tensor=2, pipeline=2), 8, 4, Mesh(pipeline=2, shard=2, tensor=2)),
        (LayoutOptions(context=2), 8, 4, Mesh(shard=4, sequence=2)),
        (LayoutOptions(shard="node"), 8, 4, Mesh(replicate=2, shard=4)),
        (LayoutOptions(shard="node", tensor=2), 8, 4, Mesh(replicate=2, shard=2, tensor=2)),
        (LayoutOptions(shard="node", context=2), 8, 4, Mesh(replicate=2, shard=2, sequence=2)),
        (LayoutOptions(shard="2"), 12, 4, Mesh(replicate=6, shard=2)),
        # Half a node has each stage: two of its ranks share.
        (LayoutOptions(shard="node", pipeline=2), 4, 4, Mesh(pipeline=2, shard=2)),
        # Two nodes of 6 and three stages of 4: the second stage is on both nodes.
        (LayoutOptions(shard="node", pipeline=3), 12, 6, Mesh(3, 2, 2)),
        (LayoutOptions(shard="node"), 1, 1, Mesh()),
        (LayoutOptions(shard="8", secondary=True), 16, 4, Mesh(replicate=2, shard=8)),
        (LayoutOptions(tensor=4, spread_tensor=True), 8, 2, Mesh(shard=2, tensor=4)),
    ],
)
def test_options_give_the_degrees(
    options: LayoutOptions, ranks: int, local: int, expected: Mesh
) -> None:
    assert mesh_of(options, ranks, local) == expected


@settings(max_examples=200, deadline=None)
@given(
    nodes=st.integers(1, 4),
    local=st.integers(1, 8),
    tensor=st.integers(1, 4),
    pipeline=st.integers(1, 4),
    context=st.integers(1, 3),
)
def test_shards_of_a_node_never_leave_it(
    nodes: int, local: int, tensor: int, pipeline: int, context: int
) -> None:
    options = LayoutOptions(tensor=tensor, pipeline=pipeline, context=context, shard="node")
    ranks = nodes * local
    try:
        mesh = mesh_of(options, ranks, local)
    except ConfigError:
        return
    assert mesh.size == ranks
    if mesh.shard == 1:  # one rank of a part of the model: its context may lie anywhere
        return
    for rank in range(ranks):
        members = mesh.members(rank, *SHARD, "tensor")
        assert {other // local for other in members} == {rank // local}


@pytest.mark.parametrize(
    ("options", "ranks", "local", "expected"),
    [
        (LayoutOptions(tensor=3), 8, 4, ["tensor 3", "8"]),
        (LayoutOptions(pipeline=5), 8, 4, ["pipeline 5", "8"]),
        (LayoutOptions(shard="3"), 8, 4, ["parallel.shard: got 3", "divisor of the 8"]),
        (LayoutOptions(tensor=4), 8, 2, ["parallel.tensor: got 4", "2 rank(s) of a node"]),
        (LayoutOptions(tensor=2), 6, 3, ["parallel.tensor: got 2", "3 rank(s) of a node"]),
        (LayoutOptions(tensor=4, shard="node"), 8, 4, ["parallel.shard: got node", "tensor 4"]),
        (LayoutOptions(secondary=True), 4, 4, ["parallel.secondary", "one node already"]),
        (LayoutOptions(secondary=True, shard="node"), 8, 4, ["parallel.secondary", "4 rank(s)"]),
    ],
)
def test_degrees_that_cannot_be_are_refused_by_name(
    options: LayoutOptions, ranks: int, local: int, expected: list[str]
) -> None:
    with refused(*expected):
        mesh_of(options, ranks, local)


def test_tensor_groups_that_a_launcher_has_spread_are_refused() -> None:
    mesh = Mesh(shard=2, tensor=2)
    check_on_nodes(mesh, [0, 0, 1, 1], spread_tensor=False)
    check_on_nodes(mesh, [0, 1, 0, 1], spread_tensor=True)
    with pytest.raises(ConfigError, match=r"ranks 0 to 1 .* nodes 0, 1.*--map-by core"):
        check_on_nodes(mesh, [0, 1, 0, 1], spread_tensor=False)
    check_on_nodes(Mesh(shard=4), [0, 1, 0, 1], spread_tensor=False)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (LayoutOptions(pipeline=6), ["parallel.pipeline: got 6", "5 block(s)"]),
        (LayoutOptions(pipeline=2, interleave=3), ["parallel.interleave: got 3", "at most 2"]),
        (LayoutOptions(tensor=7), ["parallel.tensor: got 7", "6 attention head(s)"]),
        (LayoutOptions(context=4), ["parallel.context: got 4", "6 attention heads"]),
        (LayoutOptions(context=3, tensor=4), ["parallel.context: got 3 beside tensor 4"]),
    ],
)
def test_model_that_cannot_be_cut_so_is_named(options: LayoutOptions, expected: list[str]) -> None:
    with refused(*expected):
        check_model(options, MODEL)


def test_tokens_that_context_does_not_divide_are_named() -> None:
    with pytest.raises(ConfigError, match=r"parallel.context: got 3 .* 10 tokens"):
        check_model(LayoutOptions(context=3), dataclasses.replace(MODEL, context=10))


@pytest.mark.parametrize(
    "options",
    [
        LayoutOptions(),
        LayoutOptions(pipeline=5),
        LayoutOptions(pipeline=2, interleave=2),
        LayoutOptions(tensor=4),  # 6 heads: the last ranks have padding
        LayoutOptions(context=3, tensor=2),
    ],
)
def test_model_that_can_be_cut_is_let_through(options: LayoutOptions) -> None:
    check_model(options, MODEL)


@pytest.mark.parametrize(
    ("options", "stage", "auto", "expected"),
    [
        (LayoutOptions(secondary=True), 2, False, ["parallel.secondary", "stage 2"]),
        (LayoutOptions(secondary=True, pipeline=2), 3, False, ["parallel.secondary", "2 stages"]),
        (LayoutOptions(sequence=True), 3, False, ["parallel.sequence", "parallel.tensor"]),
        (LayoutOptions(schedule="gpipe"), 3, False, ["schedule gpipe without a pipeline"]),
        (LayoutOptions(interleave=2), 3, False, ["interleave 2 without a pipeline"]),
        (LayoutOptions(pipeline=2, interleave=2, schedule="1f1b"), 1, False, ["got 2", "1f1b"]),
        (LayoutOptions(pipeline=2, schedule="interleaved"), 1, False, ["interleave: got 1"]),
        (LayoutOptions(tensor=2), 3, True, ["parallel.auto", "tensor 2"]),
    ],
)
def test_values_without_a_meaning_together_are_refused(
    options: LayoutOptions, stage: int, auto: bool, expected: list[str]
) -> None:
    with refused(*expected):
        options.check(stage=stage, auto=auto)


def test_schedule_follows_from_interleave_unless_it_is_given() -> None:
    assert LayoutOptions(pipeline=2).order == "1f1b"
    assert LayoutOptions(pipeline=2, interleave=2).order == "interleaved"
    assert LayoutOptions(pipeline=2, schedule="gpipe").order == "gpipe"
    for options in (LayoutOptions(), LayoutOptions(pipeline=2, interleave=2, schedule=None)):
        options.check(stage=3)


def test_command_line_reads_degrees_and_refuses_what_is_none() -> None:
    config = read_run_config(["--parallel.tensor", "2", "--parallel.shard", "node"])
    assert (config.parallel.tensor, config.parallel.shard) == (2, "node")
    for option, value in (("tensor", "0"), ("shard", "0"), ("shard", "nodes"), ("shard", "-2")):
        with pytest.raises(ConfigError, match=f"parallel.{option}"):
            read_run_config([f"--parallel.{option}", value])
