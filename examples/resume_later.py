"""Stop, and go on later on another number of ranks.

    mpirun -n 2 python examples/resume_later.py --state runs/resume.safetensors
    mpirun -n 3 python examples/resume_later.py --state runs/resume.safetensors

Each job does 40 steps and saves the weights in fp32, with the number of steps done, from which the position in the data
follows. It does not save the optimizer: sharded checkpoints of its state are not built yet. AdamW forgets its moments
at each start, so the learning rate warms up again, and the steps that follow are not those of one long run. The weights
are the same to the last bit on any number of ranks: the first held-out loss of a job is the last one of the job before.
"""

from __future__ import annotations

import argparse
import zlib
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
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


def main(state: Path) -> None:
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

    done = 0
    with topology.agreed("open the saved state"):  # an error on one rank is an error on all
        if state.exists():
            file = safe_open(state, framework="pt")
            card = file.metadata()
            done = int(card["steps"])

    def read(name: str, tensor: Tensor) -> None:
        tensor.copy_(file.get_tensor(name))

    hpczero.zeroify(model, optimizer, topology=topology, initialize=read if done else initial_value)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARMUP)
    )

    first = held_out_loss(model)
    if topology.is_root:
        was = (
            f"; it was {card['held_out_loss']} when saved on {card['ranks']} rank(s)"
            if done
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

    weights = hpczero.full_state_dict(model)  # rank 0 gets them
    with topology.agreed("save the state"):
        if weights is not None:
            card = {
                "steps": str(done + STEPS),
                "held_out_loss": str(last),
                "ranks": str(topology.size),
            }
            state.parent.mkdir(parents=True, exist_ok=True)
            temporary = state.with_suffix(".tmp")
            save_file(weights, temporary, metadata=card)
            temporary.replace(state)  # whole or not at all
            print(f"loss fell from {first} to {last}; saved after step {done + STEPS}")
    hpczero.release(model)
    topology.free()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Train 40 steps, save, and go on from there next time."
    )
    parser.add_argument(
        "--state", type=Path, default=Path("runs/resume.safetensors"), help="the file to keep"
    )
    main(parser.parse_args().state)
