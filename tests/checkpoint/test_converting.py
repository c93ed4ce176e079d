"""Weights that another program wrote become a checkpoint, in one process; what is none is refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from hpczero.checkpoint.__main__ import Verdict, verify
from hpczero.checkpoint.disk.folder import Folder, read_manifest
from hpczero.checkpoint.disk.format import Table
from hpczero.checkpoint.disk.lock import Lock
from hpczero.checkpoint.foreign.converting import convert
from hpczero.checkpoint.foreign.exporting import WeightsForm, export
from hpczero.checkpoint.foreign.weight_files import WeightFiles, smallest_box
from hpczero.checkpoint.reading import match_parameters
from hpczero.errors import CheckpointError, CheckpointMismatch, ConfigError
from tests.checkpoint.foreign import INDEX, once, other_state, theirs, write, write_sharded
from tests.checkpoint.programs import Net
from tests.helpers.small_models import same_state, tiny_gpt


@given(shape=st.lists(st.integers(1, 5), max_size=4), data=st.data())
def test_box_holds_the_range_and_little_more(shape: list[int], data: Any) -> None:
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    start = data.draw(st.integers(0, tensor.numel() - 1))
    stop = data.draw(st.integers(start + 1, tensor.numel()))
    box, skip = smallest_box(tuple(shape), start, stop)
    part = tensor[box]
    found = part.reshape(-1)[skip : skip + stop - start]
    assert torch.equal(found, torch.arange(start, stop))
    one_row = part.numel() // (box[-1].stop - box[-1].start) if box else 1
    assert part.numel() < stop - start + 2 * one_row


def test_import_that_waited_for_another_is_refused_as_one_that_comes_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have seen an empty folder."""
    weights = write(tmp_path, other_state(), "safetensors")
    out, acquire = tmp_path / "out", Lock.acquire

    def after_another(lock: Lock, patience_s: float = 0.0) -> None:
        monkeypatch.setattr(Lock, "acquire", acquire)
        convert(weights, out, step=5)
        acquire(lock, patience_s)

    monkeypatch.setattr(Lock, "acquire", after_another)
    with pytest.raises(ConfigError, match="holds checkpoints already"):
        convert(weights, out, step=7)
    assert [manifest.step for _, manifest in Folder(out).valid()] == [5]


@pytest.mark.parametrize("kind", ["torch", "safetensors", "sharded"])
def test_any_range_is_read_from_any_file(tmp_path: Path, kind: str) -> None:
    state = other_state()
    weights = WeightFiles(write(tmp_path, state, kind))
    for name, held in weights.items():
        flat = state[name].reshape(-1)
        for start in range(0, held.numel, 5):
            for stop in (start + 1, (start + held.numel + 1) // 2, held.numel):
                pieces = list(held.pieces(start, max(stop, start)))
                found = torch.cat(pieces) if pieces else torch.empty(0)
                assert torch.equal(found, flat[start : max(stop, start)].float()), name


def test_files_that_are_not_weights_are_refused(tmp_path: Path) -> None:
    def refuses(kind: type[Exception], message: str, path: Path, **options: Any) -> None:
        with pytest.raises(kind, match=message):
            WeightFiles(path, **options)

    refuses(ConfigError, "no such file", tmp_path / "none.pt")
    refuses(ConfigError, "no weights there", tmp_path)
    refuses(ConfigError, "layout: got 'x', expected one of hpczero, gpt2", tmp_path, layout="x")
    torch.save({"model": {"a": torch.ones(1)}}, tmp_path / "nested.pt")
    refuses(CheckpointError, "'model' is a dict, expected tensors only", tmp_path / "nested.pt")
    torch.save({"model": Net()}, tmp_path / "pickle.pt")
    refuses(CheckpointError, "cannot read it with weights_only=True", tmp_path / "pickle.pt")
    torch.save([torch.ones(1)], tmp_path / "list.pt")
    refuses(CheckpointError, "holds a list, expected a state_dict", tmp_path / "list.pt")
    (tmp_path / "short.safetensors").write_bytes(b"x" * 20)
    refuses(CheckpointError, "no safetensors file, or damaged", tmp_path / "short.safetensors")
    (tmp_path / "x.safetensors").write_bytes(b"")
    refuses(ConfigError, "holds several sets of weights", tmp_path)


def test_index_must_fit_its_files(tmp_path: Path) -> None:
    write_sharded(tmp_path / "w", once(other_state()))
    index = tmp_path / "w" / INDEX
    places = json.loads(index.read_text())["weight_map"]

    def refuses(message: str, changed: dict[str, Any]) -> None:
        index.write_text(json.dumps(changed))
        with pytest.raises(CheckpointError, match=message):
            WeightFiles(tmp_path / "w")

    lost = {**places, "lost": places["head.weight"]}
    refuses("'lost' in the index and in no file", {"weight_map": lost})
    refuses("1 of its 4 files are not there", {"weight_map": {**places, "a": "b.safetensors"}})
    refuses("expected files in its own folder", {"weight_map": {"a": "../b.safetensors"}})
    refuses("has no 'weight_map'", {})


def test_checkpoint_of_weights_is_sound_and_exports_the_same(tmp_path: Path) -> None:
    state = other_state()
    path = convert(write(tmp_path, state, "torch"), tmp_path / "run", buffers=["mean"])
    assert path.name == "step-000000000"
    assert verify(path).verdict is Verdict.SOUND
    export(path, tmp_path / "out.pt", WeightsForm(format="torch"))
    assert same_state(torch.load(tmp_path / "out.pt", weights_only=True), state)
    with pytest.raises(ConfigError, match="holds checkpoints already"):
        convert(tmp_path / "weights.pt", tmp_path / "run")
    with pytest.raises(ConfigError, match="cannot tie x to y: there is no such parameter"):
        convert(tmp_path / "weights.pt", tmp_path / "more", tied={"x": "y"})


def test_our_own_export_tells_what_is_tied_and_what_are_buffers(tmp_path: Path) -> None:
    first = convert(write(tmp_path, other_state(), "torch"), tmp_path / "a", buffers=["mean"])
    export(first, tmp_path / "out")
    second = convert(tmp_path / "out", tmp_path / "b")
    one, other = read_manifest(first), read_manifest(second)
    assert {row.name for row in one.table.rows} == {row.name for row in other.table.rows}
    assert sorted(one.meta["buffers"]) == sorted(other.meta["buffers"])
    assert {r.name for r in other.table.rows if r.tied_to is not None} == {"back.weight"}


def test_gpt2_becomes_a_checkpoint_that_exports_the_same(tmp_path: Path) -> None:
    state = theirs(tiny_gpt())
    save_file(state, tmp_path / "model.safetensors")
    path = convert(tmp_path, tmp_path / "run", layout="gpt2")
    export(path, tmp_path / "out", WeightsForm(layout="gpt2", heads=2))
    found = dict(WeightFiles(tmp_path / "out").items())
    masks = [name for name in state if name.endswith((".attn.bias", "masked_bias"))]
    assert {f"transformer.{name}" for name in state if name not in masks} == found.keys()
    assert all(torch.equal(held.whole(), state[name[12:]]) for name, held in found.items())
    again = convert(tmp_path / "out", tmp_path / "again", layout="gpt2")
    assert read_manifest(again).meta["extra"]["model"]["heads"] == 2


def test_other_weights_are_no_gpt2(tmp_path: Path) -> None:
    state = theirs(tiny_gpt())
    del state["h.1.ln_2.bias"]
    save_file({**state, "h.0.attn.c_key.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    said = r"there is no h\.1\.ln_2\.bias; GPT-2 has no h\.0"
    with pytest.raises(CheckpointMismatch, match=said):
        convert(tmp_path, tmp_path / "run", layout="gpt2")
    config = {"model_type": "gpt2", "activation_function": "relu"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    said = "activation_function is 'relu', expected 'gelu_new'"
    with pytest.raises(CheckpointMismatch, match=said):
        WeightFiles(tmp_path, layout="gpt2")


# --- two names for one parameter: tied where both have one value, never by losing one


HEAD, TABLE = "lm_head.weight", "wte.weight"


def gpt2() -> dict[str, Tensor]:
    """Of a tied model, as other programs have it."""
    return {name: value.contiguous() for name, value in theirs(tiny_gpt()).items()}


def folder_of(folder: Path, weights: dict[str, Tensor], **config: Any) -> Path:
    """A folder as Hugging Face's; config.json only where something is said in it."""
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    if config:
        hidden, vocab_size = weights[TABLE].shape[1], weights[TABLE].shape[0]
        sizes = {"n_embd": hidden, "vocab_size": vocab_size, "n_head": 2, "n_layer": 2}
        sizes["n_positions"] = weights["wpe.weight"].shape[0]
        (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes, **config}))
    return folder


def tied(checkpoint: Path) -> bool:
    return any(row.tied_to is not None for row in read_manifest(checkpoint).table.rows)


REFUSED: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], dict[str, Any], str]] = {
    "a head that config.json ties": (
        lambda w: {**w, HEAD: w[TABLE] + 1},
        {"tie_word_embeddings": True},
        r"lm_head\.weight differs from wte\.weight.*Set tie_word_embeddings to false",
    ),
    "a table of whole numbers": (
        lambda w: {**w, TABLE: w[TABLE].to(torch.int8)},
        {},
        r"that is torch\.int8, expected floating point",
    ),
    "a tensor less": (
        lambda w: {n: v for n, v in w.items() if n != "h.1.attn.c_proj.bias"},
        {},
        r"there is no h\.1\.attn\.c_proj\.bias; bring all",
    ),
    "a layer less": (
        lambda w: w,
        {"n_layer": 3},
        r"config\.json says layers 3, and the tensors 2",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_gpt2_that_loses_something_or_cannot_be_is_refused(tmp_path: Path, case: str) -> None:
    change, config, said = REFUSED[case]
    folder = folder_of(tmp_path / "hf", change(gpt2()), **config)
    with pytest.raises(CheckpointMismatch, match=re.compile(said, re.DOTALL)):
        convert(folder, tmp_path / "out", layout="gpt2")
    assert not (tmp_path / "out").exists()


def test_way_out_of_a_head_that_differs_keeps_both(tmp_path: Path) -> None:
    weights = gpt2()
    head = weights[TABLE] + 1
    folder = folder_of(tmp_path / "hf", {**weights, HEAD: head}, tie_word_embeddings=False)
    path = convert(folder, tmp_path / "out", layout="gpt2")
    export(path, tmp_path / "again", WeightsForm(layout="gpt2"))
    found = WeightFiles(tmp_path / "again")
    assert torch.equal(found[HEAD].whole(), head)
    assert torch.equal(found[f"transformer.{TABLE}"].whole(), weights[TABLE])
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False


@pytest.mark.parametrize(
    ("more", "config", "ties"),
    [
        (0.0, {}, True),
        (0.0, {"tie_word_embeddings": True}, True),
        (0.0, {"tie_word_embeddings": False}, False),
        (1.0, {}, False),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_is_tied_where_it_is_the_table_once_more_and_nobody_says_otherwise(
    tmp_path: Path, dtype: torch.dtype, more: float, config: dict[str, Any], ties: bool
) -> None:
    weights = {name: value.to(dtype) for name, value in gpt2().items()}
    weights[TABLE][0, 0] = torch.nan  # equal to itself here
    folder = folder_of(tmp_path / "hf", {**weights, HEAD: weights[TABLE] + more}, **config)
    assert tied(convert(folder, tmp_path / "out", layout="gpt2")) is ties


@pytest.mark.parametrize(
    ("second", "problem"),
    [
        (torch.ones(3, 2) * 2, "different values in the file"),
        (torch.ones(2, 3), r"different shapes, \(2, 3\) and \(3, 2\) in the file"),
    ],
)
def test_names_that_are_told_to_be_tied_must_have_one_value(
    tmp_path: Path, second: Tensor, problem: str
) -> None:
    torch.save({"a.weight": torch.ones(3, 2), "b.weight": second}, tmp_path / "own.pt")
    with pytest.raises(CheckpointMismatch, match=f"cannot tie b.weight to a.weight.*{problem}"):
        convert(tmp_path / "own.pt", tmp_path / "out", tied={"b.weight": "a.weight"})
    assert not (tmp_path / "out").exists()


def test_names_that_are_told_to_be_tied_may_both_be_there(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3, 2), "b": torch.ones(3, 2).half()}, tmp_path / "own.pt")
    assert tied(convert(tmp_path / "own.pt", tmp_path / "out", tied={"b": "a"}))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_values_that_are_no_numbers_are_told_with_their_tensor(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, value: float
) -> None:
    torch.save({"good": torch.ones(3), "bad": torch.tensor([1.0, value])}, tmp_path / "own.pt")
    convert(tmp_path / "own.pt", tmp_path / "out")
    told = [record.getMessage() for record in caplog.records if "NaN values" in record.getMessage()]
    assert len(told) == 1
    assert "in bad;" in told[0]


@pytest.mark.parametrize(
    ("shape", "way"),
    [
        ((7, 4), "Its vocabulary has 5 ids, and that of a run is its tokens'"),
        ((5, 8), "Build the model it was saved from"),
    ],
)
def test_model_of_another_vocabulary_is_told_where_that_comes_from(
    tmp_path: Path, shape: tuple[int, int], way: str
) -> None:
    torch.save({TABLE: torch.ones(5, 4), "a": torch.ones(3)}, tmp_path / "own.pt")
    path = convert(tmp_path / "own.pt", tmp_path / "out")
    ours = Table.build([(TABLE, shape, 0), ("a", (3,), 0)], {})
    with pytest.raises(CheckpointMismatch, match=re.escape(way)) as told:
        match_parameters(read_manifest(path), ours, path)
    assert f"{TABLE} is (5, 4) in the checkpoint and {shape} in the model" in str(told.value)
