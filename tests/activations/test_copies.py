"""Models that hold a Checkpointing: copies of them call their blocks by it too, and it cannot be pickled."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from hpczero.activations import Checkpointing
from hpczero.errors import PlanError
from tests.activations.stacks import Stack, batch, grads, on_disk, plain, same


@pytest.mark.parametrize("away", [False, True])
def test_a_copy_of_a_model_computes_as_the_model_does(tmp_path, away):
    with on_disk(tmp_path) if away else Checkpointing.create() as checkpointing:
        found = []
        for call in (checkpointing, plain):
            model = Stack(call=call)
            averaged = copy.deepcopy(model)
            assert averaged.blocks[0] is not model.blocks[0]
            torch.manual_seed(7)
            (model(batch()) + averaged(batch(2))).backward()
            found.append(grads(model) + grads(averaged))
    assert same(*found)


def test_a_pickle_is_refused_by_name(tmp_path):
    with on_disk(tmp_path) as checkpointing:
        model = Stack(call=checkpointing)
        with pytest.raises(PlanError, match=r"Checkpointing.*cannot be pickled"):
            pickle.dumps(model)
