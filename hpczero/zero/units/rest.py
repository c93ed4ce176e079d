"""Rest: where the values of one unit that this rank keeps lie between uses.

Owns: the contract, and memory that is always there. Must not know: units, stages, optimizers, media, MPI.

A unit asks for its values in four ways: it copies them out, replaces them, works on them where they are, and says ahead
of time that it will want them. Where they lie meanwhile is nobody's business (issue 17, seam S2).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor


class Rest(Protocol):
    """The values of one unit on this rank; nothing here is collective.

    Attributes:
        tensor: (numel,) what views are made of; only inside ``at_hand`` they can be read.
    """

    tensor: Tensor

    def start(self) -> None:
        """Begin to bring the values, which will be read soon; ``read`` brings them too."""
        ...

    def read(self, into: Tensor) -> None:
        """Copy the values to ``into``, (numel,) of any floating dtype."""
        ...

    def write(self, values: Tensor) -> None:
        """Replace the values by ``values``, (numel,) of any floating dtype."""
        ...

    def at_hand(self, *, changes: bool = False) -> AbstractContextManager[Tensor]:
        """The values in memory, (numel,), to be read inside, and written with ``changes``."""
        ...


class ResidentRest:
    """Values in a tensor of this rank's, always at hand."""

    def __init__(self, tensor: Tensor) -> None:
        """``tensor``: (numel,), which may be a part of the buffer that whole parameters are views of."""
        self.tensor = tensor

    def start(self) -> None:
        """Nothing to bring."""

    def read(self, into: Tensor) -> None:
        """Nothing where ``into`` is that very place."""
        if not same_place(self.tensor, into):
            with torch.no_grad():
                into.copy_(self.tensor)

    def write(self, values: Tensor) -> None:
        """In place."""
        if not same_place(self.tensor, values):
            with torch.no_grad():
                self.tensor.copy_(values)

    @contextmanager
    def at_hand(self, *, changes: bool = False) -> Iterator[Tensor]:
        """The tensor itself."""
        yield self.tensor


def same_place(one: Tensor, other: Tensor) -> bool:
    """Whether two flat tensors begin at the same element of the same storage, whether or not it has memory now."""
    alias: bool = torch._C._is_alias_of(one, other)  # type: ignore[attr-defined]
    return alias and one.storage_offset() == other.storage_offset()
