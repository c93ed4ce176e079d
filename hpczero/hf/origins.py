"""Origins: which parameter of a loaded model each parameter is, after a program has changed the model.

Owns: names at the load, followed by the objects themselves. Must not know: files, shards, MPI. Between ``load`` and
``zeroify`` a program may drop, reorder or wrap modules: values go with the object, as they do in plain torch. What it
puts there itself, or resizes, has no values in any file.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from hpczero.errors import PlanError

_WAYS = (
    "change the model by transformers in one process (from_pretrained, the change, save_pretrained) and load that "
    "folder, or pass initialize=f(name, tensor) that fills such parameters itself and calls weights(name, tensor) for "
    "the others"
)


class Origins:
    """Names of the parameters of one model as they were when it was loaded. Nothing here is collective."""

    def __init__(self, model: nn.Module) -> None:
        """``model``: as it was loaded."""
        self._shapes: dict[str, tuple[int, ...]] = {}
        # Not weakly: torch gives no parameter of the meta device memory that a weak reference knows of.
        self._objects = list(model.parameters())
        self._names: dict[int, str] = {}
        self._moved: dict[str, str] = {}
        for name, parameter in model.named_parameters():
            self._shapes[name], self._names[id(parameter)] = tuple(parameter.shape), name

    def bind(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Find the origin of every parameter.

        Args:
            parameters: of the model that is about to get values, by name.

        Raises:
            PlanError: one has none; the message names it.
        """
        self._moved = {
            name: self._names[id(parameter)]
            for name, parameter in parameters.items()
            if id(parameter) in self._names
        }
        others = {name: each for name, each in parameters.items() if name not in self._moved}
        empty = any(each.is_meta for each in others.values())
        for name, parameter in others.items():
            # Of a copy of the whole model no object is known, and all names are.
            if self._moved or (empty and not parameter.is_meta):
                raise PlanError(
                    f"parameter {name!r} {tuple(parameter.shape)} was put into the model after hpczero.hf.load, which "
                    f"has no values of it; {_WAYS}"
                )
        for name, parameter in parameters.items():
            self.origin(name, tuple(parameter.shape))

    def origin(self, name: str, shape: tuple[int, ...] | None = None) -> str:
        """The name at the load.

        Args:
            name: now.
            shape: whole, now; None is not compared.

        Raises:
            PlanError: there was no such parameter, or it had another shape.
        """
        before = self._moved.get(name, name)
        known = self._shapes.get(before)
        if known is None:
            raise PlanError(
                f"parameter {name!r} was not in the model that hpczero.hf.load gave; {_WAYS}"
            )
        if shape is not None and known != tuple(shape):
            raise PlanError(
                f"parameter {name!r} is {tuple(shape)}, and was {known} when hpczero.hf.load gave the model; {_WAYS}"
            )
        return before
