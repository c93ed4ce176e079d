"""What a training run says before its first step.

Owns: the first lines of its log. Must not know: the loop.
"""

from __future__ import annotations

from hpczero.accelerator import Accelerator
from hpczero.data import TokenFile
from hpczero.job import log
from hpczero.job.launch import warn_of_shared_devices
from hpczero.options.config import RunConfig
from hpczero.plan.batch import Batch
from hpczero.run.results.folder import RunFolder
from hpczero.zero.sharding import Sharding


def tell_header(
    sharding: Sharding,
    accelerator: Accelerator,
    tokens: TokenFile,
    config: RunConfig,
    batch: Batch,
    seq_len: int,
) -> None:
    """Log who takes part, what is sharded, what is read and what will be done. Collective over world."""
    topology = sharding.topology
    log.info("%s", topology.describe())
    log.info("device: %s", accelerator.describe())
    warn_of_shared_devices(topology, accelerator)
    log.info("transport: %s", sharding.collectives.describe())
    for line in sharding.collectives.measured():
        log.info("  %s", line)
    log.info("%s", sharding.plan.describe(sharding.collectives.footprint))
    log.info("%s", describe_data(tokens))
    log.info("%s", describe_run(config, batch, seq_len, topology.size))


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
