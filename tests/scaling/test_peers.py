"""The comparison with peers: who shares a round, tables from rows made by hand, and runs with real ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpczero.errors import ConfigError, HpcZeroError
from scaling.contenders import BEFORE, ENTRIES, FLOOR, Entry, find_entry
from scaling.contenders.base import adamw, batch, gpt
from scaling.contenders.ranks import Crew
from scaling.contenders.workload import WORKLOADS
from scaling.evidence.record import Row, of_kind
from scaling.evidence.spread import table
from scaling.peers import ANCHORS, Options, check_losses, choose, draw, make_groups, summarise, text
from tests.helpers.mpirun import ROOT
from tests.helpers.processes import come_to_rest
from tests.scaling.studies import MIB, cells, check_drawn, head, measured

TINY = WORKLOADS["tiny"]
SLOWER = (1.0, 3.0, 2.0, 10.0, 1.5, 1.0, 4.0)  # how much the machine was slowed down in each round
STEP_S = {"independent": 0.5, "hpczero-3": 0.6, "fsdp2": 1.2}
MADE_UP = ("floor", "peer", "absent")
LIMIT_S = 280.0  # many ranks of many kinds start here, on a machine that may be busy


def test_another_loss_is_refused_by_name() -> None:
    good = {"a": [9.0, 8.0, 7.0], "b": [9.00009, 8.0, 7.0], FLOOR: [9.0, 1.0, 1.0]}
    check_losses(good)
    with pytest.raises(HpcZeroError, match=r"b: loss 7\.000200 at step 2, a has 7\.000000"):
        check_losses({**good, "b": [9.0, 8.0, 7.0002]})
    with pytest.raises(HpcZeroError, match=r"independent: .* at step 0"):
        check_losses({**good, FLOOR: [9.1, 8.0, 7.0]})
    with pytest.raises(HpcZeroError, match="b: loss nan"):
        check_losses({**good, "b": [float("nan"), 8.0, 7.0]})


def test_another_checkout_may_draw_other_first_values_and_must_agree_with_itself() -> None:
    theirs = {f"{BEFORE}a": [9.0005, 8.0006, 7.0], f"{BEFORE}b": [9.0005, 8.00065, 7.0]}
    good = {"a": [9.0, 8.0, 7.0], **theirs}
    check_losses(good)
    with pytest.raises(HpcZeroError, match=r"before:b: loss 8\.001000 at step 1, before:a has"):
        check_losses({**good, f"{BEFORE}b": [9.0005, 8.001, 7.0]})
    with pytest.raises(HpcZeroError, match=r"before:a: loss 9\.200000 at step 0, a has 9\.000000"):
        check_losses({"a": good["a"], f"{BEFORE}a": [9.2, 8.0, 7.0]})


def test_batches_differ_between_ranks_and_steps_and_come_again() -> None:
    tokens, targets = batch(TINY, step=1, rank=0)
    assert tokens.shape == targets.shape == (TINY.sequences, TINY.context)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert torch.equal(tokens, batch(TINY, step=1, rank=0)[0])
    others = [batch(TINY, step=step, rank=rank)[0] for step, rank in ((1, 1), (0, 0), (2, 0))]
    assert not any(torch.equal(tokens, other) for other in others)


def test_contenders_are_found_with_their_transport() -> None:
    assert find_entry("hpczero-3", transport="flat").arguments == {"stage": 3, "transport": "flat"}
    assert find_entry("hpczero-1@flat", transport="auto").arguments["transport"] == "flat"
    assert set(ANCHORS) <= set(ENTRIES)
    for wrong in ("fsdp", "fsdp2@flat", "hpczero-3@gloo"):
        with pytest.raises(ConfigError, match="expected some of independent, hpczero-0"):
            find_entry(wrong, transport="auto")


def test_a_contender_that_cannot_start_shows_what_it_said() -> None:
    entry = Entry("nobody", "nobody", "no_such_module", "gloo")
    with pytest.raises(HpcZeroError, match=r"nobody: did not start(.|\n)*no_such_module"):
        Crew(entry, TINY, size=2).__enter__()


@pytest.mark.tool
@pytest.mark.limit(LIMIT_S)
def test_ranks_train_as_one_process_does_and_sleep_without_cpu_time() -> None:
    model = gpt(TINY)
    optimizer = adamw(model.parameters())
    expected = []
    for step in range(6):
        optimizer.zero_grad()
        batches = [batch(TINY, step=step, rank=rank) for rank in range(2)]
        loss = model(*(torch.cat(parts) for parts in zip(*batches, strict=True)))
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    with Crew(find_entry("hpczero-3", transport="auto"), TINY, size=2) as crew:
        crew.ask("build")
        answers = [crew.ask("turn", steps=3), crew.ask("turn", steps=3)]
        assert come_to_rest(crew.pids, share=0.03)
    losses = [np.mean([rank["losses"] for rank in turn], axis=0) for turn in answers]
    np.testing.assert_allclose(np.concatenate(losses), expected, rtol=0, atol=1e-5)


@pytest.mark.tool
@pytest.mark.limit(LIMIT_S + 20)
@pytest.mark.slow
def test_quick_run_measures_all_that_are_asked_for(tmp_path: Path) -> None:
    names = ["independent", "hpczero-2", "ddp", "fsdp2"]
    # the same code, by way of another checkout
    words = f"peers --quick --contenders {' '.join(names)} --against {ROOT}"
    found, said = measured(0, words, tmp_path, "peers-tiny", timeout=LIMIT_S)
    names.append("before:hpczero-2")
    assert list(tmp_path.rglob("peers-tiny.png"))
    turns = [(turn["round"], turn["contender"]) for turn in of_kind(found, "turn")]
    assert sorted(turns) == sorted((number, name) for number in (0, 1) for name in names)
    for turn in of_kind(found, "turn"):
        assert len(turn["seconds"]) == 2
        assert all(0 < seconds <= turn["window_s"] for seconds in turn["seconds"])
    for memory in of_kind(found, "memory"):
        peaks = zip(memory["baseline_nbytes"], memory["step_peak_nbytes"], strict=True)
        # The share of libraries' pages, which other processes that come and go change, is more than a step takes.
        assert all(0 < nbytes < 2**30 for pair in peaks for nbytes in pair)
    losses = {row["contender"]: row["losses"] for row in of_kind(found, "losses")}
    np.testing.assert_allclose(losses["hpczero-2"], losses["ddp"], rtol=0, atol=1e-4)
    apart = np.abs(np.subtract(losses[FLOOR], losses["ddp"]))
    assert apart.max() > 1e-3  # so the tolerance tells averaged gradients from others
    assert losses["hpczero-2"] == losses["before:hpczero-2"]
    assert said.count("| torch FSDP2 ") == 1
    assert "/ before" in said


def test_a_folder_without_a_checkout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected the folder of a checkout"):
        choose(Options(against=str(tmp_path)))


# --- who shares a round


@given(st.lists(st.integers(1, 50), max_size=8), st.integers(60, 200))
def test_every_contender_meets_the_anchors_once_within_the_limit(
    sizes: list[int], limit: int
) -> None:
    others = {f"contender-{i}": size for i, size in enumerate(sizes)}
    needs = {"floor": 4, **others, "peer": 6}
    groups = make_groups(needs, MADE_UP, limit)
    assert all({"floor", "peer"} <= set(group) for group in groups)
    assert all(sum(needs[name] for name in group) <= limit for group in groups)
    alone = [name for group in groups for name in group if name in others]
    assert sorted(alone) == sorted(others)
    assert all(group == [name for name in needs if name in group] for group in groups)


def test_what_fits_is_one_group() -> None:
    assert make_groups({"floor": 1, "a": 1, "b": 1}, MADE_UP, 3) == [["floor", "a", "b"]]


def test_groups_are_filled_before_a_new_one_is_made() -> None:
    groups = make_groups({"floor": 1, "a": 5, "b": 4, "c": 1}, MADE_UP, 7)
    assert groups == [["floor", "a", "c"], ["floor", "b"]]


@pytest.mark.parametrize("needs", [{"floor": 2**31}, {"floor": 2**30, "large": 2**30}])
def test_what_cannot_fit_is_refused_with_both_sizes(needs: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"2\.0 GiB together, 1\.5 GiB may be used"):
        make_groups(needs, MADE_UP, 3 * 2**29)


# --- tables


def rows() -> list[Row]:
    names = {name: name.upper() for name in (*STEP_S, "zero-redundancy")}
    found = [head(titles=names, description="a model", ranks=2, rounds=len(SLOWER))]
    for name in names:
        found.append(
            {
                "kind": "memory",
                "contender": name,
                "settings": {"how": "well"},
                "baseline_nbytes": [100 * MIB, 110 * MIB],
                "step_peak_nbytes": [300 * MIB, (800 if name == "fsdp2" else 400) * MIB],
            }
        )
        found.append({"kind": "losses", "contender": name, "losses": [1.0] * 9})
    for number, slower in enumerate(SLOWER):
        found += [turn(0, number, name, slower * STEP_S[name]) for name in STEP_S]
        found.append(turn(1, number, "zero-redundancy", 1.0))
    return found


def turn(group: int, number: int, name: str, step_s: float) -> Row:
    return {
        "kind": "turn",
        "group": group,
        "round": number,
        "contender": name,
        "steps": 4,
        "seconds": [4 * step_s * 0.9, 4 * step_s],
        "window_s": 4 * step_s,
        "foreign_cpu_s": 0.8 * step_s,
        "sleeping_cpu_s": 0.0,
    }


def test_ratios_see_through_a_machine_that_is_slower_in_some_rounds() -> None:
    ours = next(line for line in summarise(rows()) if line.name == "hpczero-3")
    assert ours.step_s.median == pytest.approx(2.0 * 0.6)  # of the slowest rank
    for reference, expected in (("fsdp2", 0.5), ("independent", 1.2)):
        ratio = ours.ratios[reference]
        assert (ratio.low, ratio.median, ratio.high) == pytest.approx((expected,) * 3)


def test_contenders_that_never_shared_a_round_are_not_compared() -> None:
    lines = {line.name: line for line in summarise(rows())}
    assert set(lines) == {*STEP_S, "zero-redundancy"}
    assert lines["zero-redundancy"].ratios == {}
    assert "deepspeed-3" not in lines["hpczero-3"].ratios


def test_text_shows_step_time_ratios_memory_and_disturbance(tmp_path: Path) -> None:
    said = text(rows())
    assert cells(said, "contender")[2:4] == ["/ floor", "/ FSDP2"]
    assert cells(said, "HPCZERO-3")[1:] == [
        "1200 [600, 6000]",
        "1.20 [1.20, 1.20]",
        "0.50 [0.50, 0.50]",
        "400",
        "110",
        "0.50",
    ]
    assert cells(said, "FSDP2")[3] == "1"
    assert cells(said, "ZERO-REDUNDANCY")[2:4] == ["–", "–"]
    assert "other programs took 10.0% (median turn; at most 10.0%)" in said
    assert "95 % interval" in said
    assert "- FSDP2: how well" in said
    check_drawn(draw, rows(), tmp_path)


def test_table_is_aligned_markdown() -> None:
    assert table(["name", "x"], [["a", "10"], ["long name", "2"]]).splitlines() == [
        "| name      |  x |",
        "| --------- | -: |",
        "| a         | 10 |",
        "| long name |  2 |",
    ]
