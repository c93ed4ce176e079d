"""Loading: each rank reads its own elements once; what files lack is drawn or refused, on all ranks alike."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import hpczero
from hpczero.errors import CheckpointError, CheckpointMismatch, ConfigError
from hpczero.hf.hub import find
from tests.compat.architectures import ARCHITECTURES
from tests.foreign import llama
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import raises_on_all

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_read_every_byte_of_the_files_once_together(
    comm: MPI.Intracomm, topology: Topology, folder: Path, stage: int, dtype: torch.dtype
) -> None:
    llama.on_disk(comm, folder, dtype=dtype)
    model, weights = llama.sharded(topology, folder, stage=stage)
    read = comm.allgather(weights.nbytes_read)
    parallel_assert(comm, sum(read) == data_nbytes(folder), f"{read}, {data_nbytes(folder)}")
    found = hpczero.full_state_dict(model) or {}
    hpczero.release(model)
    plain = llama.made().to(dtype).float().state_dict() if comm.rank == 0 else {}
    wrong = [name for name in plain if not torch.equal(plain[name], found[name])]
    parallel_assert(comm, not wrong and plain.keys() == found.keys(), str(wrong))


def test_stacked_experts_are_read_by_ranges_too(
    comm: MPI.Intracomm, topology: Topology, folder: Path
) -> None:
    mixtral = next(each for each in ARCHITECTURES if each.name == "mixtral")
    plain: Any = mixtral.build() if comm.rank == 0 else None
    if plain is not None:
        plain.save_pretrained(folder, max_shard_size="5KB")  # one tensor for each expert
    comm.Barrier()
    model, weights = llama.sharded(topology, folder)
    read = comm.allgather(weights.nbytes_read)
    parallel_assert(comm, sum(read) == data_nbytes(folder), f"{read}, {data_nbytes(folder)}")
    found = hpczero.full_state_dict(model) or {}
    hpczero.release(model)
    state = {} if plain is None else plain.state_dict()
    wrong = [name for name in state if not torch.equal(state[name], found[name])]
    parallel_assert(comm, not wrong and state.keys() == found.keys(), str(wrong))


def test_a_new_head_is_drawn_by_name_whatever_the_number_of_ranks(
    comm: MPI.Intracomm, topology: Topology, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    llama.on_disk(comm, folder)
    kind: Any = llama.library().AutoModelForSequenceClassification
    drawn: list[Any] = []
    for seed in (0, 0, 1):
        model, weights = llama.sharded(topology, folder, model_class=kind, num_labels=4, seed=seed)
        state = hpczero.full_state_dict(model)
        drawn.append(None if state is None else state["score.weight"])
        hpczero.release(model)
    told = comm.allgather([record.getMessage() for record in caplog.records])
    parallel_assert(comm, weights.missing == ("score.weight",), str(weights.missing))
    parallel_assert(comm, weights.unexpected == ("lm_head.weight",), str(weights.unexpected))
    parallel_assert(comm, "score.weight" in str(told[0]) and not any(told[1:]), str(told))
    one, again, other = drawn
    wrong = ""
    if one is not None:  # on rank 0
        with torch.random.fork_rng():  # what the model draws for a head, keyed by seed and name
            torch.manual_seed(zlib.crc32(b"0 score.weight"))
            expected = torch.empty(4, 18).normal_(0.0, 0.02)
        wrong = (
            "" if torch.equal(one, expected) and torch.equal(again, expected) else "other values"
        )
        wrong += "" if not torch.equal(other, expected) else "the seed does not matter"
    parallel_assert(comm, not wrong, wrong)
    raises_on_all(
        comm,
        CheckpointMismatch,
        "score.weight",
        lambda: llama.sharded(topology, folder, model_class=kind, num_labels=4, missing="refuse"),
    )


def test_a_head_of_another_size_is_drawn_if_that_is_asked_for(
    comm: MPI.Intracomm, topology: Topology, folder: Path
) -> None:
    llama.on_disk(comm, folder, kind="LlamaForSequenceClassification", num_labels=3)
    raises_on_all(
        comm,
        CheckpointMismatch,
        r"score.weight is \(3, 18\) in the files and \(5, 18\) in the model",
        lambda: llama.sharded(topology, folder, num_labels=5),
    )
    model, weights = llama.sharded(topology, folder, num_labels=5, ignore_mismatched_sizes=True)
    found = hpczero.full_state_dict(model) or {}
    hpczero.release(model)
    kind = "LlamaForSequenceClassification"
    plain = llama.made(kind, num_labels=3).state_dict() if comm.rank == 0 else {}
    wrong = [n for n in plain if n != "score.weight" and not torch.equal(plain[n], found[n])]
    parallel_assert(comm, weights.mismatched == ("score.weight",) and not wrong, str(wrong))


def test_old_names_and_prefixes_are_those_of_transformers(
    comm: MPI.Intracomm, topology: Topology, folder: Path
) -> None:
    llama.on_disk(comm, folder, kind="LlamaModel", max_shard_size="1GB")  # without "model."
    kind: Any = llama.library().LlamaForCausalLM
    model, weights = llama.sharded(topology, folder, model_class=kind)
    parallel_assert(comm, weights.missing == ("lm_head.weight",), str(weights.missing))
    found = hpczero.full_state_dict(model) or {}
    hpczero.release(model)
    plain = llama.made("LlamaModel").state_dict() if comm.rank == 0 else {}
    wrong = [name for name in plain if not torch.equal(plain[name], found[f"model.{name}"])]
    parallel_assert(comm, not wrong, str(wrong))


def test_tied_weights_with_two_values_are_refused(
    comm: MPI.Intracomm, topology: Topology, folder: Path
) -> None:
    llama.on_disk(comm, folder, tie_word_embeddings=True, max_shard_size="1GB")
    file = folder / "model.safetensors"

    def add(tensors: dict[str, Any], change: float) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][-1, -1] += change

    llama.changed(comm, file, lambda tensors: add(tensors, 0.0))
    model, _ = llama.sharded(topology, folder)
    hpczero.release(model)
    llama.changed(comm, file, lambda tensors: add(tensors, 1.0))
    raises_on_all(
        comm, CheckpointMismatch, "tie_word_embeddings", lambda: llama.sharded(topology, folder)
    )


@pytest.mark.parametrize("damage", ["torn", "header", "lost", "not in the index", "twice"])
def test_damaged_files_are_one_error_on_all_ranks(
    comm: MPI.Intracomm, topology: Topology, folder: Path, damage: str
) -> None:
    llama.on_disk(comm, folder)
    files = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if comm.rank == 0:
        data = files[1].read_bytes()
        if damage == "torn":
            files[1].write_bytes(data[:-5])
        elif damage == "header":
            files[1].write_bytes(data[:20] + b"\xff" + data[21:])
        elif damage == "lost":
            files[1].unlink()
        elif damage == "not in the index":
            content = json.loads(index.read_text())
            content["weight_map"]["model.gone.weight"] = files[0].name
            index.write_text(json.dumps(content))
        else:
            files[0].write_bytes(data)
    comm.Barrier()
    expected = {
        "torn": "torn",
        "header": "header",
        "lost": "not there",
        "not in the index": "model.gone.weight",
        "twice": "expected once",
    }
    raises_on_all(comm, CheckpointError, expected[damage], lambda: llama.sharded(topology, folder))


@pytest.mark.parametrize("found", ["an adapter", "the rest of a save"])
def test_a_folder_of_which_a_part_alone_would_be_loaded_is_refused(
    comm: MPI.Intracomm, topology: Topology, folder: Path, found: str
) -> None:
    """``from_pretrained`` puts the adapter on its base; a save that was cut short has left no index."""
    llama.on_disk(comm, folder)
    if comm.rank == 0 and found == "an adapter":
        (folder / "adapter_config.json").write_text("{}")
    elif comm.rank == 0:
        (folder / "model.safetensors.index.json").unlink()
        (folder / ".weights").mkdir()
    comm.Barrier()
    kind, said = (
        (ConfigError, r"has adapter_config\.json")
        if found == "an adapter"
        else (CheckpointError, r"cut short; save again, or move all files of .*\.weights into it")
    )
    raises_on_all(comm, kind, said, lambda: llama.sharded(topology, folder))


def test_a_folder_without_weights_is_named(
    comm: MPI.Intracomm, topology: Topology, folder: Path
) -> None:
    llama.on_disk(comm, folder)
    if comm.rank == 0:
        for file in folder.glob("model*.safetensors*"):
            file.unlink()
    comm.Barrier()
    neither = r"has neither model\.safetensors nor model\.safetensors\.index\.json"
    raises_on_all(comm, ConfigError, f"{neither}$", lambda: llama.sharded(topology, folder))
    if comm.rank == 0:
        (folder / "pytorch_model.bin").write_bytes(b"")
    comm.Barrier()
    others = rf"{neither}; it has pytorch_model\.bin"
    raises_on_all(comm, ConfigError, others, lambda: llama.sharded(topology, folder))


def test_what_cannot_be_loaded_is_named(
    comm: MPI.Intracomm, topology: Topology, folder: Path
) -> None:
    raises_on_all(
        comm, ConfigError, "no such folder", lambda: llama.sharded(topology, folder / "none")
    )
    raises_on_all(
        comm, ConfigError, r"has no config\.json", lambda: llama.sharded(topology, folder.parent)
    )
    llama.on_disk(comm, folder)
    raises_on_all(
        comm, ConfigError, "num_label", lambda: llama.sharded(topology, folder, num_label=3)
    )
    raises_on_all(
        comm,
        CheckpointMismatch,
        "in the files and",
        lambda: llama.sharded(topology, folder, vocab_size=llama.VOCABULARY + 1),
    )
    kind: Any = llama.library().GPT2LMHeadModel
    raises_on_all(
        comm, ConfigError, "LlamaConfig", lambda: llama.sharded(topology, folder, model_class=kind)
    )
    if comm.rank == 0:
        content = json.loads((folder / "config.json").read_text())
        content["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
        (folder / "config.json").write_text(json.dumps(content))
    comm.Barrier()
    raises_on_all(comm, ConfigError, "quantised", lambda: llama.sharded(topology, folder))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": "18"}, "config.json cannot be used"),
        ({"num_attention_heads": 0}, "config.json cannot be used: ZeroDivisionError"),
        ({"hidden_act": "nope"}, "cannot be built from its config.json: KeyError: 'nope'"),
        ({"rope_parameters": {"rope_type": "nope"}}, "config.json"),
        ({"architectures": ["Trainer"]}, "names Trainer, which is no model"),
        ({"architectures": ["LlamaConfig"]}, "names LlamaConfig, which is no model"),
        ({"architectures": [7]}, "names 7, which is no model"),
        ({"architectures": "Nope"}, "names Nope, which is no model"),
        ({"vocab_size": 10**13}, "cannot be built"),
    ],
)
def test_a_config_that_transformers_cannot_use_is_named(
    comm: MPI.Intracomm, topology: Topology, folder: Path, changes: Any, said: str
) -> None:
    """Whatever transformers says of it: errors of any kind come out of there."""
    llama.on_disk(comm, folder)
    if comm.rank == 0:
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**content, **changes}))
    comm.Barrier()
    raises_on_all(comm, ConfigError, said, lambda: llama.sharded(topology, folder))


def test_a_damaged_generation_config_is_named(
    comm: MPI.Intracomm, topology: Topology, folder: Path
) -> None:
    llama.on_disk(comm, folder)
    if comm.rank == 0:
        (folder / "generation_config.json").write_text("{")
    comm.Barrier()
    raises_on_all(
        comm, ConfigError, "generation_config.json", lambda: llama.sharded(topology, folder)
    )


def test_a_model_of_the_hub_is_found_in_the_cache_and_not_asked_for(
    comm: MPI.Intracomm, topology: Topology, folder: Path
) -> None:
    commit = "0" * 40
    place = folder / "models--somebody--small" / "snapshots" / commit
    if comm.rank == 0:
        (folder / "models--somebody--small" / "refs").mkdir(parents=True)
        (folder / "models--somebody--small" / "refs" / "main").write_text(commit)
    llama.on_disk(comm, place)
    hub = hpczero.hf.Hub(cache_dir=str(folder), local_files_only=True)
    model, weights = hpczero.hf.load("somebody/small", topology=topology, hub=hub)
    parallel_assert(comm, not weights.missing and model.config.hidden_size == 18)
    raises_on_all(
        comm,
        ConfigError,
        "hf download somebody/other",
        lambda: hpczero.hf.load("somebody/other", topology=topology, hub=hub),
    )


def test_one_rank_of_each_node_downloads_and_the_first_before_the_others(
    comm: MPI.Intracomm, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[bool] = []

    def download(name: str, *, local_files_only: bool, **options: Any) -> str:
        calls.append(local_files_only)
        assert name == "somebody/small", options
        return str(folder)

    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    apart = hpczero.Topology.create(comm, nodes=[rank // 2 for rank in range(comm.size)])
    path = find("somebody/small", hpczero.hf.Hub(), apart)
    apart.free()
    found = comm.allgather(calls)
    # False: by the network. The root asks twice, which costs nothing: it has all by then.
    expected = [
        [False, False, True] if rank == 0 else [False, True] if rank % 2 == 0 else [True]
        for rank in range(comm.size)
    ]
    parallel_assert(comm, found == expected and path == folder, str(found))


def test_nodes_with_other_files_are_refused(
    comm: MPI.Intracomm, topology: Topology, folder: Path
) -> None:
    if comm.size == 1:
        return
    mine = folder / str(min(comm.rank, 1))
    if torch.distributed.is_initialized():  # transformers would write on rank 0 alone
        torch.distributed.destroy_process_group()
    if comm.rank < 2:
        llama.made(seed=comm.rank).save_pretrained(mine)
    comm.Barrier()
    raises_on_all(
        comm,
        CheckpointMismatch,
        "same files to every node",
        lambda: llama.sharded(topology, mine),
    )


@pytest.mark.parametrize("stage", [0, 3])
def test_half_precision_computes_with_the_rounded_masters(
    comm: MPI.Intracomm, topology: Topology, folder: Path, stage: int
) -> None:
    llama.on_disk(comm, folder)
    model, weights = hpczero.hf.load(folder, topology=topology)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hpczero.zeroify(
        model, optimizer, topology=topology, initialize=weights, stage=stage, precision="bf16"
    )
    ids = llama.tokens()
    with torch.no_grad():
        found = model(input_ids=ids).logits
        expected = llama.made().to(torch.bfloat16)(input_ids=ids).logits
    masters = hpczero.full_state_dict(model) or {}
    hpczero.release(model)
    plain = llama.made().state_dict() if masters else {}
    wrong = [name for name in plain if not torch.equal(plain[name], masters[name])]
    parallel_assert(comm, torch.equal(found.float(), expected.float()), "logits")
    parallel_assert(comm, not wrong, str(wrong))
