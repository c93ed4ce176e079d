"""Two names for one parameter in weights of other programs: tied where both have one value, never by losing one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from hpczero.checkpoint.disk.folder import read_manifest
from hpczero.checkpoint.disk.format import Table
from hpczero.checkpoint.foreign.converting import convert
from hpczero.checkpoint.foreign.exporting import WeightsForm, export
from hpczero.checkpoint.foreign.weight_files import WeightFiles
from hpczero.checkpoint.reading import match_parameters
from hpczero.errors import CheckpointMismatch
from tests.checkpoint.foreign import theirs
from tests.helpers.small_models import tiny_gpt

HEAD, TABLE = "lm_head.weight", "wte.weight"


def gpt2() -> dict[str, Tensor]:
    """Of a tied model, as other programs have it."""
    return {name: value.contiguous() for name, value in theirs(tiny_gpt()).items()}


def put(folder: Path, weights: dict[str, Tensor], **config: Any) -> Path:
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
    folder = put(tmp_path / "hf", change(gpt2()), **config)
    with pytest.raises(CheckpointMismatch, match=re.compile(said, re.DOTALL)):
        convert(folder, tmp_path / "out", layout="gpt2")
    assert not (tmp_path / "out").exists()


def test_way_out_of_a_head_that_differs_keeps_both(tmp_path: Path) -> None:
    weights = gpt2()
    head = weights[TABLE] + 1
    folder = put(tmp_path / "hf", {**weights, HEAD: head}, tie_word_embeddings=False)
    path = convert(folder, tmp_path / "out", layout="gpt2")
    export(path, tmp_path / "again", WeightsForm(layout="gpt2"))
    found = WeightFiles(tmp_path / "again")
    assert torch.equal(found[HEAD].whole(), head)
    assert torch.equal(found[f"transformer.{TABLE}"].whole(), weights[TABLE])
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False


@pytest.mark.parametrize("config", [{}, {"tie_word_embeddings": True}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_that_is_the_table_once_more_is_tied(
    tmp_path: Path, dtype: torch.dtype, config: dict[str, Any]
) -> None:
    weights = {name: value.to(dtype) for name, value in gpt2().items()}
    weights[TABLE][0, 0] = torch.nan  # equal to itself here
    folder = put(tmp_path / "hf", {**weights, HEAD: weights[TABLE].clone()}, **config)
    assert tied(convert(folder, tmp_path / "out", layout="gpt2"))


def test_head_of_its_own_stays_where_nothing_ties_it(tmp_path: Path) -> None:
    weights = gpt2()
    other = put(tmp_path / "hf", {**weights, HEAD: weights[TABLE] + 1})
    assert not tied(convert(other, tmp_path / "out", layout="gpt2"))
    twice = {**weights, HEAD: weights[TABLE].clone()}
    said = put(tmp_path / "said", twice, tie_word_embeddings=False)
    assert not tied(convert(said, tmp_path / "out2", layout="gpt2"))


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
    told = [record.getMessage() for record in caplog.records if "no number" in record.getMessage()]
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
