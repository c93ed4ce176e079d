"""Sharding: the object behind a zeroified model."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hpczero.comm import Collectives, Flat
from hpczero.errors import StepError
from hpczero.job.topology import Topology
from hpczero.memory.buffers import DTYPES, Memory
from hpczero.plan import Plan, UnitSpec
from hpczero.plan.placement import ModelPart, part_of
from hpczero.plan.precision import LossScaler
from hpczero.zero.attachment import Attachment, HookSeal, Unfreezing, Zeroing
from hpczero.zero.buffers import SharedBuffers
from hpczero.zero.calls.advice import Advice
from hpczero.zero.calls.casting import Casting
from hpczero.zero.exact import Exact
from hpczero.zero.refusals import IGNORED_BY_DDP, NotForDDP
from hpczero.zero.schedule import Schedule, Surroundings, answer_transformers
from hpczero.zero.units.away_shard import GRADIENT, NOTHING_AWAY, Away
from hpczero.zero.units.gradients import PartialReducer, Reducer
from hpczero.zero.units.seen_gradient import SlotGradient
from hpczero.zero.units.unit import Unit
from hpczero.zero.update.optimizer_state import OptimizerState
from hpczero.zero.update.optimizers import OptimizerSet, point_at_shards
from hpczero.zero.update.update import Step

if TYPE_CHECKING:
    from hpczero.zero.averages import Average

KEY = "_hpczero_sharding"


class Sharding:
    """What stands behind a zeroified model.

    Attributes:
        model: as passed to ``zeroify``.
        optimizers: as passed to ``zeroify``; empty for inference.
        topology, plan, precision: the decisions.
        away: what rests on a memory tier, and which.
        collectives: the transport, with ``stats``.
        units: in plan order.
        attachment, shared_buffers: what a step holds the model against.
        schedule, casting, surroundings: hooks on the model, from ``attach`` on.
        micro_batches: over how many the gradients that are reduced now are the mean; see ``accumulate``.
        next_part: of ``accumulate``, and of how many; None before the first.
        advice: what is told once.
        exact: that steps have the same bits on any number of ranks; None where they need not.
        unfreezing: what trains otherwise than at ``zeroify``.
        registered: methods of ``register_forward``, each with what stood on the object before.
        averages: running averages of the weights, by name.
        lineage: folders of checkpoints, each with the step of the last one there that the model was loaded or saved as.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: OptimizerSet,
        plan: Plan,
        topology: Topology,
        collectives: Collectives,
        *,
        owns_topology: bool = False,
        away: Away = NOTHING_AWAY,
        exact: Exact | None = None,
    ) -> None:
        """Collective on some transports (memory may be shared).

        Args:
            model: checked, its parameters still its own.
            optimizers: over the model's parameters, not yet over shards; none for inference.
            plan: the units.
            topology: the ranks that train together.
            collectives: over its shard group; closed by ``detach``.
            owns_topology: ``detach`` also frees ``topology``.
            away: what rests on a memory tier, which ``detach`` closes.
            exact: see the attribute.
        """
        self.exact = exact
        self.model = model
        self.optimizers = optimizers
        self.plan = plan
        self.precision = plan.precision
        self.topology = topology
        self.collectives = collectives
        self._owns_topology = owns_topology
        self.away = away
        self.scaler = LossScaler(plan.precision.loss_scale)
        self.advice = Advice(model, self.topology, drawn_anew=exact is not None)
        parameters = dict(model.named_parameters())
        # A leaf is collected beside the sum of the leaves before it.
        apart = exact is not None or any(GRADIENT in s.parts for s in away.shards.values())
        tables = any(spec.row for spec in plan.units)
        reducer = Reducer(collectives, apart=apart, tables=tables)
        self._over_tensor: Collectives | None = None
        if any(spec.partial for spec in plan.units):
            self._over_tensor = Flat(
                topology.tensor, reach=collectives.reach, memory=collectives.memory
            )
            reducer = PartialReducer(collectives, self._over_tensor, plan.units, apart=apart)
        self._reducer = reducer
        self.units = [
            Unit(
                spec,
                [parameters[slot.name] for slot in spec.layout.slots],
                plan,
                collectives,
                reducer=reducer,
                away=away.shards.get(spec.name),
            )
            for spec in plan.units
        ]
        collectives.settle()
        self.attachment = Attachment(model, self.units, topology.rank)
        self.unfreezing = Unfreezing(self)
        self.shared_buffers = SharedBuffers(model, topology, collectives)
        self.lineage: dict[Path, int] = {}
        self.averages: dict[str, Average] = {}
        self.step = Step(self)
        self.micro_batches = 1
        self.next_part: tuple[int, int] | None = None
        self.registered: list[tuple[nn.Module, str, Any]] = []
        self._optimizer_states: list[OptimizerState] = []

    @property
    def optimizer(self) -> Optimizer | None:
        """The one that was passed to ``zeroify``; None for inference.

        Raises:
            PlanError: there are several, see ``optimizers``.
        """
        return self.optimizers.alone

    @property
    def buffers(self) -> list[Tensor]:
        """The model's persistent buffers as they are now."""
        return self.shared_buffers.now

    @property
    def memory(self) -> Memory:
        """Ledger of bytes held by category."""
        return self.collectives.memory

    @property
    def skipped_steps(self) -> int:
        """Steps skipped so far because a gradient was not finite."""
        return self.step.skips.skipped

    @property
    def loss_scale(self) -> float:
        """Current loss scale; 1 without loss scaling."""
        return self.scaler.scale

    def optimizer_nbytes(self) -> int:
        """Bytes of optimizer state this rank holds, scalars per parameter left out."""
        of_shards = (state for each in self.optimizers for state in each.state.values())
        # Past what is said of values that rest on a tier: here their bytes in memory count.
        states = itertools.chain.from_iterable(dict.values(state) for state in of_shards)
        return sum(stepper.update.nbytes for stepper in self.step.steppers) + sum(
            t.numel() * t.element_size() for t in states if isinstance(t, Tensor) and t.dim()
        )

    def attach(self) -> None:
        """Hook into the model and the optimizers, after the units are filled."""
        model = self.model
        self.advice.attach()
        modules = dict(model.named_modules(remove_duplicate=False))
        self.casting = Casting(
            model,
            DTYPES[self.precision.param],
            lambda: self.scaler.scale,
            scaled=self.precision.loss_scale is not None,
            units=[modules[name] for spec in self.plan.units for name in spec.modules],
            about_hooks=self.advice.about_hooks,
            part=part_of(model) or ModelPart(()),
        )
        self.schedule = Schedule(self)
        self.advice.about_layers(self.answer_transformers())
        model.__dict__[IGNORED_BY_DDP] = NotForDDP()
        for unit in self.units:
            self._show_gradients(unit)
        hooked = {name: modules[name] for spec in self.plan.units for name in ("", *spec.modules)}
        self.surroundings = Surroundings(model, hooked.values())
        self._seal = HookSeal(hooked)
        model.__dict__[KEY] = self
        zeroing = Zeroing(self)
        model.__dict__["zero_grad"] = zeroing.all
        for each in self.optimizers:
            each.state.clear()
        point_at_shards(self.optimizers, self.units, kept=[0] * len(self.optimizers))
        self.step.attach(self.optimizers, sharded=self.plan.stage.shards_optimizer)
        for stepper in self.step.steppers:
            count = len(self.optimizers)
            state = OptimizerState(stepper, self.topology, self.plan, self.advice, count=count)
            self._optimizer_states.append(state)
            self.attachment.watch(stepper, state)
            stepper.optimizer.__dict__["zero_grad"] = zeroing.of(stepper)

    def _show_gradients(self, unit: Unit) -> None:
        """Let ``parameter.grad`` stand for what lies in shards; see SeenGradient."""
        if not unit.spec.trainable:
            return
        for position, guard in enumerate(unit.whole.watch.guards):
            guard.show_gradient(SlotGradient(unit, position, self))

    def train(self, unit: Unit, spec: UnitSpec) -> None:
        """``unit``, a frozen one, trains from now on and is as ``spec`` says; ``follow_units`` follows."""
        unit.train(spec, self._reducer)
        self.schedule.train(unit)
        self._show_gradients(unit)

    def reduce(self, units: Sequence[Unit]) -> None:
        """Reduce gradients that lie on the parameters of ``units``, which train since now. Collective."""
        factor = self.gradient_factor()
        for unit in units:
            for position, parameter in enumerate(unit.parameters):
                unit.gradients.capture(position, parameter, False)
            unit.gradients.reduce(factor, self.schedule.backward.turn)
            unit.gradients.finish()

    def follow_units(self) -> None:
        """Other units train, and optimizers have other groups: everything that lists them does so anew."""
        self.plan = replace(self.plan, units=tuple(unit.spec for unit in self.units))
        self.step.follow()
        for state in self._optimizer_states:
            state.follow(self.plan)
        self.attachment.follow()

    def check_values(self) -> None:
        """Refuse to read the masters where the model shows other values than they have.

        Inside ``gathered`` changes count at its end only. Whether parameters are frozen for a while plays no part.

        Raises:
            StepError: names the first parameter that was changed behind hpczero's back.
        """
        for unit in self.units:
            unit.optimized.check_seen()
            unit.whole.check_values()

    # --- what a step asks of the model, and tells it: see ``ModelSide``; and what gradients do: see ``GradientSide``

    @property
    def in_backward(self) -> bool:
        """Whether a backward runs, or was interrupted."""
        return self.schedule.backward.runs

    @property
    def in_call(self) -> bool:
        """Whether a forward runs."""
        return self.schedule.in_call

    @property
    def differentiable(self) -> bool:
        """Whether the last backward kept its own graph (``create_graph=True``)."""
        return self.schedule.backward.differentiable

    def norm_of_slot(self, unit: Unit, position: int, order: float) -> float:
        """As ``GradientNorms.of_slot``."""
        return self.step.norms.of_slot(unit, position, order)

    def note_change(self, name: str, what: str) -> None:
        """``what`` was done to the gradient of the parameter ``name``; ranks compare that."""
        self.step.history.change(name, what)

    def note_drop(self) -> None:
        """A gradient is gone."""
        self.step.history.drop()

    def forget_interrupted(self) -> None:
        """Forget an interrupted backward, whose other gradients are incomplete."""
        self.schedule.reset()
        self.step.history.interruption()

    def check_attachment(self) -> None:
        """Raise StepError if model or optimizer hold parameters that no unit knows."""
        self.attachment.check()
        self.unfreezing.check()
        for average in self.averages.values():
            average.check_out("optimizer.step()")

    def before_update(self, units: Collection[Unit]) -> list[Unit]:
        """Values of ``units`` change now; returns the units that were kept whole for a later backward."""
        if self.schedule.backward.runs:
            return []
        return self.schedule.residence.end_step(units)

    def after_update(self) -> None:
        """The parameters are up to date."""
        self.shared_buffers.share()

    @property
    def texts(self) -> list[str]:
        """Buffers, and what trains, where they are not as they were at first."""
        return [*self.shared_buffers.replaced(self.attachment.modules), *self.unfreezing.texts]

    def settle(self) -> bool:
        """Bring the plan to what trains; whether the plan was not there. Collective."""
        return self.unfreezing.settle_at_step()

    def gradient_factor(self) -> float:
        """Mean over ranks and micro-batches, loss scale taken out: one number, multiplied once, after the sum."""
        if self.precision.loss_scale is not None and not self.casting.scaled:
            raise StepError(
                "this backward did not come in through the outputs of the model, so its gradients carry no "
                "loss scale; call the model itself, not a submodule, when training in fp16"
            )
        if (
            self.micro_batches == 1
            and self.next_part is not None
            and self.next_part[0] < self.next_part[1]
        ):
            raise StepError(
                f"part {self.next_part[0]} of {self.next_part[1]} of accumulate was to come, and backward ran outside "
                "of it; run all parts inside accumulate, or call optimizer.zero_grad() to begin anew"
            )
        self.step.gradients_come()
        turn = self.schedule.backward.turn
        if turn is not None:
            return 1.0 / (turn.leaves * self.scaler.scale)
        if self.exact is not None:
            self.exact.refuse("a backward ran outside of leaves")
        if self.micro_batches > 1:
            self.step.history.scaling(
                f"gradients of {self.micro_batches} micro-batches (accumulate)"
            )
        return 1.0 / (self.topology.data_sequence.size * self.micro_batches * self.scaler.scale)

    def answer_transformers(self) -> list[nn.Module]:
        """Have modules of transformers run on all ranks alike where whole parameters are gathered. Not collective.

        Returns:
            Those modules; none where each rank may run what it likes.
        """
        held = any(unit.whole.holds for unit in self.units)
        runs_all = self.plan.stage.shards_parameters and self.topology.shard.size > 1 and not held
        found = answer_transformers(self.model, runs_all=runs_all)
        return found if runs_all else []

    def detach(self, *, whole: bool = False) -> None:
        """Undo ``attach`` and close the transport. Collective.

        Args:
            whole: gather parameters that are sharded; whole ones are this rank's own afterwards.

        Raises:
            StepError: on every rank, inside of ``gathered``.
        """
        with self.topology.agreed("release the model"):
            for unit in self.units if whole else ():
                unit.whole.check_certain()
            if any(unit.whole.holds for unit in self.units):
                raise StepError(
                    f"rank {self.topology.rank}: hpczero.release(model) inside of `with hpczero.gathered(model):`; "
                    "leave the block first (release(model, whole=True) keeps the parameters whole)"
                )
        self.step.finish_updates()
        for unit in self.units if whole else ():
            unit.unshard(exact=True)
            unit.whole.wait_for_unshard()  # before anything is taken away: a memory tier may fail
        self.schedule.remove()
        answer_transformers(self.model, runs_all=False)
        self.model.__dict__.pop(IGNORED_BY_DDP, None)
        for unit in self.units:
            unit.whole.leave()
        self.casting.remove()
        self.surroundings.remove()
        self._seal.remove()
        for state in self._optimizer_states:
            state.remove()
        self.advice.remove()
        for module, name, own in reversed(self.registered):
            module.__dict__.pop(name, None)
            if own is not None:
                module.__dict__[name] = own
        self.step.detach()
        self._reducer.close()
        self.collectives.close()
        if self._over_tensor is not None:
            self._over_tensor.close()
        self.away.close()
        if self._owns_topology:
            self.topology.free()
        self.model.__dict__.pop("zero_grad", None)
        self.model.__dict__.pop(KEY, None)
        for optimizer in self.optimizers:
            optimizer.__dict__.pop("zero_grad", None)
