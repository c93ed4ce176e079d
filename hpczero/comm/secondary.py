"""The secondary copy: what this rank's node needs to gather whole parameters again without the other nodes.

Owns: which part of which unit is kept, and whether it is still of the values of today. Must not know: how parts reach
the node, units, stages.

At stage 3 parameters are gathered for forward and again for backward. A node keeps one copy of them between the two, a
part on each of its ranks, so that backward asks nobody outside: of 8Ψ bytes between nodes in a step of half precision
6Ψ are left, for Ψ parameters' bytes more per node.

Source: Wang et al., ZeRO++, arXiv 2306.10209, sec. 3.3 (hpZ); Zhang et al., MiCS, arXiv 2205.00119 (issue 19).
"""

from __future__ import annotations

import torch
from torch import Tensor

from hpczero.memory.buffers import CPU, Buffer, Memory


class SecondaryCopy:
    """Parts of units, by name. Nothing here is collective; every rank makes the same calls."""

    def __init__(self, memory: Memory, *, nodes: int, device: torch.device = CPU) -> None:
        """Empty; parts are counted in ``memory`` as ``secondary``."""
        self._memory, self._nodes, self._device = memory, nodes, device
        self._parts: dict[str, Buffer] = {}
        self._valid: set[str] = set()

    def has(self, name: str) -> bool:
        """Whether the part of unit ``name`` is of its values of today."""
        return name in self._valid

    def part(self, name: str, like: Tensor) -> Tensor:
        """The part of unit ``name``; made where there is none, with the size and dtype of ``like``."""
        if name not in self._parts:
            self._parts[name] = Buffer(
                like.numel(),
                like.dtype,
                memory=self._memory,
                category="secondary",
                device=self._device,
            )
        return self._parts[name].tensor

    def keep(self, name: str) -> None:
        """The part of unit ``name`` is about to be filled with the values of today."""
        self._valid.add(name)

    def forget(self, name: str) -> None:
        """Unit ``name`` has other values from now on."""
        self._valid.discard(name)

    def drop(self, name: str) -> None:
        """There is no unit ``name`` any more: give its memory back."""
        self.forget(name)
        if name in self._parts:
            self._parts.pop(name).release()

    def spared_nbytes(self, full: Tensor, shard_numel: int) -> int:
        """Bytes that this rank would have sent between nodes for one more gather of ``full``."""
        return (self._nodes - 1) * shard_numel * full.element_size()

    def close(self) -> None:
        """Give the memory back."""
        self._valid.clear()
        for buffer in self._parts.values():
            buffer.release()
        self._parts.clear()
