"""A model that rests on disk is trained, saved, loaded, collected and imported; prints what each took of memory.

``mpirun -n 2 python -m tests.checkpoint.memory_program FOLDER LAYERS``: one line of JSON from each rank. Bytes are the
most that were resident at a time, less what was before the model was made. Pages of the file that is imported do not
count: they are mapped, and the kernel takes them back when it likes.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor, nn

import hpczero
from hpczero import Offload
from hpczero.data.tokenize import ByteTokenizer
from hpczero.models import PRESETS
from hpczero.run import loop
from scaling.evidence.host import kernel_nbytes

WIDTH = 1024  # 4 MiB of fp32 in each layer
MIB = 2**20


class Deep(nn.Module):
    """Layers, each a unit."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + 0.1 * layer(x)
        return x


def resident(field: str) -> int:
    """``VmRSS``, ``RssAnon`` or ``VmHWM`` of this process, in bytes."""
    return kernel_nbytes("/proc/self/status", f"{field}:")


def peak_of(call: Callable[[], object]) -> int:
    """Most bytes that were resident while ``call`` ran."""
    Path("/proc/self/clear_refs").write_text("5")
    call()
    return resident("VmHWM")


class OwnPeak:
    """The most bytes inside the block that no file backs, and those ``before``; looked at every few milliseconds."""

    def __enter__(self) -> OwnPeak:
        gc.collect()
        self.before = self.most = resident("RssAnon")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._ended.wait(2e-3):
            self._look()

    def _look(self) -> None:
        self.most = max(self.most, resident("RssAnon"))


def main(folder: Path, layers: int) -> None:
    """Collective over world."""
    topology = hpczero.Topology.create(MPI.COMM_WORLD)
    peaks_of(topology, folder / "small", 2)  # libraries, code, heaps
    print(json.dumps(peaks_of(topology, folder / "large", layers)), flush=True)
    topology.free()


def peaks_of(topology: hpczero.Topology, folder: Path, layers: int) -> dict[str, int]:
    """By what was done. Collective over world."""
    before, own = resident("VmRSS"), resident("RssAnon")
    with torch.device("meta"):
        model = Deep(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    folder.mkdir(exist_ok=True)
    offload = Offload("disk", "disk", "disk", folder, 8 * MIB, buffers=4)

    def initialize(name: str, tensor: Tensor) -> None:
        generator = torch.Generator().manual_seed(sum(name.encode()))
        tensor.normal_(0.0, 0.03, generator=generator)

    def begin() -> None:
        hpczero.zeroify(
            model,
            optimizer,
            topology=topology,
            stage=3,
            transport="flat",  # without memory that ranks share, which counts for each of them
            initialize=initialize,
            offload=offload,
        )

    def step() -> None:
        model(torch.ones(1, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    calls: dict[str, Callable[[], object]] = {
        "zeroify": begin,
        "step": step,
        "save": lambda: hpczero.checkpoint.save(folder, model, step=1),
        "load": lambda: hpczero.checkpoint.load(folder, model),
        "weights": lambda: loop._write_weights(_run(model, topology, folder), 1),
    }
    found = {name: peak_of(call) - before for name, call in calls.items()}
    weights = folder / "model.safetensors"
    with OwnPeak() as peak:
        hpczero.checkpoint.import_weights(weights, model)
    found["import"] = peak.most - own
    hpczero.release(model)
    return found


def _run(model: nn.Module, topology: hpczero.Topology, folder: Path) -> Any:
    return SimpleNamespace(
        model=model,
        given=SimpleNamespace(topology=topology),
        lock=SimpleNamespace(lock=SimpleNamespace(check=lambda: None)),
        folder=SimpleNamespace(weights=folder / "model.safetensors"),
        card=dataclasses.asdict(PRESETS["gpt-nano"]),
        reading=SimpleNamespace(identity=lambda: {"tokenizer": ByteTokenizer().to_json()}),
        config=SimpleNamespace(train=SimpleNamespace(steps=1)),
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
