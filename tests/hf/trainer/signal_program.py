"""A training of the trainer, or of Fabric, that gets a signal in the middle of a step, an evaluation or a save.

``KIND PHASE HANDLER FOLDER``: each rank says its process as ``PID rank pid``, and ``NOW rank`` when the phase begins in
step 3, whose parts it then draws out. HANDLER: ``default`` leaves signals as they are; ``flag`` notes them, and a
callback saves and stops, as scripts do; ``raise`` raises an error of the script's own.
In the end each rank says ``DONE rank step digest`` with a digest of the whole weights.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

PAUSE_S = 0.005
STEPS = 6
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

came: list[int] = []
slow = [False]


class TimeUp(Exception):
    """What a script's own handler raises."""


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def install(handler: str) -> None:
    """Handle signals as the script does."""

    def flag(number: int, frame: Any) -> None:
        came.append(number)

    def raises(number: int, frame: Any) -> None:
        raise TimeUp(f"signal {number}")

    found = {"flag": flag, "raise": raises}.get(handler)
    for number in SIGNALS if found else ():
        signal.signal(number, found)


def drawn_out(call: Callable[..., Any]) -> Callable[..., Any]:
    """``call``, with a pause before it while the phase lasts."""

    def slowly(*args: Any, **named: Any) -> Any:
        if slow[0]:
            time.sleep(PAUSE_S)
        return call(*args, **named)

    return slowly


def draw_out() -> None:
    """Pauses in what a save does, and in each exchange of ranks."""
    from hpczero.job.watchdog import Watchdog

    for name in ("fsync", "pwrite"):
        setattr(os, name, drawn_out(getattr(os, name)))
    for name in ("rename", "replace", "unlink", "mkdir"):
        setattr(Path, name, drawn_out(getattr(Path, name)))
    setattr(Watchdog, "_begin", drawn_out(Watchdog._begin))  # noqa: B010


def digest_of(model: Any) -> int:
    """Of the whole weights as this rank has them."""
    import hpczero

    found = 0
    with hpczero.gathered(model):
        for parameter in model.parameters():
            found = zlib.crc32(parameter.detach().contiguous().numpy().tobytes(), found)
    return found


class Phase:
    """Tells when a phase begins, on this rank."""

    def __init__(self, rank: int) -> None:
        self.rank, self.seen = rank, False

    def begin(self) -> None:
        if not self.seen:
            self.seen = slow[0] = True
            say("NOW", self.rank)


def with_trainer(phase: str, folder: Path) -> None:
    from mpi4py import MPI
    from transformers import TrainerCallback

    from tests.hf.trainer.runs import trainer_over_mpi

    mark = Phase(MPI.COMM_WORLD.rank)

    class Marks(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            if state.global_step == 2 and phase == "step":
                mark.begin()

        def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            if came:
                control.should_save = control.should_training_stop = True

    options = {"save_strategy": "steps", "save_steps": 1, "eval_steps": 1, "max_steps": STEPS}
    trainer: Any = trainer_over_mpi(
        folder, 6 // MPI.COMM_WORLD.size, stage=3, given={"callbacks": [Marks()]}, **options
    )
    for name, wanted in (("evaluation_loop", "evaluation"), ("_save_checkpoint", "save")):
        before = getattr(trainer, name)

        def begins(*args: Any, _call: Any = before, _wanted: str = wanted, **named: Any) -> Any:
            if trainer.state.global_step == 3 and phase == _wanted:
                mark.begin()
            return _call(*args, **named)

        setattr(trainer, name, begins)
    newest = any((folder / "checkpoints").glob("step-*"))
    trainer.train(resume_from_checkpoint=newest)
    say("DONE", mark.rank, trainer.state.global_step, digest_of(trainer.model))


def with_fabric(phase: str, folder: Path) -> None:
    from lightning_fabric import Fabric

    from hpczero.fabric import HpczeroStrategy

    fabric = Fabric(strategy=HpczeroStrategy(stage=3), devices=1, accelerator="cpu")
    fabric.launch()
    mark = Phase(fabric.global_rank)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.Tanh(), torch.nn.Linear(13, 3))
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
    if any(folder.glob("step-*")):
        fabric.load(folder, state)
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(STEPS, 8, 7, generator=generator)
    for step in range(state["step"], STEPS):
        if step == 2 and phase == "step":
            mark.begin()
        rows = data[step][fabric.global_rank :: fabric.world_size]
        loss = model(rows).square().mean()
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        if step == 2 and phase == "evaluation":
            mark.begin()
        with torch.no_grad():
            fabric.all_reduce(model(rows).square().mean())
        if step == 2 and phase == "save":
            mark.begin()
        state["step"] = step + 1
        fabric.save(folder, state)
        if not fabric.strategy.reduce_boolean_decision(not came):
            break
    say("DONE", mark.rank, state["step"], digest_of(net))


def main() -> None:
    kind, phase, handler, folder = sys.argv[1:]
    torch.set_num_threads(1)
    install(handler)
    from mpi4py import MPI

    draw_out()
    say("PID", MPI.COMM_WORLD.rank, os.getpid())
    (with_trainer if kind == "trainer" else with_fabric)(phase, Path(folder))


if __name__ == "__main__":
    main()
