"""Jobs of ``slurm/``'s scripts, as a user submits and follows them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers.mpirun import ROOT, Finished
from tests.slurm.cluster import SlurmCluster

# On hosts of two cores, with a model that takes milliseconds per step.
SIZES = {
    "NODES": "2",
    "RANKS_PER_NODE": "1",
    "GPUS_PER_NODE": "1",
    "CPUS_PER_RANK": "1",
    "TIME": "10",
    "SIGNAL_S": "60",
    "CPU_BIND": "none",  # two cores stand for 32
}
OPTIONS = {
    "model.context": "16",
    "evaluation.batches": "0",
    "parallel.algorithms": "default",
    "log.plot": "false",
    "log.tensorboard": "false",
    "log.every": "100",
    "data.cache": os.fspath(ROOT / "runs" / "tokens"),
}


def words_of(options: Mapping[str, object]) -> list[str]:
    """Options of hpczero.train as words of a command line."""
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


@dataclass(frozen=True)
class Job:
    """A submitted job, and the folder it was submitted from, where its log and its run lie."""

    cluster: SlurmCluster
    number: str
    folder: Path

    @property
    def log(self) -> str:
        """What it has written so far, of all its starts."""
        return "".join(p.read_text() for p in sorted(self.folder.glob(f"*-{self.number}.log")))

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The whole lines of metrics.jsonl of the run called r."""
        path = self.folder / "runs" / "r" / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    @property
    def attempts(self) -> list[dict[str, Any]]:
        """The lines of attempts.jsonl."""
        path = self.folder / "runs" / "r" / "attempts.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def nodes(self) -> list[str]:
        """The nodes it runs on."""
        names = self.cluster.run(["scontrol", "show", "hostnames", self.field("NodeList")])
        return names.stdout.split()

    def field(self, name: str) -> str:
        """Of scontrol show job."""
        return self.cluster.field(self.number, name)

    def wait_for_state(self, *states: str, limit_s: float = 60.0) -> None:
        """Return when it is in one of ``states``; fail with the log."""
        self.wait(lambda: self.field("JobState") in states, f"{' or '.join(states)}", limit_s)

    def wait_for_steps(self, steps: int) -> None:
        """Return when so many steps are done in all."""
        self.wait(lambda: len(self.metrics) >= steps, f"{steps} steps", 60.0)

    def wait(self, condition: Any, what: str, limit_s: float = 60.0) -> None:
        """Return when ``condition`` holds; fail with the log."""
        try:
            self.cluster.wait(condition, f"job {self.number}: {what}", limit_s=limit_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n--- job\n{self.log}") from None

    def ends_with(self, code: int) -> None:
        """Return when it is over; fail with the log if its exit code is another one."""
        self.wait_for_state("COMPLETED", "FAILED")
        assert self.field("ExitCode") == f"{code}:0", self.log

    def wait_for_the_end(self) -> None:
        """Return when SLURM has no job any more."""
        self.wait(lambda: not self.cluster.run(["squeue", "-h"]).stdout, "the end")

    def scancel(self, *options: str) -> None:
        """``scancel`` it."""
        self.cluster.run(["scancel", *options, self.number])


class Submitter:
    """Submits the scripts of ``slurm/`` from one folder."""

    def __init__(self, cluster: SlurmCluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder

    def script(self, name: str, *arguments: str, **variables: str) -> Finished:
        """Run a script on the login host as a user does, with these variables; it need not succeed."""
        return self.at(ROOT / "slurm" / name, *arguments, **variables)

    def at(self, path: Path, *arguments: str, **variables: str) -> Finished:
        """The same of a script that lies anywhere."""
        env = {**SIZES, **variables}
        return self.cluster.run([path, *arguments], env=env, cwd=self.folder, check=False)

    def job(self, name: str, *arguments: str, **variables: str) -> Job:
        """Submit a script's job."""
        variables.setdefault("SBATCH_OPTIONS", "--parsable --mem=0")
        return self.submitted(self.script(name, *arguments, **variables))

    def submitted(self, done: Finished) -> Job:
        """The job of which ``sbatch --parsable`` has told."""
        assert done.returncode == 0, done
        return Job(self.cluster, done.stdout.split()[-1], self.folder)

    def train(self, name: str = "train.sh", *, variables: Any = (), **options: object) -> Job:
        """Submit a training script; a double underscore stands for the dot of an option."""
        given = {**OPTIONS, **{key.replace("__", "."): str(v) for key, v in options.items()}}
        env = dict(variables)
        more = env.get("SBATCH_OPTIONS", "")
        env["SBATCH_OPTIONS"] = f"--parsable --exclusive=user --mem=0 {more}"
        return self.job(name, *words_of(given), **env)
