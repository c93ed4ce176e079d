"""Optimizers of whole parameters between nodes: torch's result, and the bits of a job without nodes, at any stage."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import hpczero
from hpczero.optim import Muon
from tests.helpers.cases import EVERYTHING
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import MLP, check_weights, mlp_input, update, zeroified
from tests.optim.rules import (
    RULES,
    STEPS,
    Training,
    divided,
    same_bits,
    torchs_iteration_in_fp32,
    torchs_muon,
)

pytestmark = pytest.mark.mpi

TRIED = RULES if EVERYTHING else ["muon", "shampoo"]

WHERE = pytest.mark.parametrize("transport", ["hierarchical", "window"])


def nodes_of(comm, transport: str) -> hpczero.Topology:
    """Two ranks on a node, the last one alone on its own if they are odd; of two or three ranks each on its own."""
    on_node = 2 if comm.size > 3 or transport == "window" else 1
    return hpczero.Topology.create(comm, nodes=[rank // on_node for rank in range(comm.size)])


def muon(model: nn.Module) -> tuple[Optimizer, ...]:
    matrices, rest = divided(model)
    return Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=3e-3, eps=1e-4)


@pytest.mark.ranks(2, 3, 4, 5)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@WHERE
def test_muon_between_nodes_is_torchs_with_its_iteration_in_fp32(comm, stage, transport):
    plain = Training(torchs_muon, None)
    with torchs_iteration_in_fp32():
        plain.train_as(comm.size)
    topology = nodes_of(comm, transport)
    ours = Training(muon, topology, stage=stage, transport=transport)
    ours.train()
    check_weights(comm, ours.model, plain.model, within=1e-6)
    ours.close()
    topology.free()


@pytest.mark.ranks(2, 3, 4, 5)
@pytest.mark.parametrize("rule", TRIED)
@WHERE
def test_nodes_change_no_bit_at_any_stage(comm, rule, transport):
    topology = nodes_of(comm, transport)
    found = []
    for stage, way in ((3, "flat"), *((stage, transport) for stage in range(4))):
        ours = Training(RULES[rule], topology, stage=stage, transport=way)
        ours.train()
        found.append(hpczero.full_state_dict(ours.model))
        ours.close()
    topology.free()
    parallel_assert(comm, same_bits(found), "stages and transports differ")


@pytest.mark.ranks(3, 4, 5)
@pytest.mark.parametrize("stage", [1, 3])
@WHERE
def test_of_two_matrices_most_ranks_own_none(comm, stage, transport):
    model, plain = MLP((7, 5, 3)), MLP((7, 5, 3))
    ours, theirs = Muon.of(model, lr=0.02), Muon.of(plain, lr=0.02)
    topology = nodes_of(comm, transport)
    with zeroified(model, ours, stage=stage, topology=topology, transport=transport):
        for step in range(STEPS):
            model(mlp_input(step)).square().sum().backward()  # the same on all ranks
            plain(mlp_input(step)).square().sum().backward()
            update(ours, theirs)
        check_weights(comm, model, plain, within=1e-6)
    topology.free()
