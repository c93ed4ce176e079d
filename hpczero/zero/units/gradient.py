"""LocalGradient: one rank's own gradient of a whole unit, from autograd to the reduction.

Owns: the flat buffer gradients are copied into, and their sum over micro-batches. Must not know: ranks, reductions,
hooks.

Autograd's tensors are copied and dropped: cheaper than accumulating into a buffer that must be zeroed first, and a
parameter without a gradient costs nothing until the buffer is completed. Large ones go one by one, so that they are not
there twice. Small ones, of norms and biases, wait for each other: one call, or launch, moves all of them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hpczero.comm.collectives import Collectives
from hpczero.errors import StepError
from hpczero.memory.buffers import Buffer, Use
from hpczero.plan.layout import ShardLayout

SMALL_NUMEL = 2**14  # a copy of more takes longer than its call


class LocalGradient:
    """(padded_numel,) in the parameter dtype, held from the first gradient to ``clear``, or for ever with ``keep``.

    Where the mean over ranks is this rank's own gradient, it is collected where the mean will lie (``landing``).

    Attributes:
        filled: for each slot, whether a gradient has come in.
    """

    def __init__(
        self,
        layout: ShardLayout,
        dtype: torch.dtype,
        *,
        comm: Collectives,
        keep: bool,
        landing: Callable[[], Tensor | None] | None = None,
    ) -> None:
        """Not collective.

        Args:
            layout: of the unit.
            dtype: of the parameters.
            comm: the transport, for memory.
            keep: whether the memory stays between steps.
            landing: asked at the first gradient of a reduction: (padded_numel,) of ``dtype`` for all of them, which
                stays the caller's, or None. Without it there is never any.
        """
        self.filled = [False] * len(layout.slots)
        self._layout = layout
        self._comm = comm
        self._wire = comm.allocate(
            layout.padded_numel,
            dtype,
            category="gradients" if keep else "unsharded",
            use=Use.REDUCE,
            keep=keep,
        )
        self._wire.release()
        self._landing = landing
        self._flat: Tensor | None = None  # where gradients go until ``clear``, if not to ``_sum``
        self._sum: Buffer | None = None  # fp32 sum over micro-batches, for half dtypes only
        self._views: list[Tensor] = []  # of ``_flat``, one for each slot
        self._small: dict[int, Tensor] = {}  # gradients that wait, by slot
        self._small_adds = False  # they are added, else copied
        self._shapes = [
            torch.empty(slot.shape, device="meta", dtype=torch.float32) for slot in layout.slots
        ]
        # torch 2.8 gives views of no elements the shape (0,).
        self._empty = [(p, slot.shape) for p, slot in enumerate(layout.slots) if not slot.numel]

    @property
    def _half(self) -> bool:
        return self._wire.tensor.dtype is not torch.float32

    def add(self, position: int, gradient: Tensor, accumulating: bool) -> None:
        """Add ``gradient`` to slot ``position``.

        Args:
            position: slot index.
            gradient: dense, of the slot's shape.
            accumulating: more micro-batches follow before the reduction; half gradients are then summed in fp32,
                because their sum in half precision loses what is small against it.

        Raises:
            StepError: a sparse gradient.
        """
        if gradient.layout is not torch.strided:
            raise StepError(
                f"rank {self._comm.rank}: parameter {self._layout.slots[position].name!r} got a {gradient.layout} "
                "gradient, expected a dense one; build its module with sparse=False"
            )
        if torch.is_grad_enabled():  # create_graph=True
            gradient = gradient.detach()
        adds = self.filled[position]
        if self._layout.slots[position].numel <= SMALL_NUMEL and not (accumulating and self._half):
            small = self._small
            if not small:
                self._buffer(False)  # it is planned to be there from the first gradient on
            elif adds != self._small_adds or position in small:
                self._move_small()
            small[position], self._small_adds = gradient, adds
            self.filled[position] = True
            return
        self._move_small()
        into = self._view(position, accumulating)
        if adds:
            into.add_(gradient)
        else:
            into.copy_(gradient)
        self.filled[position] = True

    def _move_small(self) -> None:
        """Those that wait go to the buffer."""
        if not self._small:
            return
        self._buffer(False)
        # Where they go to the wire or to the mean, the views of all slots are there.
        views = self._views if self._sum is None else None
        into = [views[p] if views else self._view(p, False) for p in self._small]
        gradients = [*self._small.values()]
        self._small.clear()
        if self._small_adds:
            torch._foreach_add_(into, gradients)
        else:
            torch._foreach_copy_(into, gradients)

    def _view(self, position: int, accumulating: bool) -> Tensor:
        """Of the buffer that gradients go to now, in the slot's shape."""
        flat = self._buffer(accumulating)
        if self._sum is None:
            return self._views[position]
        slot = self._layout.slots[position]
        return flat[slot.offset : slot.stop].view(slot.shape)

    def _make_views(self, flat: Tensor) -> None:
        # Memory that is given back and taken again comes back to its views; some transports give other memory instead.
        if not (self._views and torch._C._is_alias_of(self._views[0], flat)):  # type: ignore[attr-defined]
            with torch.inference_mode(False):
                # One call for all: they are made anew each step where the mean is collected in place.
                self._views = [*torch._C._nn.unflatten_dense_tensors(flat, self._shapes)]
                for position, shape in self._empty:
                    self._views[position] = flat[:0].view(shape)

    def complete(self) -> Tensor:
        """The whole gradient for the wire: zero where none came in, padding included."""
        self._move_small()
        gradients = self._buffer(False)
        if not all(self.filled):
            for filled, slot in zip(self.filled, self._layout.slots, strict=True):
                if not filled:
                    gradients[slot.offset : slot.stop].zero_()
        if self._layout.numel < self._layout.padded_numel:
            gradients[self._layout.numel :].zero_()
        summed = self._sum
        if summed is not None:
            self._sum = None
            gradients = self._buffer(False)
            gradients.copy_(summed.tensor)
            summed.release()
        return gradients

    def clear(self) -> None:
        """Forget everything and give the memory back, unless it is kept."""
        self.filled = [False] * len(self.filled)
        self._small.clear()
        if self._sum is not None:
            self._sum.release()
            self._sum = None
        if self._flat is not None and self._flat is not self._wire.tensor:
            self._views = []  # else the mean would stay in memory after everybody has dropped it
        self._flat = None
        self._wire.release()

    def _buffer(self, accumulating: bool) -> Tensor:
        if accumulating and self._sum is None and self._half:
            self._sum = self._comm.allocate(
                self._layout.padded_numel, torch.float32, category="accumulated"
            )
            if any(self.filled):  # an earlier backward was not announced as one of several
                self._sum.tensor.copy_(self._wire.tensor)
        if self._sum is not None:
            return self._sum.tensor
        if self._flat is None:
            landing = None if self._landing is None else self._landing()
            if landing is None:
                self._wire.take()
                landing = self._wire.tensor
            self._make_views(landing)
            self._flat = landing
        return self._flat
