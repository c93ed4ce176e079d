"""One training step of the same model by hpczero and by its peers, side by side in one run.

    python -m scaling.peers --workload gpt-8x512

Owns: the order of a run. Must not know: any framework, the arithmetic of the report. First every contender runs alone
and its memory is measured; then as many as fit together stay resident, and in each round all are woken one after the
other, in an order drawn anew, for the same number of steps. Nothing is measured while two contenders run.
"""

from __future__ import annotations

import contextlib
import math
import random
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from hpczero.errors import ConfigError, run
from hpczero.options.reading import parse_command_line
from hpczero.options.values import Transport
from scaling.contenders import BEFORE, COMPILED, ENTRIES, FLOOR, Entry, find_entry, from_tree
from scaling.contenders.ranks import PEERS_PYTHON, Crew
from scaling.contenders.workload import WORKLOADS, Workload
from scaling.evidence.cpu import machine_seconds, process_seconds
from scaling.evidence.memory import available_nbytes
from scaling.evidence.record import HOME, Recorder, Row, circumstances, machine_name
from scaling.evidence.same_losses import check_same_losses
from scaling.peers.groups import make_groups
from scaling.peers.report import draw, text

ANCHORS = (FLOOR, "hpczero-3", "ddp", "fsdp2")
DRAWN_TOLERANCE = 1e-1  # of another checkout, which may draw other first values; of the first step
MEMORY_STEPS = 4
MEMORY_RUNS = (
    5  # with --against: one peak differs from the next by up to 2 % (two ranks, page by page)
)
MEMORY_SHARE = (
    0.9  # of what is available at the start; libraries that contenders share are counted twice
)


@dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
        workload: model and batch.
        contenders: as in "hpczero-3 fsdp2 independent"; left out, all that are set up, but hpczero-disk and
            deepspeed-disk. hpczero-3@flat is hpczero over that transport.
        ranks: of each contender, one thread each, bound to no core.
        rounds: measured turns of each contender; from 6 on there is a 95 % interval of the median.
        turn_s: shortest time a turn should take; the steps of a turn follow from it, equal for all.
        warm_up: steps before the first round.
        transport: of hpczero where the contender's name has none.
        against: folder of another checkout of hpczero; each of hpczero's contenders runs with its code, too;
            half of the rounds are run after all were built in the reverse order.
        seed: of the order in the rounds.
        results: folder of all machines' results; left out, scaling/results, with --quick runs/scaling.
        quick: a tiny model and two short rounds, to see that everything runs; the times mean nothing.
    """

    workload: Literal["gpt-8x512", "gpt-12x768", "gpt-12x768-short", "tiny"] = "gpt-8x512"
    contenders: tuple[str, ...] = ()
    ranks: int = 2
    rounds: int = 7
    turn_s: float = 2.0
    warm_up: int = 3
    transport: Transport = "auto"
    against: str | None = None
    seed: int = 0
    results: str | None = None
    quick: tyro.conf.UseCounterAction[int] = 0  # a bare --quick; a bool would be --quick true

    def __post_init__(self) -> None:
        for name, least in (("ranks", 1), ("rounds", 1), ("warm_up", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"--{name}: got {getattr(self, name)}, expected at least {least}")
        if not 0 < self.turn_s < math.inf:
            raise ConfigError(f"--turn_s: got {self.turn_s}, expected seconds above 0")

    @property
    def what(self) -> Workload:
        """The workload that is meant."""
        return WORKLOADS["tiny" if self.quick else self.workload]

    @property
    def timing(self) -> tuple[int, float]:
        """(rounds, shortest turn in seconds) that are meant."""
        return (2, 0.05) if self.quick else (self.rounds, self.turn_s)

    @property
    def folder(self) -> Path:
        """Where this machine's results go."""
        parent = self.results or ("runs/scaling" if self.quick else "scaling/results")
        return HOME / parent / machine_name()


def main() -> int:
    """Measure, write the rows, print the table, draw the plot."""
    options = parse_command_line(
        Options,
        sys.argv[1:],
        prog="python -m scaling.peers",
        description="Step time and memory of hpczero and its peers on the same work, in one run.",
        default=Options(),
    )
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # through the crews' ends
    entries = choose(options)
    path = options.folder / f"peers-{options.what.name}.jsonl"
    with Recorder(path) as recorder:
        measure(options, entries, recorder)
    sys.stdout.write(f"\n{text(recorder.rows)}\n")
    draw(recorder.rows, path.with_suffix(".png"))
    say(f"rows in {path}, plot beside them")
    return 0


def choose(options: Options) -> list[Entry]:
    """The contenders that are asked for; those of the other environment only where that is set up.

    Raises:
        ConfigError: an unknown contender, or no checkout to compare with.
    """
    names = list(dict.fromkeys(options.contenders))
    if not names:
        everyday = [entry for entry in ENTRIES.values() if not entry.named]
        there = [e.name for e in everyday if e.python == "main" or PEERS_PYTHON.exists()]
        names = [entry.name for entry in everyday]
        if there != names:
            say("without DeepSpeed, which is not set up; type: install/peers.sh")
            names = there
    entries = [find_entry(name, transport=options.transport) for name in names]
    if options.against:
        tree = Path(options.against).resolve()
        entries += [
            from_tree(e, tree)
            for e in entries
            if e.module == "hpczero_stage" and not e.name.endswith(COMPILED)
        ]
    return entries


def measure(options: Options, entries: Sequence[Entry], recorder: Recorder) -> None:
    """The whole run: memory of each contender alone, in turns; then the rounds of each group."""
    limit = int(MEMORY_SHARE * available_nbytes())
    rounds, _ = options.timing
    run_row = {
        **circumstances(),
        "ranks": options.ranks,
        "rounds": rounds,
        "warm_up": options.warm_up,
        "transport": options.transport,
        "seed": options.seed,
        "workload": options.what.name,
        "description": options.what.describe(),
        "titles": {entry.name: entry.title for entry in entries},
    }
    recorder.write("run", run_row)
    needs = {}
    measured: dict[str, list[Row]] = {entry.name: [] for entry in entries}
    for _ in range(MEMORY_RUNS if options.against and not options.quick else 1):
        for entry in entries:
            measured[entry.name].append(measure_memory(entry, options))
    for name, found in measured.items():
        row = median_low(found)
        recorder.write("memory", row)
        needs[name] = sum(row["peak_nbytes"])
    by_name = {entry.name: entry for entry in entries}
    order = random.Random(options.seed)
    for index, names in enumerate(make_groups(needs, ANCHORS, limit)):
        say(f"group {index + 1}: {', '.join(names)}")
        for row in time_orders([by_name[name] for name in names], options, order):
            recorder.write(row.pop("kind"), {"group": index, **row})


def measure_memory(entry: Entry, options: Options) -> Row:
    """Largest PSS of each rank while the contender runs alone, and what it was before the model."""
    with Crew(entry, options.what, size=options.ranks) as crew:
        built = crew.ask("build")
        trained = crew.ask("memory", steps=MEMORY_STEPS)
        row = {
            "contender": entry.name,
            "settings": built[0]["settings"],
            "baseline_nbytes": crew.baseline_nbytes,
            "build_peak_nbytes": [answer["peak_nbytes"] for answer in built],
            "step_peak_nbytes": [answer["peak_nbytes"] for answer in trained],
        }
    row["peak_nbytes"] = [
        max(pair) for pair in zip(row["build_peak_nbytes"], row["step_peak_nbytes"], strict=True)
    ]
    say(f"{entry.title}: {max(row['step_peak_nbytes']) / 2**20:,.0f} MiB per rank while it trains")
    return row


def median_low(rows: Sequence[Row]) -> Row:
    """The row in the middle by the largest rank's peak."""
    return sorted(rows, key=lambda row: max(row["step_peak_nbytes"]))[(len(rows) - 1) // 2]


def time_orders(entries: Sequence[Entry], options: Options, order: random.Random) -> Iterable[Row]:
    """Rows of one group; with --against, of half of the rounds after contenders were built in the reverse order.

    Of two equal contenders the second built is slower by up to 8 %: it gets worse pages of memory.
    """
    rounds, _ = options.timing
    if not options.against:
        yield from time_group(entries, options, order, range(rounds))
        return
    half = (rounds + 1) // 2
    yield from time_group(entries, options, order, range(half))
    yield from time_group(entries[::-1], options, order, range(half, rounds))


def time_group(
    entries: Sequence[Entry], options: Options, order: random.Random, rounds: range
) -> Iterable[Row]:
    """Rows of the rounds of one group, then the losses, which are compared before anything is believed.

    Raises:
        HpcZeroError: a contender failed, or trains something else.
    """
    turn_s = options.timing[1]
    with contextlib.ExitStack() as stack:
        crews = [
            stack.enter_context(Crew(entry, options.what, size=options.ranks)) for entry in entries
        ]
        losses: dict[str, list[float]] = {}
        fastest = math.inf
        for crew in crews:
            crew.ask("build")
            first, rest = crew.ask("turn", steps=1), crew.ask("turn", steps=options.warm_up)
            losses[crew.entry.name] = mean_losses(first) + mean_losses(rest)
            fastest = min(fastest, max(a["seconds"] for a in rest) / options.warm_up)
        steps = max(1, math.ceil(turn_s / fastest))
        say(f"{len(rounds)} rounds of {steps} steps")
        for number in rounds:
            for crew in order.sample(crews, len(crews)):
                row = take_turn(crew, crews, steps)
                losses[crew.entry.name] += row.pop("losses")
                yield {"kind": "turn", "round": number, **row}
            check_losses(losses)
            say(f"round {number + 1} of {rounds.stop} done")
        for name, values in losses.items():
            yield {"kind": "losses", "contender": name, "losses": values}


def take_turn(crew: Crew, crews: Sequence[Crew], steps: int) -> Row:
    """Wake one contender; watch that the others sleep and how much the rest of the machine works."""
    sleepers = [pid for other in crews if other is not crew for pid in other.pids]

    def counters() -> tuple[float, float, float]:
        return process_seconds(crew.pids), process_seconds(sleepers), machine_seconds()

    before, begin = counters(), time.perf_counter()
    answers = crew.ask("turn", steps=steps)
    window_s = time.perf_counter() - begin
    own, sleeping, machine = (now - then for now, then in zip(counters(), before, strict=True))
    return {
        "contender": crew.entry.name,
        "steps": steps,
        "seconds": [answer["seconds"] for answer in answers],
        "cpu_s": [answer["cpu_s"] for answer in answers],
        "page_faults": [answer["page_faults"] for answer in answers],
        "window_s": window_s,
        "sleeping_cpu_s": sleeping,
        "foreign_cpu_s": max(machine - own - sleeping, 0.0),
        "losses": mean_losses(answers),
    }


def mean_losses(answers: Sequence[Row]) -> list[float]:
    """Loss of each step, the mean over ranks."""
    return [
        math.fsum(ranks) / len(ranks) for ranks in zip(*(a["losses"] for a in answers), strict=True)
    ]


def check_losses(losses: dict[str, list[float]]) -> None:
    """Every contender must have the same loss after the same steps; the floor, which averages nothing, at the first.

    Those of another checkout must agree with each other as closely, and roughly with the others at the first step.

    Args:
        losses: of each step, by contender.

    Raises:
        HpcZeroError: names the contender, the step and both losses.
    """
    reference = next((name for name in losses if name != FLOOR), FLOOR)
    theirs = next((name for name in losses if name.startswith(BEFORE)), None)
    for name, values in losses.items():
        comparable = 1 if name == FLOOR else len(values)
        if name.startswith(BEFORE) and theirs is not None:
            check_same_losses(name, values, theirs, losses[theirs])
            check_same_losses(name, values[:1], reference, losses[reference], DRAWN_TOLERANCE)
        else:
            check_same_losses(name, values[:comparable], reference, losses[reference])


def say(line: str) -> None:
    """Progress, on stderr, so that stdout is the table alone."""
    sys.stderr.write(f"peers: {line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    run(main)
