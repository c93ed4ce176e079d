"""Unit: storage and state of one communicated group of parameters.

Owns: the flat buffers, the views into them, the rank's shard, and the verbs unshard / reshard / reduce_gradients /
refresh.
Must not know: modules, hooks, when to act (`schedule`), optimizers (they see `shards`), MPI (`comm`).

    parameters  views of ``full``         (padded_numel,) param dtype; given back between uses where parameters are
    sharded
    master      fp32, what is optimised   this rank's shard, or the whole unit where the optimizer is replicated;
                                          in fp32 it *is* this rank's slice of ``full`` unless that is given back
    local       this rank's gradient      (padded_numel,) param dtype, from first use in backward to the reduction
    reduced     mean over ranks           fp32, like master; ``shards[i].grad`` are views of it
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import Enum, auto

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hpczero.comm.base import Collectives, Work
from hpczero.device import DTYPES
from hpczero.errors import StepError
from hpczero.gradient import LocalGradient
from hpczero.parameter import Guard
from hpczero.plan import Stage, UnitSpec
from hpczero.precision import Precision


class UnitState(Enum):
    """Where the whole parameters are."""

    SHARDED = auto()
    GATHERING = auto()
    WHOLE = auto()


class Unit:
    """One communicated group; built empty, filled by ``load``.

    Attributes:
        spec: names, shapes and places.
        parameters: the model's own parameter objects, in slot order.
        shards: what the optimizer sees: one fp32 parameter for each model parameter this rank owns a part of.
        state: whether the parameters are whole.
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
        """Allocate the buffers. Not collective on the flat transport."""
        self.spec = spec
        self.parameters = list(parameters)
        self.state = UnitState.WHOLE
        self._stage = stage
        self._comm = comm
        self._work: Work | None = None
        self._holds = 0
        layout, index = spec.layout, comm.topology.shard_index
        start = index * layout.shard_numel
        self._mine = slice(start, start + layout.shard_numel)
        dtype = DTYPES[precision.param]
        at_rest = "unsharded" if stage.shards_parameters else "parameters"
        self._full = comm.allocate(layout.padded_numel, dtype, category=at_rest)
        if stage.shards_parameters:
            self._full.release()
        self._guards = [
            Guard(parameter, slot.name)
            for parameter, slot in zip(self.parameters, layout.slots, strict=True)
        ]
        self._versions: list[int] = []
        self._rest: Tensor | None = None
        self.shards: list[nn.Parameter] = []
        self._shard_slots: list[int] = []
        if stage.shards_parameters and not spec.trainable:
            self._rest = comm.allocate(layout.shard_numel, dtype, category="parameters").tensor
        if spec.trainable:
            self._allocate_state(precision)

    def _allocate_state(self, precision: Precision) -> None:
        """Masters, gradients and the optimizer's view of them."""
        layout, comm, stage = self.spec.layout, self._comm, self._stage
        owned = self._mine if stage.shards_optimizer else slice(0, layout.padded_numel)
        numel = owned.stop - owned.start
        if precision.has_masters or stage.shards_parameters:
            category = "master" if precision.has_masters else "parameters"
            self._master = comm.allocate(numel, torch.float32, category=category).tensor
        else:
            self._master = self._full.tensor[owned]
        self._reduced = comm.allocate(numel, torch.float32, category="gradients").tensor
        self._reduced_mine = self._reduced if stage.shards_optimizer else self._reduced[self._mine]
        self._local = LocalGradient(
            layout, self._full.tensor.dtype, comm=comm, keep=stage.keeps_local_gradients
        )
        self._used = np.zeros(len(layout.slots), dtype=bool)
        self._has_reduced = False
        # A replicated optimizer steps on the same pieces as a sharded one: vectorised kernels round the tail of a
        # tensor differently, and stages must agree bit for bit.
        index = comm.topology.shard_index
        pieces = [index] if stage.shards_optimizer else range(layout.num_shards)
        for position, slot in enumerate(layout.slots):
            for piece in pieces:
                part = layout.overlap(piece, slot.name)
                if part:
                    begin = slot.offset + part.start - owned.start
                    self.shards.append(nn.Parameter(self._master[begin : begin + len(part)]))
                    self._shard_slots.append(position)

    def shards_with_groups(self) -> Iterator[tuple[nn.Parameter, int]]:
        """Each shard with its optimizer group."""
        for shard, position in zip(self.shards, self._shard_slots, strict=True):
            yield shard, self.spec.groups[position]

    # --- filling -------------------------------------------------------------------------------------------------

    def load(self, fill: Callable[[Tensor], None]) -> None:
        """Set the unit's values and make the model's parameters views of it.

        Args:
            fill: writes (numel,) fp32 values in slot order into the tensor it is given; may communicate, then equally
                on every rank.
        """
        layout = self.spec.layout
        values = self._comm.allocate(layout.padded_numel, torch.float32, category="initialise")
        values.tensor[layout.numel :].zero_()
        fill(values.tensor[: layout.numel])
        self._full.take()
        with torch.no_grad():
            self._full.tensor.copy_(values.tensor)
            if self.spec.trainable:
                whole = self._master.numel() == layout.padded_numel
                self._master.copy_(values.tensor if whole else values.tensor[self._mine])
            elif self._rest is not None:
                self._rest.copy_(self._full.tensor[self._mine])
        values.release()
        for parameter, slot in zip(self.parameters, layout.slots, strict=True):
            view = self._full.tensor[slot.offset : slot.stop].view(slot.shape)
            if parameter.device.type == "meta":
                # A meta parameter cannot take CPU data; swap the tensors' contents, the object stays.
                real = nn.Parameter(torch.empty(0), requires_grad=parameter.requires_grad)
                real.data = (
                    view  # keeps a version counter of its own: see device.[Note: Refilling ...]
                )
                torch.utils.swap_tensors(parameter, real)  # type: ignore[no-untyped-call]
            else:
                parameter.data = view
            parameter.grad = None
        self._versions = [parameter._version for parameter in self.parameters]
        if self._stage.shards_parameters:
            self.reshard()

    # --- parameters ----------------------------------------------------------------------------------------------

    def unshard(self) -> None:
        """Start making the parameters whole; nothing if they are, or if it has started. Collective."""
        if self.state is not UnitState.SHARDED:
            return
        self._full.take()
        with torch.no_grad():
            self._full.tensor[self._mine].copy_(self._master if self._rest is None else self._rest)
        self.state = UnitState.GATHERING
        self._work = self._comm.all_gather(self._full.tensor, name=self.spec.name)

    def wait_for_unshard(self) -> None:
        """Return when the parameters are whole."""
        if self.state is UnitState.GATHERING:
            assert self._work is not None, "a gather in progress has a Work"
            self._work.wait()
            self._work = None
            for guard in self._guards:
                guard.open()
            self.state = UnitState.WHOLE

    def reshard(self) -> None:
        """Give the whole parameters back where the stage shards them and nobody holds them; nothing otherwise."""
        if not self._stage.shards_parameters or self.state is UnitState.SHARDED or self._holds:
            return
        self.wait_for_unshard()
        for guard in self._guards:
            guard.close()
        self._full.release()
        self.state = UnitState.SHARDED

    def hold(self) -> None:
        """Keep the parameters whole, whatever runs, until as many calls of ``let_go``."""
        self._holds += 1

    def let_go(self) -> None:
        """End one ``hold``; after the last one the parameters are given back."""
        self._holds -= 1
        self.reshard()

    def refresh(self) -> None:
        """Bring the whole parameters up to date with the masters. Collective where the optimizer is sharded."""
        if self._stage.shards_parameters or not self.spec.trainable:
            return
        with torch.no_grad():
            if not self._stage.shards_optimizer:
                if self._master.data_ptr() != self._full.tensor.data_ptr():
                    self._full.tensor.copy_(self._master)
                return
            mine = self._full.tensor[self._mine]
            if self._master.data_ptr() != mine.data_ptr():
                mine.copy_(self._master)
        self._comm.all_gather(self._full.tensor, name=self.spec.name).wait()

    def check_untouched(self) -> None:
        """Raise if a parameter was changed or moved behind the unit's back, or is about to be.

        Raises:
            StepError: names the parameter.
        """
        if self._holds:
            raise StepError(
                f"rank {self._comm.topology.rank}: optimizer.step() inside `with hpczero.gathered(model):` would "
                "leave old values in the gathered parameters; take the step outside"
            )
        for parameter, slot, version in zip(
            self.parameters, self.spec.layout.slots, self._versions, strict=True
        ):
            if parameter.requires_grad != self.spec.trainable:
                raise StepError(
                    f"rank {self._comm.topology.rank}: requires_grad of parameter {slot.name!r} is "
                    f"{parameter.requires_grad}, and was {self.spec.trainable} at zeroify; freeze and unfreeze "
                    "before zeroify (it decides which parameters have gradients and optimizer state)"
                )
            if parameter._version != version:
                raise StepError(
                    f"rank {self._comm.topology.rank}: parameter {slot.name!r} was changed in place since "
                    "zeroify, and the optimizer's copy was not; change parameters inside "
                    "`with hpczero.gathered(model, modifier_rank=0):`"
                )
            expected = self._full.tensor.data_ptr() + slot.offset * self._full.tensor.element_size()
            if self.state is UnitState.WHOLE and slot.numel and parameter.data_ptr() != expected:
                raise StepError(
                    f"rank {self._comm.topology.rank}: parameter {slot.name!r} got new memory since zeroify "
                    "(model.to(), .half(), load_state_dict(assign=True)?); do that before zeroify"
                )

    def write_back(self, root: int) -> None:
        """Make the values world rank ``root`` holds in the whole parameters everybody's, masters included. Collective.

        The unit must be whole. Where a value did not change, the fp32 master keeps its extra digits.
        """
        full = self._full.tensor
        self._comm.broadcast(full, root=root, name=self.spec.name).wait()
        with torch.no_grad():
            if self._rest is not None:
                self._rest.copy_(full[self._mine])
            elif self.spec.trainable:
                new = full if self._master.numel() == full.numel() else full[self._mine]
                if self._master.data_ptr() != new.data_ptr():
                    changed = new != self._master.to(new.dtype)
                    self._master.copy_(torch.where(changed, new.float(), self._master))
        self._versions = [parameter._version for parameter in self.parameters]

    def was_modified(self) -> bool:
        """Whether a parameter was changed in place since the last load or write_back."""
        pairs = zip(self.parameters, self._versions, strict=True)
        return any(parameter._version != version for parameter, version in pairs)

    # --- gradients -----------------------------------------------------------------------------------------------

    def capture(self, position: int, *, accumulating: bool) -> None:
        """Take the gradient autograd left on parameter ``position``; see LocalGradient.add."""
        parameter = self.parameters[position]
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            self._local.add(position, gradient, accumulating=accumulating)

    @property
    def has_local_gradients(self) -> bool:
        """Whether gradients wait for a reduction."""
        return self.spec.trainable and any(self._local.filled)

    def reduce_gradients(self, scale: float) -> None:
        """Add ``scale`` times the sum over ranks of the local gradients to the shards' ``grad``. Collective.

        Parameters without a gradient on this rank count as zero. Frees the local gradient unless the stage keeps it.
        """
        now = np.array(self._local.filled, dtype=bool)
        accumulate = self._prepare_reduced()
        self._comm.reduce_scatter(
            self._local.complete(),
            self._reduced_mine,
            scale=scale,
            accumulate=accumulate,
            name=self.spec.name,
        ).wait()
        self._local.clear()
        if not self._stage.shards_optimizer:
            self._comm.all_gather(self._reduced, name=self.spec.name).wait()
        self._used = (self._used | now) if accumulate else now
        self._has_reduced = True
        for shard in self.shards:
            shard.grad = self._gradient_view(shard)

    def _prepare_reduced(self) -> bool:
        """Whether the reduced buffer holds gradients to add to; what was set to None meanwhile becomes zero."""
        if not self._has_reduced:
            return False
        for shard in self.shards:
            if shard.grad is None:
                self._gradient_view(shard).zero_()
        return True

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
        for shard, position in zip(self.shards, self._shard_slots, strict=True):
            if not used_anywhere[position]:
                shard.grad = None

    def drop_gradients(self, *, set_to_none: bool = True) -> None:
        """Forget local and reduced gradients; with ``set_to_none=False`` reduced ones become zero."""
        if not self.spec.trainable:
            return
        self._local.clear()
        for shard in self.shards:
            if set_to_none:
                shard.grad = None
            elif shard.grad is not None:
                shard.grad.zero_()
        if set_to_none:
            self._used = np.zeros_like(self._used)
            self._has_reduced = False

    # --- whole copies --------------------------------------------------------------------------------------------

    def gather_values(self) -> Tensor:
        """(numel,) fp32 copy of all values, from the masters. Collective."""
        if not self.spec.trainable:
            return self._gather_fp32(self._rest, self._full.tensor)
        sharded = self._stage.shards_optimizer
        return self._gather_fp32(self._master if sharded else None, self._master)

    def gather_gradients(self) -> Tensor:
        """(numel,) fp32 copy of the reduced gradient. Collective."""
        sharded = self._stage.shards_optimizer
        return self._gather_fp32(self._reduced if sharded else None, self._reduced)

    def _gather_fp32(self, shard: Tensor | None, whole: Tensor) -> Tensor:
        """``whole`` as it is, or the shards of all ranks put together."""
        numel = self.spec.layout.numel
        if shard is None:
            return whole[:numel].detach().float().clone()
        full = torch.empty(self.spec.layout.padded_numel, dtype=torch.float32)
        full[self._mine].copy_(shard.detach())
        self._comm.all_gather(full, name=self.spec.name).wait()
        return full[:numel]
