"""``python -m tests.cluster [options] -- python arguments``: one job on an emulated cluster, for developers.

Shows the output as it comes, ends with the job's exit code, and says at the end what went over each host's link.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from tests.cluster.emulated import EmulatedCluster, node_map, why_not
from tests.helpers.mpirun import ROOT
from tests.helpers.processes import launch_environment

EXIT_CANNOT = 78


def ranks_per_host(text: str) -> int | tuple[int, ...]:
    """``2`` for every host, or ``3,1`` for one after the other."""
    numbers = tuple(int(word) for word in text.split(","))
    return numbers[0] if len(numbers) == 1 else numbers


def main() -> int:
    """Run the job and return its exit code; 78 if there can be no cluster."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.cluster", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument(
        "--ranks-per-host",
        type=ranks_per_host,
        default=2,
        help="one number for all hosts, or one each: 3,1",
    )
    parser.add_argument("--rate", type=float, default=1000.0, help="Mbit/s of each host's link")
    parser.add_argument("--mtu", type=int, default=9000, help="bytes of a packet")
    parser.add_argument("--placement", choices=["block", "cyclic"], default="block")
    parser.add_argument("arguments", nargs="+", help="what follows python: script.py, or -m module")
    options = parser.parse_args()
    try:
        cluster = EmulatedCluster(options.hosts, rate_mbit=options.rate, mtu=options.mtu)
        node_map(options.hosts, options.ranks_per_host)
    except ValueError as error:
        parser.error(str(error))
    reason = why_not()
    if reason:
        sys.stderr.write(f"{reason}\n")
        return EXIT_CANNOT
    with cluster:
        launch = cluster.launch(
            options.arguments,
            ranks_per_host=options.ranks_per_host,
            placement=options.placement,
            cwd=Path.cwd(),
        )
        before = [cluster.bytes_sent(host) for host in range(cluster.hosts)]
        changes = {"PYTHONPATH": os.fspath(ROOT), "OMP_NUM_THREADS": "1", **launch.environment}
        code = subprocess.call(launch.command, env=launch_environment(**changes))
        for host in range(cluster.hosts):
            sent = (cluster.bytes_sent(host) - before[host]) / 1e6
            sys.stderr.write(
                f"emulated: host{host} sent {sent:.2f} MB at {options.rate:g} Mbit/s\n"
            )
    return code


if __name__ == "__main__":
    sys.exit(main())
