"""Loading: each rank reads its own elements once; what files lack is drawn or refused, on all ranks alike."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import hpczero
from hpczero.errors import CheckpointError, CheckpointMismatch, ConfigError
from hpczero.hf.hub import find
from tests.compat.architectures import ARCHITECTURES
from tests.foreign import llama
from tests.helpers.world import World

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.ranks(1, 2, 3),
    pytest.mark.filterwarnings("ignore", "error:::hpczero"),
]
DTYPES = [torch.float32, torch.bfloat16]


def data_nbytes(folder: Path) -> int:
    """Bytes of values in all weight files of a folder."""
    found = 0
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as opened:
            header = int.from_bytes(opened.read(8), "little")
        found += file.stat().st_size - 8 - header
    return found


def read_once(world: World, weights: Any) -> None:
    """Ranks have read every byte of the values once, together. Collective."""
    read, there = world.comm.allgather(weights.nbytes_read), data_nbytes(world.folder)
    world.check(sum(read) == there, f"{read}, {there}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_read_every_byte_of_the_files_once_together(
    world: World, stage: int, dtype: torch.dtype
) -> None:
    llama.on_disk(world, dtype=dtype)
    model, weights = llama.sharded(world, stage=stage)
    read_once(world, weights)
    llama.holds(world, model, lambda: llama.made().to(dtype).float())
    hpczero.release(model)


def test_stacked_experts_are_read_by_ranges_too(world: World) -> None:
    mixtral: Any = next(each for each in ARCHITECTURES if each.name == "mixtral").build()
    # A tensor for an expert.
    world.on_root(mixtral.save_pretrained, world.folder, max_shard_size="5KB")
    model, weights = llama.sharded(world)
    read_once(world, weights)
    llama.holds(world, model, lambda: mixtral)
    hpczero.release(model)


def test_a_new_head_is_drawn_by_name_whatever_the_number_of_ranks(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    llama.on_disk(world)
    kind: Any = llama.library().AutoModelForSequenceClassification
    load = partial(llama.sharded, world, model_class=kind, num_labels=4)
    drawn: list[Any] = []
    for seed in (0, 0, 1):
        model, weights = load(seed=seed)
        drawn.append(world.comm.bcast(hpczero.full_state_dict(model))["score.weight"])
        hpczero.release(model)
    told = world.comm.allgather([record.getMessage() for record in caplog.records])
    world.check(weights.missing == ("score.weight",), str(weights.missing))
    world.check(weights.unexpected == ("lm_head.weight",), str(weights.unexpected))
    world.check("score.weight" in str(told[0]) and not any(told[1:]), str(told))
    with torch.random.fork_rng():  # what the model draws for a head, keyed by seed and name
        torch.manual_seed(zlib.crc32(b"0 score.weight"))
        expected = torch.empty(4, 18).normal_(0.0, 0.02)
    found = [torch.equal(each, expected) for each in drawn]
    world.check(found == [True, True, False], "of seeds 0, 0 and 1")
    world.raises(CheckpointMismatch, "score.weight", load, missing="refuse")


def test_a_head_of_another_size_is_drawn_if_that_is_asked_for(world: World) -> None:
    kind = "LlamaForSequenceClassification"
    llama.on_disk(world, kind=kind, num_labels=3)
    load = partial(llama.sharded, world, num_labels=5)
    said = r"score.weight is \(3, 18\) in the files and \(5, 18\) in the model"
    world.raises(CheckpointMismatch, said, load)
    model, weights = load(ignore_mismatched_sizes=True)
    llama.holds(world, model, lambda: llama.made(kind, num_labels=3), "score.weight")
    hpczero.release(model)
    world.check(weights.mismatched == ("score.weight",), str(weights.mismatched))


def test_old_names_and_prefixes_are_those_of_transformers(world: World) -> None:
    llama.on_disk(world, kind="LlamaModel", max_shard_size="1GB")  # without "model."
    kind: Any = llama.library().LlamaForCausalLM
    model, weights = llama.sharded(world, model_class=kind)
    world.check(weights.missing == ("lm_head.weight",), str(weights.missing))
    llama.holds(world, model, lambda: kind.from_pretrained(world.folder), "lm_head.weight")
    hpczero.release(model)


def test_tied_weights_with_two_values_are_refused(world: World) -> None:
    llama.on_disk(world, tie_word_embeddings=True, max_shard_size="1GB")

    def add(tensors: dict[str, Any], change: float) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][-1, -1] += change

    file = world.folder / "model.safetensors"
    world.on_root(llama.change_tensors, file, partial(add, change=0.0))
    model, _ = llama.sharded(world)
    hpczero.release(model)
    world.on_root(llama.change_tensors, file, partial(add, change=1.0))
    world.raises(CheckpointMismatch, "tie_word_embeddings", llama.sharded, world)


INDEX = "model.safetensors.index.json"


def second(folder: Path) -> Path:
    """The second of its files."""
    return sorted(folder.glob("*.safetensors"))[1]


def tear(folder: Path) -> None:
    second(folder).write_bytes(second(folder).read_bytes()[:-5])


def damage_header(folder: Path) -> None:
    data = second(folder).read_bytes()
    second(folder).write_bytes(data[:20] + b"\xff" + data[21:])


def name_another(folder: Path) -> None:
    places = json.loads((folder / INDEX).read_text())["weight_map"]
    more = {**places, "model.gone.weight": second(folder).name}
    llama.change_json(folder / INDEX, weight_map=more)


def write_twice(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[0].write_bytes(second(folder).read_bytes())


def cut_short(folder: Path) -> None:
    """As a save that was leaves it; there is no index."""
    (folder / INDEX).unlink()
    (folder / ".weights").mkdir()


def empty(folder: Path) -> None:
    for file in folder.glob("model*.safetensors*"):
        file.unlink()


def pickled(folder: Path) -> None:
    empty(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")


def quantised(folder: Path) -> None:
    said = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    llama.change_json(folder / "config.json", quantization_config=said)


NEITHER = r"has neither model\.safetensors nor model\.safetensors\.index\.json"
# What is done to a folder, and what is said of it. ``from_pretrained`` puts an adapter on its base.
HARMS: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "torn": (tear, CheckpointError, "torn"),
    "header": (damage_header, CheckpointError, "header"),
    "lost": (lambda folder: second(folder).unlink(), CheckpointError, "not there"),
    "not in the index": (name_another, CheckpointError, "model.gone.weight"),
    "twice": (write_twice, CheckpointError, "expected once"),
    "the rest of a save": (
        cut_short,
        CheckpointError,
        r"cut short; save again, or move all files of .*\.weights into it",
    ),
    "an adapter": (
        lambda folder: (folder / "adapter_config.json").write_text("{}"),
        ConfigError,
        r"has adapter_config\.json",
    ),
    "no weights": (empty, ConfigError, f"{NEITHER}$"),
    "others": (pickled, ConfigError, rf"{NEITHER}; it has pytorch_model\.bin"),
    "quantised": (quantised, ConfigError, "quantised"),
    "no config": (
        lambda folder: (folder / "config.json").unlink(),
        ConfigError,
        r"has no config\.json",
    ),
    "a generation config": (
        lambda folder: (folder / "generation_config.json").write_text("{"),
        ConfigError,
        "generation_config.json",
    ),
}


@pytest.mark.parametrize("harm", HARMS)
def test_damaged_folder_is_one_error_on_all_ranks(world: World, harm: str) -> None:
    do, kind, said = HARMS[harm]
    llama.on_disk(world)
    world.on_root(do, world.folder)
    world.raises(kind, said, llama.sharded, world)


def test_what_cannot_be_loaded_is_named(world: World) -> None:
    load = partial(llama.sharded, world)
    world.raises(ConfigError, "no such folder", load, "none")
    llama.on_disk(world)
    world.raises(ConfigError, "num_label", load, num_label=3)
    longer = llama.VOCABULARY + 1
    world.raises(CheckpointMismatch, "in the files and", load, vocab_size=longer)
    kind: Any = llama.library().GPT2LMHeadModel
    world.raises(ConfigError, "LlamaConfig", load, model_class=kind)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": "18"}, "config.json cannot be used"),
        ({"num_attention_heads": 0}, "config.json cannot be used: ZeroDivisionError"),
        ({"hidden_act": "nope"}, "cannot be built from its config.json: KeyError: 'nope'"),
        ({"rope_parameters": {"rope_type": "nope"}}, "config.json"),
        ({"architectures": ["LlamaConfig"]}, "names LlamaConfig, which is no model"),
        ({"architectures": [7]}, "names 7, which is no model"),
        ({"architectures": "Nope"}, "names Nope, which is no model"),
        ({"vocab_size": 10**13}, "cannot be built"),
    ],
)
def test_a_config_that_transformers_cannot_use_is_named(
    world: World, changes: Any, said: str
) -> None:
    """Whatever transformers says of it: errors of any kind come out of there."""
    llama.on_disk(world)
    world.on_root(llama.change_json, world.folder / "config.json", **changes)
    world.raises(ConfigError, said, llama.sharded, world)


def test_a_model_of_the_hub_is_found_in_the_cache_and_not_asked_for(world: World) -> None:
    commit = "0" * 40
    llama.on_disk(world, f"models--somebody--small/snapshots/{commit}")
    refs = world.folder / "models--somebody--small" / "refs"
    if world.rank == 0:
        refs.mkdir()
        (refs / "main").write_text(commit)
    world.comm.Barrier()
    hub = hpczero.hf.Hub(cache_dir=str(world.folder), local_files_only=True)
    model, weights = hpczero.hf.load("somebody/small", topology=world.topology, hub=hub)
    world.check(not weights.missing and model.config.hidden_size == 18)
    other = partial(hpczero.hf.load, "somebody/other", topology=world.topology, hub=hub)
    world.raises(ConfigError, "hf download somebody/other", other)


def test_one_rank_of_each_node_downloads_and_the_first_before_the_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[bool] = []

    def download(name: str, *, local_files_only: bool, **options: Any) -> str:
        calls.append(local_files_only)
        assert name == "somebody/small", options
        return str(world.folder)

    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    apart = hpczero.Topology.create(world.comm, nodes=[rank // 2 for rank in range(world.size)])
    path = find("somebody/small", hpczero.hf.Hub(), apart)
    apart.free()
    found = world.comm.allgather(calls)
    # False: by the network. The root asks twice, which costs nothing: it has all by then.
    expected = [
        [False, False, True] if rank == 0 else [False, True] if rank % 2 == 0 else [True]
        for rank in range(world.size)
    ]
    world.check(found == expected and path == world.folder, str(found))


@pytest.mark.ranks(2, 3)
def test_nodes_with_other_files_are_refused(world: World) -> None:
    mine = str(min(world.rank, 1))
    if torch.distributed.is_initialized():  # transformers would write on rank 0 alone
        torch.distributed.destroy_process_group()
    if world.rank < 2:
        llama.made(seed=world.rank).save_pretrained(world.folder / mine)
    world.comm.Barrier()
    world.raises(CheckpointMismatch, "same files to every node", llama.sharded, world, mine)


@pytest.mark.parametrize("stage", [0, 3])
def test_half_precision_computes_with_the_rounded_masters(world: World, stage: int) -> None:
    llama.on_disk(world)
    model, weights = hpczero.hf.load(world.folder, topology=world.topology)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hpczero.zeroify(
        model, optimizer, topology=world.topology, initialize=weights, stage=stage, precision="bf16"
    )
    ids = llama.tokens()
    with torch.no_grad():
        found = model(input_ids=ids).logits
        expected = llama.made().to(torch.bfloat16)(input_ids=ids).logits
    llama.holds(world, model, llama.made)
    hpczero.release(model)
    world.check(torch.equal(found.float(), expected.float()), "logits")
