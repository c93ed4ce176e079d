"""A job that writes final weights unit by unit, then takes them whole: ``weights_memory_program.py FOLDER STAGE``.

Each rank prints what its resident memory grew by in each, the bytes of the model, and the bytes of the file, if it
wrote one. It is a job of its own because memory that earlier code has freed, but which the heap keeps, would hide
what is taken.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import hpczero
from hpczero.run import loop
from tests.helpers.small_models import adamw, tiny_gpt, zeroified
from tests.runs.test_weights_writer import run_of

LAYERS, HIDDEN = 96, 192
BLOCK_NBYTES = 4 * (12 * HIDDEN**2 + 13 * HIDDEN)


def status(name: str) -> int:
    """Bytes of a line of /proc/self/status."""
    text = Path("/proc/self/status").read_text()
    (line,) = (line for line in text.splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def growth(call: Callable[[], object]) -> int:
    """Most resident bytes of this process during ``call``, above those before it."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is resident now
    before = status("VmRSS")
    call()
    return status("VmHWM") - before


def main(folder: str, stage: str) -> None:
    topology = hpczero.Topology.of_world()
    path = Path(folder) / "model.safetensors"
    model = tiny_gpt(layers=LAYERS, hidden=HIDDEN, heads=4)
    with zeroified(model, adamw(model), topology=topology, stage=int(stage)) as state:
        run = run_of(model, topology, path)
        loop._write_weights(run, 7)  # what is loaded and allocated once
        by_unit = growth(lambda: loop._write_weights(run, 7))
        at_once = growth(lambda: hpczero.full_state_dict(model))
        written = path.stat().st_size if topology.is_root else 0
        sys.stdout.write(f"grew {by_unit} {at_once} {4 * state.plan.numel} {written}\n")
        sys.stdout.flush()
    topology.free()


if __name__ == "__main__":
    main(*sys.argv[1:])
