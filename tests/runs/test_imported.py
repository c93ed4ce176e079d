"""Weights of another program, from ``checkpoint import`` to the first step; runs that other ranks take up."""

from __future__ import annotations

import dataclasses
import json
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hpczero.checkpoint import Loaded
from hpczero.checkpoint.disk.folder import read_manifest
from hpczero.checkpoint.foreign.converting import convert
from hpczero.checkpoint.foreign.weight_files import WeightFiles
from hpczero.data import Batches, TokenFile
from hpczero.errors import CheckpointMismatch, ConfigError
from hpczero.models import GPT, PRESETS, GPTConfig
from hpczero.options.config import RunConfig
from hpczero.options.environment import Environment
from hpczero.options.reading import read_run_config
from hpczero.run.results.folder import RunFolder
from hpczero.run.starting.precheck import mistake_of
from hpczero.run.starting.resume import check, check_ranks
from tests.checkpoint.foreign import theirs
from tests.helpers.mpirun import Finished, run_command
from tests.helpers.refused import refused
from tests.helpers.runs import losses, options, steps, train

LIMIT_S = 90
CONTEXT, BATCH = 16, 12
HEAD, TABLE = "lm_head.weight", "wte.weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tokens.h5; and weights.safetensors of a model for them, as a program that knows nothing of us writes it."""
    folder = tmp_path_factory.mktemp("imported")
    (folder / "text.txt").write_text("the rank owns its shard\n" * 200)
    prepare = f"-m hpczero.data prepare {folder}/text.txt --out {folder}/tokens.h5".split()
    run_command([sys.executable, *prepare], LIMIT_S).ended()
    torch.manual_seed(3)
    model = GPT(sizes(folder))
    weights = {name: value.detach() * 1.5 for name, value in model.named_parameters()}
    save_file(weights, folder / "weights.safetensors")
    return folder


def tokens(folder: Path) -> TokenFile:
    return TokenFile.open(folder / "tokens.h5")


def sizes(folder: Path) -> GPTConfig:
    with tokens(folder) as file:
        micro = PRESETS["gpt-micro"]
        return dataclasses.replace(micro, context=CONTEXT, vocab_size=file.vocab_size)


@torch.no_grad()
def expected_loss(folder: Path) -> float:
    """Of the first batch, by a dense model with those weights."""
    model = GPT(sizes(folder))
    weights = WeightFiles(folder / "weights.safetensors")
    missing = model.load_state_dict({name: weights[name].whole() for name in weights}, strict=False)
    assert set(missing.missing_keys) <= {"lm_head.weight"}
    with tokens(folder) as file:
        samples = Batches(file.train, CONTEXT, BATCH, 0).micro_batch(0, 0, 0, 1, 1)
        return float(model(*map(torch.from_numpy, samples)))


def run(folder: Path, made: Path, name: str, **changes: Any) -> Finished:
    changes = {"train__steps": 2, "data__path": made / "tokens.h5", **changes}
    return train(folder, 1, run__name=name, **changes)


def imported(*words: object) -> str:
    """The last line of the import of something by the command."""
    command = [sys.executable, "-m", "hpczero.checkpoint", "import", *map(str, words)]
    return run_command(command, LIMIT_S).ended().stdout.splitlines()[-1]


def bring(made: Path, out: Path, **options: Any) -> Path:
    return convert(made / "weights.safetensors", out, tied={HEAD: TABLE}, **options)


# --- where the run looks, and where the weights are


@pytest.mark.parametrize("name", ["ft", "default"])
def test_run_whose_folder_is_itself_a_folder_of_checkpoints_is_not_begun(
    tmp_path: Path, made: Path, name: str
) -> None:
    path = bring(made, tmp_path / name)
    job = run(tmp_path, made, name).ended(78)
    assert f"--resume.from {path} and another --run.name" in job.stderr, job
    assert {entry.name for entry in (tmp_path / name).iterdir()} == {path.name, "LATEST"}


def test_run_with_checkpoints_of_its_own_is_not_held_up_by_others_beside(tmp_path: Path) -> None:
    for name in ("step-000000000", "checkpoints/step-000000005"):
        (tmp_path / "ft" / name).mkdir(parents=True)
    RunFolder(tmp_path / "ft").check()


# --- a beginning


@pytest.mark.parametrize(
    ("out", "name"),
    [
        ("imported", "r"),
        ("ft3/checkpoints", "r"),
        ("ft3/checkpoints", "ft3"),
        ("default/checkpoints", "default"),
    ],
)
def test_imported_weights_are_what_the_first_step_is_taken_with(
    tmp_path: Path, made: Path, out: str, name: str
) -> None:
    path = bring(made, tmp_path / out)
    own = out.startswith(name)  # imported as checkpoints of the run itself
    job = run(tmp_path, made, name, **({} if own else {"resume__from": tmp_path / out})).ended()
    assert f"beginning at step 0 with the imported weights of {path}" in job.said, job
    assert losses(tmp_path, name)[0] == pytest.approx(expected_loss(made), rel=1e-6)
    assert steps(tmp_path, name)[0] == 2
    if not own:  # from then on it is a run as any other
        job = run(tmp_path, made, name, train__steps=3).ended()
        assert "step-000000002: step 2, saved by 1 rank(s)" in job.said, job


def test_imported_weights_of_a_later_step_begin_there(tmp_path: Path, made: Path) -> None:
    bring(made, tmp_path / "w", step=4)
    job = run(tmp_path, made, "r", resume__from=tmp_path / "w", train__steps=6).ended()
    assert "beginning at step 4 with the imported weights" in job.said, job
    assert [
        json.loads(line)["step"] for line in (tmp_path / "r/metrics.jsonl").read_text().splitlines()
    ] == [5, 6]


IDENTITY = {"data": "d", "global_batch": 8, "seed": 0}
CHECKED = GPTConfig(vocab_size=257, context=16, layers=2, hidden=32, heads=2)


@pytest.mark.parametrize(
    ("extra", "imported", "problem"),
    [
        ({}, False, "saw other samples: data was None and is 'd'; global_batch was None"),
        ({}, True, ""),
        ({"data": "e"}, True, "saw other samples: data was 'e'"),
        ({"model": {"layers": 3}}, True, "another model: model.layers was 3 and is 2"),
        ({"model": {"vocab_size": 9}}, True, "another model: model.vocab_size was 9 and is 257"),
        ({"model": {"dropout": 0.1}}, True, ""),
        (IDENTITY, False, ""),
        ({**IDENTITY, "model": {}}, False, ""),
        ({**IDENTITY, "model": dataclasses.asdict(CHECKED)}, False, ""),
        # The same shapes, and other numbers
        ({**IDENTITY, "model": {"dropout": 0.1}}, False, "model: model.dropout was 0.1 and is 0.0"),
        ({**IDENTITY, "model": {"heads": 4}}, False, "model: model.heads was 4 and is 2"),
        ({**IDENTITY, "model": {"context": 8}}, False, "model: model.context was 8 and is 16"),
        ({**IDENTITY, "model": {"positions": "rotary"}}, False, "was 'rotary' and is 'learned'"),
    ],
)
def test_checkpoint_is_held_against_the_run_unless_it_says_nothing_or_is_imported(
    extra: dict[str, Any], imported: bool, problem: str
) -> None:
    found = Loaded(Path("step-5"), 5, json.loads(json.dumps(extra)), 0, imported=imported)
    now = dataclasses.replace(CHECKED, checkpoint_activations=True)  # gives the same numbers
    identity = {**IDENTITY, "model": dataclasses.asdict(now)}
    if problem:
        with pytest.raises(ConfigError, match=f"step-5: belongs to a run .*{problem}"):
            check(found, identity, 10, own=False)
    else:
        check(found, identity, 10, own=False)


def test_imported_weights_of_all_steps_leave_nothing_to_do(tmp_path: Path, made: Path) -> None:
    bring(made, tmp_path / "ft3" / "checkpoints", step=2)
    job = run(tmp_path, made, "ft3").ended(78)
    assert "has 2 steps behind it, and train.steps is 2" in job.stderr, job


def test_checkpoints_of_a_run_without_options_are_still_nobodys(tmp_path: Path, made: Path) -> None:
    run(tmp_path, made, "r").ended()
    (tmp_path / "new").mkdir()
    shutil.copytree(tmp_path / "r" / "checkpoints", tmp_path / "new" / "checkpoints")
    job = run(tmp_path, made, "new", train__steps=3).ended(78)
    way = f"--resume.from {tmp_path}/new/checkpoints and another --run.name"
    assert way in job.stderr, job
    assert job.stderr.index(way) < job.stderr.index("--run.overwrite true"), job


@pytest.mark.parametrize("out", ["ft", "ft/checkpoints"])
def test_last_line_of_import_is_a_command_that_begins_there(
    tmp_path: Path, made: Path, out: str
) -> None:
    tied = f"{HEAD}={TABLE}"
    line = imported(made / "weights.safetensors", tmp_path / out, "--tied", tied)
    assert "HEADS, its number of attention heads; CONTEXT, the tokens" in line, line
    told = {"HEADS": "2", "CONTEXT": str(CONTEXT)}  # shapes of this one tell neither
    typed = [told.get(word, word) for word in shlex.split(line.rpartition(": ")[2])]
    assert typed[:3] == ["python", "-m", "hpczero.train"]
    rest = options(tmp_path, train__steps=2, data__path=made / "tokens.h5")[2:]
    named = rest.index("--run.name")
    del rest[named : named + 2]
    job = run_command([sys.executable, *typed[1:], *rest], LIMIT_S).ended()
    assert "beginning at step 0 with the imported weights" in job.said, job


def test_command_of_import_has_the_sizes_that_the_weights_tell(tmp_path: Path) -> None:
    config = GPTConfig(vocab_size=257, context=8, layers=1, hidden=8, heads=2)
    save_file(theirs(GPT(config)), tmp_path / "model.safetensors")
    told = {"model_type": "gpt2", "n_head": 2, "n_embd": 8, "n_positions": 8, "n_layer": 1}
    (tmp_path / "config.json").write_text(json.dumps({**told, "vocab_size": 257}))
    line = imported(tmp_path, tmp_path / "out", "--layout", "gpt2")
    typed = shlex.split(line.partition(": ")[2])
    model = read_run_config(typed[3:]).model
    assert (model.layers, model.hidden, model.heads, model.context) == (1, 8, 2, 8)


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_command_of_import_has_the_sizes_that_shapes_tell_and_asks_for_the_heads(
    tmp_path: Path, made: Path, suffix: str
) -> None:
    config = GPTConfig(vocab_size=257, context=CONTEXT, layers=3, hidden=24, heads=2)
    weights = {name: value.bfloat16() for name, value in theirs(GPT(config)).items()}
    weights[HEAD] = weights[TABLE].clone()
    file = tmp_path / f"weights.{suffix}"
    save_file(weights, file) if suffix == "safetensors" else torch.save(weights, file)
    line = imported(file, tmp_path / "out", "--layout", "gpt2")
    assert line.startswith("to train from it, put in what it does not tell (HEADS"), line
    typed = shlex.split(line.rpartition(": ")[2].replace(" HEADS ", " 2 "))
    model = read_run_config(typed[3:]).model
    assert (model.layers, model.hidden, model.context) == (3, 24, CONTEXT)
    assert model.positions == "learned"
    words = ["--run.folder", str(tmp_path), "--train.steps", "1", "--train.global-batch", "2"]
    words += ["--data.path", str(made / "tokens.h5"), "--evaluation.batches", "0"]
    job = run_command([sys.executable, *typed[1:], *words], LIMIT_S).ended()
    assert "beginning at step 0 with the imported weights" in job.said, job


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"tie_embeddings": False}, "lm_head.weight is a parameter of its own"),
        ({"ffn_multiple": 2}, "its MLP is 16 wide, and there it is 32"),
        ({}, "its parameters are not those of the GPT there"),
    ],
)
def test_weights_that_train_cannot_train_are_said_to_be_that(
    tmp_path: Path, change: dict[str, Any], why: str
) -> None:
    model = GPT(GPTConfig(vocab_size=257, context=8, layers=1, hidden=8, heads=2, **change))
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    tied = ["--tied", f"{HEAD}={TABLE}"] if change.get("tie_embeddings", True) else []
    if not change:
        weights["more.weight"] = torch.ones(2)
    save_file(weights, tmp_path / "w.safetensors")
    line = imported(tmp_path / "w.safetensors", tmp_path / "out", *tied)
    assert f"hpczero.train has no such preset: {why}" in line
    assert "--resume.from" not in line


def test_import_asks_for_tokens_of_another_vocabulary_and_for_more_steps(tmp_path: Path) -> None:
    model = GPT(GPTConfig(vocab_size=300, context=8, layers=1, hidden=8, heads=2))
    save_file(theirs(model), tmp_path / "w.safetensors")
    line = imported(tmp_path / "w.safetensors", tmp_path / "o", "--layout=gpt2", "--step=300")
    assert "TOKENS.h5, a token file of its vocabulary of 300 ids" in line
    assert "--data.path TOKENS.h5 --train.steps 600 --resume.from" in line


# --- names of GPT-2


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_names_of_gpt2_are_not_taken_literally_unless_that_is_said(
    tmp_path: Path, prefix: str
) -> None:
    model = GPT(GPTConfig(vocab_size=31, context=8, layers=1, hidden=8, heads=2))
    weights = {f"{prefix}{name}": value for name, value in theirs(model).items()}
    save_file(weights, tmp_path / "w.safetensors")
    with pytest.raises(CheckpointMismatch, match=r"give --layout gpt2.* or --layout hpczero"):
        convert(tmp_path / "w.safetensors", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    literal = convert(tmp_path / "w.safetensors", tmp_path / "literal", layout="hpczero")
    names = [row.name for row in read_manifest(literal).table.rows]
    assert f"{prefix}h.0.attn.c_attn.weight" in names
    ours = convert(tmp_path / "w.safetensors", tmp_path / "ours", layout="gpt2")
    assert "blocks.0.attention.qkv.weight" in {row.name for row in read_manifest(ours).table.rows}


def test_names_that_are_somebody_elses_are_taken_as_they_are(tmp_path: Path) -> None:
    weights = {"h.0.fc.weight": torch.ones(2), "wte.weight": torch.ones(2, 2)}
    save_file(weights, tmp_path / "w.safetensors")
    path = convert(tmp_path / "w.safetensors", tmp_path / "out")
    assert [row.name for row in read_manifest(path).table.rows] == ["h.0.fc.weight", "wte.weight"]


# --- other ranks


@pytest.fixture(scope="module")
def of_four(made: Path) -> Path:
    """A run of a global batch of 4, by 2 ranks, with a checkpoint."""
    given = {"train__steps": 1, "train__global_batch": 4, "data__path": made / "tokens.h5"}
    train(made, 2, run__name="four", **given).ended()
    return made


def of(folder: Path, *words: str) -> RunConfig:
    given = options(folder, run__name="four", train__steps=2, data__path=folder / "tokens.h5")
    return read_run_config([*given[2:], *words])


@pytest.mark.parametrize(
    ("words", "ranks", "told"),
    [
        ("--train.global-batch 4", 3, "1, 2 or 4 ranks"),
        ("--train.global-batch 6", 3, "1, 2 or 4 ranks"),
        ("", 3, "1, 2 or 4 ranks"),
        ("--train.global-batch 4 --train.micro-batch 2", 4, "1 or 2 ranks"),
        ("--train.global-batch 4", 1, ""),
        ("--train.global-batch 6", 2, ""),  # these ranks are not what is wrong
        ("--train.global-batch 6 --run.overwrite true", 3, ""),
        ("--train.global-batch 6 --resume.from never", 3, ""),
        ("--train.global-batch 6 --run.name other", 3, ""),
    ],
)
def test_ranks_that_the_batch_of_a_run_is_not_spread_over_are_told_those_that_are(
    of_four: Path, words: str, ranks: int, told: str
) -> None:
    config = of(of_four, *words.split())
    folder = RunFolder.of(config.run)
    if not told:
        check_ranks(config, folder, ranks)
        return
    with refused("a global batch of 4", f"goes on with {told}") as late:
        check_ranks(config, folder, ranks)
    launched = Environment(launched_by="PMI_SIZE", launched_ranks=ranks, launched_rank=0)
    early = mistake_of(config, PRESETS["gpt-micro"], launched)
    assert str(early) == str(late.value)
