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
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hpczero.comm.base import Collectives, Work
from hpczero.device import DTYPES, Buffer, Fresh
from hpczero.gradient import LocalGradient
from hpczero.parameter import own_gradient, set_own_gradient, take_own_gradient
from hpczero.plan import Stage, UnitSpec
from hpczero.precision import Precision
from hpczero.whole import UnitState, WholeParameters


class Unit:
    """One communicated group; built empty, filled by ``load``.

    Attributes:
        spec: names, shapes and places.
        whole: the parameters as the model sees them.
        shards: what the optimizer sees: one fp32 parameter for each model parameter this rank owns a part of.
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
        self.spec = spec
        self.whole = WholeParameters(spec, parameters, stage=stage, precision=precision, comm=comm)
        self.shards: list[nn.Parameter] = []
        self._pieces: list[int] = []  # which shard of the unit each of them is a part of
        self._stage = stage
        self._comm = comm
        self._mine = self.whole.mine
        self.shard_slots: list[int] = []
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
        self._used = np.zeros(len(layout.slots), dtype=bool)
        self._dropped: set[int] = set()  # slots whose reduced gradient was set to None
        self.drops = np.zeros(len(layout.slots), dtype=np.int64)
        self._has_reduced = False
        self._reduction: Work | None = None
        # A replicated optimizer steps on the pieces of a sharded one: kernels round the tail of a tensor differently.
        index = comm.topology.shard_index
        pieces = [index] if stage.shards_optimizer else range(layout.num_shards)
        for position, slot in enumerate(layout.slots):
            for piece in pieces:
                part = layout.overlap(piece, slot.name)
                if part:
                    begin = slot.offset + part.start - owned.start
                    self.shards.append(nn.Parameter(self._master[begin : begin + len(part)]))
                    self.shard_slots.append(position)
                    self._pieces.append(piece)

    def shards_with_groups(self) -> Iterator[tuple[nn.Parameter, int]]:
        """Each shard with its optimizer group."""
        for shard, position in zip(self.shards, self.shard_slots, strict=True):
            yield shard, self.spec.groups[position]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The model's own parameter objects, in slot order."""
        return self.whole.parameters

    @property
    def state(self) -> UnitState:
        """Whether the parameters are whole."""
        return self.whole.state

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
            layout.padded_numel,
            torch.float32,
            memory=self._comm.memory,
            category="initialise",
        )
        values.tensor[layout.numel :].zero_()
        fill(values.tensor[: layout.numel])
        whole = self._rest.numel() == layout.padded_numel
        with torch.no_grad():
            self._rest.copy_(values.tensor if whole else values.tensor[self._mine])
        self.whole.load(values.tensor)
        values.release()

    # --- parameters ----------------------------------------------------------------------------------------------

    def unshard(self) -> None:
        """Start making the parameters whole; nothing if they are, or if it has started. Collective."""
        self.whole.unshard(self._rest)

    def wait_for_unshard(self) -> None:
        """Return when the parameters are whole."""
        self.whole.wait_for_unshard()

    def reshard(self) -> None:
        """Give the whole parameters back where the stage shards them and nobody holds them; nothing otherwise."""
        self.whole.reshard()

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
        whole = self.whole
        new = whole.flat_of_user
        self._comm.broadcast(new, root=root, name=self.spec.name).wait()
        mine = new if self._rest.numel() == new.numel() else new[self._mine]
        with torch.no_grad():
            if self._rest.data_ptr() != mine.data_ptr():
                changed = mine != self._rest.to(mine.dtype)
                self._rest.copy_(torch.where(changed, mine.to(self._rest.dtype), self._rest))
        if whole.shared:
            whole.update(new[self._mine])
            whole.wait_for_update()
        whole.note_versions()

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
        now = np.array(self._local.filled, dtype=bool)
        accumulate = self._prepare_reduced()
        self._reduction = self._comm.reduce_scatter(
            self._local.complete(),
            self._reduced_mine,
            scale=scale,
            accumulate=accumulate,
            name=self.spec.name,
        )
        self._local.clear()
        self._used = (self._used | now) if accumulate else now
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
        for shard in self.shards:
            set_own_gradient(shard, self._gradient_view(shard))

    def _prepare_reduced(self) -> bool:
        """Whether the reduced buffer holds gradients to add to; what was set to None meanwhile becomes zero."""
        if not self._has_reduced:
            self._fresh.take()
            return False
        for shard in self.shards:
            if own_gradient(shard) is None:
                self._gradient_view(shard).zero_()
        return True

    @property
    def _reduced(self) -> Tensor:
        return self._fresh.tensor

    @property
    def _reduced_mine(self) -> Tensor:
        return self._reduced if self._stage.shards_optimizer else self._reduced[self._mine]

    def _gradient_view(self, shard: nn.Parameter) -> Tensor:
        """The part of the reduced buffer that belongs to ``shard``, found by its place in the master."""
        begin = (shard.data_ptr() - self._master.data_ptr()) // self._master.element_size()
        return self._reduced[begin : begin + shard.numel()]

    @property
    def owned_gradient(self) -> Tensor:
        """This rank's part of the reduced gradient without padding, the same elements in every stage; fp32."""
        mine = self.spec.layout.shard_range(self._comm.topology.shard_index)
        return self._reduced_mine[: len(mine)]

    @property
    def has_gradient(self) -> bool:
        """Whether a reduced gradient waits for the optimizer; equal on all ranks, also where this rank owns nothing."""
        return self.spec.trainable and self._has_reduced

    def scale_gradient(self, factor: float) -> None:
        """Multiply the reduced gradient in place."""
        self._reduced.mul_(factor)

    @property
    def used(self) -> npt.NDArray[np.bool_]:
        """(slots,) bool: which parameters had a gradient on this rank since the last ``zero_grad``."""
        return self._used

    def skip_unused(self, used_anywhere: npt.NDArray[np.bool_]) -> None:
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
            self._used = np.zeros_like(self._used)
            self._dropped.clear()
            self._has_reduced = False

    # --- the gradient of one slot --------------------------------------------------------------------------------

    def has_gradient_at(self, position: int) -> bool:
        """Whether a slot has a gradient, reduced (then on all ranks alike) or waiting for it."""
        reduced = self.has_gradient and position not in self._dropped
        return reduced or (self.spec.trainable and self._local.filled[position])

    def gradient_pieces(self, position: int, *, owned: bool = False) -> list[Tensor]:
        """Views of what this rank holds of a slot's reduced gradient; ``owned``: each element on one rank only."""
        if not self.has_gradient:
            return []
        pairs = self.owned_shards() if owned else zip(self.shard_slots, self.shards, strict=True)
        return [self._gradient_view(shard) for slot, shard in pairs if slot == position]

    def drop_gradient_at(self, position: int) -> None:
        """Forget the gradient of one slot; after the last one the memory is given back."""
        self._local.filled[position] = False
        self.drops[position] += 1
        for shard, slot in zip(self.shards, self.shard_slots, strict=True):
            if slot == position and self.has_gradient:
                set_own_gradient(shard, None)
                self._gradient_view(shard).zero_()
        self._used[position] = False
        self._dropped.add(position)
        if len(self._dropped) == len(self.spec.layout.slots):
            self.drop_gradients()

    # --- checkpoints ---------------------------------------------------------------------------------------------

    @property
    def owned_values(self) -> Tensor:
        """This rank's part of the values without padding, the same elements in every stage; a view."""
        mine = self.spec.layout.shard_range(self._comm.topology.shard_index)
        whole = self._rest.numel() == self.spec.layout.padded_numel
        return (self._rest[self._mine] if whole else self._rest)[: len(mine)]

    def owned_shards(self) -> Iterator[tuple[int, nn.Parameter]]:
        """Slot and optimizer's view of each part of ``owned_values``, in order."""
        index = self._comm.topology.shard_index
        for piece, position, shard in zip(self._pieces, self.shard_slots, self.shards, strict=True):
            if piece == index:
                yield position, shard

    def replicated(self, owned: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Every shard that the optimizer of this rank sees, with its values. Collective where it is replicated.

        Args:
            owned: (elements of ``owned_values``,) fp32, in that order.
        """
        full, start = owned, self._mine.start
        if not self._stage.shards_optimizer:
            full = torch.zeros(self.spec.layout.padded_numel, device=self._comm.device)
            start = 0
            full[self._mine][: len(owned)].copy_(owned)
            self._comm.all_gather(full, name=self.spec.name).wait()
        for piece, position, shard in zip(self._pieces, self.shard_slots, self.shards, strict=True):
            slot = self.spec.layout.slots[position]
            begin = slot.offset + self.spec.layout.overlap(piece, slot.name).start - start
            yield shard, full[begin : begin + shard.numel()]

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
        self.whole.note_versions()

    # --- whole copies --------------------------------------------------------------------------------------------

    def gather_values(self) -> Tensor:
        """(numel,) fp32 copy of all values, from the masters. Collective."""
        if not self.spec.trainable and not self._stage.shards_parameters:
            return self._gather_fp32(None, self.whole.flat)
        sharded = self._stage.shards_optimizer
        return self._gather_fp32(self._rest if sharded else None, self._rest)

    def gather_gradients(self) -> Tensor:
        """(numel,) fp32 copy of the reduced gradient. Collective."""
        sharded = self._stage.shards_optimizer
        return self._gather_fp32(self._reduced if sharded else None, self._reduced)

    def _gather_fp32(self, shard: Tensor | None, whole: Tensor) -> Tensor:
        """``whole`` as it is, or the shards of all ranks put together."""
        numel = self.spec.layout.numel
        if shard is None:
            return whole[:numel].detach().float().clone()
        full = torch.empty(
            self.spec.layout.padded_numel, dtype=torch.float32, device=self._comm.device
        )
        full[self._mine].copy_(shard.detach())
        self._comm.all_gather(full, name=self.spec.name).wait()
        return full[:numel]
