"""From options to a run that can take its first step. Every rank runs all of it; only rank 0 touches files."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import hpczero
from hpczero import trackers
from hpczero.accelerator import Accelerator
from hpczero.activations import Checkpointing
from hpczero.adapters.base import Adapter
from hpczero.checkpoint.buddy import MemoryCopies
from hpczero.data.batches import StepBatches
from hpczero.errors import EXIT_REQUEUE, ConfigError, StoppedEarly
from hpczero.job import log
from hpczero.job.group import Group
from hpczero.job.signals import Signals
from hpczero.job.topology import Topology
from hpczero.options.config import RunConfig
from hpczero.options.environment import Environment
from hpczero.options.reading import load_toml
from hpczero.plan.peak import PlannedRun
from hpczero.plan.sizing import Batch
from hpczero.planner.choice import Predicted
from hpczero.run.balance import Balance, balance_of
from hpczero.run.checkpoints import RunCheckpoints, Start
from hpczero.run.evaluation import Evaluation, LeafPlan, passes_of
from hpczero.run.local_steps import LocalSteps
from hpczero.run.results.folder import RunFolder
from hpczero.run.results.lock import RunLock
from hpczero.run.results.metrics import process_peak_nbytes
from hpczero.run.results.records import Records, earlier_figures
from hpczero.run.starting import resume
from hpczero.run.starting.attempts import Attempts
from hpczero.run.starting.building import (
    build,
    check_card,
    check_numbers,
    recompute_blocks,
    set_options,
)
from hpczero.run.starting.choosing import Chosen, choose_settings, earlier_settings, taken_over
from hpczero.run.starting.header import flops_per_unit, peak_of, planned_memory, tell_header
from hpczero.run.starting.reading import RunData, TextReading, open_reading
from hpczero.run.starting.room_check import RoomCheck, run_of
from hpczero.run.step import TrainingStep
from hpczero.run.stopping import Deadline, Patience
from hpczero.trackers import BackgroundTracker
from hpczero.zero.exact import computed_on


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
        balance: who has how many samples of a micro-batch; None: all have equally many.
        local: averages with other groups; None: there are none. Not entered yet.
        evaluation: measures the loss over held-out text.
        patience: whether that loss still falls.
        checkpoints: when the run saves; not entered yet.
        identity: what checkpoints state of the run.
        start: steps done already.
        records: where figures go; None on the other ranks. Not entered yet.
        attempts: the starts of this run so far.
        environment: environment of the job on rank 0; empty on other ranks.
        deadline: when the job ends.
        peak_tflops: of this rank's device, for MFU; None: there is no MFU.
        planned_nbytes: bytes of states, buffers and gradients of its own that the plan expects of a rank at the peak.
        predicted: what the planner expects of its choice; None where it was not asked.
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
    balance: Balance | None
    local: LocalSteps | None
    evaluation: Evaluation
    patience: Patience
    checkpoints: RunCheckpoints
    identity: dict[str, Any]
    start: int
    records: Records | None
    attempts: Attempts
    environment: Environment
    deadline: Deadline
    peak_tflops: float | None
    planned_nbytes: int
    predicted: Predicted | None = None

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
    topology, accelerator = given.topology, given.accelerator
    folder = RunFolder.of(given.config.run)
    # On the other ranks, as outside of a series of jobs, there is nothing to look at.
    environment = Environment.read() if topology.is_root else Environment()
    options = given.config.checkpoint
    copies = MemoryCopies(options.buddy_folder, folder.path, topology, every=options.buddy)
    copies.find()
    config, attempts = _look_back(given, folder, environment, in_memory=copies.step)
    if attempts is None:
        return None
    batch, reading, adapter = _hold_against_ranks_and_data(given, config, folder, attempts)
    predicted = None
    if config.parallel.auto:
        chosen = _choose(given, config, folder, adapter, batch)
        config, batch, predicted = chosen.config, chosen.batch, chosen.predicted
        adapter = adapter.with_checkpointing(chosen.model.checkpoint_activations)
    if adapter.transformer is not None:  # else nobody can count what the run holds
        with topology.agreed("plan the run"):
            host = accelerator.is_host
            planned = run_of(config, adapter.transformer, batch, topology, is_host=host)
        room.check(planned)
    if config.evaluation.tasks:
        with topology.agreed("look for the tasks of lm_eval"):
            if topology.is_root and isinstance(reading, TextReading):
                from hpczero.hf.harness import check_tasks

                tokenizer, asked = reading.tokens.tokenizer, config.evaluation
                check_tasks(tokenizer, asked.tasks, asked.lm_eval_path)
    with topology.agreed("lay out the samples"):
        batches = reading.training(config, adapter.context, batch.global_batch)
        held_out = None
        if config.evaluation.batches:
            most = config.evaluation.batches * batch.global_batch
            held_out = reading.held_out(adapter.context, most)
    config = config.pinned(batch.global_batch, batch.micro_batch if batch.leaves else None)
    source = resume.chosen(config, folder, topology, in_memory=copies.step > 0)
    model, optimizer = build(config, adapter, topology, accelerator, resumes=bool(source))
    if batch.leaves and hpczero.sharding(model).exact is None:  # it was preferred, and cannot be
        with topology.agreed("spread the batch over the ranks"):
            batch = Batch.resolve(config.train, topology.data.size)
    checkpointing = recompute_blocks(config, adapter, model, accelerator, room)
    with topology.agreed("ask the adapter for the card of its model"):
        card = resume.model_card(config.model, adapter.card())
    check_card(card, topology, of=type(adapter).__name__)
    identity = resume.identity(config, reading.identity(), card)
    if batch.leaves is not None:
        identity[resume.COMPUTED_ON] = computed_on(accelerator)
    deadline = Deadline(environment)
    checkpoints = RunCheckpoints(config, folder, model, lock=lock.lock, copies=copies)
    with topology.agreed("hold the job's time against a save"):
        deadline.check_room(save_s=checkpoints.save_s)
    begin = checkpoints.begin(source, identity)
    local = None
    if config.local.steps:
        shared = {f"train.{name}": getattr(config.train, name) for name in resume.TELLING["train"]}
        local = LocalSteps(
            config.local,
            model,
            steps=config.train.steps,
            run=folder.path,
            identity={**identity, **shared},
        )
        began = begin.resumed and begin.own
        newest = local.rejoin(begin.step, began=began)
        if newest > begin.step:
            log.info("local steps: going on from the average after step %d", newest)
        begin = replace(begin, step=newest)
    set_options(optimizer, config.train)
    with topology.agreed("lay out the passes of a step"):
        balance = balance_of(config, topology, batch.micro_batch)
        passes = passes_of(
            config.parallel,
            adapter,
            model,
            accumulation=batch.accumulation,
            accelerator=accelerator,
            balance=balance,
            plan=leaf_plan(config, batch),
        )
    rate = config.train.learning_rate_factor
    scheduler = LambdaLR(optimizer, rate, last_epoch=begin.step - 1)
    plan = room.run
    records = _start_records(config, topology, adapter.unit, folder, lock, begin, attempts, plan)
    sharding = hpczero.sharding(model)
    sharding.advice.weighted = balance is not None
    tell_header(sharding, accelerator, reading, config, batch, adapter, checkpointing, room.run)
    peak_tflops, said = peak_of(config, accelerator)
    if said:
        log.info("%s", said)
    part = room.run if room.run is not None and room.run.layout else None
    return Run(
        given=replace(given, config=config),
        adapter=adapter,
        batch=batch,
        reading=reading,
        card=card,
        flops_per_unit=flops_per_unit(adapter, lambda: batches.micro_batch(0, 0, 0, 1)),
        folder=folder,
        lock=lock,
        model=model,
        checkpointing=checkpointing,
        step=TrainingStep(
            model,
            optimizer,
            passes=passes,
            samples=draw(config, batches, batch, topology.data, balance),
            accelerator=accelerator,
            clip=config.train.clip or None,
            scheduler=scheduler,
            waits=balance is not None,  # else clocks say little about a device
            checkpointing=checkpointing,
        ),
        balance=balance,
        local=local,
        evaluation=Evaluation(
            model,
            held_out,
            passes=passes,
            topology=topology,
            accelerator=accelerator,
            micro_batch=batch.micro_batch,
            every=config.evaluation.every,
            steps=config.train.steps,
            adapter=adapter,
        ),
        patience=Patience(config.evaluation.patience, topology, begin.extra),
        checkpoints=checkpoints,
        identity=identity,
        start=begin.step,
        records=records,
        attempts=attempts,
        environment=environment,
        deadline=deadline,
        peak_tflops=peak_tflops,
        planned_nbytes=planned_memory(sharding, config, part, batch.leaves).total
        + (0 if room.run is None else room.run.accumulated),
        predicted=predicted,
    )


def leaf_plan(config: RunConfig, batch: Batch) -> LeafPlan | None:
    """How leaves are taken; None where none are."""
    if batch.leaves is None:
        return None
    return LeafPlan(
        batch.leaves,
        config.run.seed,
        check_every=config.check.every,
        digest_every=config.log.digest_every,
    )


def _look_back(
    given: Given, folder: RunFolder, environment: Environment, *, in_memory: int
) -> tuple[RunConfig, Attempts | None]:
    """The options as earlier starts of this run settle them; no attempts if these have done all steps. Collective.

    ``in_memory``: step of the copies in memory; 0: there are none.
    """
    config, topology = given.config, given.topology
    with topology.agreed("look at earlier starts of this run"):
        attempts = Attempts(folder, environment, is_root=topology.is_root)
        nothing_left = attempts.finished(config.train.steps)
        if not nothing_left:
            held, host = process_peak_nbytes(), socket.gethostname()
            attempts.start(ranks=topology.size, host=host, in_memory=in_memory, held_nbytes=held)
            config = attempts.settle(config, in_memory=in_memory)
    if any(topology.gather(float(nothing_left))):
        log.info("nothing left to do: an earlier start has done all %d steps", config.train.steps)
        return config, None
    return config, attempts


def draw(
    config: RunConfig,
    batches: StepBatches[Any],
    batch: Batch,
    data: Group,
    balance: Balance | None,
) -> Callable[[int, int], tuple[Any, ...]]:
    """Takes a step's number and a micro step or leaf, and returns the samples that this rank computes then.

    Ranks of one group of local steps come after those of the groups before it.
    """
    if batch.leaves is not None:
        count = batch.leaves
        return lambda number, leaf: batches.micro_batch(number, 0, leaf, count)
    others = [batch.micro_batch] * data.size
    group = config.local.group if config.groups > 1 else 0
    before, after = others * group, others * (config.groups - 1 - group)

    def drawn(number: int, micro: int) -> tuple[Any, ...]:
        shares = None if balance is None else [*before, *balance.shares, *after]
        rank, size = len(before) + data.rank, config.groups * data.size
        return batches.micro_batch(number, micro, rank, size, batch.accumulation, shares)  # type: ignore[no-any-return]

    return drawn


def _hold_against_ranks_and_data(
    given: Given, config: RunConfig, folder: RunFolder, attempts: Attempts
) -> tuple[Batch, RunData, Adapter]:
    """Refuse a batch that does not fit these ranks; open the data. Collective.

    Raises:
        StoppedEarly: a signal came while the text was tokenized; the attempt is ended then.
    """
    topology = given.topology
    with topology.agreed("hold the ranks against the batch of this run"):
        if topology.is_root:
            resume.check_ranks(config, folder, topology.data.size * config.groups)
    with topology.agreed("spread the batch over the ranks"):
        ranks = topology.data.size * config.groups
        batch = Batch.resolve(config.train, ranks, exact=config.run.exact != "off")
    try:
        reading, adapter = open_reading(config, given.adapter, topology, signals=given.signals)
    except StoppedEarly:
        attempts.end(0, EXIT_REQUEUE)
        raise
    check_numbers(adapter, topology)
    return batch, reading, adapter


def _choose(
    given: Given, config: RunConfig, folder: RunFolder, adapter: Adapter, batch: Batch
) -> Chosen:
    """The settings that the planner chooses, or that it chose at an earlier start of this run. Collective."""
    topology, model = given.topology, adapter.transformer
    with topology.agreed("see whether the planner knows the model"):
        if model is None:
            raise ConfigError(
                f"parallel.auto: the planner counts presets, and nothing of {config.model.title}; leave it out, and "
                "choose parallel.stage and train.micro_batch yourself"
            )
    with topology.agreed("look for what an earlier start chose"):
        text = earlier_settings(config, folder) if topology.is_root else ""
    text = topology.broadcast_text(text)
    chosen = taken_over(text, config, model, batch, topology.data.size) if text else None
    return chosen or choose_settings(config, model, batch, topology, given.accelerator)


def _start_records(
    config: RunConfig,
    topology: Topology,
    unit: str,
    folder: RunFolder,
    lock: RunLock,
    begin: Start,
    attempts: Attempts,
    plan: PlannedRun | None,
) -> Records | None:
    """Create the run folder or go on in it, on rank 0; None on the other ranks. Collective."""
    with topology.agreed("start the records"):
        if not topology.is_root:
            return None
        asked = trackers.asked(config.log, folder.path)
        lock.lock.check()  # a job that stood still may have been taken for dead since it took the folder
        if begin.resumed:
            resume.tell_changes(folder, config)
            kept = begin.config
            # Copies may be lost: until the run has saved, it has begun where it began.
            if begin.in_memory:
                kept = replace(kept, resume=load_toml(folder.config, RunConfig).resume)
            folder.go_on(kept)
        else:
            lock.make_room(config.run)
            folder.create(config)
        steps = config.train.steps
        done = begin.step if begin.own else 0
        records = Records(
            folder,
            config.log,
            num_steps=steps,
            start=begin.step,
            own=begin.own,
            unit=unit,
            trackers=[
                BackgroundTracker(
                    name,
                    tracker,
                    run=config.run.name,
                    config=asdict(config),
                    earlier=earlier_figures(folder, done),
                )
                for name, tracker in asked.items()
            ],
        )
        planned = {} if plan is None else {"planned": [plan.memory.total, plan.most]}
        attempts.begin(begin.step, in_memory=begin.in_memory, unit=unit, **planned)
    return records
