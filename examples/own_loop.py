"""Your own loop: plain torch, with hpczero in the places marked 1 to 6. All ranks run all of it.

mpirun -n 2 python examples/own_loop.py
"""

from __future__ import annotations

import torch
from torch import nn

import hpczero

STEPS, BATCH = 60, 48  # the batch is that of all ranks together

topology = hpczero.Topology.of_world()  # 1: who am I, and how many are we
torch.set_num_threads(1)  # ranks share the cores of their node
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
hpczero.zeroify(model, optimizer, stage=3, topology=topology)  # 2: shard both, in place
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
torch.manual_seed(1 + topology.rank)  # from here on each rank drops out other neurons


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's samples of a step; they depend on the step and the sample, not on how many ranks there are."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 20, generator=generator)
    y = torch.tanh(x[:, :5].sum(1, keepdim=True))
    share = BATCH // topology.size  # equal on every rank: gradients are the mean over ranks
    mine = slice(topology.rank * share, (topology.rank + 1) * share)
    return x[mine], y[mine]


losses = []
for step in range(STEPS):
    x, y = batch_of(step)
    loss = nn.functional.mse_loss(model(x), y)  # call the model itself: its hooks gather the shards
    loss.backward()
    grad_norm = hpczero.clip_grad_norm_(model, 1.0)  # 3: or torch's clip_grad_norm_
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    losses.append(sum(topology.gather(loss.item())) / topology.size)  # 4: the mean over ranks
    if topology.is_root and step % 10 == 0:
        print(f"step {step:3d}  loss {losses[-1]:.4f}  gradient norm {grad_norm:.3f}")

weights = hpczero.full_state_dict(model)  # 5: every rank calls it, rank 0 gets the weights
if weights is not None:
    kept = hpczero.sharding(model).memory.current  # bytes this rank holds, by category
    print(f"{sum(w.numel() for w in weights.values()):,} parameters; rank 0 holds {kept} bytes")
    print(f"loss fell from {losses[0]:.4f} to {losses[-1]:.4f}")
hpczero.release(model)  # 6: hooks and communicators go; every rank calls it
topology.free()
