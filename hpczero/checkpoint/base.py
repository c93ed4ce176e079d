"""Base: the frozen parameters that a checkpoint of the trained ones alone belongs to.

Owns: a number that says of each frozen parameter which values it had, and the refusal of others. Must not know: files,
how values are sharded.

The number is a sum over elements of their bits times an odd number of their place, modulo 2**64. It does not depend on
the number of ranks, the stage or the units. Values of fp32 and of bf16 count as bf16, so that a base that was rounded
for training is the same base.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from hpczero.checkpoint.disk.format import NAMED
from hpczero.checkpoint.held import HeldPieces, Piece, ValuesHome
from hpczero.checkpoint.inventory import Inventory
from hpczero.errors import CheckpointMismatch, CorruptCheckpoint
from hpczero.zero.sharding import Sharding

META = "base"  # the field of a manifest
CHUNK_NUMEL = 2**20
_SEEN_AS = {"fp32": "bf16", "bf16": "bf16", "fp16": "fp16"}
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Base:
    """The frozen parameters of one model.

    Attributes:
        held: as which numbers they were looked at; bases with another word cannot be compared.
        sums: of each frozen parameter, by its name in the whole model; 16 hexadecimal digits.
    """

    held: str
    sums: Mapping[str, str]

    @classmethod
    def of(cls, sharding: Sharding) -> Base:
        """Look at the frozen values of a model. Collective over world.

        Raises:
            CheckpointError, TierError: on every rank; parts do not make one model, or a tier cannot be read.
        """
        topology, inventory = sharding.topology, Inventory.create(sharding)
        seen = _SEEN_AS[sharding.precision.param]
        codecs = {unit.spec.codec.name for unit in sharding.units if unit.spec.codec is not None}
        held = ", ".join([seen, *sorted(codecs)])
        frozen = [row for row in inventory.table.owners if row.frozen]
        place = {row.name: index for index, row in enumerate(frozen)}
        sums = np.zeros(len(frozen), dtype=np.uint64)
        with topology.agreed("look at the frozen values"), np.errstate(over="ignore"):
            for row, piece in inventory.frozen_pieces():
                for elements, values in _chunks(piece):
                    first = elements - row.offset
                    sums[place[row.name]] += _sum(values.to(_DTYPES[seen]), first)
        with topology.watchdog.collective(
            "checkpoint: which base the trained parameters belong to"
        ):
            topology.world.comm.Allreduce(MPI.IN_PLACE, sums, op=MPI.SUM)
        names = [row.name for row in frozen]
        return cls(held, {n: f"{s:016x}" for n, s in zip(names, sums.tolist(), strict=True)})

    @classmethod
    def read(cls, meta: Mapping[str, Any], path: Path) -> Base | None:
        """What a manifest says; None of a checkpoint of all parameters.

        Raises:
            CorruptCheckpoint: it does not say it in this form.
        """
        said = meta.get(META)
        if said is None:
            return None
        if (
            not isinstance(said, dict)
            or not isinstance(said.get("held"), str)
            or not isinstance(said.get("sums"), dict)
            or not all(isinstance(value, str) for value in said["sums"].values())
        ):
            raise CorruptCheckpoint(
                f"{path}: manifest.json cannot be: meta.{META} is no object with held and sums"
            )
        return cls(said["held"], said["sums"])

    def to_json(self) -> dict[str, Any]:
        """As ``read`` reads it."""
        return {"held": self.held, "sums": dict(self.sums)}

    def check(self, found: Base, path: Path) -> bool:
        """Refuse another base than this one, of the checkpoint ``path``.

        Returns:
            Whether the two could be compared.

        Raises:
            CheckpointMismatch: the message names the first parameters that differ.
        """
        if self.sums.keys() != found.sums.keys():
            odd = sorted(self.sums.keys() ^ found.sums.keys())
            raise CheckpointMismatch(
                f"{path}: holds trained parameters alone, of a model in which other parameters were frozen: "
                f"{_some(odd)}; train the same parameters, or load a checkpoint of all parameters"
            )
        if self.held != found.held:
            return False
        odd = [name for name, value in self.sums.items() if found.sums[name] != value]
        if odd:
            raise CheckpointMismatch(
                f"{path}: holds trained parameters alone, and they belong to another base: {len(odd)} of "
                f"{len(self.sums)} frozen parameters have other values here ({_some(odd)}); load the base model "
                "first that it was trained on"
            )
        return True


def _chunks(piece: Piece) -> Iterator[tuple[np.ndarray[Any, np.dtype[np.int64]], Tensor]]:
    """Places in the file, (n,) int64, and fp32 values (n,), of some elements after the other."""
    held = HeldPieces([piece], ValuesHome())
    entry = piece.in_file
    skipped = entry.at(0) - entry.base
    before = skipped // entry.stride * entry.length + skipped % entry.stride
    for begin in range(0, piece.numel, CHUNK_NUMEL):
        end = min(begin + CHUNK_NUMEL, piece.numel)
        runs, rest = np.divmod(np.arange(begin + before, end + before), entry.length)
        yield entry.base + runs * entry.stride + rest, held[begin:end]


def _sum(values: Tensor, places: np.ndarray[Any, np.dtype[np.int64]]) -> np.uint64:
    """Of 16-bit values and their places in the parameter; modulo 2**64."""
    bits = values.contiguous().view(torch.int16).numpy().astype(np.uint64)
    weights = places.astype(np.uint64) * np.uint64(2) + np.uint64(1)
    found: np.uint64 = (bits * weights).sum(dtype=np.uint64)
    return found


def _some(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
