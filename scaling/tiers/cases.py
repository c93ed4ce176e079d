"""What is measured of training: passes and steps from a disk and in memory, and the same bytes without arithmetic.

Owns: the two models. Must not know: the order of a run, fio. Collective over the topology unless said.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

import hpczero
from hpczero import Offload
from hpczero.errors import HpcZeroError
from hpczero.job.topology import Topology
from hpczero.plan.rules import default_rule
from hpczero.tier import Fetch, Place
from scaling.contenders import base
from scaling.contenders.workload import Workload


class Pair:
    """One model twice, with all that it keeps on the tier and in memory.

    Attributes:
        sequences, context: of the batch of one rank.
        tier: of the first.
    """

    sequences: int = 1
    context: int = 1

    def __init__(self, topology: Topology, workload: Workload, offload: Offload) -> None:
        self._workload, self._topology = workload, topology
        self._away, self._away_optimizer = self._build(offload)
        self._resident, self._resident_optimizer = self._build(None)
        store = hpczero.sharding(self._away).away.store
        assert store is not None, "offload was asked for"
        self._blocks, self.tier = store.blocks, store.tier
        self._losses: dict[str, list[float]] = {"disk": [], "memory": []}
        self._taken = dict.fromkeys(self._losses, 0)

    def _build(self, offload: Offload | None) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = base.gpt(self._workload)
        optimizer = base.adamw(model.parameters())
        hpczero.zeroify(
            model,
            optimizer,
            stage=3,
            topology=self._topology,
            rule=default_rule,
            offload=offload,
        )
        return model, optimizer

    def describe(self) -> str:
        """One line for headings; not collective."""
        sized = dataclasses.replace(self._workload, sequences=self.sequences, context=self.context)
        return sized.describe()

    def warm_up(self) -> None:
        """A pass and a step of both."""
        self.disk_pass()
        self.disk_step()
        self.resident_pass()
        self.resident_step()

    def disk_pass(self) -> None:
        """Forward and backward with parameters from the tier; gradients go there."""
        self._pass("disk", self._away)

    def resident_pass(self) -> None:
        """The same in memory."""
        self._pass("memory", self._resident)

    def disk_step(self) -> None:
        """The update, window by window.

        Raises:
            HpcZeroError: losses so far are not those of memory, bit for bit.
        """
        self._away_optimizer.step()
        self._away_optimizer.zero_grad()
        self._compare()

    def resident_step(self) -> None:
        """The same in memory."""
        self._resident_optimizer.step()
        self._resident_optimizer.zero_grad()
        self._compare()

    def _pass(self, which: str, model: nn.Module) -> None:
        number = self._taken[which]
        self._taken[which] += 1
        sized = dataclasses.replace(self._workload, sequences=self.sequences, context=self.context)
        tokens, targets = base.batch(sized, step=number, rank=self._topology.rank)
        loss: Tensor = model(tokens, targets)
        loss.backward()
        self._losses[which].append(float(loss.item()))

    def _compare(self) -> None:
        pairs = list(zip(*self._losses.values(), strict=False))
        if any(disk != memory for disk, memory in pairs):
            raise HpcZeroError(
                f"losses from disk and in memory differ: {pairs}, expected the same bits"
            )

    def disk_of_a_pass(self) -> None:
        """The bytes of a pass: values twice, gradients out; what is written is what was there. Not collective."""
        places = self._places()
        self._through(places, ["values"], [])
        self._through(reversed(places), ["values"], [])
        self.lay_gradients()

    def lay_gradients(self) -> None:
        """Something to be read as gradients, where a step has dropped them. Not collective."""
        for place in self._places():
            staged = self.tier.fetch(place, [], fresh=["gradient"]).wait()
            self.tier.evict(staged, ["gradient"])
        self.tier.drain()

    def disk_of_a_step(self) -> None:
        """The bytes of a step: everything in, all but the gradients out; they are laid. Not collective."""
        places = self._places()
        parts = list(places[0].record.parts)
        self._through(places, parts, [part for part in parts if part != "gradient"])
        self.tier.drain()

    def _places(self) -> list[Place]:
        units = hpczero.sharding(self._away).units
        return [place for unit in units if unit.away is not None for place in unit.away.places]

    def _through(
        self, places: Iterable[Place], read: Sequence[str], written: Sequence[str]
    ) -> None:
        """Read and write with as much ahead as there are blocks."""
        on_their_way: deque[Fetch] = deque()
        for place in places:
            there = [part for part in read if part in place.known]
            on_their_way.append(self.tier.fetch(place, there))
            if len(on_their_way) > max(self._blocks - 2, 1):
                self.tier.evict(on_their_way.popleft().wait(), written)
        while on_their_way:
            self.tier.evict(on_their_way.popleft().wait(), written)

    def close(self) -> None:
        """Give everything back."""
        for model in (self._away, self._resident):
            hpczero.release(model)
