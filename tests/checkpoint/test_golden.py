"""The golden checkpoint of format version 1 loads bit for bit, on any number of ranks, for ever."""

from __future__ import annotations

import json

import pytest
import torch

import hpczero
from hpczero.checkpoint.__main__ import Verdict, verify
from tests.golden import record_checkpoint as golden
from tests.helpers.world import World


def test_it_is_sound_and_small() -> None:
    expected = json.loads(golden.EXPECTED.read_text())
    path = golden.FOLDER / expected["path"]
    report = verify(path)
    assert report.verdict is Verdict.SOUND, report.problems
    assert report.manifest is not None
    assert (report.manifest.version, report.manifest.world_size) == (1, 2)
    assert sum(file.stat().st_size for file in path.iterdir()) < 100_000


@pytest.mark.mpi
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("stage", [0, 3])
def test_every_bit_comes_back(world: World, stage: int) -> None:
    expected = json.loads(golden.EXPECTED.read_text())
    model, optimizer = golden.build(world.topology, stage=stage)
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.zero_()
    loaded = hpczero.checkpoint.load(golden.FOLDER, model, optimizer)
    found = golden.state_of(model, world.topology)
    hpczero.release(model)
    world.check((loaded.step, loaded.extra) == (expected["step"], expected["extra"]))
    world.check(loaded.path.name == expected["path"])
    if world.rank == 0:  # full_state_dict gives them to rank 0 alone
        assert found["values"] == expected["values"]
    world.check(found["optimizer"] == expected["optimizer"])
    world.check(found["options"] == expected["options"])
    ranks = min(world.size, 2)
    world.check(found["random"][:ranks] == expected["random"][:ranks])
