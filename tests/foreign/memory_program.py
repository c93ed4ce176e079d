"""A job that loads a folder into shards, saves them, and says what that took: ``memory_program.py FOLDER TRANSPORT``.

Each rank prints a line of JSON: peaks of anonymous memory above what it had before, while loading and while saving, its
shard, the largest tensor and the largest unit in fp32, and what it has read, all in bytes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import transformers

import hpczero
from tests.checkpoint.memory_program import OwnPeak


def main(folder: str, transport: str) -> None:
    topology = hpczero.Topology.of_world()
    config = transformers.LlamaConfig(hidden_size=8, num_attention_heads=1, num_hidden_layers=1)
    transformers.LlamaForCausalLM(config)  # what the library makes once
    with OwnPeak() as peak:
        model, weights = hpczero.hf.load(folder, topology=topology)
        largest = 4 * max(parameter.numel() for parameter in model.parameters())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        hpczero.zeroify(
            model, optimizer, topology=topology, transport=transport, initialize=weights
        )
    shard = 4 * sum(unit.owned_numel for unit in hpczero.sharding(model).units)
    largest_unit = 4 * max(unit.spec.layout.numel for unit in hpczero.sharding(model).units)
    found = {"loading": peak.most - peak.before, "shard": shard, "largest": largest}
    found |= {"read": weights.nbytes_read, "unit": largest_unit}
    with OwnPeak() as peak:
        hpczero.hf.save_pretrained(model, Path(folder) / "saved", dtype="bf16", shard_mib=30)
    found["saving"] = peak.most - peak.before
    print(json.dumps(found), flush=True)
    hpczero.release(model)


if __name__ == "__main__":
    main(*sys.argv[1:])
