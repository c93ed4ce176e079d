"""What would fit instead: the same training with other options, on the same ranks or on more.

Every alternative is tried on the machine's figures; none is said to fit by a rule of thumb.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice

from hpczero.errors import PlanError
from hpczero.plan.footprint import Named, fastest_transport
from hpczero.plan.offload import Activations, Offload
from hpczero.plan.peak import PlannedRun
from hpczero.plan.sizing import largest


def command_line(run: PlannedRun, title: str, *, memory_nbytes: int | None = None) -> str:
    """The command that shows the whole table for ``run``.

    Args:
        run: run of a job.
        title: the preset that the model began as.
        memory_nbytes: bytes that a rank may have; None leaves a number to be filled in.
    """
    memory = "GB_OF_A_RANK" if memory_nbytes is None else _size(memory_nbytes)
    model = run.model
    words = ["python -m hpczero.plan", f"--memory {memory}", f"--ranks {run.ranks}"]
    words += [f"--ranks-per-node {run.ranks_per_node}"] * (run.ranks % run.ranks_per_node == 0)
    words += [f"--transport {run.transport}", f"--model {shlex.quote(title)}"]
    words += [f"--layers {model.layers}", f"--hidden {model.hidden}", f"--vocab {model.vocab_size}"]
    words += [f"--positions {model.positions}", f"--sequence {run.length}"]
    words += [f"--precision {run.precision}", f"--micro-batch {run.micro_batch}"]
    words += [f"--reduce {run.reduce}"] * (run.reduce != "fp32")
    words += [f"--accumulation {run.accumulation}"] * (run.accumulation > 1)
    if run.layout:
        words += [f"--parallel.{text.lower()}" for text in run.layout.changed]
    return " ".join(words)


def _size(nbytes: int) -> str:
    """A size rounded down, so that what is said to fit does fit."""
    unit, scale = ("GB", 10**9) if nbytes >= 10**9 else ("MB", 10**6)
    return f"{max(math.floor(nbytes / scale * 10) / 10, 0.1):g}{unit}"


Fits = Callable[[PlannedRun], bool]
MOST_ANSWERS = 4
MOST_NODES = 2**13
FOLDER = "FOLDER"  # one on a disk of each node, which nobody but the user knows
MOST_TRIED = 64  # numbers of nodes beyond the fewest that memory asks for: the batch must divide over the ranks


@dataclass(frozen=True)
class Alternative:
    """Something that fits.

    Attributes:
        run: the run that fits.
        words: part of a sentence: what differs, then the options to type.
    """

    run: PlannedRun
    words: str


def alternatives(run: PlannedRun, fits: Fits, *, cores: int) -> list[Alternative]:
    """Runs that fit, nearest first: one thing changed, then several, then the fewest ranks.

    Args:
        run: what does not fit.
        fits: whether a run fits the machine; for more nodes than there are, as if all were alike.
        cores: cores of this node. More ranks than that are not advised.
    """
    single = [
        _other_stage(run),
        _smaller_micro_batches(run),
        _checkpointed(run),
        _inputs_on_disk(run),
        _other_transport(run),
        _offloaded(run),
    ]
    found = [hit for options in single if (hit := next(filter(fits, options), None))]
    if not found:
        hit = next(filter(fits, chain(_several(run), _several_offloaded(run))), None)
        found = [hit] if hit else []
    more = _more_ranks(run, fits, cores)
    found += [more] if more else []
    return [Alternative(hit, describe(run, hit)) for hit in islice(found, MOST_ANSWERS)]


def on_these_ranks(run: PlannedRun, fits: Fits) -> Alternative | None:
    """``run`` if it fits, else the nearest run that fits on the same ranks, in words; None if none does."""
    hit = next(filter(fits, chain([run], _several(run))), None)
    return Alternative(hit, describe(run, hit)) if hit else None


def describe(run: PlannedRun, other: PlannedRun) -> str:
    """``other`` in words, with the options by which it differs from ``run``."""
    words, options, here = [], [], run.ranks // run.ranks_per_node
    if other.stage != run.stage or other.ranks != run.ranks:
        words.append(f"stage {other.stage}")
        if other.stage != run.stage:
            options.append(f"--parallel.stage {other.stage}")
    if other.ranks != run.ranks:
        nodes = other.ranks // other.ranks_per_node
        many = f" ({nodes} nodes of {other.ranks_per_node} like this one)" if nodes > 1 else ""
        words[-1] += (
            f" on {other.ranks} ranks{many if other.ranks // other.ranks_per_node > here else ''}"
        )
    batch = (other.micro_batch, other.accumulation, other.global_batch)
    if batch != (run.micro_batch, run.accumulation, run.global_batch):
        words.append(f"micro-batch {other.micro_batch}")
        options.append(f"--train.micro_batch {other.micro_batch}")
        if other.global_batch == run.global_batch:
            options.append(f"--train.accumulation {other.accumulation}")
        else:
            options.append(f"--train.global_batch {other.global_batch}")
    if run.laid_out and other.ranks != run.ranks:
        options.append(
            f"--parallel.nodes {other.ranks // other.ranks_per_node}x{other.ranks_per_node}"
        )
    if other.kept != run.kept:
        words.append("activation checkpointing with inputs of blocks on disk")
        options += ["--activations.checkpointing block", "--activations.rest disk"]
        options.append(f"--activations.folder {other.kept.folder}")
    elif other.checkpointing and not run.checkpointing:
        words.append("activation checkpointing")
        options.append("--model.checkpoint_activations true")
    if other.transport not in (run.transport, "window") and run.transport != "flat":
        words.append(f"transport {other.transport}")
        options.append(f"--parallel.transport {other.transport}")
    if other.offload != run.offload:
        words.append("what rests on disk")
        options += [*other.offload.typed, f"--offload.folder {other.offload.folder}"]
    typed = f" ({' '.join(options)})" if options else ""
    return f"{', '.join(words)}{typed}"


def _other_stage(run: PlannedRun) -> Iterator[PlannedRun]:
    for stage in range(4):
        if stage != run.stage:
            yield dataclasses.replace(run, stage=stage)


def _smaller_micro_batches(run: PlannedRun) -> Iterator[PlannedRun]:
    """The same global batch in more forwards, with the largest micro batch first."""
    mine = run.micro_batch * run.accumulation
    for micro in range(min(run.micro_batch - 1, 4096), 0, -1):
        if mine % micro == 0:
            yield dataclasses.replace(run, micro_batch=micro, accumulation=mine // micro)


def _checkpointed(run: PlannedRun) -> Iterator[PlannedRun]:
    if not run.checkpointing:
        yield dataclasses.replace(run, checkpointing=True)


def _inputs_on_disk(run: PlannedRun) -> Iterator[PlannedRun]:
    if run.kept.away:
        return
    kept = Activations("block", "disk", run.offload.folder or FOLDER)
    with suppress(PlanError):  # it may save nothing
        kept.check_saves(inputs=run.model.layers, input_nbytes=run.input_nbytes)
        yield dataclasses.replace(run, checkpointing=True, kept=kept)


def _other_transport(run: PlannedRun) -> Iterator[PlannedRun]:
    if run.transport == "window":
        several = run.carriers is not None or run.ranks > run.ranks_per_node
        yield dataclasses.replace(run, transport="hierarchical" if several else "flat")


def _offloaded(run: PlannedRun) -> Iterator[PlannedRun]:
    """All that a stage can have elsewhere, on disk; a host's memory is what was short."""
    if run.stage and not run.offload.any:
        on_disk = Offload("disk", "disk", "disk" if run.stage == 3 else "device", FOLDER)
        yield dataclasses.replace(run, offload=on_disk)


def _several_offloaded(run: PlannedRun) -> Iterator[PlannedRun]:
    """Stage 3 with everything on disk: last, because a step then takes as long as the disk."""
    for checkpointing in sorted({run.checkpointing, True}):
        based = dataclasses.replace(run, checkpointing=checkpointing, stage=3)
        for offloaded in _offloaded(based):
            yield offloaded
            yield from _smaller_micro_batches(offloaded)


def _several(run: PlannedRun) -> Iterator[PlannedRun]:
    """Two and three changes at once: stages, then micro batches, without and with checkpointing."""
    for checkpointing in sorted({run.checkpointing, True}):
        for stage in (run.stage, *(s for s in range(4) if s != run.stage)):
            based = dataclasses.replace(run, checkpointing=checkpointing, stage=stage)
            yield based
            yield from _smaller_micro_batches(based)


def _more_ranks(run: PlannedRun, fits: Fits, cores: int) -> PlannedRun | None:
    """The fewest ranks on which the run fits: more on each node as far as it has cores, else more nodes like it."""
    # Stage 0: as much on every rank.
    stages = [run.stage] * (run.stage > 0) + [3] * (run.stage != 3)
    for checkpointing in sorted({run.checkpointing, True}):
        for stage in stages:
            changed = dataclasses.replace(run, stage=stage, checkpointing=checkpointing)
            hit = next(filter(fits, _crowded(changed, cores)), None) or _fewest_nodes(changed, fits)
            if hit is not None:
                return hit
    return None


def _crowded(run: PlannedRun, cores: int) -> Iterator[PlannedRun]:
    """More ranks on each of the same nodes: each process holds less, and the node hardly more."""
    nodes, local = run.ranks // run.ranks_per_node, 2 * run.ranks_per_node
    while local <= cores and run.transport != "ipc":
        transport = fastest_transport(local, nodes) if run.ranks_per_node == 1 else run.transport
        more = dataclasses.replace(run.on(nodes * local, local), transport=transport)
        yield from _batches(more, run.global_batch)
        local *= 2


def _fewest_nodes(run: PlannedRun, fits: Fits) -> PlannedRun | None:
    here = run.ranks // run.ranks_per_node
    transports: tuple[Named, ...] = (run.transport, "hierarchical")
    for transport in dict.fromkeys(each for each in transports if each != "flat"):
        based = dataclasses.replace(run, transport=transport)
        enough = here  # on far more ranks than a model has use for, padding takes the room
        while enough < MOST_NODES and not fits(_smallest(based, enough)):
            enough *= 2
        if enough >= MOST_NODES and not fits(_smallest(based, enough)):
            continue
        fewer = largest(lambda nodes, b=based: not fits(_smallest(b, nodes)), enough - 1)  # type: ignore[misc]
        for nodes in range(max(fewer, here) + 1, fewer + MOST_TRIED):
            hit = next(filter(fits, _batches(_on(based, nodes), run.global_batch)), None)
            if hit is not None:
                return hit
    return None


def _on(run: PlannedRun, nodes: int) -> PlannedRun:
    return run.on(nodes * run.ranks_per_node, run.ranks_per_node)


def _smallest(run: PlannedRun, nodes: int) -> PlannedRun:
    return dataclasses.replace(_on(run, nodes), micro_batch=1, accumulation=1)


def _batches(run: PlannedRun, global_batch: int) -> Iterator[PlannedRun]:
    """The global batch over other ranks, in as few forwards as possible.

    If it is too small, each rank has one sample.
    """
    if run.ranks > global_batch:
        yield dataclasses.replace(run, micro_batch=1, accumulation=1)
    elif global_batch % run.ranks == 0:
        mine = global_batch // run.ranks
        whole = dataclasses.replace(run, micro_batch=mine, accumulation=1)
        yield whole
        yield from _smaller_micro_batches(whole)
