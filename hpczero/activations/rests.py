"""Rest: where the input of a block lies from the block's forward to its backward. The contract, and the device's own.

Owns: the contract, and the accounts of bytes held. Must not know: blocks, autograd, MPI.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from hpczero.activations.form import Form
from hpczero.memory.buffers import Memory

INPUTS = "block inputs"  # category of the ledger


class Kept:
    """An input that was given to a ``Rest``. Its room comes back after the last reference to it is gone.

    Attributes:
        form: of the tensor.
        what: of the ``Rest`` that made it.
    """

    def __init__(self, form: Form, what: Any, dropped: deque[Any] | None = None) -> None:
        """``dropped`` gets ``what`` in the end, on whatever thread and inside whatever call that is."""
        self.form, self.what, self._dropped = form, what, dropped

    def __del__(self) -> None:
        if self._dropped is not None:
            self._dropped.append(self.what)


class Rest(ABC):
    """Where inputs lie. Any thread may call it.

    Attributes:
        memory: ledger of the bytes held where blocks compute, staging left out.
    """

    def __init__(self) -> None:
        self.memory = Memory()

    def begin(self, moving: str) -> None:
        """A call of a block begins; ``moving``: which of its arguments will be kept, or why none can be.

        Raises:
            StepError: ranks that keep them together would not keep the same ones; on all of these ranks.
        """
        return

    @abstractmethod
    def keep(self, tensor: Tensor, call: int) -> Kept:
        """Take over an input; returns before it is written.

        Args:
            tensor: whose values nobody changes until the next one is kept.
            call: of which block it is, numbered as they come: its inputs are brought in the order in which they are
                kept, and those of later calls before those of earlier ones.

        Raises:
            TierError: this is closed.
        """

    @abstractmethod
    def bring(self, kept: Kept) -> Tensor:
        """A tensor of the same values and the same form; any number of times.

        Raises:
            TierError: it could not be kept, or cannot be read.
        """

    @abstractmethod
    def collect(self) -> None:
        """Take back the room of what nobody refers to any more; every other call does so too."""

    def close(self) -> None:
        """Give everything back."""
        return


class Here(Rest):
    """On the device: the tensor itself."""

    def __init__(self) -> None:
        super().__init__()
        self._dropped: deque[int] = deque()

    @override
    def keep(self, tensor: Tensor, call: int) -> Kept:
        self.collect()
        kept = _Held(Form.of(tensor), tensor.nbytes, self._dropped)
        kept.tensor = tensor.detach()
        self.memory.add(INPUTS, tensor.nbytes)
        return kept

    @override
    def bring(self, kept: Kept) -> Tensor:
        self.collect()
        assert isinstance(kept, _Held), "made by keep"
        return kept.tensor

    @override
    def collect(self) -> None:
        while self._dropped:
            self.memory.add(INPUTS, -self._dropped.popleft())


class _Held(Kept):
    tensor: Tensor


def version_of(tensor: Tensor) -> int:
    """Version of ``tensor``; a tensor of inference mode has none, and cannot be changed where it counts."""
    return 0 if tensor.is_inference() else int(tensor._version)


def changed(tensor: Tensor, version: int) -> RuntimeError | None:
    """What torch says of a saved tensor that was changed in place since."""
    now = version_of(tensor)
    if now == version:
        return None
    kind = f"{torch.typename(tensor)} {list(tensor.shape)}"
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: [input of a "
        f"checkpointed block, {kind}] is at version {now}; expected version {version} instead"
    )
