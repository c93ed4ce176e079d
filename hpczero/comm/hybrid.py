"""The hybrid transport: shards over one group of ranks, and replicas of every shard over another.

    all_gather       inside: the shards of one group, which lies near together
    reduce_scatter   inside: this rank's shard of the group's sum | outside: summed over the replicas of the shard

Parameters never leave the group; between groups travels one shard of the gradient per rank and step. Where a group is a
node, the order of the sum is that of one group over all nodes: a tree in each node, then over nodes.

Source: Zhang et al., MiCS, arXiv 2205.00119, sec. 3.4; FSDP's hybrid sharding, arXiv 2304.11277, sec. 3.2.2.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from hpczero.comm.background import Background
from hpczero.comm.calls import Work
from hpczero.comm.codes import SentCodes
from hpczero.comm.collectives import CodedShard, Collectives, SecondaryCopy
from hpczero.job.topology import Topology
from hpczero.kernels.tree_sum import ShardSum
from hpczero.memory.buffers import Buffer, Scratch, Use
from hpczero.plan.footprint import Footprint
from hpczero.plan.layout import Coding


class Hybrid(Collectives):
    """Two transports as one. ``group`` is that of the shards, ``everybody`` all replicas of them."""

    def __init__(
        self,
        topology: Topology,
        inside: Collectives,
        outside: Collectives,
        *,
        strict: bool = False,
        overlap: bool = False,
    ) -> None:
        """Not collective.

        Args:
            topology: whose shard group ``inside`` serves.
            inside: all-gathers and reduce-scatters of shards; closed with this one.
            outside: over a group of its own with the ranks of ``topology.replicate``; closed and freed with this one.
            strict: as in Collectives.
            overlap: whether a thread sums over replicas while the caller computes. The MPI must let two threads call
                it (``background.can_run_in_background``).
        """
        super().__init__(
            topology,
            strict=strict,
            memory=inside.memory,
            node_dtype=inside.node_dtype,
            reach=inside.reach,
        )
        self._inside, self._outside = inside, outside
        self.secondary = inside.secondary
        # One account and one clock: a call of its within one of ours counts once.
        inside.calls = self.calls
        outside.calls.order = None  # its calls follow from ours
        replicas = topology.replicate
        self._replicas, self._place = replicas.size, replicas.index
        self._background = (
            Background(replicas.watchdog, self.reach.accelerator) if overlap else None
        )
        # Each waits for a sum inside, and begins the one over replicas; oldest first.
        self._summed_inside: deque[Work] = deque()
        self._wire = Scratch(self.memory, category="exchange", device=self.device)
        self._whole = Scratch(self.memory, category="exchange", device=self.device)

    @override
    def allocate(self, numel: int, dtype: torch.dtype, **how: Any) -> Buffer:
        return self._inside.allocate(numel, dtype, **how)

    @override
    def settle(self) -> None:
        self._inside.settle()

    @override
    def describe(self) -> str:
        when = ", while the model computes" if self._background is not None else ""
        return (
            f"{self.group.size} shards: {self._inside.describe()}; {self._replicas} replicas of each: "
            f"{self._outside.describe()}{when}"
        )

    @override
    def measured(self) -> list[str]:
        return [*self._inside.measured(), *self._outside.measured()]

    @property
    @override
    def footprint(self) -> Footprint:
        replicas = self._outside.group
        return replace(
            self._inside.footprint,
            replicas=replicas.size,
            replica_nodes=replicas.num_nodes,
            replica_carriers=self._outside.footprint.carriers,
        )

    @override
    def _sent_nbytes(
        self, full: Tensor, shard_numel: int, use: Use, coding: Coding | None = None
    ) -> int:
        return self._inside._sent_nbytes(full, shard_numel, use, coding)

    @override
    def _all_gather(
        self, full: Tensor, shard_numel: int, name: str, coded: CodedShard | None = None
    ) -> Work:
        return self._inside._all_gather(full, shard_numel, name, coded)

    @override
    def _all_gather_again(
        self,
        full: Tensor,
        shard_numel: int,
        name: str,
        copy: SecondaryCopy,
        coded: CodedShard | None,
    ) -> Work:
        return self._inside._all_gather_again(full, shard_numel, name, copy, coded)

    @override
    def _reduce_scatter(
        self, full: Tensor, into: ShardSum, name: str, codes: SentCodes | None = None
    ) -> Work:
        assert codes is None, "refused with replicas"
        out = into.out
        partial = torch.empty_like(out) if into.accumulate else out
        inside = self._inside._reduce_scatter(full, ShardSum(partial), name)
        what = f"the sum over replicas of {name!r} (step {self.calls.step})"
        outside: list[Work] = []  # once it has begun on a thread

        def sum_replicas() -> None:
            self._sum_replicas(partial, into, name)

        def begin() -> None:
            inside.wait()
            if self._background is not None:
                wait = self._background.start(what, sum_replicas)
                outside.append(self.calls.elsewhere(name, wait))
                return
            with self.calls.timed(what):
                sum_replicas()

        def finish() -> None:
            if begun in self._summed_inside:
                self._begin(until=begun)
            for work in outside:
                work.wait()

        self._begin()  # the sums inside end in their order; the last one had a unit's time for it
        begun = Work(name, begin)
        self._summed_inside.append(begun)
        # A reduce-scatter in the dtype of partial sums, and a gather in fp32.
        other = (self._replicas - 1) * self._share_numel(len(out))
        sent = other * (self.node_dtype.itemsize + torch.float32.itemsize)
        self.calls.count("replicas", sent)
        return Work(name, finish)

    def _begin(self, *, until: Work | None = None) -> None:
        """Begin the sums over replicas whose sums inside are under way, oldest first: all ranks in the same order."""
        while self._summed_inside:
            first = self._summed_inside[0]
            first.wait()
            self._summed_inside.popleft()
            if first is until:
                return

    def _sum_replicas(self, partial: Tensor, into: ShardSum, name: str) -> None:
        """Bring the sum of every replica's ``partial`` ``into`` its place; the same bits on all replicas."""
        out, share = into.out, self._share_numel(len(partial))
        wire = self._wire.get(share * self._replicas, self.node_dtype)
        wire[: len(partial)].copy_(partial)
        wire[len(partial) :].zero_()
        whole = self._whole.get(share * self._replicas, torch.float32)
        mine = whole[self._place * share :][:share]
        self._outside.reduce_scatter(wire, mine, scale=into.scale, name=name).wait()
        self._outside.all_gather(whole, name=name).wait()
        (out.add_ if into.accumulate else out.copy_)(whole[: len(out)])

    def _share_numel(self, shard_numel: int) -> int:
        """Elements of a shard that each of its replicas sums."""
        return -(-shard_numel // self._replicas)

    @override
    def close(self) -> None:
        self._begin()
        if self._background is not None:
            self._background.close()
        self._wire.release()
        self._whole.release()
        replicas = self._outside.group
        self._outside.close()
        self._inside.close()
        replicas.free()
        super().close()
