"""Trainings of the trainer that are killed in the middle of a save, and one that goes on from what they have left.

``kill FOLDER CHANGES...`` trains once for each number in the list, and dies before so many changes of the disk since
the second save began: by itself on one rank, in processes forked before MPI is started, so that libraries are imported
once. ``resume FOLDER`` goes on in each of the folders, on the ranks that MPI has, and prints what differs from a run
that nobody killed.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

SAVING: dict[str, Any] = {
    "save_strategy": "steps",
    "save_steps": 3,
    "save_total_limit": 1,
    "eval_strategy": "no",
}
GLOBAL_BATCH = 6


def die_before(change: int) -> None:
    """End this process before its ``change``-th change of the disk from now on."""
    inside, left = threading.local(), [change]

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def changes(*args: Any, **named: Any) -> Any:
            if getattr(inside, "a_change", False):  # Path calls os
                return call(*args, **named)
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            inside.a_change = True
            try:
                return call(*args, **named)
            finally:
                inside.a_change = False

        return changes

    for name in ("rename", "replace", "unlink", "mkdir", "rmdir", "write_text"):
        setattr(Path, name, counted(getattr(Path, name)))
    for name in ("fsync", "pwrite", "link", "unlink", "rmdir"):  # the last two: of shutil.rmtree
        setattr(os, name, counted(getattr(os, name)))


def train(folder: Path, change: int, stage: int) -> None:
    """Train, and die in the second save; negative: do not."""
    from mpi4py import MPI

    from tests.hf.trainer.runs import trainer_over_mpi

    trainer = trainer_over_mpi(folder, GLOBAL_BATCH // MPI.COMM_WORLD.size, stage=stage, **SAVING)
    save = trainer._save_checkpoint

    def saving(*args: Any) -> None:
        if trainer.state.global_step == 6 and change >= 0 and MPI.COMM_WORLD.rank == 0:
            die_before(change)
        save(*args)
        if trainer.state.global_step == 6 and change >= 0:
            os._exit(3)  # that was all: it had fewer changes

    setattr(trainer, "_save_checkpoint", saving)  # noqa: B010  (mypy would not have it)
    trainer.train()


def kill(folder: Path, changes: list[int]) -> None:
    """One process after the other; each says how it ended."""
    import transformers.trainer  # noqa: F401  (once for all of them)

    import tests.hf.trainer.runs  # noqa: F401

    for change in changes:
        process = os.fork()
        if process == 0:
            train(folder / f"{change}", change, stage=3)
            os._exit(0)
        _, status = os.waitpid(process, 0)
        sys.stdout.write(f"{change} {os.waitstatus_to_exitcode(status)}\n")


def resume(folder: Path) -> None:
    """Go on in every folder that was left, at another stage."""
    from mpi4py import MPI

    from tests.hf.trainer import runs

    comm, batch = MPI.COMM_WORLD, GLOBAL_BATCH // MPI.COMM_WORLD.size
    mine = (
        runs.plain(folder / "plain", GLOBAL_BATCH, eval_strategy="no") if comm.rank == 0 else None
    )
    expected = comm.bcast(mine)
    for place in sorted(each for each in folder.iterdir() if each.name.lstrip("-").isdigit()):
        trainer = runs.trainer_over_mpi(place, batch, stage=1, **SAVING)
        found = runs.train(trainer, comm, resume=True)
        lines = found.log[:-1], expected.log[:-1]  # without the mean loss since the process began
        far = runs.furthest(found.weights, expected.weights)
        losses = max(abs(a["loss"] - b["loss"]) for a, b in zip(*lines, strict=True))
        left = sorted(each.name for each in (place / "checkpoints").glob("step-*"))
        if comm.rank == 0:
            sys.stdout.write(f"{place.name} {far:.3g} {losses:.3g} {','.join(left)}\n")
        runs.done_with(trainer)


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, where, *numbers = sys.argv[1:]
    if what == "kill":
        kill(Path(where), [int(number) for number in numbers])
    elif what == "train":
        train(Path(where) / numbers[0], int(numbers[0]), stage=2)
    else:
        resume(Path(where))
