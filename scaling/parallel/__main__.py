"""One training step over tensor ranks or pipeline stages, by hpczero and by torch over gloo, in one run.

    python -m scaling.parallel --ranks 4

Owns: the order of a run. Must not know: any framework, the arithmetic of the report. Both sides of a layout stay
resident. Their losses are compared before the first time is taken; then each takes its steps in turn, in an order drawn
anew for each round. Nothing is measured while two contenders run.
"""

from __future__ import annotations

import contextlib
import math
import random
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import tyro

from hpczero.errors import ConfigError, HpcZeroError, run
from hpczero.options.reading import parse_command_line
from scaling.contenders.ranks import Crew
from scaling.contenders.workload import WORKLOADS, Workload
from scaling.evidence.record import Recorder, Row, circumstances, path_of
from scaling.parallel.matches import Match, matches_of
from scaling.parallel.report import draw, text
from scaling.peers.__main__ import mean_losses, take_turn

# Of the first loss: fp32 by the order of sums, bf16 by the rounding of activations.
TOLERANCES = {"fp32": 1e-5, "bf16": 2**-8}
LATER = (
    10.0  # times that after the first step; a wrong gradient moves the loss by 1e-2 within a few
)


@dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
        workload: model, and batch of each rank with samples of its own.
        ranks: of each contender, one thread each.
        matches: names such as "tensor-4 tensor-4-sequence pipeline-4"; left out, all.
        micro_batches: of a pipeline's step.
        stage: of ZeRO over the ranks that share no layer; torch's FSDP2 and DDP do that with other bytes.
        precision: of parameters and activations; in bf16 tensor parallelism alone.
        rounds: measured turns of each; from 6 on there is a 95 % interval of the median.
        turn_s: shortest time a turn should take; the steps of a turn follow from it, equal for both.
        warm_up: steps before the first round, whose losses are compared.
        seed: of the order in the rounds.
        results: folder of all machines' results; left out, scaling/results, with --quick runs/scaling.
        quick: a tiny model and two short rounds, to see that everything runs; the times mean nothing.
    """

    workload: Literal["gpt-8x512", "gpt-8x512-short", "gpt-12x768", "tiny"] = "gpt-8x512"
    ranks: int = 4
    matches: tuple[str, ...] = ()
    micro_batches: int = 8
    stage: Literal[0, 1] = 1
    precision: Literal["fp32", "bf16"] = "fp32"
    rounds: int = 7
    turn_s: float = 2.0
    warm_up: int = 3
    seed: int = 0
    results: str | None = None
    quick: tyro.conf.UseCounterAction[int] = 0  # a bare --quick

    def __post_init__(self) -> None:
        for name, least in (("ranks", 2), ("micro_batches", 1), ("rounds", 1), ("warm_up", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"--{name}: got {getattr(self, name)}, expected at least {least}")
        if self.ranks % 2:
            raise ConfigError(f"--ranks: got {self.ranks}, expected an even number")
        if not 0 < self.turn_s < math.inf:
            raise ConfigError(f"--turn_s: got {self.turn_s}, expected seconds above 0")

    @property
    def what(self) -> Workload:
        """The workload that is meant."""
        # Four heads, so that four ranks have one each.
        tiny = Workload("tiny", 4, 64, 4, sequences=2, vocab_size=256, context=32)
        return tiny if self.quick else WORKLOADS[self.workload]

    @property
    def timing(self) -> tuple[int, float]:
        """(rounds, shortest turn in seconds) that are meant."""
        return (2, 0.05) if self.quick else (self.rounds, self.turn_s)

    @property
    def chosen(self) -> list[Match]:
        """What is compared.

        Raises:
            ConfigError: an unknown name.
        """
        found = matches_of(
            self.what,
            ranks=self.ranks,
            micro_batches=self.micro_batches,
            stage=self.stage,
            precision=self.precision,
        )
        known = {match.name: match for match in found}
        for name in self.matches:
            if name not in known:
                raise ConfigError(f"--matches: got {name!r}, expected some of {', '.join(known)}")
        return [known[name] for name in self.matches or known]


def main() -> int:
    """Measure, write the rows, print the table, draw the plot."""
    options = parse_command_line(
        Options,
        sys.argv[1:],
        prog="python -m scaling.parallel",
        description="Step time of own tensor and pipeline parallelism beside torch's, in one run.",
        default=Options(),
    )
    # Through the crews' ends.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    name = f"parallel-{options.what.name}-{options.ranks}-{options.precision}"
    path = path_of(name, options.results or ("runs/scaling" if options.quick else None))
    chosen, order = options.chosen, random.Random(options.seed)
    with Recorder(path) as recorder:
        rounds, _ = options.timing
        head = {
            "ranks": options.ranks,
            "rounds": rounds,
            "precision": options.precision,
            "tolerance": TOLERANCES[options.precision],
            "workload": options.what.name,
            "description": options.what.describe(),
        }
        recorder.write("run", {**circumstances(), **head})
        for match in chosen:
            for row in compare(match, options, order):
                recorder.write(row.pop("kind"), row)
            say(f"{match.name} done")
    sys.stdout.write(f"\n{text(recorder.rows)}\n")
    draw(recorder.rows, path.with_suffix(".png"))
    say(f"rows in {path}, plot beside them")
    return 0


def compare(match: Match, options: Options, order: random.Random) -> Iterator[Row]:
    """Rows of one layout.

    Raises:
        HpcZeroError: a contender failed, or the two do not train the same.
    """
    rounds, turn_s = options.timing
    entries = (match.own, match.other)
    with contextlib.ExitStack() as stack:
        crews = [stack.enter_context(Crew(e, match.workload, size=options.ranks)) for e in entries]
        losses: dict[str, list[float]] = {}
        fastest, settings = math.inf, {}
        for crew in crews:
            settings[crew.entry.name] = crew.ask("build")[0]["settings"]
            first = crew.ask("turn", steps=1)
            rest = crew.ask("turn", steps=options.warm_up)
            losses[crew.entry.name] = mean_losses(first) + mean_losses(rest)
            fastest = min(fastest, max(a["seconds"] for a in rest) / options.warm_up)
        tolerance = TOLERANCES[options.precision]
        apart({name: values[:1] for name, values in losses.items()}, tolerance)
        yield {
            "kind": "match",
            "match": match.name,
            "title": match.other.title,
            "own": match.own.name,
            "other": match.other.name,
            "goal": match.goal,
            "apart": apart(losses, LATER * tolerance),
            "settings": settings,
            "losses": {name: list(values) for name, values in losses.items()},
        }
        steps = max(1, math.ceil(turn_s / fastest))
        for number in range(rounds):
            for crew in order.sample(crews, len(crews)):
                row = take_turn(crew, crews, steps)
                losses[crew.entry.name] += row.pop("losses")
                yield {"kind": "turn", "match": match.name, "round": number, **row}
            apart(losses, LATER * tolerance)


def apart(losses: dict[str, Sequence[float]] | dict[str, list[float]], most: float) -> float:
    """The largest difference of two contenders' losses.

    Raises:
        HpcZeroError: it is above ``most``.
    """
    (own, mine), (other, theirs) = losses.items()
    found = [abs(a - b) for a, b in zip(mine, theirs, strict=True)]
    worst = max(found)
    if not worst <= most:
        step = next(i for i, each in enumerate(found) if not each <= most)
        raise HpcZeroError(
            f"{own}: loss {mine[step]:.7f} at step {step}, {other} has {theirs[step]:.7f}, expected the same within "
            f"{most:g}: they do not train the same, so their times cannot be compared"
        )
    return worst


def say(line: str) -> None:
    """Progress, on stderr, so that stdout is the table alone."""
    sys.stderr.write(f"parallel: {line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    run(main)
