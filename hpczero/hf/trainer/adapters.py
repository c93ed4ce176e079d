"""Adapters of peft, from a folder that its ``save_pretrained`` has written into a model in shards.

Owns: which files, and that one rank reads them. Must not know: the training loop, checkpoints.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import hpczero
from hpczero.hf.peft_names import is_peft
from hpczero.job.exchange import Exchange

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # of the model that peft wraps


def load_adapter(folder: Path, model: Any, exchange: Exchange) -> None:
    """Read the values of the active adapter on rank 0. Collective over the world: the model is whole meanwhile.

    Args:
        folder: of ``save_pretrained``.
        model: of peft, or of transformers with an adapter by ``add_adapter``; zeroified.
        exchange: of the ranks.
    """
    topology, wrapped = exchange.topology, is_peft(model)
    name = model.active_adapter if wrapped else model.active_adapters()[0]
    with hpczero.gathered(model, modifier_rank=0), topology.agreed("load the adapter"):
        if topology.is_root:
            peft: Any = importlib.import_module("peft")
            files: Any = importlib.import_module("safetensors.torch")
            place = folder if name == "default" or not wrapped else folder / name
            found = files.load_file(place / WEIGHTS)
            if not wrapped:
                found = {key.removeprefix(PREFIX): value for key, value in found.items()}
            peft.set_peft_model_state_dict(model, found, name)
