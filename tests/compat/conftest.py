"""The comparison that all tests of this folder make."""

from __future__ import annotations

import traceback
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from tests.compat.construct import Construct
from tests.helpers.cases import EVERYTHING
from tests.helpers.parallel import parallel_assert

TRANSPORTS = ("window", "flat", "hierarchical")

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology


@pytest.fixture(scope="session")
def grounds(session_comm: MPI.Intracomm) -> Iterator[dict[str, Topology]]:
    """By transport, a topology on which it does what is its own: every rank a node of its own for hierarchical."""
    from hpczero import Topology

    one = Topology.create(session_comm)
    many = Topology.create(session_comm, nodes=list(range(session_comm.size)))
    yield {"window": one, "flat": one, "hierarchical": many}
    many.free()
    one.free()


def is_tried(construct: Construct, stage: int, transport: str) -> bool:
    """In the core stage 3, which has most to go wrong, and another stage, each on one transport; else all.

    Which goes by the name: a run of all constructs has every pair many times.
    """
    if len(construct.stages) == 1 or EVERYTHING:
        return True
    *others, last = sorted(construct.stages)
    turn = zlib.crc32(construct.name.encode())
    other = others[turn // len(TRANSPORTS) % len(others)]
    tried = {last: turn, other: turn + 1}
    return stage in tried and transport == TRANSPORTS[tried[stage] % len(TRANSPORTS)]


@pytest.fixture
def holds(comm: MPI.Intracomm, grounds: dict[str, Topology]) -> Callable[[Construct], None]:
    """Train a construct at its stages on every transport and judge it against one process."""
    from tests.compat.runner import Outcome, judge, learned, train_plain, train_sharded

    def check(construct: Construct) -> None:
        plain, problem = Outcome(), ""
        if comm.rank == 0 and any(not construct.expects(stage) for stage in construct.stages):
            try:
                plain = train_plain(construct, comm.size)
            except Exception:  # the other ranks wait for the verdict
                problem = f"plain torch refuses it:\n{traceback.format_exc()}"
            else:
                problem = "" if learned(plain) else "the reference learned nothing: proves nothing"
        parallel_assert(comm, not problem, problem)
        found = {
            f"stage {stage}, {transport}": train_sharded(
                construct, topology, stage=stage, transport=transport
            )
            for stage in construct.stages
            for transport, topology in grounds.items()
            if is_tried(construct, stage, transport)
        }
        problems = judge(construct, found, plain, comm.size) if comm.rank == 0 else []
        parallel_assert(comm, not problems, "\n".join(problems[:12]))

    return check
