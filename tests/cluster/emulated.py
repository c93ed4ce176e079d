"""A cluster of several hosts on one machine: real Open MPI over links of a chosen speed.

Owns: the hosts (network and UTS namespaces behind one bridge), their links, and MPI jobs on them. Must not know: what
the jobs compute. ``MPI_Comm_split_type`` sees real nodes, and what crosses between them goes over TCP through links
that are shaped in both directions. Needs root, and touches nothing of the machine itself: everything lies in namespaces
whose first process (``network.sh``) lives as long as our end of its stdin, so that the kernel removes all of it
however we end.

[Note: Links]
Chosen by measurement (2 cores, Linux 6.18, tbf on both ends, nominal 1 Gbit/s, bytes of payload of a TCP stream of
100 MB between two hosts, in parts of nominal):

    MTU 9000, burst  64 KiB: 1 stream 0.966, 2 streams 0.983
    MTU 9000, burst  96 KiB:          0.991,           0.992
    MTU 9000, burst 128 KiB:          0.992,           0.993
    MTU 9000, burst 256 KiB:          0.994,           0.993
    MTU 1500, burst  64 KiB:          0.833,           0.825   (of 50 MB)
    100 Mbit/s,    burst as below:    0.993,           0.981   (of 50 MB)
    4 Gbit/s,      burst as below:    0.973,           0.992
    10 Gbit/s,     burst as below:    0.982,           0.986

- MTU 9000: what fabrics use; headers then cost 0.7 per cent (8948 of 9014 bytes), and a packet is rarely late.
- The burst must hold one 64 KiB segment and what trickles in while the kernel's timer is late, or tokens are lost:
  64 KiB plus half a millisecond's worth. All of it passes unshaped after a pause: 126 KiB at 1 Gbit/s, or 2 per cent
  of the 6 MiB that a host takes in when 4 hosts of 2 ranks gather shards of 1 MiB, 0.3 per cent with 8 MiB.
- Queues hold 256 MiB, more than all sockets can have under way, so nothing is ever dropped, as on a lossless fabric.
- All four hosts sending to all others at once (raw sockets, 48 MiB in and out of each): 415 to 445 ms where the
  bound is 403.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tests.helpers.forkserver import BASE
from tests.helpers.forkserver import server as forkserver
from tests.helpers.mpirun import ROOT, Finished, run_command
from tests.helpers.processes import end_family, family, launch_environment

Placement = Literal["block", "cyclic"]
"""``block`` fills one host after the other; ``cyclic`` deals ranks to the hosts in turn."""

FOLDER = Path(__file__).resolve().parent
SUBNET = "10.0.0.0/24"
MAX_HOSTS = 250  # in the subnet
SEGMENT_NBYTES = 64 * 2**10  # what the kernel hands to a link at once
TIMER_SLACK_S = 0.0005
QUEUE_NBYTES = 256 * 2**20
GRACE_S = 5.0

# install/launch.sh knows the rest: root, more ranks than cores, no binding, MPI-IO.
OPEN_MPI = {
    "OMPI_MCA_plm": "rsh",
    "OMPI_MCA_plm_rsh_agent": "/run/enter",
    "OMPI_MCA_orte_default_hostfile": "/run/ranks",
    "OMPI_MCA_rmaps": "seq",  # one line of that file for each rank: any placement
    "OMPI_MCA_orte_tmpdir_base": "/dev/shm",  # private to the cluster, see network.sh
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,vader,tcp",
    "OMPI_MCA_btl_tcp_if_include": SUBNET,
    "OMPI_MCA_oob_tcp_if_include": SUBNET,
    "HPCZERO_LAUNCH": "",  # mpirun, whatever launches jobs outside
}


JOBS = ["-m", "mpi4py", "-m", "tests.cluster.jobs"]
"""What follows ``python``, with the name of a job behind."""


def reported(finished: Finished) -> Any:
    """What rank 0 of a job of ``jobs.py`` has written."""
    assert finished.returncode == 0, finished
    return json.loads(finished.stdout.splitlines()[-1])


class ClusterError(RuntimeError):
    """The cluster cannot be set up, or is gone; the message is the reason."""


@dataclass(frozen=True)
class Launch:
    """How to start a job: a command line, and variables to set for it."""

    command: tuple[str, ...]
    environment: Mapping[str, str]


def node_map(
    hosts: int, ranks_per_host: int | Sequence[int], placement: Placement = "block"
) -> list[int]:
    """Host of each rank, in rank order; the same list makes ``Topology.create`` fake these nodes on one host.

    Args:
        hosts: number of hosts.
        ranks_per_host: the same for all, or one number each; hosts beyond the last stay idle.
        placement: how ranks follow each other.

    Raises:
        ValueError: no rank at all, or more numbers than hosts.
    """
    counts = [ranks_per_host] * hosts if isinstance(ranks_per_host, int) else list(ranks_per_host)
    if len(counts) > hosts or min(counts, default=0) < 0 or not any(counts):
        raise ValueError(
            f"ranks_per_host is {ranks_per_host}, expected a number or up to {hosts} of them, at least one rank in all"
        )
    if placement == "block":
        return [host for host, count in enumerate(counts) for _ in range(count)]
    return [
        host for turn in range(max(counts)) for host, count in enumerate(counts) if turn < count
    ]


def why_not() -> str | None:
    """Why there can be no emulated cluster here, found by trying; None if there can."""
    if os.geteuid() != 0:
        return "an emulated cluster needs root"
    missing = [tool for tool in ("ip", "tc", "unshare", "nsenter") if not shutil.which(tool)]
    if missing:
        return f"an emulated cluster needs {' and '.join(missing)} (Debian: iproute2, util-linux)"
    chosen = ROOT / ".venv" / "hpczero-mpirun"  # as in install/launch.sh
    mpirun = chosen.read_text().strip() if chosen.exists() else shutil.which("mpirun")
    if not mpirun:
        return "an emulated cluster needs mpirun"
    asked = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False)
    if "(Open MPI) 4." not in asked.stdout:
        found = next(iter(asked.stdout.splitlines()), "no version")
        return f"an emulated cluster needs Open MPI 4, found {found!r}"
    try:
        with EmulatedCluster(hosts=1):
            return None
    except ClusterError as error:
        return str(error)


class EmulatedCluster:
    """Hosts ``host0``, ``host1`` ... for as long as the ``with`` block lasts; one job at a time.

    Clusters of several processes, or several of one process, do not see each other.
    """

    def __init__(self, hosts: int = 4, *, rate_mbit: float = 1000.0, mtu: int = 9000) -> None:
        """Starts nothing yet.

        Args:
            hosts: number of hosts, G.
            rate_mbit: 10^6 bit/s that each host's link carries in either direction.
            mtu: bytes of an IP packet at most.

        Raises:
            ValueError: numbers that make no cluster.
        """
        if not 1 <= hosts <= MAX_HOSTS or rate_mbit <= 0 or not 576 <= mtu <= 65535:
            raise ValueError(
                f"got {hosts} hosts, {rate_mbit} Mbit/s and an MTU of {mtu}, expected 1 to {MAX_HOSTS} hosts, "
                f"a positive rate and an MTU of 576 to 65535"
            )
        self.hosts = hosts
        self.rate_mbit = rate_mbit
        self.mtu = mtu
        self._keeper: subprocess.Popen[str] | None = None
        self._first_pid = 0

    @property
    def burst_nbytes(self) -> int:
        """Bytes that a link passes unshaped after a pause. See [Note: Links]."""
        return SEGMENT_NBYTES + int(self.rate_mbit * 1e6 / 8 * TIMER_SLACK_S)

    def __enter__(self) -> EmulatedCluster:
        """Build the hosts.

        Raises:
            ClusterError: what the kernel or a tool refused.
        """
        bit_s = round(self.rate_mbit * 1e6)
        numbers = (self.hosts, bit_s, self.mtu, self.burst_nbytes, QUEUE_NBYTES)
        flags = ["--fork", "--kill-child", "--pid", "--mount-proc", "--net", "--ipc"]
        self._keeper = subprocess.Popen(
            ["unshare", *flags, os.fspath(FOLDER / "network.sh"), *map(str, numbers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # the terminal's Ctrl-C is for us
        )
        try:
            self._expect("ready")
            self._first_pid = family(self._keeper.pid)[0].pid
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes on the hosts and remove the hosts. May be called again."""
        keeper, self._keeper = self._keeper, None
        if keeper is None:
            return
        try:
            keeper.communicate(timeout=GRACE_S)  # the end of its stdin is the end of it
        except subprocess.TimeoutExpired:
            end_family(keeper.pid)
            keeper.communicate()

    def run(
        self,
        arguments: Sequence[str | os.PathLike[str]],
        *,
        ranks_per_host: int | Sequence[int] = 2,
        placement: Placement = "block",
        timeout: float = 60.0,
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
    ) -> Finished:
        """Run ``python arguments...`` on all ranks; at the limit the job is ended and the test fails with the output.

        Whatever way the job ended, none of its processes is left. Arguments as in ``node_map`` and
        ``tests.helpers.mpirun.run_ranks``.
        """
        launch = self.launch(
            arguments, ranks_per_host=ranks_per_host, placement=placement, cwd=cwd, forked=True
        )
        try:
            return run_command(launch.command, timeout, {**launch.environment, **(env or {})}, cwd)
        finally:
            self.end_jobs()

    def launch(
        self,
        arguments: Sequence[str | os.PathLike[str]],
        *,
        ranks_per_host: int | Sequence[int],
        placement: Placement,
        cwd: Path,
        forked: bool = False,
    ) -> Launch:
        """Place the ranks of the next job; what is returned starts it, from the machine, with Python on each rank.

        For callers that want the output as it comes: ``run`` is simpler. ``end_jobs`` goes after it. ``forked``: Python
        from the fork server of the tests.
        """
        nodes = node_map(self.hosts, ranks_per_host, placement)
        self._inside("run", "ranks").write_text("".join(f"host{node}\n" for node in nodes))
        python = (os.fspath(ROOT / "install" / "launch.sh"), str(len(nodes)), sys.executable)
        command = (*python, *(os.fspath(argument) for argument in arguments))
        if forked:
            command = forkserver.forked(command, launch_environment(**BASE))
        return Launch(self.on_host(nodes[0], f"exec {shlex.join(command)}", cwd), OPEN_MPI)

    def on_host(self, host: int, line: str, cwd: Path = ROOT) -> tuple[str, ...]:
        """Command line that runs the shell ``line`` in ``cwd`` on ``host``, from the machine."""
        here = f"cd {shlex.quote(os.fspath(cwd))} && {line}"  # nsenter leaves us in /
        return (*self._enter(), "/run/enter", f"host{host}", here)

    def end_jobs(self) -> None:
        """Kill whatever runs on the hosts; they stay.

        Raises:
            ClusterError: the cluster is gone, or a process cannot be killed.
        """
        if self._keeper is not None:
            assert self._keeper.stdin, "opened with pipes"
            with contextlib.suppress(BrokenPipeError):  # then there is no answer either
                self._keeper.stdin.write("end\n")
                self._keeper.stdin.flush()
            self._expect("ended")

    def bytes_sent(self, host: int) -> int:
        """Bytes that ``host`` has put on its link so far, headers and MPI's own messages included."""
        return self._count(host, "tx")

    def bytes_received(self, host: int) -> int:
        """Bytes that have come to ``host`` over its link so far."""
        return self._count(host, "rx")

    def _count(self, host: int, direction: Literal["tx", "rx"]) -> int:
        show = ["ip", "-n", f"host{host}", "-statistics", "-json", "link", "show", "dev", "eth0"]
        shown = subprocess.check_output([*self._enter(), *show], text=True)
        return int(json.loads(shown)[0]["stats64"][direction]["bytes"])

    def _enter(self) -> tuple[str, ...]:
        """Start of a command line that runs among the hosts."""
        if self._keeper is None or self._keeper.poll() is not None:
            raise ClusterError("the emulated cluster is not up; use it inside its `with` block")
        return ("nsenter", f"--target={self._first_pid}", "--mount", "--pid", "--net", "--ipc")

    def _inside(self, *parts: str) -> Path:
        """A file as the hosts see it."""
        self._enter()
        return Path(f"/proc/{self._first_pid}/root", *parts)

    def _expect(self, answer: str) -> None:
        """Wait until the keeper says ``answer``; if it says anything else, the cluster is closed."""
        keeper = self._keeper
        assert keeper, "only while the cluster is up"
        assert keeper.stdout, "opened with pipes"
        said = keeper.stdout.readline().strip()
        if said != answer:
            self._keeper = None
            keeper.kill()
            _, errors = keeper.communicate()
            reason = " ".join(errors.split()) or f"it said {said!r}, expected {answer!r}"
            raise ClusterError(f"the emulated cluster does not work: {reason}")
