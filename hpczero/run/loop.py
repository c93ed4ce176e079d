"""The training loop, to be read from top to bottom.

Owns: the order of events in a run, and when it is over. Must not know: how a step is taken, how anything is sharded,
what is in a file. Every rank runs all of it; only rank 0 writes files.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from functools import partial

from hpczero.accelerator import Accelerator
from hpczero.adapters.base import Adapter
from hpczero.job import log
from hpczero.job.launch import start_topology, use_own_cores
from hpczero.options.config import RunConfig
from hpczero.plan.degrees import mesh_on_nodes
from hpczero.run import ending
from hpczero.run.measured import Expectation, Stragglers, after_save, metrics_of
from hpczero.run.results.folder import RunFolder
from hpczero.run.results.lock import RunLock
from hpczero.run.setup import Given, Run, set_up
from hpczero.run.starting.factory import check_kind, check_same_options, made_by_factory
from hpczero.run.starting.room_check import RoomCheck
from hpczero.run.stopping.signals import Signals
from hpczero.run.stopping.stops import Stops, Wish


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
    use_own_cores(topology)
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
        code = 0 if run is None else take_steps(run)
    topology.free()
    return code


def take_steps(run: Run) -> int:
    """Take all steps that are left, and write the results. Returns the exit code. Collective."""
    config, given, checkpoints = run.config, run.given, run.checkpoints
    stops = Stops(run.folder.path, given.topology, given.signals, run.deadline)
    stragglers = Stragglers(given.topology, every=config.log.stragglers_every)
    expectation = Expectation(run.foretold)
    stopped, found, drawn_s = False, None, time.monotonic()
    with run.records or nullcontext(), checkpoints:
        for number in range(run.start, config.train.steps):
            given.accelerator.reset_peak()
            taken, done = run.step.take(number), number + 1
            stragglers.note(taken.own_s)
            expectation.note(taken.step_s)

            found = run.evaluation.after(done)
            for line in stragglers.report(done):
                log.info("%s", line)
            wish = stops.wish(step_s=taken.watch.elapsed_s(), save_s=checkpoints.save_s)

            measured = None
            if run.records is not None:
                measured = metrics_of(run, taken, done, found)
                run.records.note(measured, durable=checkpoints.is_due(done, wish))
            with taken.watch.phase("checkpoint"):
                samples = done * run.batch.global_batch
                checkpoints.after_step(done, {**run.identity, "samples": samples}, wish)
            if run.records is not None and measured is not None:
                run.records.write(after_save(run, taken, measured))
                drawn_s = ending.draw_meanwhile(run, drawn_s)

            stopped = wish is Wish.STOP and done < config.train.steps
            if stopped:
                break
    return ending.stopped(run, done) if stopped else ending.finished(run, found)
