"""Bytes of optimizer state that the plan command says, and those that training holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from hpczero.models.config import GPTConfig
from hpczero.plan.__main__ import PlanOptions, build_report
from hpczero.plan.memory import STATE_BYTES
from tests.helpers.parallel import parallel_assert

if TYPE_CHECKING:
    from mpi4py import MPI

    import hpczero


SIZES = {"layers": 2, "hidden": 24}
OPTIONS = {**SIZES, "vocab": 61, "sequence": 8, "heads": 2}


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", STATE_BYTES)
def test_state_that_the_plan_command_says_is_what_training_holds_to_the_byte(
    comm: MPI.Intracomm, topology: hpczero.Topology, name: str
) -> None:
    """At every stage, of the model that the options describe; its units do not divide."""
    options = PlanOptions(
        ranks=comm.size,
        memory="1GB",
        precision="fp32",
        optimizer=cast("Any", name),
        **cast("Any", OPTIONS),
    )
    report = build_report(options).as_json()
    rows = cast("list[dict[str, Any]]", report["stages"])
    import hpczero

    kind = {"adamw": torch.optim.AdamW, "adamw8bit": hpczero.optim.AdamW8bit}[name]
    wrong = []
    for stage, row in enumerate(rows):
        with trained(topology, kind, stage) as sharding:
            held = comm.allgather(sharding.optimizer_nbytes())
        if held[0] != row["memory"]["optimizer"] or max(held) != held[0]:
            wrong.append(f"stage {stage}: {held} held, {row['memory']['optimizer']} planned")
    parallel_assert(comm, report["optimizer"] == name and not wrong, f"{wrong}")


@pytest.mark.mpi
@pytest.mark.ranks(2)
@pytest.mark.parametrize(("momentum", "nbytes"), [(0.0, 0), (0.9, 4)])
def test_state_of_sgd_is_planned_to_the_byte(
    comm: MPI.Intracomm, topology: hpczero.Topology, momentum: float, nbytes: int
) -> None:
    for stage in range(4):
        with trained(topology, torch.optim.SGD, stage, momentum=momentum) as sharding:
            planned = sharding.plan.memory(optimizer_bytes=nbytes).optimizer
            held = comm.allgather(sharding.optimizer_nbytes())
        parallel_assert(comm, held[0] == max(held) == planned, f"stage {stage}: {held}, {planned}")


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_state_in_8_bits_is_decoded_of_one_unit_at_a_time_as_planned(
    comm: MPI.Intracomm, topology: hpczero.Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    import hpczero

    taken: list[int] = []
    right = torch.optim.AdamW.step.__wrapped__  # type: ignore[attr-defined]

    def watched(optimizer: torch.optim.Optimizer) -> Any:
        pieces = [p for group in optimizer.param_groups for p in group["params"]]
        states = [v for p in pieces for v in dict.get(optimizer.state, p, {}).values()]
        memory = {v.data_ptr(): v for v in states if isinstance(v, torch.Tensor) and v.dim()}
        whole = {id(v._base): v._base for v in memory.values() if v._base is not None}
        taken.append(sum(base.nbytes for base in whole.values()))
        return right(optimizer)

    for stage in range(4):
        with trained(topology, hpczero.optim.AdamW8bit, stage, steps=1) as sharding:
            update = sharding.step.steppers[0].update
            monkeypatch.setattr(update, "_method", watched)
            taken.clear()
            step(sharding.model)
            planned = sharding.plan.memory(optimizer_bytes=STATE_BYTES["adamw8bit"])
        parallel_assert(comm, max(taken) == planned.stepping, f"stage {stage}: {taken}, {planned}")
        total = planned.states + max(planned.unsharded, planned.stepping) + planned.exchange
        parallel_assert(comm, planned.total == total)


@contextmanager
def trained(
    topology: hpczero.Topology,
    kind: type[torch.optim.Optimizer],
    stage: int,
    *,
    steps: int = 2,
    **options: Any,
) -> Iterator[hpczero.Sharding]:
    """A GPT of these sizes after some steps."""
    import hpczero
    from hpczero.models.gpt import GPT

    model = GPT(GPTConfig(heads=2, vocab_size=61, context=8, **cast("Any", SIZES)))
    optimizer = kind(model.parameters(), lr=1e-3, **options)  # type: ignore[call-arg]
    hpczero.zeroify(model, optimizer, stage=stage, topology=topology, transport="flat")
    for _ in range(steps):
        step(model)
    yield hpczero.sharding(model)
    hpczero.release(model)


def step(model: torch.nn.Module) -> None:
    """One, on some tokens."""
    import hpczero

    tokens = torch.zeros((2, 8), dtype=torch.int64)
    model(tokens, tokens).backward()
    optimizer = hpczero.sharding(model).optimizer
    assert optimizer is not None
    optimizer.step()
    optimizer.zero_grad()
