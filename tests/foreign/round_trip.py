"""A model of transformers from disk into shards, trained there, and back to disk; beside plain torch and transformers.

Must not know: which architectures there are.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hpczero
from tests.compat.architectures import Architecture
from tests.compat.construct import Construct, Place, sgd
from tests.compat.runner import Outcome, judge, learned, train_plain
from tests.foreign.llama import library
from tests.helpers.world import World

STEPS = 2
LOGITS = 1e-6  # of the largest; kernels round the tail of a matrix by where it lies in memory


def write(architecture: Architecture, folder: Path, *, size: str = "4KB") -> None:
    """Its model as transformers writes it, in several files."""
    model: Any = architecture.build()
    model.save_pretrained(folder, max_shard_size=size)


def read(architecture: Architecture, folder: Path) -> tuple[Any, list[str]]:
    """Its model as transformers reads it, and what that missed or had too much."""
    kind = getattr(library(), architecture.model)
    model, info = kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    return model, [f"{what}: {names}" for what, names in info.items() if names]


def logits(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """What the model says of a batch, in evaluation mode, which it stays in."""
    model.eval()
    with torch.no_grad():
        output = model(**batch)
    for name in ("logits", "logits_per_image"):
        if getattr(output, name, None) is not None:
            found: Tensor = getattr(output, name)
            return found
    raise AssertionError(f"{type(output).__name__} has no logits")


class RoundTrip:
    """One architecture; ``plain`` is what one process of plain torch does with its files.

    Attributes:
        problems: what is wrong so far, in words; on rank 0.
    """

    def __init__(self, world: World, architecture: Architecture) -> None:
        """Write the files and train the reference on rank 0. Collective."""
        self.problems: list[str] = []
        self._world, self._architecture = world, architecture
        self._construct: Construct = replace(
            architecture.construct(), build=self._plain_model, steps=STEPS
        )
        self._plain = Outcome()
        self._batch = architecture.batch(Place(0, 77))
        self._before: Tensor | None = None
        problem = ""
        if world.rank == 0:
            try:
                write(architecture, world.folder / "before")
                self._plain = train_plain(self._construct, world.size)
                self._before = logits(read(architecture, world.folder / "before")[0], self._batch)
                problem = "" if learned(self._plain) else "learned nothing: proves nothing"
            except Exception:  # the other ranks wait for the verdict
                problem = f"plain torch: {traceback.format_exc()}"
        world.check(not problem, problem)

    def _plain_model(self) -> Any:
        """As transformers reads it, frozen where its own code freezes it: ``from_pretrained`` forgets that."""
        model, _ = read(self._architecture, self._world.folder / "before")
        trained = {
            name for name, p in self._architecture.build().named_parameters() if p.requires_grad
        }
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in trained)
        return model.train()

    def run(self, *, stage: int, transport: str) -> None:
        """Load, train, save, and compare. Collective."""
        name = f"stage {stage}, {transport}"
        topology = self._world.topology
        model, weights = hpczero.hf.load(self._world.folder / "before", topology=topology)
        optimizer = sgd(model)
        options: Any = {"stage": stage, "transport": transport, "initialize": weights}
        hpczero.zeroify(model, optimizer, topology=topology, **options)
        self._compare(f"{name}: loaded", lambda: self._before, logits(model, self._batch))
        model.train()
        losses = []
        for step in range(STEPS):
            place = Place(self._world.rank, step)
            optimizer.zero_grad()
            torch.manual_seed(place.seed)
            loss = model(**self._architecture.batch(place)).loss
            loss.backward()
            optimizer.step()
            losses.append(self._world.comm.allgather(loss.item()))
        state = hpczero.full_state_dict(model) or {}
        after = self._world.folder / name.replace(" ", "-").replace(",", "")
        hpczero.hf.save_pretrained(model, after)
        found = logits(model, self._batch)
        hpczero.release(model)
        if self._world.rank == 0:
            end = {f"0.{key}": value for key, value in state.items()}
            outcome = Outcome(losses=losses, end=end)
            self.problems += judge(self._construct, {name: outcome}, self._plain, self._world.size)
            again, wrong = read(self._architecture, after)
            self.problems += [f"{name}: saved and loaded by transformers: {each}" for each in wrong]
            self._compare(f"{name}: saved", lambda: logits(again, self._batch), found)

    def _compare(self, what: str, expected: Callable[[], Tensor | None], found: Tensor) -> None:
        if self._world.rank != 0:
            return
        wanted = expected()
        assert wanted is not None, "of rank 0"
        apart = float((wanted - found).abs().max())
        if not apart <= LOGITS * float(wanted.abs().max()):
            self.problems.append(f"{what}: logits differ by {apart:.2e}")
