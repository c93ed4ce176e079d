"""The comparison of layouts: its arithmetic on rows made by hand, what is predicted, a run between fake nodes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from hpczero.errors import ConfigError
from hpczero.models.config import parameter_count
from hpczero.predict.machine import load_machine
from scaling.evidence.record import Row
from scaling.evidence.spread import Spread
from scaling.layouts.__main__ import agreement, draw, text
from scaling.layouts.cases import Sizes, cases_of, cases_on, on_links
from tests.scaling.studies import cells, check_drawn, head, measured

WORK = Sizes(
    layers=8, hidden=32, heads=4, vocabulary=64, context=8, global_batch=32, micro_batches=8
)
MODEL = WORK.model


def rows() -> list[Row]:
    found = [
        head(
            ranks=8,
            placement="4x2-block",
            emulated=True,
            rate_mbit=250.0,
            rounds=2,
            steps=1,
            tolerance=1e-4,
            description="a model",
        )
    ]
    for name, predicted in (("plain", 1.0), ("pipeline", 0.5)):
        found.append(
            {
                "kind": "layout",
                "layout": name,
                "foretold_s": predicted,
                "planned_nbytes": [1e6, 1e6],
            }
        )
    for number in (0, 1):
        for name, seconds in (("pipeline", 0.4), ("plain", 2.0)):
            found.append(
                {
                    "kind": "turn",
                    "layout": name,
                    "round": number,
                    "seconds": seconds * (1 + number),
                    "sent_nbytes": [1.01e6, 1.03e6],
                    "waited_s": [0.1, 0.3] if name == "pipeline" else [],
                }
            )
    return found


def test_text_compares_with_the_first_layout_within_rounds_and_with_what_was_foretold(
    tmp_path: Path,
) -> None:
    said = text(rows())
    assert said.startswith("emulated nodes on one machine (not scaling): a model, 8 ranks")
    assert cells(said, "plain")[1:4] == ["3.000 [2.000, 4.000]", "1", "1.000"]
    found = cells(said, "pipeline ")
    assert found[2:5] == ["0.20 [0.20, 0.20]", "0.500", "0.83"]
    assert found[5:] == ["1.02", "1.00", "1.020", "0.200"]
    assert "1 of 1 pairs of layouts" in said
    check_drawn(draw, rows(), tmp_path)


def test_pairs_in_the_same_order_are_counted_those_that_are_told_apart_too() -> None:
    seen = {
        "a": Spread.of([1.0, 1.1]),
        "b": Spread.of([1.05, 1.2]),
        "c": Spread.of([3.0, 3.1]),
    }
    assert agreement({"a": 2.0, "b": 1.0, "c": 4.0}, seen) == (3, 2, 2, 2)


def test_layouts_for_four_nodes_of_two_send_what_their_formulas_say() -> None:
    found = {case.name: case for case in cases_of(WORK, 4, 2)}
    assert len(found) == 7
    psi = parameter_count(MODEL)
    # Of one rank, in fp32: every shard goes to three other nodes.
    pure = found["shards over all, stage 3"].sent_between(0)
    assert pure == pytest.approx(3 * psi / 8 * 3 * 4, rel=0.02)  # two gathers, one reduction
    second = found["shards over all, second shard, stage 3"].sent_between(0)
    assert second == pytest.approx(pure * 2 / 3, rel=0.01)
    node = found["shards in the node, stage 3"].sent_between(0)
    assert node == pytest.approx(2 * (psi / 2) * 3 / 4 * 4, rel=0.02)  # an all-reduce of a shard
    pipeline = found["pipeline 4, stage 1"]
    assert (pipeline.data, pipeline.accumulation) == (2, 8)
    micro = 2 * MODEL.context * MODEL.hidden * 4
    tied = MODEL.vocab_size * MODEL.hidden // 2 * 4
    assert pipeline.sent_between(1) == 2 * 8 * micro  # forward and backward
    assert pipeline.sent_between(0) == 8 * micro + tied


def test_one_node_has_no_pipeline_between_nodes_and_single_ranks_no_tensor_ranks() -> None:
    assert [case.name for case in cases_of(WORK, 1, 2)] == [
        "shards over all, stage 3",
        "tensor 2, stage 1",
        "tensor 2, stage 3",
    ]
    assert [case.name for case in cases_of(WORK, 2, 1)] == [
        "shards over all, stage 3",
        "pipeline 2, stage 1",
    ]


def test_a_batch_that_does_not_divide_is_refused_with_one_that_does() -> None:
    cases = cases_of(dataclasses.replace(WORK, global_batch=24), 4, 2)
    with pytest.raises(ConfigError, match=r"--global_batch: got 24.*expected a multiple of 16"):
        _ = next(case for case in cases if case.name == "pipeline 4, stage 1").spread


@pytest.mark.parametrize(
    ("nodes", "only", "says"),
    [
        ([(0, 1), (2,)], [], "ranks lie as .*expected as many on every node"),
        ([(0, 2), (1, 3)], [], "ranks lie as .*one node after the other"),
        (
            [(0,), (1,)],
            [0, 2],
            r"--only: got \[0, 2\], expected numbers from 0 to 1: shards over all",
        ),
    ],
    ids=["uneven", "dealt out", "no such layout"],
)
def test_nodes_and_numbers_without_layouts_are_refused(
    nodes: list[tuple[int, ...]], only: list[int], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        cases_on(nodes, WORK, only)


def test_layouts_are_chosen_by_number_in_the_order_given() -> None:
    every, nodes = cases_of(WORK, 2, 2), [(0, 1), (2, 3)]
    assert cases_on(nodes, WORK) == cases_on(nodes, WORK, []) == every
    assert cases_on(nodes, WORK, [3, 0]) == [every[3], every[0]]


def test_a_link_is_shared_by_the_ranks_of_its_node() -> None:
    machine = load_machine("dgx-h100")
    linked = on_links(machine, 1000)
    assert linked.nic_rate == 1.25e8
    assert linked.rail_rate == pytest.approx(1.25e8 / machine.ranks_per_node)
    assert on_links(machine, 0) is machine


@pytest.mark.tool
@pytest.mark.limit(300)
def test_all_layouts_take_a_step_between_two_nodes_of_two(tmp_path: Path) -> None:
    words = "layouts --layers 2 --hidden 32 --vocabulary 64 --context 8 --global_batch 16 "
    words += "--micro_batches 4 --rounds 1 --steps 1 --warm_up 2"
    env = {"HPCZERO_FAKE_NODES": "2x2"}
    found, said = measured(4, words, tmp_path, "layouts-2x2-block", env=env)
    turns = [row for row in found if row["kind"] == "turn"]
    assert len({row["layout"] for row in turns}) == len(turns) == 7
    assert all(row["seconds"] > 0 and row["sent_nbytes"] == [] for row in turns)
    assert all(row["foretold_s"] > 0 for row in found if row["kind"] == "layout")
    assert "Kendall's tau" in said
