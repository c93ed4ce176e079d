"""The golden checkpoint of format version 1 loads bit for bit, on any number of ranks, for ever."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch

import hpczero
from hpczero.checkpoint.__main__ import Verdict, verify
from tests.golden import record_checkpoint as golden
from tests.helpers.parallel import parallel_assert

if TYPE_CHECKING:
    from mpi4py import MPI


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
def test_every_bit_comes_back(comm: MPI.Intracomm, topology: hpczero.Topology, stage: int) -> None:
    expected = json.loads(golden.EXPECTED.read_text())
    model, optimizer = golden.build(topology, stage=stage)
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.zero_()
    loaded = hpczero.checkpoint.load(golden.FOLDER, model, optimizer)
    found = golden.state_of(model, topology)
    hpczero.release(model)
    parallel_assert(comm, (loaded.step, loaded.extra) == (expected["step"], expected["extra"]))
    parallel_assert(comm, loaded.path.name == expected["path"])
    if comm.rank == 0:  # full_state_dict gives them to rank 0 alone
        assert found["values"] == expected["values"]
    parallel_assert(comm, found["optimizer"] == expected["optimizer"])
    parallel_assert(comm, found["options"] == expected["options"])
    ranks = min(comm.size, 2)
    parallel_assert(comm, found["random"][:ranks] == expected["random"][:ranks])
