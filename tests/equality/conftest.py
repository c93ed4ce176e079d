"""The comparison that most tests of this folder make."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest

from hpczero import Topology
from hpczero.plan.offload import Offload
from hpczero.zero.update.optimizer_state import state_names
from tests.equality.cases import Case
from tests.equality.reference import (
    Record,
    check_near,
    check_same_bits,
    relative_error,
    train_plain,
    train_sharded,
)
from tests.helpers.cases import EVERYTHING

# Small windows, so that tensors are cut; the copies of the host tier are made on machines without a device, too.
AWAY = [
    (3, Offload("host", "host", "host", window=2**14, buffers=4)),
    (3, Offload("host", window=2**15, buffers=3)),
    (3, Offload("host", "host", "host", window=2**14, buffers=4, fraction=0.5)),
    (2, Offload("host", "host", window=2**14, buffers=3)),
    (1, Offload("host", window=2**14, buffers=6)),
]


def _saves(case: Case, offload: Offload) -> bool:
    """Whether something would rest elsewhere; fp32 without state of the optimizer alone is refused by name."""
    others = (offload.gradients, offload.parameters) != ("device", "device")
    return others or bool(state_names(case.optimizer(case.build())))


@pytest.fixture
def two_nodes(comm) -> Iterator[Topology]:
    """The ranks on two pretended nodes, as even as can be."""
    topology = Topology.create(comm, nodes=[2 * rank // comm.size for rank in range(comm.size)])
    yield topology
    topology.free()


@pytest.fixture
def equals_one_process(topology: Topology) -> Callable[[Case], None]:
    """Train a case at every stage, and on a memory tier, and compare with one process; all must give the same bits.

    Rank 0 alone trains the reference and judges; the other ranks wait for its verdict.
    """

    def check(case: Case) -> None:
        runs = {
            f"stage {stage}, {transport}": train_sharded(
                case, topology, stage=stage, transport=transport
            )
            for stage in case.stages
            for transport in (case.transports if stage == 3 else ("auto",))
        }
        # Where shards are of odd sizes; each rank by itself moves its own.
        for stage, offload in AWAY if EVERYTHING else AWAY[: topology.size == 3]:
            if stage in case.stages and _saves(case, offload):
                runs[f"stage {stage}, {offload.describe()}"] = train_sharded(
                    case, topology, stage=stage, offload=offload
                )
        expected: list[Record] = []
        if topology.is_root:
            expected = train_plain(case, topology.size)
            start, end = case.build().state_dict(), expected[-1].state or {}
            moved = max(relative_error(end[name], value) for name, value in start.items())
            assert moved > 1e-3, "the reference learned nothing: this test would prove nothing"
            clipped = [record.grad_norm > case.max_norm for record in expected]
            assert not any(clipped) or not all(clipped), "clip some steps, not all"
            assert math.isinf(case.max_norm) or any(clipped), "nothing to clip"
        check_near(topology, runs, expected)
        check_same_bits(topology, runs)

    return check
