"""The training loop, to be read from top to bottom.

Owns: the order of things in a run: ranks, data, model, optimizer, steps, evaluation, results. Must not know: how
anything is sharded; the middle of it is plain torch. Every rank runs all of it; only rank 0 writes files.
"""

from __future__ import annotations

import dataclasses
import math
import socket
import time
import zlib
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

import hpczero
from hpczero.accelerator import Accelerator
from hpczero.data import Batches, HeldOut
from hpczero.errors import EXIT_REQUEUE, ConfigError, StoppedEarly
from hpczero.job import log
from hpczero.job.launch import start_topology, use_own_cores
from hpczero.job.topology import Topology
from hpczero.models import GPT, GPTConfig, flops_per_token
from hpczero.options.config import RunConfig, TrainOptions
from hpczero.options.environment import Environment
from hpczero.options.reading import to_toml
from hpczero.plan.batch import Batch
from hpczero.run.checkpoints import RunCheckpoints
from hpczero.run.results.folder import RunFolder
from hpczero.run.results.lock import RunLock
from hpczero.run.results.metrics import (
    StepMetrics,
    Stopwatch,
    achieved_tflops,
    device_fields,
    process_peak_nbytes,
    read_metrics,
)
from hpczero.run.results.records import Records
from hpczero.run.results.weights import write_weights
from hpczero.run.starting import resume
from hpczero.run.starting.header import tell_header
from hpczero.run.starting.own_text import open_tokens
from hpczero.run.starting.room_check import RoomCheck, run_of
from hpczero.run.stopping.attempts import Attempts
from hpczero.run.stopping.deadline import Deadline
from hpczero.run.stopping.signals import Signals
from hpczero.run.stopping.stops import Stops, Wish
from hpczero.run.stragglers import Stragglers
from hpczero.zero.sharding import Sharding


def train(
    config: RunConfig, model_config: GPTConfig, accelerator: Accelerator, signals: Signals
) -> int:
    """One run, from the first collective to the final weights. Collective over MPI's world.

    Args:
        config: equal on every rank.
        model_config: the network; its vocabulary is replaced by the tokenizer's.
        accelerator: the device of this rank.
        signals: of this process; listening.

    Returns:
        What to exit with: 0, or 75 if the run was asked to stop and can be taken up again.

    Raises:
        HpcZeroError: of any kind; what cannot work is refused on every rank before the run folder is touched.
    """
    topology = start_topology(config.parallel.nodes)
    log.configure(rank=topology.rank, node_index=topology.node_index, level=config.log.level)
    use_own_cores(topology)
    check_same_options(config, topology)
    room = RoomCheck(
        topology,
        accelerator,
        title=config.model.preset,
        overridden=[*config.model.overrides()],
    )
    with RunLock(RunFolder.of(config.run), topology) as lock, room:
        code = train_in(lock, room, config, model_config, accelerator, signals, topology)
    topology.free()
    return code


def train_in(
    lock: RunLock,
    room: RoomCheck,
    config: RunConfig,
    model_config: GPTConfig,
    accelerator: Accelerator,
    signals: Signals,
    topology: Topology,
) -> int:
    """``train`` in a run folder that is ours alone."""
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
        return 0
    with topology.agreed("hold the ranks against the batch of this run"):
        if topology.is_root:
            resume.check_ranks(config, RunFolder.of(config.run), topology.size)
    with topology.agreed("spread the batch over the ranks"):
        batch = Batch.resolve(config.train, topology.size)
    style = config.log.progress
    try:
        tokens = open_tokens(config.data, topology, progress=style, signals=signals)
    except StoppedEarly:
        attempts.end(0, EXIT_REQUEUE)
        raise
    model_config = dataclasses.replace(model_config, vocab_size=tokens.vocab_size)
    with topology.agreed("plan the run"):
        run = run_of(config, model_config, batch, topology, is_host=accelerator.is_host)
    room.check(run)
    seq_len = model_config.context
    with topology.agreed("lay out the samples"):
        batches = Batches(tokens.train, seq_len, batch.global_batch, config.run.seed)
        held_out = None
        if config.evaluation.batches:
            max_samples = config.evaluation.batches * batch.global_batch
            held_out = HeldOut(tokens.validation, seq_len, max_samples)

    # Weights and samples have generators of their own; this is for whatever else a model draws.
    torch.manual_seed(zlib.crc32(f"{config.run.seed} {topology.rank}".encode()))
    # A model on the meta device holds nothing; zeroify fills the shards of this rank.
    with torch.device("meta"):
        model = GPT(model_config)
    optimizer = AdamW(
        decay_groups(model, config.train.weight_decay),
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
        initialize=partial(model.initialize, seed=config.run.seed),
    )
    sharding = hpczero.sharding(model)

    # From the start, or from a checkpoint of any number of ranks and any stage.
    config, folder = config.pinned(batch.global_batch), RunFolder.of(config.run)
    identity = resume.identity(config, tokens, model_config)
    checkpoints = RunCheckpoints(config, folder, model, lock=lock.lock)
    deadline = Deadline(environment)
    with topology.agreed("hold the job's time against a save"):
        deadline.check_room(save_s=checkpoints.save_s)
    begin = checkpoints.begin(identity)
    start = begin.step
    set_options(optimizer, config.train)
    scheduler = LambdaLR(optimizer, config.train.learning_rate_factor, last_epoch=start - 1)
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
            records = Records(folder, config.log, num_steps=steps, start=start, own=begin.own)
            attempts.begin(start)
    tell_header(sharding, accelerator, tokens, config, batch, seq_len)

    stopped, held_out_loss = False, None
    stops = Stops(folder.path, topology, signals, deadline)
    stragglers = Stragglers(topology, every=config.log.stragglers_every)
    with records or nullcontext(), checkpoints:
        for step in range(start, config.train.steps):
            watch = Stopwatch()
            waited_s = sharding.collectives.stats.seconds
            exposed_s = sharding.collectives.exposed.seconds() or 0.0
            micro_losses: list[torch.Tensor] = []
            accelerator.reset_peak()
            for micro_step in range(batch.accumulation):
                with watch.phase("data"):
                    x, y = batches.micro_batch(
                        step, micro_step, topology.rank, topology.size, batch.accumulation
                    )
                with hpczero.accumulate(model, micro_step, batch.accumulation):
                    with watch.phase("forward"):
                        sample = (accelerator.bring(torch.from_numpy(part)) for part in (x, y))
                        loss = model(*sample)
                    with watch.phase("backward"):
                        loss.backward()
                micro_losses.append(loss.detach() / batch.accumulation)
            waits_s = sharding.collectives.stats.seconds - waited_s
            own_ms = sum(watch.ms(phase) for phase in ("data", "forward", "backward"))
            stragglers.note(own_ms / 1e3 - waits_s)
            with watch.phase("optimizer"):
                grad_norm = hpczero.clip_grad_norm_(model, config.train.clip or math.inf)
                optimizer.step()
                optimizer.zero_grad()
            learning_rate = float(scheduler.get_last_lr()[0])
            scheduler.step()
            with watch.phase("communication"):
                losses = topology.gather(sum(loss.item() for loss in micro_losses))
            waited_s = sharding.collectives.stats.seconds - waited_s
            exposed_s = (sharding.collectives.exposed.seconds() or 0.0) - exposed_s
            step_s = watch.elapsed_s()

            done = step + 1
            held_out_loss = None
            if held_out is not None and is_due(done, config.evaluation.every, config.train.steps):
                held_out_loss = evaluate(
                    model, held_out, batch.micro_batch, topology, accelerator.device
                )
            for line in stragglers.report(done):
                log.info("%s", line)
            wish = stops.wish(step_s=watch.elapsed_s(), save_s=checkpoints.save_s)
            stopped = wish is Wish.STOP and done < config.train.steps
            measured = None
            if records is not None:
                tokens_per_s = batch.global_batch * seq_len / step_s
                tflops = achieved_tflops(tokens_per_s, flops_per_token(model_config), topology.size)
                peak = config.log.peak_tflops
                measured = StepMetrics(
                    step=done,
                    tokens=done * batch.global_batch * seq_len,
                    loss=sum(losses) / topology.size,
                    held_out_loss=held_out_loss,
                    learning_rate=learning_rate,
                    grad_norm=grad_norm,
                    loss_scale=sharding.loss_scale,
                    skipped_steps=sharding.skipped_steps,
                    tokens_per_s=tokens_per_s,
                    tflops=tflops,
                    mfu=None if peak is None else tflops / peak,
                    step_ms=step_s * 1e3,
                    data_ms=watch.ms("data"),
                    forward_ms=watch.ms("forward"),
                    backward_ms=watch.ms("backward"),
                    optimizer_ms=watch.ms("optimizer"),
                    communication_ms=watch.ms("communication") + waited_s * 1e3,
                    checkpoint_ms=0.0,
                    **peaks(sharding, accelerator, exposed_s),
                )
                records.note(measured, durable=checkpoints.is_due(done, wish))
            with watch.phase("checkpoint"):
                position = {**identity, "samples": done * batch.global_batch}
                checkpoints.after_step(done, position, wish)
            if records is not None and measured is not None:
                now = peaks(sharding, accelerator, exposed_s)
                saving_ms = watch.ms("checkpoint")
                records.write(dataclasses.replace(measured, checkpoint_ms=saving_ms, **now))
            if stopped:
                break
    if stopped:
        next_command = resume.next_command(config, in_series=bool(environment.series))
        log.info("stopped after step %d, as asked; %s", done, next_command)
        attempts.end(done, EXIT_REQUEUE)
        hpczero.release(model)
        tokens.close()
        return EXIT_REQUEUE
    log.debug(
        "peak memory %.0f MiB, %.1f s in collectives",
        process_peak_nbytes() / 2**20,
        sharding.collectives.stats.seconds,
    )

    weights = hpczero.full_state_dict(model)
    with topology.agreed("write the results"):
        if weights is not None:
            lock.lock.check()
            write_weights(
                folder.weights,
                weights,
                model=model_config,
                tokenizer=tokens.tokenizer,
                step=config.train.steps,
            )
            if config.log.plot:
                draw_losses(config, folder)
            attempts.end(config.train.steps, 0)
    if held_out_loss is not None:
        log.info(
            "held-out loss: %.4f nats per token, %.4f nats per byte of text",
            held_out_loss,
            held_out_loss / tokens.validation.bytes_per_token,
        )
    prompt = "" if config.data.path else " --prompt 'def '"  # the default text is Python
    log.info("done: python -m hpczero.sample %s%s shows what it learnt", folder.path, prompt)
    hpczero.release(model)
    tokens.close()
    return 0


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


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Two optimizer groups: weight matrices and embeddings decay; biases and norms do not."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def peaks(sharding: Sharding, accelerator: Accelerator, exposed_s: float) -> dict[str, Any]:
    """The fields of ``StepMetrics`` that a save after the step may raise."""
    return {
        "state_peak_nbytes": sum(sharding.memory.peak.values()) + sharding.optimizer_nbytes(),
        "process_peak_nbytes": process_peak_nbytes(),
        **device_fields(accelerator.usage(), exposed_s),
    }


def is_due(done: int, every: int, num_steps: int) -> bool:
    """Whether something that happens each ``every`` steps (0: never) and after the last one happens now."""
    return done == num_steps or (every > 0 and done % every == 0)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    held_out: HeldOut,
    micro_batch: int,
    topology: Topology,
    device: torch.device,
) -> float:
    """Mean loss over the held-out set, nats per token, equal on every rank. Collective over topology.world."""
    model.eval()
    total = 0.0
    for part in held_out.batches(
        micro_batch=micro_batch, rank=topology.rank, world_size=topology.size
    ):
        loss = model(*(torch.from_numpy(tokens).to(device) for tokens in (part.x, part.y)))
        total += loss.item() * part.num_samples
    model.train()
    return sum(topology.gather(total)) / len(held_out)


def draw_losses(config: RunConfig, folder: RunFolder) -> None:
    """Plot what metrics.jsonl holds. On one rank only."""
    # Here and not at the top: half a second and 40 MB that only one rank should pay.
    from hpczero.run.results.plot import plot_losses

    where = f"{socket.gethostname()}, {time.strftime('%Y-%m-%d')}"
    title = f"{config.run.name}: {config.model.preset}, ZeRO stage {config.parallel.stage}\n{where}"
    plot_losses(read_metrics(folder.metrics), folder.plot, title=title)
