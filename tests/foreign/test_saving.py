"""Saving: a folder that transformers loads, in the dtype that was asked for, there whole or not at all."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

import hpczero
from hpczero import finetune
from hpczero.checkpoint.foreign.safe_file import WeightsWriter
from hpczero.errors import CheckpointError, CheckpointMismatch, ConfigError
from tests.checkpoint.damage import flip
from tests.compat.architectures import ARCHITECTURES
from tests.foreign import llama
from tests.helpers.parallel import on_root, parallel_assert
from tests.helpers.small_models import adamw, raises_on_all, tiny_gpt, zeroified

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.ranks(1, 2, 3),
    pytest.mark.filterwarnings("ignore", "error:::hpczero"),
]


class Words:
    """A tokenizer, as far as saving goes."""

    def save_pretrained(self, folder: Path) -> None:
        (Path(folder) / "tokenizer.json").write_text("{}")


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_transformers_loads_what_was_saved(
    comm: MPI.Intracomm, topology: Topology, folder: Path, dtype: str, stage: int
) -> None:
    llama.on_disk(comm, folder / "a", tie_word_embeddings=True)
    model, _ = llama.sharded(topology, folder / "a", stage=stage)
    hpczero.hf.save_pretrained(model, folder / "b", tokenizer=Words(), dtype=dtype, shard_mib=1)
    hpczero.release(model)
    problems = []
    if comm.rank == 0:
        load = llama.library().AutoModelForCausalLM.from_pretrained
        again, info = load(folder / "b", output_loading_info=True)
        problems = [f"{what} {names}" for what, names in info.items() if names]
        kind = torch.float32 if dtype == "fp32" else torch.bfloat16
        wanted = llama.made(tie_word_embeddings=True).to(kind)
        ids = llama.tokens()
        if not torch.equal(again(ids).logits, wanted(ids).logits):
            problems.append("logits")
        there = sorted(path.name for path in (folder / "b").iterdir())
        expected = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
        if there != expected:
            problems.append(f"files {there}")
        config = json.loads((folder / "b" / "config.json").read_text())
        if (
            config["architectures"] != ["LlamaForCausalLM"]
            or str(kind) != f"torch.{config['dtype']}"
        ):
            problems.append(f"config {config}")
    parallel_assert(comm, not problems, str(problems))


def test_several_files_have_an_index_and_come_back(
    comm: MPI.Intracomm, topology: Topology, folder: Path
) -> None:
    options: dict[str, Any] = {"hidden_size": 300, "num_attention_heads": 3, "vocab_size": 1001}
    llama.on_disk(comm, folder / "a", **options)
    model, _ = llama.sharded(topology, folder / "a")
    hpczero.hf.save_pretrained(model, folder / "b", shard_mib=1)
    hpczero.release(model)
    count = len(list((folder / "b").glob("model-*-of-*.safetensors")))
    parallel_assert(comm, count > 2, str(count))
    again, weights = llama.sharded(topology, folder / "b")  # through our own digests too
    llama.holds(comm, again, lambda: llama.made(**options))
    hpczero.release(again)
    parallel_assert(comm, not weights.missing, str(weights.missing))
    file = sorted((folder / "b").glob("model-*.safetensors"))[1]
    # Inside of values, which no header shows.
    on_root(comm, flip, file, file.stat().st_size - 9, 0)
    raises_on_all(comm, CheckpointError, "digest", llama.sharded, topology, folder / "b")


@pytest.mark.parametrize("name", ["mixtral", "qwen2", "resnet"])
def test_a_checkpoint_is_exported_as_the_model_is_saved(
    comm: MPI.Intracomm, topology: Topology, folder: Path, name: str
) -> None:
    """Experts under the names of their files, tied weights, running statistics."""
    built: Any = next(each for each in ARCHITECTURES if each.name == name).build()
    on_root(comm, built.save_pretrained, folder / "a")
    model, weights = hpczero.hf.load(folder / "a", topology=topology)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hpczero.zeroify(model, optimizer, topology=topology, initialize=weights)
    hpczero.checkpoint.save(folder / "checkpoints", model, optimizer, step=1)
    hpczero.hf.save_pretrained(model, folder / "b", dtype="bf16")
    hpczero.release(model)
    wrong = ""
    if comm.rank == 0:
        hpczero.hf.export(folder / "checkpoints", folder / "c", like=folder / "a", dtype="bf16")
        theirs, saved, exported = (load_file(folder / x / "model.safetensors") for x in "abc")
        wrong += "" if saved.keys() == theirs.keys() else "other names than transformers writes; "
        if saved.keys() != exported.keys() or not all(
            torch.equal(exported[key], value) and exported[key].dtype == value.dtype
            for key, value in saved.items()
        ):
            wrong += "other weights; "
        configs = [(folder / x / "config.json").read_bytes() for x in ("b", "c")]
        wrong += "" if configs[0] == configs[1] else "another config.json; "
        llama.made().save_pretrained(folder / "d")
        try:
            hpczero.hf.export(folder / "checkpoints", folder / "e", like=folder / "d")
        except CheckpointMismatch as error:
            wrong += "" if "not of the model" in str(error) else str(error)
        else:
            wrong += "another model was taken"
    parallel_assert(comm, not wrong and not (folder / "e").exists(), wrong)


def test_a_failed_save_leaves_nothing(
    comm: MPI.Intracomm, topology: Topology, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama.on_disk(comm, folder / "a")
    model, _ = llama.sharded(topology, folder / "a")
    save = partial(hpczero.hf.save_pretrained, model, folder / "b")
    put, calls = WeightsWriter.put, []

    def fails(writer: WeightsWriter, pairs: Any) -> None:
        calls.append(1)
        if len(calls) == 5:
            raise CheckpointError("no space")
        put(writer, pairs)

    with monkeypatch.context() as patch:
        patch.setattr(WeightsWriter, "put", fails)
        raises_on_all(comm, CheckpointError, "no space", save)
    parallel_assert(comm, os.listdir(folder) == ["a"], str(os.listdir(folder)))
    save()  # and the model goes on
    raises_on_all(comm, ConfigError, "is there already", save)
    hpczero.release(model)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("kind", ["ours", "peft"])
def test_models_with_adapters_are_refused_and_what_writes_them_is_named(
    comm: MPI.Intracomm, topology: Topology, folder: Path, kind: str
) -> None:
    """``from_pretrained`` would load the base without its product, and of peft's with a layer drawn anew."""
    import peft

    model = llama.made()
    if kind == "ours":
        finetune.lora(model, rank=2, targets=["q_proj"])
    else:
        model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
    with zeroified(model, adamw(model), topology=topology):
        save = partial(hpczero.hf.save_pretrained, model, folder / "b")
        raises_on_all(comm, ConfigError, "finetune.save_merged", save)
        parallel_assert(comm, not (folder / "b").exists())


def test_values_beyond_the_dtype_are_refused(
    comm: MPI.Intracomm, topology: Topology, folder: Path
) -> None:
    llama.on_disk(comm, folder / "a", max_shard_size="1GB")
    name, file = "model.norm.weight", folder / "a" / "model.safetensors"
    on_root(comm, llama.change_tensors, file, lambda tensors: tensors[name].fill_(1e6))
    model, _ = llama.sharded(topology, folder / "a")
    save = hpczero.hf.save_pretrained
    raises_on_all(comm, CheckpointMismatch, name, save, model, folder / "b", dtype="fp16")
    raises_on_all(comm, ConfigError, "dtype", save, model, folder / "b", dtype="int8")
    hpczero.release(model)
    with zeroified(other := tiny_gpt(), None, topology=topology):
        said = "expected a model of transformers"
        raises_on_all(comm, ConfigError, said, save, other, folder / "c")
