"""The passes of a model, and the loss over held-out samples every few steps, with another metric where there is one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import hpczero
from hpczero.accelerator import Accelerator
from hpczero.adapters.base import Adapter
from hpczero.errors import ConfigError, StepError
from hpczero.job.group import Group
from hpczero.job.topology import Topology
from hpczero.options.config import LayoutOptions
from hpczero.parallel.pipeline.runner import Pipeline
from hpczero.parallel.tensor import own_tokens
from hpczero.run.balance import Balance
from hpczero.run.results.metrics import Stopwatch
from hpczero.run.starting.reading import HeldOutSet
from hpczero.zero.access import finish_update
from hpczero.zero.sharding import KEY

# (step, micro step) -> inputs and targets of this rank, or what else its samples have: NumPy arrays or tensors.
Samples = Callable[[int, int], tuple[Any, ...]]
Loss = Callable[..., Tensor]  # (model, *batch)
Own = Callable[[Tensor], Tensor]  # this rank's part, where ranks share the tokens of a sample


def checked(found: Any, what: str) -> Tensor:
    """``found``, which an adapter gave as its loss or metric.

    Raises:
        StepError: it is no tensor of one element.
    """
    got = repr(type(found).__name__)
    if isinstance(found, Tensor):
        if found.numel() == 1:
            return found
        got = f"a tensor of shape {tuple(found.shape)}"
    raise StepError(
        f"{what} of the adapter gave {got}, expected a tensor of one element, the mean over the samples"
    )


@dataclass(frozen=True)
class LeafPlan:
    """How the leaves of every step are taken.

    Attributes:
        count, seed, check_every: arguments of ``hpczero.Leaves``.
        digest_every: steps between those of which digests are kept; 0: of none.
    """

    count: int
    seed: int
    check_every: int = 0
    digest_every: int = 0

    def of(self, model: nn.Module, step: int) -> hpczero.Leaves:
        """Those of ``step``, counted from 0."""
        return hpczero.Leaves(
            model,
            self.count,
            step=step,
            seed=self.seed,
            check_every=self.check_every,
            digests=self.is_digested(step),
        )

    def is_digested(self, step: int) -> bool:
        """Whether digests are kept of ``step``."""
        return self.digest_every > 0 and (step + 1) % self.digest_every == 0


class PlainPasses:
    """Forward and backward of a model that each rank calls by itself. Collective over the topology of the model.

    Attributes:
        plan: of the leaves of a step, where these are summed one by one; else None.
        leaves: of the last step, in the same case.
        waited_s: seconds that this rank has waited for others in passes so far, beside what collectives count.
    """

    waited_s = 0.0

    def __init__(
        self,
        model: nn.Module,
        *,
        loss: Loss,
        accumulation: int,
        accelerator: Accelerator,
        own: Own = lambda tokens: tokens,
        balance: Balance | None = None,
        plan: LeafPlan | None = None,
    ) -> None:
        """Not collective.

        Args:
            model: zeroified.
            loss: of the model and a batch.
            accumulation: number of micro steps in a step.
            accelerator: of the model.
            own: this rank's part of the tokens of a sample.
            balance: weights losses.
            plan: see the attribute.
        """
        self.plan = plan
        self.leaves: hpczero.Leaves | None = None
        self._model, self._loss, self._own, self._balance = model, loss, own, balance
        self._accumulation, self._accelerator = accumulation, accelerator

    def take(
        self, number: int, samples: Samples, watch: Stopwatch, finish: Callable[[], None]
    ) -> Callable[[], Sequence[float]]:
        """Forward and backward of step ``number``; gradients are reduced at the end.

        Args:
            number: of the step.
            samples: gives the samples of this rank for a step and a micro step, or a leaf.
            watch: told of the phases ``data``, ``forward``, ``backward``.
            finish: called when the last backward has been started.

        Returns:
            Gives the loss of each leaf that counts; without leaves the mean loss over this rank's samples, weighted as
            in the mean over ranks. It waits for a device where the step has not; with a pipeline it is collective over
            the stages.
        """
        if self.plan is not None:
            leaves = self.leaves = self.plan.of(self._model, number)
            for leaf in leaves:
                with watch.phase("data"):
                    arrays = samples(number, leaf)
                last = leaves.now.last
                leaves.note(self._forward_backward(arrays, watch, finish if last else None))
            return lambda: leaves.own_losses
        losses: list[Callable[[], float]] = []
        for micro_step in range(self._accumulation):
            with watch.phase("data"):
                arrays = samples(number, micro_step)
            last = micro_step == self._accumulation - 1
            with hpczero.accumulate(self._model, micro_step, self._accumulation):
                loss = self._forward_backward(arrays, watch, finish if last else None)
            losses.append(hpczero.read_later(self._model, loss / self._accumulation))
        return lambda: [sum(loss() for loss in losses)]

    def _forward_backward(
        self, arrays: tuple[Any, ...], watch: Stopwatch, finish: Callable[[], None] | None
    ) -> Tensor:
        """Of one micro batch; its loss. ``finish`` is called when the backward has been started."""
        weight = 1.0 if self._balance is None else self._balance.weight
        with watch.phase("forward"):
            batch = (self._accelerator.bring(self._own(torch.as_tensor(a))) for a in arrays)
            loss = checked(self._loss(self._model, *batch), "loss")
            if not loss.requires_grad:
                raise StepError(
                    "loss gave a number that no parameter of the model has a part in (detach(), item() or "
                    "no_grad() in it?), so there is nothing to train"
                )
            if weight != 1.0:
                loss = loss * weight
        with watch.phase("backward"):
            loss.backward()  # type: ignore[no-untyped-call]
            if finish is not None:
                finish()
        return loss.detach()

    def held_out(self, parts: Iterable[tuple[Any, ...]]) -> list[float]:
        """The loss of each part times its samples, without gradients.

        Parts are inputs, targets, and the number of samples.
        """
        found = []
        for *batch, number in parts:
            loss = checked(self._loss(self._model, *map(self._own, batch)), "loss or metric")
            found.append(loss.item() * number)
        return found

    def measuring(self, adapter: Adapter) -> PlainPasses:
        """Passes whose ``held_out`` sums the adapter's metric instead of the loss. Not collective."""
        named: Any = {"accelerator": self._accelerator, "own": self._own}
        return PlainPasses(self._model, loss=adapter.metric, accumulation=1, **named)


class PipelinePasses:
    """As ``PlainPasses``, of a stage of a pipeline, whose micro batches pass from stage to stage."""

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        model: nn.Module,
        group: Group,
        accelerator: Accelerator,
        own: Own = lambda tokens: tokens,
        plan: LeafPlan | None = None,
    ) -> None:
        """Not collective. ``group`` are the stages of ``model``; ``plan`` as of ``PlainPasses``."""
        self.plan, self._model = plan, model
        self.leaves: hpczero.Leaves | None = None
        self._pipeline, self._group = pipeline, group
        self._accelerator, self._own = accelerator, own

    def take(
        self, number: int, samples: Samples, watch: Stopwatch, finish: Callable[[], None]
    ) -> Callable[[], Sequence[float]]:
        """As of ``PlainPasses``. Forwards and backwards are interleaved, so both count as ``backward``."""
        leaves, parts = None, list(range(self._pipeline.micro_batches))
        if self.plan is not None:
            leaves = self.leaves = self.plan.of(self._model, number)
            parts = leaves.mine
        with watch.phase("data"):
            micro_steps = [samples(number, each) for each in parts]
        with watch.phase("backward"):
            pairs = [
                [self._accelerator.bring(self._own(torch.as_tensor(a))) for a in arrays]
                for arrays in micro_steps
            ]
            loss = self._pipeline.begin_step(
                [p[0] for p in pairs], [p[1] for p in pairs], leaves=leaves
            )
            finish()

        def losses() -> Sequence[float]:
            mean = loss()
            return [mean] if leaves is None else leaves.own_losses

        return losses

    def held_out(self, parts: Iterable[tuple[Any, ...]]) -> list[float]:
        """As of ``PlainPasses``; forwards of equally many samples pass one after the other."""
        found, own = [], self._own
        for number, group in itertools.groupby(parts, key=lambda part: part[2]):
            alike = list(group)
            losses = self._pipeline.losses(
                [own(x) for x, _, _ in alike], [own(y) for _, y, _ in alike]
            )
            found += [loss * number for loss in losses]
        return found

    def measuring(self, adapter: Adapter) -> PipelinePasses:
        """As of ``PlainPasses``."""
        named: Any = {"group": self._group, "accelerator": self._accelerator, "own": self._own}
        named["model"] = self._model
        return PipelineMeasuring(adapter, self._pipeline, **named)

    @property
    def waited_s(self) -> float:
        """Seconds that this stage has waited for messages so far: the bubble is among them."""
        return self._pipeline.messages.stats.waited_s


class _Outputs(nn.Module):
    """A model that has been called already: gives the outputs that a pipeline has made of some inputs, once."""

    def __init__(self, inputs: Tensor, outputs: Any) -> None:
        super().__init__()
        self._inputs, self._outputs = inputs, [outputs]

    def forward(self, *inputs: Any) -> Any:
        """The outputs. Raises ConfigError for anything but one call with the inputs."""
        if len(inputs) != 1 or inputs[0] is not self._inputs or not self._outputs:
            raise ConfigError("the model is called twice, or with others than the inputs")
        return self._outputs.pop()


class PipelineMeasuring(PipelinePasses):
    """Of a stage of a pipeline, whose last stage has an adapter's metric of what comes out; all stages are told it."""

    def __init__(self, adapter: Adapter, pipeline: Pipeline, **named: Any) -> None:
        """Not collective."""
        super().__init__(pipeline, **named)
        self._adapter = adapter

    def held_out(self, parts: Iterable[tuple[Any, ...]]) -> list[float]:
        """The metric of each part times its samples.

        Raises:
            ConfigError: the metric needs more of the model than its outputs for the inputs; on every stage.
        """
        measured = []
        for number, group in itertools.groupby(parts, key=lambda part: part[2]):
            alike = [(self._own(x), self._own(y)) for x, y, _ in group]
            outputs = self._pipeline.outputs([x for x, _ in alike])
            with self._group.agreed(f"measure the {self._adapter.metric_name}"):
                for (x, y), found in zip(alike, outputs or [], strict=False):  # of the last stage
                    measured.append(self._measured(x, y, found) * number)
        return [self._group.total(*measured)]

    def _measured(self, x: Tensor, y: Tensor, outputs: Any) -> float:
        try:
            found = self._adapter.metric(_Outputs(x, outputs), x, y)
        except Exception as error:
            raise ConfigError(
                f"{type(self._adapter).__name__}.metric: with parallel.pipeline above 1 it may call model(inputs) "
                f"once, and no other part of the model, which lies on other stages ({type(error).__name__}: {error}); "
                "write it so, or leave metric_name empty"
            ) from error
        return checked(found, "metric").item()


Passes = PlainPasses | PipelinePasses


def passes_of(
    options: LayoutOptions,
    adapter: Adapter,
    model: nn.Module,
    *,
    accumulation: int,
    accelerator: Accelerator,
    balance: Balance | None = None,
    plan: LeafPlan | None = None,
) -> Passes:
    """What makes the gradients of a step. Not collective.

    ``accumulation`` is the number of micro steps in a step, which are the micro batches of a pipeline. ``balance``, if
    shares of ranks are uneven, goes without one. ``plan``: as of ``PlainPasses``.

    Raises:
        ConfigError: numbers that the schedule cannot run.
    """
    topology = hpczero.sharding(model).topology
    named: dict[str, Any] = {"accelerator": accelerator, "plan": plan}
    if topology.sequence.size > 1:  # of samples that are no tokens there is nothing to divide
        named["own"] = partial(own_tokens, topology=topology)
    if options.pipeline == 1:
        named["balance"] = balance
        return PlainPasses(model, loss=adapter.loss, accumulation=accumulation, **named)
    pipeline = Pipeline(model, micro_batches=accumulation, schedule=options.order)
    return PipelinePasses(pipeline, model=model, group=topology.pipeline, **named)


@dataclass(frozen=True)
class Found:
    """What an evaluation finds.

    Attributes:
        loss: mean over the held-out samples.
        metric: the adapter's metric over them; None where it has none.
    """

    loss: float
    metric: float | None = None


class Evaluation:
    """Held-out figures of one model, over the same samples each time."""

    def __init__(
        self,
        model: nn.Module,
        held_out: HeldOutSet | None,
        *,
        passes: Passes,
        topology: Topology,
        accelerator: Accelerator,
        micro_batch: int,
        every: int,
        steps: int,
        adapter: Adapter | None = None,
    ) -> None:
        """Not collective.

        Args:
            model: zeroified or not.
            held_out: the samples; None evaluates nothing.
            passes: forwards of the model.
            topology: its data group divides the samples.
            accelerator: device of the model.
            micro_batch: samples of one forward.
            every: steps between evaluations; 0 evaluates after the last step alone.
            steps: number of steps of the run.
            adapter: whose metric is measured too, if it has a metric.
        """
        self._measuring: Passes | None = None
        if adapter is not None and adapter.metric_name:
            self._measuring = passes.measuring(adapter)
        self._model, self._held_out, self._passes = model, held_out, passes
        self._topology, self._accelerator = topology, accelerator
        self._micro_batch, self._every, self._steps = micro_batch, every, steps

    def after(self, done: int) -> Found | None:
        """What is found if it is due after ``done`` steps, else None. Collective over topology.data."""
        if self._held_out is None or not is_due(done, self._every, self._steps):
            return None
        loss = self.mean_loss(self._held_out)
        if self._measuring is None:
            return Found(loss)
        return Found(loss, self._mean(self._held_out, self._measuring))

    def mean_loss(self, held_out: HeldOutSet) -> float:
        """Mean loss over the held-out set, of text in nats per token. Collective over topology.data.

        It is equal on every rank.
        """
        return self._mean(held_out, self._passes)

    @torch.no_grad()
    def _mean(self, held_out: HeldOutSet, passes: Passes) -> float:
        if KEY in self._model.__dict__:
            finish_update(self._model)  # what is measured is what would be saved now
        self._model.eval()
        rank, size = self._topology.data.rank, self._topology.data.size
        device = self._accelerator.device
        found = passes.held_out(
            (*(torch.as_tensor(array).to(device) for array in part.arrays), part.num_samples)
            for part in held_out.batches(micro_batch=self._micro_batch, rank=rank, world_size=size)
        )
        self._model.train()
        # Ranks that share a sample's tokens have the mean over their own of them.
        summed = self._topology.data_sequence.total(*found)
        return summed / (len(held_out) * self._topology.sequence.size)


def is_due(done: int, every: int, num_steps: int) -> bool:
    """Whether something happens now that happens each ``every`` steps (0: never) and after the last one."""
    return done == num_steps or (every > 0 and done % every == 0)
