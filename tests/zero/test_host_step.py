"""The host's own step on what rests in its memory: the bits of an update in memory, beside a device that is late.

The device is the late twin: what is copied without a wait behind it gives wrong bits. Its arithmetic is the host's, so
both sides round alike.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import hpczero
from hpczero import Offload
from hpczero.errors import PlanError, StepError, TierError
from hpczero.plan.offloaded import OffloadedPlan
from hpczero.tier import InPlaceTier
from hpczero.tier.host import Opening
from hpczero.zero.units import away_shard
from tests.checkpoint.programs import state_digests
from tests.helpers import late
from tests.helpers.late import LateAccelerator
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import MLP, adamw, mlp_backward, raises_on_all, zeroified

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3)]

WINDOW = 2**14
SIZES = (7, 131, 97, 3)  # shards of several windows

Maker = Callable[[Any], torch.optim.Optimizer]
MAKERS: dict[str, Maker] = {
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "Adam foreach amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=True, amsgrad=True),
    "SGD fused momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, foreach=False),
    "Adagrad foreach": lambda p: torch.optim.Adagrad(p, lr=1e-2, foreach=True),
}


def host(parts: int, **options: Any) -> Offload:
    """The optimizer on the host; with more parts gradients and parameters too."""
    where: list[Any] = ["host" if parts > place else "device" for place in range(3)]
    options = {"window": WINDOW, "buffers": 4, "step": "host", **options}
    return Offload(where[0], where[1], where[2], **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    """Steps of one or two micro-batches, reduced once or twice, clipped; one is added to the gradient before it."""
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in steps:
        if step % 3 == 1:
            with hpczero.no_sync(model):
                mlp_backward(model, rank)
        elif step % 3 == 2:
            mlp_backward(model, rank)
        mlp_backward(model, rank)
        if step % 2:
            hpczero.clip_grad_norm_(model, 0.05)
        optimizer.step()
        if step != 3:
            optimizer.zero_grad()
        scheduler.step()


def trained(topology: Topology, make: Maker, **options: Any) -> dict[str, torch.Tensor] | None:
    model = MLP(SIZES)
    options = {"device": LateAccelerator(), **options}
    with zeroified(model, make(model.parameters()), topology=topology, **options) as sharding:
        train(model, next(iter(sharding.optimizers)), topology.rank, range(6))
        return hpczero.full_state_dict(model)


def same(one: dict[str, torch.Tensor] | None, other: dict[str, torch.Tensor] | None) -> bool:
    if one is None or other is None:
        return True
    return all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("transport", ["auto", "flat"])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_the_bits_are_those_of_an_update_in_memory(
    comm: MPI.Intracomm,
    topology: Topology,
    parts: int,
    make: Maker,
    transport: str,
    precision: str,
) -> None:
    stage = 3 if parts == 3 else 1 + comm.size % 3
    options = {"stage": stage, "transport": transport, "precision": precision}
    kept = trained(topology, make, **options)
    found = trained(topology, make, offload=host(parts), **options)
    parallel_assert(comm, same(kept, found), "other bits")


@pytest.mark.parametrize("fraction", [0.2, 0.6])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_both_sides_step_at_once(
    comm: MPI.Intracomm, topology: Topology, parts: int, precision: str, fraction: float
) -> None:
    options = {"stage": 3, "precision": precision}
    kept = trained(topology, MAKERS["AdamW fused"], **options)
    offload = host(parts, fraction=fraction)
    found = trained(topology, MAKERS["AdamW fused"], offload=offload, **options)
    parallel_assert(comm, same(kept, found), "other bits")


def test_on_the_host_itself_too(comm: MPI.Intracomm, topology: Topology) -> None:
    kept = trained(topology, MAKERS["AdamW fused"], stage=3, device="cpu")
    found = trained(topology, MAKERS["AdamW fused"], stage=3, device="cpu", offload=host(3))
    parallel_assert(comm, same(kept, found), "other bits")


@pytest.mark.parametrize("what", ["arrival of values", "arrival of gradients"])
def test_the_late_twin_sees_a_wait_that_is_missing(
    comm: MPI.Intracomm, topology: Topology, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Else the tests above would prove nothing."""
    monkeypatch.setattr(late, "LATE_S", 20e-3)
    options = {"stage": 2, "precision": "bf16"}
    kept = trained(topology, MAKERS["AdamW fused"], **options)
    if what == "arrival of values":
        monkeypatch.setattr(away_shard.Near, "settle", lambda self: None)
    else:
        monkeypatch.setattr(Opening, "wait", lambda self: self._staged)
    try:
        found = trained(topology, MAKERS["AdamW fused"], offload=host(2), **options)
    except StepError as error:
        if "NaN or infinity" not in str(error):
            raise
        return  # memory that nothing reached yet may hold NaN, and every rank is told
    differ = comm.allreduce(not same(kept, found))
    parallel_assert(comm, differ > 0, "the same bits without the wait")


def test_an_implementation_that_nobody_chose_is_the_fused_one(
    comm: MPI.Intracomm, topology: Topology
) -> None:
    fused = trained(topology, MAKERS["AdamW fused"], stage=2)
    loops = trained(topology, lambda p: torch.optim.AdamW(p, lr=1e-2), stage=2)
    found = trained(topology, lambda p: torch.optim.AdamW(p, lr=1e-2), stage=2, offload=host(2))
    parallel_assert(comm, same(fused, found), "not the bits of the fused one")
    parallel_assert(comm, comm.rank > 0 or not same(loops, found), "nothing was chosen")


@pytest.mark.parametrize(
    ("stage", "parts", "precision"),
    [
        (1, 1, "fp32"),
        (2, 2, "bf16"),
        (3, 1, "bf16"),
        (3, 2, "fp32"),
        (3, 3, "bf16"),
        (3, 3, "fp32"),
    ],
)
@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("synced", [1, 2])
def test_no_state_moves_and_bytes_are_as_planned(
    comm: MPI.Intracomm,
    topology: Topology,
    synced: int,
    fraction: float,
    stage: int,
    parts: int,
    precision: str,
) -> None:
    model = MLP(SIZES)
    offload = host(parts, fraction=fraction)
    options: dict[str, Any] = {"stage": stage, "precision": precision, "device": LateAccelerator()}
    with zeroified(model, adamw(model), topology=topology, offload=offload, **options) as sharding:
        (optimizer,) = sharding.optimizers
        store, planned = sharding.away.store, OffloadedPlan(sharding.plan, offload)
        assert store is not None
        assert isinstance(store.tier, InPlaceTier)
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
        plan = planned.memory(sharding.collectives.footprint)
        held = sharding.memory.current
        found_nbytes = {name: held.get(name, 0) for name in ("parameters", "master")}
        planned_nbytes = {"parameters": plan.parameters, "master": plan.master}
        parallel_assert(comm, found_nbytes == planned_nbytes, f"{found_nbytes} {planned_nbytes}")
        parts_of = store.tier.traffic.parts
        moving = {
            name for name, flow in parts_of.items() if flow.read_nbytes or flow.written_nbytes
        }
        parallel_assert(comm, not moving & {"exp_avg", "exp_avg_sq"}, f"state moved: {moving}")


def test_two_bytes_go_up_and_four_come_down_for_an_element_in_half_precision() -> None:
    plan = hpczero.Plan.build(
        torch.nn.Linear(1024, 1024, bias=False),
        num_shards=1,
        stage=2,
        precision="bf16",
        rule=lambda model: [],
    )
    planned = OffloadedPlan(plan, Offload("host", "host", step="host"))
    moved = planned.traffic()
    assert (moved.read_nbytes, moved.written_nbytes) == (2 * 1024**2, 4 * 1024**2)
    assert planned.nbytes == 18 * 1024**2  # master, gradient, two states, and what is sent


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_a_checkpoint_is_that_of_memory_and_goes_on(
    comm: MPI.Intracomm, topology: Topology, folder: Path, parts: int, precision: str
) -> None:
    options = {"stage": 3, "precision": precision, "topology": topology}
    offload = host(parts, fraction=1.0 if parts > 1 else 0.6)
    files, ends = [], []
    for place, where in enumerate((None, offload)):
        model = MLP(SIZES)
        optimizer = adamw(model, fused=True)
        with zeroified(model, optimizer, device=LateAccelerator(), offload=where, **options):
            train(model, optimizer, comm.rank, range(3))
            path = hpczero.checkpoint.Checkpoints(folder / str(place), model).save(3)
            comm.Barrier()
            files.append(state_digests(path))
            train(model, optimizer, comm.rank, range(3, 6))
            ends.append(hpczero.full_state_dict(model))
    parallel_assert(comm, files[0] == files[1], "other bytes in the file")
    for place, where in ((0, offload), (1, None)):
        model = MLP(SIZES, seed=5)
        optimizer = adamw(model, fused=True)
        with zeroified(model, optimizer, device=LateAccelerator(), offload=where, **options):
            train(model, optimizer, comm.rank, range(1))
            hpczero.checkpoint.load(folder / str(place), model)
            train(model, optimizer, comm.rank, range(3, 6))
            ends.append(hpczero.full_state_dict(model))
    parallel_assert(comm, all(same(ends[0], end) for end in ends), "another end")


def test_values_that_a_program_changes_are_those_that_are_stepped_on(
    comm: MPI.Intracomm, topology: Topology
) -> None:
    ends = []
    for offload in (None, host(2)):
        model = MLP(SIZES)
        optimizer = adamw(model, fused=True)
        options: dict[str, Any] = {"stage": 3, "topology": topology, "device": LateAccelerator()}
        with zeroified(model, optimizer, offload=offload, **options):
            for _ in range(3):
                train(model, optimizer, comm.rank, range(2))
                with hpczero.gathered(model, modifier_rank=0):
                    for parameter in model.parameters():
                        parameter.data.mul_(0.9)
            ends.append(hpczero.full_state_dict(model))
    parallel_assert(comm, same(*ends), "other bits")


def test_a_gradient_that_does_not_come_down_is_one_error_and_a_checkpoint_goes_on(
    comm: MPI.Intracomm, topology: Topology, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MLP(SIZES)
    optimizer = adamw(model)
    options: dict[str, Any] = {"stage": 3, "topology": topology, "device": LateAccelerator()}
    with zeroified(model, optimizer, offload=host(2), **options) as sharding:
        store = sharding.away.store
        assert store is not None
        train(model, optimizer, comm.rank, range(1))
        saved = hpczero.checkpoint.Checkpoints(folder, model)
        saved.save(1)
        before = hpczero.full_state_dict(model)
        with monkeypatch.context() as patch:
            if comm.rank == comm.size - 1:

                def broken(source: torch.Tensor, offset: int) -> None:
                    raise TierError(f"offset {offset}: the link is down")

                patch.setattr(store.tier, "_write", broken)
            mlp_backward(model, comm.rank)
            raises_on_all(comm, TierError, "the link is down", optimizer.step)
        raises_on_all(comm, StepError, "load a checkpoint", lambda: hpczero.full_state_dict(model))
        saved.load()
        parallel_assert(comm, same(before, hpczero.full_state_dict(model)), "not what was saved")
        optimizer.zero_grad()
        train(model, optimizer, comm.rank, range(2))


@pytest.mark.parametrize(
    ("offload", "text"),
    [
        (Offload("disk", folder="anywhere", step="host"), "optimizer on host"),
        (Offload(step="host"), "optimizer on host"),
        (Offload("host", step="nobody"), "expected one of device, host"),  # type: ignore[arg-type]
    ],
)
def test_what_does_not_go_together_is_refused(
    comm: MPI.Intracomm, topology: Topology, offload: Offload, text: str
) -> None:
    model = MLP()

    def start() -> nn.Module:
        return hpczero.zeroify(model, adamw(model), topology=topology, offload=offload)

    raises_on_all(comm, PlanError, text, start)
