"""A scaling study, weak or strong, or a study of layouts: all its points, each measured in a job of its own.

    python -m scaling.sweep strong --ranks 1 2 --stages 0 3 --models gpt-8x512 --batches 8
    python -m scaling.sweep layouts --ranks 4 --models tiny --layouts plain tensor=2 pipeline=2,shard=node --batches 16
    python -m scaling.sweep weak --by sbatch --ranks 8 16 32 --ranks_per_node 8 -- --partition=gpu --time=30:00

The rows of all points are collected into one file, which ``python -m scaling.report`` reads.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from hpczero.errors import ConfigError, HpcZeroError, run
from hpczero.options.reading import parse_command_line
from hpczero.options.values import Transport
from scaling.evidence.harness import at_least, say
from scaling.evidence.record import Recorder, circumstances, commit, cores, names_code
from scaling.sweep import jobs
from scaling.sweep.study import DEFAULT_STEPS, PROGRAM, Grid, Point, parse_layout


@dataclass(frozen=True)
class Options:
    """What to measure, and how jobs are started.

    Attributes:
        kind: strong: fixed model and global batch; weak: fixed batch per rank; layouts: fixed model, global batch and
            number of ranks.
        ranks: numbers of ranks; the smallest is the base of all ratios.
        ranks_per_node: most ranks of one node; several give a curve for each. Left out, one node. Without sbatch more
            nodes than one are emulated.
        models: workloads such as gpt-8x512 and tiny, or presets such as gpt2-xl.
        grow: weak only: the n-th model runs on the n-th number of ranks.
        stages: ZeRO stages.
        batches: sequences of one rank (weak) or of all ranks (strong). Left out: 4; strong: what all numbers of ranks
            divide, at least two for each rank.
        micro_batch: most sequences of one forward; left out, all that a rank has, or 8 at most where --batches is left
            out too; under a pipeline so few that each stage has two micro-batches or more.
        layouts: of a study of them, the first is what others are compared with; each is plain, or options of
            [parallel] such as tensor=2,sequence=true.
        precision: of parameters and activations.
        transport: how ranks exchange; see hpczero.train.
        device: where ranks compute; auto: on GPUs where torch sees one.
        steps: measured ones of each point; fewer than 30 are no study, and the report says so.
        warm_up: steps before.
        checkpoint_every: steps between checkpoints during the measured steps; 0: none.
        threads: of each rank; every point must have as many, or ranks are not compared with ranks. Left out: locally
            the cores over the most ranks of this study, by sbatch the cores that SLURM gives a task.
        jobs: how often each point is measured, each time in a job of its own; three or more tell what one allocation
            hides.
        by: local: on this machine, one after the other; sbatch: by slurm/point.sh, with a last job that collects; what
            follows a bare -- are options of sbatch, such as a partition and a time.
        in_turn: a bare --in_turn: each SLURM job waits for the one before.
        folder: of the study.
        any_commit: a bare --any_commit: points measured with another commit count as done, the newest of each.
        collect: a bare --collect: measure nothing, only collect what is done of what was asked for last.
        limit_s: longest time of one local job.
    """

    kind: tyro.conf.Positional[Literal["weak", "strong", "layouts"]]
    ranks: tuple[int, ...] = (1, 2)
    ranks_per_node: tuple[int, ...] | None = None
    models: tuple[str, ...] = ("gpt-8x512",)
    grow: tyro.conf.UseCounterAction[int] = 0
    stages: tuple[Literal[0, 1, 2, 3], ...] = (3,)
    batches: tuple[int, ...] | None = None
    micro_batch: int | None = None
    layouts: tuple[str, ...] = ()
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    transport: Transport = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    steps: int = DEFAULT_STEPS
    warm_up: int = 5
    checkpoint_every: int = 0
    threads: int | None = None
    jobs: int = 1
    by: Literal["local", "sbatch"] = "local"
    in_turn: tyro.conf.UseCounterAction[int] = 0
    folder: str = "runs/sweep"
    any_commit: tyro.conf.UseCounterAction[int] = 0
    collect: tyro.conf.UseCounterAction[int] = 0
    limit_s: float = 3600.0

    def __post_init__(self) -> None:
        at_least(self, ranks=1, batches=1, ranks_per_node=1, steps=1, warm_up=1, threads=1, jobs=1)
        at_least(self, micro_batch=1, checkpoint_every=0)
        if not self.models or not self.stages:
            raise ConfigError("--models and --stages: got nothing, expected at least one of each")
        if self.grow and self.kind != "weak":
            raise ConfigError(
                f"--grow: a study of kind {self.kind} keeps the model; it goes with weak only"
            )
        if (self.kind == "layouts") != bool(self.layouts):
            raise ConfigError(
                f"--layouts: got {' '.join(self.layouts) or 'nothing'} for the study {self.kind}; expected layouts for "
                "layouts, and none for another study"
            )

    @property
    def grid(self) -> Grid:
        """What is varied."""
        names = ("kind", "models", "stages", "ranks", "batches", "ranks_per_node", "jobs")
        alike = {name: getattr(self, name) for name in (*names, "micro_batch")}
        layouts = [parse_layout(text) for text in self.layouts or ("plain",)]
        return Grid(grow=bool(self.grow), layouts=layouts, **alike)

    @property
    def threads_per_rank(self) -> int:
        """Of every point; 0: SLURM knows."""
        if self.threads is not None or self.by == "sbatch":
            return self.threads or 0
        # local nodes are all this machine
        return max(cores() // max(self.ranks), 1)

    @property
    def points(self) -> list[Point]:
        """All of the study."""
        names = ("precision", "transport", "device", "steps", "warm_up", "checkpoint_every")
        settings = {name: getattr(self, name) for name in names}
        return self.grid.points(threads=self.threads_per_rank, **settings)


def main() -> int:
    """Measure what is not done yet, or submit it; then collect."""
    words = sys.argv[1:]
    place = words.index("--") if "--" in words else len(words)
    words, for_sbatch = words[:place], words[place + 1 :]
    options = parse_command_line(
        Options,
        words,
        prog=PROGRAM,
        description="All points of a scaling study, each in a job of its own; done ones are skipped.",
        default=Options(kind=tyro.MISSING),
    )
    if for_sbatch and options.by != "sbatch":
        raise ConfigError(f"got {shlex.join(for_sbatch)} after --, which only --by sbatch takes")
    # Where the user is, which is not where a job starts.
    path = Path(options.folder).expanduser().absolute()
    if options.collect:
        return collect(jobs.StudyFolder(path, options.kind))
    points, now = options.points, commit()
    known = jobs.slurm_setting(for_sbatch) if options.by == "sbatch" else jobs.local_setting()
    folder = jobs.StudyFolder(path, options.kind, now, known)
    any_commit = bool(options.any_commit)
    # Code without a name: what was measured with it may have been measured with other code.
    reusable = any_commit or names_code(now)
    left = [
        point
        for point in points
        if not reusable or folder.finished(point, any_commit=any_commit)[0] is None
    ]
    asked = {  # the first row of the records
        "study": options.kind,
        "grow": bool(options.grow),
        "definition": options.grid.definition,
        "steps": options.steps,
        "warm_up": options.warm_up,
        "ranks_per_node": options.ranks_per_node,
        "asked_at": now,
        "setting": known,
        "any_commit": any_commit,
    }
    folder.write_plan(asked, points)
    say("sweep", f"{len(points)} points, {len(points) - len(left)} done already, commit {now}")
    if options.by == "sbatch" and left:
        submit(options, folder, left, for_sbatch)
        return 0
    failed = measure(options, folder, left)
    code = collect(folder)
    return 1 if failed else code


def measure(options: Options, folder: jobs.StudyFolder, points: Sequence[Point]) -> int:
    """All ``points`` here, one after the other; returns how many failed. A failure does not keep the others."""
    failed = 0
    for point in points:  # what is found later is what is measured now
        folder.row(point).unlink(missing_ok=True)
    for number, point in enumerate(points, start=1):
        say("sweep", f"[{number}/{len(points)}] {point.describe()}")
        sizes = {"ranks": point.ranks, "nodes": point.nodes, "threads": point.threads}
        try:
            jobs.run_here(folder.arguments(point), options.limit_s, **sizes)
        except HpcZeroError as error:
            failed += 1
            say("sweep", f"failed: {point.describe()}: {error}")
    return failed


def submit(
    options: Options,
    folder: jobs.StudyFolder,
    points: Sequence[Point],
    for_sbatch: Sequence[str],
) -> None:
    """A job for each point that has none in the queue, and one after all of them that collects.

    Raises:
        HpcZeroError: sbatch refused, or squeue could not say what is queued; what was submitted before is collected.
    """
    launcher = jobs.Slurm(for_sbatch, folder.path / "logs", in_turn=bool(options.in_turn))
    known = [jobs.read_job(folder.job(point)) for point in points]
    collector = jobs.read_job(folder.collector)
    clusters = folder.setting.get("clusters", "")
    queued = launcher.queued([*filter(None, [*known, collector])], clusters)
    submitted = [number for number in known if number in queued]
    waiting, problem = len(submitted), None
    for point, number in zip(points, known, strict=True):
        if number in queued:
            say("sweep", f"in the queue already: {point.describe()} ({number})")
            continue
        folder.row(point).unlink(missing_ok=True)
        try:
            job = launcher.submit(
                folder.arguments(point),
                nodes=point.nodes,
                ranks_per_node=point.ranks_per_node,
                after=submitted[-1:] if launcher.in_turn else (),
                name=f"{options.kind}-{point.ranks}",
            )
        except HpcZeroError as error:
            problem = error
            break
        jobs.write_job(folder.job(point), job)
        submitted.append(job)
        say("sweep", f"job {job}: {point.describe()}")
    if len(submitted) > waiting or (submitted and collector not in queued):
        last = launcher.submit(
            ["-m", "scaling.sweep", options.kind, "--folder", str(folder.path), "--collect"],
            nodes=1,
            ranks_per_node=1,
            after=submitted,
            name=f"{options.kind}-collect",
        )
        jobs.write_job(folder.collector, last)
        say("sweep", f"job {last}: collects into {folder.rows}, when the others have ended")
    if problem is not None:
        say(
            "sweep",
            f"{len(submitted)} of {len(points)} points are in the queue; the same command submits the rest",
        )
        raise problem


def collect(folder: jobs.StudyFolder) -> int:
    """Write the rows of all finished points into one file; malformed ones are skipped and counted.

    Raises:
        ConfigError: no point is finished.
    """
    plan = folder.read_plan()
    points = [Point.of_json(values) for values in plan["points"]]
    found, malformed, stale = [], 0, 0
    for point in points:
        row, bad = folder.finished(point, any_commit=plan["any_commit"])
        malformed += bad
        if row is not None:
            found.append(row)
        elif not bad:
            stale += folder.row(point).is_file()
    left_out = f"malformed lines: {malformed}; points that ran with other code than {folder.commit}: {stale}"
    if not found:
        raise ConfigError(
            f"{folder.path}: none of the {len(points)} points of the {plan['study']} scaling study is finished "
            f"({left_out}); look at what the jobs said, then run the same command again"
        )
    head = {key: value for key, value in plan.items() if key != "points"}
    with Recorder(folder.rows) as recorder:
        asked = {"points_asked": len(points), "points_done": len(found), "malformed": malformed}
        recorder.write("run", {**circumstances(), **head, **asked})
        for row in found:
            recorder.write("point", {name: value for name, value in row.items() if name != "kind"})
    say("sweep", f"{len(found)} of {len(points)} points in {folder.rows}; left out: {left_out}")
    say("sweep", f"next: python -m scaling.report {folder.rows}")
    return 0


if __name__ == "__main__":
    run(main)
