"""Persistent buffers of a whole model, of which pipeline stages have some each.

Owns: which there are, and which rank saves them. Must not know: files, values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from hpczero.checkpoint.disk.format import plain_name
from hpczero.errors import CheckpointError
from hpczero.job.topology import Topology
from hpczero.plan.placement import part_of
from hpczero.zero.sharding import Sharding


@dataclass(frozen=True)
class Kept:
    """One persistent buffer.

    Attributes:
        name: its first one in the model.
        names: all of them, at several places of the model.
        dtype: torch's name of it.
        shape: of it.
        stage: the first pipeline stage that has it.
    """

    name: str
    names: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    stage: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return prod(self.shape) * int(getattr(torch, self.dtype).itemsize)


def buffers_of(sharding: Sharding) -> list[Kept]:
    """Of all stages, in the order of the whole model, each once. Collective over world where there are stages.

    Raises:
        CheckpointError: on every rank: two stages have one of a name with other shapes or dtypes.
    """
    topology = sharding.topology
    own = _own(sharding, topology.pipeline.rank)
    if topology.pipeline.size == 1:
        return own
    with topology.watchdog.collective("checkpoint: buffers of all stages"):
        stages = topology.pipeline.comm.allgather(own)
    with topology.agreed("put the buffers of all stages together"):
        part = part_of(sharding.model)
        return _merged(stages, [plain_name(name) for name in part.names] if part else ())


def named_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers of a model, each once, by the names that a checkpoint has of them."""
    return {plain_name(name): buffer for name, buffer in model.named_buffers()}


def speaks_for(topology: Topology, kept: Kept) -> bool:
    """Whether this rank saves a buffer: it is the first of the stage."""
    stage, *others = topology.mesh.coordinates(topology.rank)
    return stage == kept.stage and not any(others)


def _own(sharding: Sharding, stage: int) -> list[Kept]:
    known = {id(buffer) for buffer in sharding.buffers}
    names: dict[int, list[str]] = {}
    for name, buffer in sharding.model.named_buffers(remove_duplicate=False):
        if id(buffer) in known:
            names.setdefault(id(buffer), []).append(plain_name(name))
    return [
        Kept(
            name,
            tuple(names[id(buffer)]),
            str(buffer.dtype).removeprefix("torch."),
            tuple(buffer.shape),
            stage,
        )
        for name, buffer in named_buffers(sharding.model).items()
        if id(buffer) in known
    ]


def _merged(stages: Sequence[Sequence[Kept]], names: Sequence[str]) -> list[Kept]:
    """Each once, where its module's parameters come in ``names``: a stage may have blocks 0 and 2.

    Raises:
        CheckpointError: two stages have one of a name with other shapes or dtypes.
    """
    first: dict[str, int] = {}  # parameter of a module and what is in it
    for index, name in enumerate(names):
        for prefix in _prefixes(name):
            first.setdefault(prefix, index)
    found: dict[str, tuple[int, Kept]] = {}
    for stage in stages:
        at = 0  # its own order is that of the whole model
        for kept in stage:
            at = max(at, next((first[p] for p in _prefixes(kept.name) if p in first), 0))
            _, before = found.setdefault(kept.name, (at, kept))
            if (before.dtype, before.shape) != (kept.dtype, kept.shape):
                raise CheckpointError(
                    f"buffer {kept.name!r} is {kept.dtype} {kept.shape} on stage {kept.stage}, and {before.dtype} "
                    f"{before.shape} on stage {before.stage}; give buffers of stages other names, or the same form"
                )
    return [kept for _, kept in sorted(found.values(), key=lambda pair: pair[0])]


def _prefixes(name: str) -> list[str]:
    """Modules that ``name`` is in, the innermost first."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts) - 1, -1, -1)]
