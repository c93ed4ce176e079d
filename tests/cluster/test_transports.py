"""Transports between real nodes: the same bits by every way, and no silent hang. On the emulated cluster."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cluster.emulated import JOBS, EmulatedCluster, Placement, reported

HOSTS, RATE_MBIT = 2, 1000


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["block", "cyclic"])
def test_every_transport_and_algorithm_trains_to_the_same_bits_whoever_is_late(
    cluster: EmulatedCluster, placement: Placement, tmp_path: Path
) -> None:
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    done = cluster.run([*JOBS, "train"], placement=placement, timeout=120, env=env)
    found = reported(done)
    assert len(found) == 4
    digests = found[0]
    assert len(digests) == 7
    assert len(set(digests.values())) == 1, digests
    assert "nan" not in digests["flat, default"]


def test_rank_that_runs_another_module_is_named_across_nodes(cluster: EmulatedCluster) -> None:
    job, env = [*JOBS, "differ", "other module"], {"HPCZERO_STRICT": "1"}
    done = cluster.run(job, ranks_per_host=1, env=env)
    assert done.returncode not in (0, None), done
    assert "rank 1: all_gather of 'layers.1'" in done.stderr, done


@pytest.mark.machine
@pytest.mark.limit(400)
def test_rank_that_stays_away_is_named_across_nodes(cluster: EmulatedCluster) -> None:
    missing = r"missing: rank 3 is outside of any collective for \d+ s"
    for limit_s in (4, 16, 64):  # on a busy machine ranks are late to come and to answer
        env = {"HPCZERO_TIMEOUT": f"{limit_s}"}
        done = cluster.run([*JOBS, "differ", "late"], timeout=60 + 2 * limit_s, env=env)
        assert done.returncode == 86, done
        assert "hang: " in done.stderr, done
        if re.search(missing, done.stderr):
            break
    assert "hang: all_gather of " in done.stderr, done
    assert re.search(missing, done.stderr), done


def test_activation_arrives_while_its_sender_computes(
    cluster: EmulatedCluster, tmp_path: Path
) -> None:
    """Not at the sender's next call of MPI: that comes once it has arrived, or too late."""
    done = cluster.run([*JOBS, "stages", str(tmp_path)], ranks_per_host=1, timeout=60)
    found = reported(done)
    assert found[0][1:] == [True, True], found


@pytest.mark.machine
def test_doctor_shows_what_was_measured_between_nodes(
    cluster: EmulatedCluster, tmp_path: Path
) -> None:
    doctor = ["-m", "mpi4py", "-m", "hpczero.doctor", "--directory", str(tmp_path)]
    done = cluster.run(doctor, ranks_per_host=1, env={"XDG_CACHE_HOME": str(tmp_path)})
    lines = [line for line in done.stdout.splitlines() if "between nodes" in line]
    assert any("all-gather" in line and "(measured in" in line for line in lines), done
    assert any("reduce-scatter of 16 KiB blocks: " in line and " ms" in line for line in lines)
    assert list(tmp_path.glob("hpczero/nodes-*.json")), "for the next job"
