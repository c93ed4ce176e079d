"""Models of ``--model.factory`` by the training command: gone on with anywhere, or refused by name."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from hpczero.errors import ConfigError
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
WRONG = """
import numpy, torch
import mine
from hpczero.errors import launcher_rank


class Wrong(mine.Spiral):
    pass


def filled(name, tensor):
    tensor.fill_(1)


def build(kind):
    gives = {
        "no_module": ("build", lambda self: None),
        "no_parameters": ("build", lambda self: torch.nn.Identity()),
        "frozen": ("build", lambda self: torch.nn.Linear(2, 2).requires_grad_(False)),
        "nothing": ("samples", lambda self: None),
        "three": ("samples", lambda self: (1, 2, 3)),
        "arrays": ("samples", lambda self: ((numpy.ones((9, 2)), numpy.ones(9)), None)),
        "ragged": ("samples", lambda self: ([(torch.ones(n), 1) for n in range(24)], None)),
        "loss_of_nothing": ("loss", lambda self, model, points, labels: None),
        "loss_of_each": ("loss", lambda self, model, points, labels: model(points)),
        "constant": ("loss", lambda self, model, points, labels: model(points).detach().sum()),
        "card_of_objects": ("card", lambda self: {"of": object()}),
        "no_card": ("card", lambda self: None),
        "metric_of_each": ("metric", lambda self, model, points, labels: labels),
        "card_with_nan": ("card", lambda self: {"of": float("nan")}),
        "context_0": ("context", 0),
        "context_half": ("context", 1.5),
        "context_true": ("context", True),
        "flops_0": ("flops_per_token", 0),
        "flops_nan": ("flops_per_token", float("nan")),
        "unit": ("unit", ""),
        "metric_name": ("metric_name", None),
        "reads_text": ("reads_text", "no"),
        "transformer": ("transformer", {"layers": 3}),
        "other_reads_text": ("reads_text", launcher_rank() == 1),
        "other_meta": ("on_meta", launcher_rank() == 1),
        "other_context": ("context", 1 + launcher_rank()),
        "other_flops": ("flops_per_token", 1.5 + launcher_rank()),
        "other_unit": ("unit", f"sample {launcher_rank()}"),
        "other_metric": ("metric_name", "accuracy" if launcher_rank() else ""),
        "other_card": ("card", lambda self: {"of": ["a", launcher_rank()]}),
        "more_card": ("card", lambda self: {"of": 1} if launcher_rank() else {}),
        "other_decay": ("decays", lambda self, name, parameter: launcher_rank() == 1),
        "other_units": ("units", lambda self, model: [("0",)] if launcher_rank() else None),
        "other_values": ("initializer", lambda self, model, seed: filled if launcher_rank() else None),
    }
    name, method = gives[kind]
    return type("Wrong", (Wrong,), {name: method})(4)
"""
KINDS = {
    "no_module": "Wrong.build() gave NoneType, expected a torch.nn.Module",
    "no_parameters": "gave a Identity in which no parameter requires gradients",
    "frozen": "gave a Linear in which no parameter requires gradients",
    "nothing": "Wrong.samples() gave NoneType, expected two",
    "three": "Wrong.samples() gave tuple of 3, expected two",
    "arrays": "training set of Wrong: got a tuple with arrays of NumPy",
    "ragged": "training set of Wrong: samples 0, 1, 2 ... cannot be stacked (stack expects each",
    "loss_of_nothing": "loss of the adapter gave 'NoneType', expected a tensor of one element",
    "loss_of_each": "loss of the adapter gave a tensor of shape (6, 2), expected",
    "constant": "loss gave a number that no parameter of the model has a part in",
    "card_of_objects": "gave what no checkpoint can hold (Object of type object is not JSON",
    "no_card": "gave what no checkpoint can hold ('NoneType' object is not iterable)",
    "metric_of_each": "metric of the adapter gave a tensor of shape (",
    "card_with_nan": "gave what no checkpoint can hold (Out of range float values",
    "context_0": "Wrong.context is 0, expected a whole number of at least 1",
    "context_half": "Wrong.context is 1.5, expected",
    "context_true": "Wrong.context is True, expected",
    "flops_0": "Wrong.flops_per_token is 0, expected a number above 0, or None",
    "flops_nan": "Wrong.flops_per_token is nan, expected",
    "unit": "Wrong.unit is '', expected a word",
    "metric_name": "Wrong.metric_name is None, expected a word",
    "reads_text": "Wrong.reads_text is 'no', expected True or False",
    "transformer": "Wrong.transformer is dict, expected an hpczero.models.GPTConfig",
    "other_reads_text": "Wrong.reads_text is True, where rank 0 has False",
    "other_meta": "Wrong.on_meta is True, where rank 0 has False",
    "other_context": "Wrong.context is 2, where rank 0 has 1",
    "other_flops": "Wrong.flops_per_token is 2.5, where rank 0 has 1.5",
    "other_unit": "Wrong.unit is 'sample 1', where rank 0 has 'sample 0'",
    "other_metric": "Wrong.metric_name is 'accuracy', where rank 0 has ''",
    "other_card": "Wrong.card()['of'] is ['a', 1], where rank 0 has ['a', 0]",
    "more_card": "Wrong.card()['of'] is 1, where rank 0 has missing",
    "other_decay": "built another model, optimizer, stage",
    "other_units": "the units that a rule makes of them",
    "other_values": "What differs: initialize",
}
START = "--model.factory wrong:build --train.steps 1 --run.folder started --run.overwrite true"
REFUSED |= {f'{START} --model.arguments {{"kind":"{kind}"}}': told for kind, told in KINDS.items()}
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
    options = SimpleNamespace(
        **dict.fromkeys(("layers", "hidden", "heads", "vocab", "positions", "sequence")),
        model="mine:build",
    )
    with pytest.raises(ConfigError, match="got 'mine:build', because nothing is built here"):
        choose_config(options)


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
