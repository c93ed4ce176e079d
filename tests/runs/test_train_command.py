"""The training command under a real launcher: what it writes, what depends on the ranks, and how bad input ends."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from safetensors import safe_open

from hpczero.options.config import RunConfig
from hpczero.options.reading import load_toml
from hpczero.run.results.metrics import StepMetrics, read_metrics
from tests.helpers import runs
from tests.helpers.mpirun import Finished, run_ranks

LIMIT_S = 100
STEPS = 30
TINY = {
    "model__layers": 1,
    "model__hidden": 32,
    "train__steps": STEPS,
    "train__global_batch": 8,
    "train__accumulation": 2,
    "train__learning_rate": 0.01,
    "train__warmup": 3,
    "evaluation__every": 10,
    "evaluation__batches": 2,
    "log__plot": "true",
    "log__tensorboard": "true",
}


def train(n: int, folder: Path, **options: object) -> Finished:
    """The command on ``n`` ranks with a tiny model."""
    text = folder / "text.txt"
    if not text.exists():
        text.write_text("".join(f"line {i}: the rank owns its shard\n" for i in range(400)))
    data = {"data__path": text, "data__cache": folder / "tokens"}
    return runs.train(folder, n, **{**TINY, **data, **options})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("train")


def test_rank_that_never_starts_mpi_does_not_make_the_others_wait_for_ever(folder: Path) -> None:
    job = ["-m", "hpczero.train", "--run.folder", str(folder), ":", "-n", "1", "sleep", "90"]
    done = run_ranks(1, job, timeout=80, env={"HPCZERO_TIMEOUT": "6"})
    assert done.returncode not in (0, 75), done
    assert "Timeout (0:00:06)!" in done.stderr, done
    assert "meet_the_other_ranks_in_mpi_init" in done.stderr, done


@pytest.fixture(scope="module")
def on_two_ranks(folder: Path) -> Finished:
    return train(2, folder, run__name="two", log__every=10).ended()


def steps_of(folder: Path, name: str) -> list[StepMetrics]:
    return read_metrics(folder / name / "metrics.jsonl")


@pytest.mark.usefixtures("on_two_ranks")
def test_run_folder_holds_every_result_and_nothing_temporary(folder: Path) -> None:
    files = {file.name for file in (folder / "two").iterdir()}
    assert files == {
        "attempts.jsonl",
        "checkpoints",
        "config.toml",
        "loss.png",
        "metrics.jsonl",
        "model.safetensors",
        "tensorboard",
        "watch.html",
    }
    picture = (folder / "two" / "loss.png").read_bytes()
    width, height = struct.unpack(">II", picture[16:24])
    assert picture.startswith(b"\x89PNG")
    assert (width, height) > (500, 300)
    page = (folder / "two" / "watch.html").read_text()
    assert f"<b>finished</b>: all steps are done: step {STEPS}" in page
    assert "refresh" not in page
    (events,) = (folder / "two" / "tensorboard").iterdir()
    assert events.stat().st_size > 1000


@pytest.mark.usefixtures("on_two_ranks")
def test_metrics_have_one_complete_json_line_per_step(folder: Path) -> None:
    lines = (folder / "two" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert [record["tokens"] for record in records] == [8 * 16 * (i + 1) for i in range(STEPS)]
    for record in records:
        assert set(record) == {*StepMetrics.__dataclass_fields__, "crc32"}
        for name in ("step_ms", "forward_ms", "backward_ms", "optimizer_ms", "communication_ms"):
            assert 0 < record[name] < 60_000, name
        parts = ("data_ms", "forward_ms", "backward_ms", "optimizer_ms")
        assert sum(record[name] for name in parts) <= record["step_ms"]
        assert record["tokens_per_s"] == pytest.approx(8 * 16 / (record["step_ms"] / 1e3))
        assert 0 < record["state_peak_nbytes"] < record["process_peak_nbytes"]
        assert record["mfu"] is None
        assert (record["skipped_steps"], record["loss_scale"]) == (0, 1.0)
    evaluated = [r["step"] for r in records if r["held_out_loss"] is not None]
    assert evaluated == [10, 20, 30]


@pytest.mark.usefixtures("on_two_ranks")
def test_loss_starts_at_the_uniform_guess_and_falls(folder: Path) -> None:
    steps = steps_of(folder, "two")
    assert steps[0].loss == pytest.approx(5.55, abs=0.2)  # ln 257 of 257 equally likely tokens
    assert steps[-1].loss < 3.5
    held_out = [s.held_out_loss for s in steps if s.held_out_loss is not None]
    assert held_out == sorted(held_out, reverse=True)
    assert held_out[-1] == pytest.approx(steps[-1].loss, abs=0.5)  # the same kind of text


@pytest.mark.usefixtures("on_two_ranks")
def test_learning_rate_follows_the_schedule_of_the_options(folder: Path) -> None:
    options = load_toml(folder / "two" / "config.toml", RunConfig).train
    expected = [0.01 * options.learning_rate_factor(step) for step in range(STEPS)]
    assert [s.learning_rate for s in steps_of(folder, "two")] == pytest.approx(expected)


def test_header_tells_ranks_units_bytes_data_and_steps_once(on_two_ranks: Finished) -> None:
    text = on_two_ranks.stdout
    assert text.startswith("start: hpczero.train, rank 0 on ")
    for part in (
        ", 2 rank(s), results in ",
        "topology: 1 node(s) x 2 rank(s)",
        "plan: stage 3, fp32",
        "units of",
        "held per rank: ",
        "sent per rank and step: ",
        "training and",
        "vocabulary of 257",
        "run: 30 steps of 128 tokens = micro batch 2 x accumulation 2 x 2 rank(s) x 16 tokens",
        "held-out loss: ",
        "done: python -m hpczero.sample ",
    ):
        assert text.count(part) == 1, part
    progress = [line.split()[1] for line in text.splitlines() if line.startswith("step ")]
    assert progress == ["1/30", "10/30", "20/30", "30/30"]


@pytest.mark.worth("the same weights and samples on any number of ranks")
@pytest.mark.parametrize(
    ("n", "name", "options"),
    [
        (1, "one", {"parallel__stage": 0}),
        (4, "four", {"parallel__stage": 2, "train__accumulation": 1, "parallel__nodes": "2x2"}),
    ],
)
@pytest.mark.usefixtures("on_two_ranks")
def test_other_ranks_start_from_the_same_weights_and_see_the_same_samples(
    n: int, name: str, options: dict[str, object], folder: Path
) -> None:
    train(n, folder, run__name=name, **options).ended()
    mine, reference = steps_of(folder, name), steps_of(folder, "two")
    # Before the first update only the order of fp32 sums differs; an exchanged sample would show in the third digit.
    assert mine[0].loss == pytest.approx(reference[0].loss, rel=1e-6)
    assert mine[0].grad_norm == pytest.approx(reference[0].grad_norm, rel=1e-5)
    assert len({s.loss for s in reference}) == STEPS
    for mine_step, reference_step in zip(mine, reference, strict=True):
        assert mine_step.loss == pytest.approx(reference_step.loss, rel=1e-3)


def test_bf16_checkpointing_bpe_and_mfu_train_and_unwanted_files_stay_away(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCZERO_FAKE_NODES", "2x1")
    done = train(
        2,
        folder,
        run__name="bf16",
        parallel__precision="bf16",
        model__checkpoint_activations="true",
        data__tokenizer="bpe",
        log__plot="false",
        log__tensorboard="false",
        log__page_s=0,
        log__peak_tflops=0.5,
        log__level="debug",
    ).ended()
    assert {file.name for file in (folder / "bf16").iterdir()} == {
        "attempts.jsonl",
        "checkpoints",
        "config.toml",
        "metrics.jsonl",
        "model.safetensors",
    }
    steps = steps_of(folder, "bf16")
    assert steps[-1].loss < steps[0].loss - 1
    assert all(s.mfu == pytest.approx(s.tflops / 0.5) for s in steps)
    assert {"[r0 node00]", "[r1 node01]"} <= {line[:11] for line in done.stdout.splitlines()}


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_compiled_blocks_train_the_same_and_go_on_from_what_was_not_compiled(
    folder: Path, stage: int
) -> None:
    name = f"compiled-{stage}"
    rate = {"train__learning_rate": 1e-3, "train__min_learning_rate": 1e-3, "train__warmup": 0}
    common = {"parallel__stage": stage, "model__layers": 2, "checkpoint__every": 4, **rate}
    lengths = {f"plain-{stage}": (8, "false"), name: (4, "false"), f"{name} ": (8, "true")}
    for run, (steps, compiled) in lengths.items():
        options = {"run__name": run.strip(), "train__steps": steps, "model__compile": compiled}
        done = train(2, folder, **common, **options).ended()
    assert "compiled by torch.compile in the first steps: 2 modules" in done.stdout
    plain, found = steps_of(folder, f"plain-{stage}"), steps_of(folder, name)
    assert [s.step for s in found] == list(range(1, 9))
    # The compiler's arithmetic rounds elsewhere.
    assert [s.loss for s in found] == pytest.approx([s.loss for s in plain], abs=1e-6)
    with safe_open(folder / name / "model.safetensors", "pt") as weights:
        assert not any("_orig_mod" in key for key in weights.keys())  # noqa: SIM118


SEED_IS_RANK = """
import runpy
import sys
from hpczero.errors import launcher_rank

sys.argv += ["--run.seed", str(launcher_rank())]
runpy.run_module("hpczero.train", run_name="__main__")
"""


def test_ranks_started_with_other_options_are_named(tmp_path: Path) -> None:
    words = ["-c", SEED_IS_RANK, "--run.folder", str(tmp_path)]
    done = run_ranks(2, words, timeout=LIMIT_S).ended(78)
    assert "on rank(s) 1, could not agree on the options" in done.stderr
    assert not list(tmp_path.iterdir())


ONE_RANK_RAISES = """
import torch
import hpczero
from hpczero.errors import run

class Fragile(torch.nn.Linear):
    def forward(self, x):
        if hpczero.sharding(model).topology.rank == 1:
            raise ArithmeticError("this rank cannot go on")
        return super().forward(x)

model = Fragile(4, 4)

def main():
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hpczero.zeroify(model, optimizer)
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

run(main)
"""


def test_one_rank_raising_in_forward_ends_the_job_at_once() -> None:
    done = run_ranks(3, ["-c", ONE_RANK_RAISES], timeout=60)  # the watchdog waits half an hour
    assert done.returncode != 0
    assert "[rank 1] ArithmeticError: this rank cannot go on" in done.stderr


# --- a part of the model elsewhere

ON_HOST = {"offload__optimizer": "host", "offload__gradients": "host", "offload__step": "host"}


@pytest.mark.slow
def test_fraction_and_side_change_no_loss_and_delay_all_but_the_first(folder: Path) -> None:
    def run(name: str, **options: object) -> tuple[Finished, list[StepMetrics]]:
        given = {"train__steps": 8, "evaluation__every": 4, "model__layers": 3, **options}
        done = train(2, folder, run__name=name, **given).ended()
        return done, steps_of(folder, name)

    _, resident = run("resident")
    said, part = run("part", **ON_HOST, offload__fraction=0.5)
    assert "stepped on by the host, at least 50.0% of them" in said.stdout, said
    assert [step.loss for step in part] == [step.loss for step in resident]
    assert [step.held_out_loss for step in part] == [step.held_out_loss for step in resident]
    delayed, late = run("delayed", **ON_HOST, offload__delayed="true")
    assert "one step late (this changes the result)" in delayed.stdout, delayed
    assert "this changes the result (delayed=True)" in delayed.said, delayed
    first, *others = [a.loss == b.loss for a, b in zip(late, resident, strict=True)]
    assert first
    assert not any(others)
    assert late[-1].loss < late[0].loss
    _, twice = run("again", **ON_HOST, offload__delayed="true")
    assert [step.loss for step in twice] == [step.loss for step in late]
