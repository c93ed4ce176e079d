"""Reducer: how the gradients of all ranks become the mean that a rank keeps its part of.

Owns: the contract, and the exact way. Must not know: units, stages, what becomes of the mean (issue 17, seam S7).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from hpczero.comm.calls import Work
from hpczero.comm.collectives import Collectives
from hpczero.plan import UnitSpec


class Reducer(Protocol):
    """One for each model; units call it in the same order on every rank."""

    @property
    def in_place(self) -> bool:
        """Whether ``into`` may be ``local`` itself, where it is not added to: nobody else has a part of the sum."""
        ...

    def reduce(
        self, local: Tensor, into: Tensor, *, scale: float, accumulate: bool, name: str
    ) -> Work:
        """Start ``into (+)= scale *`` this rank's part of the sum of every rank's ``local``. Collective.

        Args:
            local: (num_shards * shard_numel,) fp32, bf16 or fp16; not changed, and kept until the work is done.
            into: (shard_numel,) fp32; ``local`` itself where ``in_place``, which is changed then.
            scale: multiplies the sum.
            accumulate: add to ``into`` instead of replacing it.
            name: of the unit; what a reducer keeps from one step to the next, it keeps by this name.
        """
        ...


class ExactReducer:
    """The sum of the transport: fp32, in one order, whatever the ranks and nodes."""

    def __init__(self, comm: Collectives, *, apart: bool = False) -> None:
        """Not collective.

        Args:
            comm: borrowed.
            apart: whether means lie elsewhere than where gradients are collected, of any unit of the model.
        """
        self._comm, self._apart = comm, apart

    @property
    def in_place(self) -> bool:
        """As the transport says."""
        return self._comm.alone and not self._apart

    def reduce(
        self, local: Tensor, into: Tensor, *, scale: float, accumulate: bool, name: str
    ) -> Work:
        """The transport's own ``reduce_scatter``."""
        comm = self._comm
        return comm.reduce_scatter(local, into, scale=scale, accumulate=accumulate, name=name)


class PartialReducer:
    """For gradients of which every tensor rank has a part of the sum, although each holds the whole parameter.

    With the tokens of a sample split over tensor ranks (sequence parallelism), norms and biases see a part of the
    tokens. Their gradients are summed over the tensor ranks after the data parallel ranks: what travels is a shard of
    them, once per reduction.

    Source: Korthikanti et al., arXiv 2205.05198, sec. 4.2.2 (issue 19).
    """

    def __init__(
        self, over_data: Reducer, over_tensor: Collectives, units: Sequence[UnitSpec], index: int
    ) -> None:
        """Not collective.

        Args:
            over_data: the reducer over ranks with other samples.
            over_tensor: a transport over the tensor ranks, which have the same shapes; borrowed.
            units: of the model.
            index: of this rank's shard.
        """
        self._over_data, self._over_tensor = over_data, over_tensor
        self._runs: Mapping[str, list[slice]] = {
            spec.name: runs for spec in units if (runs := _partial_runs(spec, index))
        }

    @property
    def in_place(self) -> bool:
        """As over the ranks with other samples; the tensor ranks' sum goes through memory of its own."""
        return self._over_data.in_place

    def reduce(
        self, local: Tensor, into: Tensor, *, scale: float, accumulate: bool, name: str
    ) -> Work:
        """As of every reducer. Collective over the tensor ranks too, when the work is waited for."""
        runs = self._runs.get(name)
        if runs is None:
            return self._over_data.reduce(
                local, into, scale=scale, accumulate=accumulate, name=name
            )
        fresh = torch.empty_like(into) if accumulate else into
        work = self._over_data.reduce(local, fresh, scale=scale, accumulate=False, name=name)

        def finish() -> None:
            work.wait()
            self._sum([fresh[run] for run in runs], name)
            if accumulate:
                into.add_(fresh)

        return Work(name, finish)

    def _sum(self, parts: Sequence[Tensor], name: str) -> None:
        """Replace each of ``parts`` by its sum over the tensor ranks, in one exchange."""
        group = self._over_tensor.group
        numels = [len(part) for part in parts]
        share = -(-sum(numels) // group.size)
        full = torch.zeros(share * group.size, device=parts[0].device, dtype=torch.float32)
        torch.cat(list(parts), out=full[: sum(numels)])
        mine = torch.empty(share, device=full.device, dtype=torch.float32)
        self._over_tensor.reduce_scatter(full, mine, scale=1.0, name=name).wait()
        full[group.index * share :][:share].copy_(mine)
        self._over_tensor.all_gather(full, name=name).wait()
        for part, total in zip(parts, torch.split(full[: sum(numels)], numels), strict=True):
            part.copy_(total)


def _partial_runs(spec: UnitSpec, index: int) -> list[slice]:
    """Elements of shard ``index`` whose gradients are partial sums, neighbours as one."""
    first, found = spec.layout.shard_range(index).start, list[slice]()
    for position in spec.partial:
        slot = spec.layout.slots[position]
        part = spec.layout.overlap(index, slot.name)
        if not part:
            continue
        start = slot.offset + part.start - first
        if found and found[-1].stop == start:
            start = found.pop().start
        found.append(slice(start, slot.offset + part.stop - first))
    return found
