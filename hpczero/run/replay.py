"""Digests of an exact run, and the replay that compares them.

A run with ``--log.digest_every J`` writes of every J-th step: the loss of each leaf, a digest of each leaf's gradient
of each unit, the norm, and a digest of each unit's masters. None of them depends on the number of ranks. A replay
begins at a checkpoint, takes the steps again on any number of ranks, and names what is the first to differ.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import hpczero
from hpczero.accelerator import Accelerator
from hpczero.adapters.base import Adapter
from hpczero.checkpoint import load
from hpczero.checkpoint.disk.folder import Folder
from hpczero.checkpoint.disk.format import step_of_folder
from hpczero.errors import ConfigError
from hpczero.files.regular import parse_json
from hpczero.job import log
from hpczero.job.launch import start_topology, use_own_cores
from hpczero.job.messages import arrays
from hpczero.job.signals import Signals
from hpczero.kernels.norm import digest_of_bits
from hpczero.options.config import RunConfig
from hpczero.plan.degrees import mesh_on_nodes
from hpczero.plan.sizing import Batch
from hpczero.run.evaluation import passes_of
from hpczero.run.results.folder import RunFolder
from hpczero.run.results.metrics import read_metrics
from hpczero.run.setup import draw, leaf_plan
from hpczero.run.starting.building import (
    build,
    check_kind,
    check_numbers,
    made_by_factory,
    recompute_blocks,
    set_options,
)
from hpczero.run.starting.reading import open_reading
from hpczero.run.starting.room_check import RoomCheck
from hpczero.run.step import Taken, TrainingStep
from hpczero.zero.units.unit import Unit

Record = Mapping[str, Any]  # a line of digests.jsonl
WORD_NBYTES = 8
NAMED = 4  # leaves in a message


def record_of(model: nn.Module, leaves: hpczero.Leaves, *, step: int, taken: Taken) -> Record:
    """The line of a step that was just taken, on every rank. Collective over world.

    ``step`` is the number of steps done. ``leaves`` kept their digests.
    """
    state = hpczero.sharding(model)
    topology, shard = state.topology, state.topology.shard
    units = state.schedule.backward.order  # as their gradients are reduced
    counted = [leaf for leaf, turn in zip(leaves.mine, leaves.turns, strict=True) if turn.counts]
    own = np.array([[leaf, *leaves.gradients[leaf].values()] for leaf in counted], dtype=np.int64)
    rows = np.concatenate(arrays(shard, own, "digests of leaves"))
    gradients = rows[np.argsort(rows[:, 0]), 1:]
    losses = np.concatenate(arrays(shard, np.array(leaves.own_losses), "losses of leaves"))
    losses = losses[np.argsort(rows[:, 0])]
    masters = np.array([_digest_of_masters(unit, shard.index) for unit in units], dtype=np.int64)
    # Digests of shards add up, modulo 2**64.
    masters = np.sum(arrays(shard, masters, "digests of masters"), axis=0)
    names = [unit.spec.name for unit in units]
    mine = {
        "gradients": dict(zip(names, [_hex(column) for column in gradients.T], strict=True)),
        "masters": dict(zip(names, _hex(masters), strict=True)),
    }
    parts = [json.loads(text) for text in topology.model_parallel.gather_text(json.dumps(mine))]
    where = f"rank {topology.rank} on {socket.gethostname()}"
    placed = shard.gather_text(f"{_place(leaves)} {where}")
    at = dict(text.split(" ", 1) for text in placed)
    return {
        "step": step,
        "ranks": [at[str(place)] for place in range(shard.size)],
        "losses": [float(loss).hex() for loss in losses],
        "norm": taken.grad_norm.hex(),
        **{
            kind: {
                name + (f" (part {number})" if len(parts) > 1 else ""): found
                for number, part in enumerate(parts)
                for name, found in part[kind].items()
            }
            for kind in mine
        },
    }


def _place(leaves: hpczero.Leaves) -> int:
    return leaves.mine[0] - leaves.turns[0].before


def _hex(numbers: Any) -> list[str]:  # Any: an array of int64
    return [f"{int(number) % 2**64:016x}" for number in numbers]


def _digest_of_masters(unit: Unit, index: int) -> int:
    """Of what this rank owns of them."""
    layout = unit.spec.layout
    owned = layout.shard_range(index)
    with unit.rest.at_hand() as values:
        begin = owned.start if len(values) == layout.padded_numel else 0
        mine = values[begin : begin + len(owned)].detach().float()
        return int(digest_of_bits(mine, owned.start * mine.element_size() // WORD_NBYTES))


def first_difference(before: Record, now: Record) -> str:
    """What of a step is the first to differ between two records of it, in words; empty if nothing does."""
    ranks = len(before["ranks"])

    def said(leaves: Sequence[int]) -> str:
        named = ", ".join(f"{i} ({before['ranks'][i % ranks]})" for i in leaves[:NAMED])
        more = f" and {len(leaves) - NAMED} more" if len(leaves) > NAMED else ""
        return f"leaf {named}{more}"

    if len(before["losses"]) != len(now["losses"]):
        return f"{len(now['losses'])} leaves, where the run had {len(before['losses'])}"
    odd = [
        i
        for i, pair in enumerate(zip(before["losses"], now["losses"], strict=True))
        if len({*pair}) > 1
    ]
    if odd:
        return f"the loss of {said(odd)}"
    for unit, digests in now["gradients"].items():
        known = before["gradients"].get(unit, [])
        odd = [i for i, digest in enumerate(digests) if known[i : i + 1] != [digest]]
        if odd:
            return f"the gradient of unit {unit!r} of {said(odd)}"
    if before["norm"] != now["norm"]:
        return "the norm of the gradient, although the gradients of all leaves are equal: their sum was wrong"
    odd_units = [
        unit for unit, digest in now["masters"].items() if before["masters"].get(unit) != digest
    ]
    if odd_units:
        return (
            f"the masters of unit {odd_units[0]!r}, although the gradients of all leaves are equal"
        )
    return ""


def write_digests(
    folder: RunFolder, model: nn.Module, leaves: hpczero.Leaves, *, step: int, taken: Taken
) -> None:
    """Append the line of a step to digests.jsonl. Arguments as of ``record_of``. Collective over world."""
    record = record_of(model, leaves, step=step, taken=taken)
    if hpczero.sharding(model).topology.is_root:
        with folder.digests.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def read_digests(path: Path) -> dict[int, Record]:
    """Records by step; of a step that was taken twice the last one, and nothing of a line that was cut off."""
    found: dict[int, Record] = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.endswith("}"):
                record = parse_json(line)
                found[record["step"]] = record
    return found


def _begin(folder: RunFolder, config: RunConfig, step: int) -> Path | None:
    """The newest checkpoint of the run before ``step``; None: where the run began anew. Not collective."""
    found = {step_of_folder(path.name): path for path in Folder(folder.checkpoints).candidates()}
    before = [number for number in found if number is not None and number < step]
    if before:
        return found[max(before)]
    if step < 1 or config.resume.from_ not in ("auto", "never"):
        have = ", ".join(str(number) for number in sorted(filter(None, found))) or "none"
        raise ConfigError(
            f"--step: got {step}, and {folder.checkpoints} has no checkpoint before it (it has {have}); keep more of "
            "them (--checkpoint.keep), or replay a later step"
        )
    return None


def replay(
    folder: RunFolder,
    config: RunConfig,
    adapter: Adapter | None,
    accelerator: Accelerator,
    *,
    step: int,
    signals: Signals,
) -> int:
    """Take the steps up to ``step`` of a run again, and compare. Collective over MPI's world. Nothing is written.

    Args:
        folder: of the run.
        config: options of the run, with ``log.digest_every`` 1.
        adapter: as of ``loop.train``.
        accelerator: device of this rank.
        step: number of steps done at the end.
        signals: of this process; listening.

    Returns:
        0 if all is equal, 1 if something differs: it is named.

    Raises:
        HpcZeroError: of any kind, on every rank.
    """
    topology = start_topology(config.parallel.nodes, partial(mesh_on_nodes, config.parallel))
    log.configure(rank=topology.rank, node_index=topology.node_index, level=config.log.level)
    use_own_cores(topology, config.threads)
    with topology.agreed("look for what the run has recorded"):
        adapter = adapter or made_by_factory(config.model)
        source = _begin(folder, config, step)
        known = {each.step: each for each in read_metrics(folder.metrics)}
        digests = read_digests(folder.digests)
        batch = Batch.resolve(config.train, topology.data.size, exact=True)
    check_kind(adapter, topology)
    reading, adapter = open_reading(config, adapter, topology, signals=signals)
    check_numbers(adapter, topology)
    batches = reading.training(config, adapter.context, batch.global_batch)
    resumes = source is not None
    model, optimizer = build(config, adapter, topology, accelerator, resumes=resumes)
    room = RoomCheck(topology, accelerator, title=config.model.title, overridden=[])
    checkpointing = recompute_blocks(config, adapter, model, accelerator, room)
    start = 0 if source is None else load(source, model).step
    set_options(optimizer, config.train)
    passes = passes_of(
        config.parallel,
        adapter,
        model,
        accumulation=batch.accumulation,
        accelerator=accelerator,
        plan=leaf_plan(config, batch),
    )
    training = TrainingStep(
        model,
        optimizer,
        passes=passes,
        samples=draw(config, batches, batch, topology.data, None),
        accelerator=accelerator,
        clip=config.train.clip or None,
        scheduler=LambdaLR(optimizer, config.train.learning_rate_factor, last_epoch=start - 1),
        checkpointing=checkpointing,
    )
    begin, ranks = source or "the beginning", topology.size
    log.info("replay: from %s, steps %d to %d on %d rank(s)", begin, start + 1, step, ranks)
    compared, problem = 0, ""
    for done in range(start + 1, step + 1):
        taken = training.take(done - 1)
        assert passes.leaves is not None, "the run is exact"
        now = record_of(model, passes.leaves, step=done, taken=taken)
        metrics, digest = known.get(done), digests.get(done)
        found = ""
        if digest is not None:
            found = first_difference(digest, now)
            compared += 1
        if not found and metrics is not None:
            was = metrics.loss, metrics.grad_norm
            if was != (taken.loss, taken.grad_norm):
                found = f"loss and norm were {was} and are {(taken.loss, taken.grad_norm)}"
        if found:
            problem = f"step {done}: {found}"
            break
    hpczero.release(model)
    reading.close()
    topology.free()
    if problem:
        log.info("replay: differs first at %s", problem)
        return 1
    log.info(
        "replay: losses and norms of steps %d to %d are those of the run, bit for bit, and so are leaves and masters "
        "of the %d digested step(s)",
        start + 1,
        step,
        compared,
    )
    return 0
