"""Ways in which a checkpoint comes to harm, and what a model is, to the bit.

Must not know: what any test looks for.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import hpczero
from hpczero.checkpoint import states
from hpczero.checkpoint.disk.folder import read_manifest
from hpczero.checkpoint.disk.format import MANIFEST_FILE, STATE_FILE, Dataset
from hpczero.zero.sharding import Sharding
from tests.golden.record_checkpoint import FOLDER as GOLDEN

if TYPE_CHECKING:
    from tests.checkpoint.programs import Program

PAGE_NBYTES = 4096

Change = Callable[[dict[str, Any]], object]


def golden_copy(folder: Path, step: int = 3) -> Path:
    """A checkpoint made without MPI: the golden one, in ``folder``."""
    (origin,) = GOLDEN.glob("step-*")
    return Path(shutil.copytree(origin, folder / f"step-{step:09d}"))


def resigned(path: Path, change: Change) -> None:
    """Change the manifest of the checkpoint ``path``, and its digest with it."""
    body = json.loads((path / MANIFEST_FILE).read_text())
    del body["sha256"]
    change(body)
    head = json.dumps(body)[:-1]
    digest = hashlib.sha256(head.encode()).hexdigest()
    (path / MANIFEST_FILE).write_text(f'{head}, "sha256": "{digest}"}}')


def later_version(path: Path) -> None:
    """The manifest of the checkpoint ``path`` as a later release would write it."""
    text = dataclasses.replace(read_manifest(path), version=2).to_json()
    (path / MANIFEST_FILE).write_text(text)


def datasets(path: Path) -> list[Dataset]:
    return [dataset for dataset in read_manifest(path).datasets if dataset.nbytes]


def flip(file: Path, place: int, bit: int) -> None:
    """Change one bit; once more, and the file is as it was."""
    with file.open("r+b") as opened:
        opened.seek(place)
        (byte,) = opened.read(1)
        opened.seek(place)
        opened.write(bytes([byte ^ 1 << bit]))


def flip_in(path: Path, dataset: Dataset, element: int) -> None:
    """Change the lowest bit of an element of the checkpoint ``path``."""
    flip(path / STATE_FILE, dataset.offset + element * dataset.itemsize, 0)


def shorten(path: Path, nbytes: int) -> None:
    """Cut the state file to ``nbytes``; from its end where that is negative."""
    state = path / STATE_FILE
    state.write_bytes(state.read_bytes()[:nbytes])


def zero_page(path: Path) -> None:
    """Zero the first page of the state file's second half that is not zero."""
    state = path / STATE_FILE
    content = bytearray(state.read_bytes())
    start = len(content) // 2 // PAGE_NBYTES * PAGE_NBYTES
    assert any(content[start : start + PAGE_NBYTES]), "or nothing would change"
    content[start : start + PAGE_NBYTES] = bytes(PAGE_NBYTES)
    state.write_bytes(content)


def swap_slabs(path: Path) -> None:
    """Exchange the first two slabs of the parameters."""
    dataset = datasets(path)[0]
    state = path / STATE_FILE
    content = np.frombuffer(bytearray(state.read_bytes()), dtype=np.uint8)
    nbytes = dataset.slab_numel * dataset.itemsize
    first, second = (
        slice(dataset.offset + i * nbytes, dataset.offset + (i + 1) * nbytes) for i in (0, 1)
    )
    content[first], content[second] = content[second].copy(), content[first].copy()
    state.write_bytes(content.tobytes())


def remove(*files: Path) -> Path:
    for file in files:
        file.unlink()
    return files[0]


def put(file: Path, kind: str) -> None:
    """Something that is no file."""
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    else:
        file.symlink_to("/dev/zero" if kind == "device" else file.name)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "one byte short": lambda path: shorten(path, -1),
    "half": lambda path: shorten(path, (path / STATE_FILE).stat().st_size // 2),
    "empty": lambda path: shorten(path, 0),
    "a byte too many": lambda path: (path / STATE_FILE).write_bytes(
        (path / STATE_FILE).read_bytes() + b"\0"
    ),
    "a zero page": zero_page,
    "slabs swapped": swap_slabs,
    "no manifest": lambda path: remove(path / MANIFEST_FILE),
    "half a manifest": lambda path: (path / MANIFEST_FILE).write_text(
        (path / MANIFEST_FILE).read_text()[:900]
    ),
    "empty manifest": lambda path: (path / MANIFEST_FILE).write_text(""),
    "no state": lambda path: remove(path / STATE_FILE),
    "nothing": lambda path: remove(*path.iterdir()),
    "state is a folder": lambda path: remove(path / STATE_FILE).mkdir(),
    "a manifest without end": lambda path: (path / MANIFEST_FILE).write_text("[" * 100_000),
    "a manifest that lies": lambda path: resigned(path, lambda body: body.update(step=-1)),
    "manifest is a FIFO": lambda path: put(remove(path / MANIFEST_FILE), "fifo"),
}


@contextmanager
def repaired_after(path: Path) -> Iterator[None]:
    """Whatever is done to the checkpoint ``path`` inside is undone."""
    copy = path.with_name(f"copy-of-{path.name}")
    shutil.copytree(path, copy)
    try:
        yield
    finally:
        shutil.rmtree(path)
        copy.rename(path)


def values_of(sharding: Sharding) -> list[torch.Tensor]:
    """Of this rank, unit by unit; copies."""
    found = []
    for unit in sharding.units:
        with unit.owned_values() as values:
            found.append(values.clone())
    return found


def fingerprint(program: Program) -> str:
    """Of everything on this rank that a load sets. Not collective."""
    found = hashlib.sha256()
    sharding = hpczero.sharding(program.model)
    tensors = [torch.get_rng_state(), *program.model.buffers(), *values_of(sharding)]
    for unit in sharding.units:
        tensors += [shard.detach().as_subclass(torch.Tensor) for shard in unit.shards]
    optimizer = program.optimizer
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for state in (optimizer.state.get(parameter, {}) for parameter in parameters):
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
        found.update(repr([v for v in state.values() if not isinstance(v, torch.Tensor)]).encode())
    for tensor in tensors:
        found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    options = [
        {k: str(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups
    ]
    plain = [options, sharding.scaler.state(), sharding.skipped_steps, str(random.getstate())]
    found.update(json.dumps(plain).encode())
    found.update(states.capture()["numpy"].tobytes())
    return found.hexdigest()
