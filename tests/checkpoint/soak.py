"""Kill jobs at random moments, again and again, and see that no committed checkpoint is lost and no broken one is used.

    python -m tests.checkpoint.soak --kills 200

Each job goes on where the one before was killed: at a milestone of a save, or at any time. After each one every
checkpoint is read in full; the newest must be at least as new as what was ever said to be committed, and the losses of
all jobs must be those of one run that nobody killed, bit for bit.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tyro

from hpczero.checkpoint.__main__ import Verdict, verify
from hpczero.checkpoint.disk.folder import Folder
from tests.helpers import killed

RANKS = 2
EVERY = 2  # steps between saves
MILESTONES = (
    "begun",
    "created",
    "wrote /state/master",
    "wrote /state/exp_avg_sq",
    "wrote /rng",
    "closed",
    "digested",
    "committed",
    "retained",
)


@dataclass(frozen=True)
class Options:
    """How much to kill.

    Attributes:
        kills: jobs that are killed.
        seed: of where and when.
        background: save in the background.
        at_milestones: share of the jobs that are killed at a milestone of a save.
        milestones: which, in turn.
    """

    kills: int = 200
    seed: int = 0
    background: bool = False
    at_milestones: float = 0.6
    milestones: tuple[str, ...] = MILESTONES


@dataclass(frozen=True)
class Job:
    """What a rank runs: train from the newest checkpoint on, and die at the ``when``-th ``milestone``.

    Attributes:
        until: the last step.
        milestone: of a save; ``never``: none.
        when: how often it is passed.
        victim: the rank that dies.
        every: steps between saves; 0: never.
        background: save in the background.
    """

    until: int
    milestone: str = "never"
    when: int = 1
    victim: int = 0
    every: int = EVERY
    background: bool = False


def rank_program(folder: Path, job: Job) -> None:
    import hpczero
    from tests.checkpoint.programs import Program

    topology = hpczero.Topology.of_world()
    program = Program(topology)
    seen = 0

    def at(name: str) -> None:
        nonlocal seen
        if name == "committed":
            note(folder, {"committed": program.step if not job.background else None})
        seen += name == job.milestone
        if seen == job.when and name == job.milestone and topology.rank == job.victim:
            os.kill(os.getpid(), signal.SIGKILL)

    writer = "posix" if job.background else "auto"
    options: dict[str, Any] = {"background": job.background, "writer": writer, "at": at}
    with program.checkpoints(folder / "ckpt", keep=3, **options) as checkpoints:
        found = checkpoints.load()
        if found is not None:
            program.take(found.extra)
            program.step = found.step
        if topology.is_root:
            note(folder, {"began": program.step, "pid": os.getpid()})
        while program.step < job.until:
            (loss,) = program.train(1)
            if topology.is_root:
                note(folder, {"step": program.step, "loss": loss.hex()})
            checkpoints.check()
            if job.every and program.step % job.every == 0:
                checkpoints.save(program.step, program.extra())
    program.close()
    topology.free()


def note(folder: Path, what: dict[str, object]) -> None:
    """One line that survives the process."""
    with (folder / "notes.jsonl").open("a") as file:
        file.write(json.dumps(what) + "\n")


def run_job(folder: Path, job: Job, *, kill_after_s: float = 0.0) -> int:
    """Its exit code. With ``kill_after_s`` rank 0 is killed so long after training has begun."""
    words = ["-m", "tests.checkpoint.soak", "rank", str(folder), json.dumps(asdict(job))]
    begun = len(notes(folder))
    with killed.Job.launch(folder / "log", words, ranks=RANKS) as launched:
        if kill_after_s:
            launched.wait_for_step(folder / "notes.jsonl", begun + 1)
            time.sleep(kill_after_s)
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(str(notes(folder)[begun]["pid"])), signal.SIGKILL)
        return launched.wait()


def notes(folder: Path) -> list[dict[str, object]]:
    """Whole lines only: the last job was killed."""
    path = folder / "notes.jsonl"
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}\n")]


def check(folder: Path) -> int:
    """Steps of the newest sound checkpoint; raises if one that counts is not sound, or one was lost."""
    candidates = Folder(folder / "ckpt").candidates()
    for path in candidates:
        report = verify(path)
        assert report.verdict is Verdict.SOUND, report.problems
    steps = [m.step for _, m in Folder(folder / "ckpt").valid()]
    newest = max(steps, default=0)
    said = [int(str(n["committed"])) for n in notes(folder) if n.get("committed")]
    assert newest >= max(said, default=0), f"{said} were committed, the newest sound one: {newest}"
    return newest


def check_losses(folder: Path, reference: Sequence[str]) -> None:
    """Every loss of every job is that of the run nobody killed, and every job began at what was newest then."""
    for entry in notes(folder):
        if "loss" in entry:
            step = int(str(entry["step"]))
            pair = entry["loss"], reference[step - 1]
            assert pair[0] == pair[1], f"step {step}: {pair}"


def reference_losses(folder: Path, steps: int) -> list[str]:
    """Of a run nobody kills, and which saves nothing."""
    folder.mkdir()
    code = run_job(folder, Job(steps, every=0))
    assert code == 0, (folder / "log").read_text()
    return [str(n["loss"]) for n in notes(folder) if "loss" in n]


def soak(options: Options, *, steps_per_kill: int = 30) -> str:
    """Kill and check; a line about how it went."""
    dice = random.Random(options.seed)
    at_milestones = by_time = 0
    with tempfile.TemporaryDirectory(prefix="hpczero-soak-") as name:
        folder = Path(name) / "run"
        folder.mkdir()
        reference: list[str] = []
        for number in range(options.kills):
            newest = check(folder)
            milestone, after, until = "never", 0.0, 10**6
            if dice.random() < options.at_milestones:
                milestone = options.milestones[number % len(options.milestones)]
                at_milestones, until = at_milestones + 1, newest + steps_per_kill
            else:
                after = dice.uniform(0.001, 0.6)
                by_time += 1
            on_any_rank = milestone.startswith("wrote") or milestone == "closed"
            victim = dice.randrange(RANKS) if on_any_rank else 0
            job = Job(until, milestone, dice.randint(1, 3), victim, background=options.background)
            code = run_job(folder, job, kill_after_s=after)
            assert code != 0, f"kill {number}: the job ended well"
            if check(folder) + 50 > len(reference):
                ahead = min(500, 70 + 8 * (options.kills - number))
                place = Path(name) / f"reference{number}"
                reference = reference_losses(place, check(folder) + ahead)
            check_losses(folder, reference)
            began = [int(str(n["began"])) for n in notes(folder) if "began" in n]
            assert not began or began[-1] >= newest, (began[-1], newest)
            if sys.stderr.isatty() or number % 20 == 0:
                sys.stderr.write(f"soak: {number + 1} killed, newest {check(folder)}\n")
        code = run_job(folder, Job(check(folder) + 4, background=options.background))
        assert code == 0, (folder / "log").read_text()
        check_losses(folder, reference)
        newest = check(folder)
        left = sorted(p.name for p in (folder / "ckpt").iterdir() if p.name.startswith(".tmp"))
    return (
        f"{options.kills} jobs killed, {at_milestones} at milestones of a save and {by_time} at any time; no "
        "committed checkpoint lost, none broken, all losses those of the run nobody killed; newest step "
        f"{newest}, left over: {left}"
    )


def main() -> None:
    if sys.argv[1:2] == ["rank"]:
        rank_program(Path(sys.argv[2]), Job(**json.loads(sys.argv[3])))
        return
    sys.stdout.write(soak(tyro.cli(Options)) + "\n")


if __name__ == "__main__":
    main()
