"""Saving: a folder that transformers loads, in the dtype that was asked for, there whole or not at all."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import hpczero
from hpczero import finetune
from hpczero.checkpoint.foreign.safe_file import WeightsWriter
from hpczero.errors import CheckpointError, CheckpointMismatch, ConfigError
from tests.checkpoint.damage import flip
from tests.compat.architectures import ARCHITECTURES
from tests.foreign import llama
from tests.helpers.small_models import adamw, same_state, tiny_gpt
from tests.helpers.world import World

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
def test_transformers_loads_what_was_saved(world: World, dtype: str, stage: int) -> None:
    llama.on_disk(world, "a", tie_word_embeddings=True)
    model, _ = llama.sharded(world, "a", stage=stage)
    hpczero.hf.save_pretrained(
        model, world.folder / "b", tokenizer=Words(), dtype=dtype, shard_mib=1
    )
    hpczero.release(model)

    def judge() -> None:
        load = llama.library().AutoModelForCausalLM.from_pretrained
        again, info = load(world.folder / "b", output_loading_info=True)
        assert not any(info.values()), info
        kind = torch.float32 if dtype == "fp32" else torch.bfloat16
        wanted, ids = llama.made(tie_word_embeddings=True).to(kind), llama.tokens()
        assert torch.equal(again(ids).logits, wanted(ids).logits)
        there = sorted(path.name for path in (world.folder / "b").iterdir())
        expected = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
        assert there == expected
        config = json.loads((world.folder / "b" / "config.json").read_text())
        assert config["architectures"] == ["LlamaForCausalLM"]
        assert f"torch.{config['dtype']}" == str(kind)

    world.on_root(judge)


def test_several_files_have_an_index_and_come_back(world: World) -> None:
    options: dict[str, Any] = {"hidden_size": 300, "num_attention_heads": 3, "vocab_size": 1001}
    llama.on_disk(world, "a", **options)
    model, _ = llama.sharded(world, "a")
    hpczero.hf.save_pretrained(model, world.folder / "b", shard_mib=1)
    hpczero.release(model)
    count = len(list((world.folder / "b").glob("model-*-of-*.safetensors")))
    world.check(count > 2, str(count))
    again, weights = llama.sharded(world, "b")  # through our own digests too
    llama.holds(world, again, lambda: llama.made(**options))
    hpczero.release(again)
    world.check(not weights.missing, str(weights.missing))
    file = sorted((world.folder / "b").glob("model-*.safetensors"))[1]
    # Inside of values, which no header shows.
    world.on_root(flip, file, file.stat().st_size - 9, 0)
    world.raises(CheckpointError, "digest", llama.sharded, world, "b")


@pytest.mark.parametrize("name", ["mixtral", "qwen2", "resnet"])
def test_a_checkpoint_is_exported_as_the_model_is_saved(world: World, name: str) -> None:
    """Experts under the names of their files, tied weights, running statistics."""
    built: Any = next(each for each in ARCHITECTURES if each.name == name).build()
    world.on_root(built.save_pretrained, world.folder / "a")
    model, weights = hpczero.hf.load(world.folder / "a", topology=world.topology)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hpczero.zeroify(model, optimizer, topology=world.topology, initialize=weights)
    hpczero.checkpoint.save(world.folder / "checkpoints", model, optimizer, step=1)
    hpczero.hf.save_pretrained(model, world.folder / "b", dtype="bf16")
    hpczero.release(model)

    def judge() -> None:
        export = partial(hpczero.hf.export, world.folder / "checkpoints")
        export(world.folder / "c", like=world.folder / "a", dtype="bf16")
        theirs, saved, exported = (load_file(world.folder / x / "model.safetensors") for x in "abc")
        assert saved.keys() == theirs.keys(), "other names than transformers writes"
        assert same_state(exported, saved)
        configs = [(world.folder / x / "config.json").read_bytes() for x in "bc"]
        assert configs[0] == configs[1]
        llama.made().save_pretrained(world.folder / "d")
        with pytest.raises(CheckpointMismatch, match="not of the model"):
            export(world.folder / "e", like=world.folder / "d")
        assert not (world.folder / "e").exists()

    world.on_root(judge)


def test_a_failed_save_leaves_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    llama.on_disk(world, "a")
    model, _ = llama.sharded(world, "a")
    save = partial(hpczero.hf.save_pretrained, model, world.folder / "b")
    put, calls = WeightsWriter.put_tensor, []

    def fails(writer: WeightsWriter, tensor: Tensor, values: Tensor) -> None:
        calls.append(1)
        if len(calls) == 5:
            raise CheckpointError("no space")
        put(writer, tensor, values)

    with monkeypatch.context() as patch:
        patch.setattr(WeightsWriter, "put_tensor", fails)
        world.raises(CheckpointError, "no space", save)
    world.check(os.listdir(world.folder) == ["a"], str(os.listdir(world.folder)))
    save()  # and the model goes on
    world.raises(ConfigError, "is there already", save)
    hpczero.release(model)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("kind", ["ours", "peft"])
def test_models_with_adapters_are_refused_and_what_writes_them_is_named(
    world: World, kind: str
) -> None:
    """``from_pretrained`` would load the base without its product, and of peft's with a layer drawn anew."""
    import peft

    model = llama.made()
    if kind == "ours":
        finetune.lora(model, rank=2, targets=["q_proj"])
    else:
        model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
    with world.zeroified(model, adamw(model)):
        save = partial(hpczero.hf.save_pretrained, model, world.folder / "b")
        world.raises(ConfigError, "finetune.save_merged", save)
        world.check(not (world.folder / "b").exists())


def test_values_beyond_the_dtype_are_refused(world: World) -> None:
    llama.on_disk(world, "a", max_shard_size="1GB")
    name, file = "model.norm.weight", world.folder / "a" / "model.safetensors"
    world.on_root(llama.change_tensors, file, lambda tensors: tensors[name].fill_(1e6))
    model, _ = llama.sharded(world, "a")
    save = hpczero.hf.save_pretrained
    world.raises(CheckpointMismatch, name, save, model, world.folder / "b", dtype="fp16")
    world.raises(ConfigError, "dtype", save, model, world.folder / "b", dtype="int8")
    hpczero.release(model)
    with world.zeroified(other := tiny_gpt(), None):
        said = "expected a model of transformers"
        world.raises(ConfigError, said, save, other, world.folder / "c")
