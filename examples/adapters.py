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
import random
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
        goal: of the metric after the last step, at least; of text the held-out loss, at most.
        chance: what that is without learning.
        arguments: of the factory.
        text: whether it reads text, that of ``write_text``.
    """

    factory: str
    steps: int
    rate: float
    goal: float
    chance: float
    arguments: str = "{}"
    text: bool = False

    def reached(self, metric: float) -> bool:
        """Whether that is enough."""
        return metric <= self.goal if self.text else metric >= self.goal


TARGETS = {
    "regression": Target("examples.regression:build", 200, 0.1, 0.99, 0.0),
    "resnet": Target("examples.vision:resnet", 40, 1e-2, 0.9, 0.125),
    "vit": Target("examples.vision:vit", 120, 3e-3, 0.9, 0.125),
    "dlrm": Target("examples.recommender:dlrm", 400, 1e-2, 0.75, 0.5),
    "gcn": Target("examples.graph:gcn", 60, 1e-2, 0.85, 0.25),
    "graphsage": Target("examples.graph:graphsage", 60, 1e-2, 0.85, 0.25),
    "speech": Target("examples.speech:build", 200, 3e-3, 0.9, 0.0),
    "bert": Target("examples.bert:build", 450, 3e-3, 0.85, 0.07),
    # A letter of a word of six has log(32) / 6 = 0.58 nats; any byte has log(256) = 5.55.
    "llama": Target(
        "hpczero.adapters.llama:build",
        80,
        5e-3,
        0.9,
        5.55,
        arguments='{"hidden": 64, "layers": 2, "heads": 4, "context": 48}',
        text=True,
    ),
}
GLOBAL_BATCH = 48
FIRST = 10  # steps whose losses are compared; later ones are apart as far as rounding has grown
APART = 1e-5  # of these losses, relative where they are above 1
NEAR = 0.05  # of the metric, from that of plain torch


def options_of(target: Target, folder: Path) -> list[str]:
    """As they are typed."""
    given = {
        "model.factory": target.factory,
        "model.arguments": target.arguments,
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
    if target.text:
        given["data.path"] = str(write_text(folder / "words.txt"))
    return [word for name, value in given.items() for word in (f"--{name}", value)]


def write_text(path: Path) -> Path:
    """Words of a made-up language of 32, each of six letters, without spaces."""
    draw = random.Random(15)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(32)]
    path.write_text("".join(draw.choices(words, k=60_000)))
    return path


def by_plain_torch(words: list[str]) -> tuple[list[float], float]:
    """Losses of all steps and the metric after the last, in one process, with the options of the command."""
    import torch

    import hpczero
    from hpczero.job.signals import Signals
    from hpczero.options.reading import read_run_config
    from hpczero.run.starting.building import decay_groups, made_by_factory
    from hpczero.run.starting.reading import open_reading

    config = read_run_config(words)
    options, alone = config.train, hpczero.Topology.alone()
    reading, adapter = open_reading(config, made_by_factory(config.model), alone, signals=Signals())
    batches = reading.training(config, adapter.context or 0, GLOBAL_BATCH)
    torch.manual_seed(config.run.seed)
    model = adapter.build()
    fill = adapter.initializer(model, config.run.seed)
    if fill is not None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                fill(name, parameter)
    optimizer = torch.optim.AdamW(
        decay_groups(model, adapter, options.weight_decay),
        lr=options.learning_rate,
        betas=options.betas,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, options.learning_rate_factor)
    losses = []
    for number in range(options.steps):
        samples = batches.micro_batch(number, 0, 0, 1)
        loss = adapter.loss(model, *map(torch.as_tensor, samples))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    model.eval()
    held_out = reading.held_out(adapter.context or 0, config.evaluation.batches * GLOBAL_BATCH)
    assert held_out is not None, "all of them have samples that are held out"
    measure, total = adapter.metric if adapter.metric_name else adapter.loss, 0.0
    with torch.no_grad():
        for part in held_out.batches(micro_batch=GLOBAL_BATCH, rank=0, world_size=1):
            arrays = map(torch.as_tensor, part.arrays)
            total += measure(model, *arrays).item() * part.num_samples
    return losses, total / len(held_out)


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
    last = steps[-1]
    metric = last.get("held_out_metric")
    return [step["loss"] for step in steps], last["held_out_loss"] if metric is None else metric


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
        reached = near and target.reached(metric)
        failed += not reached
        print(
            f"{name:<11} {metric:6.3f} ({plain:11.3f})  {target.goal:6.3f}  {target.chance:6.3f}  {apart:18.1e}  "
            f"{time.monotonic() - start:7.1f}{'' if reached else '  MISSED'}",
            flush=True,
        )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
