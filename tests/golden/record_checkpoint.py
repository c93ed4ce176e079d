"""The golden checkpoint: one of format version 1, and what must come out of it, kept beside it.

``install/launch.sh 2 .venv/bin/python -m tests.golden.record_checkpoint`` writes both anew. Never do that for a
released version: what was written once must load for ever. A new version gets a folder of its own.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import hpczero
from hpczero import Sharding, Topology
from hpczero.checkpoint import Checkpoints

FOLDER = Path(__file__).with_name("checkpoint-v1")
EXPECTED = FOLDER / "expected.json"
STEPS = 3
EXTRA = {"sample": 12, "scheduler": {"last_epoch": 3, "rates": [0.1, 1e-08]}, "note": "größer"}


class GoldenNet(nn.Module):
    """Tied, frozen, zero-size and scalar parameters, and buffers. Never change it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 5, bias=False)
        self.hidden = nn.Linear(5, 5)
        self.frozen = nn.Linear(5, 5)
        self.back = nn.Linear(3, 5, bias=False)
        self.back.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(()))
        self.nothing = nn.Parameter(torch.empty(0))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))
        with torch.no_grad():
            for parameter in self.parameters():
                numel = parameter.numel()
                parameter.copy_(torch.linspace(-0.5, 0.7, numel).reshape(parameter.shape))
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 3) in, one loss out."""
        self.get_buffer("calls").add_(1)
        self.get_buffer("mean").add_(0.1)
        return (
            self.frozen(self.hidden(self.embed(x)).tanh()) @ self.back.weight
        ).square().mean() * self.scale


def build(topology: Topology, *, stage: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and its optimizer, zeroified."""
    model = GoldenNet()
    groups = [
        {"params": [model.embed.weight, model.hidden.weight, model.nothing], "weight_decay": 0.1},
        {"params": [model.hidden.bias, model.scale], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    hpczero.zeroify(model, optimizer, topology=topology, stage=stage)
    return model, optimizer


def state_of(model: nn.Module, topology: Topology) -> dict[str, Any]:
    """Everything that a load must restore, read from the live objects. Collective over ``topology``'s world."""
    sharding = hpczero.sharding(model)
    optimizer = sharding.optimizer
    assert optimizer is not None, "it was built with one"
    values = hpczero.full_state_dict(model) or {}
    return {
        "values": {name: _hex(value) for name, value in values.items()},
        "optimizer": _optimizer_state(sharding, optimizer),
        "options": [[g["lr"], g["weight_decay"], list(g["betas"])] for g in optimizer.param_groups],
        "random": topology.world.comm.allgather(_draw()),
    }


def _optimizer_state(
    sharding: Sharding, optimizer: torch.optim.Optimizer
) -> dict[str, dict[str, list[str]]]:
    """Key, then parameter: its elements, put together from the shards of all ranks; equal on all."""
    topology, mine = sharding.topology, []
    for unit in sharding.units:
        for position, shard in unit.owned_shards() if unit.spec.trainable else ():
            layout = unit.spec.layout
            name = layout.slots[position].name
            start = layout.overlap(topology.shard_index, name).start
            mine += [(key, name, start, _hex(v)) for key, v in optimizer.state[shard].items()]
    found: dict[str, dict[str, list[str]]] = {}
    entries = {
        entry[:3]: entry[3] for rank in topology.world.comm.allgather(mine) for entry in rank
    }
    for (key, name, _), elements in sorted(entries.items()):
        if key == "step":
            found.setdefault(key, {})[name] = elements
        else:
            found.setdefault(key, {}).setdefault(name, []).extend(elements)
    return found


def _draw() -> list[str]:
    drawn = [torch.rand(()).item(), float(np.random.rand()), random.random(), random.gauss(0, 1)]  # noqa: NPY002
    return [float(number).hex() for number in drawn]


def _hex(tensor: Tensor) -> list[str]:
    return [float(x).hex() for x in tensor.detach().double().reshape(-1)]


def record(topology: Topology) -> None:
    """Train, save, and write down what was saved."""
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(100 + topology.rank)
    model, optimizer = build(topology)
    for step in range(STEPS):
        x = torch.linspace(-1, 1, 6).reshape(2, 3) + step + topology.rank
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    _draw()  # so that Python keeps half of a pair of normal numbers
    if topology.is_root:
        shutil.rmtree(FOLDER, ignore_errors=True)
    topology.barrier()
    with Checkpoints(FOLDER, model, slab_nbytes=128) as checkpoints:
        path = checkpoints.save(STEPS, EXTRA)
    state = state_of(model, topology)
    if topology.is_root:
        content = {"path": path.name, "step": STEPS, "extra": EXTRA, **state}
        EXPECTED.write_text(json.dumps(content, indent=1) + "\n")
    hpczero.release(model)


if __name__ == "__main__":
    world = Topology.of_world()
    record(world)
    world.free()
