"""Unit: storage and state of one communicated group of parameters.

Owns: the rank's shard of parameters and gradients, and the verbs unshard / reshard / reduce_gradients / refresh.
Must not know: modules, hooks, when to act (`schedule`), optimizers (they see `shards`), MPI (`comm`).

    whole       parameters, views of one buffer   (padded_numel,) param dtype; given back between uses where sharded
    master      fp32, what is optimised   this rank's shard, or the whole unit where the optimizer is replicated; in
                                          fp32 it *is* this rank's slice of the buffer where that lasts
    local       this rank's gradient      (padded_numel,) param dtype, from first use in backward to the reduction
    reduced     mean over ranks           fp32, like master; ``shards[i].grad`` are views of it; made in backward, gone
                                          with zero_grad
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from hpczero.comm.collectives import Collectives, Work
from hpczero.memory.buffers import DTYPES, Buffer, Fresh
from hpczero.plan import Stage, UnitSpec
from hpczero.plan.precision import Precision
from hpczero.zero.units.gradient import LocalGradient
from hpczero.zero.units.guard import own_gradient, set_own_gradient, take_own_gradient
from hpczero.zero.units.shards import Shards
from hpczero.zero.units.usage import Flags, Usage
from hpczero.zero.units.whole import WholeParameters
from hpczero.zero.units.whole_copy import whole_copy


class Unit:
    """One communicated group; built empty, filled by ``load``.

    Attributes:
        spec: names, shapes and places.
        whole: the parameters as the model sees them.
        optimized: what the optimizer sees; empty where nothing is trained.
        usage: which parameters have a gradient; where trainable.
        drops: (slots,) int64, how often each slot's gradient was set to None; where trainable.
    """

    def __init__(
        self,
        spec: UnitSpec,
        parameters: Sequence[nn.Parameter],
        *,
        stage: Stage,
        precision: Precision,
        comm: Collectives,
    ) -> None:
        """Allocate the buffers. Collective on transports that share memory; ``comm.settle`` follows."""
        self.spec, self._stage, self._comm = spec, stage, comm
        self.whole = WholeParameters(spec, parameters, stage=stage, precision=precision, comm=comm)
        self.optimized = Shards(spec.layout, torch.empty(0), start=0, pieces=range(0))
        self._mine = self.whole.mine
        self._owned_numel = len(spec.layout.shard_range(comm.group.index))
        if spec.trainable:
            self._allocate_state(precision)
            self._rest = self._master
        elif stage.shards_parameters and not self.whole.lasts:
            dtype = DTYPES[precision.param]
            self._rest = comm.allocate(spec.layout.shard_numel, dtype, category="parameters").tensor
        else:
            self._rest = self.whole.flat[self._mine]

    def _allocate_state(self, precision: Precision) -> None:
        """Masters, gradients and the optimizer's view of them."""
        layout, comm, stage = self.spec.layout, self._comm, self._stage
        owned = self._mine if stage.shards_optimizer else slice(0, layout.padded_numel)
        numel = owned.stop - owned.start
        if precision.has_masters or not self.whole.lasts:
            category = "master" if precision.has_masters else "parameters"
            self._master = comm.allocate(numel, torch.float32, category=category).tensor
        else:
            self._master = self.whole.flat[owned]
        # Not kept: while activations are at their most, in forward, there are no gradients yet.
        self._fresh = Fresh(
            numel, torch.float32, memory=comm.memory, category="gradients", device=comm.device
        )
        self._local = LocalGradient(
            layout, DTYPES[precision.param], comm=comm, keep=stage.keeps_local_gradients
        )
        self.usage = Usage(len(layout.slots))
        self._dropped: set[int] = set()  # slots whose reduced gradient was set to None
        self.drops = np.zeros(len(layout.slots), dtype=np.int64)
        self._has_reduced = False
        self._reduction: Work | None = None
        # A replicated optimizer steps on the pieces of a sharded one: kernels round the tail of a tensor differently.
        index = comm.group.index
        pieces = range(index, index + 1) if stage.shards_optimizer else range(layout.num_shards)
        self.optimized = Shards(layout, self._master, start=owned.start, pieces=pieces)

    @property
    def shards(self) -> list[nn.Parameter]:
        """One fp32 parameter for each model parameter this rank owns a part of."""
        return self.optimized.parameters

    @property
    def shard_slots(self) -> list[int]:
        """The slot of each of ``shards``."""
        return self.optimized.slots

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The model's own parameter objects, in slot order."""
        return self.whole.parameters

    # --- filling -------------------------------------------------------------------------------------------------

    def load(self, fill: Callable[[Tensor], None]) -> None:
        """Set the unit's values and make the model's parameters views of it. Collective.

        Args:
            fill: writes (numel,) fp32 values in slot order into the tensor it is given; may communicate, then equally
                on every rank.
        """
        layout = self.spec.layout
        # On the host, where generators give the same numbers whatever the device.
        values = Buffer(
            layout.padded_numel, torch.float32, memory=self._comm.memory, category="initialise"
        )
        values.tensor[layout.numel :].zero_()
        fill(values.tensor[: layout.numel])
        with torch.no_grad():
            self._rest.copy_(self._like_rest(values.tensor))
        self.whole.load(values.tensor)
        values.release()
        self._note_values()

    # --- parameters ----------------------------------------------------------------------------------------------

    def unshard(self) -> None:
        """Start making the parameters whole; nothing if they are, or if it has started. Collective."""
        self.whole.unshard(self._rest)

    def wait_for_unshard(self) -> None:
        """Return when the parameters are whole."""
        self.whole.wait_for_unshard()

    def reshard(self, *, retain: bool = False) -> None:
        """See ``WholeParameters.reshard``."""
        self.whole.reshard(retain=retain)

    def refresh(self) -> None:
        """Bring the whole parameters up to date with the masters. Collective where the optimizer is sharded.

        ``whole.wait_for_update`` follows.
        """
        if not self.spec.trainable:
            return
        if self._stage.shards_optimizer:
            self.whole.update(self._master)
        elif self._master.data_ptr() != self.whole.flat.data_ptr():
            with torch.no_grad():
                self.whole.flat.copy_(self._master)

    def write_back(self, root: int) -> None:
        """Make the values world rank ``root`` holds in the whole parameters everybody's, masters included. Collective.

        Inside a ``hold``. Where a value did not change, the fp32 master keeps its extra digits.
        """
        whole, new = self.whole, self.whole.flat_of_user
        self._comm.broadcast(new, root=root, name=self.spec.name).wait()
        mine = self._like_rest(new)
        with torch.no_grad():
            if self._rest.data_ptr() != mine.data_ptr():
                changed = mine != self._rest.to(mine.dtype)
                self._rest.copy_(torch.where(changed, mine.to(self._rest.dtype), self._rest))
        if whole.shared:
            whole.update(new[self._mine])
            whole.wait_for_update()
        self._note_values()

    def take_over(self) -> None:
        """See ``WholeParameters.take_over``; masters that lie in the buffer follow it."""
        inside = torch._C._is_alias_of(self._rest, self.whole.flat)  # type: ignore[attr-defined]
        if self.whole.take_over() and inside:
            self._rest.data = self._like_rest(self.whole.flat)
            self.optimized.follow()

    def note_step(self) -> None:
        """The optimizer has changed the values, and the whole parameters are up to date."""
        self.whole.note_step()
        self._note_values()

    def check_values(self) -> None:
        """Raises StepError where the model would not see what the optimizer's parameters hold."""
        self.optimized.check_seen()

    def _note_values(self) -> None:
        self.whole.note_versions()
        self.optimized.note()

    # --- gradients -----------------------------------------------------------------------------------------------

    def capture(self, position: int, *, accumulating: bool) -> None:
        """Take the gradient autograd left on parameter ``position``; see LocalGradient.add."""
        gradient = take_own_gradient(self.parameters[position])
        self._dropped.discard(position)
        if gradient is not None:
            self._local.add(position, gradient, accumulating=accumulating)

    @property
    def has_local_gradients(self) -> bool:
        """Whether gradients wait for a reduction."""
        return self.spec.trainable and any(self._local.filled)

    def reduce_gradients(self, scale: float) -> None:
        """Start adding ``scale`` times the sum over ranks of the local gradients to the shards' ``grad``. Collective.

        Parameters without a gradient on this rank count as zero. Frees the local gradient unless the stage keeps it.
        ``finish_reduction`` follows.
        """
        accumulate = self._prepare_reduced()
        self.usage.reduced(self._local.filled)
        self._reduction = self._comm.reduce_scatter(
            self._local.complete(),
            self._reduced_mine,
            scale=scale,
            accumulate=accumulate,
            name=self.spec.name,
        )
        self._local.clear()
        self._dropped.clear()
        self._has_reduced = True

    def finish_reduction(self) -> None:
        """Return when the shards' ``grad`` have what ``reduce_gradients`` adds. Collective; nothing if none goes on."""
        if self._reduction is None:
            return
        self._reduction.wait()
        self._reduction = None
        if not self._stage.shards_optimizer:
            self._comm.all_gather(self._reduced, name=self.spec.name).wait()
        for _, shard, gradient in self._gradient_parts():
            set_own_gradient(shard, gradient)

    def _prepare_reduced(self) -> bool:
        """Whether the reduced buffer holds gradients to add to; what was set to None meanwhile becomes zero."""
        if not self._has_reduced:
            self._fresh.take()
            return False
        for position, shard, gradient in self._gradient_parts():
            if own_gradient(shard) is None:
                gradient.zero_()
                self.usage.found_none(position)
        return True

    def _gradient_parts(self) -> Iterator[tuple[int, nn.Parameter, Tensor]]:
        return self.optimized.parts_of(self._reduced)

    @property
    def _reduced(self) -> Tensor:
        return self._fresh.tensor

    @property
    def gradient_version(self) -> int:
        """Of the reduced gradient: another one where somebody has changed it in place."""
        return self._reduced._version if self.has_gradient else -1

    @property
    def _reduced_mine(self) -> Tensor:
        return self._reduced if self._stage.shards_optimizer else self._reduced[self._mine]

    @property
    def owned_gradient(self) -> Tensor:
        """This rank's part of the reduced gradient without padding, the same elements in every stage; fp32."""
        return self._reduced_mine[: self._owned_numel]

    @property
    def has_gradient(self) -> bool:
        """Whether a reduced gradient waits for the optimizer; equal on all ranks, also where this rank owns nothing."""
        return self.spec.trainable and self._has_reduced

    def scale_gradient(self, factor: float) -> None:
        """Multiply the reduced gradient in place."""
        self._reduced.mul_(factor)

    def skip_unused(self, used_anywhere: Flags) -> None:
        """Drop the gradient of parameters no rank used: the optimizer then leaves them alone, as in torch."""
        for shard, position in zip(self.shards, self.shard_slots, strict=True):
            if not used_anywhere[position]:
                set_own_gradient(shard, None)

    def drop_gradients(self, *, set_to_none: bool = True) -> None:
        """Forget local and reduced gradients; with ``set_to_none=False`` reduced ones become zero."""
        if not self.spec.trainable:
            return
        self._local.clear()
        for shard in self.shards:
            if set_to_none:
                set_own_gradient(shard, None)
            elif (gradient := own_gradient(shard)) is not None:
                gradient.zero_()
        if set_to_none:
            self.drops += 1
            self._fresh.drop()
            self.usage.drop_all()
            self._dropped.clear()
            self._has_reduced = False

    @property
    def replicas(self) -> tuple[Tensor, ...]:
        """What every rank updates by itself: values and, empty where there is none, reduced gradient; views, fp32."""
        if self._stage.shards_optimizer:
            return ()
        gradient = self._reduced if self.has_gradient else self._master[:0]
        return self._master[: self.spec.layout.numel], gradient[: self.spec.layout.numel]

    # --- the gradient of one slot --------------------------------------------------------------------------------

    def has_gradient_at(self, position: int) -> bool:
        """Whether a slot has a gradient, reduced (then on all ranks alike) or waiting for it."""
        reduced = self.has_gradient and position not in self._dropped
        return reduced or (self.spec.trainable and self._local.filled[position])

    def gradient_pieces(self, position: int, *, owned: bool = False) -> list[Tensor]:
        """Views of what this rank holds of a slot's reduced gradient; ``owned``: each element on one rank only."""
        if not self.has_gradient:
            return []
        mine = self._comm.group.index
        parts = self.optimized.parts_at(position, self._reduced)
        return [part for piece, part in parts if piece == mine or not owned]

    def drop_gradient_at(self, position: int) -> None:
        """Forget the gradient of one slot; after the last one the memory is given back."""
        self._local.filled[position] = False
        self.drops[position] += 1
        for slot, shard, gradient in self._gradient_parts() if self.has_gradient else ():
            if slot == position:
                set_own_gradient(shard, None)
                gradient.zero_()
        self.usage.drop(position)
        self._dropped.add(position)
        if len(self._dropped) == len(self.spec.layout.slots):
            self.drop_gradients()

    # --- checkpoints ---------------------------------------------------------------------------------------------

    @property
    def owned_values(self) -> Tensor:
        """This rank's part of the values without padding, the same elements in every stage; a view."""
        whole = self._rest.numel() == self.spec.layout.padded_numel
        return (self._rest[self._mine] if whole else self._rest)[: self._owned_numel]

    def _like_rest(self, whole: Tensor) -> Tensor:
        """The part of ``whole`` that this rank keeps between uses."""
        return whole if self._rest.numel() == whole.numel() else whole[self._mine]

    def owned_shards(self) -> Iterator[tuple[int, nn.Parameter]]:
        """Slot and optimizer's view of each part of ``owned_values``, in order."""
        return self.optimized.of_piece(self._comm.group.index)

    def replicated(self, owned: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Every shard that the optimizer of this rank sees, with its values. Collective where it is replicated.

        Args:
            owned: (elements of ``owned_values``,) fp32, in that order.
        """
        full = owned
        if not self._stage.shards_optimizer:
            full = torch.zeros(self.spec.layout.padded_numel, device=self._comm.device)
            full[self._mine][: len(owned)].copy_(owned)
            self._comm.all_gather(full, name=self.spec.name).wait()
        yield from ((shard, part) for _, shard, part in self.optimized.parts_of(full))

    def restore(self, owned: Tensor) -> None:
        """Set the values, masters and whole parameters alike. Collective; no model call may be under way.

        Args:
            owned: (elements of ``owned_values``,) fp32, in that order.
        """
        with torch.no_grad():
            self.owned_values.copy_(owned)
        if self.spec.trainable:
            if not self._stage.shards_optimizer:
                self._comm.all_gather(self._master, name=self.spec.name).wait()
            self.refresh()
        else:
            self.whole.update(self._rest)
        self.whole.wait_for_update()
        self._note_values()

    # --- whole copies --------------------------------------------------------------------------------------------

    def gather_values(self) -> Tensor:
        """(numel,) fp32 copy of all values, from the masters. Collective."""
        sharded = self.spec.trainable or self._stage.shards_parameters
        values = self._rest if sharded else self.whole.flat
        return whole_copy(values, self.spec.layout, self._comm, name=self.spec.name)

    def gather_gradients(self) -> Tensor:
        """(numel,) fp32 copy of the reduced gradient. Collective."""
        return whole_copy(self._reduced, self.spec.layout, self._comm, name=self.spec.name)
