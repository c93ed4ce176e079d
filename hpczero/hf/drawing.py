"""Parameters that no file has, such as a new head: drawn by the model's own initialisation, keyed by (seed, name).

Owns: that a parameter has the same values whichever others are drawn, and on every rank. Must not know: files, shards.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hpczero.errors import PlanError
from hpczero.hf.library import model_kind


class OwnInitialization:
    """First values of single parameters of one model."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        """Take a copy of the model, whose parameters are on the meta device. Not collective."""
        self._model = copy.deepcopy(model)
        self._seed = seed

    def draw(self, name: str) -> Tensor:
        """The whole parameter, fp32 on the CPU.

        Raises:
            PlanError: the model does not say how it is initialised.
        """
        path, _, last = name.rpartition(".")
        module = self._model.get_submodule(path)
        before = module._parameters[last]
        assert before is not None, f"{name} is a parameter"
        drawn = nn.Parameter(
            torch.full(before.shape, float("nan"), dtype=torch.float32, device="cpu"),
            requires_grad=False,
        )
        module._parameters[last] = drawn
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
                for initialize, each in self._around(path):
                    initialize(each)
        finally:
            module._parameters[last] = before
        if bool(drawn.isnan().any()):
            raise PlanError(
                f"parameter {name!r} is in no file, and the model's _init_weights leaves it without values; bring a "
                "file that has it, or set it up there"
            )
        return drawn.data

    def _around(self, path: str) -> Iterator[tuple[Any, nn.Module]]:
        """The modules around a parameter from inside out, each with the function of its model that initialises it.

        All other parameters are on the meta device, where initialising does nothing.
        """
        names = path.split(".") if path else []
        chain = [self._model.get_submodule(".".join(names[:n])) for n in range(len(names) + 1)]
        kind = model_kind()
        for place in range(len(chain) - 1, -1, -1):
            # A model inside a model initialises what is below it, itself included.
            owner: Any = next(
                each for each in reversed(chain[: place + 1]) if isinstance(each, kind)
            )
            yield owner._init_weights, chain[place]
