"""Several tasks on one frozen model: low-rank adapters and data of each, and ranks that train different tasks at once.

mpirun -n 2 python examples/several_tasks.py --folder adapters
"""

from __future__ import annotations

import argparse
import zlib
from pathlib import Path

import torch
from torch import nn

import hpczero
from hpczero import finetune

WEIGHTS = {"waves": 3, "steps": 2, "lines": 1}  # of six micro-batches, how many are of the task
STEPS, MICRO_BATCH = 150, 32


def batch_of(task: str, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Micro-batch ``number`` of a task's data; the same whichever rank gets it."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{task} {number}".encode()))
    x = torch.randn(MICRO_BATCH, 16, generator=generator)
    part = x[:, :4].sum(1, keepdim=True)
    return x, {"waves": torch.sin(part), "steps": part.sign(), "lines": 0.5 * part}[task]


arguments = argparse.ArgumentParser(description=__doc__)
arguments.add_argument(
    "--folder", type=Path, help="where each task's adapter goes, in peft's format"
)
folder = arguments.parse_args().folder

topology = hpczero.Topology.of_world()
torch.set_num_threads(1)  # ranks share the cores of their node
torch.manual_seed(0)
model: nn.Module = nn.Sequential(
    nn.Linear(16, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 1)
)
for task in WEIGHTS:
    finetune.lora(model, rank=8, task=task)  # freezes the model; the products of each task train
optimizer = torch.optim.AdamW(finetune.trained(model), lr=1e-2, weight_decay=0.0)
hpczero.zeroify(model, optimizer, stage=3, topology=topology)

tasks = finetune.Tasks(WEIGHTS)
losses: dict[str, list[float]] = {task: [] for task in WEIGHTS}
for step in range(STEPS):
    task, number = tasks.of(step, topology.rank, topology.size)
    x, y = batch_of(task, number)
    finetune.use(model, task)  # other ranks may train other tasks in this step
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()  # the gradient of each adapter is that of the mean over all ranks' micro-batches
    optimizer.step()
    optimizer.zero_grad()
    for rank, each in enumerate(topology.gather(loss.item())):
        losses[tasks.of(step, rank, topology.size)[0]].append(each)

if topology.is_root:
    for task, seen in losses.items():
        print(f"{task}: {len(seen)} micro-batches, loss fell from {seen[0]:.3f} to {seen[-1]:.3f}")
if folder is not None:
    for task in WEIGHTS:
        finetune.save_adapter(model, folder / task, adapter=task)
hpczero.release(model)
topology.free()
