"""From options to a run that can take its first step.

Owns: the order of the steps to that point, and what they refuse. Must not know: training steps, results, why a run
stops. Every rank runs all of it; only rank 0 touches files.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

import hpczero
from hpczero.accelerator import Accelerator
from hpczero.activations import Checkpointing
from hpczero.adapters.base import Adapter
from hpczero.errors import EXIT_REQUEUE, ConfigError, StoppedEarly
from hpczero.job import log
from hpczero.job.signals import Signals
from hpczero.job.topology import Topology
from hpczero.options.config import RunConfig
from hpczero.options.environment import Environment
from hpczero.plan.sizing import Batch
from hpczero.planner.choice import Foretold
from hpczero.run.checkpoints import RunCheckpoints, Start
from hpczero.run.evaluation import Evaluation, Passes, passes_of
from hpczero.run.results.folder import RunFolder
from hpczero.run.results.lock import RunLock
from hpczero.run.results.records import Records
from hpczero.run.starting import resume
from hpczero.run.starting.attempts import Attempts
from hpczero.run.starting.building import (
    build,
    check_card,
    check_numbers,
    recompute_blocks,
    set_options,
)
from hpczero.run.starting.choosing import choose_settings, earlier_settings, taken_over
from hpczero.run.starting.header import flops_per_unit, tell_header
from hpczero.run.starting.reading import HeldOutSet, RunData, TrainingSet, open_reading
from hpczero.run.starting.room_check import RoomCheck, run_of
from hpczero.run.step import TrainingStep
from hpczero.run.stopping import Deadline


@dataclass(frozen=True)
class Given:
    """What a run is given. It is equal on every rank but for the device and the signals.

    Attributes:
        config: the options.
        adapter: the model; its vocabulary is replaced by the tokenizer's.
        topology: the ranks that train together.
        accelerator: the device of this rank.
        signals: those of this process; listening.
    """

    config: RunConfig
    adapter: Adapter
    topology: Topology
    accelerator: Accelerator
    signals: Signals


@dataclass(frozen=True)
class Run:
    """A run that is about to take its first step.

    Attributes:
        given: what the run was given, with the options as they are settled now.
        adapter: the model; of text, with the tokenizer's vocabulary.
        batch: samples per step, and how they are spread.
        reading: the data; open.
        card: what checkpoints and weights state of the model.
        flops_per_unit: FLOPs of forward and backward for one token or sample; NaN where nobody can count them.
        folder: folder of the run.
        lock: lock of the folder.
        model: the zeroified model.
        checkpointing: calls its blocks; None where backward computes nothing again.
        step: takes the training steps.
        evaluation: measures the loss over held-out text.
        checkpoints: when the run saves; not entered yet.
        identity: what checkpoints state of the run.
        start: steps done already.
        records: where figures go; None on the other ranks. Not entered yet.
        attempts: the starts of this run so far.
        environment: environment of the job on rank 0; empty on other ranks.
        deadline: when the job ends.
        foretold: what the planner expects of its choice; None where it was not asked.
    """

    given: Given
    adapter: Adapter
    batch: Batch
    reading: RunData
    card: Mapping[str, Any]
    flops_per_unit: float
    folder: RunFolder
    lock: RunLock
    model: nn.Module
    checkpointing: Checkpointing | None
    step: TrainingStep
    evaluation: Evaluation
    checkpoints: RunCheckpoints
    identity: dict[str, Any]
    start: int
    records: Records | None
    attempts: Attempts
    environment: Environment
    deadline: Deadline
    foretold: Foretold | None = None

    @property
    def config(self) -> RunConfig:
        """The options as they are settled."""
        return self.given.config


def set_up(given: Given, lock: RunLock, room: RoomCheck) -> Run | None:
    """Make the run ready. Collective over the topology's world.

    What cannot work is refused before the run folder is touched.

    Returns:
        None if earlier starts have left nothing to do.

    Raises:
        HpcZeroError: of any kind; on every rank.
    """
    earlier = _look_back(given)
    if earlier is None:
        return None
    asked = _hold_against_ranks_and_data(earlier)
    if asked.config.parallel.auto:
        asked = _choose(asked)
    samples = _lay_out_samples(asked, room)
    asked = asked.pinned()
    folder = RunFolder.of(asked.config.run)
    source = resume.chosen(asked.config, folder, given.topology)
    model, optimizer = build(
        asked.config, asked.adapter, given.topology, given.accelerator, resumes=bool(source)
    )
    checkpointing = recompute_blocks(asked.config, asked.adapter, model, given.accelerator, room)
    with given.topology.agreed("ask the adapter for the card of its model"):
        card = resume.model_card(asked.config.model, asked.adapter.card())
    check_card(card, given.topology, of=type(asked.adapter).__name__)
    identity = resume.identity(asked.config, asked.reading.identity(), card)
    deadline = Deadline(asked.environment)
    checkpoints = RunCheckpoints(asked.config, folder, model, lock=lock.lock)
    with given.topology.agreed("hold the job's time against a save"):
        deadline.check_room(save_s=checkpoints.save_s)
    begin = checkpoints.begin(source, identity)
    set_options(optimizer, asked.config.train)
    with given.topology.agreed("lay out the passes of a step"):
        passes = passes_of(
            asked.config.parallel,
            asked.adapter,
            model,
            accumulation=asked.batch.accumulation,
            accelerator=given.accelerator,
        )
    scheduler = LambdaLR(
        optimizer, asked.config.train.learning_rate_factor, last_epoch=begin.step - 1
    )
    records = _start_records(asked, folder, lock, begin)
    tell_header(
        hpczero.sharding(model),
        given.accelerator,
        asked.reading,
        asked.config,
        asked.batch,
        asked.adapter,
        checkpointing,
        room.run,
    )
    return Run(
        given=asked.given,
        adapter=asked.adapter,
        batch=asked.batch,
        reading=asked.reading,
        card=card,
        flops_per_unit=flops_per_unit(
            asked.adapter, lambda: samples.batches.micro_batch(0, 0, 0, 1)
        ),
        folder=folder,
        lock=lock,
        model=model,
        checkpointing=checkpointing,
        step=_training_step(asked, samples, model, optimizer, scheduler, passes, checkpointing),
        evaluation=_evaluation(asked, samples, model, passes),
        checkpoints=checkpoints,
        identity=identity,
        start=begin.step,
        records=records,
        attempts=asked.attempts,
        environment=asked.environment,
        deadline=deadline,
        foretold=asked.foretold,
    )


@dataclass(frozen=True)
class _Earlier:
    """A run and the starts before this one; ``given`` has the options as these starts settle them."""

    given: Given
    attempts: Attempts
    environment: Environment


@dataclass(frozen=True)
class _Asked(_Earlier):
    """What was asked for, after it was held against the ranks and the data.

    Attributes:
        adapter: of text, with the tokenizer's vocabulary.
        batch: samples per step, and how they are spread.
        reading: the data; open.
        foretold: what the planner expects of its choice; None where it was not asked.
    """

    adapter: Adapter
    batch: Batch
    reading: RunData
    foretold: Foretold | None = None

    @property
    def config(self) -> RunConfig:
        """The options as they are settled."""
        return self.given.config

    def pinned(self) -> _Asked:
        """The same with the global batch among the options, so that any number of ranks can continue it."""
        config = self.config.pinned(self.batch.global_batch)
        return replace(self, given=replace(self.given, config=config))


@dataclass(frozen=True)
class _SplitSamples:
    """Samples to train on, and those held out; None if the run evaluates nothing."""

    batches: TrainingSet
    held_out: HeldOutSet | None


def _look_back(given: Given) -> _Earlier | None:
    """Settle the options with earlier starts of this run; None if they have done all steps. Collective."""
    config, topology = given.config, given.topology
    with topology.agreed("look at earlier starts of this run"):
        # On the other ranks, as outside of a series of jobs, there is nothing to look at.
        environment = Environment.read() if topology.is_root else Environment()
        attempts = Attempts(RunFolder.of(config.run), environment)
        nothing_left = attempts.finished(config.train.steps)
        if not nothing_left:
            attempts.start(ranks=topology.size, host=socket.gethostname())
            config = attempts.settle(config)
    if any(topology.gather(float(nothing_left))):
        log.info("nothing left to do: an earlier start has done all %d steps", config.train.steps)
        return None
    return _Earlier(replace(given, config=config), attempts, environment)


def _hold_against_ranks_and_data(earlier: _Earlier) -> _Asked:
    """Refuse a batch that does not fit these ranks; open the data. Collective.

    Raises:
        StoppedEarly: a signal came while the text was tokenized; the attempt is ended then.
    """
    given, attempts = earlier.given, earlier.attempts
    config, topology = given.config, given.topology
    with topology.agreed("hold the ranks against the batch of this run"):
        if topology.is_root:
            resume.check_ranks(config, RunFolder.of(config.run), topology.data.size)
    with topology.agreed("spread the batch over the ranks"):
        batch = Batch.resolve(config.train, topology.data.size)
    try:
        reading, adapter = open_reading(config, given.adapter, topology, signals=given.signals)
    except StoppedEarly:
        attempts.end(0, EXIT_REQUEUE)
        raise
    check_numbers(adapter, topology)
    return _Asked(given, attempts, earlier.environment, adapter, batch, reading)


def _choose(asked: _Asked) -> _Asked:
    """The settings that the planner chooses, or that it chose at an earlier start of this run. Collective."""
    given, config = asked.given, asked.config
    topology, model = given.topology, asked.adapter.transformer
    with topology.agreed("see whether the planner knows the model"):
        if model is None:
            raise ConfigError(
                f"parallel.auto: the planner counts presets, and nothing of {config.model.title}; leave it out, and "
                "choose parallel.stage and train.micro_batch yourself"
            )
    with topology.agreed("look for what an earlier start chose"):
        text = earlier_settings(config, RunFolder.of(config.run)) if topology.is_root else ""
    text = topology.broadcast_text(text)
    chosen = taken_over(text, config, model, asked.batch, topology.data.size) if text else None
    if chosen is None:
        chosen = choose_settings(config, model, asked.batch, topology, given.accelerator)
    return replace(
        asked,
        given=replace(given, config=chosen.config),
        adapter=asked.adapter.with_checkpointing(chosen.model.checkpoint_activations),
        batch=chosen.batch,
        foretold=chosen.foretold,
    )


def _lay_out_samples(asked: _Asked, room: RoomCheck) -> _SplitSamples:
    """Refuse a run that does not fit the machine, then find its samples. Collective."""
    config, adapter, batch = asked.config, asked.adapter, asked.batch
    topology, is_host = asked.given.topology, asked.given.accelerator.is_host
    model = adapter.transformer
    if model is not None:
        with topology.agreed("plan the run"):
            run = run_of(config, model, batch, topology, is_host=is_host)
        room.check(run)
    with topology.agreed("lay out the samples"):
        reading, context = asked.reading, adapter.context
        batches = reading.training(config, context, batch.global_batch)
        held_out = None
        if config.evaluation.batches:
            max_samples = config.evaluation.batches * batch.global_batch
            held_out = reading.held_out(context, max_samples)
    return _SplitSamples(batches, held_out)


def _start_records(asked: _Asked, folder: RunFolder, lock: RunLock, begin: Start) -> Records | None:
    """Create the run folder or go on in it, on rank 0; None on the other ranks. Collective."""
    config, topology = asked.config, asked.given.topology
    with topology.agreed("start the records"):
        if not topology.is_root:
            return None
        lock.lock.check()  # a job that stood still may have been taken for dead since it took the folder
        if begin.resumed:
            resume.tell_changes(folder, config)
            folder.go_on(begin.config)
        else:
            lock.make_room(config.run)
            folder.create(config)
        steps = config.train.steps
        unit = asked.adapter.unit
        records = Records(
            folder, config.log, num_steps=steps, start=begin.step, own=begin.own, unit=unit
        )
        asked.attempts.begin(begin.step)
    return records


def _training_step(
    asked: _Asked,
    samples: _SplitSamples,
    model: nn.Module,
    optimizer: AdamW,
    scheduler: LambdaLR,
    passes: Passes,
    checkpointing: Checkpointing | None,
) -> TrainingStep:
    rank, size = asked.given.topology.data.rank, asked.given.topology.data.size
    batches, accumulation = samples.batches, asked.batch.accumulation
    return TrainingStep(
        model,
        optimizer,
        passes=passes,
        samples=lambda number, micro: batches.micro_batch(number, micro, rank, size, accumulation),
        accelerator=asked.given.accelerator,
        clip=asked.config.train.clip or None,
        scheduler=scheduler,
        checkpointing=checkpointing,
    )


def _evaluation(
    asked: _Asked, samples: _SplitSamples, model: nn.Module, passes: Passes
) -> Evaluation:
    return Evaluation(
        model,
        samples.held_out,
        passes=passes,
        topology=asked.given.topology,
        accelerator=asked.given.accelerator,
        micro_batch=asked.batch.micro_batch,
        every=asked.config.evaluation.every,
        steps=asked.config.train.steps,
        adapter=asked.adapter,
    )
