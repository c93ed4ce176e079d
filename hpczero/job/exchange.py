"""Exchange: what ranks of a training tell each other beside gradients: tensors, objects, decisions.

Owns: tensors as bytes and back, and which decisions of a rank are everybody's. Must not know: who asks, models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from hpczero.errors import CommError
from hpczero.job import collected
from hpczero.job.told import told_all
from hpczero.job.topology import Topology


class Exchange:
    """The ranks of a training. Methods are collective over the topology's world."""

    def __init__(self, topology: Topology) -> None:
        """Not collective."""
        self.topology = topology

    def tensors(self, mine: Tensor, what: str) -> list[Tensor]:
        """``mine`` of every rank in rank order, on the device of ``mine``.

        Args:
            mine: any shape, device and dtype; dtype and number of dimensions are equal on all ranks.
            what: names the call.

        Raises:
            CommError: on every rank; a rank is in another call, or brings another dtype or number of dimensions.
        """
        with self.topology.watchdog.operation(what):
            return self._tensors(mine, what)

    def _tensors(self, mine: Tensor, what: str) -> list[Tensor]:
        data = mine.detach().cpu().contiguous()
        form = (str(data.dtype), tuple(data.shape))
        forms = collected.same_call(self.topology.world, what, form)
        kinds = [(dtype, len(shape)) for dtype, shape in forms]
        odd = next((rank for rank, kind in enumerate(kinds) if kind != kinds[0]), None)
        if odd is not None:
            self._refuse(
                f"{what}: rank {odd} brings {kinds[odd][0]} of {kinds[odd][1]} dimension(s), and rank 0 {kinds[0][0]} "
                f"of {kinds[0][1]}; give tensors of one kind on all ranks"
            )
        raw = data.reshape(-1).view(torch.uint8).numpy() if data.numel() else np.empty(0, np.uint8)
        found = collected.arrays(self.topology.world, raw, what)
        return [
            torch.from_numpy(part).view(data.dtype).reshape(shape).to(mine.device)
            if part.size
            else mine.new_empty(shape)
            for part, (_, shape) in zip(found, forms, strict=True)
        ]

    def _refuse(self, text: str) -> NoReturn:
        error = CommError(text)
        told_all(error, self.topology.world.comm)
        raise error

    def joined(self, mine: Tensor, what: str) -> Tensor:
        """``mine`` of every rank, one after the other along the first dimension; numbers become a vector.

        Raises:
            CommError: as ``tensors``; or other dimensions than the first differ between ranks.
        """
        found = self.tensors(mine[None] if mine.dim() == 0 else mine, what)
        shapes = [tuple(part.shape) for part in found]
        odd = next((rank for rank, shape in enumerate(shapes) if shape[1:] != shapes[0][1:]), None)
        if odd is not None:
            self._refuse(
                f"{what}: rank {odd} brings shape {shapes[odd]}, and rank 0 {shapes[0]}; only the first dimension may "
                "differ: call pad_across_processes first"
            )
        return torch.cat(found)

    def reduced(self, mine: Tensor, reduction: str, what: str) -> Tensor:
        """Sum, mean or maximum of ``mine`` over ranks, elementwise, in rank order; equal shapes on all ranks."""
        found = torch.stack(self.tensors(mine, what))
        if reduction == "max":
            return found.amax(0)
        total = found.sum(0, dtype=mine.dtype)
        return total / self.topology.size if reduction == "mean" else total

    def padded(self, mine: Tensor, dim: int, value: Any, *, first: bool, what: str) -> Tensor:
        """``mine`` made as long in ``dim`` as the longest of any rank's, with ``value``.

        Args:
            mine: any shape; without that dimension it is returned as it is.
            dim: dimension that is lengthened.
            value: what is put in.
            first: whether it is put before the elements instead of after them.
            what: names the call.
        """
        if not -mine.dim() <= dim < mine.dim():
            return mine
        with self.topology.watchdog.operation(what):
            length = max(collected.objects(self.topology.world, mine.shape[dim], what))
            more = length - mine.shape[dim]
            if more == 0:
                return mine
            shape = list(mine.shape)
            shape[dim] = length
            longer = mine.new_full(shape, value)
            longer.narrow(dim, more if first else 0, mine.shape[dim]).copy_(mine)
            return longer

    def objects(self, mine: Any, what: str) -> list[Any]:
        """``mine`` of every rank in rank order; it can be pickled."""
        return collected.objects(self.topology.world, mine, what)

    def of_rank(self, mine: Any, rank: int, what: str) -> Any:
        """``mine`` of that rank; it can be pickled."""
        with self.topology.watchdog.operation(what):
            return self.objects(mine if self.topology.rank == rank else None, what)[rank]

    def of_root(self, mine: Any, what: str) -> Any:
        """``mine`` of rank 0; it can be pickled."""
        return self.of_rank(mine, 0, what)

    def any_of(self, flags: dict[str, bool], what: str) -> dict[str, bool]:
        """Each flag, True if it is on any rank."""
        with self.topology.watchdog.operation(what):
            found = self.objects(flags, what)
            return {name: any(each[name] for each in found) for name in flags}

    def mean(self, mine: Tensor, what: str) -> Tensor:
        """The mean of one number of each rank, rounded once."""
        with self.topology.watchdog.operation(what):
            collected.same_call(self.topology.world, what)
            total = self.topology.world.total(float(mine))
            return torch.full_like(mine, total / self.topology.size)

    def on_root(self, act: Callable[[], object], what: str) -> None:
        """Run ``act`` on rank 0; if it fails there, all ranks raise."""
        with self.topology.agreed(what):
            if self.topology.is_root:
                act()
