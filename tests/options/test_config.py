"""Options: names, defaults, strictness, and the same verdict on every rank before MPI or torch start."""

from __future__ import annotations

import dataclasses
import itertools
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler as scheduler

from hpczero.errors import ConfigError
from hpczero.options.config import RunConfig, TrainOptions
from hpczero.options.environment import Environment
from hpczero.options.reading import load_toml, read_run_config, to_toml
from hpczero.options.values import parse_nodes
from hpczero.plan.sizing import Batch
from tests.helpers.mpirun import ROOT, Finished, run_command
from tests.helpers.refused import refused


def option_names(config: RunConfig) -> list[str]:
    return [
        f"{section.name}.{option.name.removesuffix('_')}"
        for section in dataclasses.fields(config)
        for option in dataclasses.fields(getattr(config, section.name))
    ]


OPTIONS = option_names(RunConfig())


def test_help_explains_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        read_run_config(["--help"])
    assert end.value.code == 0
    words = capsys.readouterr().out.replace("│", " ").split()
    found = [word.removeprefix("--") for word in words if word.startswith("--") and "." in word]
    assert found == OPTIONS
    for option, following in itertools.pairwise([*OPTIONS, None]):
        stop = words.index(f"--{following}") if following else len(words)
        explained = words[words.index(f"--{option}") : stop]
        assert "(default:" in explained
        assert len(explained) >= 5, explained  # name, type, explanation, "(default:", value


def test_byte_order_mark_before_toml_is_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[train]\nsteps = 7\n", encoding="utf-8-sig")
    assert read_run_config([str(file)]).train.steps == 7


def test_command_line_overrides_toml_and_toml_overrides_defaults(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[train]\nsteps = 7\nclip = 2\n[parallel]\nstage = 1\n")
    config = read_run_config([str(file), "--train.steps", "9", "--log.plot", "false"])
    assert (config.train.steps, config.train.clip, config.parallel.stage) == (9, 2.0, 1)
    assert config.log.plot is False
    assert config.train.warmup == TrainOptions().warmup


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["--train.betas", "0.5", "0.75", "--train.micro_batch", "3", "--run.overwrite", "true"],
        ["--data.path", 'a "quoted"\\ path\twith\x7f control é 漢', "--log.peak_tflops", "1e-7"],
        ["--parallel.nodes", "2x2", "--run.name", "gpt2-124M_lr+1.5e-3", "--train.clip", "0"],
    ],
)
def test_written_toml_reads_back_as_the_same_options(args: list[str], tmp_path: Path) -> None:
    config = read_run_config(args)
    file = tmp_path / "config.toml"
    file.write_text(to_toml(config), encoding="utf-8")
    assert load_toml(file, RunConfig) == config


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[train]\nstep = 3", ["train.step", "did you mean", "train.steps"]),
        ("[trian]\nsteps = 3", ["trian", "did you mean", "train"]),
        ("[model]\nxyzzy = 3", ["model.xyzzy", "model.preset", "model.layers"]),
        ("train = 3", ["train: got 3", "section [train]"]),
        ("[train]\nsteps = 'many'", ["train.steps", "'many'", "expected int"]),
        ("[train]\nsteps = 3.0", ["train.steps", "3.0", "expected int"]),
        ("[train]\nsteps = true", ["train.steps", "True", "expected int"]),
        ("[train]\nbetas = [0.9]", ["train.betas", "list of 2"]),
        ("[train]\nbetas = [0.9, 'x']", ["train.betas", "expected float"]),
        ("[parallel]\nstage = 7", ["parallel.stage", "got 7", "0, 1, 2, 3"]),
        ("[log]\nplot = 1", ["log.plot", "expected bool"]),
        ("[train]\nsteps = -1", ["train.steps", "got -1", "at least 1"]),
        ("[train]\nsteps =", ["not TOML", "at end of document"]),
        ("a = " + "[" * 100_000, []),
        ("[run]\nseed = " + "9" * 5001, []),
        ("\0", []),
        ("\ud800", []),
    ],
)
def test_bad_toml_names_file_option_and_remedy(
    text: str, expected: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    with refused(str(file), *expected):
        read_run_config([str(file)])


@pytest.mark.parametrize("kind", ["FIFO", "directory", "file of zeros", "nothing"])
def test_toml_is_read_from_a_file_or_not_at_all(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "run.toml"
    if kind == "FIFO":
        os.mkfifo(place)
    elif kind == "directory":
        place.mkdir()
    elif kind == "file of zeros":
        place.touch()
        os.truncate(place, 2**31)
    said = r"run.toml: cannot be read as options: (is a|has|No such)"
    with pytest.raises(ConfigError, match=said):
        read_run_config([str(place)])


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--train.step", "3"], ["--train.step", "Perhaps you meant", "--train.steps"]),
        (["--train.steps", "many"], ["--train.steps", "'many'"]),
        (["--train.steps"], ["--train.steps", "Missing value"]),
        (["--train.steps", "3", "more"], ["more"]),
        (["--parallel.stage", "7"], ["--parallel.stage", "'7'", "'0', '1', '2', '3'"]),
        (["--log.plot", "maybe"], ["--log.plot", "'true', 'false'"]),
    ],
)
def test_bad_command_line_names_the_option_on_one_line(
    args: list[str], expected: list[str]
) -> None:
    with refused(*expected) as caught:
        read_run_config(args)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "args",
    [
        ["--train.steps", "0"],
        ["--train.global_batch", "-8"],
        ["--train.micro_batch", "0"],
        ["--train.learning_rate", "nan"],
        ["--train.learning_rate", "0"],
        ["--train.min_learning_rate", "1"],
        ["--train.warmup", "-1"],
        ["--train.decay_steps", "5"],
        ["--train.min_learning_rate", "0.0001", "--train.schedule", "constant"],
        ["--evaluation.every", "0", "--evaluation.patience", "2"],
        ["--train.betas", "0.9", "1.0"],
        ["--train.clip", "inf"],
        ["--train.clip", "-1"],
        ["--model.layers", "0"],
        ["--run.seed", "-1"],
        ["--run.name", "../elsewhere"],
        ["--run.name", ".."],
        ["--parallel.nodes", "4"],
        ["--parallel.nodes", "0x2"],
        ["--evaluation.batches", "-1"],
        ["--log.every", "0"],
        ["--log.peak_tflops", "0"],
        ["--log.profile", "10"],
        ["--log.profile", "0:3"],
        ["--log.profile", "7:7"],
    ],
)
def test_value_out_of_range_names_option_and_value(args: list[str]) -> None:
    with refused(args[0].removeprefix("--"), args[1].removeprefix("-")):
        read_run_config(args)


def train_command(args: list[str], rank: int) -> Finished:
    """The command as one rank of a job runs it up to where MPI would start; the last line lists what was imported."""
    program = (
        "import runpy, sys\n"
        "try:\n"
        "    runpy.run_module('hpczero.train', run_name='__main__')\n"
        "finally:\n"
        "    print([name for name in ('torch', 'mpi4py.MPI') if name in sys.modules])\n"
    )
    environment = {"OMPI_COMM_WORLD_RANK": str(rank)}
    return run_command([sys.executable, "-c", program, *args], 60, environment, fresh=True)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--train.step", "3"], "--train.step"),
        (["--parallel.stage", "7"], "--parallel.stage"),
        (["missing.toml"], "missing.toml"),
        (["--model.preset", "gpt-nanno"], "gpt-nano"),
        (["--model.heads", "3"], "hidden is 256, expected a multiple of heads"),
    ],
)
def test_bad_option_ends_each_rank_with_78_before_torch_and_mpi(
    args: list[str], message: str, rank: int
) -> None:
    done = train_command(args, rank).ended(78)
    assert done.stderr.startswith(f"[rank {rank}] ConfigError: ")
    assert message in done.stderr
    assert done.stdout.splitlines() == ["[]"]


def test_help_comes_from_first_rank_alone_without_torch_and_mpi() -> None:
    first, second = (train_command(["--help"], rank) for rank in (0, 1))
    assert (first.returncode, second.returncode) == (0, 0)
    assert "--train.steps" in first.stdout
    assert first.stdout.splitlines()[-1] == "[]"
    assert second.stdout.splitlines() == ["[]"]


def test_error_has_no_colours_on_the_terminal_a_launcher_gives_its_ranks() -> None:
    parent, child = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-m", "hpczero.train", "--train.step", "3"],
        env={**os.environ, "TERM": "xterm-256color"},
        cwd=ROOT,
        stdout=child,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(parent)
    os.close(child)
    assert done.returncode == 78
    assert "--train.steps" in done.stderr
    assert done.stderr.isascii()
    assert "\x1b" not in done.stderr


sizes = st.integers(1, 40)


@given(micro=sizes, accumulation=sizes, world_size=sizes)
def test_any_two_batch_sizes_fix_the_third(micro: int, accumulation: int, world_size: int) -> None:
    whole = micro * accumulation * world_size
    expected = Batch(whole, micro, accumulation)
    for options in (
        TrainOptions(micro_batch=micro, accumulation=accumulation),
        TrainOptions(global_batch=whole, accumulation=accumulation),
        TrainOptions(global_batch=whole, micro_batch=micro),
        TrainOptions(global_batch=whole, micro_batch=micro, accumulation=accumulation),
    ):
        assert Batch.resolve(options, world_size) == expected


@pytest.mark.parametrize(
    ("options", "world_size", "expected"),
    [
        *((TrainOptions(), ranks, Batch(12, 12 // ranks, 1)) for ranks in (1, 2, 3, 4)),
        (TrainOptions(), 5, Batch(15, 3, 1)),
        (TrainOptions(), 400, Batch(400, 1, 1)),
        (TrainOptions(micro_batch=5), 2, Batch(20, 5, 2)),
        (TrainOptions(accumulation=2), 4, Batch(16, 2, 2)),
    ],
)
def test_default_batch_is_rounded_up_to_what_any_number_of_ranks_divides(
    options: TrainOptions, world_size: int, expected: Batch
) -> None:
    assert Batch.resolve(options, world_size) == expected


@pytest.mark.parametrize(
    ("options", "world_size", "expected"),
    [
        (TrainOptions(global_batch=10), 4, ["got 10", "4 rank(s)", "8 or 12"]),
        (TrainOptions(global_batch=3, accumulation=2), 2, ["got 3", "accumulation 2", "such as 4"]),
        (TrainOptions(global_batch=10, micro_batch=3), 2, ["got 10", "micro_batch 3", "6 or 12"]),
        (
            TrainOptions(global_batch=10, micro_batch=2, accumulation=2),
            2,
            ["got 10", "micro_batch 2 x accumulation 2 x 2 rank(s) is 8"],
        ),
    ],
)
def test_batch_sizes_that_contradict_name_all_factors(
    options: TrainOptions, world_size: int, expected: list[str]
) -> None:
    with refused(*expected):
        Batch.resolve(options, world_size)


def test_pinned_options_mean_the_same_global_batch_on_other_ranks() -> None:
    options = TrainOptions(micro_batch=2, accumulation=3)
    config = dataclasses.replace(RunConfig(), train=options)
    pinned = config.pinned(Batch.resolve(options, world_size=4).global_batch)
    assert Batch.resolve(pinned.train, world_size=4) == Batch(24, 2, 3)
    assert Batch.resolve(pinned.train, world_size=2) == Batch(24, 2, 6)


def test_learning_rate_rises_linearly_then_falls_to_its_floor() -> None:
    options = TrainOptions(steps=21, warmup=4, learning_rate=1.0, min_learning_rate=0.2)
    rates = [options.learning_rate_factor(step) for step in range(options.steps)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert rates[12] == pytest.approx(0.6)  # half way down
    assert rates[20] == pytest.approx(0.2)
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[4:]))
    assert options.learning_rate_factor(100) == pytest.approx(0.2)
    by_default = TrainOptions(steps=1000, warmup=0)
    assert by_default.learning_rate_factor(999) == pytest.approx(0.1)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_schedules_are_those_of_torch(schedule: Any) -> None:
    steps, warmup, peak, low = 40, 5, 0.5, 0.02
    options: dict[str, Any] = {} if schedule == "constant" else {"min_learning_rate": low}
    if schedule == "wsd":
        options["decay_steps"] = 8
    ours = TrainOptions(
        steps=steps, warmup=warmup, schedule=schedule, learning_rate=peak, **options
    )
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=peak)
    rise = scheduler.LinearLR(optimizer, 1 / warmup, total_iters=warmup - 1)
    after = steps - 1 - warmup
    plain = scheduler.ConstantLR(optimizer, 1.0)
    falls: dict[str, tuple[list[Any], list[int]]] = {
        "cosine": ([scheduler.CosineAnnealingLR(optimizer, after, low)], []),
        "linear": ([scheduler.LinearLR(optimizer, 1.0, low / peak, after)], []),
        "wsd": ([plain, scheduler.LinearLR(optimizer, 1.0, low / peak, 8)], [steps - 1 - 8]),
        "constant": ([plain], []),
    }
    parts, ends = falls[schedule]
    theirs = scheduler.SequentialLR(optimizer, [rise, *parts], [warmup, *ends])
    for step in range(steps):
        rate = peak * ours.learning_rate_factor(step)
        assert rate == pytest.approx(theirs.get_last_lr()[0], abs=1e-12), step
        optimizer.step()
        theirs.step()


def test_decay_of_wsd_is_a_tenth_and_begins_after_the_warm_up() -> None:
    wsd = TrainOptions(steps=100, warmup=10, schedule="wsd", min_learning_rate=0.0)
    factors = [wsd.learning_rate_factor(step) for step in range(100)]
    assert factors[9:90] == [1.0] * 81
    assert factors[90:] == pytest.approx([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0])
    long = dataclasses.replace(wsd, decay_steps=1000)
    linear = TrainOptions(steps=100, warmup=10, schedule="linear", min_learning_rate=0.0)
    for step in range(100):
        assert long.learning_rate_factor(step) == linear.learning_rate_factor(step)


def test_nodes_fill_one_after_the_other() -> None:
    assert parse_nodes("2x3", 6) == [0, 0, 0, 1, 1, 1]
    assert parse_nodes("1x1", 1) == [0]
    for text in ("2x2", "1x3"):
        with pytest.raises(ConfigError, match="the job has 6"):
            parse_nodes(text, 6)


@pytest.mark.parametrize("text", ["", "2", "x", "2x", "2x0", "-1x2", "2 x 2", "2x2x2"])
def test_nodes_of_other_form_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected nodes x ranks per node"):
        parse_nodes(text, 4)


def test_environment_is_read_into_one_record() -> None:
    assert Environment.read({}) == Environment(strict=False, fake_nodes=None, timeout_s=1800.0)
    variables = {"HPCZERO_STRICT": "1", "HPCZERO_FAKE_NODES": "2x2", "HPCZERO_TIMEOUT": "2.5"}
    assert Environment.read(variables) == Environment(True, "2x2", 2.5)
    assert Environment.read(dict.fromkeys(variables, "")) == Environment()
    assert Environment.read({"HPCZERO_STRICT": "0", "HPCZERO_TIMEOUT": "0"}).timeout_s == 0.0
    named = Environment.read({"HPCZERO_ALGORITHMS": "measure", "XDG_CACHE_HOME": "/cache"})
    assert Environment.read({"HPCZERO_KEEP_HEAP": "0"}).keep_heap is False
    assert Environment.read({"HPCZERO_OVERLAP": "0"}).overlap is False
    assert Environment.read({"MALLOC_TRIM_THRESHOLD_": "131072"}).tunes_malloc
    assert (named.algorithms, named.cache) == ("measure", Path("/cache/hpczero"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HPCZERO_STRICT", "yes"),
        ("HPCZERO_KEEP_HEAP", "no"),
        ("HPCZERO_OVERLAP", "2"),
        ("HPCZERO_FAKE_NODES", "two"),
        ("HPCZERO_TIMEOUT", "soon"),
        ("HPCZERO_TIMEOUT", "-1"),
        ("HPCZERO_TIMEOUT", "inf"),
    ],
)
def test_unusable_environment_variable_is_named(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        Environment.read({name: value})
