"""Jobs of ``test_sizes``, which save on some ranks what others go on with.

``values FOLDER SIZE...`` saves two models at all ranks; then the first SIZE ranks load them and save them again, and so
on. Without an optimizer: to import what torch wants for one takes many ranks on few cores longer than everything else.
``training FOLDER 4-1 8-3 5-1 ...`` saves a training and passes it on; 5-1 means 5 ranks at stage 1. Checkpoint
``FOLDER/5-1`` is what came out of the one before. Must not know: what the test looks for.
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
from tests.checkpoint.programs import SLAB_NBYTES, Net, first_ranks, program_of

MODELS = {"net": Net, "tiny": lambda: nn.Linear(2, 1)}
WRITERS = ("mpio", "posix")
STEPS = 3


def values(folder: Path, sizes: list[str]) -> None:
    """Collective over world, as is ``training``."""
    for name, build in MODELS.items():
        origin = None
        for size in (MPI.COMM_WORLD.size, *map(int, sizes)):
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


def save(folder: Path, model: nn.Module) -> None:
    """With each writer."""
    for writer in WRITERS:
        place = folder / writer
        with Checkpoints(place, model, writer=writer, slab_nbytes=SLAB_NBYTES) as checkpoints:
            checkpoints.save(0)


def training(folder: Path, legs: list[str]) -> None:
    before: str | None = None
    for leg in legs:
        size, stage = map(int, leg.split("-"))
        with program_of(MPI.COMM_WORLD, size, stage=stage) as program:
            if program is not None:
                if before is None:
                    program.train(STEPS)
                else:
                    program.load(folder / before)
                program.save(folder / leg)
        before = leg


if __name__ == "__main__":
    kind, place, *rest = sys.argv[1:]
    run(lambda: {"values": values, "training": training}[kind](Path(place), rest))
