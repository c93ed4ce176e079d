"""Saving and loading the same training state by hpczero, by torch.distributed.checkpoint and as raw bytes, in one run.

    python -m scaling.checkpoint --workload gpt-8x512

Owns: the order of a run. Must not know: any framework, the arithmetic of the report. Two crews are resident, hpczero
stage 3 over MPI and FSDP2 over gloo; in each round every way saves once and loads once, in an order drawn anew, on the
same disk. Loads are cold: the kernel has been told to drop the file. What the disk or its host keep is not known.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpczero.errors import ConfigError, HpcZeroError, run
from hpczero.files.direct import filesystem_of
from hpczero.models.config import parameter_count
from hpczero.options.reading import parse_command_line
from scaling.checkpoint.report import draw, text
from scaling.contenders import find_entry
from scaling.contenders.ranks import Crew
from scaling.contenders.workload import WORKLOADS, Workload
from scaling.evidence.record import HOME, Recorder, Row, circumstances, machine_name

BYTES_PER_PARAMETER = 12  # fp32 master and both moments of Adam
OWN, PEER = "hpczero-3", "fsdp2"


@dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
        workload: model; its batch matters for the steps beside a save in the background alone.
        ranks: of each crew, one thread each, bound to no core.
        rounds: measured saves and loads of each way; from 6 on there is a 95 % interval of the median.
        warm_up: rounds before.
        rest_s: seconds of nothing before each save and each load; disks of rented machines are fast only after some,
            and still write on their side when a save is done.
        steps: of training before each save in the background.
        folder: where the files go for a while; left out, runs.
        seed: of the order in the rounds.
        results: folder of all machines' results; left out, scaling/results.
    """

    workload: Literal["gpt-8x512", "gpt-12x768", "tiny"] = "gpt-8x512"
    ranks: int = 2
    rounds: int = 9
    rest_s: float = 0.0
    warm_up: int = 2
    steps: int = 3
    folder: str | None = None
    seed: int = 0
    results: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("ranks", 1), ("rounds", 1), ("warm_up", 0), ("steps", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"--{name}: got {getattr(self, name)}, expected at least {least}")

    @property
    def what(self) -> Workload:
        """The workload that is meant."""
        return WORKLOADS[self.workload]


def main() -> int:
    """Measure, write the rows, print the table, draw the plot."""
    options = parse_command_line(
        Options,
        sys.argv[1:],
        prog="python -m scaling.checkpoint",
        description="Speed and memory of saving and loading, by hpczero, torch and as raw bytes, in one run. It starts "
        "its ranks itself.",
        default=Options(),
    )
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # through the crews' ends
    folder = HOME / (options.results or "scaling/results") / machine_name()
    path = folder / f"checkpoint-{options.what.name}.jsonl"
    with Recorder(path) as recorder:
        for row in measure(options):
            recorder.write(row.pop("kind"), row)
    sys.stdout.write(f"\n{text(recorder.rows)}\n")
    draw(recorder.rows, path.with_suffix(".png"))
    say(f"rows in {path}, plot beside them")
    return 0


def measure(options: Options) -> Iterator[Row]:
    """The whole run: that every way brings back what it saved, its memory, then the rounds."""
    with contextlib.ExitStack() as stack:
        disk = Disk(stack, options)
        own, peer = (
            stack.enter_context(
                Crew(
                    find_entry(name, transport="auto"),
                    options.what,
                    size=options.ranks,
                    program="scaling.checkpoint.ways",
                )
            )
            for name in (OWN, PEER)
        )
        settings = {crew.entry.name: crew.ask("build")[0]["settings"] for crew in (own, peer)}
        said = own.ask("describe")[0]
        state_nbytes = BYTES_PER_PARAMETER * parameter_count(options.what.model)
        yield {
            "kind": "run",
            **circumstances(),
            "ranks": options.ranks,
            "rounds": options.rounds,
            "warm_up": options.warm_up,
            "rest_s": options.rest_s,
            "seed": options.seed,
            "workload": options.what.name,
            "description": options.what.describe(),
            "filesystem": disk.filesystem,
            "state_nbytes": state_nbytes,
            "shard_nbytes": -(-state_nbytes // options.ranks),
            "settings": settings,
            **said,
        }
        crews = {"raw": own, "posix": own, "mpio": own, "dcp": peer}
        if not said["mpio"]:
            say("without the mpio writer: h5py was built without MPI")
            del crews["mpio"]
        for crew in (own, peer):
            crew.ask("turn", steps=2)
        for way, crew in crews.items():
            if way != "raw":
                check(crew, way, disk)
                yield memory(crew, way, disk)
        order = random.Random(options.seed)
        for number in range(-options.warm_up, options.rounds):
            tasks = [*crews, "background"] if said["background"] else list(crews)
            for task in order.sample(tasks, len(tasks)):
                time.sleep(options.rest_s)
                row = (
                    hold(own, disk, options)
                    if task == "background"
                    else move(task, crews, disk, options.rest_s)
                )
                if number >= 0:
                    yield {**row, "round": number}
            if number >= 0:
                say(f"round {number + 1} of {options.rounds} done")


class Disk:
    """Where the files go; nothing of them stays."""

    def __init__(self, stack: contextlib.ExitStack, options: Options) -> None:
        parent = HOME / (options.folder or "runs")
        parent.mkdir(parents=True, exist_ok=True)
        made = tempfile.TemporaryDirectory(prefix="checkpoint-speed-", dir=parent)
        self._path = Path(stack.enter_context(made))
        self._step = 0

    @property
    def filesystem(self) -> str:
        """Its type, such as ``ext4``."""
        return filesystem_of(self._path) or "unknown"

    def next_step(self) -> int:
        """A number for the next save."""
        self._step += 1
        return self._step

    @contextlib.contextmanager
    def folder(self, name: str) -> Iterator[str]:
        """An empty folder, on a disk that has nothing to write; gone afterwards."""
        path = self._path / name
        path.mkdir()
        os.sync()
        try:
            yield str(path)
        finally:
            shutil.rmtree(path)

    def kept(self, name: str) -> str:
        """A folder that stays for the run, without its checkpoints, on a disk that has nothing to write."""
        path = self._path / name
        path.mkdir(exist_ok=True)
        for checkpoint in path.glob("step-*"):
            shutil.rmtree(checkpoint)
        os.sync()
        return str(path)


def move(way: str, crews: dict[str, Crew], disk: Disk, rest_s: float) -> Row:
    """One save and, after a rest, one load."""
    crew = crews[way]
    with disk.folder(way) as folder:
        saved = crew.ask("save", way=way, folder=folder, step=disk.next_step())
        time.sleep(rest_s)
        loaded = crew.ask("load", way=way, folder=folder)
    return {
        "kind": "move",
        "way": way,
        "save_s": [answer["seconds"] for answer in saved],
        "load_s": [answer["seconds"] for answer in loaded],
    }


def hold(crew: Crew, disk: Disk, options: Options) -> Row:
    """One save in the background, and the steps before it and beside it."""
    folder = disk.kept("background")
    answers = crew.ask("hold", folder=folder, step=disk.next_step(), steps=options.steps)
    return {"kind": "hold", **{name: [a[name] for a in answers] for name in answers[0]}}


def memory(crew: Crew, way: str, disk: Disk) -> Row:
    """How much more memory each rank has at most during one save and one load; nothing is timed."""
    with disk.folder(way) as folder:
        saved = crew.ask("save_memory", way=way, folder=folder, step=disk.next_step())
        loaded = crew.ask("load_memory", way=way, folder=folder)
    return {
        "kind": "memory",
        "way": way,
        "save_extra_nbytes": [answer["extra_nbytes"] for answer in saved],
        "load_extra_nbytes": [answer["extra_nbytes"] for answer in loaded],
    }


def check(crew: Crew, way: str, disk: Disk) -> None:
    """A save, a step of training and a load must end where they began.

    Raises:
        HpcZeroError: the state is another one.
    """
    with disk.folder(way) as folder:
        before = crew.ask("digest")
        crew.ask("save", way=way, folder=folder, step=disk.next_step())
        crew.ask("turn", steps=1)
        between = crew.ask("digest")
        crew.ask("load", way=way, folder=folder)
        after = crew.ask("digest")
    if after != before or between == before:
        raise HpcZeroError(
            f"{way}: the state after a load is not the one that was saved, so its times cannot be compared"
        )


def say(line: str) -> None:
    """Progress, on stderr, so that stdout is the table alone."""
    sys.stderr.write(f"checkpoint: {line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    run(main)
