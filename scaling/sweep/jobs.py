"""The jobs of a study: how they are started, in which setting, and the files that tell what is done and what is queued.

``points/KEY.json`` is the row of a point that is done, ``points/KEY.job`` the number of the SLURM job that was to
measure it, ``logs`` what jobs said, ``sweep-KIND.plan`` what was asked for last, ``sweep-KIND.collector`` the job that
collects, ``sweep-KIND.jsonl`` the rows together. A setting is what is known, before a point is measured, of where and
how it will be: text by name, so that records keep it as it is.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpczero.errors import ConfigError, HpcZeroError
from scaling.evidence import record
from scaling.sweep.study import Point

Setting = dict[str, str]

# Options of sbatch that choose nodes or what a rank gets of them; a job's time, name or account change no result.
NODE_OPTIONS = (
    "--partition -p, --constraint -C, --nodelist -w, --clusters -M, --gres, --gpus -G, "
    "--gpus-per-node, --gpus-per-task, --cpus-per-task -c"
)
# Of ours, those that change how long something may take, not how long it takes.
INDIFFERENT = ("HPCZERO_TIMEOUT", "HPCZERO_SERIES")


def local_setting(environment: Mapping[str, str] = os.environ) -> Setting:
    """Of points that run here."""
    return {"machine": record.machine_name(), **_common(environment)}


def slurm_setting(options: Sequence[str], environment: Mapping[str, str] = os.environ) -> Setting:
    """Of points that run as jobs.

    Args:
        options: of sbatch, as they were typed.
        environment: that of this process, which its jobs inherit.

    Raises:
        ConfigError: an option without its value.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for names in map(str.split, NODE_OPTIONS.split(",")):
        variable = f"SBATCH_{names[0].strip('-').upper().replace('-', '_')}"
        parser.add_argument(*names, default=environment.get(variable))
    try:
        found, _ = parser.parse_known_args(list(options))
    except argparse.ArgumentError as error:
        raise ConfigError(f"after --: got {' '.join(options)!r}: {error}") from error
    chosen = {name: value for name, value in vars(found).items() if value}
    return {**dict(sorted(chosen.items())), **_common(environment)}


def _common(environment: Mapping[str, str]) -> Setting:
    ours = {
        name: value
        for name, value in sorted(environment.items())
        if name.startswith("HPCZERO_") and name not in INDIFFERENT and value
    }
    return {**record.versions("torch", "mpi4py"), **ours}


POINT_SCRIPT = record.ROOT / "slurm" / "point.sh"
TAIL_LINES = 15


def run_here(
    arguments: Sequence[str], limit_s: float, *, ranks: int, nodes: int, threads: int = 0
) -> None:
    """Run ``python arguments...`` on ``ranks`` ranks, treated as ``nodes`` equal nodes, to its end.

    By install/launch.sh (which takes HPCZERO_LAUNCH, if it is set), for at most ``limit_s`` seconds.

    Raises:
        HpcZeroError: it failed, or took too long; with the last lines it said.
    """
    path = filter(None, [str(record.ROOT), os.environ.get("PYTHONPATH")])  # from any folder
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    if nodes > 1:
        environment["HPCZERO_FAKE_NODES"] = f"{nodes}x{ranks // nodes}"
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            [str(record.LAUNCH), str(ranks), sys.executable, *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # whatever outlived the launcher
            process.wait()
        said.seek(0)
        tail = "\n".join(said.read().splitlines()[-TAIL_LINES:])
    if code != 0:
        how = f"took more than {limit_s:g} s" if code is None else f"ended with {code}"
        raise HpcZeroError(f"{how}; the last it said was\n{tail or '(nothing)'}")


@dataclass(frozen=True)
class Slurm:
    """SLURM, by ``sbatch slurm/point.sh``."""

    options: Sequence[str]  # of sbatch, beside the sizes: partition, account, time
    logs: Path  # folder of what the jobs say
    in_turn: bool  # each job waits for the one before, so that no two disturb each other

    def submit(
        self,
        arguments: Sequence[str],
        *,
        nodes: int,
        ranks_per_node: int,
        after: Sequence[str] = (),
        name: str,
    ) -> str:
        """Submit ``python arguments...``; returns the job's number.

        Args:
            arguments: of Python.
            nodes: of the job.
            ranks_per_node: tasks of each.
            after: jobs that must have ended before, however they ended.
            name: of the job.

        Raises:
            ConfigError: there is no sbatch, or no script.
            HpcZeroError: sbatch refused; with what it said.
        """
        sbatch = shutil.which("sbatch")
        if sbatch is None:
            raise ConfigError(
                "--by sbatch: there is no sbatch here; log in to a node that submits jobs, or leave --by out to run "
                "on this machine"
            )
        if not POINT_SCRIPT.is_file():
            raise ConfigError(f"--by sbatch: {POINT_SCRIPT} is missing; check out the whole tree")
        command = [sbatch, "--parsable", f"--job-name={name}"]
        command += [f"--nodes={nodes}", f"--ntasks-per-node={ranks_per_node}"]
        command.append(f"--output={self.logs}/%x-%j.log")
        if after:
            command.append(f"--dependency=afterany:{':'.join(after)}")
        command += [*self.options, str(POINT_SCRIPT), "python", *arguments]
        self.logs.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(command, cwd=record.ROOT, capture_output=True, text=True, check=False)
        number = re.match(r"\d+", done.stdout.strip())
        if done.returncode != 0 or number is None:
            raise HpcZeroError(
                f"sbatch refused ({done.returncode}): {done.stderr.strip() or done.stdout.strip()}; the command was "
                f"{shlex.join(command)}"
            )
        return number.group()

    def queued(self, jobs: Sequence[str], clusters: str = "") -> set[str]:
        """Those of ``jobs`` that wait or run.

        Args:
            jobs: numbers, of this user.
            clusters: where they were sent, if not to the one here.

        Raises:
            HpcZeroError: squeue is missing or does not answer; with what to do.
        """
        if not jobs:
            return set()
        command = ["squeue", "--noheader", "--format=%A", f"--user={os.getuid()}"]
        command += [f"--clusters={clusters}"] if clusters else []
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            code = done.returncode
            problem = (done.stderr.strip() or f"exit code {code}") if code else ""
        except OSError as error:
            problem = str(error)
        if problem:
            raise HpcZeroError(
                f"squeue cannot say whether jobs {', '.join(jobs)} of this study are still in the queue ({problem}); "
                f"type the same command again later, or, if they are not: rm {self.logs.parent}/points/*.job "
                f"{self.logs.parent}/*.collector"
            )
        return set(jobs) & set(done.stdout.split())


NEEDS = ("point", "samples_ms", "commit")  # of a row that can be collected


class StudyFolder:
    """The files of one study, and what all points of one call have in common.

    Attributes:
        commit: as the submitter sees it; a compute node may have no git.
        setting: known beforehand.
    """

    def __init__(
        self, path: Path, kind: str, commit: str = "", setting: Setting | None = None
    ) -> None:
        self.path, self.commit, self.setting = path, commit, setting or {}
        self.plan = path / f"sweep-{kind}.plan"
        self.rows = path / f"sweep-{kind}.jsonl"
        self.collector = path / f"sweep-{kind}.collector"

    def row(self, point: Point) -> Path:
        """Where the row of a point is."""
        return self.path / "points" / f"{point.key(self.commit, self.setting)}.json"

    def job(self, point: Point) -> Path:
        """Where the number of a point's job is."""
        return self.row(point).with_suffix(".job")

    def arguments(self, point: Point) -> list[str]:
        """Of Python, for a job that measures ``point``."""
        order = {"commit": self.commit, "setting": self.setting, "point": point.as_json()}
        asked = json.dumps({"key": point.key(self.commit, self.setting), **order})
        return ["-m", "scaling.sweep.point", asked, str(self.row(point))]

    def write_plan(self, head: record.Row, points: Sequence[Point]) -> None:
        """Remember what was asked for, for whoever collects."""
        self.path.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**head, "points": [point.as_json() for point in points]})
        self.plan.write_text(text + "\n", encoding="utf-8")

    def read_plan(self) -> record.Row:
        """What was asked for last, of whose commit and setting this is from now on.

        Raises:
            ConfigError: nothing was, or the file is damaged.
        """
        try:
            head: record.Row = json.loads(self.plan.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{self.plan}: cannot be read ({error}); run the sweep without --collect first"
            ) from error
        self.commit, self.setting = head["asked_at"], head.get("setting", {})
        return head

    def finished(self, point: Point, *, any_commit: bool) -> tuple[record.Row | None, int]:
        """The newest row of ``point`` if it is done, and the number of lines that could not be read.

        A row of another setting never counts; one of another commit only with ``any_commit``.
        """
        malformed = 0
        found: list[record.Row] = []
        paths = {self.row(point): None}
        if any_commit:
            paths |= dict.fromkeys(sorted((self.path / "points").glob("*.json")))
        for path in paths:
            if not path.is_file():
                continue
            rows, bad = record.parse_rows(path, needs=NEEDS)
            malformed += bad
            found += [
                row
                for row in rows
                if row["point"] == point.as_json()
                and (any_commit or row["commit"] == self.commit)
                and row.get("setting", {}) == self.setting
            ]
        # Dates are ISO 8601 in UTC, so text is in their order; of equal ones the first, which is that of this commit.
        return max(found, key=lambda row: str(row.get("date", "")), default=None), malformed


def read_job(path: Path) -> str:
    """The number in a file that ``write_job`` has written; empty where there is none."""
    return path.read_text(encoding="utf-8").strip() if path.is_file() else ""


def write_job(path: Path, number: str) -> None:
    """Remember that job ``number`` was submitted."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{number}\n", encoding="utf-8")
