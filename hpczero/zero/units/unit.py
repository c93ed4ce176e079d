"""Unit: storage and state of one communicated group of parameters.

whole       parameters, views of one buffer   (padded_numel,) param dtype; given back between uses where sharded
master      fp32, what is optimised   this rank's shard, or the whole unit where the optimizer is replicated; in
                                      fp32 it *is* this rank's slice of the whole buffer, if that buffer keeps its
                                      memory (``whole.lasts``)
gradients   see ``gradients.py``
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from hpczero.comm.collectives import Collectives
from hpczero.memory.buffers import Buffer, lasting
from hpczero.plan import Plan, UnitSpec
from hpczero.zero.units.away import keeps_values, new_master, rest_of_gradient, rest_of_values
from hpczero.zero.units.away_shard import AwayShard, UnitStorage, same_place
from hpczero.zero.units.encoded import EncodedParameters, EncodedRest
from hpczero.zero.units.gradients import Reducer, Shards, UnitGradients, whole_copy
from hpczero.zero.units.rows import TableParameters
from hpczero.zero.units.whole import WholeParameters


class Unit:
    """One communicated group; built empty, filled by ``load``.

    Attributes:
        spec: names, shapes and places.
        whole: the parameters as the model sees them.
        optimized: what the optimizer sees; empty where nothing is trained.
        rest: the values that this rank keeps.
        away: this rank's shard on a memory tier; None where everything stays in memory.
        owned_numel: elements of this rank's part of the values without padding, the same in every stage.
    """

    def __init__(
        self,
        spec: UnitSpec,
        parameters: Sequence[nn.Parameter],
        plan: Plan,
        comm: Collectives,
        *,
        reducer: Reducer,
        away: AwayShard | None = None,
    ) -> None:
        """Allocate the buffers. Collective on transports that share memory; ``comm.settle`` follows.

        ``plan`` says stage and precision.
        """
        self.spec, self._plan, self._comm, self.away = spec, plan, comm, away
        self._stage = plan.stage
        kind = WholeParameters if spec.codec is None else EncodedParameters
        if spec.row and plan.stage.shards_parameters:
            kind = TableParameters
        given_back = away is not None and not away.near
        self.whole = kind(spec, parameters, plan, comm, given_back=given_back)
        self.optimized = Shards(
            spec.layout, torch.empty(0, dtype=torch.float32, device="cpu"), start=0, pieces=range(0)
        )
        self._mine = self.whole.mine
        self.owned_numel = len(spec.layout.shard_range(comm.group.index))
        self._gradients: UnitGradients | None = None
        self._frozen: Buffer | None = None  # of a frozen unit: this rank's shard, if it lies apart
        if spec.trainable:
            self._allocate_state(reducer)
        elif isinstance(self.whole, EncodedParameters):
            self.rest: UnitStorage = EncodedRest(self.whole, spec.layout.shard_numel)
        else:
            if plan.stage.shards_parameters and not self.whole.lasts:
                numel, dtype = spec.layout.shard_numel, self.whole.flat.dtype
                self._frozen = comm.allocate(numel, dtype, category="parameters")
            self.rest = UnitStorage(
                self.whole.flat[self._mine] if self._frozen is None else self._frozen.tensor
            )
        if isinstance(self.whole, TableParameters):
            self.whole.serve(reducer.rows, self.rest.tensor)

    def train(self, spec: UnitSpec, reducer: Reducer) -> None:
        """Of a frozen unit in memory: from now on it trains. Not collective, on all ranks alike.

        Masters are made from the values as they are: exact, in fp32. ``spec`` has the same layout.
        """
        whole, frozen = self.whole, self._frozen
        values = self.rest.tensor if self._stage.shards_optimizer else whole.flat
        self.spec = spec
        if self._comm.secondary is not None:
            self._comm.secondary.drop(whole.spec.name)
        whole.spec = spec
        kept = frozen is not None and not self._plan.precision.has_masters  # becomes the master
        self._allocate_state(reducer, master=values if kept else None)
        self.rest.write(values)
        if frozen is not None and not kept:
            frozen.release()
        self._frozen = None
        self.optimized.note()

    def _allocate_state(self, reducer: Reducer, master: Tensor | None = None) -> None:
        """Masters, if there is no ``master`` yet, the optimizer's view of them, gradients."""
        layout, comm, stage = self.spec.layout, self._comm, self._stage
        owned = self._mine if stage.shards_optimizer else slice(0, layout.padded_numel)
        numel = owned.stop - owned.start
        if master is not None:
            pass
        elif self.away is not None and keeps_values(self.away):
            master = lasting(numel, torch.float32, self.away.store.device)
        else:
            master = new_master(numel, owned, self.whole, self._plan.precision, comm)
        # A replicated optimizer steps on the pieces of a sharded one: kernels round the tail of a tensor differently.
        index = comm.group.index
        pieces = range(index, index + 1) if stage.shards_optimizer else range(layout.num_shards)
        self.optimized = Shards(layout, master, start=owned.start, pieces=pieces)
        self.rest = rest_of_values(master, self.away, self.whole, comm)
        rest = rest_of_gradient(layout, self.away, stage, comm)
        self._gradients = UnitGradients(
            self.spec, self.optimized, self._plan, comm, reducer=reducer, rest=rest
        )

    @property
    def gradients(self) -> UnitGradients:
        """Of a trained unit, from autograd to the optimizer."""
        assert self._gradients is not None, "a frozen unit has none"
        return self._gradients

    @property
    def shards(self) -> list[nn.Parameter]:
        """One fp32 parameter for each model parameter this rank owns a part of."""
        return self.optimized.parameters

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
        self.rest.write(self._like_rest(values.tensor))
        self.whole.load(values.tensor)
        values.release()
        self.whole.note_versions()
        self.optimized.note()

    # --- parameters ----------------------------------------------------------------------------------------------

    def unshard(self, *, exact: bool = False) -> None:
        """Start making the parameters whole; nothing if they are, or if it has started. Collective.

        ``exact``: as of ``WholeParameters.unshard``.
        """
        self.whole.unshard(self.rest.read, exact=exact)

    def reshard(self, *, retain: bool = False) -> None:
        """Give the whole parameters back where the stage shards them; ``retain``: this rank goes on using them."""
        self.whole.reshard(retain=retain)

    def refresh(self) -> None:
        """Bring the whole parameters up to date with the masters. Collective where the optimizer is sharded.

        ``whole.wait_for_update`` follows.
        """
        if not self.spec.trainable:
            return
        if self._stage.shards_optimizer:
            self.whole.update(self.rest.read)
        else:
            self.rest.read(self.whole.flat)

    def write_back(self, root: int) -> None:
        """Make what ``root`` holds in the whole parameters everybody's, masters included. Collective.

        ``root`` is a rank of ``topology.data_sequence``. Inside a ``hold``. Where a value did not change, the fp32
        master keeps its extra digits.
        """
        whole, new = self.whole, self.whole.flat_of_user
        whole.forget_copy()
        self._comm.broadcast(new, root=root, name=self.spec.name).wait()
        mine = self._like_rest(new)
        if not same_place(self.rest.tensor, mine):
            with (
                _agreed(self, self._comm, "keep the values"),
                self.rest.at_hand(changes=True) as rest,
                torch.no_grad(),
            ):
                changed = mine != rest.to(mine.dtype)
                rest.copy_(torch.where(changed, mine.to(rest.dtype), rest))
        if whole.shared:
            whole.update(UnitStorage(new[self._mine]).read)
            whole.wait_for_update()
        elif isinstance(whole, EncodedParameters):
            whole.show_kept()
        self.whole.note_versions()
        self.optimized.note()

    def take_over(self) -> None:
        """Follow a program that has put values into other memory (``parameter.data = ...``), and masters with them."""
        rest = self.rest.tensor
        inside = torch._C._is_alias_of(rest, self.whole.flat)  # type: ignore[attr-defined]
        if self.whole.watch.take_over() and inside:
            rest.data = self._like_rest(self.whole.flat)
            self.optimized.follow()

    def note_step(self, positions: Sequence[int]) -> None:
        """The values of these slots are others, by a step or a load, and the whole parameters are up to date."""
        self.whole.note_step(positions)
        self.optimized.note()

    @property
    def replicas(self) -> tuple[Tensor, ...]:
        """What every rank updates by itself: values and, empty where there is none, reduced gradient; views, fp32."""
        if self._stage.shards_optimizer:
            return ()
        master = self.rest.tensor
        gradient = self.gradients.reduced if self.gradients.present else master[:0]
        return master[: self.spec.layout.numel], gradient[: self.spec.layout.numel]

    # --- checkpoints ---------------------------------------------------------------------------------------------

    @contextmanager
    def owned_values(self, *, changes: bool = False, anew: bool = False) -> Iterator[Tensor]:
        """This rank's part without padding, (owned_numel,), inside; to be written with ``changes``. Not collective.

        With ``anew`` all of it is to be written; padding becomes zero.
        """
        with self.rest.at_hand(changes=changes, anew=anew) as rest:
            is_whole_unit = rest.numel() == self.spec.layout.padded_numel
            own = rest[self._mine] if is_whole_unit else rest
            if anew:
                with torch.no_grad():
                    own[self.owned_numel :].zero_()
            yield own[: self.owned_numel]

    def _like_rest(self, whole: Tensor) -> Tensor:
        """The part of ``whole`` that this rank keeps between uses."""
        return whole if self.rest.tensor.numel() == whole.numel() else whole[self._mine]

    def owned_shards(self) -> Iterator[tuple[int, nn.Parameter]]:
        """Slot and optimizer's view of each part of the ``owned_values``, in order."""
        return self.optimized.of_piece(self._comm.group.index)

    def replicated(self, owned: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Every shard that the optimizer of this rank sees, with its values. Collective where it is replicated.

        ``owned``: (owned_numel,) fp32.
        """
        full = owned
        if not self._stage.shards_optimizer:
            full = torch.zeros(
                self.spec.layout.padded_numel, device=self._comm.device, dtype=torch.float32
            )
            full[self._mine][: len(owned)].copy_(owned)
            self._comm.all_gather(full, name=self.spec.name).wait()
        yield from ((shard, part) for _, shard, part in self.optimized.parts_of(full))

    def publish(self) -> None:
        """The ``owned_values`` of every rank were set: masters of all and the whole parameters follow.

        Graphs that need the values of before refuse their backward, as in torch. Collective; no model call may be under
        way.
        """
        if self.spec.trainable:
            if not self._stage.shards_optimizer:
                self._comm.all_gather(self.rest.tensor, name=self.spec.name).wait()
            self.refresh()
        else:
            self.whole.update(self.rest.read)
        self.whole.wait_for_update()
        self.note_step(range(len(self.parameters)))

    # --- whole copies --------------------------------------------------------------------------------------------

    def gather_values(self) -> Tensor:
        """(numel,) fp32 copy of all values, from the masters. Collective."""
        sharded = self.spec.trainable or self._stage.shards_parameters
        with ExitStack() as stack:
            with _agreed(self, self._comm, "read the values"):
                rest = stack.enter_context(self.rest.at_hand())
            values = rest if sharded else self.whole.flat
            return whole_copy(values, self.spec.layout, self._comm, name=self.spec.name)


def _agreed(unit: Unit, comm: Collectives, what: str) -> AbstractContextManager[None]:
    """A tier fails on one rank alone, and the others must not wait for what it would send. Collective if away."""
    return (
        nullcontext() if unit.away is None else comm.group.agreed(f"{what} of {unit.spec.name!r}")
    )
