"""Layouts: which ranks should share what, of all degrees that the ranks allow.

Owns: the layouts that are tried, and their order. Must not know: how bytes or seconds are counted, torch, MPI. It is
for machines that are described; nothing is measured.

Tried are tensor degrees within a node, with sequence parallelism; pipelines; shards over all ranks that are left or
over those of a node; a second shard at stage 3; ZeRO stages; every cut of the global batch; interleaving. Activations
are checkpointed where a layout does not fit otherwise. Context is not tried: it is for samples that do not fit at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hpczero.errors import ConfigError
from hpczero.job.mesh import DEGREES
from hpczero.models.config import GPTConfig
from hpczero.options.config import LayoutOptions
from hpczero.plan.degrees import check_model, mesh_of
from hpczero.plan.footprint import fastest_transport
from hpczero.plan.precision import DType
from hpczero.plan.spread import Spread
from hpczero.predict.layout import LayoutPrediction, predict_layout
from hpczero.predict.machine import Machine

ALIKE = 0.01  # of a step: layouts closer than that are told apart by their simplicity
STAGES = (0, 1, 2, 3)
STAGED = (
    1,
    3,
)  # under a pipeline: at stage 2 gradients of all micro-batches wait whole, as at stage 1
GROUPS = (1, 2, 4)  # of blocks on a stage


@dataclass(frozen=True)
class FoundLayout:
    """A layout that fits.

    Attributes:
        spread: the layout.
        options: what to type for it.
        step: its time.
    """

    spread: Spread
    options: LayoutOptions
    step: LayoutPrediction

    @property
    def needed_nbytes(self) -> int:
        """Bytes of a rank of the stage that holds most."""
        return self.spread.shares(self.spread.worst).total


def search_layouts(
    model: GPTConfig,
    machine: Machine,
    *,
    ranks: int,
    precision: str,
    global_batch: int,
    reduce: DType = "fp32",
) -> list[FoundLayout]:
    """Layouts that fit, the fastest by prediction first; of those within one percent the simplest comes first.

    Args:
        model: its context is the length of a sample.
        machine: each node is one like it.
        ranks: of the job.
        precision: name.
        global_batch: samples of a step.
        reduce: dtype of gradients' partial sums between nodes and replicas.
    """
    found = []
    for options, spread in candidates(model, machine, ranks, precision, global_batch):
        fitting = _fitting(replace(spread, reduce=reduce), machine.usable)
        if fitting is not None:
            found.append(FoundLayout(fitting, options, predict_layout(fitting, machine)))
    found.sort(key=lambda each: each.step.step_s)
    if found:
        most = found[0].step.step_s * (1 + ALIKE)
        simplest = min((each for each in found if each.step.step_s <= most), key=_simplicity)
        found.remove(simplest)
        found.insert(0, simplest)
    return found


def candidates(
    model: GPTConfig, machine: Machine, ranks: int, precision: str, global_batch: int
) -> Iterator[tuple[LayoutOptions, Spread]]:
    """Every layout that is tried, with what to type for it."""
    local = min(machine.ranks_per_node, ranks)
    for options in _degrees(model, ranks, local):
        try:
            check_model(options, model)
            mesh = mesh_of(options, ranks, local)
        except ConfigError:
            continue
        data = mesh.replicate * mesh.shard
        if options.shard == "node" and mesh.replicate == 1:
            continue  # the same as world
        if global_batch % data:
            continue
        for micro in _divisors(global_batch // data):
            times = global_batch // data // micro
            if options.interleave > 1 and times % options.pipeline:
                continue
            for stage in STAGED if mesh.pipeline > 1 else STAGES:
                if options.secondary and stage != 3:
                    continue
                spread = Spread(
                    model,
                    mesh,
                    local,
                    stage=stage,
                    precision=precision,
                    micro_batch=micro,
                    accumulation=times,
                    sequence_parallel=options.sequence,
                    secondary=options.secondary,
                    schedule=options.order,
                    interleave=options.interleave,
                )
                transport = fastest_transport(
                    spread.shards.local, spread.shards.nodes, on_host=machine.shares_memory
                )
                on_device = not machine.shares_memory
                yield options, replace(spread, transport=transport, on_device=on_device)


def _degrees(model: GPTConfig, ranks: int, local: int) -> Iterator[LayoutOptions]:
    for tensor in _divisors(local):
        for pipeline in _divisors(ranks // tensor):
            for groups in GROUPS if pipeline > 1 else (1,):
                if pipeline * groups > model.layers:
                    continue
                for shard in ("world", "node"):
                    for second in (False, True) if pipeline == 1 and shard == "world" else (False,):
                        yield LayoutOptions(
                            tensor=tensor,
                            pipeline=pipeline,
                            shard=shard,
                            sequence=tensor > 1,
                            interleave=groups,
                            secondary=second,
                        )


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _fitting(spread: Spread, room: int) -> Spread | None:
    """The layout without checkpointing, else with it; None if it does not fit either way."""
    for checkpointing in (False, True):
        tried = replace(spread, checkpointing=checkpointing)
        if tried.shares(tried.worst).total <= room:
            return tried
    return None


def _simplicity(found: FoundLayout) -> tuple[float, ...]:
    mesh, spread = found.spread.mesh, found.spread
    degrees = sum(degree > 1 for degree in (mesh.pipeline, mesh.replicate, mesh.tensor))
    return degrees, spread.secondary, spread.interleave, spread.checkpointing, found.step.step_s


def describe_layout(found: FoundLayout) -> str:
    """One line: degrees, settings, seconds, bytes."""
    spread = found.spread
    degrees = zip(DEGREES, spread.mesh.degrees, strict=True)
    said = [" x ".join(f"{name} {degree}" for name, degree in degrees if degree > 1) or "one rank"]
    said.append(f"stage {spread.stage}")
    said.append(f"micro-batch {spread.micro_batch} x {spread.accumulation}")
    said += [f"interleaved {spread.interleave}"] * (spread.interleave > 1)
    said += ["second shard"] * spread.secondary + ["checkpointed"] * spread.checkpointing
    needed = found.needed_nbytes / 1e9
    return (
        f"{', '.join(said)}: {found.step.step_s:,.3g} s, MFU {found.step.mfu:.1%}, {needed:.1f} GB"
    )


def options_of_layout(found: FoundLayout) -> str:
    """What to type for ``hpczero.train``."""
    spread = found.spread
    words = [f"--parallel.stage {spread.stage}"]
    words += [f"--parallel.{text.lower()}" for text in found.options.changed]
    words += [f"--parallel.reduce {spread.reduce}"] if spread.reduce != "fp32" else []
    words += [
        f"--train.micro_batch {spread.micro_batch} --train.accumulation {spread.accumulation}"
    ]
    words += ["--activations.checkpointing block"] * spread.checkpointing
    return " ".join(words)
