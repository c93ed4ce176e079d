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
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from hpczero.checkpoint.__main__ import Verdict, verify
from hpczero.checkpoint.disk.folder import Folder
from tests.helpers.forkserver import BASE
from tests.helpers.forkserver import server as forkserver
from tests.helpers.mpirun import ROOT
from tests.helpers.processes import end_family, launch_environment

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


def rank_program(
    folder: Path, until: int, every: int, milestone: str, when: int, victim: int, background: bool
) -> None:
    """What a rank runs: train from the newest checkpoint on, and die at the ``when``-th ``milestone``.

    It saves ``every`` steps, never with 0.
    """
    import hpczero
    from tests.checkpoint.programs import Program

    topology = hpczero.Topology.of_world()
    program = Program(topology)
    seen = 0

    def at(name: str) -> None:
        nonlocal seen
        if name == "committed":
            note(folder, {"committed": program.step if not background else None})
        seen += name == milestone
        if seen == when and name == milestone and topology.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    with program.checkpoints(
        folder / "ckpt",
        keep=3,
        background=background,
        writer="posix" if background else "auto",
        at=at,
    ) as checkpoints:
        found = checkpoints.load()
        if found is not None:
            program.scheduler.load_state_dict(found.extra["scheduler"])
            program.step = found.step
        if topology.is_root:
            note(folder, {"began": program.step, "pid": os.getpid()})
        while program.step < until:
            (loss,) = program.train(1)
            if topology.is_root:
                note(folder, {"step": program.step, "loss": loss.hex()})
            checkpoints.check()
            if every and program.step % every == 0:
                checkpoints.save(program.step, program.extra())
    program.close()
    topology.free()


def note(folder: Path, what: dict[str, object]) -> None:
    """One line that survives the process."""
    with (folder / "notes.jsonl").open("a") as file:
        file.write(json.dumps(what) + "\n")


def run_job(
    folder: Path,
    until: int,
    milestone: str,
    when: int,
    victim: int,
    *,
    every: int = EVERY,
    background: bool = False,
    kill_after_s: float = 0.0,
) -> int:
    """One job; its exit code. With ``kill_after_s`` rank 0 is killed so long after training has begun."""
    launch = os.fspath(ROOT / "install" / "launch.sh")
    arguments = [folder, until, every, milestone, when, victim, int(background)]
    command = [
        launch,
        str(RANKS),
        sys.executable,
        "-m",
        "tests.checkpoint.soak",
        "rank",
        *map(str, arguments),
    ]
    begun = len(notes(folder))
    environment = launch_environment(**BASE)
    with (folder / "stderr").open("w") as errors:
        process = subprocess.Popen(
            forkserver.forked(tuple(command), environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=environment,
            cwd=ROOT,
            start_new_session=True,
        )

    def kill() -> None:
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            pids = [int(str(n["pid"])) for n in notes(folder)[begun:] if "pid" in n]
            if pids:
                time.sleep(kill_after_s)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pids[0], signal.SIGKILL)
                return
            time.sleep(0.01)

    thread = threading.Thread(target=kill)
    if kill_after_s:
        thread.start()
    try:
        return process.wait(90)
    finally:
        end_family(process.pid)
        if kill_after_s:
            thread.join()


def notes(folder: Path) -> list[dict[str, object]]:
    """Whole lines only: the last job was killed."""
    path = folder / "notes.jsonl"
    if not path.exists():
        return []
    found = []
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n") and line.startswith("{") and line.rstrip().endswith("}"):
            found.append(json.loads(line))
    return found


def check(folder: Path) -> int:
    """Steps of the newest sound checkpoint; raises if one that counts is not sound, or one was lost."""
    candidates = Folder(folder / "ckpt").candidates()
    for path in candidates:
        report = verify(path)
        assert report.verdict is Verdict.SOUND, report.problems
    steps = [m.step for _, m in Folder(folder / "ckpt").valid()]
    newest = max(steps, default=0)
    committed = max(
        (int(str(n["committed"])) for n in notes(folder) if n.get("committed")), default=0
    )
    assert newest >= committed, (
        f"step {committed} was committed, and the newest sound one is {newest}"
    )
    return newest


def check_losses(folder: Path, reference: Sequence[str]) -> None:
    """Every loss of every job is that of the run nobody killed, and every job began at what was newest then."""
    for entry in notes(folder):
        if "loss" in entry:
            step = int(str(entry["step"]))
            assert entry["loss"] == reference[step - 1], (
                f"step {step}: {entry['loss']}, not {reference[step - 1]}"
            )


def reference_losses(folder: Path, steps: int) -> list[str]:
    """Of a run nobody kills, and which saves nothing."""
    folder.mkdir()
    code = run_job(folder, steps, "never", 1, 0, every=0)
    assert code == 0, (folder / "stderr").read_text()
    return [str(n["loss"]) for n in notes(folder) if "loss" in n]


def soak(options: Options, *, steps_per_kill: int = 30) -> str:
    """Kill and check; a line about how it went."""
    dice = random.Random(options.seed)
    at_milestones = by_time = 0
    with tempfile.TemporaryDirectory(prefix="hpczero-soak-") as name:
        folder = Path(name) / "run"
        folder.mkdir()
        reference: list[str] = []
        until = 0
        for number in range(options.kills):
            newest = check(folder)
            until = newest + steps_per_kill
            milestone, after = "never", 0.0
            if dice.random() < options.at_milestones:
                milestone = options.milestones[number % len(options.milestones)]
                at_milestones += 1
            else:
                after = dice.uniform(0.001, 0.6)
                by_time += 1
            on_any_rank = milestone.startswith("wrote") or milestone == "closed"
            victim = dice.randrange(RANKS) if on_any_rank else 0
            code = run_job(
                folder,
                until if milestone != "never" else 10**6,
                milestone,
                dice.randint(1, 3),
                victim,
                background=options.background,
                kill_after_s=after,
            )
            assert code != 0, f"kill {number}: the job ended well"
            if check(folder) + 50 > len(reference):
                ahead = min(500, 70 + 8 * (options.kills - number))
                reference = reference_losses(
                    Path(name) / f"reference{number}", check(folder) + ahead
                )
            check_losses(folder, reference)
            began = [int(str(n["began"])) for n in notes(folder) if "began" in n]
            assert not began or began[-1] >= newest, (began[-1], newest)
            if sys.stderr.isatty() or number % 20 == 0:
                sys.stderr.write(f"soak: {number + 1} killed, newest {check(folder)}\n")
        code = run_job(folder, check(folder) + 4, "never", 1, 0, background=options.background)
        assert code == 0, (folder / "stderr").read_text()
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
        folder, until, every, milestone, when, victim, background = sys.argv[2:]
        numbers = int(when), int(victim)
        rank_program(Path(folder), int(until), int(every), milestone, *numbers, background == "1")
        return
    sys.stdout.write(soak(tyro.cli(Options)) + "\n")


if __name__ == "__main__":
    main()
