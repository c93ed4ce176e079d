"""The step of large jobs by both charges, goals of the host's time, and the best layouts."""

from __future__ import annotations

import dataclasses

import pytest

from hpczero.models.config import GPTConfig
from hpczero.predict.job import Job
from hpczero.predict.machine import load_machine
from hpczero.predict.model import predict
from scaling.predict import scale
from scaling.predict.scale import Case, NetworkBefore, cases, charges_text, of_size

SMALL = GPTConfig(vocab_size=4096, context=256, layers=4, hidden=512, heads=8)


def before(ranks: int, **changes: object) -> float:
    machine = dataclasses.replace(load_machine("dgx-h100"), **changes)  # type: ignore[arg-type]
    job = Job.plain(SMALL, machine, ranks, 3, "bf16", 1, transport="ipc", overlap=False)
    return predict(job, network=NetworkBefore).communication_s


@pytest.mark.parametrize(("nodes", "of_a_gather"), [(2, 1), (3, 2), (8, 3), (50, 49)])
def test_before_one_latency_was_charged_for_each_node_or_doubling(
    nodes: int, of_a_gather: int
) -> None:
    more = before(8 * nodes, nic_latency=1.0) - before(8 * nodes, nic_latency=0.0)
    units, agreements = 5, 3 * (nodes - 1).bit_length()
    assert more == pytest.approx(units * (2 * of_a_gather + nodes - 1) + agreements)


def test_before_nothing_was_charged_on_the_host() -> None:
    assert before(48, message_host=1.0, round_host=1.0, sum_host=1.0) == before(48)


def test_larger_nodes_keep_the_rate_of_a_rank() -> None:
    machine = load_machine("dgx-h100")
    assert of_size(machine, 8) is machine
    assert of_size(machine, 16).rail_rate == machine.rail_rate


def test_goals_are_judged() -> None:
    (case,) = cases([400], [8])
    said = charges_text([case])
    assert "400, 8" in said
    assert "goal 0.5 s: met" in said
    late = dataclasses.replace(case.after, host_s=0.6)
    said = charges_text([Case(case.before, late)])
    assert "host 0.60 s, goal 0.5 s: MISSED" in said
    assert said.count("MISSED") == 2  # and its share of compute


def test_each_machine_has_a_best_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "PRESETS", {"tiny": SMALL})
    monkeypatch.setattr(scale, "MODEL", "tiny")
    said = scale.layouts_text(16)
    for name in ("dgx-2-v100", "dgx-a100", "dgx-h100", "slingshot-a100"):
        assert f"- {name}, best of " in said
    assert "MFU" in said
