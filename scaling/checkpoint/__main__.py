"""Saving and loading the same training state by hpczero, by torch.distributed.checkpoint and as raw bytes, in one run.

    python -m scaling.checkpoint --workload gpt-8x512

Two crews are resident, hpczero stage 3 over MPI and FSDP2 over gloo; in each round every way saves once and loads once,
in an order drawn anew, on the same disk. Loads are cold: the kernel has been told to drop the file. What the disk or
its host keep is not known. Ratios are formed within a round; the slowest rank counts.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Literal

from hpczero.errors import HpcZeroError, run
from hpczero.files.direct import filesystem_of
from hpczero.models.config import parameter_count
from scaling.contenders import find_entry
from scaling.contenders.ranks import Crew, end_on_sigterm
from scaling.contenders.workload import WORKLOADS, Workload
from scaling.evidence.harness import Common, Report, at_least, in_turns, options_of, record, say
from scaling.evidence.plot import Bar, Panels, as_bars
from scaling.evidence.record import ROOT, Row, head_of, of_kind, run_row
from scaling.evidence.spread import Spread, by_round, paired, table, table_of, with_spread

BYTES_PER_PARAMETER = 12  # fp32 master and both moments of Adam
OWN, PEER = "hpczero-3", "fsdp2"
TITLES = {
    "raw": "raw bytes",
    "posix": "hpczero, posix",
    "mpio": "hpczero, mpio",
    "dcp": "torch DCP, FSDP2",
}
PROGRAM = "scaling.checkpoint.ways"
OWN_WAYS = ("posix", "mpio")
SHARE_OF_RAW = 0.8
SPARE_NBYTES = 512 * 2**20


@dataclass(frozen=True)
class Options(Common):
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
    """

    workload: Literal["gpt-8x512", "gpt-12x768", "tiny"] = "gpt-8x512"
    ranks: int = 2
    rounds: int = 9
    rest_s: float = 0.0
    warm_up: int = 2
    steps: int = 3
    folder: str | None = None

    def __post_init__(self) -> None:
        at_least(self, ranks=1, rounds=1, warm_up=0, steps=1)

    @property
    def what(self) -> Workload:
        """The workload that is meant."""
        return WORKLOADS[self.workload]


def main() -> int:
    """Measure, write the rows, print the table, draw the plot."""
    options = options_of(Options, "checkpoint")
    end_on_sigterm()
    record(f"checkpoint-{options.what.name}", options.results, measure(options), REPORT)
    return 0


def measure(options: Options) -> Iterator[Row]:
    """The whole run: that every way brings back what it saved, its memory, then the rounds."""
    with contextlib.ExitStack() as stack:
        disk = Disk(stack, options)
        entries = [find_entry(name, transport="auto") for name in (OWN, PEER)]
        own, peer = (
            stack.enter_context(Crew(e, options.what, size=options.ranks, program=PROGRAM))
            for e in entries
        )
        settings = {crew.entry.name: crew.ask("build")[0]["settings"] for crew in (own, peer)}
        said = own.ask("describe")[0]
        state_nbytes = BYTES_PER_PARAMETER * parameter_count(options.what.model)
        yield run_row(
            options,
            "ranks rounds warm_up rest_s seed",
            workload=options.what.name,
            description=options.what.describe(),
            filesystem=disk.filesystem,
            state_nbytes=state_nbytes,
            shard_nbytes=-(-state_nbytes // options.ranks),
            settings=settings,
            **said,
        )
        crews = {"raw": own, "posix": own, "mpio": own, "dcp": peer}
        if not said["mpio"]:
            say("checkpoint", "without the mpio writer: h5py was built without MPI")
            del crews["mpio"]
        for crew in (own, peer):
            crew.ask("turn", steps=2)
        for way, crew in crews.items():
            if way != "raw":
                check(crew, way, disk)
                save, load = moved(crew, way, disk, metered=1)
                extra = {"save_extra_nbytes": save, "load_extra_nbytes": load}
                yield {"kind": "memory", "way": way, **extra}
        tasks = [*crews, "background"] if said["background"] else list(crews)
        order, warm_up = random.Random(options.seed), options.warm_up
        rounds = in_turns(tasks, options.rounds, order, warm_up=warm_up, program="checkpoint")
        for number, turn in rounds:
            for task in turn:
                time.sleep(options.rest_s)
                if task == "background":
                    row = hold(own, disk, options)
                else:
                    save, load = moved(crews[task], task, disk, rest_s=options.rest_s)
                    row = {"kind": "move", "way": task, "save_s": save, "load_s": load}
                if number >= 0:
                    yield {**row, "round": number}


class Disk:
    """Where the files go; nothing of them stays.

    Attributes:
        filesystem: its type, such as ``ext4``.
        steps: numbers for saves.
    """

    def __init__(self, stack: contextlib.ExitStack, options: Options) -> None:
        parent = ROOT / (options.folder or "runs")
        parent.mkdir(parents=True, exist_ok=True)
        made = tempfile.TemporaryDirectory(prefix="checkpoint-speed-", dir=parent)
        self._path = Path(stack.enter_context(made))
        self.filesystem = filesystem_of(self._path) or "unknown"
        self.steps = itertools.count(1)

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


def moved(
    crew: Crew, way: str, disk: Disk, *, rest_s: float = 0.0, metered: int = 0
) -> tuple[list[float], list[float]]:
    """One save and, after a rest, one load: seconds of each rank; with ``metered`` bytes of memory that it takes."""
    with disk.folder(way) as folder:
        saved = crew.ask("save", way=way, folder=folder, step=next(disk.steps), metered=metered)
        time.sleep(rest_s)
        loaded = crew.ask("load", way=way, folder=folder, metered=metered)
    return [answer["found"] for answer in saved], [answer["found"] for answer in loaded]


def hold(crew: Crew, disk: Disk, options: Options) -> Row:
    """One save in the background, and the steps before it and beside it."""
    folder = disk.kept("background")
    answers = crew.ask("hold", folder=folder, step=next(disk.steps), steps=options.steps)
    return {"kind": "hold", **{name: [a[name] for a in answers] for name in answers[0]}}


def check(crew: Crew, way: str, disk: Disk) -> None:
    """A save, a step of training and a load must end where they began.

    Raises:
        HpcZeroError: the state is another one.
    """
    with disk.folder(way) as folder:
        before = crew.ask("digest")
        crew.ask("save", way=way, folder=folder, step=next(disk.steps))
        crew.ask("turn", steps=1)
        between = crew.ask("digest")
        crew.ask("load", way=way, folder=folder)
        after = crew.ask("digest")
    if after != before or between == before:
        raise HpcZeroError(
            f"{way}: the state after a load is not the one that was saved, so its times cannot be compared"
        )


def seconds(rows: list[Row], what: str) -> dict[str, dict[int, float]]:
    """By way and round, of the slowest rank; ``what`` is ``save`` or ``load``."""
    found = by_round(rows, "move", itemgetter("way"), lambda row: max(row[f"{what}_s"]))
    return {way: found[way] for way in TITLES if way in found}


def text(rows: list[Row]) -> str:
    """Heading, tables and goals; markdown."""
    parts = [_heading(head_of(rows)), "", _speeds(rows, "save"), _speeds(rows, "load")]
    parts += [_background(rows), _memory(rows), "Goals, by the median:", ""]
    return "\n".join([*parts, *(f"- {line}" for line in goals(rows))])


def _heading(head: Row) -> str:
    mpi_io = f", OMPI_MCA_io={head['mpi_io']}" if head["mpi_io"] else ""
    return (
        f"Checkpoints of {head['description']}: {head['state_nbytes'] / 1e6:,.0f} MB of fp32 weights and moments of "
        f"Adam, {head['ranks']} ranks, {head['cores']} cores of {head['cpu']}, {head['filesystem']}; hpczero stage 3, "
        f"HDF5 {head['hdf5']}{mpi_io}; torch {head['versions'].get('torch', '?')}. Every way ends with fsync (DCP's "
        "default, sync_files=True); loads are cold for the kernel of this machine. Median of "
        f"{head['rounds']} rounds, each way once in each, in an order drawn anew. Commit {head['commit']}, "
        f"{head['date']}."
    )


def _speeds(rows: list[Row], what: str) -> str:
    """Table of one direction; the last two columns say how many times as fast as raw bytes and as DCP."""
    found, nbytes = seconds(rows, what), head_of(rows)["state_nbytes"]

    def faster(way: str, other: str) -> str:
        return "1" if way == other else with_spread(paired(found.get(other), found[way]), 2)

    return table_of(
        found,
        {
            what: lambda way: TITLES[way],
            "ms": lambda way: with_spread(Spread.of(found[way].values()), 0, scale=1e3),
            "MB/s": lambda way: with_spread(_rate(nbytes, found[way]), 0),
            "x raw": lambda way: faster(way, "raw"),
            "x DCP": lambda way: faster(way, "dcp"),
        },
    )


def _rate(nbytes: int, took: dict[int, float]) -> Spread:
    """MB per second."""
    return Spread.of(nbytes / seconds / 1e6 for seconds in took.values())


def holds(rows: list[Row]) -> dict[str, dict[int, float]]:
    """Seconds by what took them and round; ``cost`` is the hold and what the steps beside the write take more."""
    found: dict[str, dict[int, float]] = {}
    for row in of_kind(rows, "hold"):
        quiet = fmean(_slowest(row["quiet_s"]))
        busy = _slowest(row["busy_s"])
        values = {
            "copy": max(row["copy_s"]),
            "hold": max(row["hold_s"]),
            "quiet": quiet,
            "busy": fmean(busy),
            "write": max(row["write_s"]),
            "cost": max(row["hold_s"]) + sum(busy) - quiet * len(busy),
        }
        for name, value in values.items():
            found.setdefault(name, {})[row["round"]] = value
    return found


def _background(rows: list[Row]) -> str:
    found = holds(rows)
    if not found:
        return "Saves in the background: not measured, this MPI lets one thread call it.\n"
    lines = {
        "copy": "plain copy of the shards",
        "hold": "save() holds the training",
        "quiet": "step without a write",
        "busy": "step beside a write",
        "write": "until the checkpoint is complete",
        "cost": "a save costs the training",
    }
    cells = [
        [said, with_spread(Spread.of(found[name].values()), 0, scale=1e3)]
        for name, said in lines.items()
    ]
    cells.append(["hold / copy", with_spread(paired(found["hold"], found["copy"]), 2)])
    cells.append(["step beside / without", with_spread(paired(found["busy"], found["quiet"]), 2)])
    return table(["in the background", "ms or ratio"], cells)


def _memory(rows: list[Row]) -> str:
    """Table of the memory beside the state itself."""
    shard, limit = _memory_nbytes(rows)
    title = f"extra MiB (shard {shard / 2**20:.0f}, limit {limit / 2**20:.0f})"
    return table_of(
        of_kind(rows, "memory"),
        {
            title: lambda row: TITLES[row["way"]],
            "save": lambda row: f"{max(row['save_extra_nbytes']) / 2**20:.0f}",
            "load": lambda row: f"{max(row['load_extra_nbytes']) / 2**20:.0f}",
        },
    )


def _memory_nbytes(rows: list[Row]) -> tuple[int, int]:
    """(bytes of a shard, the most that a rank should take beside its state)."""
    shard = head_of(rows)["shard_nbytes"]
    return shard, shard + SPARE_NBYTES


def goals(rows: list[Row]) -> list[str]:
    """One line for each: what is asked for, what was found, whether it is met."""
    found = {what: seconds(rows, what) for what in ("save", "load")}
    _, limit = _memory_nbytes(rows)
    lines: list[tuple[str, bool]] = []
    for way in OWN_WAYS:
        asked = [("save", "raw", SHARE_OF_RAW), ("save", "dcp", 1.0), ("load", "dcp", 1.0)]
        for what, other, least in asked:
            spread = paired(found[what].get(other), found[what].get(way))
            if spread is not None:
                ratio = f"{with_spread(spread, 2)} x {TITLES[other]}, at least {least:g}"
                lines.append((f"{what} by {TITLES[way]}: {ratio}", spread.median >= least))
        for row in of_kind(rows, "memory"):
            if row["way"] == way:
                most = max(row["save_extra_nbytes"] + row["load_extra_nbytes"])
                said = f"{most / 2**20:.0f} MiB, at most {limit / 2**20:.0f}"
                lines.append((f"extra memory of {TITLES[way]}: {said}", most <= limit))
    held = holds(rows)
    spread = paired(held.get("hold"), held.get("copy"))
    if spread is not None:
        said = f"hold of a save in the background: {with_spread(spread, 2)} x a copy, at most 1"
        lines.append((said, spread.median <= 1.0))
    return [f"{said}: {'met' if met else 'missed'}" for said, met in lines]


@as_bars
def draw(rows: list[Row]) -> tuple[str, Panels]:
    """Rates as bars."""
    head = head_of(rows)
    panels = {
        f"{what}, MB/s": [
            Bar.of(TITLES[way], _rate(head["state_nbytes"], took))
            for way, took in seconds(rows, what).items()
        ]
        for what in ("save", "load")
    }
    return f"{head['description']}, {head['ranks']} ranks", panels


def _slowest(ranks: Sequence[Sequence[float]]) -> list[float]:
    """Of each step, over ranks."""
    return [max(step) for step in zip(*ranks, strict=True)]


REPORT = Report("Saving and loading checkpoints", text, draw)

if __name__ == "__main__":
    run(main)
