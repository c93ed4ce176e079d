"""What rank 0 can refuse of a training run before torch and MPI are imported, which takes seconds to a minute.

Nothing here may import MPI or torch. The loop makes every check here again once MPI is up, by the same function: the
environment may state wrong numbers, and files may change. Nothing is refused here that would have worked, and nothing
is changed or locked.
"""

from __future__ import annotations

import dataclasses
import difflib
import faulthandler
import socket
import sys
from contextlib import suppress
from pathlib import Path

from hpczero import trackers
from hpczero.checkpoint.disk.lock import is_claimed
from hpczero.data import Batches, Corpus, TokenFile
from hpczero.data.prepare import names_token_file
from hpczero.data.sources import Sources, names_sources
from hpczero.errors import (
    ConfigError,
    HpcZeroError,
    TopologyError,
    abort_job,
    launcher_rank,
    report,
)
from hpczero.files.regular import shown
from hpczero.job import log
from hpczero.job.mesh import Mesh
from hpczero.models import PRESETS, GPTConfig
from hpczero.options.config import (
    DEFAULT_RUN,
    LayoutOptions,
    ModelOptions,
    OffloadOptions,
    RunConfig,
)
from hpczero.options.environment import Environment
from hpczero.options.values import check_algorithms, parse_nodes
from hpczero.plan.offload import MIB, Activations, Offload
from hpczero.plan.sizing import Batch
from hpczero.run.results.folder import RunFolder
from hpczero.run.starting import resume
from hpczero.run.starting.attempts import Attempts

_WAIT = "importing torch, starting MPI"


def model_config(options: ModelOptions) -> GPTConfig:
    """The preset with its overrides; the vocabulary is the preset's until the tokenizer is known.

    Raises:
        ConfigError: the preset is unknown, or sizes do not fit together.
    """
    preset = PRESETS.get(options.preset)
    if preset is None:
        begins = [name for name in PRESETS if options.preset.startswith(name)]
        alike = difflib.get_close_matches(options.preset, PRESETS, n=3)
        close = list(dict.fromkeys(begins + alike)) or list(PRESETS)
        raise ConfigError(
            f"model.preset: got {shown(options.preset)}, did you mean {', '.join(close)}?"
        )
    try:
        return dataclasses.replace(preset, **options.overrides())
    except ValueError as error:
        raise ConfigError(f"model: {error}") from error


def tell_start(config: RunConfig, ranks: int | None) -> None:
    """Log one line of rank 0: what is being started, and what the wait is for. Not collective.

    ``ranks`` is the number of ranks that a launcher says it has started; None without a launcher. From here on the log
    is as the options say.
    """
    log.configure(rank=launcher_rank(), node_index=0, level=config.log.level)
    start, where = _start_of("hpczero.train"), config.run.path
    log.info("%s, %d rank(s), results in %s; %s", start, ranks or 1, where, _WAIT)


def tell_start_aside(command: str) -> None:
    """The line of ``tell_start`` on standard error, for a command whose standard output is its result."""
    if launcher_rank() == 0:
        with suppress(OSError):  # the disk may be full that stderr is on
            sys.stderr.write(f"{_start_of(command)}; {_WAIT}\n")
            sys.stderr.flush()


def _start_of(command: str) -> str:
    return f"start: {command}, rank 0 on {socket.gethostname()}"


def end_before_mpi(error: HpcZeroError, environment: Environment) -> int | None:
    """Report a mistake that only rank 0 has found, at once, and end the job so that no other rank waits for this one.

    The job ends when the last rank has imported torch. The call returns if this process is the only one.

    Returns:
        The exit code. None if no launcher had said that this is rank 0, and MPI says that it is one of several: each of
        them may then think so, and they must find the mistake together.
    """
    told = environment.launched_rank is not None
    code = report(error) if told else error.exit_code
    # The others are on their way to MPI_Init and would wait for this rank there. That it exits with an error ends the
    # job only where its parent is a launcher that does so: not inside of `bash -c "... | tee log"`.
    meet_the_other_ranks_in_mpi_init(environment.timeout_s)
    from hpczero.job.topology import check_launch, started_ranks

    started = started_ranks()
    if not told:
        return report(error) if started == 1 else None
    try:
        check_launch(started, environment)
    except TopologyError as wrong:  # then the first error may rest on a wrong number of ranks
        report(wrong)
    if started > 1:
        abort_job(code)
    return code


def meet_the_other_ranks_in_mpi_init(timeout_s: float) -> None:
    """Start MPI. If a rank never does, the others end here with their stacks, and the job ends with them.

    Users read this function's name in that stack. MPI_Init keeps the interpreter's lock, so only faulthandler's own
    timer can still act, and it prints the stack alone. With a limit of 0 seconds nothing ends.
    """
    if timeout_s:
        faulthandler.dump_traceback_later(timeout_s, exit=True)
    import hpczero.job.topology  # noqa: F401  (its import starts MPI)

    faulthandler.cancel_dump_traceback_later()


def offload_of(options: OffloadOptions) -> Offload:
    """What ``zeroify`` takes; not checked against a stage."""
    return Offload(**{**vars(options), "window": options.window * MIB})


def activations_of(config: RunConfig) -> Activations:
    """What is computed again, and where inputs of blocks rest; not checked against a device.

    Raises:
        ConfigError: two options ask for different things.
    """
    asked, kind = config.activations, config.activations.checkpointing
    if config.model.checkpoint_activations:
        if kind == "selective":
            raise ConfigError(
                "activations.checkpointing: got selective beside model.checkpoint_activations true, which is block; "
                "leave model.checkpoint_activations out"
            )
        kind = "block"
    folder = asked.folder or config.offload.folder
    return Activations(kind, asked.rest, folder, buffers=asked.buffers)


def mistake_of(
    config: RunConfig, model: GPTConfig | None, environment: Environment
) -> HpcZeroError | None:
    """The error that this run will end with, if it can be known by now. Not collective: rank 0 calls it.

    Other ranks may have other files, so rank 0 alone decides. A model of a factory is None, because it needs torch.
    Without a launcher that states the number of ranks, it is taken to be one.
    """
    try:
        with log.muted():  # warnings, too, are said again
            _check(config, model, environment)
    except HpcZeroError as error:
        return error
    except OSError:  # of a file system: whoever needs the file says what it means
        return None
    return None


def _check(config: RunConfig, model: GPTConfig | None, environment: Environment) -> None:
    """Make the checks of the loop, in its order. Raises their HpcZeroError."""
    size = environment.launched_ranks or 1
    nodes = config.parallel.nodes or environment.fake_nodes
    if nodes is not None:
        parse_nodes(nodes, size)
    ranks = data_ranks(config.parallel, size) * config.groups
    folder = RunFolder.of(config.run)
    folder.check()
    trackers.asked(config.log, folder.path)
    attempts = Attempts(folder, environment)
    if attempts.finished(config.train.steps):
        return
    # What the holder of the lock does there meanwhile is not known, nor what nodes hold in memory.
    at_rest = not config.checkpoint.buddy and not is_claimed(folder.checkpoints)
    if at_rest:
        config = attempts.settle(config)
        resume.check_ranks(config, folder, ranks)
    batch = Batch.resolve(config.train, ranks, exact=config.run.exact != "off")
    if model is not None:
        _check_data(config, model, batch)
    # Which device there is, is not known yet: only what is asked for by name counts.
    activations_of(config).check(on_host=config.parallel.device == "cpu")
    for algorithms in (config.parallel.algorithms, environment.algorithms):
        check_algorithms(algorithms)
    if at_rest or config.resume.from_ not in ("auto", "never"):
        leaf = batch.micro_batch if batch.leaves else None
        source = resume.choose(config.pinned(batch.global_batch, leaf), folder)
        if source is None and config.run.name != DEFAULT_RUN:  # that one makes room
            folder.refuse_older(config.run)


def data_ranks(options: LayoutOptions, size: int) -> int:
    """How many of ``size`` ranks train on different samples.

    Raises:
        ConfigError: the degrees do not divide the ranks.
    """
    mesh = Mesh.of(size, pipeline=options.pipeline, sequence=options.context, tensor=options.tensor)
    return mesh.shard  # replicas of shards have their own samples, too


def _check_data(config: RunConfig, model: GPTConfig, batch: Batch) -> None:
    """Check what one look tells. Text is not read."""
    path = config.data.path
    if path is None:
        return
    if names_sources(path):
        with Sources.open(Path(path)) as sources:
            sources.batches(model.context, batch.global_batch, config.run.seed)
        return
    if not names_token_file(config.data):
        Corpus.check_paths([Path(path)])
        return
    with TokenFile.open(Path(path)) as tokens:
        Batches(tokens.train, model.context, batch.global_batch, config.run.seed)
