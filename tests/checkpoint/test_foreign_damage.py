"""Weights of other programs that came to harm, or hold what a model cannot: an error, a warning, never other values."""

from __future__ import annotations

import errno
import json
import logging
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import hpczero
from hpczero.checkpoint.disk.format import MASTER
from hpczero.checkpoint.disk.stored import Stored
from hpczero.checkpoint.foreign import weight_files
from hpczero.checkpoint.foreign.converting import convert
from hpczero.checkpoint.foreign.exporting import WeightsForm, export
from hpczero.checkpoint.foreign.weight_files import TorchFile, WeightFiles
from hpczero.data import ByteTokenizer
from hpczero.errors import CheckpointError, CheckpointMismatch, ConfigError
from hpczero.models import GPT, GPTConfig
from hpczero.run.results.weights import Weights, write_weights
from tests.checkpoint.damage import flip, put
from tests.checkpoint.foreign import checkpoint, other_state, state, theirs
from tests.checkpoint.programs import Program
from tests.files.test_regular import at_once
from tests.helpers.small_models import tiny_gpt
from tests.helpers.world import World

FLIPS = 250


def content(path: Path, **options: Any) -> dict[str, Any]:
    """What a reader is given, all of it checked."""
    weights = WeightFiles(path, **options)
    weights.check()
    return {name: (held.dtype, held.whole().tolist()) for name, held in weights.items()}


def small() -> dict[str, Tensor]:
    return {"a.weight": torch.arange(64.0).view(8, 8), "b": torch.ones(5, dtype=torch.bfloat16)}


# --- flips -----------------------------------------------------------------------------------------------------------


def no_flip_is_silent(path: Path, read: Callable[[], Any], least: float) -> None:
    """Of the file ``path``; at least this share of them is found, the others change nothing."""
    expected = read()
    draw = random.Random(11)
    found = 0
    for where in draw.sample(range(8 * path.stat().st_size), FLIPS):
        flip(path, where // 8, where % 8)
        try:
            assert read() == expected, f"bit {where}"
        except CheckpointError:
            found += 1
        flip(path, where // 8, where % 8)
    assert read() == expected
    assert found >= least * FLIPS


def test_no_flip_of_a_torch_file_is_silent(tmp_path: Path) -> None:
    """Of its archive's fields some mean nothing, and most of a small file is the room between its parts."""
    path = tmp_path / "w.pt"
    torch.save({**small(), "c": torch.arange(3000.0)}, path)
    no_flip_is_silent(path, lambda: content(path), 0.7)


def test_no_flip_of_our_own_safetensors_is_silent(tmp_path: Path) -> None:
    export(checkpoint(tmp_path / "run", state()), tmp_path / "out", WeightsForm(dtype="bf16"))
    (path,) = (tmp_path / "out").glob("*.safetensors")
    no_flip_is_silent(path, lambda: content(path), 1.0)


def test_no_flip_of_the_final_weights_is_silent(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    config = GPTConfig(vocab_size=257, context=4, layers=1, hidden=4, heads=1)
    model = GPT(config)
    model.initialize_all(seed=3)
    tensors = dict(model.named_parameters())
    write_weights(path, tensors, model=config, tokenizer=ByteTokenizer(), step=7)

    def read() -> Any:
        weights = Weights(path)
        found = {}
        for name, tensor in tensors.items():
            into = torch.empty_like(tensor)
            weights.read_into(name, into)
            found[name] = into.tolist()
        return weights.model, weights.step, weights.tokenizer.to_json(), found

    no_flip_is_silent(path, read, 1.0)


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_files_without_digests_are_told_once(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    if kind == "torch":
        path = tmp_path / "w.pt"
        torch.serialization.set_crc32_options(False)
        try:
            torch.save(small(), path)
        finally:
            torch.serialization.set_crc32_options(True)
    else:
        path = tmp_path / "w.safetensors"
        save_file(small(), path)
    with caplog.at_level(logging.WARNING):
        content(path)
    (warned,) = caplog.records
    assert f"{path}: has no digests" in warned.getMessage()
    caplog.clear()
    torch.save(small(), tmp_path / "checked.pt")
    content(tmp_path / "checked.pt")
    assert not caplog.records


# --- what is no file -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt", "w.safetensors.index.json"])
@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "loop"])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, name: str, kind: str) -> None:
    path = tmp_path / name
    put(path, kind)
    with at_once(), pytest.raises((ConfigError, CheckpointError), match=f"{name}: "):
        WeightFiles(path)
    with at_once(), pytest.raises((ConfigError, CheckpointError)):
        Weights(path)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"weight_map": {"a": "w.pt", "a": "x.pt"}}',
        '{"weight_map": {"a": 7}}',
        '{"weight_map": {"a": "' + "n" * 300 + '"}}',
        "9" * 5001,
    ],
)
def test_index_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "w.safetensors.index.json"
    path.write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json: "):
        WeightFiles(path)


# --- what cannot be weights ------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # torch's, of tensors in beta state
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda: torch.eye(3).to_sparse(), "'w' is sparse_coo, expected a tensor of plain memory"),
        (lambda: torch.eye(3).to_sparse_csr(), "'w' is sparse_csr"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "'w' is quantized"),
        (lambda: torch.empty(3, device="meta"), "'w' is without values"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "'w' is nested"),
        (lambda: [1, 2], "'w' is a list, expected tensors only"),
    ],
)
def test_tensors_that_are_no_plain_memory_are_refused(
    tmp_path: Path, value: Callable[[], object], message: str
) -> None:
    torch.save({"w": value()}, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=message):
        WeightFiles(tmp_path / "w.pt")


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.EMFILE, "Too many open files")])
@pytest.mark.parametrize("at", ["zipfile.ZipFile", "torch.load"])
def test_failure_of_the_machine_is_not_called_damage_of_a_torch_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str, error: Exception
) -> None:
    """Or a sound file is fetched again."""
    torch.save({"a": torch.zeros(3)}, tmp_path / "w.pt")

    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(at, fails)
    said = r"w.pt: cannot be read: (out of memory|Too many)"
    with pytest.raises(CheckpointError, match=said) as told:
        TorchFile(tmp_path / "w.pt")
    assert "damaged" not in str(told.value)


def test_two_keys_that_would_be_one_are_refused(tmp_path: Path) -> None:
    twice = theirs(tiny_gpt())
    torch.save({**twice, "transformer.wte.weight": twice["wte.weight"] + 1}, tmp_path / "g.pt")
    with pytest.raises(CheckpointError, match=r"'transformer\.wte\.weight' and another key both"):
        WeightFiles(tmp_path / "g.pt", layout="gpt2")


def test_layers_without_end_are_refused(tmp_path: Path) -> None:
    far = {**theirs(tiny_gpt()), "h.999999999.ln_1.weight": torch.ones(18)}
    torch.save(far, tmp_path / "w.pt")
    with at_once(), pytest.raises(CheckpointMismatch, match="another model than GPT-2"):
        convert(tmp_path / "w.pt", tmp_path / "run", layout="gpt2")


@pytest.mark.parametrize(
    "fields",
    [{"n_embd": 0}, {"n_embd": "18"}, {"n_layer": 10**4000}, {"n_inner": 7}, {"resid_pdrop": "x"}],
    ids=lambda fields: next(iter(fields)),
)
def test_config_that_cannot_be_is_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    torch.save(theirs(tiny_gpt()), tmp_path / "w.pt")
    config = {"model_type": "gpt2", "n_embd": 18, "n_head": 2, **fields}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointMismatch, match=f"config.json: .*{next(iter(fields))} is "):
        WeightFiles(tmp_path / "w.pt", layout="gpt2")


# --- values that do not fit ------------------------------------------------------------------------------------------


def test_values_that_fp32_cannot_hold_are_not_made_infinite(tmp_path: Path) -> None:
    fine = {"w": torch.tensor([1.5, float("inf"), 1e-300], dtype=torch.float64)}
    torch.save(fine, tmp_path / "fine.pt")
    path = convert(tmp_path / "fine.pt", tmp_path / "run")
    with Stored(path) as stored:
        (found,) = stored.read(MASTER, 0, 3)
    assert found.tolist() == [1.5, float("inf"), 0.0]
    torch.save({"w": torch.tensor([1.0, 1e300], dtype=torch.float64)}, tmp_path / "w.pt")
    said = r"w.pt: 'w' holds 1e\+300, which torch.float32 cannot"
    with pytest.raises(CheckpointMismatch, match=said):
        convert(tmp_path / "w.pt", tmp_path / "other")
    assert not (tmp_path / "other").exists() or not list((tmp_path / "other").glob("*step*"))


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_damage_that_one_rank_finds_is_told_on_all(world: World, program: Program) -> None:
    path = world.folder / "w.pt"

    def damaged() -> None:
        torch.save(other_state(), path)
        data = path.read_bytes()
        flip(path, data.index(other_state()["frozen.weight"].numpy().tobytes()) + 40, 3)

    world.on_root(damaged)
    load = partial(hpczero.checkpoint.import_weights, path, program.model)
    world.raises(CheckpointError, r"w.pt: damaged at '.*/data/[0-9]+'", load)


# --- casts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["first", "last"])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("shape", [(), (3001,), (7, 433), (1, 5000), (40, 3, 30)])
def test_a_value_beyond_the_dtype_is_found_anywhere_in_a_large_tensor(
    shape: tuple[int, ...], turned: bool, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_files, "CHECKED_NUMEL", 1000)
    values = torch.linspace(-9, 9, torch.Size(shape).numel()).view(shape)
    seen = values.movedim(0, -1) if turned and shape else values
    assert torch.equal(weight_files.cast(seen, torch.float16, "w"), seen.half())
    values.view(-1)[0 if place == "first" else -1] = 70000.0
    with pytest.raises(CheckpointMismatch, match=r"w holds 70000, which torch\.float16 cannot"):
        weight_files.cast(seen, torch.float16, "w")


def test_a_whole_number_that_would_change_is_found() -> None:
    with pytest.raises(CheckpointMismatch):
        weight_files.cast(torch.arange(2**24, 2**24 + 3), torch.float32, "w")
