"""Runs that are killed, go back, are started twice and are requeued, in any order: nothing that counted is ever lost.

    python -m tests.campaign --kills 100

Jobs of the training command go on with one run, and now and then with one called default. Each of them goes on where
the run is, goes back, begins at what was set aside, is a restart of a series, or finds another job at work; and most of
them are killed: before some change of the disk since they took the run folder, or at any time. After each one the
oracle looks at the folder.

- What counted is there, sound, unless ``--checkpoint.keep`` newer ones of its line are; what was set aside stays there.
- A job begins where it was told to, or at the newest of the line that is there; whatever it began to set aside is set
  aside as a whole. From the same checkpoint the next loss is the same.
- ``LATEST`` names what is there, and ``metrics.jsonl`` has a line for each step that was saved.
- A second job is refused, and no start is kept out by the dead.
"""

from __future__ import annotations

import hashlib
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from hpczero.checkpoint.__main__ import Verdict, verify
from hpczero.checkpoint.disk import lines
from hpczero.checkpoint.disk.folder import LATEST, Folder
from hpczero.checkpoint.disk.format import MANIFEST_FILE
from hpczero.options.config import RunConfig
from hpczero.options.reading import load_toml
from hpczero.run.results.metrics import read_metrics
from tests.helpers.killed import Job
from tests.helpers.runs import options

KEEP = 3
CHANGES = 130  # of the disk: about as many as a start and four saves make
KILLED_BEFORE_A_CHANGE = "killed before a change of the disk"


@dataclass(frozen=True)
class Options:
    """How much to kill.

    Attributes:
        kills: jobs that are killed.
        seed: of everything that is drawn.
    """

    kills: int = 100
    seed: int = 0


@dataclass(frozen=True)
class Seen:
    """A run folder at rest. A checkpoint is known by the digest of its manifest.

    Attributes:
        line: what counts, newest first: step and digest.
        aside: what does not count any more, with its folder.
    """

    line: list[tuple[int, str]]
    aside: dict[str, Path]

    @classmethod
    def of(cls, run: Path) -> Seen:
        """Look at ``run``; everything that counts is read in full."""
        path = run / "checkpoints"
        line = []
        for found in Folder(path).candidates():
            report = verify(found)
            assert report.verdict is Verdict.SOUND, report.problems
            line.append((lines.step_of(found.name) or 0, digest(found)))
        latest = path / LATEST
        assert not latest.exists() or (path / latest.read_text().strip()).is_dir(), latest
        gone = [p for place in lines.asides(path) for p in Folder(place).candidates()]
        gone += [path / name for name in lines.hidden(path) if (path / name).is_dir()]
        return cls(line, {digest(p): p for p in gone})


def digest(checkpoint: Path) -> str:
    return hashlib.sha256((checkpoint / MANIFEST_FILE).read_bytes()).hexdigest()


class Campaign:
    """A folder of runs, and what has happened in it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.dice = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.number = 0
        self.series = 0
        self.restart = 0
        self.next_losses: dict[tuple[str, int], float] = {}
        self.results: set[str] = set()

    # --- jobs

    def start(
        self,
        *,
        ranks: int,
        die_at: int = -1,
        environment: dict[str, str] | None = None,
        **given: Any,
    ) -> Job:
        """Start one on ``ranks`` ranks; ``die_at``: see ``PROGRAM``."""
        self.number += 1
        log = self.folder / f"log-{self.number:04}"
        changes = {"train__steps": 10**6, "checkpoint__every": 2, "checkpoint__keep": KEEP, **given}
        _, _, *words = options(self.folder, **changes)
        return Job.start(log, words, ranks=ranks, die_at=die_at, environment=environment)

    def kill_or_stop(self, job: Job, *, die_at: int) -> str:
        """Have somebody see to it that ``job`` comes to its end; how."""
        if die_at >= 0:
            return KILLED_BEFORE_A_CHANGE
        if self.dice.random() < 0.2 and job.wait_for("saved "):
            job.signal(signal.SIGUSR1, self.dice)
            return "asked to stop"
        if self.dice.random() < 0.8:
            job.wait_for("topology:")  # from here on in training
        time.sleep(self.dice.uniform(0.0, 1.5))
        job.signal(signal.SIGKILL, self.dice)
        return "killed at any time"

    # --- what may happen to the run

    def round(self) -> None:
        """One job of the run, and what the oracle says of it."""
        run = self.folder / "r"
        before = Seen.of(run)
        ranks = self.dice.choice((1, 1, 2))
        die_at = self.dice.randrange(CHANGES) if self.dice.random() < 0.6 else -1
        older = before.line[1:]
        actions = ["go on", "go on", "requeue", "requeue", "two jobs"]
        actions += ["go back"] * 3 if older else []
        actions += ["begin at what was set aside"] if before.aside else []
        action = self.dice.choice(actions)
        given: dict[str, Any] = {}
        environment = self.requeue() if action == "requeue" else {}
        target = before.line[0] if before.line else None
        if not before.line and (run / "config.toml").exists():
            # Killed before its first save: it begins again where it has begun.
            source = load_toml(run / "config.toml", RunConfig).resume.from_
            if source == "auto":
                given["run__overwrite"] = "true"
            else:
                target = (lines.step_of(Path(source).name) or 0, digest(Path(source)))
        if action == "go back" or (environment and older and self.has_begun):
            chosen = self.dice.choice(older)
            given["resume__from"] = run / "checkpoints" / f"step-{chosen[0]:09}"
            given["train__learning_rate"] = self.dice.uniform(1e-4, 1e-3)
            # What a command says is for the first start of a series.
            target = chosen if action == "go back" else target
        elif action == "begin at what was set aside":
            name = self.dice.choice(sorted(before.aside))
            path = before.aside[name]
            if path.parent.name == "checkpoints":
                return  # it is still on its way there
            target = (lines.step_of(path.name) or 0, name)
            given["resume__from"] = path
            given.pop("run__overwrite", None)
        if action == "two jobs":
            die_at = -1
        self.counts[action] += 1
        job = self.start(ranks=ranks, die_at=die_at, environment=environment, **given)
        if action == "two jobs" and job.wait_for("topology:"):
            self.second(job)
        end = self.kill_or_stop(job, die_at=die_at)
        code, said = job.wait(), job.said
        if "crash loop" in said or "too little time" in said:
            self.counts["starts of a series that were refused"] += 1
            assert environment, said
            self.series, self.restart = self.series + 1, 0
            assert Seen.of(run) == before
            return
        assert code not in (0, 78), said
        assert "Traceback" not in said, said
        self.counts[end] += 1
        self.judge(run, before, target, ranks, said, code)

    @property
    def has_begun(self) -> bool:
        """Whether a start of this series has come to its first step."""
        path = self.folder / "r" / "attempts.jsonl"
        said = path.read_text().splitlines() if path.exists() else []
        name = f'"series": "s{self.series}"'
        return any(name in line and '"event": "begin"' in line for line in said)

    def requeue(self) -> dict[str, str]:
        """The environment of the next start of this series, or of the first of another."""
        if self.dice.random() < 0.3:
            self.series, self.restart = self.series + 1, 0
        environment = {
            "HPCZERO_SERIES": f"s{self.series}",
            "SLURM_JOB_ID": str(1000 + self.series),
            "SLURM_RESTART_COUNT": str(self.restart),
            "SLURM_JOB_END_TIME": str(int(time.time()) + 10**6),
        }
        self.restart += 1
        return environment

    def second(self, first: Job) -> None:
        """Another job of the same name is refused, whatever it is told to do."""
        asked: dict[str, Any] = self.dice.choice(
            ({}, {"run__overwrite": "true"}, {"resume__from": "never"})
        )
        other = self.start(ranks=1, **asked)
        code = other.wait()
        alive = first.process.poll() is None
        assert code == 78, (code, other.said)
        assert not alive or "held by process" in other.said, other.said
        self.counts["second jobs refused"] += 1

    def judge(
        self,
        run: Path,
        before: Seen,
        target: tuple[int, str] | None,
        ranks: int,
        said: str,
        code: int,
    ) -> None:
        """Hold the folder against what was there before."""
        after = Seen.of(run)
        assert before.aside.keys() <= after.aside.keys(), "what was set aside is gone"
        began = re.search(r"going on from (\S+): step (\d+)", said)
        if began:
            assert target is not None, said
            assert int(began[2]) == target[0], (began[0], target)
        steps = [step for step, _ in after.line]
        there = {name for _, name in after.line}
        newest = max(steps, default=0)
        left = list(before.line)  # if it began elsewhere
        if target in before.line and target is not None:
            left = [entry for entry in before.line if entry[0] > target[0]]
        moved = [entry for entry in left if entry[1] in after.aside]
        assert len(moved) in (0, len(left)), "some were set aside, and some were not"
        for step, name in before.line:
            self.counts["checkpoints looked for afterwards"] += 1
            if name in there or name in after.aside:
                continue
            newer = [s for s in steps if s > step]
            assert len(newer) >= KEEP, f"step {step} is gone, and {newer} are there"
        saved = [int(s) for s in re.findall(r"saved \S+step-(\d+)", said)]
        assert newest >= max(saved, default=0), (saved, steps)
        assert moved or not left or not saved, "it saved, and what it has left counts"
        if code == 75:
            self.counts["came back with 75"] += 1
            stopped = re.search(r"stopped after step (\d+)", said)
            assert stopped is not None, said
            assert int(stopped[1]) in steps, (stopped[0], steps)
        if not after.line or not (run / "metrics.jsonl").exists():
            return
        found = read_metrics(run / "metrics.jsonl")
        numbers = [m.step for m in found]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
        assert not numbers or numbers[-1] >= newest, (numbers[-1:], newest)
        assert "has no lines of steps" not in said, said
        if began and target is not None and "topology:" in said:  # its own lines, from here on
            loss = next((m.loss for m in found if m.step == target[0] + 1), None)
            if loss is not None:
                self.counts["losses compared"] += (target[1], ranks) in self.next_losses
                known = self.next_losses.setdefault((target[1], ranks), loss)
                assert loss == known, f"after step {target[0]}: {loss}, not {known}"

    # --- the run that anybody may replace

    def default(self) -> None:
        """A short run called default, killed or not: whatever it has made is there afterwards, under some name."""
        die_at = self.dice.randrange(CHANGES) if self.dice.random() < 0.7 else -1
        seed = self.dice.randrange(2)
        job = self.start(
            ranks=1, die_at=die_at, run__name="default", train__steps=4, run__seed=seed
        )
        code = job.wait()
        assert code not in (75, 78), job.said
        assert "Traceback" not in job.said, job.said
        self.counts["of default"] += 1
        if code:
            self.counts[KILLED_BEFORE_A_CHANGE] += 1
        manifests = self.folder.glob(f"default*/**/step-*/{MANIFEST_FILE}")
        found = {digest(path.parent) for path in manifests}
        found |= {
            hashlib.sha256(path.read_bytes()).hexdigest()
            for path in self.folder.glob("default*/**/model.safetensors")
        }
        assert self.results <= found, f"{len(self.results - found)} results are gone\n{job.said}"
        self.results = found

    @property
    def kills(self) -> int:
        """So far."""
        return sum(count for name, count in self.counts.items() if name.startswith("killed"))


@dataclass(frozen=True)
class Report:
    """Of a campaign in which nothing was lost: anything else is an AssertionError.

    Attributes:
        kills: jobs that were killed.
        counts: what else was done, and how often.
        aside: checkpoints that lie aside in the end.
    """

    kills: int
    counts: Mapping[str, int]
    aside: int

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {what}" for what, count in sorted(self.counts.items()))
        return (
            f"{self.kills} jobs killed, nothing lost ({counts}); set aside in the end: {self.aside}"
        )


def run(chosen: Options) -> Report:
    """Kill and check.

    Raises:
        AssertionError: something is lost, or is not what it should be.
    """
    with tempfile.TemporaryDirectory(prefix="hpczero-campaign-") as name:
        campaign = Campaign(Path(name), chosen.seed)
        while campaign.kills < chosen.kills:
            if campaign.dice.random() < 0.15:
                campaign.default()
            else:
                campaign.round()
            if sys.stderr.isatty() or campaign.number % 10 == 0:
                sys.stderr.write(f"campaign: {dict(campaign.counts)}\n")
        seen = Seen.of(Path(name) / "r")
    return Report(campaign.kills, campaign.counts, len(seen.aside))


if __name__ == "__main__":
    sys.stdout.write(f"{run(tyro.cli(Options))}\n")
