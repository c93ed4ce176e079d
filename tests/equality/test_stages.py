"""Stages are one code with one order of additions: they give the same bits, whatever precision, program and nodes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hpczero import Precision, Topology
from tests.equality import cases, models
from tests.equality.cases import Case, gpt_case
from tests.equality.reference import Record, check_same_bits, train_sharded
from tests.helpers.cases import chequered
from tests.helpers.late import LateAccelerator

pytestmark = pytest.mark.mpi


@pytest.fixture
def interleaved_nodes(comm):
    """Two pretended nodes in turn, so that ranks of a node do not follow each other."""
    topology = Topology.create(comm, nodes=[rank % 2 for rank in range(comm.size)])
    yield topology
    topology.free()


def clipped_case(program: cases.Program, steps: int) -> Case:
    """Clipped training with dropout and recomputation."""
    build = lambda: models.gpt(dropout=0.1, checkpoint_activations=True)  # noqa: E731
    changes = {"program": program, "optimizer": cases.adamw, "max_norm": 4.5, "steps": steps}
    return gpt_case(build, **changes)


def all_stages(
    topology: Topology,
    program: str,
    precision: str | Precision,
    transports: Sequence[str] = ("auto",),
) -> dict[str, list[Record]]:
    """A clipped training at every stage; the stages must agree in every bit.

    Of several transports each stage runs on every second one, in the other precision on the others.
    """
    other = precision not in ("fp32", Precision())
    case = clipped_case(cases.PROGRAMS[program], steps=4)
    runs = {
        f"stage {stage}, {transport}": train_sharded(
            case, topology, stage=stage, precision=precision, transport=transport
        )
        for stage, transport in chequered(case.stages, transports, turn=other)
    }
    check_same_bits(topology, runs)
    return runs


@pytest.mark.parametrize("program", cases.PROGRAMS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_stages_give_the_same_bits(topology, precision, program):
    runs = all_stages(topology, program, precision)
    losses = [record.losses for record in next(iter(runs.values()))]
    assert len(set(losses)) == len(losses), "the losses never change"


@pytest.mark.parametrize("program", ["one backward", "accumulation without sync"])
@pytest.mark.parametrize(
    "precision", [Precision(), Precision(param="bf16", reduce="bf16")], ids=str
)
@pytest.mark.mpi(min_size=2)
def test_stages_give_the_same_bits_on_two_nodes(two_nodes, precision, program):
    all_stages(two_nodes, program, precision)


@pytest.mark.ranks(4)
def test_stages_give_the_same_bits_where_nodes_take_turns(interleaved_nodes):
    all_stages(interleaved_nodes, "accumulation", "bf16")


@pytest.mark.worth("transports give the same bits")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.ranks(2, 3, 4)
def test_transports_give_the_same_bits_on_one_node(topology, precision):
    all_stages(topology, "accumulation", precision, ("flat", "hierarchical", "window", "ipc"))


@pytest.mark.worth("transports give the same bits")
@pytest.mark.parametrize(
    "precision", [Precision(), Precision(param="bf16", reduce="bf16")], ids=str
)
@pytest.mark.ranks(2, 4)
def test_transports_give_the_same_bits_on_two_nodes(two_nodes, precision):
    all_stages(two_nodes, "accumulation", precision, ("flat", "hierarchical", "window", "ipc"))


@pytest.mark.ranks(4)
def test_transports_give_the_same_bits_where_nodes_take_turns(interleaved_nodes):
    all_stages(interleaved_nodes, "one backward", "bf16", ("flat", "window"))


@pytest.mark.ranks(4)
def test_transports_give_the_same_bits_on_nodes_of_one_rank(comm):
    topology = Topology.create(comm, nodes=list(range(comm.size)))
    all_stages(topology, "one backward", "fp32", ("flat", "window"))
    topology.free()


@pytest.mark.worth("devices whose copies are late")
@pytest.mark.parametrize(("precision", "aware"), [("fp32", "0"), ("bf16", "1")])
@pytest.mark.ranks(2, 4)
def test_a_device_whose_copies_are_late_gives_the_same_bits(
    two_nodes, precision, aware, monkeypatch
):
    """Staged or given to MPI, peers' memory or messages, on a thread of its own; two nodes of one rank, or of two."""
    monkeypatch.setenv("HPCZERO_GPU_AWARE", aware)
    case = clipped_case(cases.accumulate, steps=3)
    late = [(name, LateAccelerator()) for name in ("flat", "hierarchical", "ipc", "auto")]
    runs = {
        f"stage {stage}, {name}, {device and device.describe()}": train_sharded(
            case, two_nodes, stage=stage, precision=precision, transport=name, device=device
        )
        for stage, (name, device) in [
            (0, ("flat", None)),
            *chequered(case.stages, late, turn=precision == "bf16"),
        ]
    }
    check_same_bits(two_nodes, runs)
