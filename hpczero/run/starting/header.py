"""What a training run says before its first step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree

from hpczero.accelerator import Accelerator
from hpczero.activations import Checkpointing
from hpczero.adapters.base import Adapter
from hpczero.job import log
from hpczero.job.group import Group
from hpczero.job.launch import warn_of_shared_devices
from hpczero.options.config import RunConfig
from hpczero.plan.degrees import rank_map
from hpczero.plan.memory import MemoryPlan
from hpczero.plan.offloaded import OffloadedPlan
from hpczero.plan.peak import PlannedRun
from hpczero.plan.sent import sent_by
from hpczero.plan.sizing import Batch
from hpczero.predict.machine import device_peak
from hpczero.run.results.folder import RunFolder
from hpczero.run.starting.building import compiled_modules
from hpczero.run.starting.precheck import activations_of, offload_of
from hpczero.run.starting.reading import RunData
from hpczero.zero.sharding import Sharding

BACKWARD = 2  # times the forward: gradients of inputs and of weights


def flops_per_unit(adapter: Adapter, batch: Callable[[], Sequence[Any]]) -> float:
    """FLOPs of forward and backward for one unit of the adapter, without recomputation. Not collective.

    Where the adapter does not say, torch counts the products and convolutions of one forward on the meta device.
    ``batch`` gives some samples, of which shapes and dtypes count.

    Returns:
        NaN where a forward cannot be taken without values.

    Source: of the factor: Kaplan et al., arXiv 2001.08361, sec. 2.1.
    """
    said = adapter.flops_per_token
    if said is not None:
        return said
    from torch.utils.flop_counter import FlopCounterMode

    try:
        with torch.device("meta"):
            model = adapter.build().to("meta")  # buffers, too, which may have been made elsewhere
        given = _pytree.tree_map(lambda x: torch.as_tensor(x).to("meta"), tuple(batch()))
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            adapter.loss(model, *given)
    except Exception:  # whatever a model does with values that are not there
        return math.nan
    taken: int = counter.get_total_flops()
    return (1 + BACKWARD) * taken / (len(given[0]) * adapter.context)


def peak_of(options: RunConfig, accelerator: Accelerator) -> tuple[float | None, str]:
    """Peak of this rank's device in TFLOP/s, None if it is not known, and a line about it. Not collective."""
    asked, precision = options.log.peak_tflops, str(options.parallel.precision)
    if asked is not None or accelerator.is_host:
        return asked, ""
    name = torch.cuda.get_device_name(accelerator.device)
    if precision == "fp32" and torch.get_float32_matmul_precision() != "highest":
        precision = "tf32"
    found = device_peak(name, precision)
    if found is None:
        return (
            None,
            f"MFU: none, the peak of {name!r} in {precision} is not known; give --log.peak_tflops",
        )
    return found[0] / 1e12, f"MFU: of {found[0] / 1e12:,.1f} TFLOP/s in {precision} ({found[1]})"


def tell_header(
    sharding: Sharding,
    accelerator: Accelerator,
    reading: RunData,
    config: RunConfig,
    batch: Batch,
    adapter: Adapter,
    checkpointing: Checkpointing | None = None,
    run: PlannedRun | None = None,
) -> None:
    """Log who takes part, what is sharded, what is read and what will be done. Collective over world.

    ``run`` is what the memory check has counted.
    """
    topology = sharding.topology
    part = run if run is not None and run.layout else None
    deterministic = ", deterministic operations alone" if config.parallel.deterministic else ""
    lines = [topology.describe(), *(describe_layout(part) if part else [])]
    lines += [f"device: {accelerator.describe()}{deterministic}"]
    lines += [f"transport: {sharding.collectives.describe()}"]
    lines += [f"  {line}" for line in sharding.collectives.measured()]
    lines += describe_plan(sharding, config, part, batch.leaves)
    if checkpointing is not None:
        lines += [describe_activations(checkpointing, config)]
    if compiled := compiled_modules(config, sharding.model):
        lines += [f"compiled by torch.compile in the first steps: {len(compiled)} modules"]
    told = describe_run(config, batch, adapter.context, topology.data, unit=adapter.unit)
    lines += [reading.describe(), told]
    warn_of_shared_devices(topology, accelerator)
    for line in lines:
        log.info("%s", line)


def describe_layout(part: PlannedRun) -> list[str]:
    """Lines about which rank shares what, and about the order of a pipeline, for the run header."""
    lines = rank_map(part.mesh, part.ranks_per_node)
    if part.mesh.pipeline > 1:
        lines.append(
            f"pipeline: {part.schedule}, {part.accumulation} micro batches over {part.mesh.pipeline} stages: idle "
            f"for {float(part.bubble):.0%} of the time that it works"
        )
    return lines


def describe_plan(
    sharding: Sharding,
    config: RunConfig,
    part: PlannedRun | None = None,
    leaves: int | None = None,
) -> list[str]:
    """Lines about what is sharded, and where it rests, for the run header.

    ``part``: of a model that is divided. ``leaves``: of a step, where they are summed one by one.
    """
    offloaded = OffloadedPlan(sharding.plan, offload_of(config.offload))
    footprint = replace(sharding.collectives.footprint, leaves=leaves or 0)
    named: dict[str, Any] = {"memory": planned_memory(sharding, config, part, leaves)}
    if part is not None:
        cut = sharding.plan.numel != part.whole_numel
        of = f" of {part.whole_numel:,} on rank {sharding.topology.rank}" if cut else ""
        named |= {"of": of, "sent": describe_sent(part)}
    lines = [sharding.plan.describe(offloaded.footprint(footprint), **named)]
    store = sharding.away.store
    if store is not None:
        lines += [offloaded.describe(), f"  tier: {store.tier.describe()}"]
    return lines


def planned_memory(
    sharding: Sharding, config: RunConfig, part: PlannedRun | None, leaves: int | None
) -> MemoryPlan:
    """What the plan says that a rank holds; arguments as of ``describe_plan``."""
    if part is not None:
        return part.memory
    footprint = replace(sharding.collectives.footprint, leaves=leaves or 0)
    return OffloadedPlan(sharding.plan, offload_of(config.offload)).memory(footprint)


def describe_sent(part: PlannedRun) -> str:
    """The line about what a rank sends, by what it is for."""
    sent = sent_by(part, part.place)
    names = ("shards", "replicas", "tensor", "context", "pipeline")
    shown = [*((name, getattr(sent, name)) for name in names), ("tied weights", sent.ties)]
    mib = 2**20
    parts = " + ".join(f"{name} {wire.nbytes / mib:,.1f}" for name, wire in shown if wire.nbytes)
    total = sent.total
    return (
        f"  sent per rank and step: {total.nbytes / mib:,.1f} MiB{f' = {parts}' if parts else ''}; "
        f"{total.between / mib:,.1f} of it between nodes"
    )


def describe_activations(checkpointing: Checkpointing, config: RunConfig) -> str:
    """What backward computes again, and where inputs of blocks rest, for the run header."""
    asked = activations_of(config)
    if not asked.away:
        return asked.describe()
    staging = checkpointing.staging_nbytes / 2**20
    return f"{asked.describe()}: {checkpointing.describe()}, {staging:,.1f} MiB of staging"


def describe_run(
    config: RunConfig, batch: Batch, seq_len: int, data: Group, *, unit: str = "token"
) -> str:
    """Lines about what is done, and where results go, for the run header. Ranks of ``data`` have different samples.

    A sample is ``seq_len`` of the ``unit``.
    """
    kind = "rank(s)" if data.is_job else "data parallel rank(s)"
    exact = ""
    if batch.leaves is not None:
        idle = batch.accumulation * data.size - batch.leaves
        exact = (
            f"\nexact: {batch.leaves} micro batches are summed one by one, and up to {batch.leaves} ranks give these "
            "bits" + (f"; {idle} rank(s) idle in the last forward of a step" if idle else "")
        )
    each = f" x {seq_len} {unit}s" if seq_len > 1 else ""
    if config.groups > 1:
        kind += f" x {config.groups} groups"
    folder = RunFolder.of(config.run)
    shown = f"\ncurves: tensorboard --logdir {folder.tensorboard}"
    curves = shown if config.log.tensorboard else ""
    return (
        f"run: {config.train.steps} steps of {batch.global_batch * seq_len:,} {unit}s = micro batch "
        f"{batch.micro_batch} x accumulation {batch.accumulation} x {data.size} {kind}{each}; "
        f"results in {folder.path}{exact}{curves}"
    )
