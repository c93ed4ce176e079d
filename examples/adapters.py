"""Every adapter that comes along, trained to its target by the training command, and beside it by plain torch.

    python examples/adapters.py [--ranks 2] [--only graph ...]    or: make examples

Each is two runs with the same samples, optimizer and learning rates: one process of plain torch, and the command on
some ranks at stage 3. A line says how far the metric got in both, how far the losses of the first 10 steps are
apart, and how long it took. The exit code is 1 if one misses its target, or is further from plain torch than rounding
explains.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Target:
    """What an adapter must reach.

    Attributes:
        factory: of it.
        steps: of 48 samples.
        rate: peak of the learning rate.
        least: of the metric after the last step.
        chance: what the metric is without learning.
    """

    factory: str
    steps: int
    rate: float
    least: float
    chance: float


TARGETS = {
    "regression": Target("hpczero.adapters.regression:build", 200, 0.1, 0.99, 0.0),
    "resnet": Target("hpczero.adapters.vision:resnet", 40, 1e-2, 0.9, 0.125),
    "vit": Target("hpczero.adapters.vision:vit", 120, 3e-3, 0.9, 0.125),
    "dlrm": Target("hpczero.adapters.recommender:dlrm", 400, 1e-2, 0.75, 0.5),
    "gcn": Target("hpczero.adapters.graph:gcn", 60, 1e-2, 0.85, 0.25),
    "graphsage": Target("hpczero.adapters.graph:graphsage", 60, 1e-2, 0.85, 0.25),
    "speech": Target("hpczero.adapters.speech:build", 200, 3e-3, 0.9, 0.0),
    "bert": Target("hpczero.adapters.bert:build", 450, 3e-3, 0.85, 0.07),
}
GLOBAL_BATCH = 48
FIRST = 10  # steps whose losses are compared; later ones are apart as far as rounding has grown
APART = 1e-5  # of these losses, relative where they are above 1
NEAR = 0.05  # of the metric, from that of plain torch


def options_of(target: Target, folder: Path) -> list[str]:
    """As they are typed."""
    given = {
        "model.factory": target.factory,
        "run.folder": str(folder),
        "run.name": "run",
        "train.steps": str(target.steps),
        "train.global_batch": str(GLOBAL_BATCH),
        "train.learning_rate": str(target.rate),
        "evaluation.every": "0",
        "evaluation.batches": "10",
        "checkpoint.every": "0",
        "log.every": "1000",
        "log.tensorboard": "false",
    }
    return [word for name, value in given.items() for word in (f"--{name}", value)]


def by_plain_torch(words: list[str]) -> tuple[list[float], float]:
    """Losses of all steps and the metric after the last, in one process, with the options of the command."""
    import torch

    from hpczero.options.reading import read_run_config
    from hpczero.run.starting.building import decay_groups
    from hpczero.run.starting.factory import made_by_factory
    from hpczero.run.starting.own_samples import OwnBatches, OwnHeldOut, Rows

    config = read_run_config(words)
    adapter, options = made_by_factory(config.model), config.train
    training, held_out = (Rows(part, "samples") for part in adapter.samples())
    batches = OwnBatches(training, GLOBAL_BATCH, config.run.seed)
    torch.manual_seed(config.run.seed)
    model = adapter.build()
    optimizer = torch.optim.AdamW(
        decay_groups(model, adapter, options.weight_decay),
        lr=options.learning_rate,
        betas=options.betas,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, options.learning_rate_factor)
    losses = []
    for number in range(options.steps):
        loss = adapter.loss(model, *batches.micro_batch(number, 0, 0, 1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    model.eval()
    tested = OwnHeldOut(held_out, config.evaluation.batches * GLOBAL_BATCH)
    total = 0.0
    with torch.no_grad():
        for part in tested.batches(micro_batch=GLOBAL_BATCH, rank=0, world_size=1):
            total += adapter.metric(model, *part.arrays).item() * part.num_samples
    return losses, total / len(tested)


def apart_from_mpi(words: list[str]) -> tuple[list[float], float]:
    """``by_plain_torch`` in a process of its own: hpczero's rooms start MPI, and its process can start no job then."""
    command = [sys.executable, __file__, "--plain", *words]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    losses, metric = json.loads(done.stdout)
    return losses, metric


def by_the_command(words: list[str], ranks: int, folder: Path) -> tuple[list[float], float]:
    """The same by the training command, from what it wrote to metrics.jsonl."""
    launch = [ROOT / "install" / "launch.sh", str(ranks), sys.executable, "-m", "hpczero.train"]
    done = subprocess.run(
        [*map(str, launch), *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\n{done.stdout}{done.stderr}")
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    return [step["loss"] for step in steps], steps[-1]["held_out_metric"]


def main() -> int:
    """One line for each adapter; 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--only", nargs="*", choices=[*TARGETS], default=[*TARGETS])
    if sys.argv[1:2] == ["--plain"]:
        print(json.dumps(by_plain_torch(sys.argv[2:])))
        return 0
    asked = parser.parse_args()
    print(f"{'adapter':<11} metric (plain torch)  target  chance  first losses apart  seconds")
    failed = 0
    for name in asked.only:
        target, start = TARGETS[name], time.monotonic()
        with tempfile.TemporaryDirectory() as made:
            words = options_of(target, Path(made))
            expected, plain = apart_from_mpi(words)
            losses, metric = by_the_command(words, asked.ranks, Path(made))
        apart = max(
            abs(one - other) / max(1.0, abs(other))
            for one, other in zip(losses[:FIRST], expected[:FIRST], strict=True)
        )
        near = apart <= APART and abs(metric - plain) <= NEAR
        reached = near and metric >= target.least
        failed += not reached
        print(
            f"{name:<11} {metric:6.3f} ({plain:11.3f})  {target.least:6.3f}  {target.chance:6.3f}  {apart:18.1e}  "
            f"{time.monotonic() - start:7.1f}{'' if reached else '  MISSED'}",
            flush=True,
        )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
