"""UnitGradients: the gradients of one unit, from autograd to the optimizer.

Owns: this rank's own gradient, its reduction, the mean over ranks that the optimizer reads, and which parameters have
one. Must not know: values, modules, when to act (`schedule`), optimizers (they see `shards`).

    local       this rank's gradient      (padded_numel,) param dtype, from first use in backward to the reduction;
                                          one rank alone collects it where the mean will lie, in fp32
    reduced     mean over ranks           fp32, this rank's shard, or the whole unit where the optimizer is replicated;
                                          ``shards[i].grad`` are views of it; made in backward, gone with zero_grad
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, nullcontext

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hpczero.comm.calls import Work
from hpczero.comm.collectives import Collectives
from hpczero.memory.buffers import DTYPES
from hpczero.plan import Stage, UnitSpec
from hpczero.plan.layout import ShardLayout
from hpczero.plan.precision import Precision
from hpczero.zero.units.away_shard import GradientRest
from hpczero.zero.units.gradient import LocalGradient
from hpczero.zero.units.guard import (
    own_gradient,
    set_own_gradient,
    set_own_gradients,
    take_own_gradient,
)
from hpczero.zero.units.reducer import Reducer
from hpczero.zero.units.shards import Shards

# Usage: which parameters of a unit have a gradient, on whatever rank; the others have None, as in plain torch.
#
# A zero gradient is not None: weight decay and momentum go on with it. A loop may set gradients to None through the
# model, which all ranks see, or through the optimizer's pieces, which only the owner of a piece sees. So each rank
# keeps what it used since the last step apart from what was known before it, and the step puts together what all have
# seen.

Flags = npt.NDArray[np.bool_]


class Usage:
    """Of the slots of one unit; not collective.

    Attributes:
        now: (slots,) whether this rank had a gradient since the last step.
        emptied: (slots,) whether a piece that this rank holds was found to be None at the first reduction since.
        late: whether one was found so at a later one; nobody else can tell then what was used before it.
    """

    def __init__(self, slots: int) -> None:
        self.now = np.zeros(slots, dtype=bool)
        self.emptied = np.zeros(slots, dtype=bool)
        self.late = False
        self._before = np.zeros(slots, dtype=bool)  # known to all ranks at the last step
        self._announced = np.zeros(slots, dtype=bool)  # set to None where all ranks see it
        self._reductions = 0  # since the last step

    def __len__(self) -> int:
        return len(self.now)

    def found_none(self, position: int) -> None:
        """A reduction finds that a piece of a slot was set to None since the last one."""
        if self._announced[position]:
            return
        if self._reductions:
            self.late = True
        else:
            self.emptied[position] = True

    def reduced(self, filled: Sequence[bool]) -> None:
        """A reduction brings gradients of the slots that this rank ``filled``."""
        if all(filled):
            self.now[:] = True
        else:
            self.now |= np.array(filled, dtype=bool)
        self._announced[:] = False
        self._reductions += 1

    def drop(self, position: int) -> None:
        """The gradient of one slot was set to None, on all ranks."""
        self.now[position] = self._before[position] = False
        self._announced[position] = True

    def drop_all(self) -> None:
        """All gradients are gone, on all ranks."""
        for flags in (self.now, self.emptied, self._before, self._announced):
            flags[:] = False
        self.late, self._reductions = False, 0

    def step(self, now: Flags, emptied: Flags) -> Flags:
        """The step begins. Args: ``now`` and ``emptied`` of any rank. Returns which slots have a gradient, (slots,)."""
        used = now | (self._before & ~emptied)
        self.drop_all()
        self._before = used
        return used


def whole_copy(values: Tensor, layout: ShardLayout, comm: Collectives, *, name: str) -> Tensor:
    """(layout.numel,) fp32 copy. Collective where ``values`` are a shard.

    Args:
        values: (padded_numel,), equal on all ranks, or (shard_numel,), this rank's.
        layout: of the whole.
        comm: the transport.
        name: for its messages.
    """
    if values.numel() == layout.padded_numel:
        return values[: layout.numel].detach().to(torch.float32, copy=True)
    full = torch.empty(layout.padded_numel, dtype=torch.float32, device=comm.device)
    index = comm.group.index
    full[index * layout.shard_numel : (index + 1) * layout.shard_numel].copy_(values.detach())
    comm.all_gather(full, name=name).wait()
    return full[: layout.numel]


class UnitGradients:
    """Of one trained unit.

    Attributes:
        usage: which parameters have a gradient.
        rest: where ``reduced`` lies from its reduction to the step.
        drops: (slots,) int64, how often each slot's gradient was set to None.
    """

    def __init__(
        self,
        spec: UnitSpec,
        optimized: Shards,
        *,
        stage: Stage,
        precision: Precision,
        comm: Collectives,
        reducer: Reducer,
        rest: GradientRest,
    ) -> None:
        """Not collective; memory is taken in the first backward.

        Args:
            spec: names, shapes and places.
            optimized: what the optimizer sees.
            stage: what is sharded.
            precision: dtypes.
            comm: the transport.
            reducer: over it.
            rest: where the mean lies from its reduction to the step.
        """
        self._spec, self._optimized = spec, optimized
        self._stage, self._comm, self._reducer = stage, comm, reducer
        layout = spec.layout
        self.rest = rest
        in_place = reducer.in_place and not precision.has_masters  # else the mean has another dtype
        self._local = LocalGradient(
            layout,
            DTYPES[precision.param],
            comm=comm,
            keep=stage.keeps_local_gradients and not in_place,
            landing=self._land if in_place else None,
        )
        self.usage = Usage(len(layout.slots))
        self.drops = np.zeros(len(layout.slots), dtype=np.int64)
        self._dropped: set[int] = set()  # slots whose reduced gradient was set to None
        self._present = False
        self._reduction: Work | None = None

    def capture(self, position: int, parameter: Tensor, accumulating: bool) -> None:
        """Take the gradient autograd left on ``parameter``, the one at ``position``; see LocalGradient.add."""
        gradient = take_own_gradient(parameter)
        if self._dropped:
            self._dropped.discard(position)
        if gradient is not None:
            self._local.add(position, gradient, accumulating)

    def _land(self) -> Tensor | None:
        """The memory of the mean; None where a mean is there, which is added to."""
        if self._present:
            return None
        self.rest.take()
        return self.rest.tensor

    @property
    def waiting(self) -> bool:
        """Whether gradients wait for a reduction."""
        return any(self._local.filled)

    def reduce(self, scale: float) -> None:
        """Start adding ``scale`` times the sum over ranks of the local gradients to the shards' ``grad``. Collective.

        Parameters without a gradient on this rank count as zero. Frees the local gradient unless the stage keeps it.
        ``finish`` follows.
        """
        accumulate = self._prepare_reduced()
        self.usage.reduced(self._local.filled)
        self._reduction = self._reducer.reduce(
            self._local.complete(),
            self._reduced_mine,
            scale=scale,
            accumulate=accumulate,
            name=self._spec.name,
        )
        self._local.clear()
        self._dropped.clear()
        self._present = True

    def finish(self) -> None:
        """Return when the shards' ``grad`` have what ``reduce`` adds. Collective; nothing if none goes on."""
        if self._reduction is None:
            return
        self._reduction.wait()
        self._reduction = None
        if not self._stage.shards_optimizer and self._comm.group.size > 1:
            self._comm.all_gather(self.reduced, name=self._spec.name).wait()
        shards = self._optimized
        set_own_gradients(shards.parameters, shards.cut(self.reduced))
        self.rest.put_away()

    def _prepare_reduced(self) -> bool:
        """Whether the reduced buffer holds gradients to add to; what was set to None meanwhile becomes zero."""
        self.rest.take()
        if not self.present:
            return False
        for position, shard, gradient in self._gradient_parts():
            if own_gradient(shard) is None:
                gradient.zero_()
                self.usage.found_none(position)
        return True

    def _gradient_parts(self) -> Iterator[tuple[int, nn.Parameter, Tensor]]:
        return self._optimized.parts_of(self.reduced)

    @property
    def reduced(self) -> Tensor:
        """The mean over ranks so far, fp32; only where it is ``present``, and inside ``rest.at_hand``."""
        return self.rest.tensor

    @property
    def version(self) -> int:
        """Of the reduced gradient: another one where somebody has changed it in place."""
        return self.rest.version if self.present else -1

    @property
    def _reduced_mine(self) -> Tensor:
        if self._stage.shards_optimizer or self._comm.group.size == 1:
            return self.reduced
        index, numel = self._comm.group.index, self._spec.layout.shard_numel
        return self.reduced[index * numel : (index + 1) * numel]

    @property
    def owned(self) -> Tensor:
        """This rank's part of the reduced gradient without padding, the same elements in every stage; fp32."""
        numel = len(self._spec.layout.shard_range(self._comm.group.index))
        return self._reduced_mine[:numel]

    @property
    def present(self) -> bool:
        """Whether a reduced gradient waits for the optimizer; equal on all ranks, also where this rank owns nothing."""
        return self._present

    def scale(self, factor: float) -> None:
        """Multiply the reduced gradient."""
        self.rest.scale(factor)

    def skip_unused(self, used_anywhere: Flags) -> None:
        """Drop the gradient of parameters no rank used: the optimizer then leaves them alone, as in torch."""
        if used_anywhere.all():
            return
        for shard, position in zip(self._optimized.parameters, self._optimized.slots, strict=True):
            if not used_anywhere[position]:
                set_own_gradient(shard, None)

    def drop(self, *, set_to_none: bool = True) -> None:
        """Forget local and reduced gradients; with ``set_to_none=False`` reduced ones become zero."""
        self._local.clear()
        if not set_to_none:
            with self.rest.at_hand(changes=True) if self.present else nullcontext():
                for shard in self._optimized.parameters:
                    if (gradient := own_gradient(shard)) is not None:
                        gradient.zero_()
        else:
            set_own_gradients(self._optimized.parameters, itertools.repeat(None))
            self.drops += 1
            self.rest.drop()
            self.usage.drop_all()
            self._dropped.clear()
            self._present = False

    # --- the gradient of one slot --------------------------------------------------------------------------------

    def is_at(self, position: int) -> bool:
        """Whether a slot has a gradient, reduced (then on all ranks alike) or waiting for it."""
        reduced = self.present and position not in self._dropped
        return bool(reduced or self._local.filled[position])

    def pieces_at(self, position: int, *, owned: bool = False) -> list[Tensor]:
        """Views of what this rank holds of a slot's reduced gradient; ``owned``: each element on one rank only.

        To be used inside ``rest.at_hand``.
        """
        if not self.present:
            return []
        mine = self._comm.group.index
        parts = self._optimized.parts_at(position, self.reduced)
        return [part for piece, part in parts if piece == mine or not owned]

    def drop_slots(self, positions: Collection[int], *, set_to_none: bool = True) -> None:
        """As ``drop``, of some slots; after the last one the memory is given back."""
        if len(positions) == len(self._spec.layout.slots):
            self.drop(set_to_none=set_to_none)
            return
        chosen = set(positions)
        for position in chosen:
            self._local.filled[position] = False
        with self.rest.at_hand(changes=True) if self.present else nullcontext():
            for slot, shard, gradient in self._gradient_parts() if self.present else ():
                if slot in chosen:
                    gradient.zero_()
                    if set_to_none:
                        set_own_gradient(shard, None)
        if set_to_none:
            for position in chosen:
                self.drops[position] += 1
                self.usage.drop(position)
            self._dropped |= chosen
            if len(self._dropped) == len(self._spec.layout.slots):
                self.drop()

    # --- whole copies --------------------------------------------------------------------------------------------

    def whole_copy(self) -> Tensor:
        """(numel,) fp32 copy of the reduced gradient. Collective."""
        name = self._spec.name
        with ExitStack() as stack:
            agreed = (
                nullcontext() if self.rest.resident else self._comm.group.agreed(f"read {name!r}")
            )
            with agreed:
                reduced = stack.enter_context(self.rest.at_hand())
                if self.rest.failure is not None:
                    raise self.rest.failure
            return whole_copy(reduced, self._spec.layout, self._comm, name=name)
