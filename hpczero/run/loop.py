"""The training loop, to be read from top to bottom.

Every rank runs all of it; only rank 0 writes files, but for checkpoints and the final weights.
"""

from __future__ import annotations

import math
import socket
import time
from contextlib import nullcontext
from functools import partial
from typing import Any

import hpczero
from hpczero.accelerator import Accelerator
from hpczero.adapters.base import Adapter
from hpczero.checkpoint.foreign.safe_file import WeightsWriter
from hpczero.checkpoint.foreign.streaming import stream
from hpczero.errors import EXIT_REQUEUE
from hpczero.files.regular import reason
from hpczero.job import log
from hpczero.job.launch import start_topology, use_own_cores
from hpczero.job.signals import Signals
from hpczero.job.team import Team
from hpczero.options.config import RunConfig
from hpczero.parallel.tensor import close
from hpczero.plan.degrees import mesh_on_nodes
from hpczero.run.evaluation import Found, is_due
from hpczero.run.measured import Expectation, Stragglers, after_save, metrics_of
from hpczero.run.page import PageWriter
from hpczero.run.profile import Profile
from hpczero.run.replay import write_digests
from hpczero.run.results.folder import RunFolder
from hpczero.run.results.lock import RunLock
from hpczero.run.results.metrics import process_peak_nbytes, read_metrics
from hpczero.run.results.weights import begin_weights
from hpczero.run.setup import Given, Run, set_up
from hpczero.run.starting import resume
from hpczero.run.starting.attempts import SLOW
from hpczero.run.starting.building import check_kind, check_same_options, made_by_factory
from hpczero.run.starting.reading import TextReading
from hpczero.run.starting.room_check import RoomCheck
from hpczero.run.stopping import Stops, Wish

PICTURE_S = 600.0  # between two pictures of a run that goes on


def end_stopped(run: Run, done: int) -> int:
    """End a run that was asked to stop after ``done`` steps and has saved. Returns 75. Collective."""
    next_command = resume.next_command(run.config, in_series=bool(run.environment.series))
    log.info("stopped after step %d, as asked; %s", done, next_command)
    with run.given.topology.agreed("write the results"):
        if run.records is not None:
            draw_meanwhile(run, -math.inf)  # always draws
        run.attempts.end(done, EXIT_REQUEUE)
    _give_back(run)
    return EXIT_REQUEUE


def draw_meanwhile(run: Run, drawn_s: float) -> float:
    """Draw the losses of a run that goes on, if the last picture is old. Not collective: rank 0 calls it.

    ``drawn_s`` is when they were drawn last, by ``time.monotonic``. Returns the same after the call.
    """
    now_s = time.monotonic()
    if not run.config.log.plot or now_s - drawn_s < PICTURE_S:
        return drawn_s
    try:
        draw_losses(run.config, run.folder)
    except OSError as error:  # the metrics are on file
        log.info("%s: cannot be drawn (%s)", run.folder.plot, reason(error))
    return now_s


def end_finished(run: Run, found: Found | None, done: int) -> int:
    """Write the results of a run that has done all its steps, or no more of them. Returns 0. Collective.

    ``found`` is of the evaluation after the last step, ``done``, if there was one.
    """
    sharding, config = hpczero.sharding(run.model), run.config
    log.debug(
        "peak memory %.0f MiB, %.1f s in collectives",
        process_peak_nbytes() / 2**20,
        sharding.collectives.stats.seconds,
    )
    _write_weights(run, done)
    why = run.patience.why if done < config.train.steps else ""
    if why:
        log.info("stopped early after step %d of %d: %s", done, config.train.steps, why)
    with run.given.topology.agreed("write the results"):
        if run.given.topology.is_root:
            draw_meanwhile(run, -math.inf)
            run.attempts.end(done, 0, why)
    run.checkpoints.forget_copies()
    if found is not None:
        log.info("held-out loss: %s", run.reading.loss_in_words(found.loss))
    if found is not None and found.metric is not None:
        log.info("held-out %s: %.4f", run.adapter.metric_name, found.metric)
    if config.model.factory:
        log.info("done: the weights are in %s", run.folder.weights)
    else:
        prompt = "" if config.data.path else " --prompt 'def '"  # the default text is Python
        log.info(
            "done: python -m hpczero.sample %s%s shows what it learnt", run.folder.path, prompt
        )
    _give_back(run)
    return 0


def measure_tasks(run: Run, done: int, last: int) -> dict[str, float] | None:
    """Metrics of ``evaluation.lm_eval``, if it is due after ``done`` of ``last`` steps. Collective over world."""
    options, reading = run.config.evaluation, run.reading
    if not isinstance(reading, TextReading) or not options.tasks:
        return None
    if not is_due(done, options.lm_eval_every, last):
        return None
    from hpczero.hf.harness import evaluate

    found = evaluate(
        run.model,
        reading.tokens.tokenizer,
        options.tasks,
        context=run.adapter.context,
        folder=options.lm_eval_path,
        micro_batch=run.batch.micro_batch,
    )
    for name, value in found.items():
        log.info("step %d: %s %.4f", done, name, value)
    return found


def _write_weights(run: Run, step: int) -> None:
    """Write the final weights, of ``step``: each rank its own tensors, and none more than one unit. Collective."""

    def begin(tensors: dict[str, Any], team: Team) -> WeightsWriter:
        if team.rank == 0:
            run.lock.lock.check()
        tokenizer = run.reading.identity().get(resume.TOKENIZER)
        return begin_weights(
            run.folder.weights, tensors, card=run.card, tokenizer=tokenizer, step=step, team=team
        )

    stream(run.model, begin, before_commit=run.lock.lock.check)


def _give_back(run: Run) -> None:
    hpczero.release(run.model)
    close(run.model)
    if run.checkpointing is not None:
        run.checkpointing.close()
    run.reading.close()


def draw_losses(config: RunConfig, folder: RunFolder) -> None:
    """Plot what metrics.jsonl holds. Not collective: rank 0 calls it."""
    # Here and not at the top: half a second and 40 MB that only one rank should pay.
    from hpczero.run.results.records import plot_losses

    where = f"{socket.gethostname()}, {time.strftime('%Y-%m-%d')}"
    title = f"{config.run.name}: {config.model.title}, ZeRO stage {config.parallel.stage}\n{where}"
    unit = "" if config.model.factory else "nats per token"
    plot_losses(read_metrics(folder.metrics), folder.plot, title=title, unit=unit)


def train(
    config: RunConfig, adapter: Adapter | None, accelerator: Accelerator, signals: Signals
) -> int:
    """Do one run, from the first collective to the final weights. Collective over MPI's world.

    Args:
        config: equal on every rank.
        adapter: the model; of text, its vocabulary is replaced by the tokenizer's. None: what ``model.factory`` gives.
        accelerator: the device of this rank.
        signals: of this process; listening.

    Returns:
        The exit code: 0, or 75 if the run was asked to stop and can be resumed.

    Raises:
        HpcZeroError: of any kind. What cannot work is refused on every rank before the run folder is touched.
    """
    topology = start_topology(config.parallel.nodes, partial(mesh_on_nodes, config.parallel))
    log.configure(rank=topology.rank, node_index=topology.node_index, level=config.log.level)
    use_own_cores(topology, config.threads)
    check_same_options(config, topology)
    if adapter is None:
        with topology.agreed("make the model's adapter"):
            adapter = made_by_factory(config.model)
    check_kind(adapter, topology)
    given = Given(config, adapter, topology, accelerator, signals)
    overridden = [*config.model.overrides()]
    room = RoomCheck(topology, accelerator, title=config.model.title, overridden=overridden)
    with RunLock(RunFolder.of(config.run), topology) as lock, room:
        run = set_up(given, lock, room)
        code = 0 if run is None else recorded(run)
    topology.free()
    return code


def recorded(run: Run) -> int:
    """``take_steps``, with a page for a browser meanwhile, and with an error in the record of starts. Collective."""
    topology, every_s = run.given.topology, run.config.log.page_s
    watched = topology.is_root and every_s > 0
    page = PageWriter(run.folder, every_s) if watched else nullcontext()
    with page, run.attempts.told(topology.rank):
        return take_steps(run)


def take_steps(run: Run) -> int:
    """Take all steps that are left, and write the results. Returns the exit code. Collective."""
    config, given, checkpoints = run.config, run.given, run.checkpoints
    stops = Stops(run.folder.path, given.topology, given.signals, run.deadline)
    stragglers = Stragglers(given.topology, every=config.log.stragglers_every)
    expectation = Expectation(run.predicted)
    profile = Profile(run) if config.log.profile else None
    stopped, found, drawn_s = False, None, time.monotonic()
    done, last = run.start, run.start if run.patience.is_over else config.train.steps
    with run.records or nullcontext(), checkpoints, run.local or nullcontext():
        if run.local is not None and run.local.owes:
            log.info("%s", run.local.after_step(run.start))
        for number in range(run.start, last):
            given.accelerator.reset_peak()
            done = number + 1
            with nullcontext() if profile is None else profile.step(done):
                taken = run.step.take(number)
            run.attempts.step = done
            stragglers.note(taken.own_s)
            expectation.note(taken.step_s)
            if run.balance is not None:
                run.balance.note(taken.own_s)
                if said := run.balance.decide():
                    log.info("%s", said)
            if run.local is not None and (
                said := run.local.after_step(done, stops, save_s=checkpoints.save_s)
            ):
                log.info("%s", said)

            passes = run.step.passes
            if passes.leaves is not None and passes.leaves.gradients:
                write_digests(run.folder, run.model, passes.leaves, step=done, taken=taken)
            found = run.evaluation.after(done)
            if found is not None:
                run.patience.note(found.loss)
            early = run.patience.is_over and done < config.train.steps
            tasks = measure_tasks(run, done, done if early else config.train.steps)
            slow = stragglers.report(done)
            for line in slow:
                log.info("%s", line)
            if slow:
                run.attempts.note(SLOW, "; ".join(slow).replace("straggler: ", ""))
            wish = stops.wish(step_s=taken.watch.elapsed_s(), save_s=checkpoints.save_s)
            if run.local is not None:
                wish = max(wish, run.local.heard)
            if early:  # the run ends with its results, whatever else is asked for
                wish = Wish.SAVE

            measured = None
            if run.records is not None:
                measured = metrics_of(run, taken, done, found, tasks)
                durable = checkpoints.is_due(done, wish) or checkpoints.is_copied(done, wish)
                run.records.note(measured, durable=durable)
            with taken.watch.phase("checkpoint"):
                samples = done * run.batch.global_batch
                position = {**run.identity, "samples": samples, **run.patience.state}
                checkpoints.after_step(done, position, wish, final=early)
            if run.records is not None and measured is not None:
                run.records.write(after_save(run, taken, measured))
                drawn_s = draw_meanwhile(run, drawn_s)

            stopped = wish is Wish.STOP and done < config.train.steps
            if profile is not None:
                profile.note(done, taken, last=stopped or early or done == config.train.steps)
            if stopped or early:
                break
    return end_stopped(run, done) if stopped else end_finished(run, found, done)
