"""Stop, and go on later on another number of ranks.

    mpirun -n 2 python examples/resume_later.py --folder runs/resume
    mpirun -n 3 python examples/resume_later.py --folder runs/resume

Each job does 40 steps and saves a checkpoint: weights, optimizer state, and what it is told to remember. Any number of
ranks goes on from there, at any stage, with the next sample. The first held-out loss of a job is the last one of the
job before, to the last bit.
"""

from __future__ import annotations

import argparse
import zlib
from pathlib import Path

import torch
from torch import Tensor, nn

import hpczero

STEPS, GLOBAL_BATCH, WARMUP = 40, 48, 10


def samples(first: int, count: int) -> tuple[Tensor, Tensor]:
    """(count, 16) inputs and (count, 1) targets; every sample depends on its number alone."""
    rows = [
        torch.randn(16, generator=torch.Generator().manual_seed(n))
        for n in range(first, first + count)
    ]
    x = torch.stack(rows)
    return x, torch.tanh(x[:, :8].sum(1, keepdim=True)) + 0.1 * x[:, 8:9]


def initial_value(name: str, tensor: Tensor) -> None:
    """First weights, equal on every rank because the generator is keyed by the name."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    if tensor.dim() > 1:
        tensor.normal_(std=tensor.shape[-1] ** -0.5, generator=generator)
    else:
        tensor.zero_()


@torch.no_grad()
def held_out_loss(model: nn.Module) -> float:
    """The same on every rank, which all compute it. Collective: the forward gathers shards."""
    x, y = samples(10**6, 96)
    return nn.functional.mse_loss(model(x), y).item()


def main(folder: Path) -> None:
    """Start or go on, do STEPS steps, save."""
    topology = hpczero.Topology.of_world()
    torch.set_num_threads(1)
    with torch.device(
        "meta"
    ):  # holds nothing: zeroify fills this rank's shards, one unit at a time
        model = nn.Sequential(
            nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    hpczero.zeroify(model, optimizer, topology=topology, initialize=initial_value)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARMUP)
    )

    with hpczero.checkpoint.Checkpoints(folder, model, optimizer, keep=2) as checkpoints:
        found = checkpoints.load()  # the newest sound one; None in an empty folder
        done = 0 if found is None else found.step
        if found is not None:
            scheduler.load_state_dict(found.extra["scheduler"])

        first = held_out_loss(model)
        if topology.is_root:
            was = (
                f"; it was {found.extra['held_out_loss']} when saved on {found.world_size} rank(s)"
                if found is not None
                else ""
            )
            print(f"step {done}, {topology.size} rank(s): held-out loss {first}{was}")
        share = GLOBAL_BATCH // topology.size
        for step in range(done, done + STEPS):
            x, y = samples(step * GLOBAL_BATCH + topology.rank * share, share)
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        last = held_out_loss(model)

        extra = {"scheduler": scheduler.state_dict(), "held_out_loss": last}
        path = checkpoints.save(done + STEPS, extra)  # whole or not at all
        if topology.is_root:
            print(f"loss fell from {first} to {last}; saved {path}")
    hpczero.release(model)
    topology.free()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Train 40 steps, save, and go on from there next time."
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/resume"), help="the checkpoints to keep"
    )
    main(parser.parse_args().folder)
