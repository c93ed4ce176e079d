"""Adapters of peft, from a folder that its ``save_pretrained`` has written into a model in shards.

Owns: which files, and that one rank reads them. Must not know: the training loop, checkpoints.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import hpczero
from hpczero.job.messages import Exchange

WEIGHTS = "adapter_model.safetensors"


def load_adapter(folder: Path, model: Any, exchange: Exchange) -> None:
    """Read the values of the active adapter on rank 0. Collective over the world: the model is whole meanwhile.

    Args:
        folder: of ``save_pretrained``.
        model: of peft, zeroified.
        exchange: of the ranks.
    """
    topology, name = exchange.topology, model.active_adapter
    with hpczero.gathered(model, modifier_rank=0), topology.agreed("load the adapter"):
        if topology.is_root:
            peft: Any = importlib.import_module("peft")
            files: Any = importlib.import_module("safetensors.torch")
            place = folder if name == "default" else folder / name
            peft.set_peft_model_state_dict(model, files.load_file(place / WEIGHTS), name)
