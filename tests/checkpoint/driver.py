"""One job of ``test_sizes``: ``python -m tests.checkpoint.driver FOLDER SIZE...``.

Saves two models at all ranks; then the first SIZE ranks load them and save them again, and so on. Without an optimizer:
to import what torch wants for one takes many ranks on few cores longer than everything else.
Must not know: what the test looks for.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from mpi4py import MPI
from torch import nn

import hpczero
from hpczero.checkpoint import Checkpoints
from hpczero.errors import run
from tests.checkpoint.programs import SLAB_NBYTES, Net, first_ranks

MODELS = {"net": Net, "tiny": lambda: nn.Linear(2, 1)}
WRITERS = ("mpio", "posix")


def main() -> int:
    """Do it for all models."""
    folder = Path(sys.argv[1])
    for name, build in MODELS.items():
        origin = None
        for size in (MPI.COMM_WORLD.size, *map(int, sys.argv[2:])):
            with first_ranks(MPI.COMM_WORLD, size) as topology:
                if topology is not None:
                    torch.manual_seed(0 if origin is None else 1)
                    model = build()
                    hpczero.zeroify(model, None, topology=topology)
                    if origin is not None:
                        hpczero.checkpoint.load(origin, model)
                    save(folder / str(size) / name, model)
                    hpczero.release(model)
            origin = folder / str(size) / name / WRITERS[0]
    return 0


def save(folder: Path, model: nn.Module) -> None:
    """With each writer."""
    for writer in WRITERS:
        place = folder / writer
        with Checkpoints(place, model, writer=writer, slab_nbytes=SLAB_NBYTES) as checkpoints:
            checkpoints.save(0)


if __name__ == "__main__":
    run(main)
