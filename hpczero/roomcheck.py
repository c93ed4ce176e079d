"""Sizes that cannot be in this machine's memory, refused before anything is allocated.

Owns: the least that a model and a batch take, held against what the node has. Must not know: MPI, torch, what a run
really takes (``plan`` does). A number typed with three zeros too many would otherwise end in the kernel's killer.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hpczero.batch import Batch
from hpczero.errors import ConfigError
from hpczero.models import GPTConfig, parameter_count

if TYPE_CHECKING:
    from hpczero.topology import Topology

STATE_NBYTES = 12  # of a parameter, at any stage and precision: fp32 value and two moments
TOKEN_NBYTES = 16  # input and target
PAGED = 2  # nobody trains out of more swap than there is memory


def check_room(config: GPTConfig, batch: Batch, topology: Topology, device: str) -> None:
    """Refuse what cannot be. Not collective.

    Args:
        config: the model.
        batch: of the run.
        topology: of the job; its numbers of ranks are looked at.
        device: type of torch device; the state of the model is in the memory of the host where it is ``cpu``.

    Raises:
        ConfigError: names the options.
    """
    most = PAGED * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    count = parameter_count(config)
    state = STATE_NBYTES * count // topology.size * topology.local_size
    if device == "cpu" and state > most:
        raise ConfigError(
            f"model.preset, model.layers, model.hidden, model.context: {count:,} parameters and their optimizer state "
            f"take {state / 1e9:,.0f} GB of this node at least, which has {most / PAGED / 1e9:,.0f}; choose a smaller "
            "model or more nodes: `python -m hpczero.plan` says what fits"
        )
    samples = TOKEN_NBYTES * batch.micro_batch * config.context * topology.local_size
    if samples > most:
        raise ConfigError(
            f"train.global_batch, train.micro_batch, model.context: {batch.micro_batch:,} sequences of "
            f"{config.context:,} tokens per rank take {samples / 1e9:,.0f} GB of this node before any computation, "
            f"which has {most / PAGED / 1e9:,.0f}; choose a smaller micro-batch and a larger train.accumulation"
        )
