"""A machine by measured steps: its numbers are found again, and layouts that were not measured are predicted."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hpczero.errors import ConfigError
from hpczero.job.mesh import Mesh
from hpczero.models.config import PRESETS, GPTConfig, flops_per_token
from hpczero.options.config import (
    ActivationOptions,
    ModelOptions,
    ParallelOptions,
    RunConfig,
    TrainOptions,
)
from hpczero.options.reading import to_toml
from hpczero.plan.calibrate import main
from hpczero.plan.spread import Spread
from hpczero.predict.calibrated import Seen, calibrated
from hpczero.predict.job import Job
from hpczero.predict.machine import Machine, load_machine
from hpczero.predict.model import Prediction, StepRange, predict
from hpczero.run.results.metrics import StepMetrics

ASSUMED = load_machine("cpu-node")
TRUTH = dataclasses.replace(
    ASSUMED,
    matmul_efficiency=0.31,
    memory_rate=3e9,
    update_rate=1.7e9,
    imbalance=0.12,
    step_host=7e-3,
    bounds={},
)
NOISE = (0.9, 0.99, *[1.0] * 8, 1.01, 1.2)


def gpt(layers: int, hidden: int) -> GPTConfig:
    return dataclasses.replace(PRESETS["gpt-nano"], layers=layers, hidden=hidden)


def job(model: GPTConfig, machine: Machine, **more: Any) -> Job:
    given: Any = {"stage": 3, "precision": "fp32", "micro_batch": 6, "transport": "window"}
    mesh = more.pop("mesh", Mesh(shard=2))
    return Job.of(Spread(model, mesh, 2, **{**given, **more}), machine)


def seen(model: GPTConfig) -> Seen:
    found = predict(job(model, TRUTH))
    return Seen(
        job(model, ASSUMED),
        computing_s=[found.computing_s * noise for noise in NOISE],
        communication_s=[found.communication_s] * len(NOISE),
        update_s=[found.update_s] * len(NOISE),
        beside_s=[TRUTH.step_host] * len(NOISE),
    )


def test_numbers_of_a_machine_are_found_again_from_two_sizes() -> None:
    found = calibrated(ASSUMED, [seen(gpt(4, 256)), seen(gpt(2, 640))], source="two runs")
    for name in ("matmul_efficiency", "memory_rate", "update_rate", "imbalance", "step_host"):
        assert getattr(found, name) == pytest.approx(getattr(TRUTH, name), rel=0.05), name
        assert found.sources[name] == "two runs"
    assert set(found.bounds) == {"matmul_efficiency"}
    low, high = found.bounds["matmul_efficiency"]
    assert 0.7 * 0.31 < low < 0.99 * 0.31
    assert 1.005 * 0.31 < high < 1.2 * 0.31
    others: Sequence[dict[str, Any]] = (
        {"stage": 0},
        {"stage": 1, "mesh": Mesh(tensor=2)},
        {"stage": 1, "mesh": Mesh(pipeline=2), "accumulation": 4},
        {"checkpointing": True},
    )
    for more in others:
        between = StepRange.around(predict(job(gpt(6, 384), found, **more)))
        expected = predict(job(gpt(6, 384), TRUTH, **more)).step_s
        assert between.likely.step_s == pytest.approx(expected, rel=0.02)
        assert between.fast.step_s < expected < between.slow.step_s


def test_by_one_run_products_and_passes_are_slower_by_one_factor() -> None:
    one = seen(gpt(4, 256))
    found = calibrated(ASSUMED, [one], source="a run")
    slower = ASSUMED.matmul_efficiency / found.matmul_efficiency
    assert ASSUMED.memory_rate / found.memory_rate == pytest.approx(slower)
    assert one.on(found).step_s == pytest.approx(predict(job(gpt(4, 256), TRUTH)).step_s, rel=0.01)


def test_links_between_nodes_are_those_with_which_as_much_was_exposed() -> None:
    truth = dataclasses.replace(load_machine("dgx-a100"), overlap=0.5, bounds={})
    spread = Spread(PRESETS["gpt2-xl"], Mesh(shard=16), 8, micro_batch=8, on_device=True)
    found = predict(Job.of(spread, truth))
    sheet = load_machine("dgx-a100")
    one = Seen(
        Job.of(spread, sheet),
        computing_s=[found.computing_s] * 9,
        communication_s=[found.communication_s] * 9,
        update_s=[found.update_s] * 9,
        beside_s=[0.0] * 9,
    )
    assert calibrated(sheet, [one], source="a run").overlap == pytest.approx(0.5, abs=0.02)


# --- the command


def leave(folder: Path, found: Prediction, *, steps: int = 12, **parallel: Any) -> str:
    """What a run of so many steps leaves in its folder."""
    model, world = found.job.model, found.job.ranks
    config = RunConfig(
        model=ModelOptions(preset="gpt-nano", layers=model.layers, hidden=model.hidden),
        train=TrainOptions(micro_batch=found.job.micro_batch, accumulation=1),
        parallel=ParallelOptions(precision="fp32", **{"stage": 3, **parallel}),
        activations=ActivationOptions(),
    )
    folder.mkdir()
    (folder / "config.toml").write_text(to_toml(config))
    rate = found.tokens_per_s
    times = {
        "step_ms": found.step_s * 1e3,
        "data_ms": 0.0,
        "forward_ms": found.forward_s * 1e3,
        "backward_ms": (found.backward_s + found.communication_s) * 1e3,
        "optimizer_ms": found.update_s * 1e3,
        "communication_ms": found.communication_s * 1e3,
        "checkpoint_ms": 0.0,
        "tokens_per_s": rate,
        "tflops": rate * flops_per_token(model) / world / 1e12,
    }
    rest = {f.name: 1 for f in dataclasses.fields(StepMetrics) if f.default is dataclasses.MISSING}
    values: dict[str, Any] = {**rest, **times}
    lines = [StepMetrics(**{**values, "step": step}).to_json() for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return str(folder)


def test_folders_of_runs_become_a_machine_that_a_plan_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [
        leave(tmp_path / name, predict(job(gpt(*sizes), TRUTH)))
        for name, sizes in (('of "x"', (4, 256)), ("y", (2, 640)))
    ]
    metrics = tmp_path / "y" / "metrics.jsonl"  # which began with other ranks
    first = [StepMetrics.from_json(line) for line in metrics.read_text().splitlines()]
    others = (
        dataclasses.replace(s, tflops=s.tflops / 2, forward_ms=9e9, step_ms=9e9) for s in first
    )
    metrics.write_text("".join(f"{s.to_json()}\n" for s in (*others, *first)))
    out = str(tmp_path / "here.toml")
    assert main([*runs, "--machine", "cpu-node", "--out", out]) == 0
    machine = load_machine(out)
    said = f"matmul_efficiency: 0.387 -> {machine.matmul_efficiency:.4g}, "
    assert said in capsys.readouterr().out
    assert machine.shares_memory
    assert machine.sources["memory_rate"].startswith("measured: steps of ")
    found, expected = (predict(job(gpt(6, 384), each, stage=1)) for each in (machine, TRUTH))
    assert found.step_s == pytest.approx(expected.step_s, rel=0.02)


def test_a_run_that_does_not_tell_enough_is_refused(tmp_path: Path) -> None:
    usual = predict(job(gpt(4, 256), TRUTH))
    odd = dataclasses.replace(usual.job, model=dataclasses.replace(usual.job.model, vocab_size=999))
    for name, run, more, message in (
        ("tensor", usual, {"tensor": 2}, "was trained with parallel.tensor"),
        ("short", usual, {"steps": 5}, r"got 3 step\(s\) after the first 2"),
        ("other", dataclasses.replace(usual, job=odd), {}, "give the --vocab"),
    ):
        folder = leave(tmp_path / name, run, **more)
        with pytest.raises(ConfigError, match=message):
            main([folder, "--machine", "cpu-node", "--out", str(tmp_path / "never.toml")])
    with pytest.raises(ConfigError, match="on CPUs, and dgx-h100 is a machine of GPUs"):
        main([folder, "--machine", "dgx-h100", "--out", str(tmp_path / "never.toml")])
    with pytest.raises(ConfigError, match="got no run"):
        main(["--machine", "cpu-node", "--out", str(tmp_path / "never.toml")])
    assert not (tmp_path / "never.toml").exists()
