"""The emulated cluster: real nodes, links as slow as asked for, and nothing left of it afterwards."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import emulated
from tests.cluster.emulated import JOBS, EmulatedCluster, Placement, node_map, reported, why_not
from tests.helpers.mpirun import ROOT, run_command, run_ranks
from tests.helpers.pace import pace
from tests.helpers.processes import end_family, family, launch_environment, write_tool

pytestmark = pytest.mark.machine

NBYTES = 5_000_000
RATE_MBIT = 100
BOUND_S = NBYTES * 8 / (RATE_MBIT * 1e6)
LAUNCH_NBYTES = 200_000  # more than Open MPI says to itself between the hosts of one job
HOSTS = 4
# Open MPI gives the ranks of a job that failed seconds to end by themselves, which these do not need.
NO_GRACE = {"OMPI_MCA_odls_base_sigkill_timeout": "0"}


def inhabitants(namespace: str) -> list[int]:
    """Processes of the machine that live in ``namespace``, as in ``pid:[4026532123]``."""
    kind = namespace.partition(":")[0]
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(entry / "ns" / kind) == namespace:
                found.append(int(entry.name))
        except OSError:
            continue  # it is gone
    return found


def eventually(condition: Callable[[], bool], limit_s: float = 10.0) -> bool:
    """Whether ``condition`` comes true within the limit."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


# --- nodes


@pytest.mark.parametrize(
    ("ranks_per_host", "placement", "expected"),
    [
        (2, "block", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ((2, 2), "cyclic", [[0, 2], [1, 3]]),
        ((3, 1), "block", [[0, 1, 2], [3]]),
        ((1, 0, 3), "cyclic", [[0], [1, 2, 3]]),
    ],
)
def test_mpi_finds_the_hosts_as_nodes(
    cluster: EmulatedCluster,
    ranks_per_host: int | Sequence[int],
    placement: Placement,
    expected: list[list[int]],
) -> None:
    run = cluster.run([*JOBS, "nodes"], ranks_per_host=ranks_per_host, placement=placement)
    ranks = reported(run)
    assert ranks[0]["nodes"] == expected
    hosts = [rank["host"] for rank in ranks]
    assert all(len({hosts[rank] for rank in node}) == 1 for node in expected)
    assert len(set(hosts)) == len(expected)
    assert [int(host.removeprefix("host")) for host in hosts] == node_map(
        cluster.hosts, ranks_per_host, placement
    )
    assert "faked" not in ranks[0]["header"]
    assert f"node 1 ({hosts[expected[1][0]]})" in ranks[0]["header"]


@pytest.mark.parametrize("ranks_per_host", [0, (), (0, 0), (1, 1, 1), (2, -1)])
def test_numbers_of_ranks_that_make_no_job_are_refused(ranks_per_host: int | Sequence[int]) -> None:
    with pytest.raises(ValueError, match="ranks_per_host is"):
        node_map(2, ranks_per_host)


@pytest.mark.parametrize("numbers", [{"hosts": 0}, {"rate_mbit": 0.0}, {"mtu": 100}])
def test_numbers_that_make_no_cluster_are_refused(numbers: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected 1 to 250 hosts"):
        EmulatedCluster(**numbers)


# --- links


def check_traffic(cluster: EmulatedCluster) -> None:
    """Run the ``send`` job; its messages take as long, and put as many bytes on each link, as they have to."""
    before = [(cluster.bytes_sent(host), cluster.bytes_received(host)) for host in range(3)]
    run = cluster.run([*JOBS, "send", str(NBYTES)], ranks_per_host=(2, 1, 1))
    seconds = reported(run)[0]
    after = [(cluster.bytes_sent(host), cluster.bytes_received(host)) for host in range(3)]

    bound = NBYTES * 8 / (cluster.rate_mbit * 1e6)
    shortest, longest = min(seconds), max(seconds)
    assert shortest > 0.9 * bound, (seconds, bound)
    assert longest < 3 * bound or longest < 3 * bound * pace(), (seconds, bound)

    # Sent and received by host, in messages of NBYTES: see jobs.send. What stays within a host is on no link.
    messages_of = [(2, 1), (0.5, 1.5), (0.5, 0.5)]
    for old, new, messages in zip(before, after, messages_of, strict=True):
        for counted, expected in zip((new[0] - old[0], new[1] - old[1]), messages, strict=True):
            payload = expected * NBYTES
            assert payload < counted < 1.02 * payload + LAUNCH_NBYTES


def test_links_are_shaped_and_counted_in_both_directions(cluster: EmulatedCluster) -> None:
    check_traffic(cluster)


def test_flat_collectives_equal_those_on_one_host_with_the_same_nodes(
    cluster: EmulatedCluster,
) -> None:
    nodes = node_map(cluster.hosts, (2, 2), "cyclic")
    job = [*JOBS, "crossing", "flat", "16396", "2"]
    emulated_run = cluster.run(job, ranks_per_host=(2, 2), placement="cyclic")
    faked_run = run_ranks(4, [*job, ",".join(map(str, nodes))], timeout=60)
    found, expected = reported(emulated_run), reported(faked_run)
    assert found == expected
    assert found[0]["nodes"] == "((0, 2), (1, 3))"


# --- how it ends


def test_a_failing_job_ends_and_the_next_one_runs(cluster: EmulatedCluster) -> None:
    failed = cluster.run([*JOBS, "fail"], ranks_per_host=(1, 1), timeout=20, env=NO_GRACE)
    assert failed.returncode != 0
    assert "on purpose" in failed.stderr
    assert len(reported(cluster.run([*JOBS, "nodes"], ranks_per_host=(1, 1)))) == 2


def test_a_hanging_job_is_ended_with_all_it_started(cluster: EmulatedCluster) -> None:
    lines: list[str] = []
    for limit_s in (2.0, 30.0):  # the longer one where the machine is too busy for the job to begin
        with pytest.raises(pytest.fail.Exception, match="not done within") as caught:
            cluster.run([*JOBS, "hang"], ranks_per_host=(2, 1), timeout=limit_s, env=NO_GRACE)
        lines = [line for line in str(caught.value).splitlines() if line.startswith('["pid:[')]
        if lines:
            break
    (namespace,) = set(json.loads(lines[0]))
    assert namespace != os.readlink("/proc/self/ns/pid")
    assert len(inhabitants(namespace)) == 1  # the process that keeps the hosts


def test_nothing_is_left_of_a_cluster_and_the_machine_never_sees_it(possible: None) -> None:
    links = sorted(os.listdir("/sys/class/net"))
    with EmulatedCluster(hosts=2) as cluster:
        ranks = reported(cluster.run([*JOBS, "namespaces"], ranks_per_host=1))
        made = {namespace for rank in ranks for namespace in rank.values()}
        ours = {os.readlink(entry) for entry in Path("/proc/self/ns").iterdir()}
        assert not made & ours
        assert len({rank["net"] for rank in ranks}) == 2
        assert inhabitants(ranks[0]["pid"])
        assert sorted(os.listdir("/sys/class/net")) == links
    assert {namespace: inhabitants(namespace) for namespace in made} == {
        namespace: [] for namespace in made
    }
    mounts = Path("/proc/self/mountinfo").read_text()
    assert not [namespace for namespace in made if namespace in mounts]
    for folder in ("/dev/shm", "/tmp", "/run/netns"):
        assert not list(Path(folder).glob("*host0*"))
    cluster.close()  # again
    with pytest.raises(emulated.ClusterError, match="not up"):
        cluster.run([*JOBS, "nodes"])


def test_nothing_is_left_when_its_owner_is_killed(possible: None) -> None:
    program = (
        "from tests.cluster.emulated import EmulatedCluster\n"
        "with EmulatedCluster(hosts=2) as cluster:\n"
        f"    cluster.run({[*JOBS, 'hang']!r}, ranks_per_host=1, timeout=60)\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=launch_environment(PYTHONPATH=os.fspath(ROOT), HPCZERO_TEST_FORK="0"),
        start_new_session=True,
    )
    try:
        ours, found = os.readlink("/proc/self/ns/pid"), list[str]()

        def ranks_are_there() -> bool:
            found.clear()  # one look sees them or does not: it misses whoever is between two parents
            for process in family(owner.pid):
                with suppress(OSError):  # gone since
                    line = Path(f"/proc/{process.pid}/cmdline").read_bytes()
                    namespace = os.readlink(f"/proc/{process.pid}/ns/pid")
                    if line.endswith(b"\0hang\0") and namespace != ours:
                        found.append(namespace)
            return len(found) >= 3  # the launcher and both

        assert eventually(ranks_are_there)
        (namespace,) = set(found)
        os.kill(owner.pid, signal.SIGKILL)
        assert eventually(lambda: not inhabitants(namespace))
    finally:
        end_family(owner.pid)
        owner.wait()


def test_two_clusters_at_once_do_not_disturb_each_other(cluster: EmulatedCluster) -> None:
    with EmulatedCluster(hosts=3, rate_mbit=RATE_MBIT / 2) as other, ThreadPoolExecutor(2) as pool:
        for check in [pool.submit(check_traffic, each) for each in (cluster, other)]:
            check.result()


# --- where there can be none


def test_why_not_names_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert why_not() == "an emulated cluster needs root"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool in ("ip", "tc") else "/bin/true")
    assert "needs ip and tc" in str(why_not())
    other = write_tool(tmp_path / "mpirun", "#!/bin/sh\necho 'HYDRA build details:'\n")
    monkeypatch.setattr(emulated, "ROOT", tmp_path)
    monkeypatch.setattr(shutil, "which", lambda tool: os.fspath(other))
    assert why_not() == "an emulated cluster needs Open MPI 4, found 'HYDRA build details:'"


@pytest.mark.parametrize("capability", ["sys_admin", "net_admin"])
def test_why_not_says_what_the_kernel_refuses(possible: None, capability: str) -> None:
    ask = "from tests.cluster.emulated import why_not; print(why_not())"
    without = ["setpriv", f"--bounding-set=-{capability}", f"--inh-caps=-{capability}"]
    run = run_command([*without, sys.executable, "-c", ask], timeout=20)
    assert run.returncode == 0, run
    assert run.stdout.startswith("the emulated cluster does not work: ")
    assert "not permitted" in run.stdout


# --- the command


def test_command_shows_the_output_the_bytes_and_the_exit_code(possible: None) -> None:
    options = ["--hosts", "2", "--ranks-per-host", "2,1", "--rate", "500"]
    command = [sys.executable, "-m", "tests.cluster", *options, "--"]
    run = run_command([*command, *JOBS, "part_with", "5"], timeout=30, env=NO_GRACE)
    assert run.returncode == 5, run
    assert json.loads(run.stdout) == ["host0", "host0", "host1"]
    assert "emulated: host1 sent" in run.stderr


def test_command_refuses_more_hosts_in_the_list_than_there_are() -> None:
    words = ["-m", "tests.cluster", "--hosts", "1", "--ranks-per-host", "1,1", "x"]
    run = run_command([sys.executable, *words], timeout=30)
    assert run.returncode == 2
    assert "ranks_per_host is (1, 1)" in run.stderr
