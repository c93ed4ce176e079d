"""Weights as other programs write and read them, for the tests of export and import.

Must not know: what any test looks for.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hpczero.checkpoint.foreign.converting import convert
from hpczero.models import GPT
from tests.checkpoint.programs import Net

INDEX = "model.safetensors.index.json"


def state(seed: int = 1) -> dict[str, Tensor]:
    """Tied, empty and single elements, buffers of several kinds; more than 2 MiB, and a tensor above 1 MiB."""
    generator = torch.Generator().manual_seed(seed)
    found = {
        "first.weight": torch.randn(13, 7, generator=generator),
        "large.weight": torch.randn(300, 1001, generator=generator),
        "next.weight": torch.randn(1000, 111, generator=generator),
        "last.weight": torch.randn(1000, 211, generator=generator),
        "nothing": torch.empty(0, 3),
        "scale": torch.randn((), generator=generator),
        "calls": torch.tensor(17),
        "mask": torch.tensor([True, False, True]),
        "mean": torch.randn(3, generator=generator, dtype=torch.float64),
    }
    return {**found, "again.weight": found["first.weight"]}


def checkpoint(folder: Path, tensors: dict[str, Tensor], step: int = 3) -> Path:
    """One that holds ``tensors``, ``mean`` among its buffers."""
    torch.save(tensors, folder.with_suffix(".pt"))
    return convert(folder.with_suffix(".pt"), folder, step=step, buffers=["mean"])


def gpt_checkpoint(folder: Path, model: GPT, *, tokenizer: str | None = None, **extra: Any) -> Path:
    """One that says what training says of a GPT."""
    file = folder.with_suffix(".safetensors")
    tensors = {name: value.detach() for name, value in model.named_parameters()}
    card: dict[str, Any] = {"model": {"tie_embeddings": model.config.tie_embeddings, **extra}}
    card["tokenizer"] = tokenizer
    save_file(tensors, file, metadata={"hpczero": json.dumps(card)})
    return convert(file, folder, step=3)


def read_all(folder: Path) -> dict[str, Tensor]:
    """As another program does: by the index."""
    places = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    files = {name: load_file(folder / name) for name in set(places.values())}
    found = {key: files[name][key] for key, name in places.items()}
    assert sum(map(len, files.values())) == len(found)
    return found


def other_state() -> dict[str, Tensor]:
    """Of a ``Net`` of other values, by every name."""
    generator = torch.Generator().manual_seed(99)
    model = Net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(generator=generator)
        model.get_buffer("calls").fill_(41)
        model.get_buffer("mean").normal_(generator=generator)
    return model.state_dict()


def once(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the tied name, as safetensors want it."""
    return {name: value for name, value in state.items() if name != "back.weight"}


def write_sharded(folder: Path, state: dict[str, Tensor], num_files: int = 3) -> None:
    """As Hugging Face's ``save_pretrained`` does."""
    folder.mkdir()
    names, places = list(state), {}
    for number in range(num_files):
        part = names[number::num_files]
        file = f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"
        save_file({name: state[name].contiguous() for name in part}, folder / file)
        places.update(dict.fromkeys(part, file))
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def write(folder: Path, state: dict[str, Tensor], kind: str) -> Path:
    if kind == "torch":
        torch.save(OrderedDict(state), folder / "weights.pt")
        return folder / "weights.pt"
    if kind == "safetensors":
        save_file(once(state), folder / "weights.safetensors")
        return folder / "weights.safetensors"
    write_sharded(folder / "sharded", once(state))
    return folder / "sharded"


def turned(value: Tensor) -> Tensor:
    """What ``Conv1D`` has where ``Linear`` has ``value``: a matrix the other way round, a bias as it is."""
    return value.T if value.dim() == 2 else value


def theirs(model: GPT) -> dict[str, Tensor]:
    """A GPT-2 of Hugging Face with the values of ``model``; written out here, to judge the code's own table."""
    ours = {name: value.detach() for name, value in model.named_parameters()}
    found = {
        "wte.weight": ours["wte.weight"],
        "wpe.weight": ours["wpe.weight"],
        "ln_f.weight": ours["final_norm.weight"],
        "ln_f.bias": ours["final_norm.bias"],
    }
    for layer in range(model.config.layers):
        mine, other = f"blocks.{layer}", f"h.{layer}"
        for leaf in ("weight", "bias"):
            found[f"{other}.ln_1.{leaf}"] = ours[f"{mine}.attention_norm.{leaf}"]
            found[f"{other}.ln_2.{leaf}"] = ours[f"{mine}.mlp_norm.{leaf}"]
            found[f"{other}.attn.c_attn.{leaf}"] = turned(ours[f"{mine}.attention.qkv.{leaf}"])
            found[f"{other}.attn.c_proj.{leaf}"] = turned(
                ours[f"{mine}.attention.projection.{leaf}"]
            )
            found[f"{other}.mlp.c_fc.{leaf}"] = turned(ours[f"{mine}.mlp.expansion.{leaf}"])
            found[f"{other}.mlp.c_proj.{leaf}"] = turned(ours[f"{mine}.mlp.projection.{leaf}"])
        found[f"{other}.attn.bias"] = torch.ones(1, 1, 11, 11).tril()
        found[f"{other}.attn.masked_bias"] = torch.tensor(-1e4)
    return {name: value.contiguous() for name, value in found.items()}
