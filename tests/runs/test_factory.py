"""Models of ``--model.factory`` by the training command: gone on with anywhere, or refused by name."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from hpczero.errors import ConfigError
from hpczero.options.config import PlannedModel
from hpczero.options.reading import read_run_config
from hpczero.plan.__main__ import choose_config
from hpczero.run.results.metrics import read_metrics
from tests.helpers.mpirun import ROOT, Finished, run_ranks
from tests.helpers.runs import losses, steps

PAGE = ROOT / "docs" / "models.md"
LIMIT_S = 90.0
OPTIONS = {
    "model.factory": "mine:build",
    "run.name": "r",
    "train.steps": "24",
    "train.learning_rate": "1e-2",
    "checkpoint.every": "5",
    "evaluation.every": "12",
    "log.tensorboard": "false",
    "log.progress": "lines",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the adapter of the page, as it stands there."""
    found = re.search(r"```python\n# file: mine\.py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None, "the page has an adapter"
    (tmp_path / "mine.py").write_text(found[1])
    (tmp_path / "wrong.py").write_text(WRONG)
    return tmp_path


def train(
    folder: Path, ranks: int = 2, *more: str, module: str = "train", **changes: Any
) -> Finished:
    named = {name.replace("__", "."): str(value) for name, value in changes.items()}
    given = {**OPTIONS, "run.folder": ".", **named} if module == "train" else {}
    words = [word for name, value in given.items() for word in (f"--{name}", value)]
    return started(folder, ranks, "-m", f"hpczero.{module}", *words, *more)


def started(folder: Path, ranks: int, *words: str) -> Finished:
    return run_ranks(ranks, words, LIMIT_S, env={"PYTHONPATH": f"{ROOT}:."}, cwd=folder)


@pytest.mark.slow
def test_adapter_of_the_page_trains_stops_and_goes_on_on_other_ranks(folder: Path) -> None:
    whole = train(folder, run__name="whole").ended()
    said = whole.stdout + whole.stderr
    assert "data: of Spiral: 1,000 training and 250 held-out samples" in said, whole
    assert re.search(r"step 24/24 .* held-out [\d.]+ .*metric 0\.\d+ .*samples/s", said), whole
    assert "held-out accuracy: " in said, whole
    assert (folder / "whole" / "loss.png").stat().st_size > 1000

    (folder / "r").mkdir()
    (folder / "r" / "STOP").touch()
    train(folder, 3, parallel__stage=1).ended(75)
    assert steps(folder) == [1]
    train(folder, 1).ended()
    assert steps(folder) == [24, 20, 15]
    np.testing.assert_allclose(losses(folder), losses(folder, "whole"), rtol=1e-5)
    last = read_metrics(folder / "r" / "metrics.jsonl")[-1]
    assert last.held_out_loss is not None
    assert last.held_out_metric is not None
    assert last.held_out_metric > 0.5
    assert last.tokens == 24 * 12
    # Two layers of 2 x 32 weights, two FLOPs each, three passes.
    assert last.tflops / last.tokens_per_s * 1e12 == pytest.approx(3 * 2 * (2 * 32 + 32 * 2))
    assert math.isfinite(last.grad_norm)

    ours, theirs = (load_file(folder / n / "model.safetensors") for n in ("r", "whole"))
    assert ours.keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}
    for name, values in ours.items():
        np.testing.assert_allclose(values, theirs[name], atol=1e-5)

    job = train(folder, 1, model__arguments='{"width":16}', train__steps=30).ended(78)
    assert 'model.arguments was None and is {"width":16}' in job.stderr, job
    for path in ("r", "r/checkpoints"):
        job = train(folder, 1, path, module="sample").ended(78)
        assert "weights of a model of --model.factory 'mine:build', and" in job.stderr, job


# Found by one job of two ranks, each after the other, as the training command would find it alone.
REFUSED = {
    "--model.factory nowhere:build": "no module 'nowhere' in the current folder",
    "--model.factory mine:bild": "mine has no function 'bild'; it has Spiral, build",
    '--model.arguments {"wide":3}': "mine:build(width=32) got an unexpected keyword argument 'wide'",
    '--model.factory textwrap:dedent --model.arguments {"text":"x"}': "gave str, expected an hpczero.Adapter",
    "--data.path mine.py": "data.path: got 'mine.py', and Spiral brings its own samples",
    "--parallel.auto true": "parallel.auto: the planner counts presets, and nothing of mine:build",
    "--activations.checkpointing block": "Spiral does not say what the blocks of Sequential are",
    "--parallel.tensor 2": "parallel.tensor: Spiral does not say which layers ranks share",
    "--parallel.pipeline 2": "parallel.pipeline: Spiral does not say how Sequential is cut",
    "--parallel.context 2": "parallel.context: got 2, but samples of Spiral are no sequences",
}
# An attribute of the adapter, what it is instead, and what is told of it.
KINDS = """
build = lambda self: None -> Wrong.build() gave NoneType, expected a torch.nn.Module
build = lambda self: torch.nn.Identity() -> gave a Identity in which no parameter requires gradients
build = lambda self: torch.nn.Linear(2, 2).requires_grad_(False) -> gave a Linear in which no parameter requires
samples = lambda self: None -> Wrong.samples() gave NoneType, expected two
samples = lambda self: (1, 2, 3) -> Wrong.samples() gave tuple of 3, expected two
samples = lambda self: ((numpy.ones((9, 2)), numpy.ones(9)), None) -> of Wrong: got a tuple with arrays of NumPy
samples = lambda self: ([(torch.ones(n), 1) for n in range(24)], None) -> samples 0, 1, 2 ... cannot be stacked (stack
loss = lambda self, model, points, labels: None -> loss of the adapter gave 'NoneType', expected a tensor of one element
loss = lambda self, model, points, labels: model(points) -> loss of the adapter gave a tensor of shape (6, 2), expected
loss = lambda self, model, points, labels: model(points).detach().sum() -> a number that no parameter of the model has
metric = lambda self, model, points, labels: labels -> metric of the adapter gave a tensor of shape (
card = lambda self: {"of": object()} -> gave what no checkpoint can hold (Object of type object is not JSON
card = lambda self: None -> gave what no checkpoint can hold ('NoneType' object is not iterable)
card = lambda self: {"of": float("nan")} -> gave what no checkpoint can hold (Out of range float values
context = 0 -> Wrong.context is 0, expected a whole number of at least 1
context = 1.5 -> Wrong.context is 1.5, expected
context = True -> Wrong.context is True, expected
flops_per_token = 0 -> Wrong.flops_per_token is 0, expected a number above 0, or None
flops_per_token = float("nan") -> Wrong.flops_per_token is nan, expected
unit = "" -> Wrong.unit is '', expected a word
metric_name = None -> Wrong.metric_name is None, expected a word
reads_text = "no" -> Wrong.reads_text is 'no', expected True or False
transformer = {"layers": 3} -> Wrong.transformer is dict, expected an hpczero.models.GPTConfig
reads_text = launcher_rank() == 1 -> Wrong.reads_text is True, where rank 0 has False
on_meta = launcher_rank() == 1 -> Wrong.on_meta is True, where rank 0 has False
context = 1 + launcher_rank() -> Wrong.context is 2, where rank 0 has 1
flops_per_token = 1.5 + launcher_rank() -> Wrong.flops_per_token is 2.5, where rank 0 has 1.5
unit = f"sample {launcher_rank()}" -> Wrong.unit is 'sample 1', where rank 0 has 'sample 0'
metric_name = "accuracy" if launcher_rank() else "" -> Wrong.metric_name is 'accuracy', where rank 0 has ''
card = lambda self: {"of": ["a", launcher_rank()]} -> Wrong.card()['of'] is ['a', 1], where rank 0 has ['a', 0]
card = lambda self: {"of": 1} if launcher_rank() else {} -> Wrong.card()['of'] is 1, where rank 0 has missing
decays = lambda self, name, parameter: launcher_rank() == 1 -> built another model, optimizer, stage
units = lambda self, model: [("0",)] if launcher_rank() else None -> the units that a rule makes of them
initializer = lambda self, model, seed: filled if launcher_rank() else None -> What differs: initialize
"""
CHANGED, TOLD = zip(*(line.split(" -> ") for line in KINDS.strip().splitlines()), strict=True)
WRONG = f"""
import numpy, torch
import mine
from hpczero.errors import launcher_rank
class Wrong(mine.Spiral):
    pass
def filled(name, tensor):
    tensor.fill_(1)
def build(kind):
    attribute, _, value = {CHANGED!r}[kind].partition(" = ")
    return type("Wrong", (Wrong,), {{attribute: eval(value)}})(4)
"""
START = "--model.factory wrong:build --train.steps 1 --run.folder started --run.overwrite true"
REFUSED |= {f'{START} --model.arguments {{"kind":{n}}}': told for n, told in enumerate(TOLD)}
ALL = """
import json, shlex, sys
from hpczero.accelerator import choose_accelerator
from hpczero.errors import HpcZeroError, launcher_rank
from hpczero.options.reading import read_run_config
from hpczero.run.loop import train
from hpczero.job.signals import Signals

told = {}
for line in json.loads(sys.argv[1]):
    try:
        train(read_run_config(shlex.split(line, posix=False)), None, choose_accelerator("cpu"), Signals())
    except HpcZeroError as error:
        told[line] = [type(error).__name__, str(error)]
with open(f"told-{launcher_rank()}", "w") as file:  # lines of two ranks may run into each other
    json.dump(told, file)
"""


@pytest.mark.worth("own models: refused by name on every rank")
def test_what_a_factory_cannot_do_is_refused_by_name_on_every_rank(folder: Path) -> None:
    common = " ".join(f"--{name} {value}" for name, value in OPTIONS.items())
    lines = {f"{common} {line}": told for line, told in REFUSED.items()}
    started(folder, 2, "-c", ALL, json.dumps([*lines])).ended()
    for rank in range(2):
        told = json.loads((folder / f"told-{rank}").read_text())
        assert told.keys() == lines.keys()
        for line, (kind, text) in told.items():
            assert kind in ("ConfigError", "PlanError", "DataError", "StepError"), (line, kind)
            assert lines[line] in text, (rank, line, text)
    assert not (folder / "runs").exists()


def test_card_with_tuples_is_that_of_the_checkpoint_when_the_run_goes_on(folder: Path) -> None:
    (folder / "stated.py").write_text(STATED)
    for last in (1, 2):
        train(folder, 1, model__factory="stated:build", train__steps=last).ended()
    assert steps(folder) == [2, 1]


STATED = """
import mine


class Stated(mine.Spiral):
    def card(self):
        return {"sizes": (2, 3), "by": {1: "a"}}


def build():
    return Stated(4)
"""


def test_plan_says_that_it_builds_nothing() -> None:
    with pytest.raises(ConfigError, match="got 'mine:build', because nothing is built here"):
        choose_config(PlannedModel(model="mine:build"))


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("--model.factory mine:torch.nn", "got 'mine:torch.nn', expected package.module:function"),
        (
            "--model.factory mine:build --model.layers 3",
            "model.layers: got 3, expected nothing beside",
        ),
        (
            "--model.factory mine:build --model.preset gpt2",
            "model.preset: got 'gpt2', expected nothing",
        ),
        ("--model.arguments {}", "model.arguments: got '{}', expected model.factory beside it"),
        ("--model.factory mine:build --model.arguments [1]", "expected a JSON object such as"),
    ],
)
def test_options_that_exclude_each_other_are_refused_before_anything_starts(
    typed: str, told: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        read_run_config(typed.split())


def test_arguments_may_be_a_table_of_the_file(folder: Path) -> None:
    (folder / "run.toml").write_text(
        '[model]\nfactory = "mine:build"\n[model.arguments]\nwidth = 5\n[train]\nsteps = 1\n'
        '[run]\nname = "r"\nfolder = "."\n'
    )
    started(folder, 1, "-m", "hpczero.train", "run.toml").ended()
    assert load_file(folder / "r" / "model.safetensors")["0.weight"].shape == (5, 2)
    line = json.loads((folder / "r" / "metrics.jsonl").read_text().splitlines()[0])
    assert line["held_out_metric"] is not None
