"""A small Llama on disk, for tests of single properties of loading and saving.

Must not know: what any test looks for.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import hpczero
from tests.helpers.world import World

VOCABULARY = 43
OPTIONS = {
    "vocab_size": VOCABULARY,
    "hidden_size": 18,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "intermediate_size": 23,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def library() -> Any:
    """transformers; its import takes seconds."""
    return importlib.import_module("transformers")


def made(kind: str = "LlamaForCausalLM", seed: int = 3, **options: Any) -> Any:
    """A model with the same values on every call."""
    config = library().LlamaConfig(**{**OPTIONS, **options})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return getattr(library(), kind)(config).eval()


def on_disk(
    world: World, place: str = "", *, dtype: torch.dtype = torch.float32, **options: Any
) -> Path:
    """Its folder, ``place`` of the ranks' folder, written by rank 0 in several files. Collective."""
    size = options.pop("max_shard_size", "5KB")

    def write() -> None:
        made(**options).to(dtype).save_pretrained(world.folder / place, max_shard_size=size)

    world.on_root(write)
    return world.folder / place


def change_tensors(file: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """In place."""
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def change_json(file: Path, **changes: Any) -> None:
    """Some entries of an object."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def tokens(rank: int = 0) -> Tensor:
    """(2, 7), other ones on every rank."""
    generator = torch.Generator().manual_seed(50 + rank)
    return torch.randint(3, VOCABULARY, (2, 7), generator=generator)


def holds(world: World, model: nn.Module, plain: Callable[[], Any], *but: str) -> None:
    """The whole model has the values of the plain one, in every bit; not where a name is in ``but``. Collective."""
    found = hpczero.full_state_dict(model)
    expected = {} if found is None else plain().state_dict()
    wrong = [n for n in expected if n not in but and not torch.equal(expected[n], (found or {})[n])]
    world.check(not wrong and expected.keys() == (found or {}).keys(), wrong)


def sharded(world: World, place: str = "", **options: Any) -> tuple[nn.Module, Any]:
    """What lies at ``place``, loaded and zeroified without an optimizer: model and weights. Collective."""
    known = ("stage", "transport", "precision")
    zero = {key: options.pop(key) for key in known if key in options}
    model, weights = hpczero.hf.load(world.folder / place, topology=world.topology, **options)
    hpczero.zeroify(model, None, topology=world.topology, initialize=weights, **zero)
    return model, weights
