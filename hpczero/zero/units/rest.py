"""Rest: where what this rank keeps of one unit, values and mean gradient, lies between uses.

Owns: the contracts, and memory that is always there. Must not know: units, stages, optimizers, media, MPI.

A unit asks for its values in four ways: it copies them out, replaces them, works on them where they are, and says ahead
of time that it will want them. Where they lie meanwhile is nobody's business (issue 17, seam S2). A gradient is made in
backward, and gone after the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor

from hpczero.errors import TierError
from hpczero.memory.buffers import Fresh, Memory


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

    def at_hand(
        self, *, changes: bool = False, anew: bool = False
    ) -> AbstractContextManager[Tensor]:
        """The values in memory, (numel,), to be read inside, and written with ``changes``.

        With ``anew`` all of them are written inside; before that they may be zero.
        """
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
    def at_hand(self, *, changes: bool = False, anew: bool = False) -> Iterator[Tensor]:
        """The tensor itself."""
        yield self.tensor


class GradientRest(Protocol):
    """The mean gradient of one unit on this rank; nothing here is collective.

    Attributes:
        tensor: (numel,) fp32; has memory from ``take`` to ``put_away``, and inside ``at_hand``.
        version: another number where the gradient may have changed.
        resident: it has memory all the time.
        squares: sums of squares of its parts, as ``norm.squares`` has them, where they are known; None elsewhere.
        failure: why it is not what was reduced, on this rank alone; None where it is.
    """

    resident: bool

    @property
    def failure(self) -> TierError | None:
        """See the attributes."""
        ...

    @property
    def tensor(self) -> Tensor:
        """See the attributes."""
        ...

    @property
    def version(self) -> int:
        """See the attributes."""
        ...

    @property
    def squares(self) -> list[float] | None:
        """See the attributes."""
        ...

    def take(self) -> None:
        """Memory for it; a gradient that was put away is in it again, else the content is undefined."""
        ...

    def put_away(self) -> None:
        """Nobody works on it before the next ``take`` or ``at_hand``."""
        ...

    def drop(self) -> None:
        """Forget it."""
        ...

    def scale(self, factor: float) -> None:
        """Multiply what was put away."""
        ...

    def at_hand(self, *, changes: bool = False) -> AbstractContextManager[Tensor]:
        """``tensor`` in memory, to be read inside, and written with ``changes``."""
        ...


class ResidentGradient:
    """A gradient in memory that is taken anew for every step; whoever still points at an old one keeps it."""

    resident = True
    squares = None
    failure = None

    def __init__(self, numel: int, *, memory: Memory, device: torch.device) -> None:
        """Not held: while activations are at their most, in forward, there are no gradients yet."""
        self._fresh = Fresh(
            numel, torch.float32, memory=memory, category="gradients", device=device
        )

    @property
    def tensor(self) -> Tensor:
        """Of this step."""
        return self._fresh.tensor

    @property
    def version(self) -> int:
        """Of the tensor."""
        return self._fresh.tensor._version

    def take(self) -> None:
        """Nothing where it is there."""
        self._fresh.take()

    def put_away(self) -> None:
        """It stays."""

    def drop(self) -> None:
        """This rank lets go of it."""
        self._fresh.drop()

    def scale(self, factor: float) -> None:
        """In place."""
        self._fresh.tensor.mul_(factor)

    @contextmanager
    def at_hand(self, *, changes: bool = False) -> Iterator[Tensor]:
        """The tensor itself."""
        yield self._fresh.tensor


def same_place(one: Tensor, other: Tensor) -> bool:
    """Whether two flat tensors begin at the same element of the same storage, whether or not it has memory now."""
    alias: bool = torch._C._is_alias_of(one, other)  # type: ignore[attr-defined]
    return alias and one.storage_offset() == other.storage_offset()
