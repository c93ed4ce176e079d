"""Agreement: what of a trainer must be equal on all ranks before it begins.

Owns: what is compared, and the messages. Must not know: models, the training loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from hpczero.errors import ConfigError, DataError
from hpczero.hf.trainer.arguments import HpczeroTrainingArguments
from hpczero.job.group import unlike
from hpczero.job.messages import Exchange
from hpczero.job.topology import Topology


def check_topology(topology: Topology, args: HpczeroTrainingArguments) -> None:
    """Refuse a topology on which ranks of MPI would not each train on samples of their own. Not collective.

    Raises:
        ConfigError: it has other ranks, or degrees of a model's parts.
    """
    if (topology.size, topology.rank) != (args.world_size, args.process_index):
        raise ConfigError(
            f"topology: this is rank {topology.rank} of {topology.size}, expected {args.process_index} of "
            f"{args.world_size}: the trainer works on all ranks of MPI's world"
        )
    if topology.data.size != topology.size:
        raise ConfigError(
            f"topology: {topology.data.size} of {topology.size} ranks train on samples of their own, expected all; "
            "leave tensor, sequence and pipeline degrees out of the mesh"
        )


def check_equal(
    exchange: Exchange, args: HpczeroTrainingArguments, positional: Any, named: Mapping[str, Any]
) -> None:
    """Refuse ranks whose arguments or data sets differ. Collective over the world.

    Args:
        exchange: of the ranks.
        args: of this rank.
        positional: of the trainer, behind its arguments.
        named: of the trainer.

    Raises:
        ConfigError: arguments differ; on every rank.
        DataError: lengths of data sets differ; on every rank.
    """
    topology = exchange.topology
    found = unlike(topology.world, args.lines())
    with topology.agreed("compare the arguments of the trainer"):
        if found is not None:
            raise ConfigError(
                f"args: rank {topology.rank} has {found[0]}, and rank 0 {found[1]}; make them equal on all ranks (a "
                "folder named after the time is made once, and broadcast)"
            )
    lengths = {}
    for name, value in (*enumerate(positional), *named.items()):
        if name in (1, "train_dataset", 2, "eval_dataset"):
            with suppress(TypeError, NotImplementedError):
                lengths[str(name)] = len(value)
    everywhere = exchange.objects(lengths, "compare the lengths of data sets")
    odd = next((rank for rank, other in enumerate(everywhere) if other != everywhere[0]), None)
    if odd is not None:
        error = DataError(
            f"data sets: rank {odd} has lengths {everywhere[odd]}, and rank 0 {everywhere[0]}; give every rank the "
            "same data set: each takes its own part of it"
        )
        error.agreed = True
        raise error
