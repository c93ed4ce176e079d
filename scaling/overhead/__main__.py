"""Thread time of a training step with tiny tensors, in a zeroified model beside plain torch, in one process.

    python -m scaling.overhead

In each round each takes its steps, in an order drawn anew. Thread time leaves out what other programs take of the
processor.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from statistics import median

from hpczero.errors import ConfigError, run
from hpczero.models.config import GPTConfig
from scaling.evidence import harness
from scaling.evidence.record import Row, head_of, of_kind, run_row, where_and_when
from scaling.evidence.spread import Spread, by_round, paired, table, with_spread

TOLERANCE = 1e-5
GOALS = {"stage 0": 1.5, "stage 3": 1.9}  # of plain torch's thread time, at most


@dataclass(frozen=True)
class Options(harness.Common):
    """What to measure.

    Attributes:
        layers: of the model; its tensors are tiny.
        stages: of ZeRO, beside plain torch.
        rounds: measured turns of each; from 6 on there is a 95 % interval of the median.
        steps: of a turn; its number is their median.
        warm_up: steps of each before the first round, in which losses are compared.
    """

    layers: int = 48
    stages: tuple[int, ...] = (0, 1, 2, 3)
    rounds: int = 7
    steps: int = 10
    warm_up: int = 10

    def __post_init__(self) -> None:
        harness.at_least(self, layers=1, rounds=1, steps=1, warm_up=1)
        if not self.stages or not set(self.stages) <= {0, 1, 2, 3}:
            raise ConfigError(f"--stages: got {self.stages}, expected some of 0, 1, 2, 3")


def main() -> int:
    """Measure, write the rows, print the table."""
    options = harness.options_of(Options, "overhead")
    harness.record(f"overhead-{options.layers}", options.results, measure(options), REPORT)
    return 0


def measure(options: Options) -> Iterator[Row]:
    """All rows. Raises HpcZeroError: a stage trains something else than plain torch."""
    import torch

    from scaling.overhead.steps import Stepper

    torch.set_num_threads(1)
    config = GPTConfig(vocab_size=64, context=8, layers=options.layers, hidden=16, heads=2)
    what = f"GPT {config.layers} x {config.hidden}, {config.context} tokens"
    yield run_row(options, "rounds steps", description=what)
    steppers = [Stepper(config, stage) for stage in (None, *options.stages)]
    losses = [[stepper.take()[1] for _ in range(options.warm_up)] for stepper in steppers]
    for stepper, mine in zip(steppers, losses, strict=True):
        harness.check_same_losses(stepper.name, mine, steppers[0].name, losses[0], TOLERANCE)
        yield {"kind": "stepper", "name": stepper.name, "waits": stepper.waits()}
    for number, turn in harness.in_turns(steppers, options.rounds, random.Random(options.seed)):
        for stepper in turn:
            taken = [stepper.take()[0] for _ in range(options.steps)]
            seconds = {part: median(one[part] for one in taken) for part in taken[0]}
            yield {"kind": "turn", "name": stepper.name, "round": number, "seconds": seconds}
    for stepper in steppers:
        stepper.close()


def text(rows: list[Row]) -> str:
    """Heading and table; markdown."""
    head, steppers = head_of(rows), list(of_kind(rows, "stepper"))
    name = itemgetter("name")
    totals = by_round(rows, "turn", name, lambda row: sum(row["seconds"].values()))
    parts = list(next(of_kind(rows, "turn"))["seconds"])
    taken = by_round(rows, "turn", name, itemgetter("seconds"))
    cells = []
    for row in steppers:
        mine, goal = row["name"], GOALS.get(row["name"])
        ratio = paired(totals[mine], totals[steppers[0]["name"]])
        assert ratio is not None, "all run in every round"
        cells.append(
            [
                mine,
                *(
                    f"{median(each[part] for each in taken[mine].values()) * 1e3:.2f}"
                    for part in parts
                ),
                with_spread(Spread.of(totals[mine].values()), 1, scale=1e3),
                with_spread(ratio, 2),
                f"{goal:g}" if goal else "–",
                ("yes" if ratio.median <= goal else "no") if goal else "–",
                str(sum(row["waits"].values())),
            ]
        )
    header = ["", *(f"{part}, ms" for part in parts), "all, ms", "/ plain", "goal", "met", "waits"]
    return (
        f"Thread time of a step with tiny tensors on one rank: {head['description']}, fp32, fused AdamW, clipped; "
        f"median of {head['rounds']} rounds of {head['steps']} steps in turns. Waits: numbers that the host asks of "
        f"tensors in a step, the loss among them. {where_and_when(head)}\n\n{table(header, cells)}"
    )


REPORT = harness.Report("What hpczero adds to a step", text)

if __name__ == "__main__":
    run(main)
