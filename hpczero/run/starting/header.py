"""What a training run says before its first step.

Owns: the first lines of its log. Must not know: the loop.
"""

from __future__ import annotations

from hpczero.accelerator import Accelerator
from hpczero.activations import Checkpointing
from hpczero.data import TokenFile
from hpczero.job import log
from hpczero.job.launch import warn_of_shared_devices
from hpczero.options.config import RunConfig
from hpczero.plan.batch import Batch
from hpczero.plan.offloaded import OffloadedPlan
from hpczero.run.results.folder import RunFolder
from hpczero.run.starting.offloading import activations_of, offload_of
from hpczero.zero.sharding import Sharding


def tell_header(
    sharding: Sharding,
    accelerator: Accelerator,
    tokens: TokenFile,
    config: RunConfig,
    batch: Batch,
    seq_len: int,
    checkpointing: Checkpointing | None = None,
) -> None:
    """Log who takes part, what is sharded, what is read and what will be done. Collective over world."""
    topology = sharding.topology
    log.info("%s", topology.describe())
    log.info("device: %s", accelerator.describe())
    warn_of_shared_devices(topology, accelerator)
    log.info("transport: %s", sharding.collectives.describe())
    for line in sharding.collectives.measured():
        log.info("  %s", line)
    for line in describe_plan(sharding, config):
        log.info("%s", line)
    if checkpointing is not None:
        log.info("%s", describe_activations(checkpointing, config))
    log.info("%s", describe_data(tokens))
    log.info("%s", describe_run(config, batch, seq_len, topology.size))


def describe_plan(sharding: Sharding, config: RunConfig) -> list[str]:
    """Lines about what is sharded, and where it rests, for the run header."""
    offloaded = OffloadedPlan(sharding.plan, offload_of(config.offload))
    footprint = sharding.collectives.footprint
    held = offloaded.memory(footprint)
    lines = [sharding.plan.describe(offloaded.footprint(footprint), memory=held)]
    store = sharding.away.store
    if store is not None:
        lines += [offloaded.describe(), f"  tier: {store.tier.describe()}"]
    return lines


def describe_activations(checkpointing: Checkpointing, config: RunConfig) -> str:
    """What backward computes again, and where inputs of blocks rest, for the run header."""
    asked = activations_of(config)
    if not asked.away:
        return asked.describe()
    staging = checkpointing.staging_nbytes / 2**20
    return f"{asked.describe()}: {checkpointing.describe()}, {staging:,.1f} MiB of staging"


def describe_data(tokens: TokenFile) -> str:
    """Lines about what is read, for the run header."""
    return (
        f"data: {tokens.path}: {len(tokens.train):,} training and {len(tokens.validation):,} held-out "
        f"tokens, vocabulary of {tokens.vocab_size:,}"
    )


def describe_run(config: RunConfig, batch: Batch, seq_len: int, world_size: int) -> str:
    """Lines about what is done, and where results go, for the run header."""
    return (
        f"run: {config.train.steps} steps of {batch.global_batch * seq_len:,} tokens = micro batch "
        f"{batch.micro_batch} x accumulation {batch.accumulation} x {world_size} rank(s) x {seq_len} "
        f"tokens; results in {RunFolder.of(config.run).path}"
    )
