"""The step of large jobs, goals of the host's time, and the best layouts."""

from __future__ import annotations

import dataclasses

import pytest

from hpczero.models.config import GPTConfig
from hpczero.predict.machine import load_machine
from scaling.predict import scale
from scaling.predict.scale import charges_text, of_size, steps

SMALL = GPTConfig(vocab_size=4096, context=256, layers=4, hidden=512, heads=8)


def test_larger_nodes_keep_the_rate_of_a_rank() -> None:
    machine = load_machine("dgx-h100")
    assert of_size(machine, 8) is machine
    assert of_size(machine, 16).rail_rate == machine.rail_rate


def test_goals_are_judged() -> None:
    (step,) = steps([400], [8])
    said = charges_text([step])
    assert "400, 8" in said
    assert "goal 0.5 s: met" in said
    said = charges_text([dataclasses.replace(step, host_s=0.6)])
    assert "host 0.60 s, goal 0.5 s: MISSED" in said
    assert said.count("MISSED") == 2  # and its share of compute


def test_each_machine_has_a_best_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "PRESETS", {"tiny": SMALL})
    monkeypatch.setattr(scale, "MODEL", "tiny")
    said = scale.layouts_text(16)
    for name in ("dgx-2-v100", "dgx-a100", "dgx-h100", "slingshot-a100"):
        assert f"- {name}, best of " in said
    assert "MFU" in said
