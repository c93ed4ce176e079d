"""From options to a run that can take its first step.

Owns: the order of all that, and what is refused in it. Must not know: steps, results, why a run stops. Every rank runs
all of it; only rank 0 touches files.
"""

from __future__ import annotations

import socket
import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

import hpczero
from hpczero.accelerator import Accelerator
from hpczero.adapters.base import Adapter
from hpczero.data import Batches, HeldOut, TokenFile
from hpczero.errors import EXIT_REQUEUE, ConfigError, StoppedEarly
from hpczero.job import log
from hpczero.job.topology import Topology
from hpczero.options.config import RunConfig, TrainOptions
from hpczero.options.environment import Environment
from hpczero.options.reading import to_toml
from hpczero.plan.batch import Batch
from hpczero.run.checkpoints import RunCheckpoints
from hpczero.run.evaluation import Evaluation
from hpczero.run.results.folder import RunFolder
from hpczero.run.results.lock import RunLock
from hpczero.run.results.records import Records
from hpczero.run.starting import resume
from hpczero.run.starting.header import tell_header
from hpczero.run.starting.own_text import open_tokens
from hpczero.run.starting.room_check import RoomCheck, run_of
from hpczero.run.step import TrainingStep
from hpczero.run.stopping.attempts import Attempts
from hpczero.run.stopping.deadline import Deadline
from hpczero.run.stopping.signals import Signals


@dataclass(frozen=True)
class Given:
    """What a run is given; equal on every rank but for the device and the signals.

    Attributes:
        config: the options.
        adapter: the model; its vocabulary is replaced by the tokenizer's.
        topology: the ranks that train together.
        accelerator: the device of this rank.
        signals: of this process; listening.
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
        given: as it was asked for, with the options as they are settled now.
        adapter: with the tokenizer's vocabulary.
        batch: sequences per step, and how they are spread.
        tokens: the token file; open.
        folder: of the run; on rank 0 it is ours.
        lock: of the folder.
        model: zeroified.
        step: takes its steps.
        evaluation: of held-out text.
        checkpoints: when the run saves; not entered yet.
        identity: what a checkpoint says of the run.
        start: steps done already.
        records: where figures go; None on the other ranks. Not entered yet.
        attempts: the starts of this run so far.
        environment: on rank 0 what the job's environment says.
        deadline: when the job ends.
    """

    given: Given
    adapter: Adapter
    batch: Batch
    tokens: TokenFile
    folder: RunFolder
    lock: RunLock
    model: nn.Module
    step: TrainingStep
    evaluation: Evaluation
    checkpoints: RunCheckpoints
    identity: dict[str, Any]
    start: int
    records: Records | None
    attempts: Attempts
    environment: Environment
    deadline: Deadline

    @property
    def config(self) -> RunConfig:
        """The options as they are settled."""
        return self.given.config


def set_up(given: Given, lock: RunLock, room: RoomCheck) -> Run | None:
    """The run, ready; None if earlier starts have left nothing to do. Collective over the topology's world.

    Raises:
        HpcZeroError: of any kind; what cannot work is refused on every rank before the run folder is touched.
    """
    config, adapter, topology = given.config, given.adapter, given.topology
    accelerator = given.accelerator
    # What was asked for, held against the ranks and the data.
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
    with topology.agreed("hold the ranks against the batch of this run"):
        if topology.is_root:
            resume.check_ranks(config, RunFolder.of(config.run), topology.data.size)
    with topology.agreed("spread the batch over the ranks"):
        batch = Batch.resolve(config.train, topology.data.size)
    try:
        style = config.log.progress
        tokens = open_tokens(config.data, topology, progress=style, signals=given.signals)
    except StoppedEarly:
        attempts.end(0, EXIT_REQUEUE)
        raise
    adapter = adapter.with_vocabulary(tokens.vocab_size)
    with topology.agreed("plan the run"):
        run = run_of(config, adapter.config, batch, topology, is_host=accelerator.is_host)
    room.check(run)
    with topology.agreed("lay out the samples"):
        context = adapter.context
        batches = Batches(tokens.train, context, batch.global_batch, config.run.seed)
        held_out = None
        if config.evaluation.batches:
            max_samples = config.evaluation.batches * batch.global_batch
            held_out = HeldOut(tokens.validation, context, max_samples)

    model, optimizer = build(config, adapter, topology, accelerator)

    # From the start, or from a checkpoint of any number of ranks and any stage.
    config, folder = config.pinned(batch.global_batch), RunFolder.of(config.run)
    identity = resume.identity(config, tokens, adapter.config)
    checkpoints = RunCheckpoints(config, folder, model, lock=lock.lock)
    deadline = Deadline(environment)
    with topology.agreed("hold the job's time against a save"):
        deadline.check_room(save_s=checkpoints.save_s)
    begin = checkpoints.begin(identity)
    set_options(optimizer, config.train)
    factor = config.train.learning_rate_factor
    scheduler = LambdaLR(optimizer, factor, last_epoch=begin.step - 1)
    records = None
    with topology.agreed("start the records"):
        if topology.is_root:
            lock.lock.check()  # a job that stood still may have been taken for dead since it took the folder
            if begin.resumed:
                resume.tell_changes(folder, config)
                folder.go_on(begin.config)
            else:
                lock.make_room(config.run)
                folder.create(config)
            steps = config.train.steps
            records = Records(folder, config.log, num_steps=steps, start=begin.step, own=begin.own)
            attempts.begin(begin.step)
    tell_header(hpczero.sharding(model), accelerator, tokens, config, batch, context)

    rank, size, accumulation = topology.data.rank, topology.data.size, batch.accumulation
    step = TrainingStep(
        model,
        optimizer,
        loss=adapter.loss,
        samples=lambda number, micro: batches.micro_batch(number, micro, rank, size, accumulation),
        accumulation=accumulation,
        accelerator=accelerator,
        clip=config.train.clip or None,
        scheduler=scheduler,
    )
    evaluation = Evaluation(
        model,
        held_out,
        loss=adapter.loss,
        topology=topology,
        accelerator=accelerator,
        micro_batch=batch.micro_batch,
        every=config.evaluation.every,
        steps=config.train.steps,
    )
    return Run(
        given=Given(config, given.adapter, topology, accelerator, given.signals),
        adapter=adapter,
        batch=batch,
        tokens=tokens,
        folder=folder,
        lock=lock,
        model=model,
        step=step,
        evaluation=evaluation,
        checkpoints=checkpoints,
        identity=identity,
        start=begin.step,
        records=records,
        attempts=attempts,
        environment=environment,
        deadline=deadline,
    )


def build(
    config: RunConfig, adapter: Adapter, topology: Topology, accelerator: Accelerator
) -> tuple[nn.Module, AdamW]:
    """The model in shards with its initial weights, and its optimizer. Collective over the topology's world."""
    # Weights and samples have generators of their own; this is for whatever else a model draws.
    torch.manual_seed(zlib.crc32(f"{config.run.seed} {topology.data.rank}".encode()))
    # A model on the meta device holds nothing; zeroify fills the shards of this rank.
    with torch.device("meta"):
        model = adapter.build()
    optimizer = AdamW(
        decay_groups(model, adapter, config.train.weight_decay),
        lr=config.train.learning_rate,
        betas=config.train.betas,
        fused=True,
    )
    hpczero.zeroify(
        model,
        optimizer,
        stage=config.parallel.stage,
        topology=topology,
        precision=config.parallel.precision,
        transport=config.parallel.transport,
        algorithms=config.parallel.algorithms,
        overlap=config.parallel.overlap,
        device=accelerator,
        initialize=adapter.initializer(model, config.run.seed),
    )
    return model, optimizer


def decay_groups(
    model: nn.Module, adapter: Adapter, weight_decay: float
) -> list[dict[str, object]]:
    """Two optimizer groups: parameters that decay, then the others."""
    parameters = list(model.named_parameters())
    decaying = [parameter for name, parameter in parameters if adapter.decays(name, parameter)]
    others = [parameter for name, parameter in parameters if not adapter.decays(name, parameter)]
    return [
        {"params": decaying, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]


def set_options(optimizer: AdamW, options: TrainOptions) -> None:
    """What the options say now, whatever a checkpoint said."""
    decays = (options.weight_decay, 0.0)  # as in decay_groups
    for group, weight_decay in zip(optimizer.param_groups, decays, strict=True):
        rate = options.learning_rate
        group.update(lr=rate, initial_lr=rate, betas=options.betas, weight_decay=weight_decay)


def check_same_options(config: RunConfig, topology: Topology) -> None:
    """Refuse ranks that were started with other options: they would train another model. Collective.

    Raises:
        ConfigError: on every rank, naming the ranks that differ from rank 0.
    """
    mine = float(zlib.crc32(to_toml(config).encode()))
    first = topology.gather(mine)[0]
    with topology.agreed("agree on the options"):
        if mine != first:
            raise ConfigError(
                "got other options than rank 0; give every rank the same command line and file"
            )
