"""Offload: bytes that move and bytes that stay are those that the plan foretells."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import hpczero
from hpczero import Offload, Precision
from hpczero.plan.offloaded import OffloadedPlan
from hpczero.plan.precision import LossScale
from hpczero.zero.units.away_shard import GRADIENT, MIRROR, VALUES
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import MLP, adamw, mlp_backward, tiny_gpt, zeroified

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3)]

WINDOW = 2**14
FP16 = Precision(param="fp16", loss_scale=LossScale(initial=8.0))  # no step is skipped
STAGES_AND_PARTS = [
    (1, "device", "device", "bf16"),
    (2, "disk", "device", "fp32"),
    (3, "device", "device", "bf16"),
    (3, "disk", "device", "bf16"),
    (3, "disk", "disk", "fp32"),
    (3, "disk", "disk", "bf16"),
    (3, "device", "disk", FP16),
]


@pytest.mark.parametrize(("stage", "gradients", "parameters", "precision"), STAGES_AND_PARTS)
@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("synced", [1, 2])
def test_bytes_of_a_step_are_those_of_the_plan(
    comm: MPI.Intracomm,
    topology: Topology,
    folder: Path,
    synced: int,
    fraction: float,
    stage: int,
    gradients: Any,
    parameters: Any,
    precision: Any,
) -> None:
    model = MLP()
    offload = Offload("disk", gradients, parameters, folder, WINDOW, 4, fraction=fraction)
    with zeroified(
        model, adamw(model), stage=stage, topology=topology, precision=precision, offload=offload
    ) as sharding:
        (optimizer,) = sharding.optimizers
        store, planned = sharding.away.store, OffloadedPlan(sharding.plan, offload)
        assert store is not None
        parallel_assert(comm, store.tier.staging_nbytes == planned.staging_nbytes)
        for step in range(3):
            before = store.tier.traffic.total
            for _ in range(synced):
                mlp_backward(model, comm.rank)
            hpczero.clip_grad_norm_(model, 0.05)
            optimizer.step()
            optimizer.zero_grad()
            moved = store.tier.traffic.total - before
            expected = planned.traffic(
                rank=comm.rank, micro_steps=synced, synced=synced, first=step == 0
            )
            found = (moved.read_nbytes, moved.written_nbytes)
            wanted = (expected.read_nbytes, expected.written_nbytes)
            parallel_assert(comm, found == wanted, f"step {step}: {found}, {wanted}")


def test_everything_on_disk_moves_forty_bytes_for_an_element_and_the_optimizer_twenty_four() -> (
    None
):
    plan = hpczero.Plan.build(
        torch.nn.Linear(1024, 1024, bias=False), num_shards=1, stage=3, rule=lambda model: []
    )
    everything = OffloadedPlan(plan, Offload("disk", "disk", "disk", "anywhere"))
    assert everything.traffic().nbytes == 40 * 1024**2
    bf16 = hpczero.Plan.build(
        torch.nn.Linear(1024, 1024, bias=False),
        num_shards=1,
        stage=3,
        precision="bf16",
        rule=lambda model: [],
    )
    assert OffloadedPlan(bf16, Offload("disk")).traffic().nbytes == 24 * 1024**2
    assert everything.nbytes == 16 * 1024**2


@pytest.mark.parametrize("precision", ["bf16", FP16, "fp32"], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("micro_steps", [1, 3])
def test_passes_read_two_bytes_of_an_element_and_steps_write_two_more(
    comm: MPI.Intracomm, topology: Topology, precision: Any, micro_steps: int
) -> None:
    model = MLP((7, 131, 97, 3))  # shards of several windows
    half = precision != "fp32"
    offload = Offload("host", "host", "host", window=WINDOW, buffers=4)
    with zeroified(
        model, adamw(model), stage=3, topology=topology, precision=precision, offload=offload
    ) as sharding:
        (optimizer,) = sharding.optimizers
        store, planned = sharding.away.store, OffloadedPlan(sharding.plan, offload)
        assert store is not None
        for _ in range(3):
            before = store.tier.traffic.parts
            for micro in range(micro_steps):
                if micro < micro_steps - 1:
                    with hpczero.no_sync(model):
                        mlp_backward(model, comm.rank)
                else:
                    mlp_backward(model, comm.rank)
            optimizer.step()
            optimizer.zero_grad()
        after = store.tier.traffic.parts
        moved = {name: flow - before[name] for name, flow in after.items()}
        numel = sum(unit.spec.layout.shard_numel for unit in sharding.units)
        part = MIRROR if half else VALUES
        stepped = moved[VALUES].written_nbytes // 4
        passes = 2 * micro_steps * numel * (2 if half else 4)
        read = passes + (0 if half else 4 * stepped)
        parallel_assert(comm, moved[part].read_nbytes == read, f"{moved}")
        written = (2 if half else 4) * stepped
        parallel_assert(comm, moved[part].written_nbytes == written, f"{moved}")
        parallel_assert(comm, moved[VALUES].read_nbytes == (4 * stepped if half else read))
        parallel_assert(comm, moved[GRADIENT].written_nbytes == 4 * numel)
        parallel_assert(comm, (MIRROR in moved) == half)
        total = sum(flow.read_nbytes + flow.written_nbytes for flow in moved.values())
        expected = planned.traffic(rank=comm.rank, micro_steps=micro_steps)
        parallel_assert(comm, total == expected.nbytes, f"{total}, {expected}")
        shards = [unit.away for unit in sharding.units if unit.away is not None]
        kept = sum(place.record.nbytes for shard in shards for place in shard.places)
        parallel_assert(comm, kept == planned.nbytes, f"{kept} {planned.nbytes}")
        parallel_assert(comm, kept == (18 if half else 16) * numel)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_step_in_half_precision_moves_thirty_eight_bytes_for_an_element(precision: str) -> None:
    plan = hpczero.Plan.build(
        torch.nn.Linear(1024, 1024, bias=False),
        num_shards=1,
        stage=3,
        precision=precision,
        rule=lambda model: [],
    )
    planned = OffloadedPlan(plan, Offload("disk", "disk", "disk", "anywhere"))
    moved = planned.traffic()
    assert (moved.read_nbytes, moved.written_nbytes) == (20 * 1024**2, 18 * 1024**2)
    assert planned.traffic(micro_steps=4).nbytes == (38 + 3 * 4) * 1024**2
    assert planned.nbytes == 18 * 1024**2  # master, gradient, two states, and the copy
    host = OffloadedPlan(plan, Offload("host", "host", "host", step="host")).traffic()
    assert (host.read_nbytes, host.written_nbytes) == (4 * 1024**2, 4 * 1024**2)


@pytest.mark.parametrize(("stage", "gradients", "parameters", "precision"), STAGES_AND_PARTS)
@pytest.mark.parametrize("transport", ["flat", "window"])
@pytest.mark.parametrize("fraction", [1.0, 0.7, 0.2])
def test_bytes_held_equal_the_plan(
    comm: MPI.Intracomm,
    topology: Topology,
    folder: Path,
    transport: str,
    fraction: float,
    stage: int,
    gradients: Any,
    parameters: Any,
    precision: Any,
) -> None:
    model = tiny_gpt(layers=4, hidden=64, heads=2, context=8, vocab_size=96)
    optimizer = adamw(model)
    offload = Offload("disk", gradients, parameters, folder, WINDOW, 4, fraction=fraction)
    options: dict[str, Any] = {"stage": stage, "precision": precision, "topology": topology}
    with zeroified(model, optimizer, transport=transport, offload=offload, **options) as sharding:
        batch = torch.randint(96, (1, 8), generator=torch.Generator().manual_seed(comm.rank))
        for _ in range(2):
            model(batch, batch).backward()
            sharding.memory.reset_peak()
            optimizer.step()
            optimizer.zero_grad()
        memory = sharding.memory
        memory.reset_peak()
        model(batch, batch).backward()
        planned = OffloadedPlan(sharding.plan, offload)
        plan = planned.memory(sharding.collectives.footprint)
        held = {
            "parameters": (memory.current.get("parameters", 0), plan.parameters),
            "master": (memory.current.get("master", 0), plan.master),
            "unsharded": (memory.peak.get("unsharded", 0), plan.unsharded),
            "optimizer": (sharding.optimizer_nbytes(), plan.optimizer),
            "gradients": (memory.peak.get("gradients", 0), plan.gradients),
        }
        if transport == "window":  # how long a peer still uses the unit before is a matter of time
            most = held.pop("unsharded")
            parallel_assert(comm, bool(most[1]) <= most[0] <= most[1], f"unsharded: {most}")
        wrong = {name: pair for name, pair in held.items() if not near(*pair)}
        parallel_assert(comm, not wrong, f"ledger and plan differ: {wrong}")


def near(found: int, planned: int) -> bool:
    """Up to what memory is rounded to."""
    return abs(found - planned) <= 0.02 * planned + 256
