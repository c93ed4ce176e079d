"""Rounds, messages and launches that are charged, against the plan, the sum's cuts, a simulation and measured rows."""

from __future__ import annotations

import dataclasses
import json
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpczero.comm.algorithms import steps
from hpczero.kernels.source import MOST_BLOCKS
from hpczero.kernels.tree_sum import levels
from hpczero.models.config import PRESETS, GPTConfig
from hpczero.plan.footprint import IN_FLIGHT, footprint_of, gather_messages, rail_messages
from hpczero.predict.job import Job
from hpczero.predict.machine import Machine, load_machine
from hpczero.predict.model import predict
from hpczero.predict.network import NOTHING, Network, RailTimes, launches
from scaling.evidence.record import ROOT

H100 = load_machine("dgx-h100")
SMALL = GPTConfig(vocab_size=4096, context=256, layers=4, hidden=512, heads=8)
MIB = 2**20


def rails(
    machine: Machine = H100, nodes: int = 50, local: int = 8, *, spans: bool = True
) -> RailTimes:
    return RailTimes(machine, nodes, local, 4 * MIB, spans=spans)


def free(machine: Machine = H100, **changes: float) -> Machine:
    """The machine with nothing charged on the host, and with ``changes``."""
    values = {"round_host": 0.0, "message_host": 0.0, "sum_host": 0.0, **changes}
    return dataclasses.replace(machine, **values)  # type: ignore[arg-type]


# --- counts


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize(
    ("ranks", "local"), [(16, 8), (24, 8), (56, 8), (400, 8), (400, 16), (5, 1)]
)
def test_messages_of_a_step_are_those_of_the_plan(
    stage: int, accumulation: int, ranks: int, local: int
) -> None:
    machine = dataclasses.replace(H100, ranks_per_node=local)
    case = Job.plain(
        SMALL, machine, ranks, stage, "bf16", 1, accumulation=accumulation, transport="ipc"
    )
    footprint = footprint_of("ipc", ranks=ranks, local_size=local)
    traffic = case.plan.traffic(footprint=footprint, micro_steps=accumulation)
    assert predict(case).messages == traffic.messages > 0


def test_messages_of_a_host_are_in_its_short_rounds() -> None:
    host = dataclasses.replace(H100, shares_memory=True)
    case = Job.plain(SMALL, host, 24, 3, "fp32", 1, transport="window")
    traffic = case.plan.traffic(footprint=case.footprint)
    assert predict(case).messages == traffic.messages
    device = Job.plain(SMALL, H100, 24, 3, "fp32", 1, transport="window")
    assert predict(device).messages < traffic.messages


@given(st.integers(1, 30_000))
def test_launches_of_a_sum_are_the_cuts_of_its_tree(blocks: int) -> None:
    over_nodes = levels([[block] for block in range(blocks)], MOST_BLOCKS)
    assert launches(blocks) == sum(map(len, over_nodes))
    if blocks < 300:
        in_node = levels([range(blocks)], MOST_BLOCKS)
        assert launches(blocks) == sum(map(len, in_node))


def test_a_round_launches_what_the_transport_does() -> None:
    shard, item = 1_132_672, 2
    rounds = rail_messages(shard, 50, 4, 4 * MIB) // 49
    assert rounds == 5
    # 50 nodes are two subtrees and the tree over them; eight rows with gaps are one launch
    assert rails().reduce(shard, item, 4).launches == rounds * (3 + 1)
    assert rails().reduce(shard, 4, 4).launches == rounds * (3 + 1)
    # of rows a launch takes fewer: 24 ranks of a node are two subtrees and the tree over them
    assert rails(local=24).reduce(shard, item, 4).launches == rounds * (3 + 3)
    # partial sums that are rounded are one operation more
    narrow = rail_messages(shard, 50, 2, 4 * MIB) // 49
    assert rails().reduce(shard, item, 2).launches == narrow * (3 + 1 + 1)
    # one round has no gaps
    assert rails().reduce(4096, item, 4).launches == 3 + 1
    # ranks that do not see each other's memory ask for their parts node by node
    assert rails(spans=False).reduce(shard, item, 4).launches == rounds * (3 + 50)


# --- time


def turns(rail: RailTimes, rounds: int, nbytes: int) -> float:
    """Steps one after the other, as the algorithm starts them: on the host, then on the network, then a latency."""
    machine, host, wire = rail.machine, 0.0, 0.0
    under_way: deque[float] = deque()
    for _ in range(rounds):
        for distances in steps(rail.nodes):
            while len(under_way) >= IN_FLIGHT:
                host = max(host, under_way.popleft())
            host += len(distances) * machine.message_host
            wire = max(wire, host) + len(distances) * nbytes / rounds / machine.rail_rate
            under_way.append(wire + machine.nic_latency)
    return max(under_way)


@pytest.mark.parametrize("nodes", [2, 3, 6, 17, 33, 65])
@pytest.mark.parametrize("message_host", [0.0, 1e-6, 1e-4])
@pytest.mark.parametrize("nic_latency", [0.0, 1e-5, 1e-2])
@pytest.mark.parametrize("nbytes", [64, 2**16, 2**24])
def test_steps_take_as_long_as_when_they_are_taken_one_by_one(
    nodes: int, message_host: float, nic_latency: float, nbytes: int
) -> None:
    rail = rails(free(message_host=message_host, nic_latency=nic_latency), nodes)
    rounds = gather_messages(nbytes, nodes, 4 * MIB) // (nodes - 1)
    expected = turns(rail, rounds, nbytes)
    assert rail.gather(nbytes).seconds == pytest.approx(expected, rel=0.02)


def test_without_latency_and_host_only_bytes_count() -> None:
    rail = rails(free(nic_latency=0.0), 50)
    assert rail.gather(7 * MIB).seconds == pytest.approx(49 * 7 * MIB / H100.rail_rate)
    assert rails(nodes=1).gather(MIB) == NOTHING
    assert rails(nodes=1).reduce(1000, 2, 4).messages == 0
    assert rails().gather(0) == rails().reduce(0, 2, 4) == NOTHING


def test_host_time_is_rounds_messages_and_launches() -> None:
    machine = free(round_host=1e-3, message_host=1e-5, sum_host=1e-4, dispatch=1e-6)
    found = rails(machine).reduce(1_132_672, 2, 4)
    assert found.messages == 5 * 49
    assert found.host_s == pytest.approx(5 * (1e-3 + 49e-5 + 4e-4))
    assert found.host_s <= found.seconds
    # 50 parts, each asked for and summed
    apart = rails(machine, spans=False).reduce(1_132_672, 2, 4)
    assert apart.host_s == pytest.approx(5 * (50 * 1e-3 + 49e-5 + 53e-4))
    alone = rails(machine, local=1).reduce(4096, 2, 2)
    assert alone.host_s == pytest.approx(1e-3 + 49e-5 + 4e-4 + 1e-6)  # rounded again to travel


def test_a_host_that_computes_pays_for_no_launch() -> None:
    host = dataclasses.replace(H100, shares_memory=True, round_host=0.0, message_host=0.0)
    case = Job.plain(SMALL, host, 24, 3, "fp32", 1, transport="window")
    found = predict(case)
    assert (found.host_s, found.launches) == (0.0, 0)
    assert found.messages > 0


def test_host_time_of_a_hidden_collective_hides_with_it() -> None:
    def step(message_host: float, batch: int) -> tuple[float, float, float]:
        machine = free(message_host=message_host)
        case = Job.plain(PRESETS["gpt-8b"], machine, 400, 3, "bf16", batch, transport="ipc")
        found = predict(case)
        return found.step_s, found.communication_s, found.host_s

    (without, _, nothing), (hidden, _, host) = step(0.0, 64), step(1e-6, 64)
    assert nothing == 0.0 < host
    assert hidden - without < 0.1 * host
    # what is longer than a block's work shows, whatever it is
    (fast, bare, _), (slow, longer, much) = step(0.0, 1), step(1e-3, 1)
    assert slow - fast == pytest.approx(longer - bare)
    assert slow - fast > 0.7 * much


def test_flat_pays_its_latencies_in_each_round() -> None:
    case = Job.plain(SMALL, free(), 16, 0, "fp32", 1, transport="flat")
    slower = dataclasses.replace(case, machine=free(nic_latency=H100.nic_latency + 1.0))
    # rounds of 32 MiB over 16 ranks hold 524,288 elements of each shard
    for shard, rounds in ((524_288, 1), (524_289, 2)):
        more = Network(slower).reduce(shard).seconds - Network(case).reduce(shard).seconds
        assert more == pytest.approx(8 * rounds)


# --- against what was measured


ROWS = ROOT / "scaling/results/amd-epyc-2-cores/hostcost.jsonl"
MEASURED = [
    row
    for line in ROWS.read_text(encoding="utf-8").splitlines()
    if (row := json.loads(line))["kind"] == "case" and row["tree"] == "this"
]


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row['ranks']}-{row['ranks_per_node']}")
def test_what_is_charged_is_what_was_measured(row: dict[str, float]) -> None:
    """The machine file's two numbers are near every measured case, and counts are equal."""
    local = int(row["ranks_per_node"])
    machine = dataclasses.replace(H100, ranks_per_node=local)
    case = Job.plain(PRESETS["gpt-60b"], machine, int(row["ranks"]), 3, "bf16", 4, transport="ipc")
    found = predict(case)
    assert found.messages == row["messages"]
    assert found.launches == row["kernels"] + row["operations"]
    # of each launch 20 us are assumed, and all of an operation of torch
    assumed = 20e-6 * row["kernels"] + H100.dispatch * row["operations"]
    measured = row["gather_s"] + row["exchange_s"]
    assert found.host_s - assumed == pytest.approx(measured, rel=0.25)


# --- several NICs, and switches


def test_a_rank_with_nics_of_its_own_shares_them_with_as_many_as_use_them() -> None:
    """Six ranks, four NICs, one of them next to each rank: two NICs serve two ranks each, and bind."""
    shared = dataclasses.replace(H100, ranks_per_node=6, nics=4, nic_rate=12e9, nics_of_rank=0)
    assert shared.rail_rate == pytest.approx(4 * 12e9 / 6)
    assert dataclasses.replace(shared, nics_of_rank=1).rail_rate == pytest.approx(12e9 / 2)
    assert dataclasses.replace(shared, nics_of_rank=2).rail_rate == pytest.approx(2 * 12e9 / 3)
    near = dataclasses.replace(shared, nics_of_rank=1)
    slow, fast = (free(each) for each in (near, shared))
    nbytes = 50 * MIB
    times = [
        rails(each, nodes=2).gather(nbytes).seconds - H100.nic_latency for each in (slow, fast)
    ]
    assert times[0] / times[1] == pytest.approx(8 / 6, rel=0.02)


def test_each_level_of_switches_adds_two_hops_to_the_latency_of_a_job() -> None:
    tree = dataclasses.replace(H100, leaf_nodes=16, hop_latency=1e-6)
    added = [tree.reaching(nodes).nic_latency - H100.nic_latency for nodes in (1, 16, 17, 256, 257)]
    assert added == pytest.approx([0, 0, 2e-6, 2e-6, 4e-6])
    small, large = (Job.plain(SMALL, tree, ranks, 3, "bf16", 1) for ranks in (128, 136))
    assert small.machine.nic_latency == H100.nic_latency
    assert large.machine.nic_latency == pytest.approx(H100.nic_latency + 2e-6)
    again = dataclasses.replace(large, stage=2)
    assert again.machine.nic_latency == large.machine.nic_latency
    assert (
        predict(large).communication_s
        > predict(dataclasses.replace(large, machine=H100)).communication_s
    )
