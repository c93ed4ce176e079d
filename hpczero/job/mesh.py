"""Mesh: how many ranks share what, as degrees whose product is the number of ranks.

Ranks count up through the degrees like digits, ``tensor`` the fastest. Ranks that exchange most then have neighbouring
numbers, and lie on one node. ``replicate`` and ``shard`` together are data parallelism: their ranks train on different
samples.

Source: the order of torchtitan's ``ParallelDims`` (arXiv 2410.06511, sec. 2) and of Megatron-LM (arXiv 2104.04473, sec.
3): tensor parallelism inside a node, pipeline parallelism farthest apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from hpczero.errors import ConfigError

# Slowest first.
DEGREES = ("pipeline", "replicate", "shard", "sequence", "tensor")
DATA = ("replicate", "shard")
# Ranks that share the tokens of a sample hold the same parameters, so these are sharded over them too.
SHARD = ("shard", "sequence")
DATA_SEQUENCE = (*DATA, "sequence")
MODEL = ("pipeline", "tensor")


@dataclass(frozen=True)
class Mesh:
    """The degrees of one job; all 1 is a single rank.

    Attributes:
        pipeline: stages of consecutive layers.
        replicate: copies of everything that is sharded.
        shard: ranks that share parameters, gradients and optimizer state.
        sequence: ranks that share the tokens of a sample.
        tensor: ranks that share each layer's products.
    """

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    sequence: int = 1
    tensor: int = 1

    @classmethod
    def of(
        cls,
        size: int,
        *,
        shard: int | None = None,
        pipeline: int = 1,
        replicate: int = 1,
        sequence: int = 1,
        tensor: int = 1,
    ) -> Mesh:
        """The mesh of ``size`` ranks. Without a degree for ``shard`` it takes what the others leave.

        Raises:
            ConfigError: a degree is below 1, or their product is not ``size``; the message names every degree.
        """
        others = pipeline * replicate * sequence * tensor
        left = size // others if shard is None and others > 0 else shard
        mesh = cls(pipeline, replicate, left or 0, sequence, tensor)
        if min(mesh.degrees) < 1 or mesh.size != size:
            named = " x ".join(
                f"{name} {'(what is left)' if name == 'shard' and shard is None else degree}"
                for name, degree in zip(DEGREES, mesh.degrees, strict=True)
            )
            product = others if shard is None else prod(mesh.degrees)
            what = "a divisor" if shard is None else "the number"
            raise ConfigError(
                f"got {named} = {product}, expected {what} of the ranks, which are {size}; change a degree or start "
                "another number of ranks"
            )
        return mesh

    @property
    def degrees(self) -> tuple[int, ...]:
        """The degrees in the order of ``DEGREES``."""
        return (self.pipeline, self.replicate, self.shard, self.sequence, self.tensor)

    @property
    def size(self) -> int:
        """Number of ranks: the product of the degrees."""
        return prod(self.degrees)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Place of ``rank`` in each degree, in the order of ``DEGREES``."""
        found = []
        for degree in reversed(self.degrees):
            rank, place = divmod(rank, degree)
            found.append(place)
        return tuple(reversed(found))

    def members(self, rank: int, *names: str) -> tuple[int, ...]:
        """Ranks, in rising order, that differ from ``rank`` in no degree but these."""
        mine = self.coordinates(rank)
        fixed = [i for i, name in enumerate(DEGREES) if name not in names]
        places = ((other, self.coordinates(other)) for other in range(self.size))
        return tuple(other for other, place in places if all(place[i] == mine[i] for i in fixed))
