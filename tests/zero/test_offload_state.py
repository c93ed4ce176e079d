"""``optimizer.state`` where it rests on a tier: what a program does to it is done, or refused by name.

A loop that goes through the state of a plain optimizer finds momenta there. Where they rest elsewhere, it must not find
a part of them and believe that this is all.
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
from hpczero.errors import StepError
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import MLP, adamw, mlp_backward, raises_on_all, zeroified

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3)]

HOST = Offload("host", "host", "host", window=2**14, buffers=4)
SIZES = (7, 63, 63, 3)


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, count: int) -> None:
    for _ in range(count):
        mlp_backward(model, rank)
        optimizer.step()
        optimizer.zero_grad()


def pieces_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [piece for group in optimizer.param_groups for piece in group["params"]]


def zero_all(state: Any) -> None:
    for value in state.values():
        value.zero_()


def zero_items(state: Any) -> None:
    for _, value in state.items():
        value.zero_()


def zero_what_is_there(state: Any) -> None:
    if "exp_avg" in state:
        state["exp_avg"].zero_()


def zero_what_is_got(state: Any) -> None:
    moment = state.get("exp_avg")
    if moment is not None:
        moment.zero_()


def zero_by_name(state: Any) -> None:
    for name in state:
        state[name].zero_()


IDIOMS: dict[str, Callable[[Any], object]] = {
    "values": zero_all,
    "items": zero_items,
    "in": zero_what_is_there,
    "get": zero_what_is_got,
    "names": zero_by_name,
    "pop": lambda state: state.pop("exp_avg", None),
    "del": lambda state: state.__delitem__("exp_avg"),
    "none": lambda state: state.__setitem__("exp_avg", None),
    "set": lambda state: state.__setitem__("exp_avg", torch.zeros(3)),
    "update": lambda state: state.update(exp_avg=torch.zeros(3)),
    "setdefault": lambda state: state.setdefault("exp_avg", 0),
    "dict": dict,
    "copy": lambda state: state.copy(),
    "stars": lambda state: {**state},
}


@pytest.mark.parametrize("idiom", IDIOMS.values(), ids=IDIOMS.keys())
def test_no_loop_over_the_state_leaves_out_what_rests_elsewhere(
    comm: MPI.Intracomm, topology: Topology, idiom: Callable[[Any], object]
) -> None:
    model = MLP()
    optimizer = adamw(model)
    with zeroified(model, optimizer, stage=3, topology=topology, offload=HOST):
        take_steps(model, optimizer, comm.rank, 1)
        for piece in pieces_of(optimizer):
            if piece.numel():
                with pytest.raises(StepError, match="rests on a memory tier"):
                    idiom(optimizer.state[piece])
            numbers = optimizer.state[piece]
            assert float(numbers["step"]) == (0.0 if idiom is zero_by_name else 1.0)
        comm.Barrier()


def clear_each(optimizer: torch.optim.Optimizer) -> None:
    for piece in pieces_of(optimizer):
        optimizer.state[piece].clear()


def clear_some(optimizer: torch.optim.Optimizer) -> None:
    for piece in pieces_of(optimizer)[::2]:
        optimizer.state[piece].clear()


def set_steps(optimizer: torch.optim.Optimizer) -> None:
    for piece in pieces_of(optimizer):
        optimizer.state[piece]["step"] += 7


CHANGES: dict[str, Callable[[torch.optim.Optimizer], None]] = {
    "clear each": clear_each,
    "clear some": clear_some,
    "clear": lambda optimizer: optimizer.state.clear(),
    "steps": set_steps,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_of_the_state_is_that_of_memory(
    comm: MPI.Intracomm, topology: Topology, change: Callable[[torch.optim.Optimizer], None]
) -> None:
    found = []
    for offload in (None, HOST):
        model = MLP(SIZES)
        optimizer = adamw(model)
        with zeroified(model, optimizer, stage=3, topology=topology, offload=offload):
            take_steps(model, optimizer, comm.rank, 3)
            change(optimizer)
            take_steps(model, optimizer, comm.rank, 2)
            found.append(hpczero.full_state_dict(model))
    if found[0] is not None and found[1] is not None:
        assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def give(optimizer: torch.optim.Optimizer) -> None:
    """New state for each piece, as a program gives it that keeps state of its own."""
    for piece in pieces_of(optimizer):
        moment = torch.full(piece.shape, 0.25)
        state = {"step": torch.tensor(4.0), "exp_avg": moment, "exp_avg_sq": 2 * moment}
        optimizer.state[piece] = state


def test_a_checkpoint_has_the_state_that_a_program_has_given(
    comm: MPI.Intracomm, topology: Topology, folder: Path
) -> None:
    found = []
    for offload in (None, HOST):
        model = MLP(SIZES)
        optimizer = adamw(model)
        saved = folder / str(offload is None)
        with zeroified(model, optimizer, stage=3, topology=topology, offload=offload):
            take_steps(model, optimizer, comm.rank, 2)
            give(optimizer)
            hpczero.checkpoint.Checkpoints(saved, model).save(2)
        model = MLP(SIZES)
        optimizer = adamw(model)
        with zeroified(model, optimizer, stage=3, topology=topology):
            hpczero.checkpoint.load(saved, model)
            take_steps(model, optimizer, comm.rank, 2)
            found.append(hpczero.full_state_dict(model))
    if found[0] is not None and found[1] is not None:
        assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_state_of_another_size_is_refused(comm: MPI.Intracomm, topology: Topology) -> None:
    model = MLP(SIZES)
    optimizer = adamw(model)
    with zeroified(model, optimizer, stage=3, topology=topology, offload=HOST):
        mlp_backward(model, comm.rank)
        for piece in pieces_of(optimizer):
            optimizer.state[piece] = {"step": torch.tensor(1.0), "exp_avg": torch.ones(1)}
        raises_on_all(comm, StepError, "'exp_avg'.* 1 element", optimizer.step)


NESTEROV: dict[str, Any] = {"momentum": 0.9, "nesterov": True, "foreach": True}
IN_PLACE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, **NESTEROV),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, foreach=True),
}


@pytest.mark.parametrize("make", IN_PLACE.values(), ids=IN_PLACE.keys())
def test_what_an_optimizer_does_to_gradients_is_in_the_next_sum(
    comm: MPI.Intracomm, topology: Topology, make: Callable[[Any], torch.optim.Optimizer]
) -> None:
    """Torch's own step over lists works on gradients in place, and a loop may add to them."""
    found = []
    for offload in (None, HOST):
        model = MLP(SIZES)
        optimizer = make(model.parameters())
        with zeroified(model, optimizer, stage=3, topology=topology, offload=offload):
            for step in range(6):
                mlp_backward(model, comm.rank)
                if step % 2:
                    hpczero.clip_grad_norm_(model, 0.05)
                optimizer.step()
                hpczero.clip_grad_norm_(model, 0.02)
            found.append(hpczero.full_state_dict(model))
    if found[0] is not None and found[1] is not None:
        assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_parameters_of_no_model_that_come_after_zeroify_are_named_as_that(
    comm: MPI.Intracomm, topology: Topology
) -> None:
    model = MLP()
    optimizer = adamw(model)
    with zeroified(model, optimizer, stage=3, topology=topology, offload=HOST):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        mlp_backward(model, comm.rank)
        raises_on_all(comm, StepError, "that are not of this model", optimizer.step)


def test_a_step_that_was_cut_off_gives_its_staging_back(
    comm: MPI.Intracomm, topology: Topology, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many windows, as often as there are blocks; a checkpoint then goes on with the bits of a run without it."""
    model = MLP((7, 130, 131, 3))
    optimizer = adamw(model)
    with zeroified(model, optimizer, stage=3, topology=topology, offload=HOST) as sharding:
        take_steps(model, optimizer, comm.rank, 1)
        saved = hpczero.checkpoint.Checkpoints(folder, model)
        saved.save(1)
        take_steps(model, optimizer, comm.rank, 1)
        expected = hpczero.full_state_dict(model)
        update: Any = sharding.step.steppers[0].update
        method = update._method
        for attempt in range(6):
            saved.load()
            calls: list[int] = []

            def failing(optimizer: Any, calls: list[int] = calls, last: int = attempt) -> None:
                calls.append(1)
                if len(calls) > last % 3:
                    raise ValueError("cut off")
                method(optimizer)

            mlp_backward(model, comm.rank)
            with monkeypatch.context() as patch:
                patch.setattr(update, "_method", failing)
                patch.setattr(update, "check", lambda **_: None)
                with pytest.raises(Exception, match="cut off"):
                    optimizer.step()
            optimizer.zero_grad()
        saved.load()
        take_steps(model, optimizer, comm.rank, 1)
        found = hpczero.full_state_dict(model)
        same = found is None or (
            expected is not None
            and all(torch.equal(value, expected[name]) for name, value in found.items())
        )
        parallel_assert(comm, same, "another result after steps that were cut off")
