"""Weights of other programs into a model on a tier: the bits of memory, in pieces; a refusal changes nothing."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

import hpczero
from hpczero import Offload
from hpczero.checkpoint import held
from hpczero.checkpoint.foreign import weight_files
from hpczero.errors import CheckpointMismatch, StepError, TierError
from tests.checkpoint.foreign import once, other_state, write
from tests.checkpoint.programs import Program
from tests.checkpoint.test_offloaded import SIZES, WINDOW, failing_on, on_disk
from tests.helpers.parallel import on_root, parallel_assert
from tests.helpers.small_models import (
    MLP,
    adamw,
    mlp_backward,
    raises_on_all,
    same_state,
    zeroified,
)

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3)]


@pytest.fixture(autouse=True)
def cramped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many pieces, and hardly a window stays open."""
    monkeypatch.setattr(weight_files, "CHUNK_NUMEL", 700)
    monkeypatch.setattr(held, "OPEN_NBYTES", WINDOW // 2)


PLACES: dict[str, dict[str, Any]] = {
    "disk": {"optimizer": "disk", "gradients": "disk", "parameters": "disk"},
    "a part": {"optimizer": "host", "parameters": "host", "fraction": 0.5},
    "host's step": {"optimizer": "host", "gradients": "host", "step": "host"},
}


@pytest.mark.parametrize("kind", ["torch", "safetensors"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("place", PLACES)
def test_weights_come_in_with_the_bits_of_memory_and_the_optimizer_stays(
    comm: MPI.Intracomm, topology: Topology, folder: Path, place: str, precision: str, kind: str
) -> None:
    state = other_state()
    on_root(comm, write, folder, state, kind)
    (path,) = folder.iterdir()
    found = []
    for offload in (None, Offload(folder=folder, window=WINDOW, buffers=4, **PLACES[place])):
        program = Program(topology, stage=3, precision=precision, offload=offload)
        program.train(2)
        hpczero.checkpoint.import_weights(path, program.model)
        now = hpczero.full_state_dict(program.model)
        losses = program.train(2)  # with the moments of before
        found.append((now, losses, hpczero.full_state_dict(program.model)))
        program.close()
    resident, away = found
    parallel_assert(comm, same_state(away[0], resident[0]))
    parallel_assert(comm, away[1] == resident[1], f"{away[1]} {resident[1]}")
    parallel_assert(comm, same_state(away[2], resident[2]))


def test_what_is_refused_leaves_the_model_as_it_was(
    comm: MPI.Intracomm, topology: Topology, folder: Path
) -> None:
    state = other_state()
    untied = {**state, "back.weight": state["back.weight"] + 1}
    large = {name: value.clone() for name, value in state.items()}
    large["blocks.1.0.weight"][-1, -1] = 3.4e38  # rounds to infinity in bf16
    program = Program(topology, precision="bf16", **on_disk(folder))
    before = hpczero.full_state_dict(program.model)
    for name, weights, message in (
        ("a.pt", untied, "embed.weight and back.weight are tied in the model and"),
        ("b.pt", large, r"blocks.1.0.weight.* holds 3.4e\+38, which torch.bfloat16 cannot"),
        ("c.pt", {}, "they have no"),
    ):
        on_root(comm, torch.save, weights, folder / name)
        load = partial(hpczero.checkpoint.import_weights, folder / name, program.model)
        raises_on_all(comm, CheckpointMismatch, message, load)
        parallel_assert(comm, same_state(hpczero.full_state_dict(program.model), before), name)
    program.train(1)  # nobody doubts it
    program.close()


def test_a_tier_that_fails_meanwhile_is_one_error_and_another_import_goes_on(
    comm: MPI.Intracomm, topology: Topology, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = once(dict(MLP(SIZES, seed=8).state_dict()))
    path = folder / "model.safetensors"
    on_root(comm, save_file, origin, path)
    model = MLP(SIZES)
    with zeroified(model, adamw(model), topology=topology, **on_disk(folder)) as state:
        store = state.away.store
        assert store is not None
        for count in (0, 3):
            with monkeypatch.context() as patch:
                if comm.rank == comm.size - 1:
                    failing_on(patch, store.tier, "_write", count, TierError("EIO"))
                load = partial(hpczero.checkpoint.import_weights, path, model)
                raises_on_all(comm, TierError, "EIO", load)
            with pytest.raises(StepError, match="load a checkpoint"):
                mlp_backward(model, comm.rank)
        hpczero.checkpoint.import_weights(path, model)
        parallel_assert(comm, same_state(hpczero.full_state_dict(model), origin))
        mlp_backward(model, comm.rank)
        next(iter(state.optimizers)).step()
