"""A real SLURM on emulated hosts: slurmctld on host0, one slurmd on each of the others, fake GPUs.

Owns: the daemons, their configuration, and the commands that talk to them. Must not know: what jobs do. All of it lives
in the namespaces of an ``EmulatedCluster`` and in one temporary folder; nothing of a SLURM that the machine may have
is touched, and everything is gone when the owner ends, however it ends. Results are emulated: never call them scaling.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.cluster import emulated
from tests.cluster.emulated import EmulatedCluster
from tests.helpers.mpirun import ROOT, Finished, run_command
from tests.helpers.processes import launch_environment

TOOLS = ("slurmctld", "slurmd", "srun", "sbatch", "munged")
GPUS = 2
DISK_NBYTES = 512 * 2**20  # of a node
REQUEUE_S = 5  # how long a requeued job waits; SLURM's default is 120, its least 5
ADDRESS = "10.0.0.{}"


def why_not() -> str | None:
    """Why there can be no SLURM here; None if there can."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin"
    missing = [tool for tool in TOOLS if not shutil.which(tool, path=path)]
    reason = emulated.why_not()
    if reason is None and missing:
        reason = f"{' and '.join(missing)} not installed (Debian: slurm-wlm, munge)"
    return reason


class SlurmCluster:
    """SLURM for as long as the ``with`` block lasts."""

    def __init__(self, nodes: int = 2, *, settings: Mapping[str, str] | None = None) -> None:
        """Starts nothing yet.

        Args:
            nodes: compute nodes: host1, host2 ...
            settings: lines of slurm.conf by key, on top of ours or instead of them.
        """
        self.nodes = [f"host{index + 1}" for index in range(nodes)]
        self.folder = Path()
        self._hosts = EmulatedCluster(hosts=nodes + 1)
        self._settings = dict(settings or {})
        self._daemons: list[subprocess.Popen[bytes]] = []

    # --- up and down

    def __enter__(self) -> SlurmCluster:
        self.folder = Path(tempfile.mkdtemp(prefix="hpczero-slurm-"))
        try:
            self._configure()
            self._hosts.__enter__()
            munged = f"exec munged --foreground --force --key-file={self.folder}/munge.key"
            for name in ("socket", "pid-file", "log-file", "seed-file"):
                munged += f" --{name}={self.folder}/munge.{name}"
            self._start(0, munged)
            self._start(0, f"exec slurmctld -D -c -f {self.configuration}")
            for node in self.nodes:
                self.start_node(node)
            self.wait(self._is_ready, "the nodes to be idle", limit_s=30)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every daemon and job, remove the hosts and the folder."""
        self._hosts.close()
        for daemon in self._daemons:
            daemon.wait(10)
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def configuration(self) -> Path:
        """slurm.conf."""
        return self.folder / "slurm.conf"

    @property
    def disk(self) -> Path:
        """Folder that is a small disk of its own on each compute node, empty after a start of the node."""
        return self.folder / "disk"

    def start_node(self, node: str) -> None:
        """Start the slurmd of ``node``, whose own disk is as after a reboot: no temporary files of before."""
        # A requeued job has the numbers of before, and PMIx names its files by job and step.
        for kind in ("spool", "tmp"):
            for path in (self.folder / f"{kind}-{node}").glob("*pmix*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        # A disk of the node's own, under the same name on every node: only slurmd and its jobs see this mount.
        disk = f"mount -t tmpfs -o size={DISK_NBYTES},mode=1777 {node} {self.disk}"
        slurmd = f"{disk} && exec slurmd -D -N {node} -f {self.configuration}"
        line = f"exec unshare --mount sh -c {shlex.quote(slurmd)}"
        self._start(int(node.removeprefix("host")), line)

    def kill_node(self, node: str) -> None:
        """End all that runs on ``node`` at once, as the loss of power would: slurmd and the job's processes."""
        kill = f"ip netns pids {node} | grep -vxF $$ | xargs --no-run-if-empty kill -KILL"
        self._on(0, kill)

    def _start(self, host: int, line: str) -> None:
        command = self._hosts.on_host(host, f"PATH=$PATH:/usr/sbin; {line}", self.folder)
        with (self.folder / "daemons.log").open("ab") as log:
            said: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            own: dict[str, Any] = {"env": self._environment(), "start_new_session": True}
            self._daemons.append(subprocess.Popen(command, **said, **own))

    def _configure(self) -> None:
        of_nodes = [f"{kind}-{node}" for kind in ("spool", "tmp") for node in self.nodes]
        for part in ("disk", "state", "dev", *of_nodes):
            (self.folder / part).mkdir()
        key = self.folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        devices = [self.folder / "dev" / f"nvidia{index}" for index in range(GPUS)]
        for device in devices:  # clones of /dev/null: gres wants a device
            os.mknod(device, 0o666 | 0o020000, os.makedev(1, 3))
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (self.folder / "gres.conf").write_text(
            f"AutoDetect=off\nNodeName={','.join(self.nodes)} Name=gpu "
            f"File={self.folder}/dev/nvidia[0-{GPUS - 1}]\n"
        )
        folder = self.folder
        values = {
            "ClusterName": "emulated",
            "SlurmctldHost": f"host0({ADDRESS.format(1)})",
            "SlurmUser": "root",
            "SlurmdUser": "root",
            "AuthType": "auth/munge",
            "CredType": "cred/munge",
            "AuthInfo": f"socket={folder}/munge.socket,cred_expire={REQUEUE_S}",
            "MpiDefault": "none",
            "MpiParams": "ports=28000-28999",
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "JobAcctGatherType": "jobacct_gather/none",
            "JobCompType": "jobcomp/filetxt",
            "JobCompLoc": f"{folder}/jobcomp.txt",
            "AccountingStorageType": "accounting_storage/none",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_CPU",
            "SchedulerParameters": "bf_interval=1,sched_interval=1,sched_min_interval=100000,batch_sched_delay=0",
            "GresTypes": "gpu",
            "SlurmdParameters": "config_overrides",
            "ReturnToService": "2",
            "JobRequeue": "1",
            "KillWait": "10",
            "SlurmdTimeout": "6",
            "SlurmctldPidFile": f"{folder}/slurmctld.pid",
            "SlurmdPidFile": f"{folder}/slurmd-%n.pid",
            "SlurmctldLogFile": f"{folder}/slurmctld.log",
            "SlurmdLogFile": f"{folder}/slurmd-%n.log",
            "SlurmdSpoolDir": f"{folder}/spool-%n",
            "StateSaveLocation": f"{folder}/state",
            "TmpFS": f"{folder}/tmp-%n",  # without it PMIx steps fail on every node but the first
            "MailProg": "/bin/true",
            **self._settings,
        }
        lines = [f"{key}={value}" for key, value in values.items()]
        for index, node in enumerate(self.nodes):
            address = ADDRESS.format(index + 2)
            lines.append(
                f"NodeName={node} NodeAddr={address} CPUs=16 RealMemory=8000 Gres=gpu:{GPUS}"
            )
        lines.append(
            f"PartitionName=gpu Nodes={','.join(self.nodes)} Default=YES MaxTime=INFINITE DefaultTime=10 State=UP"
        )
        # The machine of slurm/train_60b.sh: nobody is there, but what fits can be asked (sbatch --test-only).
        lines += [
            "NodeName=dgx[1-25] CPUs=48 RealMemory=1500000 Gres=gpu:16 State=CLOUD",
            "PartitionName=dgx2 Nodes=dgx[1-25] MaxTime=2-0 State=UP",
            f"PartitionName=hidden Nodes={','.join(self.nodes)} Hidden=YES State=UP",
        ]
        self.configuration.write_text("\n".join([*lines, ""]))

    def _is_ready(self) -> bool:
        states = self.run(["sinfo", "-h", "-N", "-p", "gpu", "-o", "%T"], check=False)
        return states.returncode == 0 and states.stdout.split() == ["idle"] * len(self.nodes)

    # --- commands

    def run(
        self,
        arguments: Sequence[str | os.PathLike[str]],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
        check: bool = True,
        timeout: float = 60.0,
    ) -> Finished:
        """Run a command on the login host, which is host0."""
        line = f"exec {shlex.join(os.fspath(argument) for argument in arguments)}"
        command = self._hosts.on_host(0, line, cwd)
        finished = run_command(command, timeout, self._environment(**(env or {})), cwd)
        assert not check or finished.returncode == 0, finished
        return finished

    def field(self, job: str, name: str) -> str:
        """A field of ``scontrol show job``, such as JobState or Restarts; empty if SLURM knows no such job."""
        shown = self.run(["scontrol", "show", "job", "-o", job], check=False).stdout
        found = re.search(rf"(?:^|\s){name}=(\S*)", shown)
        return found[1] if found else ""

    def wait(self, condition: Callable[[], bool], what: str, *, limit_s: float = 60.0) -> None:
        """Return when ``condition`` holds; fail with the logs of the daemons after the limit."""
        deadline = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > deadline:
                logs = [
                    f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}"
                    for path in sorted(self.folder.glob("*.log"))
                ]
                raise AssertionError("\n".join([f"waited {limit_s} s for {what}", *logs]))
            time.sleep(0.1)

    def wait_for_state(self, job: str, *states: str, limit_s: float = 60.0) -> None:
        """Return when ``job`` is in one of ``states``."""
        what = f"job {job} to be {' or '.join(states)}"
        self.wait(lambda: self.field(job, "JobState") in states, what, limit_s=limit_s)

    def _on(self, host: int, line: str) -> Finished:
        return run_command(self._hosts.on_host(host, line), 30, self._environment())

    def _environment(self, **changes: str) -> dict[str, str]:
        return launch_environment(
            SLURM_CONF=os.fspath(self.configuration),
            OMPI_ALLOW_RUN_AS_ROOT="1",
            OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
            OMPI_MCA_mpi_yield_when_idle="1",
            OMPI_MCA_io="^ompio",
            OMP_NUM_THREADS="1",
            PYTHONPATH=os.fspath(ROOT),
            **changes,
        )
