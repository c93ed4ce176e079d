"""Thread time of a training step with tiny tensors, in a zeroified model beside plain torch, in one process.

    python -m scaling.overhead

Owns: the order of a run. Must not know: how a step is taken, the arithmetic of the report. In each round each takes
its steps, in an order drawn anew. Thread time leaves out what other programs take of the processor.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from statistics import median

from hpczero.errors import ConfigError, HpcZeroError, run
from hpczero.models.config import GPTConfig
from hpczero.options.reading import parse_command_line
from scaling.evidence.record import Recorder, circumstances, path_of

TOLERANCE = 1e-5


@dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
        layers: of the model; its tensors are tiny.
        stages: of ZeRO, beside plain torch.
        rounds: measured turns of each; from 6 on there is a 95 % interval of the median.
        steps: of a turn; its number is their median.
        warm_up: steps of each before the first round, in which losses are compared.
        seed: of the order in the rounds.
        results: folder of all machines' results; left out, scaling/results.
    """

    layers: int = 48
    stages: tuple[int, ...] = (0, 1, 2, 3)
    rounds: int = 7
    steps: int = 10
    warm_up: int = 10
    seed: int = 0
    results: str | None = None

    def __post_init__(self) -> None:
        for name in ("layers", "rounds", "steps", "warm_up"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name}: got {getattr(self, name)}, expected at least 1")
        if not self.stages or not set(self.stages) <= {0, 1, 2, 3}:
            raise ConfigError(f"--stages: got {self.stages}, expected some of 0, 1, 2, 3")


def main() -> int:
    """Measure, write the rows, print the table."""
    options = parse_command_line(
        Options,
        sys.argv[1:],
        prog="python -m scaling.overhead",
        description="Thread time of a step with tiny tensors beside plain torch, on one rank.",
        default=Options(),
    )
    # Here and not at the top: these start torch and MPI, which --help and bad options must not do.
    import torch

    from scaling.overhead.report import text
    from scaling.overhead.steps import Stepper

    torch.set_num_threads(1)
    config = GPTConfig(vocab_size=64, context=8, layers=options.layers, hidden=16, heads=2)
    order = random.Random(options.seed)
    with Recorder(path_of(f"overhead-{options.layers}", options.results)) as recorder:
        head = {"rounds": options.rounds, "steps": options.steps}
        what = f"GPT {config.layers} x {config.hidden}, {config.context} tokens"
        recorder.write("run", {**circumstances(), **head, "description": what})
        steppers = [Stepper(config, stage) for stage in (None, *options.stages)]
        losses = [[stepper.take()[1] for _ in range(options.warm_up)] for stepper in steppers]
        for stepper, mine in zip(steppers, losses, strict=True):
            if any(abs(a - b) > TOLERANCE for a, b in zip(mine, losses[0], strict=True)):
                raise HpcZeroError(
                    f"{stepper.name}: losses {mine}, plain torch has {losses[0]}, expected the same within "
                    f"{TOLERANCE:g}: they do not train the same, so their times cannot be compared"
                )
            recorder.write("stepper", {"name": stepper.name, "waits": stepper.waits()})
        for number in range(options.rounds):
            for stepper in order.sample(steppers, len(steppers)):
                taken = [stepper.take()[0] for _ in range(options.steps)]
                seconds = {part: median(one[part] for one in taken) for part in taken[0]}
                turn = {"name": stepper.name, "round": number, "seconds": seconds}
                recorder.write("turn", turn)
        for stepper in steppers:
            stepper.close()
    sys.stdout.write(f"{text(recorder.rows)}\n")
    sys.stderr.write(f"overhead: rows in {recorder.path}\n")
    return 0


if __name__ == "__main__":
    run(main)
