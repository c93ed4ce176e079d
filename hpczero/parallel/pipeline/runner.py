"""Pipeline: one training step, or one evaluation, of a model whose stages lie on several ranks.

    forward    receive x, call the stage, send x on; keep x and the place in its graph where the gradient comes in
    backward   receive the gradient of what was sent, run the graph, send the gradient of x back

Source: Narayanan et al., Megatron-LM, arXiv 2104.04473, sec. 2.2.
"""

from __future__ import annotations

import math
import weakref
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hpczero.comm.stage_messages import Message, StageMessages
from hpczero.errors import ConfigError, PlanError, StepError
from hpczero.kernels.norm import digest_of_bits
from hpczero.parallel.pipeline.simulate import (
    Action,
    Simulation,
    forwards_of,
    schedule_of,
    simulate,
)
from hpczero.parallel.pipeline.stages import StageForward, stage_of
from hpczero.plan.placement import ModelPart
from hpczero.zero.access import counted, read_later
from hpczero.zero.leaves import Leaves
from hpczero.zero.sharding import Sharding
from hpczero.zero.units.unit import Unit
from hpczero.zero.zeroify import sharding

# Ties: weights that the first and the last stage both hold, such as an embedding that is also the head.
#
# Each stage reduces its own gradient over its data parallel ranks first. The weight is a unit of its own on both
# stages, so its shards are the same elements on both, and each rank adds its twin's shard to its own: first stage +
# last stage, in this order, so that both get the same bits. Source: the sum that Megatron-LM makes over its embedding
# group, arXiv 2104.04473; on shards it is 1 / (data parallel ranks) of the bytes.


class Ties:
    """Of one stage's sharded model."""

    def __init__(self, state: Sharding, part: ModelPart, stages: int) -> None:
        """Not collective. ``part``: what of the whole model it is.

        Raises:
            PlanError: a tied weight shares its unit with other parameters.
        """
        self._state = state
        self._first = part.first
        self._peer = stages - 1 if part.first else 0
        local = {name for name, placement in part.placements.items() if placement.tied}
        found = [unit for unit in state.units if local & {s.name for s in unit.spec.layout.slots}]
        for unit in found:
            if len(unit.spec.layout.slots) > 1:
                others = [s.name for s in unit.spec.layout.slots if s.name not in local]
                raise PlanError(
                    f"unit {unit.spec.name!r} has a weight that the first and the last stage both hold, and "
                    f"{others[:3]} beside it, so its shards differ on the two stages; pass zeroify no rule, or one "
                    "that makes the weight's module a unit of its own, as hpczero.plan.rules.default_rule does"
                )
        names = {unit: part.placements[unit.spec.layout.slots[0].name].name for unit in found}
        self._names = names
        self._units: Sequence[Unit] = sorted(found, key=lambda unit: names[unit])

    def leave_to_first(self) -> None:
        """Of gradients that are there, which both stages have, the sum is to have one: the first's. Not collective."""
        for unit in () if self._first else self._units:
            if unit.spec.trainable:
                unit.gradients.drop(set_to_none=False)

    def add_gradients(self, messages: StageMessages) -> None:
        """Make the gradients on both stages the sum of the two. The first and the last stage call it together.

        Raises:
            StepError: the weight has other values on the other stage, or is trained on one stage alone.
        """
        for unit in self._units:
            name = self._names[unit]
            self._compare(unit, messages, name)
            if not unit.spec.trainable:
                continue
            gradients = unit.gradients
            assert gradients.present, "the last backward has reduced every unit"
            with gradients.rest.at_hand(changes=True):
                mine = gradients.reduced
                theirs = messages.swap(mine, self._peer, name=name)
                first, last = (mine, theirs) if self._first else (theirs, mine)
                torch.add(first, last, out=mine)
        if self._units:
            self._state.step.norms.forget()

    def _compare(self, unit: Unit, messages: StageMessages, name: str) -> None:
        """Same elements, same values; a gradient on either stage is one on both."""
        words = self._words(unit)
        theirs = messages.swap(words, self._peer, name=name).tolist()
        mine = words.tolist()
        if mine[:3] != theirs[:3]:
            raise StepError(
                f"rank {self._state.topology.rank}: of {name!r}, which the first and the last stage both hold, this "
                f"rank has shard {mine[0]} of {mine[1]} elements (trained: {bool(mine[2])}), and its twin shard "
                f"{theirs[0]} of {theirs[1]} (trained: {bool(theirs[2])}), expected the same; give both stages equally "
                "many ranks on each node, and freeze the weight on both or on none"
            )
        if mine[3] != theirs[3]:
            raise StepError(
                f"rank {self._state.topology.rank}: {name!r} has other values on the first stage than on the last one, "
                "which both hold it; train both with equal options, change it on both alike, and let initialize draw "
                "by the name in the whole model"
            )
        if unit.spec.trainable and theirs[4]:
            unit.gradients.usage.now[0] = True

    def _words(self, unit: Unit) -> Tensor:
        """(5,) int64: shard, its elements, trained, a digest of its values, whether this rank used it."""
        index, used, digest = self._state.collectives.group.index, False, 0
        if unit.spec.trainable:
            used = bool(unit.gradients.usage.now[0])
            # Of a unit that rests elsewhere too: its twin may rest in memory. Not while a delayed update changes both.
            if not any(stepper.update.pending for stepper in self._state.step.steppers):
                with unit.owned_values() as values:
                    digest = int(digest_of_bits(values.detach()))
        words = [index, unit.owned_numel, int(unit.spec.trainable), digest, int(used)]
        return torch.tensor(words, dtype=torch.int64, device=self._state.collectives.device)


class Arrived:
    """An activation of the stage before. Nothing here is collective.

    A leaf that requires a gradient could not be changed in place, as blocks of the whole model may do (``x += ...``).
    What the stage gets is therefore the output of a node that keeps the gradient.

    Attributes:
        values: for the stage.
        gradient: of the loss in it; None before the backward, or where nothing depends on it.
    """

    def __init__(self, x: Tensor) -> None:
        self.gradient: Tensor | None = None
        anchor = torch.empty(
            0, requires_grad=torch.is_grad_enabled(), dtype=torch.float32, device="cpu"
        )
        self.values: Tensor = _Arrive.apply(x, anchor, self)  # type: ignore[no-untyped-call]


class _Arrive(torch.autograd.Function):
    """(x, anchor, arrived) -> x, whose gradient is left in ``arrived``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, arrived: Arrived) -> Tensor:
        ctx.arrived = weakref.ref(arrived)  # which has the output, and so this node
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        arrived = ctx.arrived()
        if arrived is not None:
            arrived.gradient = gradient
        return None, None, None


def of_mean(values: tuple[Any, ...], parts: int) -> tuple[Any, ...]:
    """``values``, of which tensors that need a gradient get that of the mean over ``parts`` micro-batches."""
    if not torch.is_grad_enabled():
        return values
    return tuple(
        _OfMean.apply(each, parts) if isinstance(each, Tensor) and each.requires_grad else each  # type: ignore[no-untyped-call]
        for each in values
    )


class _OfMean(torch.autograd.Function):
    """(x, parts) -> x, whose gradient is divided by ``parts``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: int) -> Tensor:
        ctx.parts = parts
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.parts, None


def to_send(y: Tensor) -> Tensor:
    """The values of ``y``, an activation or its gradient, in memory of their own, until they are sent.

    That of ``y`` may be a parameter's, or a block or a hook has kept it and changes it in its next micro-batch, while
    the values are on their way: a running mean that began as a detached output, for example.
    """
    return y.detach().clone(memory_format=torch.contiguous_format)


class StageInputs(NamedTuple):
    """Inputs and targets of one stage.

    Attributes:
        number: of micro-batches.
        inputs: of each micro-batch; empty where the stage needs none.
        targets: of each micro-batch; empty tuples where the stage needs none.
        wants_loss: whether the last stage computes one.
        leaves: which the micro-batches are, where leaves are summed one by one; else None.
    """

    number: int
    inputs: list[tuple[Any, ...]]
    targets: list[tuple[Any, ...]]
    wants_loss: bool
    leaves: Leaves | None = None

    @classmethod
    def of(
        cls,
        stage: StageForward,
        micro_batches: int,
        inputs: Sequence[Any] | None,
        targets: Sequence[Any] | None,
        *,
        any_number: bool = False,
        targets_too: bool = True,
    ) -> StageInputs:
        """Check what a program has given. Not collective.

        Args:
            stage: of this rank.
            micro_batches: of a step.
            inputs: as of ``Pipeline.step``.
            targets: as of ``Pipeline.step``.
            any_number: whether there may be more or fewer micro-batches than in a step.
            targets_too: whether the last stage needs targets, and computes a loss.

        Raises:
            ConfigError: the stage lacks what it needs, or there are too many or too few; a target needs a gradient.
        """
        needs = {
            "inputs": stage.is_first(0),
            "targets": targets_too and stage.is_last(len(stage.chunks) - 1),
        }
        given = {"inputs": inputs, "targets": targets}
        lengths = {name: len(value) for name, value in given.items() if value is not None}
        number = next(iter(lengths.values()), micro_batches) if any_number else micro_batches
        for name, needed in needs.items():
            if needed and given[name] is None:
                raise ConfigError(
                    f"stage {stage.group.rank} of {stage.group.size} needs the {name} of the micro-batches, got None; "
                    "only stages that are not the first need no inputs, and those that are not the last no targets"
                )
        if not number or any(length != number for length in lengths.values()):
            found = ", ".join(f"{length} {name}" for name, length in lengths.items()) or "none"
            expected = "equally many, at least 1" if any_number else f"{number} of each"
            raise ConfigError(
                f"stage {stage.group.rank} of {stage.group.size}: got {found}, expected {expected}: one for each "
                "micro-batch"
            )
        if needs["targets"] and torch.is_grad_enabled():
            _check_without_gradients(targets or ())
        return cls(
            number,
            [_as_tuple(each) for each in inputs] if inputs is not None and needs["inputs"] else [],
            [_as_tuple(each) for each in targets]
            if targets is not None and needs["targets"]
            else [()] * number,
            targets_too,
        )


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _check_without_gradients(targets: Sequence[Any]) -> None:
    """The gradient of a target would be of a sum over micro-batches, and carry a loss scale."""
    for number, target in enumerate(targets):
        if any(isinstance(each, Tensor) and each.requires_grad for each in _as_tuple(target)):
            raise ConfigError(
                f"pipeline: the targets of micro-batch {number} need a gradient, expected none; detach them, or make "
                "what is trained of them a parameter of the model"
            )


REDUCE = ("once", "each")


class _KeptForward(NamedTuple):
    """Of one forward, until its backward: what came in, and where the gradient of what went out enters the graph."""

    x: Arrived | None
    out: GradientEdge | None


class Pipeline:
    """The steps of one zeroified stage. Methods are collective over the pipeline, and over its data parallel ranks.

    An error inside a step is this rank's own: the other stages wait for it. Uncaught, it ends the job.

    Attributes:
        micro_batches: of one step.
        simulation: what the schedule comes to with equal costs: ``bubble``, ``alive``.
        messages: to and from neighbours, with ``stats``.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        micro_batches: int,
        schedule: str = "1f1b",
        hold: bool = True,
        reduce: str = "once",
    ) -> None:
        """Not collective; all stages pass the same options.

        Args:
            model: cut by ``hpczero.parallel.cut``, then zeroified.
            micro_batches: of one step.
            schedule: "1f1b", "gpipe" or "interleaved"; see ``actions.schedule_of``.
            hold: whether units of ZeRO stage 3 stay whole from their first use in a step to its end. Each is gathered
                once then; else in every forward and every backward.
            reduce: "once", in the last backward of a step: the stage's whole gradient is held until then. "each": in
                every backward, which sends ``micro_batches`` times the bytes, and at stages 2 and 3 holds shards only.

        Raises:
            PlanError: the model was not cut, not zeroified or over another topology, or a tied weight is no unit of its
                own.
            ConfigError: an option, or numbers that the schedule cannot run.
        """
        self._model, self._stage = model, stage_of(model)
        state = sharding(model)
        group, chunks = self._stage.group, len(self._stage.chunks)
        if state.topology.pipeline is not group:
            raise PlanError(
                f"stage {group.rank} of {group.size}: the model was zeroified over another topology than it was cut "
                "for, so norms and skipped steps would not be those of all stages; pass both the same topology"
            )
        lists = schedule_of(schedule, group.size, micro_batches, chunks=chunks)
        self.simulation: Simulation = simulate(lists, chunks=chunks)
        self.micro_batches = micro_batches
        if reduce not in REDUCE:
            raise ConfigError(f"reduce: got {reduce!r}, expected one of {', '.join(REDUCE)}")
        self._actions = lists[group.rank]
        self._hold, self._each = hold, reduce == "each"
        self._schedule = schedule
        self.messages = StageMessages(group, chunks=chunks, reach=state.collectives.reach)
        self._ties = Ties(state, self._stage.part(), group.size)
        self._kept: dict[tuple[int, int], _KeptForward] = {}
        self._results: list[Any] = []

    def step(self, inputs: Sequence[Any] | None, targets: Sequence[Any] | None) -> float:
        """Forward and backward of all micro-batches; ``optimizer.step()`` follows.

        Gradients are the mean over micro-batches and data parallel ranks, those of inputs over micro-batches. They are
        added to those that are there.

        Args:
            inputs: of each micro-batch, a tensor or a tuple of them; None where this is not the first stage.
            targets: the same, without gradients; None where this is not the last stage.

        Returns:
            The mean loss over micro-batches of these data parallel ranks' pipeline, on each of its stages.

        Raises:
            StepError: micro-batches of other shapes; a stage whose output does not depend on its input; on this rank.
        """
        return self.begin_step(inputs, targets)()

    def begin_step(
        self,
        inputs: Sequence[Any] | None,
        targets: Sequence[Any] | None,
        leaves: Leaves | None = None,
    ) -> Callable[[], float]:
        """As ``step``, but for the loss, which the caller asks for: once, on all stages, and before the next call.

        The last stage need not wait for its device then; see ``hpczero.read_later``. What is returned gives what
        ``step`` returns, and is collective over the pipeline. Arguments and errors are those of ``step``.

        ``leaves``: of a model that was zeroified with ``exact``: its micro-batches are ``leaves.mine``, and their
        losses are noted there, on all stages, when the loss is asked for.

        Raises:
            ConfigError: another number of micro-batches than leaves of this rank, or several chunks on a stage.
        """
        self._check_training()
        given = StageInputs.of(self._stage, self.micro_batches, inputs, targets)
        if leaves is not None:
            self._check_leaves(leaves)
            given = given._replace(leaves=leaves)
        self._ties.leave_to_first()
        with self._whole():
            self._run(self._actions, given, "step")
        self._ties.add_gradients(self.messages)
        said = self._losses(self.micro_batches)
        if leaves is not None:
            leaves.end()

        def mean_loss() -> float:
            losses = said()
            if leaves is not None:
                leaves.note_all(losses)
            return math.fsum(losses) / len(losses)

        return mean_loss

    def _check_leaves(self, leaves: Leaves) -> None:
        got, chunks = len(leaves.turns), len(self._stage.chunks)
        if got != self.micro_batches or chunks > 1:
            raise ConfigError(
                f"pipeline: got {got} leaves of this rank and {chunks} chunk(s) on a stage, "
                f"expected {self.micro_batches} leaves, its micro-batches, and 1 chunk (parallel.interleave 1): "
                "leaves are added up in their order"
            )
        leaves.check_begin()

    def evaluate(self, inputs: Sequence[Any] | None, targets: Sequence[Any] | None) -> float:
        """The mean loss over micro-batches, without gradients; call ``model.eval()`` before if it is wanted.

        Args:
            inputs: as of ``step``, of any number of micro-batches, the same on all stages.
            targets: as of ``step``.
        """
        losses = self.losses(inputs, targets)
        return math.fsum(losses) / len(losses)

    def losses(self, inputs: Sequence[Any] | None, targets: Sequence[Any] | None) -> list[float]:
        """As ``evaluate``: the loss of each micro-batch."""
        given = StageInputs.of(self._stage, self.micro_batches, inputs, targets, any_number=True)
        self._run_forwards(given, "evaluate")
        return self._losses(given.number)()

    def outputs(self, inputs: Sequence[Any] | None) -> list[Any] | None:
        """What the model returns without targets, of each micro-batch, on the last stage; None on the others.

        ``inputs``: as of ``evaluate``.
        """
        given = StageInputs.of(
            self._stage, self.micro_batches, inputs, None, any_number=True, targets_too=False
        )
        self._run_forwards(given, "outputs")
        found, self._results = self._results, []
        return found if self._stage.is_last(len(self._stage.chunks) - 1) else None

    # --- parts of a step -----------------------------------------------------------------------------------------

    def _run_forwards(self, given: StageInputs, purpose: str) -> None:
        stages, chunks = self._stage.group.size, len(self._stage.chunks)
        with torch.no_grad(), self._whole():
            self._run(forwards_of(stages, given.number, chunks=chunks), given, purpose)

    def _run(self, actions: Sequence[Action], given: StageInputs, purpose: str) -> None:
        settings = (given.number, len(self._stage.chunks), self._schedule, purpose)
        self.messages.begin(zlib.crc32(repr(settings).encode()))
        self._kept.clear()
        self._results = []
        casting = sharding(self._model).casting
        last_forward = max(place for place, action in enumerate(actions) if action.kind == "F")
        # What a step left in flight would come as the next one's.
        with (
            self._stage.group.watchdog.operation(f"a step of the pipeline ({purpose})", begun=True),
            self.messages.moving(),
        ):
            for place, action in enumerate(actions):
                message = self._message(action)
                came = None if message is None else self.messages.receive(message)
                following = self._message(actions[place + 1]) if place + 1 < len(actions) else None
                if following is not None:
                    self.messages.expect(following)
                # Casts to and from fp32, and the loss scale, are for the ends of the whole model.
                casting.part = self._stage.part(action.chunk)
                if action.kind == "F":
                    self._forward(action, came, given)
                else:
                    self._backward(action, came, given.leaves, forwards_follow=place < last_forward)
            casting.part = self._stage.part()
            self.messages.finish()

    def _message(self, action: Action) -> Message | None:
        """What an action begins with; None where that is not another stage's."""
        piece = self._stage.piece(action.chunk)
        if action.kind == "F":
            first = self._stage.is_first(action.chunk)
            return None if first else Message("F", piece, action.micro_batch)
        last = self._stage.is_last(action.chunk)
        return None if last else Message("B", piece, action.micro_batch)

    def _forward(self, action: Action, x: Tensor | None, given: StageInputs) -> None:
        chunk, i = action.chunk, action.micro_batch
        if given.leaves is not None:
            given.leaves.draw(given.leaves.mine[i], self._stage.piece(chunk))
        arrived = None if x is None else Arrived(x)
        inputs = of_mean(given.inputs[i], given.number) if arrived is None else (arrived.values,)
        if not self._stage.is_last(chunk):
            y = self._model(*inputs, chunk=chunk)
            if not isinstance(y, Tensor) or not y.is_floating_point():
                found = f"a {y.dtype} tensor" if isinstance(y, Tensor) else type(y).__name__
                raise StepError(
                    f"{self._where(action)}: the last block returned {found}, expected one floating point tensor, "
                    "which is what passes from stage to stage; have Stages.enter and Stages.call return one"
                )
            self._keep(action, arrived, y)
            piece = self._stage.piece(chunk)
            self.messages.send(Message("F", piece + 1, i), to_send(y))
            return
        y = self._model(*inputs, targets=given.targets[i], chunk=chunk)
        if given.wants_loss and (not isinstance(y, Tensor) or y.numel() != 1):
            found = f"a tensor of {tuple(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
            raise StepError(
                f"{self._where(action)}: the model returned {found}, expected the loss of the micro-batch, a scalar; "
                "have Stages.leave return the mean loss where it is given targets"
            )
        self._keep(action, arrived, y)
        self._results.append(y.detach() if isinstance(y, Tensor) else y)

    def _keep(self, action: Action, x: Arrived | None, y: Tensor) -> None:
        """Keep what the backward needs: of y its place in the graph, not its memory, which nobody reads any more."""
        if not torch.is_grad_enabled():
            return
        if not y.requires_grad and self._stage.trains(action.chunk):
            raise StepError(
                f"{self._where(action)}: what this stage computed does not depend on any of its trained parameters "
                "(torch.no_grad, .detach()?), expected a gradient for them; freeze them before zeroify if that is meant"
            )
        # Of a view: in torch 2.8 the edge of a torch.autograd.Function does not keep its graph.
        edge = get_gradient_edge(y.view_as(y)) if y.requires_grad else None
        self._kept[action.chunk, action.micro_batch] = _KeptForward(x, edge)

    def _backward(
        self,
        action: Action,
        gradient: Tensor | None,
        leaves: Leaves | None,
        *,
        forwards_follow: bool,
    ) -> None:
        x, out = self._kept.pop((action.chunk, action.micro_batch))
        if out is not None:
            # Where the first chunk is frozen, its backwards, which come last, have no graph to reduce in.
            last = not forwards_follow and all(each.out is None for each in self._kept.values())
            state, reduces = sharding(self._model), self._each or last
            with (
                counted(state, self.micro_batches, reduces=reduces)
                if leaves is None
                else leaves.inside(leaves.turn_of(action.micro_batch))
            ):
                torch.autograd.backward(out, gradient)
        if x is None:
            return
        if x.gradient is None:
            raise StepError(
                f"{self._where(action)}: what this stage computed does not depend on what it was given (.detach()?), "
                "so the stages before it would get no gradient; freeze their parameters and train this stage alone, or "
                "let x through"
            )
        piece = self._stage.piece(action.chunk)
        self.messages.send(Message("B", piece - 1, action.micro_batch), to_send(x.gradient))

    def _losses(self, count: int) -> Callable[[], list[float]]:
        """Gives the losses of ``count`` micro-batches, on every stage: collective over the pipeline."""
        found, self._results = self._results, []
        later = [read_later(self._model, loss) for loss in found]  # of the last stage
        return lambda: self.messages.last_says(*([loss() for loss in later] or [0.0] * count))

    def _whole(self) -> AbstractContextManager[None]:
        """Context in which units stay whole that are gathered, if that was asked for."""
        residence = sharding(self._model).schedule.residence
        return residence.keep_whole() if self._hold else nullcontext()

    # --- what is refused -----------------------------------------------------------------------------------------

    def _where(self, action: Action) -> str:
        stage = self._stage.group.rank
        return f"stage {stage} of {self._stage.group.size}, {action}"

    def _check_training(self) -> None:
        state, stage = sharding(self._model), self._stage.group.rank
        if not torch.is_grad_enabled():
            raise StepError(
                f"stage {stage}: pipeline.step inside of torch.no_grad() or torch.inference_mode(), expected outside; "
                "pipeline.evaluate computes losses without gradients"
            )
        if not state.optimizers:
            raise StepError(
                f"stage {stage}: the model was zeroified without an optimizer, so nothing is trained; use "
                "pipeline.evaluate, or give zeroify an optimizer"
            )
