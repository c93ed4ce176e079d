"""Conversions: parameters that are made of several tensors of a file, or of another shape, and back.

Owns: the groups of tensors that a converter of transformers takes together. Must not know: files, shards, MPI. The
experts of a Mixtral, say, are one tensor each in a file and one stacked parameter in the model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hpczero.hf.assembly import Assembly, CannotAssembleError, source


@dataclass
class Group:
    """Tensors that are converted together.

    Attributes:
        first: the name by which transformers knows the result.
        converter: one of its ``WeightTransform``.
        sources: key of each tensor, and which of the converter's patterns it has met.
        shapes: of the results by name, once ``plan`` was called.
        assemblies: the results by name where they can be read by ranges, once ``plan`` was called; else empty.
    """

    first: str
    converter: Any
    sources: list[tuple[str, str]] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    assemblies: dict[str, Assembly] = field(default_factory=dict)

    def plan(self, model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Find names and shapes of the results, without values.

        Args:
            model: of which the parameters are.
            shapes: of the sources by key.
        """
        # An assembly has few of a tensor's methods: whatever else a converter calls is computing, too.
        with suppress(CannotAssembleError, AttributeError):
            self.assemblies = self.convert(model, lambda key: source(key, shapes[key]))
        found: Mapping[str, Any] = self.assemblies or self.convert(
            model, lambda key: torch.empty(shapes[key], device="meta", dtype=torch.float32)
        )
        self.shapes = {name: tuple(value.shape) for name, value in found.items()}

    def convert(self, model: nn.Module, value_of: Callable[[str], Any]) -> dict[str, Any]:
        """The results by name.

        Args:
            model: of which the parameters are; only its shapes and configuration matter.
            value_of: gives a source by its key: a tensor, or an assembly.

        Raises:
            CannotAssembleError: of assemblies: the converter does more than move boxes.
        """
        converter = copy.deepcopy(self.converter)
        for key, pattern in self.sources:
            converter.add_tensor(self.first, key, pattern, value_of(key))
        with torch.no_grad():
            found = converter.convert(self.first, model=model, config=model.config)
        return {
            name: value[0] if isinstance(value, list) else value for name, value in found.items()
        }
