"""The measurement itself, with a tiny model and real ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from hpczero.errors import ConfigError, HpcZeroError
from scaling.contenders import BEFORE, ENTRIES, FLOOR, Entry, find_entry
from scaling.contenders.base import adamw, batch, gpt
from scaling.contenders.ranks import Crew
from scaling.contenders.workload import WORKLOADS
from scaling.evidence.record import of_kind, read_rows
from scaling.peers import ANCHORS, Options, check_losses, choose
from tests.helpers.mpirun import ROOT, run_command
from tests.helpers.processes import come_to_rest

TINY = WORKLOADS["tiny"]
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
    command = [sys.executable, "-m", "scaling.peers", "--quick", "--results", str(tmp_path)]
    other = ["--against", str(ROOT)]  # the same code, by way of another checkout
    finished = run_command([*command, "--contenders", *names, *other], timeout=LIMIT_S)
    names.append("before:hpczero-2")
    assert finished.returncode == 0, finished
    (path,) = tmp_path.glob("*/peers-tiny.jsonl")
    assert path.with_suffix(".png").exists()
    rows = read_rows(path)
    turns = [(turn["round"], turn["contender"]) for turn in of_kind(rows, "turn")]
    assert sorted(turns) == sorted((number, name) for number in (0, 1) for name in names)
    for turn in of_kind(rows, "turn"):
        assert len(turn["seconds"]) == 2
        assert all(0 < seconds <= turn["window_s"] for seconds in turn["seconds"])
    for memory in of_kind(rows, "memory"):
        peaks = zip(memory["baseline_nbytes"], memory["step_peak_nbytes"], strict=True)
        # The share of libraries' pages, which other processes that come and go change, is more than a step takes.
        assert all(0 < nbytes < 2**30 for pair in peaks for nbytes in pair)
    losses = {row["contender"]: row["losses"] for row in of_kind(rows, "losses")}
    np.testing.assert_allclose(losses["hpczero-2"], losses["ddp"], rtol=0, atol=1e-4)
    apart = np.abs(np.subtract(losses[FLOOR], losses["ddp"]))
    assert apart.max() > 1e-3  # so the tolerance tells averaged gradients from others
    assert losses["hpczero-2"] == losses["before:hpczero-2"]
    assert finished.stdout.count("| torch FSDP2 ") == 1
    assert "/ before" in finished.stdout


def test_a_folder_without_a_checkout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected the folder of a checkout"):
        choose(Options(against=str(tmp_path)))
