"""Which ranks share a machine, whether they outnumber its cores, and what others took of it."""

from __future__ import annotations

import os

import pytest

from scaling.evidence.host import Host, Share, cpus, foreign_share, numbers, oversubscribed


def host(machine: str, *cores: int, cpu: str = "a CPU") -> Host:
    return Host(machine, frozenset(cores), 48, cpu)


def test_ranks_beyond_the_cores_of_a_machine_are_told() -> None:
    shared = [host("a", 0, 1), host("a", 0, 1)]
    assert not oversubscribed([*shared, host("b", 0, 1)])
    assert oversubscribed([*shared, host("a", 0, 1), host("b", 0, 1)])


def test_ranks_that_are_bound_to_cores_of_their_own_do_not_outnumber_them() -> None:
    bound = [host("a", *range(3 * rank, 3 * rank + 3)) for rank in range(16)]
    assert not oversubscribed(bound)
    assert oversubscribed([host("a", 0, 1, 2) for _ in range(16)])


def test_ranks_with_unequal_shares_of_cores_are_on_one_machine() -> None:
    uneven = [host("a", 0), host("a", 1, 2), host("a", 1, 2), host("a", 2)]
    assert numbers(uneven) == [0, 0, 0, 0]
    assert oversubscribed(uneven)  # four ranks, three cores
    assert numbers([host("b", 0), host("a", 0), host("b", 1)]) == [0, 1, 0]


def test_time_of_other_programs_is_what_ranks_did_not_take() -> None:
    def share(machine: str, core: int, own_s: float, machine_s: float) -> Share:
        # bound to other numbers of cores, so that nothing but the machine says who belongs together
        return Share(host(machine, *range(core, 3)), own_s, machine_s, 10.0)

    quiet = [share("a", 0, 9.0, 18.5), share("a", 1, 9.5, 18.4)]
    assert foreign_share(quiet) == 0.0
    assert foreign_share([*quiet, share("b", 0, 5.0, 9.0)]) == pytest.approx(4.0 / (10.0 * 48))


def test_processors_of_all_machines_are_named() -> None:
    assert cpus([host("a", 0), host("b", 0, cpu="another")]) == "a CPU and another"


def test_this_process_is_on_a_machine_with_cores() -> None:
    here = Host.here()
    assert here.machine == Host.here().machine
    assert here.cores == os.sched_getaffinity(0)
    assert here.all_cores >= len(here.cores)
