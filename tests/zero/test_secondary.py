"""The secondary copy: backward gathers parameters inside the node, never old ones, and no bit of a training changes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import hpczero
from hpczero.errors import ConfigError, PlanError
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import (
    MLP,
    adamw,
    mlp_backward,
    raises_on_all,
    tiny_gpt,
    tiny_tokens,
)

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3, 4)]


def pretended(comm: MPI.Intracomm) -> list[int]:
    """Two nodes where the ranks divide; else one rank on each."""
    half = comm.size // 2
    return (
        [rank // half for rank in range(comm.size)] if comm.size % 2 == 0 else [*range(comm.size)]
    )


def built(comm: MPI.Intracomm, mesh: hpczero.Mesh | None = None, **options: Any) -> Any:
    topology = hpczero.Topology.create(comm, pretended(comm), mesh=mesh)
    model = tiny_gpt()
    optimizer = adamw(model)
    hpczero.zeroify(model, optimizer, topology=topology, **{"stage": 3} | options)
    return topology, model, optimizer


def step(model: Any, optimizer: Any, number: int, rank: int, micro: int = 1) -> list[torch.Tensor]:
    """Losses of one step over ``micro`` micro-batches, and the gradients that it takes."""
    losses = []
    for part in range(micro):
        tokens = tiny_tokens(100 * number + 10 * part + rank)
        with hpczero.accumulate(model, part, micro):
            loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
        losses.append(loss.detach())
    gradients = hpczero.full_gradients(model)
    optimizer.step()
    optimizer.zero_grad()
    return [*losses, *gradients.values()]


def closed(topology: Any, model: Any) -> None:
    hpczero.release(model)
    topology.free()


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("transport", ["window", "hierarchical"])
def test_a_training_keeps_every_bit(comm: MPI.Intracomm, transport: str, precision: str) -> None:
    found = []
    for secondary in (False, True):
        topology, model, optimizer = built(
            comm, transport=transport, precision=precision, secondary=secondary
        )
        found.append(
            [t for number in range(4) for t in step(model, optimizer, number, comm.rank, micro=2)]
        )
        closed(topology, model)
    parallel_assert(comm, same(*found))


def test_a_step_asks_other_nodes_once_for_each_unit(comm: MPI.Intracomm) -> None:
    """The tied head is used last in forward and first in backward; all else is gathered twice without the copy."""
    counts: list[Counter[str]] = []
    sent: list[int] = []
    for secondary in (False, True):
        topology, model, optimizer = built(comm, secondary=secondary)
        step(model, optimizer, 0, comm.rank)
        stats = hpczero.sharding(model).collectives.stats
        stats.reset()
        tokens = tiny_tokens(comm.rank)
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        counts.append(Counter(stats.calls))
        sent.append(stats.sent_nbytes["all_gather"] + stats.sent_nbytes["regather"])
        units = hpczero.sharding(model).units
        shards = {unit.spec.name: unit.spec.layout.shard_numel * 4 for unit in units}
        held = hpczero.sharding(model).memory.current.get("secondary", 0)
        nodes, local = topology.num_nodes, topology.local_size
        # The part that a rank has of its node's copy: of every unit as many shards as there are nodes.
        parallel_assert(comm, held == (nodes * sum(shards.values()) if secondary else 0), f"{held}")
        closed(topology, model)
    without, with_copy = counts
    again = without["all_gather"] - len(units)
    parallel_assert(comm, again > 0, f"{without}")
    parallel_assert(comm, with_copy["all_gather"] == len(units), f"{with_copy}")
    parallel_assert(comm, with_copy["regather"] == again, f"{with_copy}")
    spared = (nodes - 1) * (sum(shards.values()) - shards["root"]) if again < len(units) else None
    if spared is None:
        spared = (nodes - 1) * sum(shards.values())
    parallel_assert(comm, sent[0] - sent[1] == spared, f"{sent}, {local} ranks a node")


@pytest.mark.parametrize("how", ["gathered", "load", "no step"])
def test_values_that_change_between_two_passes_are_not_the_old_ones(
    comm: MPI.Intracomm, how: str, tmp_path: Path
) -> None:
    folder = Path(comm.bcast(str(tmp_path)))
    found = []
    for secondary in (False, True):
        topology, model, optimizer = built(comm, secondary=secondary)
        step(model, optimizer, 0, comm.rank)
        saved = hpczero.checkpoint.save(folder / str(secondary), model, optimizer, step=1, extra={})
        step(model, optimizer, 1, comm.rank)
        tokens = tiny_tokens(comm.rank)
        with torch.no_grad():
            model(tokens[:, :-1])  # the copy is of these values
        if how == "gathered":
            with hpczero.gathered(model, modifier_rank=0), torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.5)
        elif how == "load":
            hpczero.checkpoint.load(saved, model, optimizer)
        found.append(step(model, optimizer, 2, comm.rank))
        closed(topology, model)
    parallel_assert(comm, same(*found))


def test_a_unit_that_is_unfrozen_has_one_copy(comm: MPI.Intracomm) -> None:
    held = []
    for late in (True, False):
        topology = hpczero.Topology.create(comm, pretended(comm))
        model = MLP()
        model.layers[1].requires_grad_(not late)
        optimizer = adamw(model)
        hpczero.zeroify(model, optimizer, topology=topology, stage=3, secondary=True)
        for number in range(3):
            if number == 1:
                model.layers[1].requires_grad_(True)
            mlp_backward(model, comm.rank)
            optimizer.step()
            optimizer.zero_grad()
        held.append(hpczero.sharding(model).memory.current["secondary"])
        closed(topology, model)
    parallel_assert(comm, held[0] == held[1], f"{held}")


@pytest.mark.ranks(4)
def test_beside_replicas(comm: MPI.Intracomm) -> None:
    """Two replicas of shards over two nodes each."""
    found = []
    for secondary in (False, True):
        topology = hpczero.Topology.create(
            comm, [0, 1, 2, 3], mesh=hpczero.Mesh(replicate=2, shard=2)
        )
        model = tiny_gpt()
        optimizer = adamw(model)
        hpczero.zeroify(model, optimizer, stage=3, topology=topology, secondary=secondary)
        found.append([t for n in range(3) for t in step(model, optimizer, n, comm.rank)])
        calls = hpczero.sharding(model).collectives.stats.calls
        parallel_assert(comm, bool(calls["regather"]) == secondary, f"{calls}")
        closed(topology, model)
    parallel_assert(comm, same(*found))


def test_what_cannot_have_one_is_refused(comm: MPI.Intracomm) -> None:
    raises_on_all(
        comm, PlanError, "secondary: .* use stage=3", lambda: built(comm, stage=2, secondary=True)
    )
    raises_on_all(
        comm,
        ConfigError,
        "the transport is flat",
        lambda: built(comm, transport="flat", secondary=True),
    )
