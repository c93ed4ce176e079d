"""The network model of the simulated job: programs of a few calls, whose times are found by hand."""

from __future__ import annotations

import dataclasses

import pytest

from hpczero.job.mesh import Mesh
from scaling.simulate.programs import (
    MAIN,
    Call,
    Entry,
    OrderError,
    Places,
    Post,
    Program,
    Receive,
    Send,
    Work,
    check,
)
from scaling.simulate.replay import Links, Network, Part, replay


def by_hand(*lanes: list[Entry], **comms: tuple[int, ...]) -> list[Program]:
    return [Program(rank, {MAIN: entries}, comms) for rank, entries in enumerate(lanes)]


def places_of(ranks: int, local: int) -> Places:
    return Places(Mesh.of(ranks), local)


def test_ranks_that_wait_for_each_other_for_ever_are_named() -> None:
    first, second = (Call(comm, "barrier", "", "bytes", 0) for comm in ("one", "other"))
    programs = by_hand([first, second], [second, first], one=(0, 1), other=(0, 1))
    check(programs)
    with pytest.raises(
        OrderError, match=r"2 ranks wait for each other.* rank 0 \(main, entry 1\) waits in barrier"
    ):
        replay(programs, places_of(2, 1), Network.none())


def test_a_call_takes_its_bytes_over_the_slowest_link() -> None:
    network = dataclasses.replace(Network.none(), nic_rate=1e6, nics=1, nic_latency=0.5)
    call = Call("all", "all_gather", "u", "float32", 1000, sent=1000)
    lanes: list[list[Entry]] = [[Work(host_s=2.0 * rank), call] for rank in range(3)]
    outcome = replay(by_hand(*lanes, all=(0, 1, 2)), places_of(3, 1), network)
    # all wait for the last, which comes at 4 s; two blocks leave each rank
    assert outcome.step_s == pytest.approx(4.0 + max(2 * 1000 / 1e6, 0.5))
    assert outcome.spent[0]["other ranks"] == pytest.approx(4.0)
    assert outcome.spent[2].get("other ranks", 0.0) == 0.0
    assert outcome.between_nbytes == [2000] * 3


def test_ranks_of_a_node_share_its_links() -> None:
    network = dataclasses.replace(Network.none(), nic_rate=1e6, nics=1)
    call = Call("rail", "all_gather", "u", "float32", 10**6, sent=10**6)
    programs = [
        Program(rank, {MAIN: [call]}, {"rail": (rank % 2, rank % 2 + 2)}) for rank in range(4)
    ]
    assert replay(programs, places_of(4, 2), network).step_s == pytest.approx(2.0)
    alone = [*programs]
    for rank in (1, 3):
        alone[rank] = dataclasses.replace(programs[rank], lanes={MAIN: []})
    assert replay(alone, places_of(4, 2), network).step_s == pytest.approx(1.0)


def test_streams_that_come_and_go_share_a_part() -> None:
    links = Links()
    ends: dict[str, float] = {}
    link = Part(10.0)
    links.start({link: 1}, 30.0, lambda: ends.update(long=links.now))
    links.later(1.0, lambda: links.start({link: 1}, 10.0, lambda: ends.update(short=links.now)))
    links.run()
    # alone for 1 s, together for 2 s, alone again for 1 s
    assert ends == pytest.approx({"short": 3.0, "long": 4.0})
    assert link.busy == pytest.approx(4.0)


def test_a_long_message_waits_until_it_is_expected_and_a_short_one_does_not() -> None:
    network = dataclasses.replace(Network.none(), nic_rate=1e6, nics=1, eager_nbytes=1000)

    def step(nbytes: int) -> float:
        pair = {"p": (0, 1)}
        sender: list[Entry] = [Send("p", 1, 7, nbytes, "float32", "x")]
        taker: list[Entry] = [
            Work(1.0),
            Post("p", 0, 7),
            Receive("p", 0, 7, nbytes, "float32", "x"),
        ]
        programs = [Program(0, {MAIN: sender}, pair), Program(1, {MAIN: taker}, pair)]
        check(programs)
        return replay(programs, places_of(2, 1), network).step_s

    assert step(1000) == pytest.approx(1.0)
    assert step(10**6) == pytest.approx(2.0)


def test_work_on_shared_processors_takes_turns() -> None:
    network = dataclasses.replace(Network.none(), cores=2, one_host=True)
    lanes: list[list[Entry]] = [[Work(host_s=1.0)] for _ in range(6)]
    programs = by_hand(*lanes)
    assert replay(programs, places_of(6, 2), network).step_s == pytest.approx(3.0)
