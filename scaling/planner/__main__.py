"""The planner's choice beside the other settings that fit, trained in turns in one MPI job.

    mpirun -n 2 python -m scaling.planner --folder /local/scratch

Owns: the order of a run. Must not know: how a planner compares, the arithmetic of the report. In each round every rank
probes, every candidate is built, takes a step that does not count, and some that do; then it is given back. What is
foretold comes from the probe of the same round, as a run would foretell it at its start. All settings take some twenty
minutes on two cores that nothing else uses. Rows of a cut run lie beside the results; ``--goes_on true`` keeps them.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpczero.errors import ConfigError, run
from hpczero.options.reading import parse_command_line
from scaling.contenders.scratch import scratch
from scaling.evidence.record import (
    Row,
    circumstances,
    commit,
    names_code,
    parse_rows,
    path_of,
    unfinished,
)

if TYPE_CHECKING:
    from hpczero.job.topology import Topology
    from hpczero.plan.peak import PlannedRun
    from hpczero.planner.choice import Choice, Foretold
    from scaling.planner.settings import Setting


@dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
        folder: on the disk; left out, runs/scratch.
        rounds: measured turns of each candidate.
        steps: of a turn, beside one that does not count.
        candidates: settings that are trained for each of what is planned: the choice, its runner-up, others of distinct
            kinds, and one by chance.
        only: numbers of what is planned, from 0; left out, all.
        seed: of the order in the rounds, and of the other candidates.
        goes_on: keep the settings that a cut run of this commit has measured whole.
        results: folder of all machines' results; left out, scaling/results.
    """

    folder: str | None = None
    rounds: int = 3
    steps: int = 2
    candidates: int = 6
    only: tuple[int, ...] = ()
    seed: int = 0
    goes_on: bool = False
    results: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("rounds", 1), ("steps", 1), ("candidates", 2)):
            if getattr(self, name) < least:
                raise ConfigError(f"--{name}: got {getattr(self, name)}, expected at least {least}")
        if self.folder is not None and not Path(self.folder).is_dir():
            raise ConfigError(f"--folder: got {self.folder!r}, expected a folder on a disk")


def main() -> int:
    """Measure; rank 0 writes the rows, prints the table, draws the plot. Collective over MPI's world."""
    options = parse_command_line(
        Options,
        sys.argv[1:],
        prog="python -m scaling.planner",
        description="The planner's choice beside other settings that fit, trained in turns; start it under mpirun.",
        default=Options(),
    )
    # Here and not at the top: this import starts MPI, which --help and bad options must not do.
    from hpczero.job.launch import start_topology
    from scaling.evidence.clock import record
    from scaling.planner.report import draw, text

    topology = start_topology(None)
    name = f"planner-{topology.size}"
    earlier: list[Row] = []
    if options.goes_on:  # read before the recorder begins the file anew
        found = earlier_turns(path_of(name, options.results)) if topology.is_root else []
        earlier = json.loads(topology.world.gather_text(json.dumps(found))[0])
    rows = measure(topology, options, earlier)
    record(topology, rows, name, results=options.results, text=text, draw=draw)
    topology.free()
    return 0


def earlier_turns(path: Path) -> list[Row]:
    """Turns of the settings that a cut run of this commit has measured whole; none if there was no such run."""
    cut = unfinished(path)
    if not cut.exists():
        return []
    rows, _ = parse_rows(cut)
    heads = [row for row in rows if row["kind"] == "run"]
    if not heads or heads[0]["commit"] != commit() or not names_code(commit()):
        return []
    whole = {row["setting"] for row in rows if row["kind"] == "done"}
    return [row for row in rows if row.get("setting") in whole]


def measure(topology: Topology, options: Options, earlier: Sequence[Row] = ()) -> Iterator[Row]:
    """All rows, the same on every rank. Collective.

    Args:
        topology: the ranks.
        options: what to measure.
        earlier: rows of settings that need not be measured again.
    """
    import torch

    from scaling.planner.settings import SETTINGS

    torch.set_num_threads(1)
    yield {
        "kind": "run",
        **circumstances(),
        "ranks": topology.size,
        "rounds": options.rounds,
        "steps": options.steps,
    }
    folder = scratch() if options.folder is None else Path(options.folder)
    order = random.Random(options.seed)
    chosen = options.only or range(len(SETTINGS))
    yield from (dict(row) for row in earlier)
    done = {row["setting"] for row in earlier}
    for number in chosen:
        setting = SETTINGS[number]
        if setting.name in done:
            continue
        yield from _one(topology, setting, folder, options, order)
        yield {"kind": "done", "setting": setting.name}
        if topology.is_root:
            sys.stderr.write(f"planner: {setting.name} done\n")


def _one(
    topology: Topology, setting: Setting, folder: Path, options: Options, order: random.Random
) -> Iterator[Row]:
    from scaling.evidence.clock import seconds
    from scaling.planner.picking import key, picked
    from scaling.planner.settings import Training

    asked = setting.asked(topology, folder)
    runs: list[PlannedRun] = []
    for turn in range(options.rounds):
        choice = _choice(topology, setting, asked, folder)
        assert choice.best is not None, "every setting has candidates that fit"
        foretold = {key(found.run): found for found in choice.fitting}
        if not runs:
            runs = picked(choice, options.candidates, order)
        second = key(choice.runner_up.run) if choice.runner_up else ""
        now = [*runs]
        if key(choice.best.run) not in map(key, now):
            now.append(choice.best.run)
        for candidate in order.sample(now, len(now)):
            training = Training(topology, setting, candidate)
            training.steps(1)
            took = seconds(topology, lambda training=training: training.steps(options.steps))  # type: ignore[misc]
            training.close()
            name = key(candidate)
            yield {
                "kind": "turn",
                "setting": setting.name,
                "round": turn,
                "candidate": name,
                "is_choice": name == key(choice.best.run),
                "is_runner_up": name == second,
                "foretold_s": foretold[name].step_s,
                "parts": parts_of(foretold[name]),
                "seconds": took / options.steps,
                "fitting": len(choice.fitting),
                "tried": choice.tried,
            }


def parts_of(found: Foretold) -> dict[str, float]:
    """Foretold seconds of the parts of a step."""
    step = found.step
    return {
        "forward": step.forward_s,
        "backward": step.backward_s,
        "communication": step.communication_s,
        "update": step.update_s,
        "tier": step.tier_s,
    }


def _choice(topology: Topology, setting: Setting, asked: PlannedRun, folder: Path) -> Choice:
    """By a probe of now; the same on every rank. Collective."""
    import torch

    from hpczero.accelerator import HostAccelerator
    from hpczero.planner.choice import Freedom, candidates
    from hpczero.planner.search import foretell_on, search
    from hpczero.predict.machine import machine_of
    from hpczero.probe.job import probe_job

    measured, troubles = probe_job(topology, HostAccelerator(), dtype=torch.float32, folder=folder)
    if troubles:
        raise ConfigError("; ".join(troubles))
    machine = machine_of(
        measured, ranks_per_node=topology.local_size, memory_nbytes=1.0, title="this machine"
    )
    freedom = Freedom(media=["disk"], rests=["disk"], folder=str(folder))
    limit = setting.limit(asked, candidates(asked, freedom))
    return search(
        asked,
        freedom,
        foretell_on(machine, measured),
        fits=lambda run: run.most <= limit,
    )


if __name__ == "__main__":
    run(main)
