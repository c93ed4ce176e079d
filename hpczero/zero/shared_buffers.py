"""SharedBuffers: the persistent buffers of a model (running statistics), which are rank 0's after every step.

Owns: which buffers there were at first, and what is sent of them. Must not know: parameters, units, when buffers are
shared.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from hpczero.comm.collectives import Collectives
from hpczero.errors import StepError
from hpczero.job.group import unlike
from hpczero.job.mesh import DATA_SEQUENCE
from hpczero.job.topology import Topology
from hpczero.zero.units.module_buffers import (
    bytes_of,
    modules_of,
    persistent_buffers,
    set_bytes,
    signature,
    version_of,
)


class SharedBuffers:
    """Persistent buffers of one model."""

    def __init__(self, model: nn.Module, topology: Topology, collectives: Collectives) -> None:
        """Note the buffers that the model has now; all ranks must keep the same ones. Not collective."""
        self._model = model
        self._topology = topology
        self._collectives = collectives
        self._first = self._describe()
        self._signature = signature(modules_of(model))
        self._any = bool(self._signature)  # on all ranks alike
        self._known: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    @property
    def now(self) -> list[Tensor]:
        """The buffers as they are now. A forward may replace them (``self.mean = ...``)."""
        return list(persistent_buffers(self._model).values())

    def _describe(self) -> list[str]:
        named = persistent_buffers(self._model).items()
        return [f"buffer {name} {tuple(b.shape)} {b.dtype}" for name, b in named]

    def replaced(self, modules: Iterable[nn.Module]) -> list[str]:
        """Buffers that came, went, or changed shape or dtype since ``zeroify``. Ranks must agree on them.

        Args:
            modules: modules that the model has now.
        """
        found = signature(modules)
        self._any = bool(found)
        if found == self._signature:
            return []
        now, first = self._describe(), self._first
        if now == first:
            return []
        gone = [f"no {text}" for text in first if text not in now]
        return [text for text in now if text not in first] + gone

    def check_equal(self, root: int) -> None:
        """Refuse to share buffers if ranks have others than rank ``root`` of ``data_sequence``. Collective over world.

        Raises:
            StepError: on every rank; the message names buffers.
        """
        here = self._describe()
        self._any = bool(here)
        differs = unlike(self._topology.data_sequence, here, root)
        first = self._topology.mesh.members(self._topology.rank, *DATA_SEQUENCE)[root]
        with self._topology.agreed("share the buffers"):
            if differs:
                raise StepError(
                    f"rank {self._topology.rank}: the model has {differs[0]}, where rank {first} has {differs[1]}; "
                    "change shapes and dtypes of buffers, add and remove them on every rank alike"
                )

    def share(self, root: int = 0) -> None:
        """Give every rank the values of ``root``, as DDP does. Collective over world.

        Ranks have compared which buffers exist before: ``replaced`` at a step, ``check_equal`` otherwise.
        """
        if not self._any:
            return
        buffers = self.now
        with torch.no_grad():
            parts = [bytes_of(buffer) for buffer in buffers]
            packed = torch.cat(parts)
            self._collectives.broadcast(packed, root=root, name="buffers").wait()
            pieces = torch.split(packed, [part.numel() for part in parts])
            pairs = zip(parts, pieces, strict=True)
            differ = torch.stack([(mine != new).any() for mine, new in pairs]).tolist()
            for buffer, new, differs in zip(buffers, pieces, differ, strict=True):
                # One that nobody changed is left alone: a graph from before the step may need it. One that was changed
                # is written on every rank, also where it is right, so that such a graph raises on all ranks or on none.
                if differs or not self._is_known(buffer):
                    set_bytes(buffer, new)
        self._known = {id(b): (weakref.ref(b), version_of(b)) for b in buffers}

    def _is_known(self, buffer: Tensor) -> bool:
        """Whether a buffer was among those that were shared last, and has not changed since."""
        known = self._known.get(id(buffer))
        return known is not None and known[0]() is buffer and known[1] == version_of(buffer)
