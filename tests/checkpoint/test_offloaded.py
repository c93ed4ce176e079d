"""Saved from a memory tier, loaded into memory, and back: the same bits, whoever goes on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hpczero import Offload
from tests.checkpoint.programs import OPTIMIZERS
from tests.checkpoint.test_reshard import save_and_load

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]

WINDOW = 2**14


def on_disk(tmp: Path) -> dict[str, Any]:
    tmp.mkdir(exist_ok=True)
    return {"stage": 3, "offload": Offload("disk", "disk", "disk", tmp, WINDOW, buffers=4)}


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_a_checkpoint_does_not_know_where_state_rested(
    comm: MPI.Intracomm, folder: Path, optimizer: str
) -> None:
    away = on_disk(folder / "scratch")
    save_and_load(comm, folder / "a", (comm.size, away), (comm.size - 1, {"stage": 2}), optimizer)
    save_and_load(comm, folder / "b", (comm.size - 1, {"stage": 0}), (comm.size, away), optimizer)
    save_and_load(comm, folder / "c", (comm.size, away), (comm.size, away), optimizer)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_nor_which_parts_did(comm: MPI.Intracomm, folder: Path, stage: int, precision: str) -> None:
    offload = Offload("host", window=WINDOW, buffers=3)
    away = {"stage": stage, "precision": precision, "offload": offload}
    save_and_load(comm, folder / "a", (comm.size, away), (comm.size, away))
