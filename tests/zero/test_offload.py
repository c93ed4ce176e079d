"""Offload: what rests elsewhere gives the bits of what stays; what cannot rest there is refused; bytes are as planned.

That every optimizer, model and loop of ``tests/equality`` gives the same bits from a tier is tested there, on 3 ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import hpczero
from hpczero import Offload
from hpczero.errors import PlanError, StepError, TierError
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import MLP, adamw, mlp_backward, raises_on_all, zeroified

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3)]

WINDOW = 2**14


def trained(
    topology: Topology, make: Callable[[Any], torch.optim.Optimizer], **options: Any
) -> dict[str, torch.Tensor] | None:
    """Weights after five steps, two of them over two micro-batches, all clipped."""
    model = MLP()
    with zeroified(model, make(model.parameters()), topology=topology, **options) as sharding:
        (optimizer,) = sharding.optimizers
        for step in range(5):
            if step % 2:
                with hpczero.no_sync(model):
                    mlp_backward(model, topology.rank)
            elif step:
                mlp_backward(
                    model, topology.rank
                )  # reduced twice: the gradient comes back in between
            mlp_backward(model, topology.rank)
            hpczero.clip_grad_norm_(model, 0.05)
            optimizer.step()
            optimizer.zero_grad()
        return hpczero.full_state_dict(model)


MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "Adam foreach amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=True, amsgrad=True),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("transport", ["auto", "flat"])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
@pytest.mark.parametrize("medium", ["host", "disk"])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_the_bits_are_those_of_memory(
    comm: MPI.Intracomm,
    topology: Topology,
    folder: Path,
    parts: int,
    medium: Any,
    make: Callable[[Any], torch.optim.Optimizer],
    transport: str,
    precision: str,
) -> None:
    """Optimizer alone, with gradients, with parameters."""
    stage = 3 if parts == 3 else 1 + comm.size % 3
    options = {"stage": stage, "transport": transport, "precision": precision}
    kept = trained(topology, make, **options)
    where: list[Any] = [medium if parts > place else "device" for place in range(3)]
    offload = Offload(where[0], where[1], where[2], folder, WINDOW, buffers=3 + parts)
    found = trained(topology, make, offload=offload, **options)
    if kept is not None and found is not None:
        assert all(torch.equal(value, found[name]) for name, value in kept.items())


@pytest.mark.parametrize("window", [2**14, 2**16, 2**20])
@pytest.mark.parametrize("ahead", [0, 1, 5])
def test_window_and_horizon_do_not_matter(
    comm: MPI.Intracomm, topology: Topology, folder: Path, window: int, ahead: int
) -> None:
    make = MAKERS["AdamW fused"]
    kept = trained(topology, make, stage=3)
    offload = Offload("disk", "disk", "disk", folder, window, buffers=4, ahead=ahead)
    found = trained(topology, make, stage=3, offload=offload)
    if kept is not None and found is not None:
        assert all(torch.equal(value, found[name]) for name, value in kept.items())


@pytest.mark.parametrize("fraction", [0.0, 0.15, 0.5, 0.9])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("medium", ["host", "disk"])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_any_fraction_gives_the_bits_of_memory(
    comm: MPI.Intracomm,
    topology: Topology,
    folder: Path,
    parts: int,
    medium: Any,
    precision: str,
    fraction: float,
) -> None:
    options = {"stage": 3 if parts == 3 else 1 + comm.size % 3, "precision": precision}
    make = MAKERS["AdamW fused"]
    kept = trained(topology, make, **options)
    where: list[Any] = [medium if parts > place else "device" for place in range(3)]
    offload = Offload(where[0], where[1], where[2], folder, WINDOW, 4, fraction=fraction)
    found = trained(topology, make, offload=offload, **options)
    if kept is not None and found is not None:
        assert all(torch.equal(value, found[name]) for name, value in kept.items())


def test_the_units_that_backward_reduces_last_stay_in_memory(
    comm: MPI.Intracomm, topology: Topology
) -> None:
    model = MLP((7, 31, 33, 3))
    offload = Offload("host", "host", "host", window=WINDOW, buffers=4, fraction=0.5)
    with zeroified(model, adamw(model), stage=3, topology=topology, offload=offload) as sharding:
        away = [unit.away is not None for unit in sharding.units]
        assert away == sorted(away)
        sizes = [unit.spec.layout.numel for unit in sharding.units]
        gone = sum(size for size, there in zip(sizes, away, strict=True) if there)
        assert 0.5 <= gone / sum(sizes) < 1.0
        mlp_backward(model, comm.rank)
        (optimizer,) = sharding.optimizers
        optimizer.step()
        for unit in sharding.units:
            for piece in unit.shards:
                if unit.away is None:
                    assert optimizer.state[piece]["exp_avg"].shape == piece.shape
                elif piece.numel():
                    with pytest.raises(StepError, match="rests on a memory tier"):
                        optimizer.state[piece]["exp_avg"]
        optimizer.param_groups[0]["params"].append(optimizer.param_groups[0]["params"][0])
        mlp_backward(model, comm.rank)
        raises_on_all(comm, StepError, "every piece once", optimizer.step)


def test_nothing_of_a_shard_stays_in_memory_between_steps(
    comm: MPI.Intracomm, topology: Topology, folder: Path
) -> None:
    model = MLP()
    offload = Offload("disk", "disk", "disk", folder, WINDOW, buffers=4)
    with zeroified(model, adamw(model), stage=3, topology=topology, offload=offload) as sharding:
        for _ in range(2):
            mlp_backward(model, comm.rank)
            held = sharding.memory.current
            parallel_assert(
                comm, not held.get("gradients") and not held.get("parameters"), str(held)
            )
            (optimizer,) = sharding.optimizers
            optimizer.step()
            optimizer.zero_grad()
        states = [value for state in optimizer.state.values() for value in dict.values(state)]
        parallel_assert(comm, all(value.dim() == 0 for value in states), "more than counters")
        pieces = [piece for group in optimizer.param_groups for piece in group["params"]]
        with torch._C.DisableTorchFunctionSubclass():
            held_nbytes = sum(piece.untyped_storage().nbytes() for piece in pieces)
        parallel_assert(comm, held_nbytes == 0, f"{held_nbytes} bytes of masters")
        parallel_assert(comm, not os.listdir(folder), "a file of the tier has a name")


def test_what_rests_elsewhere_is_not_read_by_accident(
    comm: MPI.Intracomm, topology: Topology, folder: Path
) -> None:
    model = MLP()
    offload = Offload("disk", "disk", "disk", folder, WINDOW, buffers=4)
    with zeroified(model, adamw(model), stage=3, topology=topology, offload=offload) as sharding:
        (optimizer,) = sharding.optimizers
        mlp_backward(model, comm.rank)
        pieces = [piece for group in optimizer.param_groups for piece in group["params"]]
        if pieces:
            for read in (
                lambda: pieces[0] + 1,
                lambda: pieces[0].grad.mul_(2),
                lambda: repr(pieces[0]),
                lambda: torch._foreach_mul_([p.grad for p in pieces], 2.0),
                lambda: setattr(pieces[0], "grad", None),
            ):
                with pytest.raises(StepError, match="rests on a memory tier"):
                    read()
        optimizer.step()
        if pieces:
            with pytest.raises(StepError, match="rests on a memory tier"):
                optimizer.state[pieces[0]]["exp_avg"]
        with pytest.raises(StepError, match="rests on a memory tier"):
            optimizer.state_dict()


def test_torchs_own_clipping_and_scaling_work_where_gradients_rest_elsewhere(
    comm: MPI.Intracomm, topology: Topology, folder: Path
) -> None:
    found = []
    for offload in (None, Offload("disk", "disk", "disk", folder, WINDOW, buffers=4)):
        model = MLP()
        with zeroified(
            model, adamw(model), stage=3, topology=topology, offload=offload
        ) as sharding:
            (optimizer,) = sharding.optimizers
            for _ in range(3):
                mlp_backward(model, comm.rank)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(0.5)
                hpczero.clip_grad_norm_(model, 0.01, norm_type=float("inf"))
                optimizer.step()
                optimizer.zero_grad()
            found.append(hpczero.full_state_dict(model))
    if found[0] is not None and found[1] is not None:
        assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


@pytest.mark.parametrize(
    ("options", "offload", "text"),
    [
        ({"stage": 0}, Offload("host"), "stage 1, 2 or 3"),
        ({"stage": 2}, Offload("host", "host", "host"), "expected stage 3"),
        ({}, Offload("disk"), "without a folder"),
        ({}, Offload("device", "host"), "optimizer on the device"),
        ({}, Offload("host", "disk"), "one medium"),
        ({}, Offload("tape"), "expected one of device, host, disk"),  # type: ignore[arg-type]
        ({}, Offload("host", window=100), "at least"),
    ],
)
def test_what_does_not_go_together_is_refused(
    comm: MPI.Intracomm, topology: Topology, options: dict[str, Any], offload: Offload, text: str
) -> None:
    model = MLP()

    def start() -> nn.Module:
        return hpczero.zeroify(
            model, adamw(model), topology=topology, offload=offload, **{"stage": 3, **options}
        )

    raises_on_all(comm, PlanError, text, start)


@pytest.mark.parametrize("step", ["device", "host"])
def test_an_offload_that_saves_nothing_is_refused(
    comm: MPI.Intracomm, topology: Topology, step: Any
) -> None:
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    offload = Offload("host", step=step)

    def start() -> nn.Module:
        return hpczero.zeroify(model, optimizer, topology=topology, offload=offload)

    raises_on_all(comm, PlanError, "saves nothing", start)


def test_state_that_comes_later_is_refused_with_what_to_do(
    comm: MPI.Intracomm, topology: Topology
) -> None:
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    offload = Offload("host", "host", "host", window=WINDOW)
    with zeroified(model, optimizer, stage=3, topology=topology, offload=offload):
        mlp_backward(model, comm.rank)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["momentum"] = 0.9
        mlp_backward(model, comm.rank)
        raises_on_all(comm, StepError, "momentum", optimizer.step)


def test_a_tier_that_fails_is_one_error_on_all_ranks_and_a_checkpoint_goes_on(
    comm: MPI.Intracomm, topology: Topology, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MLP()
    offload = Offload("host", "host", "host", window=WINDOW, buffers=4)
    with zeroified(model, adamw(model), stage=3, topology=topology, offload=offload) as sharding:
        (optimizer,) = sharding.optimizers
        store = sharding.away.store
        assert store is not None
        mlp_backward(model, comm.rank)
        optimizer.step()
        optimizer.zero_grad()
        saved = hpczero.checkpoint.Checkpoints(folder, model)
        saved.save(1)
        before = hpczero.full_state_dict(model)
        mlp_backward(model, comm.rank)
        with monkeypatch.context() as patch:
            if comm.rank == 0:

                def broken(source: torch.Tensor, offset: int) -> None:
                    raise TierError(f"offset {offset}: no space left on device")

                patch.setattr(store.tier, "_write", broken)
            message = raises_on_all(comm, TierError, "no space left on device", optimizer.step)
        assert "offset" in message
        raises_on_all(comm, StepError, "load a checkpoint", lambda: hpczero.full_state_dict(model))
        saved.load()
        after = hpczero.full_state_dict(model)
        optimizer.zero_grad()
        mlp_backward(model, comm.rank)
        optimizer.step()
        if before is not None and after is not None:
            assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_a_released_model_leaves_no_piece_that_can_be_read(
    comm: MPI.Intracomm, topology: Topology, folder: Path
) -> None:
    model = MLP()
    optimizer = adamw(model)
    offload = Offload("disk", "disk", "disk", folder, WINDOW, buffers=4)
    with zeroified(model, optimizer, stage=3, topology=topology, offload=offload):
        mlp_backward(model, comm.rank)
        optimizer.step()
    pieces = [piece for piece in optimizer.param_groups[0]["params"] if piece.numel()]
    if pieces:  # a rank may hold none of so small a model
        with pytest.raises(StepError, match="rests on a memory tier"):
            optimizer.step()
    for piece in pieces:
        with pytest.raises(StepError, match="rests on a memory tier"):
            piece.neg()


def test_state_of_parameters_without_gradients_is_kept_too(
    comm: MPI.Intracomm, topology: Topology, folder: Path
) -> None:
    """The first unit has no gradient in the first steps, so some windows have state and others have none."""

    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(60, 61), nn.Linear(60, 61)

        def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
            y: torch.Tensor = self.second(x).square().mean()
            return y + self.first(x).mean() if both else y

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            torch.manual_seed(step + comm.rank)
            model(torch.randn(3, 60), step > 3).backward()
            optimizer.step()
            optimizer.zero_grad()

    offload = Offload("disk", "disk", "disk", folder, WINDOW, buffers=4)
    kinds: list[Offload | None] = [None, offload]
    weights = []
    for i, saving in enumerate(kinds):
        for j, loading in enumerate(kinds):
            where = folder / f"{i}{j}"
            model = Halves()
            options = {"stage": 3, "topology": topology, "rule": lambda model: []}
            with zeroified(model, adamw(model), offload=saving, **options) as sharding:
                train(model, next(iter(sharding.optimizers)), range(3))
                hpczero.checkpoint.Checkpoints(where, model).save(3)
            model = Halves()
            with zeroified(model, adamw(model), offload=loading, **options) as sharding:
                hpczero.checkpoint.load(where, model)
                train(model, next(iter(sharding.optimizers)), range(3, 6))
                weights.append(hpczero.full_state_dict(model))
    first = weights[0]
    for found in weights:
        if found is not None and first is not None:
            assert all(torch.equal(value, found[name]) for name, value in first.items())
