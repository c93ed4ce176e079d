"""Exact: whether the steps of a model have the same bits on any number of ranks, and what keeps them from it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from socket import gethostname

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from hpczero.accelerator import Accelerator
from hpczero.errors import StepError
from hpczero.job.group import Group
from hpczero.job.messages import arrays
from hpczero.job.topology import Topology
from hpczero.options.values import Exactness
from hpczero.plan.precision import Precision

logger = logging.getLogger("hpczero.exact")

LOOP = "run forward and backward inside `for leaf in hpczero.Leaves(model, count, step=step):`"


def why_inexact(
    model: nn.Module, topology: Topology, precision: Precision, *, sparse: bool, transport: str
) -> str:
    """What keeps a step from having the same bits on any number of ranks, and what to do; empty if nothing does.

    Not collective; the same on every rank. ``transport`` is the name that was asked for.
    """
    shard, problem = topology.shard, ""
    statistics = [
        name
        for name, module in model.named_modules()
        if isinstance(module, _NormBase) and module.track_running_stats
    ]
    if statistics:
        problem = (
            f"module {statistics[0]!r} keeps running statistics, which are rank 0's; use GroupNorm or LayerNorm, or "
            "track_running_stats=False"
        )
    elif topology.replicate.size > 1:
        problem = "replicas of the shards add up their sums; shard over all ranks (parallel.shard)"
    elif topology.sequence.size > 1:
        problem = "ranks that share the tokens of a sample (parallel.context) add up parts of a leaf; leave it at 1"
    elif precision.reduce != "fp32":
        problem = (
            f"precision.reduce is {precision.reduce}, which rounds sums of nodes; leave it at fp32"
        )
    elif precision.gather != "exact":
        problem = f"precision.gather is {precision.gather}, whose codes depend on shards; leave it at exact"
    elif sparse:
        problem = "sparse_gradients sends sums of rows; leave it out"
    elif not sums_of_nodes_are_branches(shard) and transport not in ("auto", "flat"):
        problem = (
            f"transport {transport} adds up the {shard.local_size} ranks of a node first, and only powers of two are "
            "branches of the tree; use transport flat"
        )
    return problem


def computed_on(accelerator: Accelerator) -> str:
    """What decides how a leaf is rounded, beside the program: another one of these may give other bits."""
    if accelerator.is_host:
        what = f"cpu {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} thread(s)"
    else:
        what = torch.cuda.get_device_name(accelerator.device)
    return f"{what}, torch {torch.__version__}"


def sums_of_nodes_are_branches(group: Group) -> bool:
    """Whether the sum over the ranks of each node is a whole branch of the tree, on however many nodes."""
    ranks = group.local_size
    return group.num_nodes == 1 or (group.is_rectangular and ranks & (ranks - 1) == 0)


class Exact:
    """Of one model: that its steps are summed leaf by leaf.

    Attributes:
        demanded: whether a backward outside of leaves is refused; else it is said once, and is an ordinary one.
        place: of this rank among the ranks whose gradients are summed, in the order of the sum.
        ranks: how many they are.
    """

    def __init__(self, topology: Topology, asked: Exactness) -> None:
        """Not collective."""
        self.demanded = asked == "require"
        order = [index for group in topology.shard.reduction_groups for index in group]
        self.place, self.ranks = order.index(topology.shard.index), len(order)
        self._topology, self._told = topology, False

    def refuse(self, what: str, remedy: str = LOOP) -> None:
        """Something comes whose bits depend on the number of ranks.

        Raises:
            StepError: where exactness was required.
        """
        if self.demanded:
            raise StepError(
                f"exact='require': {what}, which depends on the number of ranks; {remedy}, or zeroify with "
                "exact='prefer'"
            )
        if self._topology.is_root and not self._told:
            self._told = True
            logger.warning(
                "exact: %s, so this step is not the same on another number of ranks; %s",
                what,
                remedy,
            )

    # --- leaves that two ranks have computed ---------------------------------------------------------------------

    def compared(self, found: Sequence[Mapping[str, int]]) -> list[list[tuple[int, ...]]]:
        """Of each place the numbers that its rank has ``found``: a tuple for each time. Collective over the shards."""
        mine = np.array([[*each.values()] for each in found], dtype=np.int64)
        group = self._topology.shard
        everybody = arrays(group, np.concatenate([[[self.place] * mine.shape[1]], mine]), "leaves")
        by_place = {int(each[0, 0]): each[1:] for each in everybody}
        return [[tuple(row) for row in by_place[place].tolist()] for place in range(self.ranks)]

    def anywhere(self, suspicious: bool) -> bool:
        """Whether any rank, of whatever part of the model, has seen leaves that differ. Collective over world."""
        return bool(self._topology.world.largest(int(suspicious)))

    def accuse(
        self,
        found: Sequence[Sequence[tuple[int, ...]]],
        suspects: Sequence[int],
        units: Sequence[str],
        step: int,
        first: int,
    ) -> None:
        """Say which rank has computed a leaf wrongly. Collective over world.

        Args:
            found: of each place four times a tuple of the units' digests: of its own leaf, of that of the place before
                it, of its own again, and of that two places before.
            suspects: places whose leaf another rank has computed otherwise.
            units: of a tuple.
            step: that is taken.
            first: leaf of place 0.

        Raises:
            StepError: on every rank.
        """
        topology, problem = self._topology, ""
        names = topology.shard.gather_text(f"{self.place} rank {topology.rank} ({gethostname()})")
        rank_at = dict(name.split(" ", 1) for name in names)
        for place in suspects:
            second, third = (place + 1) % self.ranks, (place + 2) % self.ranks
            own, theirs, again = found[place][0], found[second][1], found[place][2]
            unit = next(u for u, a, b in zip(units, own, theirs, strict=True) if a != b)
            if own != again:
                culprit, why = place, "and otherwise when it computed the leaf again"
            elif self.ranks > 2 and found[third][3] in (own, theirs):
                culprit = second if found[third][3] == own else place
                why = f"and not as {rank_at[str(third)]} and the other one"
            else:
                culprit, why = place, f"or {rank_at[str(second)]} has: two ranks cannot tell"
            problem = (
                f"step {step}, leaf {first + place}: {rank_at[str(culprit)]} has computed the gradient of unit "
                f"{unit!r} wrongly, {why}. Nothing was updated. Take its node out of the job, test its hardware, and "
                "go on from the newest checkpoint"
            )
            break
        with topology.agreed("compare leaves that two ranks have computed"):
            if problem:
                raise StepError(problem)
