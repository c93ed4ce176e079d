"""Weights files, and text from them: the sharded command writes what the dense model would."""

from __future__ import annotations

import dataclasses
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hpczero.data import ByteTokenizer
from hpczero.errors import CheckpointError, ConfigError
from hpczero.models import GPT, GPTConfig, generate
from hpczero.options.config import LayoutOptions
from hpczero.run.results.weights import Weights, write_weights
from hpczero.sample import SampleOptions
from tests.helpers.mpirun import run_ranks, run_typed

MODEL = GPTConfig(vocab_size=257, context=16, layers=2, hidden=24, heads=2)


def dense_model(config: GPTConfig = MODEL) -> GPT:
    """Initial weights, but large enough for the model to have strong opinions."""
    model = GPT(config)
    model.initialize_all(seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(20.0 if parameter.dim() > 1 else 1.0)
    return model


def save(model: GPT, path: Path) -> Path:
    # The tied weight under both names
    tensors = dict(model.named_parameters(remove_duplicate=False))
    write_weights(path, tensors, model=model.config, tokenizer=ByteTokenizer(), step=7)
    return path


def dense_text(model: GPT, prompt: Sequence[int], **choices: Any) -> str:
    tokens = generate(model, torch.tensor(list(prompt)), context=MODEL.context, **choices)
    return ByteTokenizer().decode(tokens.tolist()).decode(errors="replace")


def test_weights_file_gives_back_model_tokenizer_step_and_every_parameter(tmp_path: Path) -> None:
    model = dense_model()
    weights = Weights(save(model, tmp_path / "model.safetensors"))
    assert (weights.model, weights.step) == (MODEL, 7)
    assert weights.tokenizer.decode([100, 101, 102]) == b"def"
    for name, parameter in model.named_parameters():
        read = torch.empty_like(parameter)
        weights.read_into(name, read)
        assert torch.equal(read, parameter), name
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


def test_tied_weight_is_written_once_and_an_untied_one_in_full(tmp_path: Path) -> None:
    tied_nbytes, untied_nbytes = (
        save(dense_model(config), tmp_path / "model.safetensors").stat().st_size
        for config in (MODEL, dataclasses.replace(MODEL, tie_embeddings=False))
    )
    assert untied_nbytes - tied_nbytes == pytest.approx(4 * 257 * 24, abs=200)


def test_parameter_of_other_name_or_shape_is_refused(tmp_path: Path) -> None:
    weights = Weights(save(dense_model(), tmp_path / "model.safetensors"))
    with pytest.raises(CheckpointError, match=r"'wpe' cannot be read"):
        weights.read_into("wpe", torch.empty(16, 24))
    with pytest.raises(CheckpointError, match=r"'wpe.weight' is \(16, 24\), expected \(8, 24\)"):
        weights.read_into("wpe.weight", torch.empty(8, 24))


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated_weights_are_refused(keep: int, tmp_path: Path) -> None:
    path = save(dense_model(), tmp_path / "model.safetensors")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="damaged"):
        Weights(path)


def test_missing_and_foreign_weights_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    for missing in (tmp_path, path):
        with pytest.raises(ConfigError, match="no such weights"):
            Weights(missing)
    save_file({"weight": torch.zeros(3)}, path)
    with pytest.raises(CheckpointError, match="not weights of"):
        Weights(path)


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o002, 0o664)])
def test_weights_have_the_permissions_of_the_users_umask(
    tmp_path: Path, mask: int, mode: int
) -> None:
    before = os.umask(mask)
    try:
        path = save(dense_model(), tmp_path / "model.safetensors")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == mode


@pytest.mark.parametrize(
    ("n", "args", "code", "expected"),
    [
        (2, "--stage 7", 78, "--stage"),
        (2, "--tokens -1", 78, "--tokens: got -1"),
        (2, "--temperature nan", 78, "--temperature: got nan"),
        (3, "--parallel.tensor 3", 78, "for a model of 2 attention head(s)"),
        (3, "--parallel.pipeline 3", 78, "got 3 stages for a model of 2 block(s)"),
        (3, "--parallel.tensor 2", 78, "expected a divisor of the ranks, which are 3"),
        (2, "", 65, "damaged"),
    ],
)
def test_bad_input_ends_the_job_with_its_code(
    n: int, args: str, code: int, expected: str, tmp_path: Path
) -> None:
    path = save(dense_model(), tmp_path / "model.safetensors")
    if code == 65:
        path.write_bytes(path.read_bytes()[:-1])
    done = run_ranks(n, ["-m", "hpczero.sample", path, *args.split()], timeout=100).ended(code)
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("n", "layout"),
    [
        (1, "--stage 0"),
        (3, "--stage 3"),
        (2, "--parallel.tensor 2"),
        (2, "--parallel.pipeline 2 --parallel.shard 1"),
        (4, "--parallel.tensor 2 --parallel.pipeline 2"),
        (4, "--parallel.tensor 2 --parallel.sequence true --parallel.shard 1"),
    ],
)
def test_sharded_and_divided_models_write_the_text_of_the_dense_model(
    n: int, layout: str, tmp_path: Path
) -> None:
    model = dense_model()
    save(model, tmp_path / "model.safetensors")
    choices = "--tokens 40 --temperature 0.7 --top-k 9 --seed 5"
    words = ["--prompt", "def ", *choices.split(), *layout.split()]
    done = run_typed(n, ["-m", "hpczero.sample", tmp_path, *words], timeout=100).ended()
    expected = dense_text(model, b"def ", num_tokens=40, temperature=0.7, top_k=9, seed=5)
    assert len(expected) > 20  # longer than the context of 16 tokens
    assert "\ufffd" in expected  # bytes that are not UTF-8
    assert done.stdout.splitlines() == f"{expected}\n".splitlines()


def test_prompt_may_be_empty(tmp_path: Path) -> None:
    model = dense_model()
    path = save(model, tmp_path / "model.safetensors")
    words = ["-m", "hpczero.sample", str(path), "--tokens", "12", "--temperature", "0"]
    done = run_ranks(2, words, timeout=100).ended()
    expected = dense_text(model, [ByteTokenizer.separator], num_tokens=12, temperature=0.0)
    assert done.stdout.splitlines() == f"{expected}\n".splitlines()


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ({"context": 2}, "--parallel.context: got 2, but a text grows by one token"),
        ({"secondary": True}, "--parallel.secondary: got true, but in sampling"),
        ({"pipeline": 2, "schedule": "gpipe"}, "--parallel.schedule: got gpipe, but in sampling"),
        ({"pipeline": 2, "interleave": 2}, "--parallel.interleave: got 2, but in sampling"),
        ({"sequence": True}, "parallel.sequence: got true without tensor parallelism"),
    ],
)
def test_degrees_that_do_nothing_for_a_text_are_refused(
    layout: dict[str, object], expected: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        SampleOptions("runs/mine", parallel=LayoutOptions(**layout))  # type: ignore[arg-type]
