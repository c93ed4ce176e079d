"""Checkpoints of what trains alone: their size, where they go on, and to which base they belong."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from mpi4py import MPI
from torch import nn

import hpczero
from hpczero import finetune
from hpczero.errors import CheckpointMismatch, ConfigError
from hpczero.plan.offload import Offload
from tests.checkpoint.programs import first_ranks
from tests.finetune.models import adapted_gpt, loss_of, off, optimizer_of, plain_steps
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import raises_on_all, same, values, zeroified

if TYPE_CHECKING:
    from hpczero import Topology

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]


def step(model: nn.Module, optimizer: Any, topology: Topology, which: int, size: int) -> None:
    """Of ``size`` ranks' batches, shared out evenly."""
    mine = range(topology.rank, size, topology.size)
    for place, rank in enumerate(mine):
        with hpczero.accumulate(model, place, len(mine)):
            loss_of(model, rank, which).backward()
    hpczero.clip_grad_norm_(model, 0.5)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("before", "after", "offload"),
    [(3, 0, None), (0, 3, None), (3, 3, Offload(optimizer="host", parameters="host"))],
    ids=["3 to 0", "0 to 3", "3 to a tier"],
)
def test_a_run_goes_on_from_adapters_at_another_number_of_ranks_and_stage(
    comm: MPI.Intracomm,
    topology: Topology,
    folder: Path,
    before: int,
    after: int,
    offload: Offload | None,
) -> None:
    plain = adapted_gpt()
    plain_steps(plain, optimizer_of(plain), comm.size, range(4))
    model = adapted_gpt()
    optimizer = optimizer_of(model)
    with zeroified(model, optimizer, stage=before, topology=topology):
        for which in range(2):
            step(model, optimizer, topology, which, comm.size)
        path = hpczero.checkpoint.save(folder, model, step=2, parameters="trained")
    manifest = json.loads((path / "manifest.json").read_text())
    trained = sum(p.numel() for p in finetune.trained(plain))
    sizes = {d["name"]: d["numel"] for d in manifest["datasets"] if d["dtype"] == "<f4"}
    parallel_assert(comm, set(sizes.values()) == {trained} and len(sizes) == 3, f"{sizes}")
    loaded, apart = 2, 0.0
    with first_ranks(comm, 1) as alone:
        if alone is not None:
            model = adapted_gpt()
            with torch.no_grad():
                for parameter in finetune.trained(model):
                    parameter.zero_()
            optimizer = optimizer_of(model)
            options: dict[str, Any] = {"stage": after, "topology": alone, "offload": offload}
            with zeroified(model, optimizer, **options):
                loaded = hpczero.checkpoint.load(folder, model).step
                for which in range(2, 4):
                    step(model, optimizer, alone, which, comm.size)
                apart = off(hpczero.full_state_dict(model), plain)
    # One rank sums the micro-batches in another order, and Adam's root makes more of a small gradient's last bit.
    parallel_assert(comm, loaded == 2 and apart <= 5e-6, f"step {loaded}, off by {apart}")


def other_base(model: nn.Module) -> None:
    with torch.no_grad():  # the same values, in another order
        weight = model.get_parameter("blocks.1.mlp.expansion.weight")
        weight[:2] = weight[:2].flip(0)


def other_choice(model: nn.Module) -> None:
    model.get_parameter("blocks.1.mlp_norm.weight").requires_grad_(True)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (other_base, r"another base: 1 of 28 .*\(blocks.1.mlp.expansion.weight\)"),
        (other_choice, "no blocks.1.mlp_norm.weight, which trains here"),
    ],
    ids=["base", "choice"],
)
def test_another_base_or_other_trained_parameters_are_refused(
    comm: MPI.Intracomm, topology: Topology, folder: Path, change: Any, says: str
) -> None:
    model = adapted_gpt()
    with zeroified(model, optimizer_of(model), topology=topology):
        hpczero.checkpoint.save(folder, model, step=1, parameters="trained")
    model = adapted_gpt()
    change(model)
    with zeroified(model, optimizer_of(model), stage=0, topology=topology) as sharding:
        before = values(sharding)
        raises_on_all(comm, CheckpointMismatch, says, hpczero.checkpoint.load, folder, model)
        parallel_assert(comm, same(values(sharding), before), "the model was changed")


def test_a_base_that_was_rounded_for_training_is_the_same_base(
    comm: MPI.Intracomm, topology: Topology, folder: Path
) -> None:
    for precision in ("bf16", "fp32", "fp16"):  # fp16 cannot be compared, and says so
        model = adapted_gpt()
        with zeroified(model, optimizer_of(model), precision=precision, topology=topology):
            if precision == "bf16":
                hpczero.checkpoint.save(folder, model, step=1, parameters="trained")
            parallel_assert(comm, hpczero.checkpoint.load(folder, model).step == 1)


def test_what_would_lose_frozen_values_is_refused(
    comm: MPI.Intracomm, topology: Topology, folder: Path
) -> None:
    model = adapted_gpt()
    with zeroified(model, optimizer_of(model), topology=topology):
        save = partial(hpczero.checkpoint.save, folder, model)
        save(step=1)
        said = "holds frozen parameters too"
        raises_on_all(comm, ConfigError, said, save, step=1, parameters="trained")
        save(step=2, parameters="trained")
        with pytest.raises(ConfigError, match="parameters: got 'frozen'"):
            save(step=3, parameters="frozen")
