"""The final weights of a run are written unit by unit: no rank's memory grows with the model."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import hpczero
from hpczero.run import ending
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import adamw, tiny_gpt, zeroified
from tests.runs.test_weights_writer import run_of

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

LAYERS, HIDDEN = 96, 192
BLOCK_NBYTES = 4 * (12 * HIDDEN**2 + 13 * HIDDEN)


def status(name: str) -> int:
    """Bytes of a line of /proc/self/status."""
    text = Path("/proc/self/status").read_text()
    (line,) = (line for line in text.splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def growth(call: Callable[[], object]) -> int:
    """Most resident bytes of this process during ``call``, above those before it."""
    # What earlier tests have left, in cycles or in the heap, would hide what is taken: also if it went meanwhile.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is resident now
    before = status("VmRSS")
    call()
    return status("VmHWM") - before


@pytest.mark.mpi
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("stage", [1, 3])
def test_no_rank_needs_more_than_some_units_beside_its_shards(
    comm: MPI.Intracomm, topology: Topology, folder: Path, stage: int
) -> None:
    model = tiny_gpt(layers=LAYERS, hidden=HIDDEN, heads=4)
    with zeroified(model, adamw(model), topology=topology, stage=stage) as state:
        whole_nbytes = 4 * state.plan.numel
        assert whole_nbytes > 0.9 * LAYERS * BLOCK_NBYTES
        run = run_of(model, topology, folder / "model.safetensors")
        ending._write_weights(run)  # what is loaded and allocated once
        by_unit = growth(lambda: ending._write_weights(run))
        at_once = growth(lambda: hpczero.full_state_dict(model))
    # Some units, and what the heap keeps of them; both are the same for any number of layers.
    said = (
        f"{by_unit / 1e6:.1f} MB of {whole_nbytes / 1e6:.1f}, a block has {BLOCK_NBYTES / 1e6:.1f}"
    )
    parallel_assert(comm, by_unit < 14 * BLOCK_NBYTES < whole_nbytes / 6, said)
    if comm.rank == 0:  # so that the measure is one
        assert at_once > 0.7 * whole_nbytes, f"{at_once / 1e6:.1f} MB, {said}"
    assert comm.rank or (folder / "model.safetensors").stat().st_size > whole_nbytes
